"""Damage found on read: said once where it lies, and not again for every value that lies there too.

A device that goes bad damages many values of one place (a region file, a device, a folder). The first is a line in the log; what
is found there in the next PAUSE_S is counted, and the number is in the next line. Every value is in the counters all the same.
Concurrency: any thread.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

log = logging.getLogger("kvd.tiers")

PAUSE_S = 600.0
_PLACES = 1024
"""Places remembered at most: with more of them bad, lines come more often than need be, and no memory grows."""


@dataclass(slots=True)
class _Place:
    said_s: float
    since: int = 0
    """Found since that line."""


class DamageLog:
    """The lines of one tier."""

    def __init__(self, advice: str, monotonic: Callable[[], float] = time.monotonic) -> None:
        """`advice`: what to do about it, as the end of the sentence."""
        self._advice = advice
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._places: dict[str, _Place] = {}

    def note(self, place: str, detail: str) -> None:
        """A value in `place` is damaged; `detail` says which."""
        now = self._monotonic()
        with self._lock:
            known = self._places.get(place)
            if known is not None and now - known.said_s < PAUSE_S:
                known.since += 1
                return
            if len(self._places) >= _PLACES:
                self._places.clear()
            self._places[place] = _Place(now)
        more = f"; {known.since} more there since the last such line" if known is not None and known.since else ""
        log.warning("%s: a damaged value (%s): answered as a miss%s. %s", place, detail, more, self._advice)
