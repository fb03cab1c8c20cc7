"""A model's way in: a bounded number of requests at once, the rest in a queue, first come first served.

    enter -> (queued while shut or full) -> running -> leave

The sleep machine shuts the lane before it touches an engine and opens it again when the engine serves: while it is shut
nobody is let through, so `running == 0` on a shut lane means that nobody talks to the engine through the gate.

Concurrency: one event loop, no locks; every method but `enter` and `drained` runs to its end without giving way.
"""

import asyncio
from collections.abc import Callable

from kvgate.errors import QueueFull, RequestError, Unavailable


class Lane:
    """Admission to one engine."""

    def __init__(self, name: str, max_running: int, max_queue: int) -> None:
        self.name = name
        self.max_running = max_running
        self.max_queue = max_queue
        self.running = 0
        self.rejected_total = 0
        self.timeouts_total = 0
        self.on_blocked: Callable[[], None] = lambda: None
        """Called when a request meets a shut lane, before it queues: raises to refuse it, or starts a wake-up."""
        self.retry_after_s: Callable[[], float] = lambda: 1.0
        """When somebody whose time in the queue ran out should come back."""
        self._open = False
        # A dict is a queue that also forgets from its middle in one step.
        self._waiting: dict[asyncio.Future[None], None] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def is_open(self) -> bool:
        return self._open

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def idle(self) -> bool:
        return not self.running and not self._waiting

    async def enter(self, timeout_s: float) -> None:
        """Take a place, waiting for it `timeout_s` at most; the caller must `leave`. Raises QueueFull, Unavailable."""
        if self._open and self.running < self.max_running and not self._waiting:
            self._take()
            return
        if not self._open:
            self.on_blocked()
        if len(self._waiting) >= self.max_queue:
            self.rejected_total += 1
            raise QueueFull(
                f"{self.name}: {len(self._waiting)} requests are waiting already", hint="try again later", retry_after_s=1.0
            )
        place = asyncio.get_running_loop().create_future()
        self._waiting[place] = None
        # on_blocked may have opened the lane again at once (a drain given up for this very request).
        self._pump()
        try:
            async with asyncio.timeout(timeout_s):
                await place
        except BaseException as error:
            self._waiting.pop(place, None)
            if place.done() and not place.cancelled() and place.exception() is None:
                # Granted in the same step in which the caller gave up: hand the place on.
                self.leave()
            if isinstance(error, TimeoutError):
                self.timeouts_total += 1
                raise Unavailable(
                    f"{self.name}: no answer could begin within {timeout_s:g} s", retry_after_s=self.retry_after_s()
                ) from None
            raise

    def leave(self) -> None:
        """Give a place back."""
        self.running -= 1
        if not self.running:
            self._empty.set()
        self._pump()

    def open(self) -> None:
        """Let the queue through, in order."""
        self._open = True
        self._pump()

    def shut(self) -> None:
        """Let nobody else through; who is running goes on."""
        self._open = False

    def fail_waiting(self, error: RequestError) -> None:
        """Send everybody in the queue away with `error`."""
        waiting, self._waiting = self._waiting, {}
        for place in waiting:
            if not place.done():
                place.set_exception(error)

    async def drained(self, timeout_s: float | None) -> bool:
        """Wait until nobody is running; False when that took longer than `timeout_s` (None: however long it takes)."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True

    def _take(self) -> None:
        self.running += 1
        self._empty.clear()

    def _pump(self) -> None:
        while self._open and self._waiting and self.running < self.max_running:
            place = next(iter(self._waiting))
            del self._waiting[place]
            if not place.done():
                self._take()
                place.set_result(None)
