"""The seam between the region store and the operating system.

Purpose: every system call of the disk tier goes through a `Storage`, so that tests can put a file system under it that
loses power, runs full, writes short or fails. Contract: descriptors are plain ints; calls raise OSError as the kernel does;
buffers may be touched only between call and return. All data calls let go of the GIL. Concurrency: any thread.
"""

import ctypes
import errno
import mmap
import os
import resource
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from kvtools.segments.files import lock_for_life, still_named

Buffer = bytes | bytearray | memoryview
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
"""What a file system says that has no bytes left, or none left for us."""
_SPARE_FILES = 256
"""Open files that everything else in the process may need."""


class DirectIO(NamedTuple):
    """Whether files of a folder can be read and written past the page cache, and how they must be aligned."""

    ok: bool
    memory_align: int = 0
    reason: str = ""
    """Why, or why not, in a few words for people."""


class Storage(Protocol):
    """What the disk tier needs of a file system."""

    def open(self, path: Path, *, create: bool = False, direct: bool = False) -> int:
        """A read-write descriptor. `create` makes the file (0600) and fails where it exists."""

    def close(self, fd: int) -> None:
        """Give the descriptor back."""

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        """Write, perhaps less than asked for; bytes written."""

    def preadv(self, fd: int, buffers: Sequence[bytearray | memoryview], offset: int) -> int:
        """Read, perhaps less than asked for; 0 at the end of the file."""

    def fdatasync(self, fd: int) -> None:
        """Return when everything written to the file before is on stable storage."""

    def fsync_dir(self, path: Path) -> None:
        """Make names created, renamed and removed in a folder stable."""

    def fallocate(self, fd: int, size: int) -> bool:
        """Give the file `size` bytes; False where the file system cannot reserve them (the file is sparse then)."""

    def size(self, fd: int) -> int:
        """Bytes in the file."""

    def nameless(self, fd: int) -> bool:
        """Whether somebody has removed the file's name: it takes every byte and keeps none."""

    def unlink(self, path: Path) -> None:
        """Remove a name."""

    def rename(self, source: Path, target: Path) -> None:
        """Rename, replacing the target."""

    def listdir(self, path: Path) -> list[str]:
        """Names in a folder."""

    def mkdir(self, path: Path) -> bool:
        """Make a folder (0700) with its parents; False where it exists already."""

    def free_bytes(self, path: Path) -> tuple[int, int]:
        """Bytes free to us, and bytes in all, of the file system that holds `path`."""

    def direct_io(self, path: Path) -> DirectIO:
        """Whether O_DIRECT works for files in this folder."""

    def lock(self, path: Path, note: str) -> int | str:
        """Own `path` (made where missing) for life and write `note` into it; a str, the owner's note, where it is owned."""


class _Statx(ctypes.Structure):
    """The parts of struct statx that are asked for (256 bytes in all)."""

    _fields_ = (
        ("mask", ctypes.c_uint32),
        ("skip", ctypes.c_uint8 * 148),
        ("dio_mem_align", ctypes.c_uint32),
        ("dio_offset_align", ctypes.c_uint32),
        ("rest", ctypes.c_uint8 * 96),
    )


_STATX_DIOALIGN = 0x2000
_AT_EMPTY_PATH = 0x1000
_NETWORK_MAGIC = {0x6969: "NFS", 0xFF534D42: "CIFS", 0xFE534D42: "SMB", 0x65735546: "FUSE", 0x01021997: "9p"}
_libc = ctypes.CDLL(None, use_errno=True)


def _network_type(fd: int) -> str:
    """The name of the network file system that holds `fd`, '' for a local one."""
    buffer = (ctypes.c_long * 32)()
    if _libc.fstatfs(fd, ctypes.byref(buffer)) != 0:
        return ""
    return _NETWORK_MAGIC.get(buffer[0] & 0xFFFFFFFF, "")


def _statx_align(fd: int) -> tuple[int, int] | None:
    """(memory, offset) alignment of O_DIRECT as statx states it; zeros: none possible; None: this kernel does not say."""
    answer = _Statx()
    statx = getattr(_libc, "statx", None)
    if statx is None or statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, ctypes.byref(answer)) != 0:
        return None
    return (answer.dio_mem_align, answer.dio_offset_align) if answer.mask & _STATX_DIOALIGN else None


class RealStorage:
    """The operating system. Files are 0600 and never followed through links."""

    _FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW

    def open(self, path: Path, *, create: bool = False, direct: bool = False) -> int:
        """See Storage."""
        flags = self._FLAGS | (os.O_CREAT | os.O_EXCL if create else 0) | (os.O_DIRECT if direct else 0)
        fd = os.open(path, flags, 0o600)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return fd

    def close(self, fd: int) -> None:
        """See Storage."""
        os.close(fd)

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        """See Storage."""
        return os.pwritev(fd, buffers, offset)

    def preadv(self, fd: int, buffers: Sequence[bytearray | memoryview], offset: int) -> int:
        """See Storage."""
        return os.preadv(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        """See Storage."""
        os.fdatasync(fd)
        if self.nameless(fd):
            raise FileNotFoundError(errno.ENOENT, "the file was removed")

    def fsync_dir(self, path: Path) -> None:
        """See Storage."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def fallocate(self, fd: int, size: int) -> bool:
        """See Storage. Not os.posix_fallocate: glibc emulates that by writing every block where the kernel cannot do it."""
        if _libc.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size)) == 0:
            return True
        code = ctypes.get_errno()
        if code not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise OSError(code, os.strerror(code))
        os.ftruncate(fd, size)
        return False

    def size(self, fd: int) -> int:
        """See Storage."""
        return os.fstat(fd).st_size

    def nameless(self, fd: int) -> bool:
        """See Storage."""
        return os.fstat(fd).st_nlink == 0

    def unlink(self, path: Path) -> None:
        """See Storage."""
        path.unlink()

    def rename(self, source: Path, target: Path) -> None:
        """See Storage."""
        source.rename(target)

    def listdir(self, path: Path) -> list[str]:
        """See Storage."""
        return [entry.name for entry in path.iterdir()]

    def mkdir(self, path: Path) -> bool:
        """See Storage. An existing empty folder of ours is tightened to 0700; any other keeps its mode."""
        try:
            path.mkdir(mode=0o700, parents=True)
            return True
        except FileExistsError:
            if not path.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from None
            if path.stat().st_uid == os.geteuid() and not any(path.iterdir()):
                path.chmod(0o700)
            return False

    def free_bytes(self, path: Path) -> tuple[int, int]:
        """See Storage."""
        answer = os.statvfs(path)
        return answer.f_bavail * answer.f_frsize, answer.f_blocks * answer.f_frsize

    def direct_io(self, path: Path) -> DirectIO:
        """See Storage. statx is asked; where it does not say, a page is written to a probe file, but never on a network mount."""
        probe = path / f".probe-{os.getpid()}"
        fd = -1
        try:
            fd = os.open(probe, self._FLAGS | os.O_CREAT | os.O_DIRECT, 0o600)
            aligns = _statx_align(fd)
            if aligns is None:
                network = _network_type(fd)
                if network:
                    return DirectIO(False, 0, f"{network} mount: buffered")
                aligns = (4096, 4096)
            memory, offset = aligns
            if not memory or 4096 % memory or not offset or 4096 % offset:
                return DirectIO(False, 0, "the file system offers no O_DIRECT at 4096 bytes")
            return self._try_direct(fd, memory)
        except OSError as error:
            return DirectIO(False, 0, f"O_DIRECT refused: {error.strerror}")
        finally:
            if fd >= 0:
                os.close(fd)
            probe.unlink(missing_ok=True)

    def _try_direct(self, fd: int, memory: int) -> DirectIO:
        with mmap.mmap(-1, 4096) as page:
            if os.pwrite(fd, page, 0) != 4096 or os.preadv(fd, [page], 0) != 4096:
                return DirectIO(False, 0, "O_DIRECT wrote short")
        return DirectIO(True, memory, f"O_DIRECT, memory aligned to {memory}")

    def lock(self, path: Path, note: str) -> int | str:
        """See Storage. An open-file-description lock: it ends with the process however that dies, and works over NFS."""
        while True:
            made = not path.exists()
            fd = os.open(path, self._FLAGS | os.O_CREAT, 0o600)
            try:
                if not lock_for_life(fd):
                    return os.pread(fd, 200, 0).decode("utf-8", "replace").strip()
                if not still_named(fd, path):  # its last owner took it away with it
                    continue
                os.ftruncate(fd, 0)
                os.pwrite(fd, note.encode(), 0)
                held, fd = fd, -1
                return held
            except OSError:
                if made:
                    path.unlink(missing_ok=True)
                raise
            finally:
                if fd >= 0:
                    os.close(fd)


def allow_open_files(count: int) -> None:
    """Raise this process's limit of open files, as far as it may, so that `count` more fit. A region is one open file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = len(list(Path("/proc/self/fd").iterdir())) + count + _SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))


def write_fully(io: Storage, fd: int, buffers: list[memoryview], offset: int) -> None:
    """Write all of `buffers` at `offset`, going on after short writes. Raises OSError; EIO where nothing moves.

    After a short write the rest is written again from the last whole page, so that O_DIRECT's alignment holds.
    """
    total = sum(len(part) for part in buffers)
    done = 0
    stalls = 0
    parts = buffers
    while True:
        wrote = io.pwritev(fd, parts, offset + done)
        if wrote <= 0:
            raise OSError(errno.EIO, "the write made no progress")
        if done + wrote >= total:
            return
        step = wrote & ~4095
        stalls = 0 if step else stalls + 1
        if stalls == 2:
            raise OSError(errno.EIO, "the write stops short")
        done += step
        parts = _skip(parts, step)


def read_fully(io: Storage, fd: int, buffers: list[memoryview], offset: int) -> int:
    """Fill `buffers` from `offset`, going on after short reads; bytes read, less than asked for only at the end of the file."""
    total = sum(len(part) for part in buffers)
    done = 0
    parts = buffers
    while done < total:
        count = io.preadv(fd, parts, offset + done)
        if count <= 0 or done + count >= total:
            return done + max(0, count)
        step = count & ~4095
        if not step:
            return done + count
        done += step
        parts = _skip(parts, step)
    return done


def _skip(parts: list[memoryview], count: int) -> list[memoryview]:
    """The buffers that remain after `count` bytes."""
    rest: list[memoryview] = []
    for part in parts:
        if count >= len(part):
            count -= len(part)
        else:
            rest.append(part[count:])
            count = 0
    return rest
