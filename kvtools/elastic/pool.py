"""Pool: a KVCacheManager that follows its segment, and the thread that does it.

Who touches the block pool, and under which lock. The *follower* thread looks at the limit every 20 ms; what has to be done to
blocks it does itself under the lock `turn`, but only while the owner of the blocks is idle. An owner that is at work
holds `turn` while it is, and calls `work` at the start of each step when `attention` is set. So an idle pool gives memory back
within two looks, a busy one at its next step, and blocks are never touched from two threads. A pool of one's own (no engine)
has the manager's lock for its turn, and is idle whenever nobody holds that.

Everything that is I/O on files (sidecar, segment, stats) happens in the follower and outside of `turn`: a stuck lock in shared
memory never holds an engine up.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from kvtools.elastic.figures import Figures, gather
from kvtools.elastic.manager import KVCacheManager, Resized
from kvtools.elastic.settings import Settings
from kvtools.elastic.tracker import MemInfoTracker
from kvtools.errors import KvError

logger = logging.getLogger("vllm.kvtools")

LOOK_S = 0.02
PUBLISH_S = 0.5


class Cached(Protocol):
    """A prefix cache over the manager's blocks, as far as a pool needs to know it."""

    @property
    def cached(self) -> int:
        """Blocks that only the cache holds."""

    @property
    def evicted(self) -> int:
        """Blocks given up since the start."""

    def release_all(self) -> None:
        """Give up everything that only the cache holds."""


class Pool:
    """`manager` under `tracker`'s limit. `start` begins following; `close` ends it and removes the files."""

    def __init__(
        self,
        manager: KVCacheManager,
        tracker: MemInfoTracker,
        settings: Settings,
        *,
        figures: Figures | None = None,
        turn: "threading.RLock | None" = None,
        idle: Callable[[], bool] = lambda: True,
        cache: Cached | None = None,
    ) -> None:
        self.manager = manager
        self.tracker = tracker
        self.settings = settings
        self.figures = figures
        self.turn = turn or manager.allocator.lock
        self.cache = cache
        self.attention = False
        """The owner should call `work` at its next step."""
        self.asleep = False
        self.last_used = time.monotonic()
        """When a request was last served: what idle_release_s counts from."""
        self._idle = idle
        self._asked: int | None = None
        self._due: deque[tuple[int, Resized]] = deque()
        """Answers to give, newest last: made by whoever works, given by the follower."""
        self._state: Resized | None = None
        self._limits = 0
        self._published = 0.0
        self._told_asleep = False
        self._released = False
        self._ended = threading.Event()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._follow, name="kvtools-follower", daemon=True)

    def start(self) -> None:
        """Apply the limit to start with, then follow the segment."""
        with self.turn:
            self._state = self.manager.resize(self.tracker.limit_bytes)
        self._tell()
        self._thread.start()

    def work(self) -> None:
        """What has to be done to blocks and pages. Call with `turn` held. Raises nothing."""
        self.attention = False
        manager = self.manager
        try:
            if self._asked is not None:
                asked, self._asked = self._asked, None
                self._state = manager.resize(asked)
                self._due.append((asked, self._state))
                self._limits += 1
            elif self._state is not None and self._state.over_pages:
                now = manager.limit_state()
                if now.over_pages != self._state.over_pages:
                    self._due.append((self._state.limit_bytes, now))
                    self._state = now
            if self._idle_too_long():
                self._released = True
                if self.cache is not None:
                    self.cache.release_all()
                manager.allocator.trim()
            elif self._wants_reserve():
                manager.allocator.refill()
            elif self._idle():
                manager.allocator.trim(manager.allocator.max_reserved)  # what a burst left mapped
        except KvError as error:
            logger.error("kvtools: pool %s: %s", self.tracker.name, error)

    def touch(self) -> None:
        """A request is served."""
        self.last_used = time.monotonic()
        self._released = False

    def _idle_too_long(self) -> bool:
        wait = self.settings.idle_release_s
        return bool(wait) and not self._released and not self.asleep and time.monotonic() - self.last_used > wait and self._idle()

    def _wants_reserve(self) -> bool:
        return self.settings.prealloc and not self.asleep and not self._released and self.manager.allocator.short > 0

    def _wants_work(self) -> bool:
        state = self._state
        return (
            self._asked is not None
            or (state is not None and state.over_pages > 0 and self.manager.over_pages != state.over_pages)
            or self._idle_too_long()
            or self._wants_reserve()
            or (self.manager.allocator.reserved > self.manager.allocator.max_reserved and self._idle())
        )

    def _follow(self) -> None:
        while not self._ended.wait(LOOK_S):
            try:
                self.look()
            except Exception:  # the edge of a thread: the engine goes on without what failed, and the log says what it was
                logger.exception("kvtools: following segment %s", self.tracker.name)

    def look(self) -> None:
        """One round of the follower."""
        limit = self.tracker.poll()
        if limit is not None:
            self._asked = limit
        if self._wants_work():
            self.attention = True
            if self.turn.acquire(timeout=LOOK_S):
                try:
                    if self.attention and self._idle():
                        self.work()
                finally:
                    self.turn.release()
        self._tell()

    def _tell(self) -> None:
        allocator = self.manager.allocator
        page = self.manager.page_bytes
        used, reserved = (0, 0) if self.asleep else (allocator.used * page, allocator.reserved * page)
        self.tracker.publish(used, reserved)
        while self._due:
            asked, state = self._due[0]
            applied = not state.over_pages and asked >= self.manager.page_bytes
            if not self.tracker.answer(asked, applied=applied, effective_bytes=state.effective_bytes, reason=state.reason):
                break  # the sidecar is locked: again at the next look
            self._due.popleft()
            self._published = 0.0
        asleep = self.asleep
        if self.figures is not None and (asleep != self._told_asleep or time.monotonic() - self._published > PUBLISH_S):
            self._published, self._told_asleep = time.monotonic(), asleep
            cached, evicted = (self.cache.cached, self.cache.evicted) if self.cache is not None else (0, 0)
            numbers = gather(self.manager, cached=cached, asleep=asleep)
            self.figures.write({**numbers, "limits_total": self._limits, "evicted_blocks_total": evicted})

    def close(self) -> None:
        """End following and remove the files. A second call does nothing, nor does one in a forked child: they are its parent's."""
        if self._ended.is_set() or os.getpid() != self._pid:
            return
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)
        if self.figures is not None:
            self.figures.close()
        self.tracker.close()
