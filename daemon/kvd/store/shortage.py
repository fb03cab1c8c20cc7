"""What is said about room that is not there: who wants it, and what must happen before it is."""

from enum import Enum, auto
from typing import NamedTuple


class Wanted(NamedTuple):
    """Who wants room, for the tombstones of what is evicted for it."""

    why: str
    pid: int = 0


FOR_PUT = Wanted("room for a put")
FROM_TIER = Wanted("room for a value from a tier")
AHEAD = Wanted("the arena was above its watermark")


class Short(Enum):
    """What must happen before there is room."""

    FULL = auto()
    """Nothing that the daemon could do: what is there is pinned, unwritten, or kept by the policy."""
    SLICE = auto()
    """More of the same: it was too much for one go."""
    GROWTH = auto()
    """Pages are being faulted in."""
    MOVES = auto()
    """Enough is free, but not in one piece."""
