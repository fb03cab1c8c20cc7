"""How much would be found with more RAM, or less: an online miss-ratio curve by SHARDS (Waldspurger et al., FAST 2015).

A value would be found in an LRU arena of C bytes exactly if fewer than C bytes of other values were used since its own last
use: its *reuse distance*. Distances of a sample of the keys tell the whole curve: a key is in the sample when its hash lies
below a threshold, so that either all uses of it count or none; what lies between two uses of a sampled key is counted among
the sampled ones and scaled up. A use is a value that was read or put: what an engine needed, and found or had to compute.

Bounds. Memory: SAMPLES keys (when there are more, the one with the highest hash goes, and the threshold is lowered to it) and
a histogram for each account. Time: a flag in the row says whether a value is sampled, one vector operation a batch; a
sampled use costs some microseconds, and more than LIMIT of them in a tick halve the sample at once. When it has been small
for long, it begins anew, larger.

Two refinements: the histogram fades (a tenth an hour), so the curve follows the load; and it is known exactly how many bytes
were used in all, so what a small sample missed or had too much of (a few very popular keys in or out of it) is made up for at
distance zero, where popular keys are (SHARDS-adj).

Not thread-safe: the event loop owns it.
"""

import heapq
import math
from collections.abc import Callable

from kvd.store.accounts import Account

SAMPLES = 4096
LIMIT = 150
"""Sampled uses in a tick (a tenth of a second) that are too many: at 3 to 4 us each, half a percent of a core."""
_BLOCK = 6
"""Places in a block, as a power of two."""
FULL = 1 << 24
_MASK = FULL - 1
STEPS = 8
"""Buckets of the histogram for each doubling of the distance."""
_BUCKETS = STEPS * 50
FADE_S = 3600.0
FADE = 0.9
GROW_S = 600.0
LARGEST = 8
"""Accounts whose own curves are published: with the one of all as many label sets as fit one metric."""
LOOK_TICKS = 20
"""What is published is worked out anew this often."""
SCALES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Sizes of the arena for which the curve is published, as multiples of what it is."""


class Curve:
    """One account's histogram of reuse distances, in sampled bytes."""

    def __init__(self) -> None:
        self.uses = [0.0] * _BUCKETS
        self.cold = 0.0
        """First uses: no arena would have had these."""
        self.expected = 0.0
        """What the sample should have seen of the account's bytes."""

    def add(self, distance: float, size: int) -> None:
        """A use of `size` bytes at that distance."""
        self.uses[min(_BUCKETS - 1, int(STEPS * math.log2(max(distance, 1.0))))] += size

    def scale(self, factor: float) -> None:
        """Everything times `factor`."""
        self.uses = [uses * factor for uses in self.uses]
        self.cold *= factor
        self.expected *= factor

    def join(self, other: "Curve") -> None:
        """Add another one's."""
        self.uses = [mine + theirs for mine, theirs in zip(self.uses, other.uses, strict=True)]
        self.cold += other.cold
        self.expected += other.expected

    @property
    def seen(self) -> float:
        """Sampled bytes in it."""
        return sum(self.uses) + self.cold

    def share(self, capacity: float) -> float | None:
        """Share of the bytes used that an LRU arena of so many bytes would have had; None while nothing was sampled."""
        seen = self.seen
        if not seen:
            return None
        missed = self.expected - seen if self.expected else 0.0
        place = STEPS * math.log2(max(capacity, 1.0))
        whole = min(_BUCKETS, int(place))
        hits = sum(self.uses[:whole]) + (self.uses[whole] * (place - whole) if whole < _BUCKETS else 0.0)
        total = max(seen + missed, 1e-9)
        return min(1.0, max(0.0, (hits + missed) / total))


class Reuse:
    """The sample, and the curves made of it."""

    def __init__(self, *, samples: int = SAMPLES, limit: int = LIMIT, monotonic: Callable[[], float] | None = None) -> None:
        self.samples = samples
        self.limit = limit
        self.threshold = FULL
        self.curves: dict[Account, Curve] = {}
        self.uses = 0
        """Sampled uses since the sample began."""
        self.uses_total = 0
        self._used: dict[Account, int] = {}  # bytes used that `expected` knows of
        self._monotonic = monotonic
        self._this_tick = self._busiest = self._ticks = 0
        self.changes = 0
        """Differs when what there is to publish does."""
        self.largest: tuple[Account, ...] = ()
        """The accounts that use most, in an order that does not change with how much."""
        self._all = Curve()
        self._faded_s = self._looked_s = 0.0
        self._begin()

    def _begin(self) -> None:
        self._last: dict[int, int] = {}  # hash -> place in the order of last uses
        self._clear_order()
        self._heap: list[tuple[int, int]] = []  # (-hash below the mask, hash) of what is in the sample
        self.uses = 0

    @property
    def watched(self) -> int:
        """Keys in the sample."""
        return len(self._last)

    @property
    def rate(self) -> float:
        """Share of the keys that are in the sample."""
        return self.threshold / FULL

    def holds(self, mark: int) -> bool:
        """Whether a key with this hash is in the sample."""
        return mark & _MASK < self.threshold

    def use(self, mark: int, account: Account, size: int) -> bool:
        """A key of the sample was used; False when it is in there no more."""
        self._this_tick += 1
        while self._this_tick > self.limit and self.threshold > 1:
            self._lower(self.threshold // 2)
            self._this_tick //= 2
        if not self.holds(mark):
            return False
        self.uses += 1
        self.uses_total += 1
        curve = self.curves.get(account)
        if curve is None:
            curve = self.curves[account] = Curve()
            self._used.setdefault(account, account.get_bytes + account.set_bytes - size)
        place = self._last.get(mark)
        if place is None:
            curve.cold += size
            heapq.heappush(self._heap, (-(mark & _MASK), mark))
        else:
            curve.add((self._total - self._sum(place)) / self.rate + size, size)
            self._put(place, 0)
        if self._next > 2 * self.samples:
            self._compact()
        self._last[mark] = self._next
        self._put(self._next, size)
        self._next += 1
        if len(self._last) > self.samples:
            self._lower(-self._heap[0][0])
        return True

    # ---- the order of last uses --------------------------------------------------------------------------------------

    def _put(self, place: int, size: int) -> None:
        """So many bytes were last used at this place."""
        change = size - self._sizes[place]
        self._sizes[place] = size
        self._blocks[place >> _BLOCK] += change
        self._total += change

    def _sum(self, place: int) -> int:
        """Bytes last used up to this place: whole blocks, and the beginning of one. Two sums in C beat any tree in Python."""
        block = place >> _BLOCK
        return sum(self._blocks[:block]) + sum(self._sizes[block << _BLOCK : place + 1])

    def _compact(self) -> None:
        """Close the gaps."""
        rows = [(mark, self._sizes[place]) for mark, place in sorted(self._last.items(), key=lambda row: row[1])]
        self._clear_order()
        for place, (mark, size) in enumerate(rows, 1):
            self._last[mark] = place
            self._put(place, size)
        self._next = len(rows) + 1

    def _clear_order(self) -> None:
        places = 2 * self.samples + 1
        self._sizes = [0] * places  # by place in the order of last uses
        self._blocks = [0] * ((places >> _BLOCK) + 1)  # sums of these
        self._total = 0
        self._next = 1

    def _lower(self, threshold: int) -> None:
        """Keep only keys whose hash lies below; what was seen so far counts for as much less."""
        threshold = max(1, threshold)
        if threshold >= self.threshold:
            return
        for curve in self.curves.values():
            curve.scale(threshold / self.threshold)
        self.threshold = threshold
        while self._heap and -self._heap[0][0] >= threshold:
            _, mark = heapq.heappop(self._heap)
            place = self._last.pop(mark)
            self._put(place, 0)

    # ---- time --------------------------------------------------------------------------------------------------------

    def tick(self, now_s: float, accounts: "list[Account]", other: Account) -> bool:
        """Periodic: learn what was used in all, fade, and see whether the sample could be larger. True when it began anew."""
        self._busiest = max(self._busiest, self._this_tick)
        self._this_tick = 0
        self._ticks += 1
        self._expect(accounts, other)
        if self._ticks % LOOK_TICKS == 1:
            self._look(other)
        self._faded_s = self._faded_s or now_s
        self._looked_s = self._looked_s or now_s
        if now_s - self._faded_s >= FADE_S:
            self._faded_s = now_s
            for curve in self.curves.values():
                curve.scale(FADE)
        if now_s - self._looked_s < GROW_S:
            return False
        self._looked_s = now_s
        idle, self._busiest = 0 < self._busiest < self.limit // 8, 0
        if not idle or self.threshold == FULL or len(self._last) >= self.samples // 8:
            return False
        self.threshold = min(FULL, 4 * self.threshold)
        self.curves.clear()
        self._used.clear()
        self._begin()
        return True

    def _look(self, other: Account) -> None:
        """Work out what is published."""
        self.changes = self.uses_total
        self._all = Curve()
        for curve in self.curves.values():
            self._all.join(curve)
        own = sorted((account for account in self.curves if account is not other), key=lambda a: -self.curves[a].expected)
        self.largest = tuple(sorted(own[:LARGEST], key=lambda account: account.name))

    def _expect(self, accounts: "list[Account]", other: Account) -> None:
        for account in [account for account in self.curves if account is not other and account not in accounts]:
            # It is `other` from now on, with all that it had counted.
            self.curves.setdefault(other, Curve()).join(self.curves.pop(account))
            self._used[other] = self._used.get(other, 0) + self._used.pop(account, 0)
        for account, curve in self.curves.items():
            used = account.get_bytes + account.set_bytes
            curve.expected += max(0, used - self._used.get(account, used)) * self.rate
            self._used[account] = used

    # ---- what it says ------------------------------------------------------------------------------------------------

    def share(self, capacity: float, account: Account | None = None) -> float | None:
        """Share of the bytes used (by that account) that an arena of so many bytes would have had; None: not known yet."""
        if account is not None:
            curve = self.curves.get(account)
            return curve.share(capacity) if curve is not None else None
        return self._all.share(capacity)
