"""The interface between a page of KV blocks and a driver: reserve address space, map and unmap physical memory, see a tensor.

Contract. A `VirtualMemory` is one contiguous range of addresses, reserved for life; physical memory appears under parts of it
by `map` and vanishes by `unmap`, in whole granules. What was unmapped is lost; what is mapped anew holds zeros on the CPU and
anything at all on a GPU. Errors are exceptions and leave the range as it was before the call: `OutOfMemory` when the device
has no room (or would have less than `min_free_bytes` left), `DriverError` for everything else. Nothing here ever aborts.

Concurrency: a memory may be used from any thread, one call at a time (PageMemory holds a lock). Whoever unmaps makes sure
that nothing still reads the pages; `synchronize` waits for what the device was told to do before.
"""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from kvtools.errors import KvError, UsageError
from kvtools.units import format_size


class DriverError(KvError):
    """A driver's call failed: names the call, its status and what it was about."""


class OutOfMemory(KvError):
    """The device has no room for more pages. Nothing was mapped."""


class DeviceMemory(NamedTuple):
    """Bytes of the device the pages lie on."""

    total_bytes: int
    free_bytes: int

    @property
    def used_bytes(self) -> int:
        return self.total_bytes - self.free_bytes


class VirtualMemory(ABC):
    """One reserved range of `size` bytes at `address`."""

    kind: str = ""
    """cpu, cuda or hip."""

    DLPACK: int = 1
    """The device type by which other libraries know this memory."""

    def __init__(self, size: int, granularity: int, *, device: int = 0, min_free_bytes: int = 0) -> None:
        if size <= 0:
            raise UsageError(f"cannot reserve {size} bytes")
        self.granularity = granularity
        self.size = -(-size // granularity) * granularity
        self.device = device
        self.min_free_bytes = min_free_bytes
        """Mapping is refused (OutOfMemory) where it would leave the device with less than this."""
        self.address = 0
        self.mapped_bytes = 0

    @abstractmethod
    def _map(self, offset: int, length: int) -> None:
        """Put physical memory under the range; on failure leave none of it mapped."""

    @abstractmethod
    def _unmap(self, offset: int, length: int) -> None:
        """Take the physical memory away."""

    @abstractmethod
    def device_memory(self) -> DeviceMemory:
        """What the device has in all, and has left now."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back, the addresses too. A second call does nothing."""

    def synchronize(self) -> None:
        """Wait until the device has done what it was told: before pages are unmapped."""
        return  # a CPU has, always

    @property
    def uuid(self) -> str:
        """The device's UUID as its vendor's tools write it; empty for the CPU."""
        return ""

    def map(self, offset: int, length: int) -> None:
        """Map `[offset, offset + length)`, multiples of the granularity, none of it mapped. Raises OutOfMemory, DriverError."""
        self._check(offset, length)
        if self.min_free_bytes and (free := self.device_memory().free_bytes) - length < self.min_free_bytes:
            raise OutOfMemory(
                f"the device has {format_size(free)} free, and {format_size(self.min_free_bytes)} must stay free",
                hint="lower another pool's limit, or KVTOOLS_MIN_FREE",
            )
        self._map(offset, length)
        self.mapped_bytes += length

    def unmap(self, offset: int, length: int) -> None:
        """Unmap `[offset, offset + length)`, all of it mapped. Raises DriverError."""
        self._check(offset, length)
        self._unmap(offset, length)
        self.mapped_bytes -= length

    def tensor(self, size: int | None = None) -> Any:
        """The first `size` bytes (default: all) as a flat torch.int8 tensor on the device. It does not keep the memory alive."""
        from kvtools.elastic.dlpack import tensor_at

        return tensor_at(self.address, self.size if size is None else size, self.DLPACK, self.device)

    def _check(self, offset: int, length: int) -> None:
        if offset % self.granularity or length % self.granularity or length <= 0:
            raise UsageError(f"not whole granules of {self.granularity} bytes: offset {offset}, length {length}")
        if offset < 0 or offset + length > self.size:
            raise UsageError(f"outside the reserved {self.size} bytes: offset {offset}, length {length}")


def open_memory(kind: str, size: int, *, device: int = 0, min_free_bytes: int = 0) -> VirtualMemory:
    """Reserve `size` bytes on the back end `kind`: cpu, cuda or hip. Raises DriverError, UsageError."""
    if kind == "cpu":
        from kvtools.elastic.cpu import CpuMemory

        return CpuMemory(size, min_free_bytes=min_free_bytes)
    if kind == "cuda":
        from kvtools.elastic.cuda import CudaMemory

        return CudaMemory(size, device=device, min_free_bytes=min_free_bytes)
    if kind == "hip":
        from kvtools.elastic.hip import HipMemory

        return HipMemory(size, device=device, min_free_bytes=min_free_bytes)
    raise UsageError(f"no elastic memory on {kind!r}", hint="cpu, cuda or hip")
