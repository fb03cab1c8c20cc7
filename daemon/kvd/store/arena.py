"""The arena: one sealed memory object that the daemon and every engine map.

It is a memfd: no name in any file system, gone with its last user, handed to clients by SCM_RIGHTS. It is sealed against
resize, so that a client's mapping can never fault. Readers get a descriptor that was opened read-only; only a client that
asked to write gets a writable one. The memfd's mode is 0400, so that a reader cannot reopen it for writing through /proc
(root can: root can do anything to this process).

Pages are faulted in by the daemon before they are lent, from low addresses up, so that memory is charged to the daemon's
cgroup and not to whichever engine touched it first. A background thread keeps ahead of what has been lent.
"""

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import threading

import numpy as np
import numpy.typing as npt

from kvd.errors import KvdError
from kvd.store.extents import PAGE, Extents, pages_of

log = logging.getLogger("kvd.arena")

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MADV_POPULATE_WRITE = 23
_AHEAD = 256 << 20
_STEP = 8 << 20
_MFD_HUGETLB, _MFD_HUGE_2MB = 4, 21 << 26
HUGE = 2 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

Bytes = npt.NDArray[np.uint8]


class Arena:
    """`capacity` bytes (rounded down to pages) of shared memory and the map of what is free in it.

    Raises KvdError when the memory cannot be had. `huge` asks for 2 MiB pages; when the host has none, that is logged at
    WARN and `huge` is False afterwards.
    """

    def __init__(self, capacity: int, *, huge: bool = False) -> None:
        self.huge = huge
        unit = HUGE if huge else PAGE
        self.capacity = max(PAGE, capacity // unit * unit)
        self.fd = self._create()
        try:
            self.map = mmap.mmap(self.fd, self.capacity, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError as error:
            os.close(self.fd)
            raise _cannot(self.capacity, error) from error
        self.bytes: Bytes = np.frombuffer(self.map, dtype=np.uint8)
        self.view = memoryview(self.map)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        os.fchmod(self.fd, 0o400)
        self.read_only_fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)
        self.extents = Extents(self.capacity // PAGE)
        self._address = self.bytes.ctypes.data
        self._populated = 0
        self._lent_to = 0
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._keep_ahead, name="kvd-prefault", daemon=True)
        self._thread.start()

    def _create(self) -> int:
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        if self.huge:
            fd = -1
            try:
                fd = os.memfd_create("kvd-arena", flags | _MFD_HUGETLB | _MFD_HUGE_2MB)
                os.posix_fallocate(fd, 0, self.capacity)
                return fd
            except OSError as error:
                log.warning("huge pages asked for and not to be had (%s): using 4 KiB pages", error.strerror)
                self.huge = False
                if fd >= 0:  # it may hold those huge pages that there were
                    os.close(fd)
        try:
            fd = os.memfd_create("kvd-arena", flags)
            os.ftruncate(fd, self.capacity)
        except OSError as error:
            raise _cannot(self.capacity, error) from error
        return fd

    @property
    def used_bytes(self) -> int:
        """Bytes of pages lent or holding values (whole pages, as they are taken)."""
        return self.capacity - self.extents.free_pages * PAGE

    def alloc(self, length: int) -> int | None:
        """Offset of room for `length` bytes, 4 KiB-aligned and faulted in, or None."""
        page = self.extents.alloc(pages_of(length))
        if page is None:
            return None
        end = self.extents.top * PAGE
        if end > self._lent_to:
            if end > self._populated and not self._populate(end):
                self.extents.free(page, pages_of(length))
                return None
            self._lent_to = end
            if self._populated < min(self.capacity, end + _AHEAD // 2):
                self._wake.set()
        return page * PAGE

    def free(self, offset: int, length: int) -> None:
        """Give back room that `alloc` gave for `length` bytes."""
        self.extents.free(offset // PAGE, pages_of(length))

    def slice(self, offset: int, length: int) -> memoryview:
        """The daemon's own view of these bytes."""
        return self.view[offset : offset + length]

    def padded(self, offset: int, length: int) -> memoryview:
        """The same, up to the end of the last page: what O_DIRECT reads and writes in place."""
        return self.view[offset : offset + pages_of(length) * PAGE]

    def fill(self, offset: int, data: bytes | memoryview) -> None:
        """Copy a small value in, and zero the rest of its last page."""
        end = offset + len(data)
        self.view[offset:end] = data
        self.zero_slack(offset, len(data))

    def zero_slack(self, offset: int, length: int) -> None:
        """Zero what lies between the value's end and its page's end: it goes to disk with it, and may hold another's bytes."""
        slack = pages_of(length) * PAGE - length
        if slack:
            end = offset + length
            self.view[end : end + slack] = bytes(slack)

    def close(self) -> None:
        """Stop the thread and let go of the descriptors; mappings of clients live on."""
        self._closing.set()
        self._wake.set()
        self._thread.join()
        for fd in (self.fd, self.read_only_fd):
            os.close(fd)

    def _keep_ahead(self) -> None:
        while not self._closing.is_set():
            goal = min(self.capacity, self._lent_to + _AHEAD)
            while self._populated < goal and not self._closing.is_set() and self._populate(min(goal, self._populated + _STEP)):
                pass
            self._wake.wait()
            self._wake.clear()

    def _populate(self, end: int) -> bool:
        """Fault pages in up to `end`, without the GIL. False when the host (or the cgroup) has no memory for them."""
        with self._lock:
            start = self._populated
            if end <= start:
                return True
            end = min(self.capacity, max(end, start + (1 << 20)))
            if _libc.madvise(self._address + start, end - start, _MADV_POPULATE_WRITE) != 0:
                why = ctypes.get_errno()
                if why != errno.EINVAL:
                    log.warning("no memory for more of the arena (%s): it stays at %d bytes", os.strerror(why), start)
                    return False
                self.bytes[start:end:PAGE] |= 0  # Linux before 5.14: touching does the same, with the GIL
            self._populated = end
            return True


def _cannot(capacity: int, error: OSError) -> KvdError:
    return KvdError(f"cannot make an arena of {capacity} bytes: {error.strerror}", hint="give --max-bytes what this host has")
