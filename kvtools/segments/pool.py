"""Pool segments: the 24 bytes through which an engine and its operator share one KV pool's limit and use.

Format (FORMAT.md, "Pool segment"; kvcached's own, identical in every release of it): three native signed 64-bit integers,
limit, used and prealloc, in bytes, in a file of exactly 24 bytes, guarded by flock(2) on that file. The engine writes words
1 and 2; an operator writes word 0 and nothing else; whoever creates the file writes all three.

Reading needs only read permission (O_RDONLY, LOCK_SH). Writing re-reads under LOCK_EX. Nothing here ever renames, truncates
or maps a segment: its engine opens it by name again and again, and a replaced file would lose a lock and a limit.

Failure cases: NotFound (no such file), Unreachable (link, other kind of file, not 24 bytes, impossible words, permission,
no room), TimedOut (the flock did not come free), UsageError (bad name or limit). Concurrency: calls are independent; two
writers are ordered by the flock. A `PoolFile` belongs to one thread at a time.
"""

import fcntl
import os
import stat
import struct
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from kvtools.errors import KvError, NotFound, TimedOut, Unreachable, UsageError
from kvtools.output import printable
from kvtools.segments.files import (
    LOCK_TIMEOUT_S,
    SHM,
    SIDECAR_SUFFIX,
    STATS_PREFIX,
    check_name,
    explain,
    flock,
    open_file,
    open_or_create,
    still_named,
    unflock,
)
from kvtools.units import MAX_BYTES, format_size

# In shared memory, read by kvcached's tools: do not change.
WORDS = struct.Struct("=qqq")
LIMIT_WORD = struct.Struct("=q")
USAGE_WORDS = struct.Struct("=qq")
SIZE = WORDS.size

# Records here are named tuples where nothing more is needed: a dataclass costs every start of kvctl half a millisecond.


class Changed(KvError):
    """The limit was not what the caller expected to replace: somebody else wrote it in between. Nothing was written."""


class NotAPool(Unreachable):
    """A file that cannot be a pool segment: of another size, or with words no pool has."""


class PoolReading(NamedTuple):
    """One consistent look at a pool segment. Sizes in bytes over all layers and K/V buffers of one rank.

    `used_bytes` counts whole pages handed out, `prealloc_bytes` pages kept mapped in reserve; mapped memory is their sum.
    `mtime_ns` is when an engine or operator last wrote: a fresh one proves life, an old one proves nothing.
    """

    name: str
    limit_bytes: int
    used_bytes: int
    prealloc_bytes: int
    mtime_ns: int
    inode: int = 0
    uid: int = 0
    mode: int = 0

    @property
    def mapped_bytes(self) -> int:
        return self.used_bytes + self.prealloc_bytes

    @property
    def free_bytes(self) -> int:
        """What may still be mapped below the limit; 0 when the pool is above it."""
        return max(self.limit_bytes - self.mapped_bytes, 0)

    @property
    def overage_bytes(self) -> int:
        """How far use exceeds the limit: what the engine has to give back before the limit holds."""
        return max(self.used_bytes - self.limit_bytes, 0)

    @property
    def used_fraction(self) -> float:
        """used / limit, 0.0 when the limit is 0; above 1.0 while a lowered limit is not yet met."""
        return self.used_bytes / self.limit_bytes if self.limit_bytes else 0.0


class PoolProblem(NamedTuple):
    """A file that should be a pool segment and could not be read as one: its name, and why."""

    name: str
    error: KvError


class PoolListing(NamedTuple):
    """Every pool segment of a folder, by name, and those that could not be read."""

    pools: list[PoolReading]
    unreadable: list[PoolProblem]


class LimitChange(NamedTuple):
    """The same segment before and after a limit was written, both read under one exclusive lock."""

    before: PoolReading
    after: PoolReading


class PoolFile:
    """An open pool segment. Reads and writes are one lock cycle each; the file stays open between them.

    Keeping it open is for engines, which write often; a command opens, acts and closes. `gone` tells when the name now
    means another file, or none: what is written after that reaches nobody.
    """

    def __init__(self, name: str, *, root: Path = SHM, writable: bool = False, timeout_s: float = LOCK_TIMEOUT_S) -> None:
        self.name = name
        self.path = root / check_name(name)
        self._timeout_s = timeout_s
        self._what = f"segment {printable(name)}"
        self._fd = open_file(name, os.O_RDWR if writable else os.O_RDONLY, root=root)
        try:
            _check_size(name, os.fstat(self._fd))
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @property
    def gone(self) -> bool:
        return not still_named(self._fd, self.path)

    def read(self) -> PoolReading:
        """The three words, under the shared lock. Raises TimedOut, Unreachable (no longer a segment)."""
        flock(self._fd, fcntl.LOCK_SH, what=self._what, timeout_s=self._timeout_s)
        try:
            return self._read()
        finally:
            unflock(self._fd)

    def write_limit(self, limit_bytes: int, *, expected: int | None = None) -> LimitChange:
        """Write word 0 under the exclusive lock, leaving words 1 and 2 to the engine.

        With `expected`, only while word 0 is still that (a roll-back must not undo somebody else's decision), else Changed.
        """
        check_limit(limit_bytes)
        flock(self._fd, fcntl.LOCK_EX, what=self._what, timeout_s=self._timeout_s)
        try:
            before = self._read()
            if expected is not None and before.limit_bytes != expected:
                raise Changed(f"segment {printable(self.name)}: the limit is {before.limit_bytes} B by now, not {expected} B")
            os.pwrite(self._fd, LIMIT_WORD.pack(limit_bytes), 0)
            return LimitChange(before, self._read())
        finally:
            unflock(self._fd)

    def write_usage(self, used_bytes: int, prealloc_bytes: int) -> PoolReading:
        """The engine's side: write words 1 and 2 and return all three, so the limit is learned in the same lock cycle."""
        flock(self._fd, fcntl.LOCK_EX, what=self._what, timeout_s=self._timeout_s)
        try:
            os.pwrite(self._fd, USAGE_WORDS.pack(used_bytes, prealloc_bytes), LIMIT_WORD.size)
            return self._read()
        finally:
            unflock(self._fd)

    def _read(self) -> PoolReading:
        status = os.fstat(self._fd)
        _check_size(self.name, status)
        limit, used, prealloc = words = WORDS.unpack(os.pread(self._fd, SIZE, 0))
        if any(not 0 <= word < MAX_BYTES for word in words):
            raise NotAPool(
                f"{printable(self.name)} is not a pool segment: its words are {limit}, {used}, {prealloc}",
                hint="a pool segment holds limit, used and prealloc in bytes, each from 0 to below 1 PiB",
            )
        return PoolReading(
            self.name, limit, used, prealloc, status.st_mtime_ns, status.st_ino, status.st_uid, stat.S_IMODE(status.st_mode)
        )


def check_limit(limit_bytes: int) -> int:
    """`limit_bytes` itself when the format can hold it, else UsageError."""
    if not 0 <= limit_bytes < MAX_BYTES:
        raise UsageError(f"limit out of range: {limit_bytes} B", hint=f"a limit is from 0 to below {format_size(MAX_BYTES)}")
    return limit_bytes


def is_pool_name(name: str) -> bool:
    """Whether a directory entry may name a pool: stats segments, sidecars and hidden files never do."""
    return not (name.startswith((STATS_PREFIX, ".")) or name.endswith(SIDECAR_SUFFIX))


def read_pool(name: str, *, root: Path = SHM, timeout_s: float = LOCK_TIMEOUT_S) -> PoolReading:
    """One consistent reading of the pool segment `name`."""
    with PoolFile(name, root=root, timeout_s=timeout_s) as file:
        return file.read()


def list_pools(root: Path = SHM, *, timeout_s: float = LOCK_TIMEOUT_S, clock: Callable[[], float] = time.monotonic) -> PoolListing:
    """All pool segments in `root`, sorted by name.

    What is no segment by name or size is passed over in silence. What should be one and cannot be read is in `unreadable`: it
    cannot be opened, stays locked, holds words no pool can have, or has an owner file and is no longer what its owner made.
    `timeout_s` bounds the whole call, not each file: one stuck engine delays a listing once.
    """
    listing = PoolListing([], [])
    deadline = clock() + timeout_s
    for name in _expected(root):
        try:
            listing.pools.append(read_pool(name, root=root, timeout_s=max(deadline - clock(), 0.0)))
        except (NotFound, UsageError):
            continue  # gone since the folder was read, or a name no segment has
        except (TimedOut, Unreachable) as error:
            listing.unreadable.append(PoolProblem(name, error))
    return listing


def candidates(root: Path = SHM) -> list[str]:
    """Names in `root` that may be pool segments by name, kind and size; contents unseen. Raises Unreachable without a folder."""
    return _scan(root)[0]


def _expected(root: Path) -> list[str]:
    """The candidates, and whatever else has an owner file: truncated, or something else in a segment's place."""
    names, owned, others = _scan(root)
    return sorted([*names, *(owned & others)])


def _scan(root: Path) -> tuple[list[str], set[str], set[str]]:
    """(candidates, names that have an owner file, names of other things in `root`)."""
    names: list[str] = []
    owned: set[str] = set()
    others: set[str] = set()
    try:
        with os.scandir(root) as entries:
            for entry in entries:
                if not is_pool_name(entry.name):
                    if entry.name.endswith(SIDECAR_SUFFIX) and not entry.name.startswith("."):
                        owned.add(entry.name.removesuffix(SIDECAR_SUFFIX))
                    continue
                try:
                    status = entry.stat(follow_symlinks=False)
                except OSError:
                    continue  # gone since the folder was read
                if stat.S_ISREG(status.st_mode) and status.st_size == SIZE:
                    names.append(entry.name)
                else:
                    others.add(entry.name)
    except OSError as error:
        raise Unreachable(f"cannot read {root}: {error.strerror}", hint="shared memory must be mounted there") from None
    return sorted(names), owned, others


def create_pool(
    name: str,
    limit_bytes: int,
    *,
    used_bytes: int = 0,
    prealloc_bytes: int = 0,
    replace: bool = True,
    root: Path = SHM,
    timeout_s: float = LOCK_TIMEOUT_S,
) -> PoolReading:
    """The engine's side: make the segment and write all three words, mode 0666 less the umask, exactly 24 bytes.

    An existing file of that name is written over (as every engine of this format does: a limit does not survive a restart),
    or Refused when `replace` is false. A longer file is not a segment and is left alone (Unreachable). When there is no room
    in shared memory, nothing is left behind.
    """
    check_limit(limit_bytes)
    if not is_pool_name(name):
        raise UsageError(
            f"not a pool's name: {printable(name)}", hint=f"names {STATS_PREFIX}* and *{SIDECAR_SUFFIX} mean other files"
        )
    fd = open_or_create(name, root=root) if replace else open_file(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, root=root)
    fresh = os.fstat(fd).st_size == 0
    try:
        flock(fd, fcntl.LOCK_EX, what=f"segment {printable(name)}", timeout_s=timeout_s)
        if os.fstat(fd).st_size > SIZE:
            raise Unreachable(
                f"{printable(name)} is in the way and is not a pool segment", hint="choose another name, or remove that file"
            )
        # One write gives the file its length and its words together: there is never a segment of zeros to be seen.
        os.pwrite(fd, WORDS.pack(limit_bytes, used_bytes, prealloc_bytes), 0)
    except OSError as error:
        if fresh:
            (root / name).unlink(missing_ok=True)
        raise explain(error, name, what="segment", root=root) from None
    finally:
        os.close(fd)
    return read_pool(name, root=root, timeout_s=timeout_s)


def write_limit(
    name: str, limit_bytes: int, *, expected: int | None = None, root: Path = SHM, timeout_s: float = LOCK_TIMEOUT_S
) -> LimitChange:
    """The operator's side: set the limit of pool `name`. `owner.change_limit` also notes it in the pool's history."""
    check_limit(limit_bytes)
    while True:
        with PoolFile(name, root=root, writable=True, timeout_s=timeout_s) as file:
            change = file.write_limit(limit_bytes, expected=expected)
            # Replaced between open and lock: what was just written is in a file nobody will read. Do it again.
            if not file.gone:
                return change


def write_usage(
    name: str, used_bytes: int, prealloc_bytes: int, *, root: Path = SHM, timeout_s: float = LOCK_TIMEOUT_S
) -> PoolReading:
    """The engine's side, one cycle: write words 1 and 2. An engine that writes often keeps a `PoolFile` open."""
    with PoolFile(name, root=root, writable=True, timeout_s=timeout_s) as file:
        return file.write_usage(used_bytes, prealloc_bytes)


def remove(name: str, *, root: Path = SHM, timeout_s: float = LOCK_TIMEOUT_S) -> PoolReading:
    """Remove the pool segment `name` (only if it is one) and return its last reading. The sidecar stays: it is the owner's."""
    with PoolFile(name, root=root, timeout_s=timeout_s) as file:
        last = file.read()
        if file.gone:
            raise NotFound(f"no segment named {printable(name)}")
        try:
            file.path.unlink()
        except OSError as error:
            raise explain(error, name, what="segment", root=root) from None
    return last


def _check_size(name: str, status: os.stat_result) -> None:
    if status.st_size != SIZE:
        raise NotAPool(
            f"{printable(name)} is not a pool segment: {status.st_size} bytes", hint=f"a pool segment is exactly {SIZE} bytes"
        )
