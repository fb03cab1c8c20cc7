"""The page allocator: which pages have memory under them, and which of those are in use.

A page is *out* (no memory), *reserved* (memory, no block in use) or *used*. At most `target` pages have memory, which is what
a limit comes to. Taking a page takes a reserved one, else maps the lowest page that is out (low pages together keep the
kernel's areas few). Giving one back keeps up to `max_reserved` mapped, so that a busy pool does not map and unmap in turn, and
unmaps the rest. `refill` maps ahead up to `min_reserved`; with `prealloc` a thread does it whenever the reserve falls below.

Failures. A page that cannot be mapped stays out; the error is the caller's (`take`) or counted (`refill`). A page that
cannot be unmapped stays reserved and is tried again. Nothing is lost either way.

Concurrency: every public method takes the lock, which the caller (KVCacheManager) shares. The filler thread maps outside of it:
the pages it works on are in nobody's list meanwhile, and count as reserved.
"""

import heapq
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvtools.elastic.geometry import Backing
from kvtools.elastic.memory import OutOfMemory
from kvtools.errors import KvError

logger = logging.getLogger("vllm.kvtools")

RETRY_S = 0.1
"""After a page could not be mapped, nothing is mapped ahead or secured for so long, unless pages are given back before."""

SAY_S = 60.0
"""What keeps pages from being mapped is logged at most so often: an engine asks again at every step."""


class PoolExhausted(KvError):
    """The limit leaves no page for this."""


@dataclass
class PageCounts:
    """What happened since the start. Seconds are spent in the driver."""

    mapped: int = 0
    unmapped: int = 0
    map_seconds: float = 0.0
    unmap_seconds: float = 0.0
    map_failures: int = 0
    unmap_failures: int = 0


class PageAllocator:
    """Pages 0 to `pages` - 1 over a backing. `resident`: pages that have memory already, which count as reserved."""

    def __init__(
        self,
        backing: Backing,
        pages: int,
        *,
        min_reserved: int = 5,
        max_reserved: int = 10,
        prealloc: bool = False,
        resident: Sequence[int] = (),
        lock: "threading.RLock | None" = None,
    ) -> None:
        self.backing = backing
        self.pages = pages
        self.target = pages
        self.min_reserved = min_reserved
        self.max_reserved = max(max_reserved, min_reserved)
        self.counts = PageCounts()
        self.lock = lock or threading.RLock()
        self._out = [page for page in range(pages) if page not in set(resident)]  # sorted, so a heap
        self._reserved = sorted(resident, reverse=True)
        self._in_flight = 0
        self.used = 0
        self.rest_until = 0.0
        self._said = -SAY_S
        self._arrived = threading.Condition(self.lock)
        self._wanted = threading.Event()
        self._ended = False
        self._filler: threading.Thread | None = None
        if prealloc:
            self._filler = threading.Thread(target=self._fill, name="kvtools-prealloc", daemon=True)
            self._filler.start()
            self._wanted.set()

    @property
    def reserved(self) -> int:
        """Pages with memory and no use, those being mapped ahead included."""
        return len(self._reserved) + self._in_flight

    @property
    def ready(self) -> Sequence[int]:
        """The reserved pages that may be taken at once."""
        return self._reserved

    @property
    def mapped(self) -> int:
        return self.used + self.reserved

    @property
    def room(self) -> int:
        """Pages that may still be taken: reserved ones, and those that the limit lets come."""
        return len(self._reserved) + self.growth

    @property
    def growth(self) -> int:
        """Pages without memory that the limit lets come."""
        return max(0, min(self.target - self.mapped, len(self._out)))

    def take(self, count: int) -> list[int]:
        """`count` pages with memory under them, or as many as can be had, at least one.

        Raises PoolExhausted (the limit leaves none), OutOfMemory (the device has none), DriverError.
        """
        with self.lock:
            while self._in_flight and not self._reserved and self.target <= self.mapped:
                self._arrived.wait(1.0)  # the last pages of the limit are being mapped ahead
            taken = [self._reserved.pop() for _ in range(min(count, len(self._reserved)))]
            missing = min(count - len(taken), self.target - self.mapped - len(taken))
            if missing > 0:
                try:
                    taken += self._map_some(missing)
                except KvError:
                    if not taken:
                        raise
            if not taken:
                raise PoolExhausted(f"all {self.target} pages of the limit are in use", hint="raise the limit, or wait for blocks")
            self.used += len(taken)
            if self._filler is not None and len(self._reserved) < self.min_reserved:
                self._wanted.set()
            return taken

    def secure(self, count: int, *, ahead: int = 0) -> None:
        """Map until `count` pages are in reserve and, while at it, `ahead` more; as far as limit and device go. Raises nothing."""
        with self.lock:
            missing = min(count - self.reserved, self.target - self.mapped)
            if missing <= 0 or time.monotonic() < self.rest_until:
                return
            try:
                self._reserved += self._map_some(min(missing + ahead, self.target - self.mapped))
            except KvError as error:
                self._say(error)

    def _say(self, error: KvError) -> None:
        if time.monotonic() - self._said >= SAY_S:
            self._said = time.monotonic()
            level = logging.WARNING if isinstance(error, OutOfMemory) else logging.ERROR
            logger.log(level, "kvtools: no page more: %s (requests wait until there is room)", error)

    def _map_some(self, count: int) -> list[int]:
        """Map up to `count` pages that are out: all at once, else as many as there is room for. Raises when there is none."""
        pages = [heapq.heappop(self._out) for _ in range(min(count, len(self._out)))]
        if not pages:
            return []
        try:
            self._map(pages)
            return pages
        except OutOfMemory as error:
            done: list[int] = []
            for i, page in enumerate(pages if len(pages) > 1 else ()):
                try:
                    self._map([page])
                except KvError:
                    self._put_out(pages[i:])
                    break
                done.append(page)
            else:
                self._put_out(pages if len(pages) == 1 else ())
            if not done:
                raise error from None
            return done
        except BaseException:
            self._put_out(pages)
            raise

    def _put_out(self, pages: Sequence[int]) -> None:
        for page in pages:
            heapq.heappush(self._out, page)

    def _map(self, pages: Sequence[int]) -> None:
        begun = time.perf_counter()
        try:
            self.backing.map(pages)
            self.counts.mapped += len(pages)
        except BaseException:
            self.counts.map_failures += 1
            self.rest_until = time.monotonic() + RETRY_S
            raise
        finally:
            self.counts.map_seconds += time.perf_counter() - begun

    def give(self, pages: Sequence[int]) -> None:
        """Pages no block of which is in use: kept in reserve, or unmapped beyond `max_reserved` and above the limit."""
        with self.lock:
            self.used -= len(pages)
            self._reserved += pages
            self.trim(self.max_reserved)

    def resize(self, target: int) -> None:
        """Let `target` pages have memory (at least one, at most all). Reserved pages beyond it are unmapped now."""
        with self.lock:
            self.target = max(1, min(target, self.pages))
            self.trim(self.max_reserved)
            if self._filler is not None:
                self._wanted.set()

    def trim(self, keep: int = 0) -> int:
        """Unmap reserved pages until `keep` are left and the limit holds, as far as reserved pages go; how many went."""
        with self.lock:
            excess = max(len(self._reserved) - keep, min(self.mapped - self.target, len(self._reserved)))
            if excess <= 0:
                return 0
            self._reserved.sort(reverse=True)  # the lowest stay: they are taken next
            going, self._reserved = self._reserved[:excess], self._reserved[excess:]
            begun = time.perf_counter()
            try:
                self.backing.unmap(going)
            except KvError as error:
                # They are still mapped as far as anybody knows, and the next trim tries again.
                self.counts.unmap_failures += 1
                self._reserved += going
                logger.error("kvtools: %d pages could not be unmapped: %s", len(going), error)
                return 0
            finally:
                self.counts.unmap_seconds += time.perf_counter() - begun
            self._put_out(going)
            self.counts.unmapped += len(going)
            self.rest_until = 0.0
            return len(going)

    @property
    def short(self) -> int:
        """Pages that `refill` would map now."""
        if time.monotonic() < self.rest_until:
            return 0
        return max(0, min(self.min_reserved - self.reserved, self.target - self.mapped, len(self._out)))

    def refill(self) -> int:
        """Map ahead until `min_reserved` pages are in reserve, as far as limit and device go; how many came."""
        with self.lock:
            pages = [heapq.heappop(self._out) for _ in range(self.short)]
            self._in_flight += len(pages)
        if not pages:
            return 0
        came: Sequence[int] = pages
        try:
            self._map(pages)
        except KvError as error:
            came = ()
            self._say(error)
        finally:
            with self.lock:
                self._in_flight -= len(pages)
                self._arrived.notify_all()
                if came:
                    self._reserved += came
                    self.trim(self.max_reserved)  # the limit may have come down meanwhile
                else:
                    self._put_out(pages)
        return len(came)

    def _fill(self) -> None:
        while True:
            self._wanted.wait()
            self._wanted.clear()
            if self._ended:
                return
            while self.refill():
                pass

    def close(self) -> None:
        """End the filler thread. Pages stay as they are."""
        self._ended = True
        self._wanted.set()
        if self._filler is not None:
            self._filler.join()
            self._filler = None
