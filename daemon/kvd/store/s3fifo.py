"""S3-FIFO: an eviction order that a scan does not upset (Yang et al., SOSP 2023), over the rows of the index.

Each retention class has two queues, first in, first out. A new value enters the *small* one, which holds a quarter of the
class's bytes. What leaves it unused is evicted, and its key is remembered for a while (the *ghost*); what was used meanwhile
moves to the *main* queue, and so does, at once, a value whose key the ghost knows. At the end of the main queue a value that
was used goes round again, with one use less (at most 3 are counted), and one that was not is evicted. So a long document
that is read once passes through the small queue and leaves the system prompts alone, where LRU would drop these for it.

Everything is O(1) amortised and a few bytes a row: the queues are doubly linked through two columns, uses are counted by one
vector operation a batch, the ghost is a table of fingerprints. Values that may not go now (pinned, or on their way to a
tier) are put to the other end of their queue; after SCAN of those the caller looks at all rows instead, as LRU does.

Not thread-safe: the event loop owns it, through the index; in adapters the owner of a `Ledger`.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

SMALL, MAIN = 1, 2
SMALL_PART = 4
"""The small queue's share of the bytes of its class is one in so many: more than the paper's tenth, since a conversation comes
back after minutes (tests/bench: a quarter is the best over all traces)."""
USES_MAX = 3
MOVE_AT = 1
"""Uses in the small queue that bring a value into the main one."""
SCAN = 64
GHOST_LEAST = 1024
WAYS = 4


class Ghost:
    """Keys that left not long ago: a table of 32-bit fingerprints, each with the time it left, counted in departures.

    A key has WAYS places, and takes the one that left longest ago.
    """

    def __init__(self) -> None:
        self._time = 0
        self._resize(GHOST_LEAST)

    def _resize(self, rows: int) -> None:
        self._rows = rows
        self._prints: npt.NDArray[np.uint32] = np.zeros(rows, dtype=np.uint32)
        self._times: npt.NDArray[np.uint32] = np.zeros(rows, dtype=np.uint32)
        self._print_of, self._time_of = self._prints.data, self._times.data

    def add(self, key: bytes, held: int) -> None:
        """This key has left; `held`: how many values there are, which is how many departures are remembered."""
        if held > self._rows:
            self._resize(2 * self._rows)  # what it knew is forgotten: it has to learn for the larger arena anyway
        self._time = self._time + 1 & 0xFFFFFFFF
        places, mark = self._places(key)
        row = min(places, key=self._time_of.__getitem__)
        self._print_of[row] = mark
        self._time_of[row] = self._time

    def take(self, key: bytes, held: int) -> bool:
        """Whether it knows the key; it does not any more then."""
        places, mark = self._places(key)
        for row in places:
            if self._print_of[row] == mark and (self._time - self._time_of[row] & 0xFFFFFFFF) <= max(held, GHOST_LEAST // 2):
                self._print_of[row] = self._time_of[row] = 0
                return True
        return False

    def _places(self, key: bytes) -> tuple[range, int]:
        # Keys are digests where engines make them, but nobody has to: hashed once more, they spread whatever they are.
        mixed = xxhash.xxh3_64_intdigest(key)
        first = mixed % (self._rows // WAYS) * WAYS
        return range(first, first + WAYS), mixed >> 32 | 1


class Links:
    """First in, first out: two queues a class, doubly linked through columns, and the bytes in each. Row 0 is never used."""

    def __init__(self, classes: int) -> None:
        self._rows = 0
        self._ends = [[0, 0, 0] for _ in range(classes)]  # newest of each queue
        self._starts = [[0, 0, 0] for _ in range(classes)]  # oldest
        self._bytes = [[0, 0, 0] for _ in range(classes)]

    newer: npt.NDArray[np.uint32]
    older: npt.NDArray[np.uint32]
    queue: npt.NDArray[np.uint8]
    """The queue a row is in; 0 where it is in none."""
    columns: tuple[tuple[str, type], ...] = (("newer", np.uint32), ("older", np.uint32), ("queue", np.uint8))

    def grow(self, rows: int) -> None:
        """Have that many rows."""
        for name, kind in self.columns:
            column: npt.NDArray[Any] = np.zeros(rows, dtype=kind)
            if self._rows:
                column[: self._rows] = getattr(self, name)
            setattr(self, name, column)
        self._newer_of, self._older_of, self._queue_of = self.newer.data, self.older.data, self.queue.data
        self._rows = rows

    def push(self, slot: int, klass: int, queue: int, length: int) -> None:
        """To the new end of a queue."""
        end = self._ends[klass][queue]
        self._older_of[slot] = end
        self._newer_of[slot] = 0
        if end:
            self._newer_of[end] = slot
        else:
            self._starts[klass][queue] = slot
        self._ends[klass][queue] = slot
        self._queue_of[slot] = queue
        self._bytes[klass][queue] += length

    def pull(self, slot: int, klass: int, length: int) -> int:
        """Out of the queue it is in; which that was."""
        queue = self._queue_of[slot]
        older, newer = self._older_of[slot], self._newer_of[slot]
        if older:
            self._newer_of[older] = newer
        else:
            self._starts[klass][queue] = newer
        if newer:
            self._older_of[newer] = older
        else:
            self._ends[klass][queue] = older
        self._queue_of[slot] = 0
        self._bytes[klass][queue] -= length
        return queue

    def renew(self, slot: int, klass: int, length: int) -> None:
        """To the new end of the queue it is in."""
        self.push(slot, klass, self.pull(slot, klass, length), length)

    def oldest_first(self, klass: int, queue: int) -> Iterator[int]:
        """One queue's rows; not to be changed meanwhile."""
        slot = self._starts[klass][queue]
        while slot:
            yield slot
            slot = self._newer_of[slot]


class Queues(Links):
    """Both queues of every class. `blocked(slot, spare_dirty)` says whether a value may not go now."""

    def __init__(self, classes: int, blocked: Callable[[int, bool], bool]) -> None:
        super().__init__(classes)
        self._blocked = blocked
        self._count = 0
        self.ghost = Ghost()

    uses: npt.NDArray[np.uint8]
    columns = (*Links.columns, ("uses", np.uint8))

    def grow(self, rows: int) -> None:
        super().grow(rows)
        self._uses_of = self.uses.data

    # ---- what happens to values --------------------------------------------------------------------------------------

    def added(self, slot: int, klass: int, key: bytes, length: int, *, main: bool = False) -> None:
        """A new value; one that left not long ago goes to the main queue, and so does one of which `main` is said."""
        self._uses_of[slot] = 0
        self._count += 1
        known = self.ghost.take(key, self._count)
        self.push(slot, klass, MAIN if known or main else SMALL, length)

    def removed(self, slot: int, klass: int, length: int) -> None:
        """A value that is not there any more."""
        self._count -= 1
        self.pull(slot, klass, length)

    def used(self, slots: npt.NDArray[np.int64]) -> None:
        """These were read."""
        self.uses[slots] = np.minimum(self.uses[slots] + 1, USES_MAX)

    def used_one(self, slot: int) -> None:
        """`used` for one."""
        uses = self._uses_of[slot]
        if uses < USES_MAX:
            self._uses_of[slot] = uses + 1

    # ---- who goes next -----------------------------------------------------------------------------------------------

    def victim(self, klass: int, spare_dirty: bool, key_of: Callable[[int], bytes | None], length_of: "memoryview[int]") -> int:
        """Who goes next in a class; 0 when SCAN values in a row may not go now, or there is none."""
        starts, held = self._starts[klass], self._bytes[klass]
        skipped = 0
        while skipped < SCAN and (starts[SMALL] or starts[MAIN]):
            small = starts[SMALL] and (held[SMALL] * SMALL_PART >= held[SMALL] + held[MAIN] or not starts[MAIN])
            slot = starts[SMALL if small else MAIN]
            length = length_of[slot]
            if self._blocked(slot, spare_dirty):
                skipped += 1
                self.renew(slot, klass, length)
            elif small and self._uses_of[slot] >= MOVE_AT:
                self.pull(slot, klass, length)
                self._uses_of[slot] = 0
                self.push(slot, klass, MAIN, length)
            elif not small and self._uses_of[slot]:
                self._uses_of[slot] -= 1
                self.renew(slot, klass, length)
            else:
                key = key_of(slot)
                if small and key is not None:
                    self.ghost.add(key, self._count)
                return slot
        return 0
