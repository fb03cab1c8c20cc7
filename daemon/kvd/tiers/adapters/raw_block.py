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

CHARACTER_DEVICES = Path("/sys/dev/char")


def own(name: str, device: Path, capacity: int, flags: int) -> tuple[int, int]:
    """A locked descriptor of the device or file, and how many bytes of it to use.

    Raises AdapterConfigError, AdapterError, OSError. A device that is mounted or otherwise in use by the kernel is refused.
    """
    if device.is_block_device():
        flags |= os.O_EXCL
    made = False
    try:
        fd = os.open(device, os.O_RDWR | os.O_CLOEXEC | flags)
    except FileNotFoundError:
        if not capacity or device.is_relative_to("/dev"):  # a slip in a device's name must not make a file
            raise
        fd = os.open(device, os.O_RDWR | os.O_CLOEXEC | os.O_CREAT | os.O_EXCL | flags, 0o600)
        made = True
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise AdapterError(f"{name}: {device} is in use by another daemon", hint="one daemon a device") from None
        status = os.fstat(fd)
        if stat.S_ISCHR(status.st_mode):
            there = _memory_of(name, device, status.st_rdev)
        else:
            there = os.lseek(fd, 0, os.SEEK_END)
        if stat.S_ISREG(status.st_mode) and capacity > there:
            os.posix_fallocate(fd, 0, capacity)
            there = capacity
        if not there:
            raise AdapterConfigError(f"{name}: {device} is empty", hint="give its size, and the file is made that large")
        if capacity > there:
            raise AdapterConfigError(f"{name}: {device} has {there} bytes, not {capacity}")
        return fd, capacity or there
    except BaseException:
        os.close(fd)
        if made:  # a start that failed leaves nothing behind, above all no file that seems to be a full one
            device.unlink(missing_ok=True)
        raise


def _memory_of(name: str, device: Path, number: int) -> int:
    """Bytes of a character device that is memory (DAX): it has no end to seek to. Raises AdapterConfigError for any other."""
    try:
        return int((CHARACTER_DEVICES / f"{os.major(number)}:{os.minor(number)}" / "size").read_text())
    except (OSError, ValueError):
        raise AdapterConfigError(
            f"{name}: {device} is a device, but none of memory or blocks", hint="name a DAX device, a block device or a file"
        ) from None


def check_room(name: str, kind: str, field: str, capacity: int, slot_bytes: int) -> None:
    """AdapterConfigError where so many bytes hold no slot: said before a file is made that large."""
    if capacity and capacity < BLOCK + slot_bytes:
        raise AdapterConfigError(
            f"adapter {name} ({kind}): field {field!r}: {capacity} bytes hold no slot of {slot_bytes}",
            hint=f"{BLOCK + slot_bytes} at least, or smaller slots",
        )


def refuse_removed(fd: int) -> None:
    """Raises OSError where somebody removed the file: it takes every byte and keeps none. A device needs no name for that."""
    state = os.fstat(fd)
    if stat.S_ISREG(state.st_mode) and not state.st_nlink:
        raise OSError(errno.ENOENT, "the file was removed")


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
        refuse_removed(self._fd)
        self._all(os.pwritev, offset, buffers)

    def _all(self, call: Any, offset: int, buffers: Sequence[memoryview]) -> None:
        """The call again until everything was moved."""
        left = list(buffers)
        while left:
            moved = call(self._fd, left, offset)
            if moved <= 0:
                raise OSError(errno.EIO, f"it ends before byte {offset}")
            offset += moved
            while left and moved >= len(left[0]):
                moved -= len(left.pop(0))
            if left and moved:
                if self.direct and moved % BLOCK:
                    raise OSError(errno.EIO, f"a part of a block at byte {offset}")
                left[0] = left[0][moved:]

    def sync(self) -> None:
        refuse_removed(self._fd)
        os.fdatasync(self._fd)


class RawBlockAdapter(SlotAdapter):
    """Slots on a device; see the module."""

    type = "raw_block"


def _make(name: str, values: dict[str, Any]) -> Adapter:
    device = values["device_path"]
    check_room(name, "raw_block", "capacity_bytes", values["capacity_bytes"], values["slot_bytes"])
    medium = FileMedium(name, device, values["capacity_bytes"], direct=values["use_odirect"])
    return RawBlockAdapter(name, medium, values["slot_bytes"], where=str(device), eviction=values.get("eviction"))


KIND = Kind(
    "raw_block",
    "a block device or file, O_DIRECT slots",
    "kvd.tiers.adapters.raw_block:RawBlockAdapter",
    _make,
    (
        Field("device_path", path, required=True, help="the device, or a file"),
        Field(
            "slot_bytes",
            size(2 * BLOCK),
            required=True,
            help="bytes of one slot: the largest value and 4096 (with serde 8192), on 4096",
        ),
        Field("capacity_bytes", size(4 * BLOCK), 0, help="bytes to use; 0: all of the device"),
        Field("use_odirect", switch, True, help="past the page cache"),
    ),
)
