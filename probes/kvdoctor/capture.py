"""Write a host as a capture: a directory with root/, cmd/ and case.json that `kvdoctor --from` judges anywhere alike.

The collectors run as always, over a source whose recorder takes down everything they read; nothing else is copied, so a
capture is small (kallsyms and the kernel log shrink to the lines that matter) and holds no file that no check looks at.
Environment and arguments of engines are kept only where they decide about caching. Redacted, each file is reduced to what a
rule reads (`private`) and names become stand-ins (`redact`). `case.json` says `complete: true`: what such a capture lacks, the
host lacked; `index.json` lists what it holds, so that what went missing later is noticed.

All of it is put together in memory and written by a child (`collect/capture_writer.py`) with a deadline: the destination may
lie on a file system that never answers, and a process that waits for one can neither be killed nor exit.
"""

import datetime as dt
import getpass
import json
import os
import pwd
import re
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvdoctor.collect import tools
from kvdoctor.collect.capture_writer import OCCUPIED
from kvdoctor.collect.holdings import INDEX, INDEX_SCHEMA
from kvdoctor.facts import Facts, ToolRun
from kvdoctor.private import Keeper, mount_points
from kvdoctor.redact import Redactor
from kvtools.errors import KvError, TimedOut, UsageError, hint_for

KEPT_ARGUMENT = re.compile(
    r"^(--(no-)?enable-prefix-caching|--prefix-caching-hash-algo|--kv-transfer-config|--tensor-parallel-size|--long-path"
    r"|--long-bytes|--max-bytes|--block-size)(=|$)"
)
COMMAND_WORD = re.compile(r"(^|/)(vllm|kvd|python3?(\.\d+)?|sglang|lmcache_server)$|^(serve|-m|kvd|VLLM::EngineCore.*)$")


class Recording:
    """What a collection read, in memory until it is written (`kvdoctor.collect.source.Recorder`)."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.links: dict[str, str] = {}
        self.folders: set[str] = set()
        self.refused: dict[str, str] = {}
        self.commands: dict[str, str] = {}

    def file(self, path: str, data: bytes) -> None:
        if data or path not in self.files:
            self.files[path] = data

    def link(self, path: str, target: str) -> None:
        self.links[path] = target

    def folder(self, path: str) -> None:
        self.folders.add(path)

    def denied(self, path: str, reason: str) -> None:
        self.refused[path] = reason

    def command_file(self, name: str, text: str) -> None:
        self.commands[name] = text

    def tool(self, run: ToolRun) -> None:
        if run.state in ("hung", "abandoned"):
            self.commands[f"{run.key}.hang"] = f"{run.state} after {run.seconds:.1f} s, state {run.proc_state}, in {run.wchan}\n"
            return
        for suffix in ("err", "rc", "hang"):
            self.commands.pop(f"{run.key}.{suffix}", None)
        self.commands[f"{run.key}.out"] = run.out
        if run.err:
            self.commands[f"{run.key}.err"] = run.err
        if run.rc or run.state == "missing":
            self.commands[f"{run.key}.rc"] = f"{run.rc or 127}\n"

    def value(self, key: str, value: Any) -> None:
        self.commands[f"{key}.json"] = json.dumps(_reduced(value) if key == "processes" else value, indent=1) + "\n"


def _reduced(value: Any) -> Any:
    """Processes with only those arguments that a rule looks at: model names and keys stay at home."""
    if not isinstance(value, dict):
        return value
    return {kind: [{**item, "args": kept_arguments(item.get("args") or [])} for item in items] for kind, items in value.items()}


def kept_arguments(args: Sequence[str]) -> list[str]:
    """The words of a command line that say what program it is and how it caches."""
    kept = []
    for i, word in enumerate(args):
        if KEPT_ARGUMENT.match(word):
            name, equals, _ = word.partition("=")
            private = name == "--kv-transfer-config"
            kept.append(f"{name}={{}}" if private and equals else word)
            if not equals and not name.startswith(("--no-", "--enable")) and i + 1 < len(args) and not args[i + 1].startswith("--"):
                kept.append("{}" if private else args[i + 1])
        elif COMMAND_WORD.search(word) and i < 4:
            kept.append(word)
    return kept


Entry = tuple[str, str, bytes]
"""A path below the capture, its kind (folder, link, file), and a link's target or a file's bytes."""


def write_capture(recording: Recording, facts: Facts, folder: Path, *, redact: bool, deadline_s: float = 20.0) -> None:
    """Write `recording` into `folder`, which must not exist or be empty; all of it or nothing.

    Raises UsageError where something is there, TimedOut where the file system does not answer within `deadline_s`, KvError.
    """
    try:
        folder = Path(os.path.abspath(folder))  # noqa: PTH100 - as it was typed: no link is followed
    except OSError:
        raise UsageError(f"{folder}: the current directory is gone", hint="name it from / on, or cd elsewhere") from None
    packed = pack(entries(recording, facts, redact=redact))
    script = str(Path(__file__).with_name("collect") / "capture_writer.py")
    # A file without a name: whatever becomes of either process, nothing of it stays.
    handle = os.memfd_create("kvdoctor-capture", os.MFD_CLOEXEC)
    try:
        _write_all(handle, packed)
        os.lseek(handle, 0, os.SEEK_SET)
        run = tools.run("capture", [sys.executable, "-I", "-S", script, str(folder)], deadline_s, stdin=handle, polite=True)
    finally:
        os.close(handle)
    if run.state in ("hung", "abandoned"):
        where = f" (pid {run.pid}, state {run.proc_state}, in {run.wchan})" if run.state == "abandoned" else ""
        raise TimedOut(
            f"{folder} does not take the capture within {run.seconds:.0f} s{where}",
            hint="the file system there is frozen or its server does not answer: name a directory elsewhere",
        )
    if run.state == "ok" and run.rc == 0:
        return
    if run.rc == OCCUPIED:
        raise UsageError(run.err.strip(), hint="name a new directory: a capture is never mixed with another")
    number, _, why = run.err.strip().rpartition("\n")[2].partition(" ")
    error = OSError(int(number) if number.isdecimal() else 0, why or f"the writer ended with {run.rc}")
    hint = hint_for(error, "name a directory that you may write")
    raise KvError(f"cannot write {folder}: {error.strerror}", hint=hint)


def _write_all(handle: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]


def pack(found: Sequence[Entry]) -> bytes:
    """Entries as lines of JSON {path, kind, bytes}, each followed by that many bytes: what the writer reads."""
    parts = []
    for path, kind, data in found:
        parts += [json.dumps([path, kind, len(data)]).encode() + b"\n", data]
    return b"".join(parts)


def _private_names(facts: Facts) -> tuple[set[str], set[str]]:
    """Names of this host and of people on it: accounts that are somebody's, homes, and whoever runs this."""
    hosts = {name for name in (facts.environment.hostname, socket.gethostname()) if name}
    users = {name for name in (os.environ.get(key, "") for key in ("SUDO_USER", "USER", "LOGNAME")) if name}
    try:
        users.add(getpass.getuser())
    except (KeyError, OSError):
        pass  # a uid without a name, as in many containers
    users |= {person.pw_name for person in pwd.getpwall() if 1000 <= person.pw_uid < 60000}
    return hosts, users


def entries(recording: Recording, facts: Facts, *, redact: bool) -> list[Entry]:
    """Everything a capture of `recording` is made of, its index included."""
    keeper: Keeper | None = None
    if redact:
        points = [path.mount.point for path in facts.paths if path.mount]
        keeper = Keeper(Redactor(*_private_names(facts)), mount_points(points, [path.path for path in facts.paths]))
    shown = keeper.path if keeper else str
    tree: dict[str, tuple[str, bytes]] = {}
    withheld: dict[str, str] = {}
    for path in recording.folders:
        if path != "/" and path not in recording.links:
            tree[_placed(path, keeper)] = ("folder", b"")
    for path, target in recording.links.items():
        tree[_placed(path, keeper)] = ("link", os.fsencode(target if _system(path) else shown(target)))
    for path, data in recording.files.items():
        place = _placed(path, keeper)
        if path in recording.folders or tree.get(place, ("", b""))[0] == "folder":
            continue
        kept = keeper.file(path, data) if keeper else data
        if kept is None:
            withheld[shown(path)] = "REDACTED"
        elif data and not kept and "/modprobe.d/" in path:
            continue  # options of other modules: not even the file's name is asked for
        else:
            tree[place] = ("file", kept)
    commands = {name: keeper.command(name, text) if keeper else text for name, text in recording.commands.items()}
    answers = {name: text.encode("utf-8", "surrogateescape") for name, text in commands.items() if text is not None}
    refused = {shown(path): reason for path, reason in recording.refused.items()}
    case = _case(facts, keeper, {**refused, **withheld})
    index = {
        "schema": INDEX_SCHEMA,
        "root": {path: len(data) if kind == "file" else kind for path, (kind, data) in sorted(tree.items())},
        "cmd": {name: len(data) for name, data in sorted(answers.items())},
    }
    return [
        ("root", "folder", b""),
        ("cmd", "folder", b""),
        *((f"root{path}", kind, data) for path, (kind, data) in sorted(tree.items())),
        *((f"cmd/{name}", "file", data) for name, data in sorted(answers.items())),
        (INDEX, "file", json.dumps(index, indent=0).encode() + b"\n"),
        ("case.json", "file", json.dumps(case, indent=1).encode() + b"\n"),
    ]


def _system(path: str) -> bool:
    return path.startswith(("/sys/", "/proc/"))


def _placed(path: str, keeper: Keeper | None) -> str:
    """Where a path of the host lies below root/. What was read came from `Source.real`, which holds no '..'."""
    if keeper is None:
        return path
    if path.startswith("/sys/fs/cgroup/"):
        return "/sys/fs/cgroup/" + keeper.group(path.removeprefix("/sys/fs/cgroup/"))
    return keeper.path(path)


def _case(facts: Facts, keeper: Keeper | None, refused: dict[str, str]) -> dict[str, Any]:
    paths = [keeper.path(path.path) if keeper else path.path for path in facts.paths]
    return {
        "case": (keeper.redactor.free(facts.case) if keeper else facts.case) or ("host1" if keeper else facts.environment.hostname),
        "context": "container-root" if facts.environment.in_container else "host-root",
        "kv_path": paths[0] if paths else "",
        "kv_paths": paths,
        "env": keeper.environ(facts.env) if keeper else dict(facts.env),
        "complete": not facts.partial,
        "foreign": facts.foreign,
        "denied": dict(sorted(refused.items())),
        "captured": {"at": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"), "redacted": keeper is not None},
    }
