"""Lines in the log about what can happen in every request or step: one of a kind a minute, and how many there were in between."""

import logging
import threading
import time
from collections.abc import Callable

PAUSE_S = 60.0


class Seldom:
    """Warnings of one logger; any thread. Kinds are few, and known beforehand."""

    def __init__(self, logger: logging.Logger, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._said: dict[str, float] = {}
        self._since: dict[str, int] = {}

    def warning(self, kind: str, text: str) -> None:
        now = self._monotonic()
        with self._lock:
            if kind in self._said and now - self._said[kind] < PAUSE_S:
                self._since[kind] = self._since.get(kind, 0) + 1
                return
            self._said[kind] = now
            more = self._since.pop(kind, 0)
        self._logger.warning("kvd: %s%s", text, f" ({more} more like it since the last such line)" if more else "")
