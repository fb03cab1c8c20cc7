"""A pool segment with this process as its engine: it owns the segment, obeys its limit and pretends to serve requests."""

import math
from typing import Self

from kvtools.interrupts import interrupts_held
from kvtools.segments.owner import OwnerInfo, OwnerLock
from kvtools.segments.pool import create_pool, read_pool, remove, write_usage

GIB = 1 << 30
NAME = "DEMO_MODEL"
CAPACITY = 4 * GIB


class DemoPool:
    """The segment NAME: made on entry, removed on exit. Raises Refused when another demo holds it."""

    def __enter__(self) -> Self:
        with interrupts_held():
            self._owner = OwnerLock.acquire(NAME, OwnerInfo("kvtools demo", "demo/model", start_capacity_bytes=CAPACITY))
            try:
                create_pool(NAME, CAPACITY, used_bytes=GIB * 5 // 4, prealloc_bytes=GIB // 4)
            except BaseException:
                self._owner.close()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            remove(NAME)
        finally:
            self._owner.close()

    def obey(self) -> None:
        """Do what an engine does when it sees a new limit: give memory back until it fits, then say that it holds."""
        now = read_pool(NAME)
        room = now.limit_bytes
        used = min(now.used_bytes, room * 9 // 10)
        write_usage(NAME, used, min(now.prealloc_bytes, room - used))
        self._owner.mark(room, "applied", effective_bytes=room)

    def serve(self, second: float) -> None:
        """A moment of pretended load: use swells and falls, always inside the limit."""
        limit = read_pool(NAME).limit_bytes
        used = int(limit * (0.55 + 0.3 * math.sin(second / 5)))
        write_usage(NAME, used, min(limit // 16, limit - used))
