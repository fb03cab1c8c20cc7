"""A client's view of the arena: one mapping to read, and one to write once it writes.

The read mapping is made from a descriptor that was opened read-only, so a view of a lease cannot be written through, by
mistake or otherwise. The write mapping is not inherited over fork: a child must not write into what its parent was lent.
Views outlive a reconnect: a mapping is closed when its last view is gone.
"""

import ctypes
import mmap
import os

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

_LARGE = 65536
_new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.restype = ctypes.py_object
_new_bytes.argtypes = (ctypes.c_char_p, ctypes.c_ssize_t)


class Mapping:
    """The arena of one daemon as this process maps it. `size` in bytes."""

    def __init__(self, read_fd: int, size: int) -> None:
        try:
            self._read = mmap.mmap(read_fd, size, mmap.MAP_SHARED, mmap.PROT_READ)
        finally:
            os.close(read_fd)
        self.size = size
        self.read_view = memoryview(self._read)
        self.read_bytes: Bytes = np.frombuffer(self._read, dtype=np.uint8)
        self.write_view: memoryview | None = None
        self.write_bytes: Bytes | None = None

    def allow_writing(self, write_fd: int) -> None:
        """Map it for writing too."""
        try:
            self._write = mmap.mmap(write_fd, self.size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(write_fd)
        self._write.madvise(mmap.MADV_DONTFORK)
        self.write_bytes = np.frombuffer(self._write, dtype=np.uint8)
        self.write_view = memoryview(self._write)

    def copy_out(self, offset: int, length: int) -> bytes:
        """The bytes there, copied; large ones without holding the GIL."""
        if length <= _LARGE:
            return bytes(self.read_view[offset : offset + length])
        # A bytes object nobody else has seen may be filled by its maker (the C API's rule); numpy copies without the GIL.
        result: bytes = _new_bytes(None, length)
        address = ctypes.cast(ctypes.c_char_p(result), ctypes.c_void_p).value
        assert address is not None
        target = np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(address))
        np.copyto(target, self.read_bytes[offset : offset + length])
        return result

    def copy_to(self, offset: int, length: int, target: memoryview) -> None:
        """Copy the bytes there into `target`, which has room for them."""
        if length <= _LARGE:
            target[:length] = self.read_view[offset : offset + length]
        else:
            np.copyto(np.frombuffer(target, dtype=np.uint8)[:length], self.read_bytes[offset : offset + length])

    def copy_in(self, offset: int, data: memoryview) -> None:
        """Copy bytes in; large ones without holding the GIL."""
        length = len(data)
        assert self.write_view is not None
        assert self.write_bytes is not None
        if length <= _LARGE:
            self.write_view[offset : offset + length] = data
        else:
            np.copyto(self.write_bytes[offset : offset + length], np.frombuffer(data, dtype=np.uint8))


def flat(data: object) -> memoryview:
    """Any contiguous buffer as a flat view of its bytes. Raises TypeError or ValueError for what is none."""
    view = memoryview(data)  # type: ignore[arg-type]
    if view.ndim == 1 and view.format == "B":
        return view
    if not view.c_contiguous:
        raise ValueError("the buffer is not contiguous")
    return view.cast("B")
