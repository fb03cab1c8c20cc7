"""Slots in mapped memory: a DAX device (CXL or persistent memory), or a file on a DAX file system (format: see slots).

Any file does, and then behaves as the page cache does. Values are copied, never handed out in place.
"""

import errno
import mmap
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvd.tiers.adapters import envelope
from kvd.tiers.adapters.base import Adapter, AdapterConfigError
from kvd.tiers.adapters.kind import Field, Kind, gib, path, size
from kvd.tiers.adapters.raw_block import check_room, own, refuse_removed
from kvd.tiers.adapters.slots import BLOCK, Medium, SlotAdapter

PAGE = 2 << 20
"""What the kernel maps of a DAX device is whole pages of its alignment: 2 MiB, unless it was made otherwise."""


class MapMedium(Medium):
    """A shared mapping."""

    def __init__(self, name: str, device: Path, capacity: int) -> None:
        self._name, self._device, self._capacity = name, device, capacity
        self._fd = -1
        self._map: mmap.mmap
        self._view: memoryview

    def open(self) -> int:
        self._fd, length = own(self._name, self._device, self._capacity, 0)
        if self._device.is_char_device():
            length -= length % PAGE
        try:
            self._map = mmap.mmap(self._fd, length, mmap.MAP_SHARED)
        except (OSError, ValueError) as error:
            self.close()
            raise AdapterConfigError(f"{self._name}: cannot map {self._device}: {error}") from None
        self._view = memoryview(self._map)
        return length

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
            if hasattr(self, "_view"):
                self._view.release()
                self._map.close()

    def _refuse_cut(self, end: int) -> None:
        """Raises OSError where the file has become shorter: whoever touches a mapping behind its file's end is killed."""
        state = os.fstat(self._fd)
        if stat.S_ISREG(state.st_mode) and state.st_size < end:
            raise OSError(errno.EIO, f"the file was cut to {state.st_size} bytes")

    def read(self, offset: int, buffers: Sequence[memoryview]) -> None:
        self._refuse_cut(offset + sum(map(len, buffers)))
        for buffer in buffers:
            envelope.copy(buffer, self._view[offset : offset + len(buffer)])
            offset += len(buffer)

    def write(self, offset: int, buffers: Sequence[memoryview]) -> None:
        refuse_removed(self._fd)
        self._refuse_cut(offset + sum(map(len, buffers)))
        for buffer in buffers:
            envelope.copy(self._view[offset : offset + len(buffer)], buffer)
            offset += len(buffer)

    def sync(self) -> None:
        refuse_removed(self._fd)
        try:
            self._map.flush()
        except OSError as error:
            # A DAX device has no file system to sync with: what was written is in its memory already.
            if error.errno != errno.EINVAL or not self._device.is_char_device():
                raise


class DaxAdapter(SlotAdapter):
    """Slots in a mapping; see the module."""

    type = "dax"


def _make(name: str, values: dict[str, Any]) -> Adapter:
    device = values["device_path"]
    check_room(name, "dax", "max_dax_size_gb", values["max_dax_size_gb"], values["slot_bytes"])
    medium = MapMedium(name, device, values["max_dax_size_gb"])
    return DaxAdapter(name, medium, values["slot_bytes"], where=str(device), eviction=values.get("eviction"))


KIND = Kind(
    "dax",
    "mapped memory: a DAX device or file",
    "kvd.tiers.adapters.dax:DaxAdapter",
    _make,
    (
        Field("device_path", path, required=True, help="the device, or a file"),
        Field("max_dax_size_gb", gib(1e-6), required=True, help="GiB of it to use"),
        Field(
            "slot_bytes",
            size(2 * BLOCK),
            required=True,
            help="bytes of one slot: the largest value and 4096 (with serde 8192), on 4096",
        ),
    ),
)
