"""When values expire: a plan that costs a few bytes a value and O(log n) an expiry.

Expiries far off wait in buckets of about a second, as bare slot numbers; when a bucket's second comes, its slots move to a
small heap, which is exact to the nanosecond. What a bucket or the heap says is only a hint: the index's columns decide. So a
value that leaves early, or whose slot is used again, costs nothing here until its bucket is opened; and when most of the
hints are dead, the index has the plan made anew from its columns.
"""

import heapq
from array import array
from collections.abc import Callable, Iterable

_SECOND = 30
"""Buckets of 2**30 ns."""
_SLOT = 32


class Expiries:
    """Hints (expiry, slot), earliest first."""

    def __init__(self) -> None:
        self.hints = 0
        self._buckets: dict[int, array[int]] = {}
        self._order: list[int] = []  # heap of the buckets' numbers
        self._open: list[int] = []  # heap of expiry << 32 | slot
        self._opened = -1

    def plan(self, slot: int, expires_ns: int) -> None:
        """This slot's value expires then."""
        self.hints += 1
        number = expires_ns >> _SECOND
        if number <= self._opened:
            heapq.heappush(self._open, expires_ns << _SLOT | slot)
            return
        bucket = self._buckets.get(number)
        if bucket is None:
            bucket = self._buckets[number] = array("I")
            heapq.heappush(self._order, number)
        bucket.append(slot)

    def due(self, now_ns: int, expiry_of: Callable[[int], int]) -> int:
        """Take out a slot that has expired, the earliest first; 0 when none has. `expiry_of`: what its value has now, or 0."""
        while True:
            while self._order and self._order[0] <= now_ns >> _SECOND:
                self._open_bucket(heapq.heappop(self._order), expiry_of)
            if not self._open or self._open[0] >> _SLOT > now_ns:
                return 0
            hint = heapq.heappop(self._open)
            self.hints -= 1
            slot = hint & (1 << _SLOT) - 1
            if expiry_of(slot) == hint >> _SLOT:
                return slot

    def _open_bucket(self, number: int, expiry_of: Callable[[int], int]) -> None:
        bucket = self._buckets.pop(number)
        live = [expires << _SLOT | slot for slot in bucket if (expires := expiry_of(slot)) and expires >> _SECOND == number]
        self.hints -= len(bucket) - len(live)
        self._open += live
        heapq.heapify(self._open)
        self._opened = max(self._opened, number)

    def rebuild(self, rows: Iterable[tuple[int, int]]) -> None:
        """Start again from (slot, expiry) of what is held."""
        self.__init__()  # type: ignore[misc]
        for slot, expires_ns in rows:
            self.plan(slot, expires_ns)
