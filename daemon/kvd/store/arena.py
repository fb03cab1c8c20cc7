"""The arena: one sealed memory object that the daemon and every engine map.

It is a memfd: no name in any file system, gone with its last user, handed to clients by SCM_RIGHTS. It is sealed against
resize, so that a client's mapping can never fault. Readers get a descriptor that was opened read-only; only a client that
asked to write gets a writable one. The memfd's mode is 0400, so that a reader cannot reopen it for writing through /proc
(root can: root can do anything to this process).

Pages are faulted in by the daemon before they are lent, from low addresses up, so that memory is charged to the daemon's
cgroup and not to whichever engine touched it first. A background thread does it and nobody else (a page costs a quarter of a
microsecond: 180 MiB would stop the event loop for 80 ms); it keeps ahead of what has been lent. Who finds no room because
it has not come that far calls `grows_for` and waits for `when_grown`. When the host or the cgroup has no memory, the arena
stays as large as it is, and the thread tries again now and then.

Pages are of 2 MiB where the host lets shared memory have them when it asks (`SHMEM_PAGES`): copies of values of 1 MiB and
more are a quarter faster then, and clients' first touch costs one fault where it cost 512.

`mlock` keeps what is faulted in from being swapped out; `numa_node` says on which node pages are faulted in where it has
room. Neither is had for certain: a failed request is said at WARN, once, and in stats.
"""

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import platform
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvd.errors import KvdError
from kvd.store.extents import PAGE, Extents, pages_of

log = logging.getLogger("kvd.arena")

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MADV_POPULATE_WRITE = 23
_MADV_HUGEPAGE = 14
_MPOL_PREFERRED = 1
_SYS_MBIND = {"x86_64": 237, "aarch64": 235}
SHMEM_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
"""The host's setting: the word in brackets. `advise` is enough (the kernel's Documentation/admin-guide/mm/transhuge.rst)."""
NODES = Path("/sys/devices/system/node")
FIRST = 16 << 20
"""Faulted in before anything is served."""
_AHEAD = 256 << 20
_STEP = 2 << 20  # about a millisecond: whoever maps or unmaps memory meanwhile waits for it
RETRY_S = 5.0
_MFD_HUGETLB, _MFD_HUGE_2MB = 4, 21 << 26
HUGE = 2 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)

Bytes = npt.NDArray[np.uint8]


def shared_memory_has_large_pages() -> bool:
    """Whether this host gives pages of 2 MiB to shared memory that asks for them."""
    try:
        words = SHMEM_PAGES.read_text().split()
    except OSError:  # a kernel without them, or none of Linux's
        return False
    return not {"[never]", "[deny]"} & set(words) and any(word.startswith("[") for word in words)


class Arena:
    """`capacity` bytes (rounded down to pages) of shared memory and the map of what is free in it.

    Raises KvdError when the memory cannot be had. `huge` asks for 2 MiB pages; when the host has none, that is logged at
    WARN and `huge` is False afterwards.
    """

    def __init__(self, capacity: int, *, huge: bool = False, mlock: bool = False, numa_node: int | None = None) -> None:
        self.huge = huge
        self.locked = mlock
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
        self._protect()
        self.read_only_fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)
        self._address = self.bytes.ctypes.data
        self.numa_node = numa_node if numa_node is not None and self._prefer(numa_node) else None
        if not self.huge:  # pages of 2 MiB where the host lets shared memory have them when it asks; else this does nothing
            _libc.madvise(self._address, self.capacity, _MADV_HUGEPAGE)
        self.extents = Extents(self.capacity // PAGE)
        self._populated = 0
        self._wanted = 0
        self._denied_s: float | None = None
        self._grown: Callable[[], None] = lambda: None
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._populate(min(self.capacity, FIRST))
        self._thread = threading.Thread(target=self._keep_ahead, name="kvd-prefault", daemon=True)
        self._thread.start()

    @property
    def large_pages(self) -> bool:
        """Whether pages of 2 MiB were asked for and had, or the host gives them to shared memory that asks."""
        return self.huge or shared_memory_has_large_pages()

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

    def _protect(self) -> None:
        """No client may resize it, nor open it for writing unless it was given that."""
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        os.fchmod(self.fd, 0o400)

    @property
    def used_bytes(self) -> int:
        """Bytes of pages lent or holding values (whole pages, as they are taken)."""
        return self.capacity - self.extents.free_pages * PAGE

    def alloc(self, length: int) -> int | None:
        """Offset of room for `length` bytes, 4 KiB-aligned and faulted in, or None: then `grows_for` says whether to wait."""
        page = self.extents.alloc(length + 4095 >> 12 or 1)
        if page is None:
            return None
        if self._populated < self.capacity and self._populated - self.extents.top * PAGE < _AHEAD // 2:
            self._wake.set()
        return page * PAGE

    def grows_for(self, pages: int) -> bool:
        """Whether a run of `pages` is about to be faulted in. Sees to it that it is."""
        goal = (self.extents.top + pages) * PAGE
        if goal <= self._populated or goal > self.capacity:
            return False
        if self._denied_s is not None:
            if time.monotonic() - self._denied_s < RETRY_S:
                return False
            self._denied_s = None
        self._wanted = max(self._wanted, goal)
        self._wake.set()
        return True

    def when_grown(self, callback: Callable[[], None]) -> None:
        """Call back, on the thread that faults pages in, after each step of it (and when there is no memory for one)."""
        self._grown = callback

    @property
    def ready_bytes(self) -> int:
        """Bytes faulted in so far: what the arena costs the host."""
        return self._populated

    def settle(self, size: int, timeout_s: float = 30.0) -> None:
        """Wait until `size` bytes are faulted in, for whoever has no event loop. Raises KvdError when they do not come."""
        end = time.monotonic() + timeout_s
        self._wanted = max(self._wanted, min(size, self.capacity))
        self._wake.set()
        while self._populated < min(size, self.capacity):
            if self._denied_s is not None or time.monotonic() > end:
                raise KvdError(f"no memory for {size} bytes of the arena", hint="give --max-bytes what this host has")
            time.sleep(0.001)

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

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy bytes inside the arena, without the GIL. The two may not overlap."""
        np.copyto(self.bytes[target : target + length], self.bytes[source : source + length])

    def close(self) -> None:
        """Stop the thread and let go of the descriptors; mappings of clients live on."""
        self._closing.set()
        self._wake.set()
        self._thread.join()
        for fd in (self.fd, self.read_only_fd):
            os.close(fd)

    def _keep_ahead(self) -> None:
        while not self._closing.is_set():
            while not self._closing.is_set() and self._denied_s is None:
                goal = min(self.capacity, max(self.extents.top * PAGE + _AHEAD, self._wanted))
                if self._populated >= goal:
                    break
                self._populate(min(goal, self._populated + _STEP))
                self._grown()
            self._wake.wait()
            self._wake.clear()

    def _populate(self, end: int) -> None:
        """Fault pages in up to `end`, without the GIL; only this thread does, after the first few."""
        start = self._populated
        if _libc.madvise(self._address + start, end - start, _MADV_POPULATE_WRITE) != 0:
            why = ctypes.get_errno()
            if why != errno.EINVAL:
                log.warning("no memory for more of the arena (%s): it stays at %d bytes for now", os.strerror(why), start)
                self._deny(start)
                return
            self.bytes[start:end:PAGE] |= 0  # Linux before 5.14: touching does the same, with the GIL
        if self.locked and _libc.mlock(self._address + start, end - start) != 0:
            self.locked = False
            log.warning(
                "the arena cannot be locked in memory (%s): it may be swapped; raise the limit (ulimit -l, LimitMEMLOCK=)",
                os.strerror(ctypes.get_errno()),
            )
        self._populated = end
        self.extents.limit = end // PAGE

    def _deny(self, start: int) -> None:
        self.extents.limit = start // PAGE
        self._denied_s = time.monotonic()

    def _prefer(self, node: int) -> bool:
        """Ask for pages of this NUMA node, where it has any left. The policy is the memory object's: it holds for every page."""
        number = _SYS_MBIND.get(platform.machine())
        mask = (ctypes.c_ulong * (node // 64 + 1))()
        mask[node // 64] = 1 << node % 64
        place = ctypes.c_void_p(self._address), ctypes.c_ulong(self.capacity)
        bits = ctypes.c_ulong(len(mask) * 64 + 1)
        if number is None or _libc.syscall(number, *place, _MPOL_PREFERRED, mask, bits, 0) != 0:
            why = "on this machine nobody knows how" if number is None else os.strerror(ctypes.get_errno())
            log.warning("pages of NUMA node %d asked for and not to be had (%s): they come from where the host likes", node, why)
            return False
        return True


def _cannot(capacity: int, error: OSError) -> KvdError:
    return KvdError(f"cannot make an arena of {capacity} bytes: {error.strerror}", hint="give --max-bytes what this host has")
