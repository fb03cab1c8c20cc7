"""Recordings, the writing half: what `--record` writes (RECORDING.md is the format, byte by byte; kvtop.recording reads it).

    Snapshot -> builtins -> leaves -> what changed -> deflate, sync flush -> one record a tick     Writer <- Recorder

Why differences by leaf: a snapshot is mostly what it was a second ago, and a general compressor's window does not reach back
over one of 100 segments. Why a flush a record: a recording is what one wants after a crash, kvtop's own included.

Failure cases: a disk that takes no more raises OSError out of `Writer.write`, and the next record begins a new stream, so that what
follows can be read. A file that somebody removes, moves, cuts or writes into meanwhile is noticed at the next record and begun
anew (`Writer.taken` says what happened). `Recorder` turns that into words (head line, alert, the line at the end), counts what is
lost and tries again: a disk that is full at night has room in the morning. Concurrency: a Writer belongs to one thread; a
Recorder is called by the reader's thread, read and closed by another.
"""

import os
import stat
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import msgspec

from kvtools.errors import KvError, Refused, TimedOut, UsageError
from kvtools.output import printable
from kvtools.segments.files import flock
from kvtools.units import format_size
from kvtop.alerts import WARN, Alert
from kvtop.snapshot import Snapshot

# On disk: do not change.
MAGIC = b"KVTREC\r\n"
VERSION = 1
FILE_HEADER = struct.Struct("<8sHHI")
RECORD = struct.Struct("<IIBd")
KEY, DIFFERENCE = ord("K"), ord("D")

KEY_EVERY = 300
_MILLI = 1000

TAKEN_S = 60.0
"""How long an alert says that a recording had to be begun anew."""

RETRY_S = 5.0
"""How long a Recorder leaves a disk alone that did not take the last reading."""


class Taken(NamedTuple):
    """What somebody did to a file while it was recorded to."""

    what: str
    """'removed', for '... was removed'."""
    lost: int
    """Readings that went with it, at least."""


class Writer:
    """Appends snapshots to a file, rotating it. Raises Refused when the file is something else, or being recorded to."""

    def __init__(self, path: Path, *, max_bytes: int = 64 << 20) -> None:
        self.path = path
        self.max_bytes = max_bytes
        self.written = 0
        self.taken: Taken | None = None
        """What the last `write` found that somebody had done to the file; None when nothing."""
        self._here = 0
        self._fd = -1
        self._size = 0
        self._since_key = KEY_EVERY
        self._leaves: list[Any] = []
        self._names: list[str] = []
        self._packer = msgspec.msgpack.Encoder()
        self._deflate = zlib.compressobj(9)
        self._open()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _open(self) -> None:
        import fcntl

        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._fd = os.open(self.path, flags, 0o600)
        except IsADirectoryError:
            raise UsageError(f"{self.path} is no file", hint="name a file to record to") from None
        try:
            if not stat.S_ISREG(os.fstat(self._fd).st_mode):
                raise UsageError(f"{self.path} is no file", hint="name a file to record to")
            try:
                flock(self._fd, fcntl.LOCK_EX, what=f"recording {self.path}", timeout_s=0.0)
            except TimedOut:
                raise TimedOut(f"{_holder(self._fd)} records to {self.path} already", hint="name another file") from None
            self._size = os.fstat(self._fd).st_size
            self._here = 0
            if self._size == 0:
                self._write(FILE_HEADER.pack(MAGIC, VERSION, 0, 0))
            elif os.pread(self._fd, len(MAGIC), 0) != MAGIC:
                raise Refused(f"{self.path} exists and is not a recording", hint="name another file to record to")
        except BaseException:
            self.close()
            raise
        # Appending to an older recording: a key record starts this session's stream.
        self._since_key = KEY_EVERY

    def close(self) -> None:
        """Close the file; a second call does nothing. Raises OSError where a file system says only now that it is full (NFS)."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    @property
    def size(self) -> int:
        """Bytes in the current file."""
        return self._size

    def write(self, snapshot: Snapshot) -> None:
        """Append one snapshot. Raises OSError or KvError when the file cannot take it; a later call may succeed again."""
        tree = msgspec.to_builtins(snapshot)
        self.taken = None
        try:
            if self._fd >= 0:
                self._look_after()
            if self._fd < 0:
                self._open()
            if self._size >= self.max_bytes // 2:
                self._rotate()
            try:
                self._take(tree, snapshot.time_s)
            except UnicodeEncodeError:  # anybody may put a name that is no UTF-8 into shared memory
                self._take(_encodable(tree), snapshot.time_s)
        except BaseException:
            self._since_key = KEY_EVERY  # what the file lacks would be missing from the stream: begin a new one
            raise

    def _look_after(self) -> None:
        """Whether the file is still the one that the last record went to."""
        mine = os.fstat(self._fd)
        if not stat.S_ISREG(mine.st_mode):
            return  # a device has no length and loses no name
        try:
            there = os.lstat(self.path)
        except FileNotFoundError:
            there = None
        if there is None or (there.st_dev, there.st_ino) != (mine.st_dev, mine.st_ino):
            # With a name elsewhere (mv, logrotate) its readings can still be shown.
            self.taken = Taken("moved away", 0) if mine.st_nlink else Taken("removed", self._here)
            self.close()
        elif mine.st_size < FILE_HEADER.size:
            self.taken = Taken("emptied", self._here)
            os.ftruncate(self._fd, 0)
            self._size = self._here = 0
            self._write(FILE_HEADER.pack(MAGIC, VERSION, 0, 0))
            self._since_key = KEY_EVERY
        elif mine.st_size != self._size:
            cut = mine.st_size < self._size
            self.taken = Taken("cut", 1) if cut else Taken("written into by somebody else", 0)
            self._size = mine.st_size
            self._since_key = KEY_EVERY

    def _take(self, tree: Any, time_s: float) -> None:
        names: list[str] = []
        leaves: list[Any] = []
        flatten(tree, names, leaves, "")
        if self._since_key >= KEY_EVERY or names != self._names:
            self._deflate = zlib.compressobj(9)
            self._append(KEY, time_s, self._packer.encode(tree))
            self._since_key = 0
        else:
            self._append(DIFFERENCE, time_s, self._packer.encode(difference(self._leaves, leaves)))
            self._since_key += 1
        self._names, self._leaves = names, leaves

    def _append(self, kind: int, time_s: float, content: bytes) -> None:
        payload = self._deflate.compress(content) + self._deflate.flush(zlib.Z_SYNC_FLUSH)
        check = zlib.crc32(payload, zlib.crc32(struct.pack("<Bd", kind, time_s)))
        self._write(RECORD.pack(len(payload), check, kind, time_s) + payload)
        self.written += 1
        self._here += 1

    def _write(self, data: bytes) -> None:
        # One write a record, as far as the disk has room: a kill cannot leave two torn ones.
        done = 0
        try:
            while done < len(data):
                done += os.write(self._fd, memoryview(data)[done:])
        except OSError:
            if done:
                os.ftruncate(self._fd, self._size)
            raise
        self._size += done

    def _rotate(self) -> None:
        self.close()
        self.path.rename(self.path.with_name(self.path.name + ".1"))
        self._open()


def _holder(fd: int) -> str:
    """Who holds the flock on `fd`, as far as the kernel tells."""
    inode = str(os.fstat(fd).st_ino)
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        lines = []
    for words in map(str.split, lines):
        # 12: FLOCK  ADVISORY  WRITE 4711 08:01:131 0 EOF; a pid of another namespace is 0
        if words[1:2] == ["FLOCK"] and len(words) > 5 and words[5].rpartition(":")[2] == inode and words[4].isdigit():
            return f"process {words[4]}" if int(words[4]) else "another process"
    return "another process"


class Recorder:
    """What the reader's thread hands each snapshot to: writes it, and where it cannot, says so instead of raising."""

    def __init__(self, writer: Writer, *, mono: Callable[[], float] = time.monotonic) -> None:
        self.problem = ""
        """Why nothing is recorded now; empty when all is well."""
        self.lost = 0
        """Readings that were not recorded, over the whole life."""
        self._writer = writer
        self._mono = mono
        self._lock = threading.Lock()
        self._closed = False
        self._readings = 0
        self._again = 0.0
        self._first_lost_s = 0.0
        self._since_s = 0.0
        self._missed = 0
        self._reason = ""
        self._taken = ""
        self._taken_until = 0.0
        self.notes: list[str] = []
        """What happened to the file, a line each, for who looks at no screen."""

    def __call__(self, snapshot: Snapshot) -> None:
        with self._lock:
            if self._closed:
                return
            self._readings += 1
            if self.problem and self._mono() < self._again:
                self._miss(snapshot.time_s)
                return
            try:
                self._writer.write(snapshot)
                self.problem = ""
                self._missed = 0
                if (taken := self._writer.taken) is not None:
                    self._tell(taken, snapshot.time_s)
            except Exception as error:  # noqa: BLE001 - the reading's edge: whatever it is, it is told, and the next one is tried
                self.problem = self._reason = _why(error)
                self._again = self._mono() + RETRY_S
                self._miss(snapshot.time_s)
                if (taken := self._writer.taken) is not None:
                    self._tell(taken, snapshot.time_s)

    def _tell(self, taken: Taken, time_s: float) -> None:
        many = f", {taken.lost} reading{'s' * (taken.lost != 1)} went with it" if taken.lost else ""
        self._taken = f"{self._writer.path} was {taken.what} at {_clock(time_s)}{many}; recorded anew since then"
        self._taken_until = self._mono() + TAKEN_S
        self.notes.append(self._taken)
        if taken.lost:
            self.lost += taken.lost
            self._first_lost_s = self._first_lost_s or time_s
            self._reason = f"it was {taken.what} while it was recorded to"

    def _miss(self, time_s: float) -> None:
        self._first_lost_s = self._first_lost_s or time_s
        self._since_s = time_s if not self._missed else self._since_s
        self._missed += 1
        self.lost += 1

    def words(self) -> str:
        """For the head line, while all is well."""
        return f"REC {format_size(self._writer.size)}"

    def alerts(self) -> list[Alert]:
        """What the dashboard has to say while nothing is recorded."""
        if not self.problem:
            return [Alert(WARN, "recording", self._taken)] if self._mono() < self._taken_until else []
        many = f"{self._missed} reading{'s' * (self._missed != 1)}"
        return [Alert(WARN, "recording", f"nothing recorded since {_clock(self._since_s)} ({many}): {self.problem}")]

    def verdict(self) -> KvError | None:
        """At the end: what the recording lacks. None when it is whole."""
        if not self.lost:
            return None
        many = f"{self.lost} of {self._readings} readings" if self._readings > 1 else "the reading"
        verb = "was" if self._readings == 1 else "were"
        since = f", the first at {_clock(self._first_lost_s)}" if self._readings > 1 else ""
        return KvError(
            f"{many} {verb} not recorded to {self._writer.path}{since}: {self._reason}",
            hint="free some room there, or record elsewhere; what is in the file can be replayed",
        )

    def close(self) -> None:
        """Close the file; a reading that is still on its way is left out. A second call does nothing."""
        with self._lock:
            self._closed = True
            try:
                self._writer.close()
            except OSError as error:
                self._reason = _why(error)
                self._miss(time.time())


def _why(error: Exception) -> str:
    if isinstance(error, KvError):
        return error.message
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return f"a reading could not be written ({type(error).__name__}: {printable(str(error))})"


def _clock(time_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(time_s))


def _encodable(tree: Any) -> Any:
    """The same tree, with bytes that are no UTF-8 written as \\xNN."""
    if isinstance(tree, dict):
        return {_encodable(key): _encodable(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_encodable(value) for value in tree]
    if not isinstance(tree, str):
        return tree
    try:
        return tree.encode(errors="surrogateescape").decode(errors="backslashreplace")
    except UnicodeEncodeError:  # half a character that stands for no byte either
        return tree.encode(errors="backslashreplace").decode()


def flatten(tree: Any, names: list[str], leaves: list[Any], name: str) -> None:
    """All leaves of a tree of maps and lists, depth first, with their names; floats to three decimals."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            flatten(value, names, leaves, f"{name}.{key}")
    elif isinstance(tree, (list, tuple)):
        names.append(f"{name}#{len(tree)}")
        leaves.append(None)
        for index, value in enumerate(tree):
            flatten(value, names, leaves, f"{name}.{index}")
    else:
        names.append(name)
        leaves.append(round(tree, 3) if isinstance(tree, float) else tree)


def difference(old: list[Any], new: list[Any]) -> list[list[Any]]:
    """How `new` differs from `old`, as RECORDING.md says."""
    places: list[int] = []
    changes: list[Any] = []
    last = -1
    for place, (before, after) in enumerate(zip(old, new, strict=True)):
        if before == after and type(before) is type(after):
            continue
        places.append(place - last)
        last = place
        changes.append(_change(before, after))
    return [places, changes]


def _change(before: Any, after: Any) -> Any:
    if type(before) is int and type(after) is int and abs(after - before) < 1 << 63:
        return after - before
    if type(before) is float and type(after) is float:
        step = (after - before) * _MILLI
        if abs(step) < 1 << 52 and _moved(before, round(step)) == after:
            return round(step)
    return [after]


def _moved(value: float, thousandths: int) -> float:
    return round(value + thousandths / _MILLI, 3)


def apply(leaves: list[Any], changed: list[list[Any]]) -> None:
    """Change `leaves` by a difference."""
    place = -1
    for distance, change in zip(changed[0], changed[1], strict=True):
        place += distance
        if isinstance(change, list):
            leaves[place] = change[0]
        elif isinstance(leaves[place], float):
            leaves[place] = _moved(leaves[place], change)
        else:
            leaves[place] += change


def rebuild(tree: Any, leaves: Iterator[Any]) -> Any:
    """A tree of the same shape with other leaves."""
    if isinstance(tree, dict):
        return {key: rebuild(value, leaves) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        next(leaves)
        return [rebuild(value, leaves) for value in tree]
    return next(leaves)
