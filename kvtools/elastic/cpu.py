"""Elastic memory on the CPU: pages of a memfd over a reserved range.

The range is reserved as private read-only memory, whose pages are all the kernel's one zero page: a block nobody was given
reads as zeros and costs nothing, and a write to it is a fault, not a silent corruption. `map` lays the memfd's pages over it
(mmap MAP_FIXED), `unmap` punches them out of the memfd (the physical memory is free when the call returns, whatever else
maps the file) and lays the zero page back. Adjacent maps of one file merge into one kernel area, so a pool that is full costs one.

Physical memory appears at first touch: `map` of 2 MiB takes microseconds, and the touch what zeroing takes. What is really
there can be read from outside: st_blocks of the memfd (/proc/PID/fd), Rss in /proc/PID/smaps.
"""

import contextlib
import ctypes
import errno
import mmap
import os
from pathlib import Path

from kvtools.elastic.dlpack import CPU
from kvtools.elastic.memory import DeviceMemory, DriverError, OutOfMemory, VirtualMemory
from kvtools.errors import hint_for

_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_NOTHING = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
_PUNCH = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_FAILED = ctypes.c_void_p(-1).value


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return libc


class CpuMemory(VirtualMemory):
    """Pages of 4 KiB and up; the tensor view is a CPU tensor."""

    kind = "cpu"
    DLPACK = CPU

    def __init__(self, size: int, *, min_free_bytes: int = 0, name: str = "kvtools-elastic") -> None:
        super().__init__(size, mmap.PAGESIZE, min_free_bytes=min_free_bytes)
        self._libc = _libc()
        self._fd = os.memfd_create(name, os.MFD_CLOEXEC)
        try:
            os.ftruncate(self._fd, self.size)
            self.address = self._place(None, self.size, mmap.PROT_READ, _NOTHING, -1, 0)
        except BaseException as error:
            os.close(self._fd)
            if isinstance(error, OSError):
                raise DriverError(
                    f"cannot make a memory file of {self.size} bytes: {error.strerror}", hint=hint_for(error)
                ) from None
            raise

    def _place(self, address: int | None, length: int, protection: int, flags: int, fd: int, offset: int) -> int:
        found = self._libc.mmap(address, length, protection, flags, fd, offset)
        if found == _FAILED or found is None:
            code = ctypes.get_errno()
            kind = OutOfMemory if code == errno.ENOMEM else DriverError
            raise kind(
                f"mmap of {length} bytes failed: {os.strerror(code)}",
                hint="the kernel is out of memory or areas (sysctl vm.max_map_count)" if code == errno.ENOMEM else "",
            )
        return int(found)

    def _map(self, offset: int, length: int) -> None:
        self._place(self.address + offset, length, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, self._fd, offset)

    def _unmap(self, offset: int, length: int) -> None:
        self._place(self.address + offset, length, mmap.PROT_READ, _NOTHING | _MAP_FIXED, -1, 0)
        if self._libc.fallocate(self._fd, _PUNCH, offset, length):
            raise DriverError(f"cannot give {length} bytes of the memory file back: {os.strerror(ctypes.get_errno())}")

    @property
    def resident_bytes(self) -> int:
        """What the kernel has really given this memory by now: pages that were mapped and touched."""
        return os.fstat(self._fd).st_blocks * 512

    def device_memory(self) -> DeviceMemory:
        """The machine's memory, or the control group's where that is less."""
        facts = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        total, free = (int(facts[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
        with contextlib.suppress(OSError, ValueError):  # no such control group, or "max"
            limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
            used = int(Path("/sys/fs/cgroup/memory.current").read_text())
            total, free = min(total, limit), min(free, limit - used)
        return DeviceMemory(total, max(free, 0))

    def close(self) -> None:
        if self._fd < 0:
            return
        self._libc.munmap(self.address, self.size)
        os.close(self._fd)
        self._fd = -1
        self.mapped_bytes = 0
