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
_PID = (1 << 32) - 1


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
        # Single values go through these: a third of what an array of numpy's takes for one.
        self._hash_of, self._at_of, self._fate_of = self._hash.data, self._at.data, self._fate.data
        self._text_of, self._pid_of = self._text.data, self._pid.data
        self._texts: list[tuple[str, str]] = [("", "other")]
        self._numbers: dict[tuple[str, str], int] = {}

    def note(self, identity: bytes, fate: Fate, *, place: str = "arena", why: str = "", pid: int = 0) -> None:
        """One value's fate, now. About a microsecond: evictions pay it."""
        row = xxhash.xxh3_64_intdigest(identity), self._clock_ns(), fate, pid & _PID
        with self._lock:
            self._write_locked(row, self._numbers.get((place, why)) or self._number_locked(place, why))

    def note_many(self, identities: Iterable[bytes], fate: Fate, *, place: str = "arena", why: str = "", pid: int = 0) -> None:
        """The same fate for several values."""
        now = self._clock_ns()
        with self._lock:
            text = self._number_locked(place, why)
            for identity in identities:
                self._write_locked((xxhash.xxh3_64_intdigest(identity), now, fate, pid & _PID), text)

    def _write_locked(self, row: tuple[int, int, int, int], text: int) -> None:
        slot = self.noted % self.capacity
        self.noted += 1
        self._hash_of[slot], self._at_of[slot], self._fate_of[slot], self._pid_of[slot] = row
        self._text_of[slot] = text

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
        """What is remembered of each, newest first, at most TOLD notes. Tens of milliseconds for hundreds: for a thread."""
        with self._lock:  # for the copies only: whoever evicts must not wait for the search
            turned, used = self.noted, min(self.noted, self.capacity)
            columns = [column[:used].copy() for column in (self._hash, self._at, self._fate, self._text, self._pid)]
            texts = list(self._texts)
        wanted = [xxhash.xxh3_64_intdigest(identity) for identity in identities]
        slots = np.flatnonzero(np.isin(columns[0], np.array(wanted, dtype=np.uint64)))
        # In the order of noting: where the ring has turned, the newest lie just before where it goes on.
        slots = slots[np.argsort((slots - turned) % self.capacity)[::-1]]
        told: dict[int, list[Tombstone]] = {}
        for name, at, fate, text, pid in zip(*(column[slots].tolist() for column in columns), strict=True):
            notes = told.setdefault(name, [])
            if len(notes) < TOLD:
                where, why = texts[text]
                notes.append(Tombstone(Fate(fate), at, where, why, pid))
        return [told.get(one, []) for one in wanted]
