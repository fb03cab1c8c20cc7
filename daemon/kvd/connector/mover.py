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

    def __init__(self, buffer: Bytes, layouts: Sequence[GroupLayout]) -> None:
        self._lanes: list[list[Bytes]] = []
        for layout in layouts:
            views = [
                np.lib.stride_tricks.as_strided(
                    buffer[lane.offset :], shape=(layout.blocks, lane.length), strides=(lane.stride, 1), writeable=True
                )
                for lane in layout.lanes
            ]
            self._lanes.append(views)
        self._block_bytes = [layout.block_bytes for layout in layouts]

    def value_bytes(self, group: int, blocks: int) -> int:
        """Bytes of a chunk's value with that many blocks of the group (an index into the connector's groups)."""
        return self._block_bytes[group] * blocks

    def gather(self, group: int, ids: Sequence[int], into: Any) -> None:
        """Copy these blocks (no zeros) into `into`, a writable buffer of exactly their bytes."""
        value = np.frombuffer(into, dtype=np.uint8)
        at = 0
        found = list(runs(ids))
        for lane in self._lanes[group]:
            length = lane.shape[1]
            part = value[at : at + length * len(ids)].reshape(len(ids), length)
            for place, first, count in found:
                np.copyto(part[place : place + count], lane[first : first + count])
            at += length * len(ids)

    def scatter(self, group: int, ids: Sequence[int], source: Any) -> None:
        """Copy a value into these blocks; zeros are skipped. `source` has exactly the bytes of `len(ids)` blocks."""
        value = np.frombuffer(source, dtype=np.uint8)
        at = 0
        found = list(runs(ids))
        for lane in self._lanes[group]:
            length = lane.shape[1]
            part = value[at : at + length * len(ids)].reshape(len(ids), length)
            for place, first, count in found:
                np.copyto(lane[first : first + count], part[place : place + count])
            at += length * len(ids)
