"""Slots on a block device or in a file, with O_DIRECT: no file system's work, no page cache (format: see slots).

A file that is not there is made, of `capacity_bytes`; a device is used whole unless told. Whoever holds the lock owns it:
one daemon at a time. Where O_DIRECT is not to be had the page cache is used, and the log says so.
"""

import errno
import fcntl
import logging
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvd.tiers.adapters.base import Adapter, AdapterConfigError, AdapterError
from kvd.tiers.adapters.kind import Field, Kind, path, size, switch
from kvd.tiers.adapters.slots import BLOCK, Medium, SlotAdapter

log = logging.getLogger("kvd.tiers")


def own(name: str, device: Path, capacity: int, flags: int) -> tuple[int, int]:
    """A locked descriptor of the device or file, and how many bytes of it to use.

    Raises AdapterConfigError, AdapterError, OSError. A device that is mounted or otherwise in use by the kernel is refused.
    """
    if device.is_block_device():
        flags |= os.O_EXCL
    elif capacity and not device.is_relative_to("/dev"):  # a slip in a device's name must not make a file
        flags |= os.O_CREAT
    fd = os.open(device, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise AdapterError(f"{name}: {device} is in use by another daemon", hint="one daemon a device") from None
        regular = stat.S_ISREG(os.fstat(fd).st_mode)
        there = os.lseek(fd, 0, os.SEEK_END)
        if regular and capacity > there:
            os.posix_fallocate(fd, 0, capacity)
            there = capacity
        if not there:
            raise AdapterConfigError(f"{name}: {device} is empty", hint="give its size, and the file is made")
        if capacity > there:
            raise AdapterConfigError(f"{name}: {device} has {there} bytes, not {capacity}")
        return fd, capacity or there
    except BaseException:
        os.close(fd)
        raise


class FileMedium(Medium):
    """pread and pwrite, with O_DIRECT where it works."""

    def __init__(self, name: str, device: Path, capacity: int, *, direct: bool) -> None:
        self._name, self._device, self._capacity = name, device, capacity
        self.direct = direct
        self._fd = -1

    def open(self) -> int:
        if self.direct:
            try:
                self._fd, length = own(self._name, self._device, self._capacity, os.O_DIRECT)
                return length
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                log.warning("%s: no O_DIRECT on %s (%s): through the page cache", self._name, self._device, error.strerror)
                self.direct = False
        self._fd, length = own(self._name, self._device, self._capacity, 0)
        return length

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def read(self, offset: int, buffers: Sequence[memoryview]) -> None:
        self._all(os.preadv, offset, buffers)

    def write(self, offset: int, buffers: Sequence[memoryview]) -> None:
        self._all(os.pwritev, offset, buffers)

    def _all(self, call: Any, offset: int, buffers: Sequence[memoryview]) -> None:
        """The call again until everything was moved."""
        left = list(buffers)
        while left:
            moved = call(self._fd, left, offset)
            if moved <= 0:
                raise OSError(errno.EIO, f"nothing at byte {offset}")
            offset += moved
            while left and moved >= len(left[0]):
                moved -= len(left.pop(0))
            if left and moved:
                if self.direct and moved % BLOCK:
                    raise OSError(errno.EIO, f"a part of a block at byte {offset}")
                left[0] = left[0][moved:]

    def sync(self) -> None:
        os.fdatasync(self._fd)


class RawBlockAdapter(SlotAdapter):
    """Slots on a device; see the module."""

    type = "raw_block"


def _make(name: str, values: dict[str, Any]) -> Adapter:
    device = values["device_path"]
    medium = FileMedium(name, device, values["capacity_bytes"], direct=values["use_odirect"])
    return RawBlockAdapter(name, medium, values["slot_bytes"], where=str(device), eviction=values.get("eviction"))


KIND = Kind(
    "raw_block",
    "a block device or file, O_DIRECT slots",
    "kvd.tiers.adapters.raw_block:RawBlockAdapter",
    _make,
    (
        Field("device_path", path, required=True, help="the device, or a file"),
        Field("slot_bytes", size(2 * BLOCK), required=True, help="bytes of one slot: the largest value and 4096, on 4096"),
        Field("capacity_bytes", size(4 * BLOCK), 0, help="bytes to use; 0: all of the device"),
        Field("use_odirect", switch, True, help="past the page cache"),
    ),
)
