"""Memory for a chain's work: page-aligned, used again, and never more than a budget.

Whoever needs memory says how much before the work begins and waits until it is there, so nobody waits while holding some.
A single need above the whole budget is met when nobody else holds any: the cap is the budget, or the largest value's need.
Sizes are rounded up by an eighth at most, so that what one value used fits the next.
"""

import mmap
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

PAGE = 4096


def rounded(length: int) -> int:
    """Bytes of the buffer that is used for `length`: whole pages, four significant bits."""
    pages = max(1, -(-length // PAGE))
    grain = 1 << max(0, pages.bit_length() - 4)
    return -(-pages // grain) * grain * PAGE


class Buffers:
    """Buffers within `budget` bytes. Thread-safe."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.held = 0
        self.peak = 0
        self._idle: dict[int, list[memoryview]] = {}
        self._idle_bytes = 0
        self._changed = threading.Condition()

    @contextmanager
    def lend(self, lengths: Sequence[int]) -> Iterator[list[memoryview]]:
        """A buffer of each of these lengths, until the end of the block."""
        sizes = [rounded(length) for length in lengths]
        need = sum(sizes)
        with self._changed:
            while self.held and self.held + need > self.budget:
                self._changed.wait()
            self.held += need
            self.peak = max(self.peak, self.held)
            found = [self._take(size) for size in sizes]
            self._trim()
        buffers = [one if one is not None else memoryview(mmap.mmap(-1, size)) for one, size in zip(found, sizes, strict=True)]
        try:
            yield [buffer[:length] for buffer, length in zip(buffers, lengths, strict=True)]
        finally:
            with self._changed:
                self.held -= need
                for buffer in buffers:
                    self._idle.setdefault(len(buffer), []).append(buffer)
                    self._idle_bytes += len(buffer)
                self._trim()
                self._changed.notify_all()

    def _take(self, size: int) -> memoryview | None:
        """An idle buffer of this size."""
        kept = self._idle.get(size)
        if not kept:
            return None
        self._idle_bytes -= size
        return kept.pop()

    def _trim(self) -> None:
        """Let go of idle buffers, the largest first, until all together keep to the budget."""
        for size in sorted(self._idle, reverse=True):
            while self._idle[size] and self.held + self._idle_bytes > self.budget:
                self._idle[size].pop()
                self._idle_bytes -= size
            if not self._idle[size]:
                del self._idle[size]
