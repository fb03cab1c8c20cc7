"""The one seam between kvdoctor and a host: every file, command and system call of the collectors goes through here.

Three kinds of host look the same from above. *Live*: the machine this runs on. *Root*: its file tree bind-mounted somewhere
(`--root /host`), no command is run. *Capture*: a directory with `root/` (files), `cmd/` (KEY.out, .err, .rc, .hang for
commands, KEY.json for system calls) and `case.json` ({case, context, kv_path, env}); nothing of this machine is looked at.

Symbolic links are followed inside the root, as chroot would. Every read is bounded in size and by the deadline, and only
regular files are opened: a tree from elsewhere may hold a FIFO, which would block, or a device, which opening can set off. A
file that exists and cannot be read is remembered in `denied`, because "may not look" and "is not there" lead to different
verdicts. With a `Recorder` set, all
that is read is written down in the layout of a capture: that is how `kvdoctor capture` works, and why a capture judged
elsewhere gives the same report.

Commands run on threads of their own from `start` on, so a slow one costs nothing until its answer is needed.
"""

import contextlib
import errno
import gzip
import itertools
import json
import os
import re
import stat
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from kvdoctor.collect import tools
from kvdoctor.facts import ToolRun
from kvdoctor.parse.versions import decimal
from kvtools.segments.files import SHM

MAX_READ = 4 << 20
MAX_LINKS = 40
MAX_LINE = 1 << 16
MAX_NAMES = 100_000
"""Entries of one folder that are looked at; the kernel's own have far fewer."""
ASK_S = 4.0
"""How long a system call of ours may take: reading the arguments of a process stuck in a driver may never return."""
RESOLVE_S = 2.0
"""How long following the links of one KV path may take: a dead network mount never answers."""
NOWHERE = "/.no-such-file"
"""What a path stands for that cannot be: links in a circle, or a name no file can have. Never the link itself: opening that
would follow it out of a capture's root."""
MOUNTS = "/proc/self/mountinfo"
LOST = "LOST"
"""Why a path of `denied` could not be read: its capture once held it."""
NOT_UNDERSTOOD = "EBADMSG"
"""The same of a file that holds no such thing as it should."""
SELF = ("/proc/self", "/proc/thread-self")
"""Links that mean this process: kept as they are written, so that a capture can be read by another."""


class Recorder(Protocol):
    """Takes down what a source reads (see `kvdoctor.capture`)."""

    def file(self, path: str, data: bytes) -> None: ...
    def link(self, path: str, target: str) -> None: ...
    def folder(self, path: str) -> None: ...
    def denied(self, path: str, reason: str) -> None: ...
    def tool(self, run: ToolRun) -> None: ...
    def value(self, key: str, value: Any) -> None: ...
    def command_file(self, name: str, text: str) -> None: ...


def open_regular(path: str | Path, *, follow: bool = True) -> BinaryIO:
    """Open a regular file for reading. Raises OSError, ENOTSUP for anything else that is there, without having opened it.

    With `follow=False` a link is something else, too.
    """
    if not stat.S_ISREG(os.stat(path, follow_symlinks=follow).st_mode):  # noqa: PTH116
        folder = os.path.isdir(path)  # noqa: PTH112
        raise OSError(errno.EISDIR if folder else errno.ENOTSUP, "not a regular file", str(path))
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return os.fdopen(handle, "rb")
    os.close(handle)  # it was exchanged between the two looks
    raise OSError(errno.ENOTSUP, "not a regular file", str(path))


class Source:
    """A host to look at. `commands` is a capture's cmd/ folder; None means commands and system calls are real."""

    def __init__(
        self,
        root: str | Path = "/",
        *,
        commands: Path | None = None,
        complete: bool = False,
        denied: dict[str, str] | None = None,
        lost: Collection[str] = (),
        run_tools: bool = True,
        deadline_s: float = 20.0,
        tool_deadline_s: float = 5.0,
        recorder: Recorder | None = None,
        clock: Callable[[], float] = time.monotonic,
        shm: Path | None = None,
    ) -> None:
        self.root = "" if str(root) == "/" else str(root).rstrip("/")
        # What this process's environment says of segments says nothing of another host's.
        self.shm = str(shm or (SHM if commands is None and not self.root else "/dev/shm"))  # noqa: S108 - the folder that is read
        """The folder of the host in which segments lie."""
        self.commands = commands
        self.live = commands is None
        self.foreign = self.live and bool(self.root)
        """Whether the files are another host's: then this process's limits, environment and privileges are not about it."""
        self.run_tools = run_tools and self.live
        self.whole = self.live or complete
        """Whether what is not there was really not there: a hand-made capture proves nothing by what it lacks."""
        self.recorder = recorder
        self.denied: dict[str, str] = dict(denied or {})
        self.lost = frozenset(lost)
        """Paths of a capture that its own list names and that are gone: neither "not there" nor readable."""
        self._bereft = frozenset(path.rpartition("/")[0] or "/" for path in self.lost)
        self.runs: dict[str, ToolRun] = {}
        self._tool_deadline_s = tool_deadline_s
        self._clock = clock
        self._end = clock() + deadline_s
        self._threads: dict[str, threading.Thread] = {}
        self._links: dict[str, str | None] = {}
        self.looking_at = ""
        """The file or folder that was asked for last: where a look that does not return is stuck."""

    def remaining(self) -> float:
        """Seconds left of the whole run's deadline, never negative."""
        return max(0.0, self._end - self._clock())

    # Files

    def real(self, path: str) -> str:
        """`path` with every symbolic link followed inside the root; what does not exist is kept as written."""
        if "\0" in path:
            return NOWHERE
        todo = [part for part in path.split("/") if part]
        done: list[str] = []
        followed = 0
        while todo:
            part = todo.pop(0)
            if part == ".":
                continue
            if part == "..":
                if done:
                    done.pop()
                continue
            here = "/" + "/".join([*done, part])
            target = self._link(here)
            if target is None:
                done.append(part)
                continue
            followed += 1
            if followed > MAX_LINKS:
                return NOWHERE
            todo = [piece for piece in target.split("/") if piece] + todo
            if target.startswith("/"):
                done = []
        return "/" + "/".join(done)

    def _link(self, path: str) -> str | None:
        if path in SELF:
            return None
        if path not in self._links:
            try:
                self._links[path] = os.readlink(self.root + path)  # noqa: PTH115 - the hot path of every run
                if self.recorder:
                    self.recorder.link(path, self._links[path] or "")
            except OSError:
                self._links[path] = None
        return self._links[path]

    def host_path(self, path: str) -> str:
        """Where `path` of the host lies on this machine."""
        self.looking_at = self.root + path
        return self.root + self.real(path)

    def real_in_time(self, path: str) -> str:
        """`real` of a path that may lie on a mount that never answers: as it is written where that takes too long."""
        if not self.live:
            return self.real(path)
        found: list[str] = []
        thread = threading.Thread(target=lambda: found.append(self.real(path)), name="links of a KV path", daemon=True)
        thread.start()
        thread.join(min(RESOLVE_S, self.remaining()))
        return found[0] if found else path

    def _open(self, path: str) -> BinaryIO:
        """A file of the host. Raises OSError, also for one that is not what the capture once held."""
        place = self.host_path(path)
        if self.lost and self.real(path) in self.lost:
            raise FileNotFoundError(errno.ENOENT, "gone from the capture", path)
        return open_regular(place)

    def read_bytes(self, path: str, limit: int = MAX_READ, *, record: bool = True) -> bytes | None:
        """Up to `limit` bytes of a file, or None; a refusal is remembered in `denied`."""
        try:
            with self._open(path) as file:
                data = file.read(limit)
        except OSError as error:
            self.refused(path, error)
            return None
        if self.recorder and record:
            self.recorder.file(self.real(path), data)
        return data

    def read(self, path: str, limit: int = MAX_READ) -> str | None:
        """A text file, or None. Bytes that are not UTF-8 are kept visible, never an error."""
        data = self.read_bytes(path, limit)
        return None if data is None else data.decode("utf-8", "replace")

    def word(self, path: str) -> str | None:
        """The first line of a small file, blanks stripped: most of sysfs."""
        data = self.read(path, 4096)
        return None if data is None else data.split("\n", 1)[0].strip()

    def one_of(self, path: str, known: Collection[str]) -> str | None:
        """The word in a file that can only hold one of `known`, or None; one that holds another counts as not readable."""
        text = self.word(path)
        if text is None or text in known:
            return text
        self.denied[path] = NOT_UNDERSTOOD
        return None

    def is_bare(self, path: str) -> bool:
        """Whether a folder shows nothing: empty, or not to be looked into."""
        try:
            with os.scandir(self.host_path(path)) as entries:
                return next(entries, None) is None
        except OSError:
            return True

    def number(self, path: str) -> int | None:
        """A decimal or 0x number in a file, or None; one that holds something else counts as not readable."""
        text = self.word(path)
        value = None if text is None else decimal(text)
        if text and value is None:
            self.denied[path] = NOT_UNDERSTOOD
        return value

    def matching(self, path: str, needles: Iterable[str], *, shape: str = "") -> list[str] | None:
        """Lines of a (possibly gzip'ed) file that hold one of `needles`; None where it cannot be read, is empty, or where its
        first line does not begin as `shape` says.

        The file is streamed, so that 8 MB of kallsyms cost no memory; a capture keeps just these lines.
        """
        wanted = [needle.encode() for needle in needles]
        found: list[bytes] = []
        first = b""
        try:
            with self._open(path) as raw:
                packed = path.endswith(".gz")
                stream = gzip.GzipFile(fileobj=raw) if packed else raw
                rest = b""
                while block := self._in_time(stream.read(1 << 20)):
                    block = rest[-MAX_LINE:] + block
                    cut = block.rfind(b"\n") + 1
                    rest, block = block[cut:], block[:cut]
                    first = first or block[:200].split(b"\n", 1)[0]
                    if any(needle in block for needle in wanted):
                        found += [line for line in block.split(b"\n") if any(needle in line for needle in wanted)]
                if any(needle in rest for needle in wanted):
                    found.append(rest)
                first = first or rest[:200]
        except (OSError, EOFError, zlib.error) as error:
            self.refused(path, error)
            return None
        if not first:
            return None
        if shape and not re.match(shape, first.decode("utf-8", "replace")):
            self.denied[path] = NOT_UNDERSTOOD
            return None
        if self.recorder:
            kept = found if first in found else [first, *found]
            self.recorder.file(self.real(path).replace("config.gz", "config.txt"), b"\n".join(kept) + b"\n")
        return [line.decode("utf-8", "replace") for line in found]

    def _in_time(self, block: bytes) -> bytes:
        """`block`, while there is time. Raises TimeoutError: half a search is no answer."""
        if block and not self.remaining():
            raise TimeoutError(errno.ETIMEDOUT, "the deadline passed while searching")
        return block

    def contains(self, path: str, needle: bytes) -> bool | None:
        """Whether a (large) file holds `needle`; None where it cannot be read."""
        try:
            with self._open(path) as file:
                tail = b""
                found = False
                while block := self._in_time(file.read(1 << 20)):
                    if needle in tail + block:
                        found = True
                        break
                    tail = block[-len(needle) :]
        except OSError as error:
            self.refused(path, error)
            return None
        if self.recorder:
            self.recorder.file(self.real(path), needle if found else b"(searched, not found)")
        return found

    def names(self, path: str, pattern: str = "") -> list[str]:
        """Sorted names in a folder, empty where there is none; those that match `pattern` whole, where it is given.

        Only these are recorded: what else lies in /opt or among an interpreter's packages is nobody's business.
        """
        try:
            with os.scandir(self.host_path(path)) as entries:
                found = sorted(entry.name for entry in itertools.islice(entries, MAX_NAMES))
        except OSError as error:
            self.refused(path, error)
            return []
        if self._bereft and self.real(path) in self._bereft:
            self.denied[path] = LOST
        if pattern:
            wanted = re.compile(pattern)
            found = [name for name in found if wanted.fullmatch(name)]
        if self.recorder:
            for name in found:
                self._note(f"{self.real(path).rstrip('/')}/{name}")
        return found

    def _note(self, path: str) -> None:
        """Record that `path` is there: a link with its target, a folder, or an empty file until it is read."""
        assert self.recorder
        if self._link(path) is not None:
            return
        if os.path.isdir(self.root + path):  # noqa: PTH112 - False, and no error, for a name no file can have
            self.recorder.folder(path)
        else:
            self.recorder.file(path, b"")

    def exists(self, path: str) -> bool:
        """Whether `path` is there, links followed inside the root."""
        there = os.path.lexists(self.host_path(path))
        if there and self.recorder:
            self._note(self.real(path))
        return there or self._gone(path)

    def _gone(self, path: str) -> bool:
        """False; and where the capture once held `path`, that is noted."""
        if self.lost and self.real(path) in self.lost:
            self.denied[path] = LOST
        return False

    def is_folder(self, path: str) -> bool:
        there = os.path.isdir(self.host_path(path))  # noqa: PTH112
        if there and self.recorder:
            self.recorder.folder(self.real(path))
        return there or self._gone(path)

    def refused(self, path: str, error: Exception) -> None:
        number = getattr(error, "errno", None)
        if self.lost and self.real(path) in self.lost:
            self.denied[path] = LOST
        if number in (None, errno.ENOENT, errno.ENOTDIR, errno.ENODEV, errno.EISDIR):
            return
        self.denied[path] = errno.errorcode.get(number, str(number))
        if self.recorder:
            self.recorder.denied(path, self.denied[path])

    def mount_table(self) -> str:
        """mountinfo of the host: below a foreign root that of its first process, because "self" is still this one."""
        text = self.read("/proc/1/mountinfo") if self.live and self.root else None
        return text or self.read(MOUNTS) or ""

    # Commands and system calls

    def start(self, key: str, argv: list[str], *, deadline_s: float | None = None) -> None:
        """Begin a command; its answer is fetched with `answer`. In a capture, and below a foreign root, nothing is run."""
        if not self.run_tools or key in self._threads:
            return
        limit = min(deadline_s or self._tool_deadline_s, self.remaining())
        thread = threading.Thread(target=self._run, args=(key, argv, limit), name=f"tool {key}", daemon=True)
        self._threads[key] = thread
        thread.start()

    def _run(self, key: str, argv: list[str], limit: float) -> None:
        self.runs[key] = tools.run(key, argv, limit)

    def answer(self, key: str, *, record: bool = True) -> ToolRun | None:
        """What a command printed, or None where it was not run (or is not in the capture)."""
        if not self.live:
            known = self._recorded(key)
            if known and self.recorder and record:
                self.recorder.tool(known)
            return known
        thread = self._threads.get(key)
        if thread is None:
            return None
        # The thread ends by itself at its own deadline; this bound only guards against a bug there.
        thread.join(self.remaining() + tools.GRACE_S + 1.0)
        run = self.runs.get(key) or ToolRun(key=key, state="abandoned")
        if self.recorder and record:
            self.recorder.tool(run)
        return run

    def _recorded(self, key: str) -> ToolRun | None:
        assert self.commands is not None
        if key in self.runs:
            return self.runs[key]
        parts = {suffix: self._command_file(f"{key}.{suffix}") for suffix in ("out", "err", "rc", "hang")}
        if all(part is None for part in parts.values()):
            return None
        run = ToolRun(key=key, out=parts["out"] or "", err=parts["err"] or "")
        if parts["hang"] is not None:
            run.state = "abandoned" if "state D" in parts["hang"] or "abandoned" in parts["hang"] else "hung"
        with contextlib.suppress(ValueError):
            run.rc = int((parts["rc"] or "0").strip() or "0")
        run.state = "missing" if run.rc == 127 and run.state == "ok" else run.state
        self.runs[key] = run
        return run

    def _command_file(self, name: str) -> str | None:
        assert self.commands is not None
        if f"cmd/{name}" in self.lost:
            self.denied[f"cmd/{name}"] = LOST
            return None
        try:
            # A link in somebody else's capture may point at a file of this machine.
            with open_regular(self.commands / name, follow=False) as file:
                return file.read(MAX_READ).decode("utf-8", "replace")
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EPERM, errno.EIO):
                self.denied[f"cmd/{name}"] = errno.errorcode[error.errno]
            return None

    def captured(self, name: str) -> str | None:
        """A file of a capture's cmd/ folder by its whole name (lspci-acs.out, engine.log); None on a live host."""
        text = None if self.live else self._command_file(name)
        if text is not None and self.recorder:
            self.recorder.command_file(name, text)
        return text

    def command_texts(self, pattern: str) -> dict[str, str]:
        """Files of a capture's cmd/ folder whose names match `pattern`, name -> text; nothing on a live host."""
        if self.commands is None or not self.commands.is_dir():
            return {}
        try:
            names = sorted(path.name for path in self.commands.iterdir() if re.search(pattern, path.name))
        except OSError as error:
            self.denied["cmd"] = errno.errorcode.get(error.errno or 0, "EIO")
            return {}
        return {name: text for name in names if (text := self.captured(name)) is not None}

    def value(self, key: str, ask: Callable[[], Any]) -> Any:
        """The answer of a system call as a JSON value: `ask()` on this machine, KEY.json in a capture, None where neither."""
        if not self.live:
            text = self._command_file(f"{key}.json")
            try:
                known = None if text is None else json.loads(text)
            except (ValueError, RecursionError):
                return None
            if known is not None and self.recorder:
                self.recorder.value(key, known)
            return known
        try:
            found = self._ask(key, ask)
        except OSError as error:
            self.refused(f"({key})", error)
            return None
        if self.recorder:
            self.recorder.value(key, found)
        return found

    def _ask(self, key: str, ask: Callable[[], Any]) -> Any:
        """`ask()` on a thread that is left behind where it does not end. Raises TimeoutError then, and what `ask` raises."""
        found: list[Any] = []
        failed: list[OSError] = []

        def run() -> None:
            try:
                found.append(ask())
            except OSError as error:
                failed.append(error)

        thread = threading.Thread(target=run, name=f"asking for {key}", daemon=True)
        thread.start()
        thread.join(min(ASK_S, self.remaining()))
        if failed:
            raise failed[0]
        if not found:
            raise TimeoutError(errno.ETIMEDOUT, f"no answer about {key}")
        return found[0]
