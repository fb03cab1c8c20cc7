"""Which values to move, so that scattered free pages become one run: a plan, made from a snapshot, on any thread.

The arena seen from below is a row of pieces: free runs, values that may be moved, and all else (pinned, lent, being filled),
which may not. A *window* is a stretch without the third kind that is large enough for what wants in. The cheapest windows
(fewest pages to move, and a little for each value) are tried first: every value in it needs a place in some free run
outside. One that fits nowhere may have a window of its own made for it, elsewhere, two deep at most. That fills an arena
of mixed sizes to 93 % and more before a value is refused, in thousands of random mixes; without it, to half in bad cases.

A move never overlaps itself, so a value is whole in its old place until it is whole in the new one: readers need not wait.
Where a policy evicts, values that fit nowhere go instead (`evict`): the cheapest window's, and no others.

A plan is only a proposal. The arena goes on living while it is made; whoever carries it out checks every step (see `room`).
"""

import bisect
import time
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]

HOLES = 4096
"""So many free runs are considered as places, the largest."""
TRIES = 48
DEPTH = 2
TIME_S = 0.1
_EACH = 16
"""What moving a value costs beside its pages, in pages."""
_FREE, _MOVABLE, _FIXED = 0, 1, 2


@dataclass(slots=True)
class Snapshot:
    """Free runs and movable values at one moment: first pages and pages. `evictable`: which values may also be evicted."""

    free_starts: Numbers
    free_pages: Numbers
    slots: Numbers
    starts: Numbers
    pages: Numbers
    evictable: npt.NDArray[np.bool_]


@dataclass(slots=True)
class Move:
    """Move a slot's pages. `after`: it goes to where an earlier move of the plan came from, so that must be done."""

    slot: int
    source: int
    target: int
    pages: int
    after: bool


@dataclass(slots=True)
class Plan:
    """Take the free runs `claims`, carry out `moves` in order, evict `evictions`: then `pages` from `start` are free and ours."""

    start: int
    pages: int
    claims: list[tuple[int, int]] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    evictions: list[tuple[int, int, int]] = field(default_factory=list)
    """(slot, first page, pages) each."""


def plan(snapshot: Snapshot, pages: int, *, evict: bool) -> Plan | None:
    """How to get a free run of `pages`, or None when there is no way (that is looked for)."""
    planner = _Planner(snapshot)
    found = planner.window(pages, DEPTH)
    if found is None and evict:
        found = planner.evicting(pages)
    return None if found is None else planner.finish(*found)


class _Planner:
    """The pieces, and what the plan so far has done to them."""

    def __init__(self, snapshot: Snapshot) -> None:
        starts = np.concatenate([snapshot.free_starts, snapshot.starts])
        order = np.argsort(starts, kind="stable")
        free = len(snapshot.free_starts)
        self.start = starts[order]
        self.size = np.concatenate([snapshot.free_pages, snapshot.pages])[order]
        self.slot = np.concatenate([np.zeros(free, dtype=np.int64), snapshot.slots])[order]
        self.kind = np.where(order < free, _FREE, _MOVABLE).astype(np.uint8)
        self.evictable = np.concatenate([np.zeros(free, dtype=bool), snapshot.evictable])[order]
        self.apart = np.ones(len(self.start), dtype=bool)
        """Whether something lies between this piece and the one before."""
        self.apart[1:] = self.start[1:] != self.start[:-1] + self.size[:-1]
        rows = np.flatnonzero(self.kind == _FREE)
        if len(rows) > HOLES:
            rows = rows[np.argpartition(self.size[rows], -HOLES)[-HOLES:]]
        self.holes = sorted(zip(self.size[rows].tolist(), self.start[rows].tolist(), strict=True))
        """Places for what must move: (pages, first page), sorted."""
        self.from_windows: set[int] = set()
        """First pages of places that are free only once the moves before are done."""
        self.used: set[int] = set()
        """Rows of free runs that the plan takes."""
        self.row_at = dict(zip(self.start[rows].tolist(), rows.tolist(), strict=True))
        self.moves: list[Move] = []
        self.evictions: list[tuple[int, int, int]] = []
        self.left = TRIES
        self.until = time.monotonic() + TIME_S

    def finish(self, start: int, pages: int) -> Plan:
        claims = [(int(self.start[row]), int(self.size[row])) for row in sorted(self.used)]
        return Plan(start, pages, claims, self.moves, self.evictions)

    # ---- windows -----------------------------------------------------------------------------------------------------

    def candidates(self, pages: int, most: int) -> list[tuple[int, int]]:
        """Windows as (first row, row after the last), cheapest first."""
        count = len(self.start)
        if not count:
            return []
        size = np.cumsum(self.size)
        before = size - self.size
        cost = np.cumsum(np.where(self.kind == _MOVABLE, self.size + _EACH, 0))
        fixed = np.cumsum(self.kind == _FIXED)
        cuts = np.cumsum(self.apart)
        last = np.searchsorted(size, before + pages)
        first = np.flatnonzero(last < count)
        last = last[first]
        good = (cuts[last] == cuts[first]) & (fixed[last] - fixed[first] + (self.kind[first] == _FIXED) == 0)
        first, last = first[good], last[good]
        price = cost[last] - cost[first] + np.where(self.kind[first] == _MOVABLE, self.size[first] + _EACH, 0)
        if len(price) > most:
            cheap = np.argpartition(price, most)[:most]
            first, last, price = first[cheap], last[cheap], price[cheap]
        order = np.argsort(price, kind="stable")
        return [(int(first[i]), int(last[i]) + 1) for i in order]

    def window(self, pages: int, depth: int) -> tuple[int, int] | None:
        """Free a window by moves alone: its first page and pages. None when no candidate can be; then nothing has changed."""
        for first, end in self.candidates(pages, TRIES if depth == DEPTH else TRIES // 4):
            if self.left <= 0 or time.monotonic() > self.until:
                return None
            self.left -= 1
            if self._empty(first, end, depth):
                return self._span(first, end)
        return None

    def evicting(self, pages: int) -> tuple[int, int] | None:
        """Free the window that costs the fewest evicted pages; what fits elsewhere is moved."""
        best: tuple[int, int, int] | None = None
        for first, end in self.candidates(pages, TRIES):
            before = self._state()
            lost = self._empty_or_evict(first, end)
            self._restore(before)
            if lost is not None and (best is None or lost < best[0]):
                best = (lost, first, end)
        if best is None:
            return None
        _, first, end = best
        self._empty_or_evict(first, end)
        return self._span(first, end)

    def _span(self, first: int, end: int) -> tuple[int, int]:
        start = int(self.start[first])
        return start, int(self.start[end - 1] + self.size[end - 1]) - start

    def _empty(self, first: int, end: int, depth: int) -> bool:
        """Find a place for every value of the window. Whatever fails is undone."""
        before = self._state()
        blocks = self._seize(first, end)
        if blocks and depth == 0 and (not self.holes or self.holes[-1][0] < int(self.size[blocks[0]])):
            self._restore(before)
            return False
        for row in blocks:
            if not self._place(row) and not (depth and self._make_place(row, depth)):
                self._restore(before)
                return False
        return True

    def _empty_or_evict(self, first: int, end: int) -> int | None:
        """The same, evicting what fits nowhere: how many pages of that, or None when one of these may not be evicted."""
        lost = 0
        for row in self._seize(first, end):
            if self._place(row):
                continue
            if not self.evictable[row]:
                return None
            lost += int(self.size[row])
            self.evictions.append((int(self.slot[row]), int(self.start[row]), int(self.size[row])))
        return lost

    def _seize(self, first: int, end: int) -> list[int]:
        """The window's free runs are no places any more; its values, largest first."""
        rows = np.arange(first, end)
        kinds = self.kind[first:end]
        for row in rows[kinds == _FREE].tolist():
            self.used.add(row)
            hole = (int(self.size[row]), int(self.start[row]))
            at = bisect.bisect_left(self.holes, hole)
            if at < len(self.holes) and self.holes[at] == hole:
                del self.holes[at]
        blocks = rows[kinds == _MOVABLE]
        blocks = blocks[np.argsort(-self.size[blocks], kind="stable")]
        self.kind[first:end] = _FIXED
        return blocks.tolist()  # type: ignore[no-any-return]

    def _place(self, row: int) -> bool:
        """Move a value to the smallest free run that holds it."""
        pages = int(self.size[row])
        at = bisect.bisect_left(self.holes, (pages, -1))
        if at == len(self.holes):
            return False
        size, start = self.holes.pop(at)
        later = start in self.from_windows
        if not later and (hole := self.row_at.get(start)) is not None and hole not in self.used:
            self.used.add(hole)
            self.kind[hole] = _FIXED
        self.moves.append(Move(int(self.slot[row]), int(self.start[row]), start, pages, later))
        if size > pages:
            bisect.insort(self.holes, (size - pages, start + pages))
            if later:
                self.from_windows.add(start + pages)
        return True

    def _make_place(self, row: int, depth: int) -> bool:
        """Free another window, and put the value there."""
        found = self.window(int(self.size[row]), depth - 1)
        if found is None:
            return False
        start, pages = found
        bisect.insort(self.holes, (pages, start))
        self.from_windows.add(start)
        return self._place(row)

    # ---- undoing -----------------------------------------------------------------------------------------------------

    def _state(self) -> "_State":
        holes, used, windows = list(self.holes), set(self.used), set(self.from_windows)
        return _State(holes, used, windows, len(self.moves), len(self.evictions), self.kind.copy())

    def _restore(self, state: "_State") -> None:
        self.holes, self.used, self.from_windows, self.kind = state.holes, state.used, state.from_windows, state.kind
        del self.moves[state.moves :], self.evictions[state.evictions :]


@dataclass(slots=True)
class _State:
    """What a try changes, as it was before."""

    holes: list[tuple[int, int]]
    used: set[int]
    from_windows: set[int]
    moves: int
    evictions: int
    kind: npt.NDArray[np.uint8]
