"""Puts idle models to sleep: the background half of the sleep manager.

Every check interval each model's idle time, as the traffic monitor counts it, is held against its threshold; the longest
idle goes first. A model that was never asked is idle since it became awake. The machine itself refuses when somebody is
about, so a request that arrives between the look and the call is safe.

Concurrency: one task.
"""

import asyncio
import logging

from kvgate.errors import RequestError
from kvgate.router import Backend, Router

log = logging.getLogger("kvgate.idle")


class IdleWatch:
    """The background task."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._task: asyncio.Task[None] | None = None

    def candidates(self, threshold_s: float | None = None) -> list[Backend]:
        """Backends that may be put to sleep now (after `threshold_s` without a request, where given), longest idle first."""
        traffic = self._router.traffic
        found = []
        for backend in self._router.backends.values():
            idle_s = traffic.idle_s(backend.name)
            if backend.machine.may_sleep(idle_s, backend.config.sleep.idle_threshold_s if threshold_s is None else threshold_s):
                found.append((idle_s, backend))
        found.sort(key=lambda pair: pair[0], reverse=True)
        return [backend for _, backend in found]

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="idle watch")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._pause_s())
            await asyncio.gather(*(self._sleep(backend) for backend in self.candidates() if backend.config.sleep.auto_sleep))

    def _pause_s(self) -> float:
        """The shortest check interval of any model; a threshold shorter than it is looked at in time too."""
        policies = [backend.config.sleep for backend in self._router.backends.values() if backend.config.sleep.auto_sleep]
        return max(
            0.05, min((min(policy.check_interval_s, max(policy.idle_threshold_s, 0.05)) for policy in policies), default=1.0)
        )

    async def _sleep(self, backend: Backend) -> None:
        try:
            await backend.machine.sleep(manual=False)
        except RequestError as error:
            log.info("%s", error.message)
        except Exception:  # the edge of a task that must go on for the other models
            log.exception("%s: could not be put to sleep", backend.name)
