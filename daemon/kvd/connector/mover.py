"""The copies between the engine's KV memory and the arena.

numpy copies let go of the GIL, which matters twice: the engine's step runs in the same process as the loading threads, and
an in-process engine spins without sleeping. Consecutive block ids, the usual case, are one copy a lane.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvd.connector.layout import GroupLayout

Bytes = NDArray[np.uint8]


def runs(ids: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Runs of consecutive non-zero ids, as (place in `ids`, first id, how many). Zeros are left out.

    >>> list(runs([0, 5, 6, 7, 2, 0, 9]))
    [(1, 5, 3), (4, 2, 1), (6, 9, 1)]
    """
    place = 0
    while place < len(ids):
        first = ids[place]
        count = 1
        while place + count < len(ids) and ids[place + count] == first + count and first:
            count += 1
        if first:
            yield place, first, count
        place += count


class HostMover:
    """Copies for an engine whose KV memory is this process's own memory. `buffer`: all of it, as bytes."""

    parallel = True
    """Several threads may copy at once. (On a device copies belong to their thread's stream.)"""

    def __init__(self, buffer: Bytes, layouts: Sequence[GroupLayout]) -> None:
        self._lanes: list[list[tuple[Bytes, int]]] = []
        for layout in layouts:
            views = []
            for lane in layout.lanes:
                rest = buffer[lane.offset :]
                if lane.stride == lane.length:
                    # Blocks without gaps: a run of them is one copy of plain bytes, the quickest there is.
                    views.append((rest[: layout.blocks * lane.length], lane.length))
                else:
                    shape, strides = (layout.blocks, lane.length), (lane.stride, 1)
                    views.append((np.lib.stride_tricks.as_strided(rest, shape=shape, strides=strides, writeable=True), 0))
            self._lanes.append(views)
        self._lengths = [[lane.length for lane in layout.lanes] for layout in layouts]
        self._block_bytes = [layout.block_bytes for layout in layouts]

    def value_bytes(self, group: int, blocks: int) -> int:
        """Bytes of a chunk's value with that many blocks of the group (an index into the connector's groups)."""
        return self._block_bytes[group] * blocks

    def gather(self, group: int, ids: Sequence[int], into: Any) -> None:
        """Copy these blocks (no zeros) into `into`, a writable buffer of exactly their bytes."""
        for place, part in self._pieces(group, ids, np.frombuffer(into, dtype=np.uint8)):
            np.copyto(part, place)

    def scatter(self, group: int, ids: Sequence[int], source: Any) -> None:
        """Copy a value into these blocks; zeros are skipped. `source` has exactly the bytes of `len(ids)` blocks."""
        for place, part in self._pieces(group, ids, np.frombuffer(source, dtype=np.uint8)):
            np.copyto(place, part)

    def _pieces(self, group: int, ids: Sequence[int], value: Bytes) -> Iterator[tuple[Bytes, Bytes]]:
        """What belongs together: a run of blocks in one lane of the memory, and the same bytes in the value."""
        at = 0
        found = list(runs(ids))
        for (lane, dense), length in zip(self._lanes[group], self._lengths[group], strict=True):
            for place, first, count in found:
                part = value[at + place * length : at + (place + count) * length]
                if dense:
                    yield lane[first * dense : (first + count) * dense], part
                else:
                    yield lane[first : first + count], part.reshape(count, length)
            at += length * len(ids)
