"""How long a value may live: four classes and a wall-clock expiry.

none is never stored. ephemeral lives in the arena only. short and long also go to tiers. Eviction takes expired values
first, then ephemeral, short, long, and the least recently used inside a class. The numbers are on disk and on the wire:
do not change them.
"""

import math
import time
from enum import IntEnum


class Retention(IntEnum):
    """Retention classes, weakest first (on disk and on the wire: never renumber)."""

    NONE = 0
    EPHEMERAL = 1
    SHORT = 2
    LONG = 3

    @classmethod
    def of(cls, word: "str | int | Retention") -> "Retention":
        """The class named by a word ('long') or number. Raises ValueError naming what was given."""
        try:
            return cls[word.upper()] if isinstance(word, str) else cls(word)
        except (KeyError, ValueError):
            raise ValueError(f"unknown retention {word!r}: one of none, ephemeral, short, long") from None


NEVER = 0
"""The expiry (unix nanoseconds) of a value that does not expire."""
LATEST = (1 << 63) - 1
"""The latest expiry there is."""


def expiry_ns(ttl_s: float | None, now_ns: int | None = None) -> int:
    """Unix nanoseconds at which a value put now with `ttl_s` expires; NEVER for None. A ttl of 0 or less is expired at once.

    What lies beyond a signed 64-bit number (the year 2262) is cut to that: so it is stored everywhere. Raises ValueError for NaN.
    """
    if ttl_s is None:
        return NEVER
    if math.isnan(ttl_s):
        raise ValueError("ttl_s is not a number")
    now = time.time_ns() if now_ns is None else now_ns
    if ttl_s * 1e9 >= LATEST - now:
        return LATEST
    return max(1, now + int(max(ttl_s, -1e9) * 1e9))


def expired(expires_ns: int, now_ns: int) -> bool:
    """Whether an expiry has passed."""
    return expires_ns != NEVER and expires_ns <= now_ns
