"""Recordings: what `--record` writes and `--replay` reads (RECORDING.md is the format, byte by byte).

    Snapshot -> builtins -> leaves -> what changed -> deflate, sync flush -> one record a tick     Writer
    record -> inflate -> leaves -> builtins -> Snapshot                                            Recording

Why differences by leaf: a snapshot is mostly what it was a second ago, and a general compressor's window does not reach back
over one of 100 segments. Why a flush a record: a recording is what one wants after a crash, kvtop's own included.

Failure cases: a file that is no recording is UsageError, one of a newer version too; a torn tail is left out; a damaged
record loses the rest of its stream, and `Recording.damaged` counts such places. A writer that meets ENOSPC raises OSError; the
caller stops recording and says so. Concurrency: a Writer and a Recording belong to one thread each.
"""

import math
import os
import stat
import struct
import zlib
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from kvtools.errors import KvError, NotFound, Refused, UsageError
from kvtools.segments.files import flock
from kvtools.units import format_size
from kvtop.snapshot import Snapshot, finite

# On disk: do not change.
MAGIC = b"KVTREC\r\n"
VERSION = 1
FILE_HEADER = struct.Struct("<8sHHI")
RECORD = struct.Struct("<IIBd")
KEY, DIFFERENCE = ord("K"), ord("D")

KEY_EVERY = 300
_MAX_PAYLOAD = 64 << 20
_MILLI = 1000
_BROKEN = (zlib.error, msgspec.MsgspecError, LookupError, TypeError, ValueError, StopIteration, AttributeError, RecursionError)
"""What decoding a file that lies about itself may raise."""


class Writer:
    """Appends snapshots to a file, rotating it. Raises Refused when the file is something else, or being recorded to."""

    def __init__(self, path: Path, *, max_bytes: int = 64 << 20) -> None:
        self.path = path
        self.max_bytes = max_bytes
        self.written = 0
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
        self._fd = os.open(self.path, flags, 0o600)
        try:
            if not stat.S_ISREG(os.fstat(self._fd).st_mode):
                raise UsageError(f"{self.path} is no file", hint="name a file to record to")
            flock(self._fd, fcntl.LOCK_EX, what=f"recording {self.path}", timeout_s=0.0)
            self._size = os.fstat(self._fd).st_size
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
        """Close the file; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @property
    def size(self) -> int:
        """Bytes in the current file."""
        return self._size

    def write(self, snapshot: Snapshot) -> None:
        """Append one snapshot. Raises OSError when the file cannot take it."""
        if self._size >= self.max_bytes // 2:
            self._rotate()
        tree = msgspec.to_builtins(snapshot)
        try:
            self._take(tree, snapshot.time_s)
        except UnicodeEncodeError:  # anybody may put a name that is no UTF-8 into shared memory
            self._take(_encodable(tree), snapshot.time_s)

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

    def _write(self, data: bytes) -> None:
        # One write a record: a kill cannot leave two torn ones.
        done = os.write(self._fd, data)
        self._size += done
        if done < len(data):
            os.ftruncate(self._fd, self._size - done)
            raise OSError(28, "no space left for the recording", str(self.path))

    def _rotate(self) -> None:
        self.close()
        self.path.rename(self.path.with_name(self.path.name + ".1"))
        self._open()


class Recorder:
    """What the reader's thread hands each snapshot to: writes it, and after an error stops and says so instead of raising."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self.problem = ""

    def __call__(self, snapshot: Snapshot) -> None:
        if self.problem:
            return
        try:
            self._writer.write(snapshot)
        except (OSError, KvError) as error:
            self.problem = f"recording stopped: {error}"
            self._writer.close()

    def words(self) -> str:
        """For the head line."""
        return self.problem or f"REC {format_size(self._writer.size)}"

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


def _encodable(tree: Any) -> Any:
    """The same tree, with bytes that are no UTF-8 written as \\xNN."""
    if isinstance(tree, dict):
        return {_encodable(key): _encodable(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_encodable(value) for value in tree]
    return tree.encode(errors="surrogateescape").decode(errors="backslashreplace") if isinstance(tree, str) else tree


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


class Recording:
    """A recording as a sequence of snapshots: `len`, `times`, `at(i)`. FILE.1, when it is there, comes first."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.times: list[float] = []
        self.damaged = 0
        self._where: list[tuple[int, int, int]] = []
        """File number, offset of the record, index of its key record."""
        self._files: list[int] = []
        self._state = -1
        self._tree: Any = None
        self._leaves: list[Any] = []
        self._inflate = zlib.decompressobj()
        self._unpack = msgspec.msgpack.Decoder()
        older = path.with_name(path.name + ".1")
        try:
            for one in ([older] if older.exists() else []) + [path]:
                self._index(one)
        except BaseException:
            self.close()
            raise
        if not self.times:
            self.close()
            raise UsageError(f"recording {path} holds no reading", hint="record for a moment longer")

    def __len__(self) -> int:
        return len(self.times)

    def close(self) -> None:
        """Close the files."""
        for fd in self._files:
            os.close(fd)
        self._files.clear()

    def _index(self, path: Path) -> None:
        try:
            # Without O_NONBLOCK a FIFO would wait here for a writer.
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            raise NotFound(f"no recording {path}", hint="kvtop --record FILE makes one") from None
        except OSError as error:
            raise KvError(f"cannot read recording {path}: {error.strerror}") from None
        self._files.append(fd)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise UsageError(f"{path} is no file, and so no recording of kvtop", hint="kvtop --record FILE makes one")
        head = os.pread(fd, FILE_HEADER.size, 0)
        if len(head) < FILE_HEADER.size or not head.startswith(MAGIC):
            raise UsageError(f"{path} is not a recording of kvtop", hint="kvtop --record FILE makes one")
        version = FILE_HEADER.unpack(head)[1]
        if version > VERSION:
            raise UsageError(
                f"recording {path} is of version {version}, this kvtop reads up to {VERSION}", hint="use a newer kvtop"
            )
        number, key = len(self._files) - 1, -1
        for offset, kind, time_s, sound in _records(fd):
            if not sound:
                self.damaged += 1
                key = -1
            elif kind == KEY or key >= 0:
                key = len(self.times) if kind == KEY else key
                self._where.append((number, offset, key))
                self.times.append(time_s)

    def at(self, index: int) -> Snapshot:
        """Snapshot `index`. Reading on from the one before costs one record, anything else starts at a key record."""
        key = self._where[index][2]
        begin = self._state + 1 if key <= self._state < index else key
        try:
            for place in range(begin, index + 1):
                self._step(place)
            return _finite(msgspec.convert(rebuild(self._tree, iter(self._leaves)), Snapshot, strict=False))
        except _BROKEN as error:
            self._state = -1
            raise UsageError(
                f"recording {self.path} cannot be read at reading {index} ({type(error).__name__})",
                hint="it was changed, or made by something else",
            ) from None

    def nearest(self, time_s: float) -> int:
        """Index of the last snapshot at or before a time; the first when all are later."""
        return max(0, bisect_right(self.times, time_s) - 1)

    def _step(self, place: int) -> None:
        number, offset, _ = self._where[place]
        length, _, kind, _ = RECORD.unpack(os.pread(self._files[number], RECORD.size, offset))
        payload = os.pread(self._files[number], length, offset + RECORD.size)
        if kind == KEY:
            self._inflate = zlib.decompressobj()
            self._tree = self._unpack.decode(self._inflate.decompress(payload, _MAX_PAYLOAD))
            self._leaves = []
            flatten(self._tree, [], self._leaves, "")
        else:
            apply(self._leaves, self._unpack.decode(self._inflate.decompress(payload, _MAX_PAYLOAD)))
        self._state = place


def _finite(snapshot: Snapshot) -> Snapshot:
    """The snapshot with 0 for values that are no number: such a recording was made by something else, and is shown all the same."""
    if all(math.isfinite(value) for stats in snapshot.stats for value in stats.values):
        return snapshot
    stats = tuple(msgspec.structs.replace(one, values=finite(one.values)) for one in snapshot.stats)
    return msgspec.structs.replace(snapshot, stats=stats)


def _records(fd: int) -> Iterator[tuple[int, int, float, bool]]:
    """(offset, kind, time, sound) of every whole record. What cannot be a record ends the file."""
    size = os.fstat(fd).st_size
    offset = FILE_HEADER.size
    while offset + RECORD.size <= size:
        length, check, kind, time_s = RECORD.unpack(os.pread(fd, RECORD.size, offset))
        if length > _MAX_PAYLOAD or offset + RECORD.size + length > size:
            return
        payload = os.pread(fd, length, offset + RECORD.size)
        sound = kind in (KEY, DIFFERENCE) and zlib.crc32(payload, zlib.crc32(struct.pack("<Bd", kind, time_s))) == check
        yield offset, kind, time_s, sound
        offset += RECORD.size + length
