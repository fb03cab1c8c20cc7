"""Recordings, the reading half: what `--replay` shows (RECORDING.md is the format; kvtop.record writes it).

    record -> inflate -> leaves -> builtins -> Snapshot

A record ends where its length says, and its checksum proves it. Where neither holds, the next sound record is looked for byte by
byte, so that one flipped bit costs the rest of its stream (readings up to the next key record) and never the rest of the file;
`Recording.damage` says where, when, and how much at least.

Failure cases: a file that is no recording is UsageError, one of a newer version too; a torn tail (its writer was killed) is left
out; one of which nothing can be read is KvError. Concurrency: a Recording belongs to one thread.
"""

import math
import os
import re
import stat
import struct
import time
import zlib
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from kvtools.errors import KvError, NotFound, UsageError
from kvtop.record import DIFFERENCE, FILE_HEADER, KEY, MAGIC, RECORD, VERSION, apply, flatten, rebuild
from kvtop.snapshot import Snapshot, finite

_MAX_PAYLOAD = 64 << 20
_BLOCK = 1 << 20
_WORK = 1 << 30
"""Bytes that are checksummed at most in looking for the next sound record: a file made to cost hours costs a second."""
_KIND = re.compile(rb"[KD]")
_BROKEN = (
    zlib.error, msgspec.MsgspecError, LookupError, TypeError, ValueError, StopIteration, AttributeError, RecursionError,
    struct.error,
)  # fmt: skip
"""What decoding a file that lies about itself may raise."""


@dataclass(frozen=True, slots=True)
class Damage:
    """A place in a recording from which readings are missing."""

    path: Path
    offset: int
    """First byte that makes no sense."""
    lost: int
    """Readings that cannot be shown, at least."""
    place: int
    """Index of the first reading after it."""
    after_s: float
    """Time of the reading before it; 0.0 when there is none."""
    until_s: float
    """Time of the reading after it; 0.0 when there is none."""

    def __str__(self) -> str:
        after, until = (time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at)) if at else "" for at in (self.after_s, self.until_s))
        if after and until:
            when = f"between {after} and {until.removeprefix(after[:11])}"
        else:
            when = f"after {after}" if after else f"before {until}" if until else "and all others"
        many = f"at least {self.lost} reading{'s' * (self.lost != 1)} {when} cannot be shown" if self.lost else "nothing is lost"
        return f"{self.path} is damaged at byte {self.offset}: {many}"

    @property
    def lacks(self) -> str:
        """The same beside the place it is about: what is missing first, where the file is broken last."""
        return str(self).partition(": ")[2] + f" (damaged at byte {self.offset} of {self.path.name})"


class Recording:
    """A recording as a sequence of snapshots: `len`, `times`, `at(i)`. FILE.1, when it is there, comes first."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.times: list[float] = []
        self._holes: list[_Hole] = []
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
            if older.exists():
                self._index_older(older)
            self._index(path)
            if not self.times and self._holes:
                hole = self._holes[0]
                raise KvError(f"recording {hole.path} is damaged at byte {hole.offset}: none of its readings can be shown")
            if not self.times:
                raise UsageError(f"recording {path} holds no reading", hint="record for a moment longer")
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self.times)

    @property
    def damage(self) -> list[Damage]:
        """What is missing from it, in order."""
        return [
            Damage(
                hole.path, hole.offset, hole.lost, hole.place,
                self.times[hole.place - 1] if hole.place else 0.0,
                self.times[hole.place] if hole.place < len(self.times) else 0.0,
            )
            for hole in self._holes
        ]  # fmt: skip

    def lost_at(self, index: int) -> Damage:
        """That reading `index`, which is there by its checksum, cannot be shown."""
        number, offset, _ = self._where[index]
        path = self.path.with_name(self.path.name + ".1") if number < len(self._files) - 1 else self.path
        return Damage(path, offset, 1, index, *(self.times[i] if 0 <= i < len(self.times) else 0.0 for i in (index - 1, index + 1)))

    def close(self) -> None:
        """Close the files."""
        for fd in self._files:
            os.close(fd)
        self._files.clear()

    def _index_older(self, path: Path) -> None:
        """Index FILE.1. What happens to lie there and is no recording says nothing against FILE: it is told as damage."""
        try:
            self._index(path)
        except KvError:
            self._holes.append(_Hole(path, 0, 0, len(self.times)))

    def _index(self, path: Path) -> None:
        fd = self._open(path)
        size = os.fstat(fd).st_size
        head = os.pread(fd, FILE_HEADER.size, 0)
        if len(head) < FILE_HEADER.size and MAGIC.startswith(head[: len(MAGIC)]):
            return  # killed, or out of room, before it began
        if not head.startswith(MAGIC):
            if len(head) < FILE_HEADER.size or _record(fd, FILE_HEADER.size, size) is None:
                raise UsageError(f"{path} is not a recording of kvtop", hint="kvtop --record FILE makes one")
            self._holes.append(_Hole(path, 0, 0, len(self.times)))  # all but its name is there
        elif (version := FILE_HEADER.unpack(head)[1]) > VERSION:
            raise UsageError(
                f"recording {path} is of version {version}, this kvtop reads up to {VERSION}", hint="use a newer kvtop"
            )
        self._records(path, fd, size)

    def _records(self, path: Path, fd: int, size: int) -> None:
        number, key, offset = len(self._files) - 1, -1, FILE_HEADER.size
        hole = -1  # where the one begins that is not over yet
        lost = 0
        while offset < size:
            found = _record(fd, offset, size)
            if found is None:
                further = _look_on(fd, offset + 1, size)
                if further is None and _torn(fd, offset, size):
                    break
                hole, lost, key = (hole if lost else offset), lost + 1, -1
                if further is None:
                    break
                offset = further
                continue
            if found.kind == KEY:
                key = len(self.times)
                if lost:
                    self._holes.append(_Hole(path, hole, lost, key))
                    lost = 0
            if key < 0:  # it says what changed in a reading that is lost
                hole, lost = (hole if lost else offset), lost + 1
            else:
                self._where.append((number, offset, key))
                self.times.append(found.time_s)
            offset = found.end
        if lost:
            self._holes.append(_Hole(path, hole, lost, len(self.times)))

    def _open(self, path: Path) -> int:
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
        return fd

    def at(self, index: int) -> Snapshot:
        """Snapshot `index`. Reading on from the one before costs one record, anything else starts at a key record."""
        key = self._where[index][2]
        begin = self._state + 1 if key <= self._state < index else key
        try:
            for place in range(begin, index + 1):
                self._step(place)
            return _finite(msgspec.convert(rebuild(self._tree, iter(self._leaves)), Snapshot, strict=False))
        except (*_BROKEN, OSError):
            self._state = -1
            size = os.fstat(self._files[self._where[index][0]]).st_size
            cut = size <= self._where[index][1]
            why = "its file was cut while it was shown" if cut else "what is there is no reading"
            raise UsageError(
                f"recording {self.path} cannot be read at reading {index}: {why}", hint="it was changed, or made by something else"
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


class _Hole(NamedTuple):
    """A damage as the index knows it: times are known when all files are read."""

    path: Path
    offset: int
    lost: int
    place: int


class _Record(NamedTuple):
    kind: int
    time_s: float
    end: int


def _record(fd: int, offset: int, size: int) -> _Record | None:
    """The record at `offset`, when it is whole and its checksum holds."""
    head = os.pread(fd, RECORD.size, offset)
    if len(head) < RECORD.size:
        return None
    length, check, kind, time_s = RECORD.unpack(head)
    end = offset + RECORD.size + length
    if kind not in (KEY, DIFFERENCE) or length > _MAX_PAYLOAD or end > size or not math.isfinite(time_s):
        return None
    payload = os.pread(fd, length, offset + RECORD.size)
    sound = zlib.crc32(payload, zlib.crc32(struct.pack("<Bd", kind, time_s))) == check
    return _Record(kind, time_s, end) if sound else None


def _look_on(fd: int, begin: int, size: int) -> int | None:
    """The offset of the next sound record from `begin` on."""
    work = 0
    at_kind = 8  # bytes before the kind
    while begin + RECORD.size <= size:
        block = os.pread(fd, _BLOCK + RECORD.size - 1, begin)
        for found in _KIND.finditer(block, at_kind):
            start = found.start() - at_kind
            if start + RECORD.size > len(block):
                break
            length, _, _, time_s = RECORD.unpack_from(block, start)
            # A time of this century: of a thousand places that hold the letter by chance, one does.
            if not 1e9 < time_s < 1e10 or begin + start + RECORD.size + length > size:
                continue
            work += length
            if work > _WORK:
                return None
            if _record(fd, begin + start, size) is not None:
                return begin + start
        begin += _BLOCK
    return None


def _torn(fd: int, offset: int, size: int) -> bool:
    """Whether what begins at `offset` is a record that was never finished: the file's last, of a writer that was killed."""
    head = os.pread(fd, RECORD.size, offset)
    if len(head) < RECORD.size:
        return True
    length, _, kind, _ = RECORD.unpack(head)
    return kind in (KEY, DIFFERENCE) and offset + RECORD.size + length > size
