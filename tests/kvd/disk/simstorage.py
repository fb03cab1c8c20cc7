"""A file system in memory that loses power, runs full, fails and writes short, for the disk tier's tests.

What a process sees (`data`) and what is on stable storage (`stable`) are two things: a write changes the first and is
remembered; fdatasync moves a file's writes to the second, fsync_dir the folder's names. `power_cut` throws the process's view
away and keeps the stable one plus *any* subset of what was not synced, page by page, some pages torn in the middle.
`kill` keeps everything a process had written (a dead process loses no page cache). O_DIRECT's rules are enforced.
"""

import errno
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvd.tiers.adapters.disk.buffers import address
from kvd.tiers.adapters.disk.storage import DirectIO

PAGE = 4096
SECTOR = 512
Fault = Callable[[str, Path, int], "int | OSError | None"]
"""(call, path, bytes) -> an error to raise, a smaller count to write, or None."""


@dataclass(eq=False)
class SimFile:
    """One inode."""

    data: bytearray = field(default_factory=bytearray)
    stable: bytearray = field(default_factory=bytearray)
    unsynced: list[tuple[int, bytes]] = field(default_factory=list)


class SimStorage:
    """See the module. One object is one disk; it outlives any number of adapters."""

    def __init__(self, capacity: int = 1 << 40) -> None:
        self.capacity = capacity
        self.names: dict[Path, SimFile] = {}
        self.stable_names: dict[Path, SimFile] = {}
        self.unsynced_names: list[tuple[str, Path, Path | SimFile | None]] = []
        self.folders: set[Path] = set()
        self.open_files: dict[int, tuple[SimFile, Path, bool]] = {}
        self.locks: dict[Path, str] = {}
        self.lock_fds: dict[int, Path] = {}
        self.fault: Fault | None = None
        self.operations = 0
        self.syncs = 0
        self.dead_after: int | None = None
        """From this operation on the device is gone: everything answers EIO."""
        self._next_fd = 1000

    # -- faults ----------------------------------------------------------------------------------------------------------

    def _step(self, call: str, path: Path, size: int = 0) -> int:
        self.operations += 1
        if self.dead_after is not None and self.operations > self.dead_after:
            raise OSError(errno.EIO, "the device is gone", str(path))
        verdict = self.fault(call, path, size) if self.fault is not None else None
        if isinstance(verdict, OSError):
            raise verdict
        return size if verdict is None else verdict

    def kill(self) -> None:
        """The process dies: descriptors and locks are gone, what was written stays."""
        self.open_files.clear()
        self.locks.clear()
        self.lock_fds.clear()
        self.dead_after = None
        self.fault = None

    def power_cut(self, rng: random.Random) -> None:
        """The host loses power: of everything unsynced an arbitrary part is there afterwards."""
        self.kill()
        names = dict(self.stable_names)
        keep_names = rng.random()
        for call, path, target in self.unsynced_names:
            if rng.random() > keep_names:
                if rng.random() < 0.5:
                    break  # a journalled file system: nothing after the first lost one
                continue
            _apply_name(names, call, path, target)
        for file in dict.fromkeys([*names.values(), *self.names.values()]):  # in one order for a seed, whatever the addresses
            keep = rng.choice([0.0, 0.3, 0.7, 1.0])
            for offset, page in file.unsynced:
                if rng.random() < keep:
                    _write(file.stable, offset, page)
                elif rng.random() < 0.1:  # torn: some sectors of it
                    for at in range(0, len(page), SECTOR):
                        if rng.random() < 0.5:
                            _write(file.stable, offset + at, page[at : at + SECTOR])
            file.unsynced = []
            file.data = bytearray(file.stable)
        self.names = names
        self.stable_names = dict(names)
        self.unsynced_names = []

    # -- Storage ---------------------------------------------------------------------------------------------------------

    def open(self, path: Path, *, create: bool = False, direct: bool = False) -> int:
        self._step("open", path)
        if create:
            if path in self.names:
                raise FileExistsError(errno.EEXIST, "exists", str(path))
            self._name("create", path, SimFile())
        elif path not in self.names:
            raise FileNotFoundError(errno.ENOENT, "missing", str(path))
        self._next_fd += 1
        self.open_files[self._next_fd] = (self.names[path], path, direct)
        return self._next_fd

    def close(self, fd: int) -> None:
        if fd in self.lock_fds:
            self.locks.pop(self.lock_fds.pop(fd), None)
        else:
            self.open_files.pop(fd, None)

    def _file(self, fd: int, buffers: Sequence, offset: int) -> tuple[SimFile, Path]:
        if fd not in self.open_files:
            raise OSError(errno.EBADF, "closed descriptor")
        file, path, direct = self.open_files[fd]
        if direct:
            aligned = offset % SECTOR == 0 and all(len(part) % SECTOR == 0 for part in buffers)
            if not aligned or any(address(memoryview(part)) % SECTOR for part in buffers if len(part)):
                raise OSError(errno.EINVAL, "unaligned direct I/O", str(path))
        return file, path

    def pwritev(self, fd: int, buffers: Sequence, offset: int) -> int:
        file, path = self._file(fd, buffers, offset)
        body = b"".join(bytes(part) for part in buffers)
        body = body[: self._step("pwritev", path, len(body))]
        _write(file.data, offset, body)
        at = 0
        while at < len(body):
            step = min(PAGE - (offset + at) % PAGE, len(body) - at)
            file.unsynced.append((offset + at, body[at : at + step]))
            at += step
        return len(body)

    def preadv(self, fd: int, buffers: Sequence, offset: int) -> int:
        file, path = self._file(fd, buffers, offset)
        limit = self._step("preadv", path, sum(len(part) for part in buffers))
        body = bytes(file.data[offset : offset + limit])
        at = 0
        for part in buffers:
            piece = body[at : at + len(part)]
            memoryview(part)[: len(piece)] = piece
            at += len(piece)
        return len(body)

    def fdatasync(self, fd: int) -> None:
        file, path, _ = self.open_files[fd]
        self._step("fdatasync", path)
        self.syncs += 1
        for offset, page in file.unsynced:
            _write(file.stable, offset, page)
        file.unsynced = []

    def fsync_dir(self, path: Path) -> None:
        self._step("fsync_dir", path)
        self.stable_names = dict(self.names)
        self.unsynced_names = []

    def fallocate(self, fd: int, size: int) -> bool:
        file, path, _ = self.open_files[fd]
        self._step("fallocate", path, size)
        if self._used() + size - len(file.data) > self.capacity:
            raise OSError(errno.ENOSPC, "disk full", str(path))
        file.data.extend(bytes(size - len(file.data)))
        file.stable.extend(bytes(size - len(file.stable)))
        return True

    def _used(self) -> int:
        return sum(len(file.data) for file in self.names.values())

    def size(self, fd: int) -> int:
        return len(self.open_files[fd][0].data)

    def nameless(self, fd: int) -> bool:
        if fd in self.lock_fds:
            return False
        file, path, _ = self.open_files[fd]
        self._step("nameless", path)
        return all(file is not named for named in self.names.values())

    def unlink(self, path: Path) -> None:
        self._step("unlink", path)
        self._name("unlink", path, None)

    def rename(self, source: Path, target: Path) -> None:
        self._step("rename", source)
        self._name("rename", source, target)

    def _name(self, call: str, path: Path, target: "Path | SimFile | None") -> None:
        if call != "create" and path not in self.names:
            raise FileNotFoundError(errno.ENOENT, "missing", str(path))
        _apply_name(self.names, call, path, target)
        self.unsynced_names.append((call, path, target))

    def listdir(self, path: Path) -> list[str]:
        self._step("listdir", path)
        return [name.name for name in self.names if name.parent == path]

    def mkdir(self, path: Path) -> bool:
        self._step("mkdir", path)
        fresh = path not in self.folders
        self.folders.add(path)
        return fresh

    def free_bytes(self, path: Path) -> tuple[int, int]:
        return self.capacity - self._used(), self.capacity

    def direct_io(self, path: Path) -> DirectIO:
        return DirectIO(True, SECTOR, "simulated")

    def lock(self, path: Path, note: str) -> int | str:
        if path in self.locks:
            return self.locks[path]
        self.locks[path] = note
        self._next_fd += 1
        self.lock_fds[self._next_fd] = path
        return self._next_fd


def _write(target: bytearray, offset: int, body: bytes) -> None:
    if len(target) < offset + len(body):
        target.extend(bytes(offset + len(body) - len(target)))
    target[offset : offset + len(body)] = body


def _apply_name(names: dict[Path, SimFile], call: str, path: Path, target: "Path | SimFile | None") -> None:
    if call == "create":
        assert isinstance(target, SimFile)
        names[path] = target
    elif path in names and call == "unlink":
        del names[path]
    elif path in names:
        assert isinstance(target, Path)
        names[target] = names.pop(path)
