"""KVCacheManager: blocks over pages. Best fit, reservation, and a limit that is reached by draining.

A page in use has blocks that are free; they lie in buckets by their number, so the fullest page that still holds a request is
found in one step (best fit: emptying pages empty, full ones fill). A page whose last block is freed goes back to the allocator.

Limits. `resize` first unmaps reserved pages; then it asks the *reclaimer* (an engine's prefix cache) to give up blocks nobody
uses, least recently used first; what is still above the limit is *drained*: the pages with the fewest blocks in use
are closed to new blocks and vanish as theirs are freed. So a limit below use is always reached when today's blocks are gone,
however busy the pool is. `over_pages` says how far there is to go. A higher limit opens drained pages again.

Cost: alloc and free of a block in a warm page are a few list operations under one lock. Concurrency: every method takes the
lock, and it is reentrant: the reclaimer calls `free` from inside `resize`.
"""

import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from kvtools.elastic.memory import OutOfMemory
from kvtools.elastic.pages import PageAllocator, PoolExhausted
from kvtools.errors import UsageError


class Reclaimer(Protocol):
    """Who holds blocks that may be given up: an engine's prefix cache."""

    def reclaim(self, pages: int) -> None:
        """Free cached blocks so that up to `pages` whole pages become empty, least recently used first."""

    def drained(self, pages: Iterable[int]) -> None:
        """These pages are closed: forget what is cached on them, so that nobody comes back to it."""


class Resized(NamedTuple):
    """What a limit came to. `over_pages` are in use above it and are given back as their blocks are freed."""

    limit_bytes: int
    effective_bytes: int
    over_pages: int
    reason: str = ""


class Usage(NamedTuple):
    """A pool's numbers at one moment. Pages and blocks are counts."""

    pages: int
    target_pages: int
    used_pages: int
    reserved_pages: int
    draining_pages: int
    held_blocks: int
    free_blocks: int
    """Free blocks on pages in use: mapped, and unused."""


class KVCacheManager:
    """Blocks 0 to `blocks` - 1, `blocks_per_page` a page of `allocator`."""

    def __init__(self, allocator: PageAllocator, blocks: int, blocks_per_page: int, page_bytes: int) -> None:
        if -(-blocks // blocks_per_page) != allocator.pages:
            raise UsageError(f"{blocks} blocks at {blocks_per_page} a page are not {allocator.pages} pages")
        self.allocator = allocator
        self.blocks = blocks
        self.blocks_per_page = blocks_per_page
        self.page_bytes = page_bytes
        self.reclaimer: Reclaimer | None = None
        self.limit_bytes = allocator.pages * page_bytes
        self._pinned: int | None = None
        self._last_page = allocator.pages - 1
        self._last_capacity = blocks - self._last_page * blocks_per_page
        self._lock: threading.RLock = allocator.lock
        self._reset()

    def _reset(self) -> None:
        per_page = self.blocks_per_page
        self._held = bytearray(self.blocks)
        self._free: dict[int, list[int]] = {}
        self._buckets: list[dict[int, None]] = [{} for _ in range(per_page + 1)]
        self._mask = 0
        self._spare = 0
        self._reserved: list[int] = []
        self.draining: set[int] = set()
        self.held = 0

    def _capacity(self, page: int) -> int:
        return self._last_capacity if page == self._last_page else self.blocks_per_page

    # Buckets hold the pages in use that are open to new blocks and have some free, by how many.
    def _bucket(self, page: int, count: int) -> None:
        if count:
            self._buckets[count][page] = None
            self._mask |= 1 << count

    def _unbucket(self, page: int, count: int) -> None:
        if count:
            bucket = self._buckets[count]
            del bucket[page]
            if not bucket:
                self._mask &= ~(1 << count)

    def alloc(self, count: int) -> list[int] | None:
        """`count` block ids with memory under them, or None where limit or device do not allow it. Raises DriverError."""
        with self._lock:
            if self._spare >= count and not self._reserved:
                return self._take(count)
            ready = self._reserved[:count]
            count -= len(ready)
            if self._spare < count and not self._open(count):
                return None
            if ready:
                del self._reserved[: len(ready)]
            return ready + self._take(count)

    def _open(self, count: int) -> bool:
        """Have at least `count` free blocks on pages in use, taking pages as the limit allows; all of them or none."""
        opened: list[int] = []
        while self._spare < count:
            try:
                pages = self.allocator.take(-(-(count - self._spare) // self.blocks_per_page))
            except (PoolExhausted, OutOfMemory):
                self._close_unused(opened)
                return False
            except BaseException:
                self._close_unused(opened)
                raise
            for page in sorted(pages, reverse=True):  # the lowest is the last one in its bucket, and taken first
                first, capacity = page * self.blocks_per_page, self._capacity(page)
                self._free[page] = list(range(first + capacity - 1, first - 1, -1))
                self._bucket(page, capacity)
                self._spare += capacity
            opened += pages
        if self._last_page in opened and self._spare - self._last_capacity >= count:
            # The last page may be short, so another one came after it. Left open with no block in use it would stay for ever.
            self._close_unused([self._last_page])
        return True

    def _close_unused(self, pages: Sequence[int]) -> None:
        for page in pages:
            capacity = self._capacity(page)
            self._unbucket(page, capacity)
            self._spare -= capacity
            del self._free[page]
        if pages:
            self.allocator.give(pages)

    def secure(self, count: int, *, ahead: int = 0) -> None:
        """Map pages into the reserve until `count` blocks are certain, as far as limit and device go, and `ahead` pages more.

        Raises nothing: whoever asks looks at `certain` afterwards.
        """
        with self._lock:
            missing = count - self.certain
            if missing > 0:
                self.allocator.secure(-(-missing // self.blocks_per_page) + self.allocator.reserved, ahead=ahead)

    def _take(self, count: int) -> list[int]:
        taken: list[int] = []
        held, buckets = self._held, self._buckets
        left = count
        while left:
            mask = self._mask
            above = mask >> left
            # The fullest page that holds them all; where none does, the emptiest, and then the rest.
            size = left + (above & -above).bit_length() - 1 if above else mask.bit_length() - 1
            bucket = buckets[size]
            page, _ = bucket.popitem()
            if not bucket:
                self._mask = mask & ~(1 << size)
            stack = self._free[page]
            kept = size - left if size > left else 0
            if left == 1:
                taken.append(block := stack.pop())
                held[block] = 1
            else:
                blocks = stack[: kept - 1 if kept else None : -1]
                del stack[kept:]
                for block in blocks:
                    held[block] = 1
                taken += blocks
            if kept:
                buckets[kept][page] = None
                self._mask |= 1 << kept
            left -= size - kept
        self._spare -= count
        self.held += count
        return taken

    def free(self, blocks: Sequence[int]) -> None:
        """Give blocks back; pages that become empty go to the reserve or away. Raises ValueError for a block not held."""
        with self._lock:
            held, per_page, total = self._held, self.blocks_per_page, self.blocks
            empty: list[int] = []
            page, before = -1, 0
            stack: list[int] = []
            try:
                for block in blocks:
                    if not 0 <= block < total or not held[block]:
                        raise ValueError(f"block {block} is not in use")
                    held[block] = 0
                    if block // per_page != page:
                        if page >= 0:
                            self._settle(page, before, len(stack), empty)
                        page = block // per_page
                        stack = self._free[page]
                        before = len(stack)
                    stack.append(block)
            finally:
                if page >= 0:
                    self._settle(page, before, len(stack), empty)
                if empty:
                    self._vacate(empty)

    def _settle(self, page: int, before: int, now: int, empty: list[int]) -> None:
        """Page `page` had `before` free blocks and has `now`: put it where it belongs, or among the empty ones."""
        self.held -= now - before
        full = now == (self._last_capacity if page == self._last_page else self.blocks_per_page)
        if page in self.draining:
            if full:
                self.draining.discard(page)
                empty.append(page)
            return
        self._unbucket(page, before)
        if full:
            self._spare -= before
            empty.append(page)
        else:
            self._buckets[now][page] = None
            self._mask |= 1 << now
            self._spare += now - before

    def _vacate(self, pages: Sequence[int]) -> None:
        for page in pages:
            del self._free[page]
        self.allocator.give(pages)
        # One that was not drained went, so one of those that are may stay.
        self._reopen(len(self.draining) - self.over_pages)

    def available_size(self) -> int:
        """Blocks that could be allocated now: free ones, reserved ones, and those of pages the limit lets come."""
        with self._lock:
            pages = self.allocator.room
            return self._spare + len(self._reserved) + min(pages * self.blocks_per_page, self.blocks)

    @property
    def certain(self) -> int:
        """Free blocks that have memory under them already: on pages in use, and in the reserve."""
        ready = self.allocator.ready
        blocks = self._spare + len(ready) * self.blocks_per_page
        last = self.allocator.pages - 1
        return blocks - (self.blocks_per_page - self._capacity(last)) if last in ready else blocks

    def holds(self, block: int) -> bool:
        """Whether somebody has this block."""
        return bool(self._held[block])

    def held_on(self, page: int) -> int:
        """Blocks of `page` that somebody has."""
        stack = self._free.get(page)
        return 0 if stack is None else self._capacity(page) - len(stack)

    def blocks_of(self, page: int) -> range:
        """The block ids of `page`."""
        first = page * self.blocks_per_page
        return range(first, first + self._capacity(page))

    @property
    def over_pages(self) -> int:
        """Pages in use above the limit."""
        return max(0, self.allocator.used - self.allocator.target)

    def resize(self, limit_bytes: int) -> Resized:
        """Let the pool have `limit_bytes`, in whole pages: at least one, at most the reservation.

        Reserved pages go at once, then cached blocks, least recently used first; the rest as blocks are freed.
        """
        with self._lock:
            allocator = self.allocator
            self.limit_bytes = limit_bytes
            allocator.resize(limit_bytes // self.page_bytes)
            if self.over_pages and self.reclaimer is not None:
                self.reclaimer.reclaim(self.over_pages)
            self._reopen(len(self.draining))
            self._drain(self.over_pages)
            return self.limit_state()

    def limit_state(self) -> Resized:
        """How far the limit holds by now, and why not further."""
        effective = self.allocator.target * self.page_bytes
        reason = ""
        if self.over_pages:
            reason = f"{self.over_pages * self.page_bytes} B in use above it"
        elif self.limit_bytes > self.allocator.pages * self.page_bytes:
            reason = "lowered to the reservation: more cannot be met"
        elif self.limit_bytes < self.page_bytes:
            reason = "one page stays"
        return Resized(self.limit_bytes, effective, self.over_pages, reason)

    def _drain(self, count: int) -> None:
        """Close the `count` pages with the fewest blocks in use."""
        if count <= 0:
            return
        pinned = {self._pinned} if self._pinned is not None else set()
        by_use = sorted((self._capacity(page) - len(stack), -page) for page, stack in self._free.items() if page not in pinned)
        for _, negative in by_use[:count]:
            page = -negative
            free = len(self._free[page])
            self._unbucket(page, free)
            self._spare -= free
            self.draining.add(page)
        if self.reclaimer is not None and self.draining:
            self.reclaimer.drained(self.draining)

    def pin(self, block: int) -> None:
        """The page of this block never drains: an engine's null block is never freed."""
        self._pinned = block // self.blocks_per_page

    @property
    def pinned_blocks(self) -> int:
        """Blocks that are nobody's request: the pinned one."""
        return int(self._pinned is not None)

    def _reopen(self, count: int) -> None:
        """Open `count` draining pages again, the fullest first."""
        if count <= 0:
            return
        for page in sorted(self.draining, key=lambda page: len(self._free[page]))[:count]:
            self.draining.discard(page)
            free = len(self._free[page])
            self._bucket(page, free)
            self._spare += free

    def trim(self) -> int:
        """Unmap all reserved pages; how many went."""
        return self.allocator.trim()

    def try_to_reserve(self, count: int) -> bool:
        """Set `count` blocks aside for the next `alloc`s; False, and nothing, where they cannot be had."""
        with self._lock:
            if self._spare < count and not self._open(count):
                return False
            self._reserved += self._take(count)
            return True

    def free_reserved(self) -> None:
        """Give what `try_to_reserve` set aside back."""
        with self._lock:
            blocks, self._reserved = self._reserved, []
            self.free(blocks)

    def clear(self) -> None:
        """Free every block and unmap every page."""
        with self._lock:
            pages = list(self._free)
            self._reset()
            self.allocator.give(pages)
            self.allocator.trim()

    def usage(self) -> Usage:
        """The numbers of this moment."""
        with self._lock:
            allocator = self.allocator
            mapped = allocator.used * self.blocks_per_page
            if (last := allocator.pages - 1) in self._free:
                mapped -= self.blocks_per_page - self._capacity(last)
            return Usage(
                allocator.pages,
                allocator.target,
                allocator.used,
                allocator.reserved,
                len(self.draining),
                self.held,
                mapped - self.held,
            )
