"""When to leave a tier alone: after FAILURES failed calls in a row, for a while (1 s, doubling to 30 s); then one call probes it.

Concurrency: lives on the event loop, like the tier that has it.
"""

from collections.abc import Callable

FAILURES = 3
PAUSE_S, PAUSE_MAX_S = 1.0, 30.0


class Breaker:
    """Whether to leave a tier alone."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self.failures = 0
        self.opened_total = 0
        self.reason = ""
        self._until = 0.0
        self._pause = PAUSE_S

    @property
    def open(self) -> bool:
        """Calls are not wanted now (once the pause is over, one may probe)."""
        return self.failures >= FAILURES and self._monotonic() < self._until

    @property
    def tripped(self) -> bool:
        """It has not worked since it broke."""
        return self.failures >= FAILURES

    def wait_s(self) -> float:
        """Seconds until a probe may be made."""
        return max(0.0, self._until - self._monotonic())

    def succeeded(self) -> None:
        self.failures, self._pause, self.reason = 0, PAUSE_S, ""

    def failed(self, reason: str) -> None:
        self.failures += 1
        self.reason = reason
        if self.failures >= FAILURES:
            self.opened_total += self.failures == FAILURES
            self._until = self._monotonic() + self._pause
            self._pause = min(PAUSE_MAX_S, self._pause * 2)
