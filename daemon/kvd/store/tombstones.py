"""Why a value is not there: the last fates of values that left, were refused, or were never offered; for `kvd why`.

A ring: the newest notes push out the oldest, so it costs the same on any host (about 1.5 MiB) whatever happens. A note is
the hash of an identity, when, what, why (one of few texts) and whose process. Two identities with one hash would be told
each other's story: that is why this explains and never decides. Nothing here outlives the daemon.

Thread-safe: the event loop notes what leaves the arena, the tiers' threads what leaves them.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import xxhash

CAPACITY = 65536
MAX_TEXTS = 1024
TOLD = 4
"""Notes told of one identity at most, newest first."""


class Fate(IntEnum):
    """What became of a value."""

    EVICTED = 1
    EXPIRED = 2
    DELETED = 3
    REFUSED = 4
    CORRUPT = 5
    UNSAVED = 6

    @property
    def word(self) -> str:
        return self.name.lower()


class Tombstone(NamedTuple):
    """One note. `why`: a few words; `place`: 'arena', or the tier's name; `pid`: who asked for it, 0 where nobody did."""

    fate: Fate
    at_ns: int
    place: str
    why: str
    pid: int


class Tombstones:
    """The ring. `noted`: notes made since start; `oldest_ns`: since when it is complete."""

    def __init__(self, capacity: int = CAPACITY, *, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self.capacity = capacity
        self.noted = 0
        self._clock_ns = clock_ns
        self._started_ns = clock_ns()
        self._lock = threading.Lock()
        self._hash = np.zeros(capacity, dtype=np.uint64)
        self._at = np.zeros(capacity, dtype=np.int64)
        self._fate = np.zeros(capacity, dtype=np.uint8)
        self._text = np.zeros(capacity, dtype=np.uint16)
        self._pid = np.zeros(capacity, dtype=np.uint32)
        self._texts: list[tuple[str, str]] = [("", "other")]
        self._numbers: dict[tuple[str, str], int] = {}

    def note(self, identity: bytes, fate: Fate, *, place: str = "arena", why: str = "", pid: int = 0) -> None:
        """One value's fate, now."""
        self.note_many((identity,), fate, place=place, why=why, pid=pid)

    def note_many(self, identities: Iterable[bytes], fate: Fate, *, place: str = "arena", why: str = "", pid: int = 0) -> None:
        """The same fate for several values."""
        now = self._clock_ns()
        with self._lock:
            text = self._number_locked(place, why)
            for identity in identities:
                slot = self.noted % self.capacity
                self.noted += 1
                self._hash[slot] = xxhash.xxh3_64_intdigest(identity)
                self._at[slot] = now
                self._fate[slot] = fate
                self._text[slot] = text
                self._pid[slot] = pid if 0 <= pid < 1 << 32 else 0

    def _number_locked(self, place: str, why: str) -> int:
        found = self._numbers.get((place, why))
        if found is None:
            if len(self._texts) >= MAX_TEXTS:
                return 0
            found = self._numbers[place, why] = len(self._texts)
            self._texts.append((place, why))
        return found

    @property
    def since_ns(self) -> int:
        """Nothing older than this is remembered (unix nanoseconds)."""
        with self._lock:
            return self._started_ns if self.noted <= self.capacity else int(self._at[self.noted % self.capacity])

    def find(self, identities: Sequence[bytes]) -> list[list[Tombstone]]:
        """What is remembered of each, newest first, at most TOLD notes."""
        with self._lock:
            used = min(self.noted, self.capacity)
            wanted = np.array([xxhash.xxh3_64_intdigest(identity) for identity in identities], dtype=np.uint64)
            places = np.flatnonzero(np.isin(self._hash[:used], wanted))
            told: dict[int, list[Tombstone]] = {}
            # Slots in the order of noting: where the ring has turned, the newest lie just before where it goes on.
            for slot in sorted(places.tolist(), key=lambda slot: (slot - self.noted) % self.capacity, reverse=True):
                notes = told.setdefault(int(self._hash[slot]), [])
                if len(notes) < TOLD:
                    place, why = self._texts[self._text[slot]]
                    notes.append(Tombstone(Fate(int(self._fate[slot])), int(self._at[slot]), place, why, int(self._pid[slot])))
            return [told.get(one, []) for one in wanted.tolist()]
