"""Page-aligned scratch memory, and copies that let go of the GIL.

O_DIRECT needs aligned memory; what does not come from the arena goes through a buffer lent here. Buffers are anonymous
mappings (page-aligned, given back to the system when dropped), kept for reuse up to a cap because faulting fresh pages
costs as much as the copy. Concurrency: any thread.
"""

import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

_SMALLEST = 1 << 16
_GIL_COPY_MAX = 1 << 16

ZEROS = memoryview(mmap.mmap(-1, 4096)).toreadonly()
"""One aligned page of zeros: what pads the tail of a value."""


class BufferPool:
    """Lends aligned buffers of at least the size asked for (rounded up to a power of two)."""

    def __init__(self, keep_bytes: int = 32 << 20) -> None:
        self._keep_bytes = keep_bytes
        self._kept = 0
        self._free: dict[int, list[memoryview]] = {}
        self._lock = threading.Lock()

    def take(self, size: int) -> memoryview:
        """An aligned, writable buffer of at least `size` bytes, its old content undefined. It goes back by `give`."""
        whole = max(_SMALLEST, 1 << (size - 1).bit_length())
        with self._lock:
            shelf = self._free.get(whole)
            buffer = shelf.pop() if shelf else None
            if buffer is not None:
                self._kept -= whole
        return memoryview(mmap.mmap(-1, whole)) if buffer is None else buffer

    def give(self, buffer: memoryview) -> None:
        """Give a buffer back; nobody uses it any more."""
        whole = len(buffer)
        with self._lock:
            if self._kept + whole <= self._keep_bytes:
                self._free.setdefault(whole, []).append(buffer)
                self._kept += whole

    @contextmanager
    def lend(self, size: int) -> Iterator[memoryview]:
        """`take` for the length of a block."""
        buffer = self.take(size)
        try:
            yield buffer
        finally:
            self.give(buffer)


def _array(view: memoryview) -> NDArray[np.uint8]:
    return np.frombuffer(view, dtype=np.uint8)


def copy(target: memoryview, source: memoryview) -> None:
    """Copy `source` over the start of `target`; large copies run without the GIL (a slice assignment would hold it)."""
    if len(source) <= _GIL_COPY_MAX:
        target[: len(source)] = source
    else:
        np.copyto(_array(target)[: len(source)], _array(source))


def address(view: memoryview) -> int:
    """Where the memory of a non-empty view lies."""
    return int(_array(view).__array_interface__["data"][0])
