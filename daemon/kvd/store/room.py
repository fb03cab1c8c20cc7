"""Making room that takes longer than one go: the one part of the store that waits, and never for a tier or a client.

What the store calls `short` is done here: eviction goes on a slice at a time, with everybody else served in between; pages
being faulted in are waited for; and scattered free pages are made one run by moving values together (`compact`). The copying
is done by a thread, the decisions by the event loop.

A value is moved only while nobody looks at it (I2): it is pinned by us and by nobody else when its copy begins, readers may
pin it in its old place while it lasts, and the new place counts only if nobody has when it ends. All pages that a plan
touches are taken out of the allocator first, so nobody else gets them meanwhile. Where the arena has gone on living and a
step no longer fits, what is held is freed and another plan made; after ATTEMPTS of these the answer is "no room".

A request that is cancelled here leaves the plan that was begun for it to its end: a copy cannot be called back, and the
pages it writes to are nobody else's before it is over.
"""

import asyncio
import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from kvd.store import compact
from kvd.store.compact import Move, Plan
from kvd.store.extents import PAGE, pages_of
from kvd.store.index import LIVE
from kvd.store.shortage import Short, Wanted
from kvd.store.store import Store

ATTEMPTS = 4
GROUP_PAGES = 2048
"""Copied by the thread in one go: 8 MiB, or one large value."""
GROUP_MOVES = 256

Made = tuple[int | None, bool]
"""The room's offset, or None; and then whether another plan may do better."""


class Rooms:
    """Room in one store, for whoever may wait. Lives on the event loop."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._loop = asyncio.get_running_loop()
        self._growth = asyncio.Event()
        self._turn = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvd-moves")
        self._plans: set[asyncio.Task[Made]] = set()
        store.arena.when_grown(self._grown)

    async def make(self, length: int, deadline_s: float, wanted: Wanted) -> int | None:
        """Offset of room for `length` bytes, or None: nothing the daemon can do brings it, or the deadline (loop time) passed."""
        attempts = 0
        while (offset := self.store.make_room(length, wanted)) is None:
            short = self.store.short
            if short is Short.FULL or self._loop.time() >= deadline_s:
                return None
            if short is Short.SLICE:
                await asyncio.sleep(0)
            elif short is Short.GROWTH:
                await self._wait_for_growth(deadline_s)
            else:
                offset, again = await self._move_together(length, wanted)
                attempts += 1
                if offset is not None:
                    return offset
                if not again or attempts >= ATTEMPTS:
                    # Free, but not in one piece, and nobody may be moved: as good as full.
                    self.store.short = Short.FULL
                    return None
        return offset

    def close(self) -> None:
        """No more moves; one under way ends by itself."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    # ---- growth ------------------------------------------------------------------------------------------------------

    def _grown(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, the thread not yet
            self._loop.call_soon_threadsafe(self._growth.set)

    async def _wait_for_growth(self, deadline_s: float) -> None:
        self._growth.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(min(deadline_s, self._loop.time() + 1.0)):
                await self._growth.wait()

    # ---- moves -------------------------------------------------------------------------------------------------------

    async def _move_together(self, length: int, wanted: Wanted) -> Made:
        task = self._loop.create_task(self._compact(length, wanted))
        self._plans.add(task)
        task.add_done_callback(self._plans.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(lambda done: self._unwanted(done, length))
            raise

    def _unwanted(self, done: "asyncio.Task[Made]", length: int) -> None:
        if not done.cancelled() and done.exception() is None and (offset := done.result()[0]) is not None:
            self.store.give_back(offset, length)

    async def _compact(self, length: int, wanted: Wanted) -> Made:
        """One plan made and carried out; one at a time."""
        async with self._turn:
            offset = self.store.arena.alloc(length)  # another's moves may have made room for us too
            if offset is not None:
                return offset, False
            snapshot, pages = self._snapshot(), pages_of(length)
            plan = await self._loop.run_in_executor(self._thread, self._plan, snapshot, pages)
            if plan is None:
                return None, False
            held = _Held()
            try:
                if not await self._carry_out(plan, held, wanted):
                    return None, True
                held.take(plan.start, pages)
                return plan.start * PAGE, False
            finally:
                for start, count in held.runs():
                    self.store.arena.extents.free(start, count)

    def _plan(self, snapshot: compact.Snapshot, pages: int) -> Plan | None:
        return compact.plan(snapshot, pages, evict=self.store.evicting)

    async def _carry_out(self, plan: Plan, held: "_Held", wanted: Wanted) -> bool:
        """Do what the plan says, as long as the arena is as it was; `held` is what is out of the allocator because of it."""
        store, extents = self.store, self.store.arena.extents
        extents.merge()
        for start, pages in plan.claims:
            if not extents.claim(start, pages):
                return False
            held.add(start, pages)
        for group in _groups(plan.moves):
            if not await self._move(group, held):
                return False
        for slot, page, pages in plan.evictions:
            if not self._movable(slot, page):
                return False
            extents.merge()  # so that its pages, once free, are the last ones freed, and by themselves
            store.evict_one(slot, wanted)
            if not extents.claim(page, pages):
                return False
            held.add(page, pages)
        return held.has(plan.start, plan.pages)

    async def _move(self, group: list[Move], held: "_Held") -> bool:
        """Copy a group's values, all at once, and let those count that nobody has looked at."""
        store = self.store
        if not all(self._movable(move.slot, move.source) and held.has(move.target, move.pages) for move in group):
            return False
        slots = np.array([move.slot for move in group], dtype=np.int64)
        store.index.pin(slots)
        try:
            await self._loop.run_in_executor(self._thread, self._copy, group)
            done = [move for move in group if self._moved(move.slot, move.target)]
        finally:
            store.unpin(slots)
        for move in done:
            held.take(move.target, move.pages)
            held.add(move.source, move.pages)
        return len(done) == len(group)

    def _snapshot(self) -> compact.Snapshot:
        """What is free and what may be moved now, for a plan."""
        store, index = self.store, self.store.index
        used = slice(0, index.used)
        movable = np.flatnonzero((index.state[used] == LIVE) & (index.pins[used] == 0))
        free = store.arena.extents.free_runs()
        rows = np.fromiter((n for run in free for n in run), dtype=np.int64, count=2 * len(free)).reshape(-1, 2)
        pages = np.maximum(1, (index.length[movable].astype(np.int64) + PAGE - 1) // PAGE)
        evictable = np.full(len(movable), store.evicting) & ((index.dirty[movable] == 0) | store.evict_dirty)
        return compact.Snapshot(rows[:, 0], rows[:, 1], movable, index.start[movable].astype(np.int64), pages, evictable)

    def _movable(self, slot: int, page: int) -> bool:
        """Whether this slot's value still begins there and nobody looks at it."""
        index = self.store.index
        return index.state_of[slot] == LIVE and index.start_of[slot] == page and not index.pins_of[slot]

    def _moved(self, slot: int, page: int) -> bool:
        """A value pinned by us was copied to `page`: it is there from now on. False when somebody looks at the old bytes."""
        index, counts = self.store.index, self.store.counts
        if index.state_of[slot] != LIVE or index.pins_of[slot] != 1:
            return False
        counts.moves += 1
        counts.move_bytes += index.length_of[slot]
        index.start_of[slot] = page
        return True

    def _copy(self, group: list[Move]) -> None:
        for move in group:
            self.store.arena.copy(move.source * PAGE, move.target * PAGE, move.pages * PAGE)


def _groups(moves: list[Move]) -> Iterator[list[Move]]:
    """Moves that may be under way together."""
    group: list[Move] = []
    pages = 0
    for move in moves:
        if group and (move.after or pages + move.pages > GROUP_PAGES or len(group) >= GROUP_MOVES):
            yield group
            group, pages = [], 0
        group.append(move)
        pages += move.pages
    if group:
        yield group


class _Held:
    """Runs of pages that are out of the allocator: first page -> pages, neighbours merged."""

    def __init__(self) -> None:
        self._size: dict[int, int] = {}
        self._start: dict[int, int] = {}

    def runs(self) -> list[tuple[int, int]]:
        return list(self._size.items())

    def add(self, start: int, pages: int) -> None:
        before = self._start.pop(start, None)
        if before is not None:
            pages += self._size.pop(before)
            start = before
        after = self._size.pop(start + pages, None)
        if after is not None:
            del self._start[start + pages + after]
            pages += after
        self._size[start] = pages
        self._start[start + pages] = start

    def has(self, start: int, pages: int) -> bool:
        return self._around(start, pages) is not None

    def take(self, start: int, pages: int) -> None:
        """Let go of these pages, which are in there."""
        around = self._around(start, pages)
        assert around is not None
        size = self._size.pop(around)
        del self._start[around + size]
        if around < start:
            self.add(around, start - around)
        if around + size > start + pages:
            self.add(start + pages, around + size - start - pages)

    def _around(self, start: int, pages: int) -> int | None:
        if self._size.get(start, 0) >= pages:
            return start
        return next((at for at, size in self._size.items() if at <= start and start + pages <= at + size), None)
