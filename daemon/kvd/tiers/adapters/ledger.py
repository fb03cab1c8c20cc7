"""What an adapter with an index in memory holds, in the order in which it goes: expired, short, long; least recent first.

With `scan_resistant` the order inside a class is S3-FIFO's (see `kvd.store.s3fifo`, whose queues these are): what is read
once passes through the small queue, and what was read again meanwhile goes on to the main one.

A value is a row: its name in a `Table`, what is known of it in a few columns, its neighbours in the queue. That is 125 to 150
bytes, however many there are; objects in dicts took 500. Who asks gets an `Entry` made for the occasion.

Values that a load is reading are pinned: they are neither evicted nor is their place given away before the load ends.
Their entries, the only ones that are kept, are one object each for all who hold them. Not thread-safe: its owner holds a lock.
"""

import threading
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from kvd.store.expiry import Expiries
from kvd.store.identity import IDENTITY_BYTES, Identity
from kvd.store.retention import NEVER, Retention, expired
from kvd.store.s3fifo import MAIN, SMALL, Links, Queues
from kvd.store.table import Table
from kvd.tiers.adapters.base import Hit

SHORT, LONG = 0, 1
STEP = 256
"""Values listed while the lock is held once."""
_COLUMNS = {
    "place": np.uint64,
    "size": np.uint64,
    "length": np.uint64,
    "expires": np.uint64,
    "note": np.uint32,
    "retention": np.uint8,
}


@dataclass(slots=True)
class Entry:
    """One value: where it is (the owner's own number) and what it takes there."""

    place: int
    size: int
    hit: Hit
    row: int = 0
    pins: int = 0
    gone: bool = False
    """Not held any more."""
    wiped: bool = False
    """Its place may be given away once the last pin is off."""


class Ledger:
    """Entries by identity. `used` is the sum of their sizes."""

    def __init__(self, *, scan_resistant: bool = False) -> None:
        self.used = 0
        self._table = Table()
        self._links: Links = Links(2)
        self._queues: Queues | None = None
        if scan_resistant:
            self._links = self._queues = Queues(2, lambda row, _: row in self._pinned)
        self._pinned: dict[int, Entry] = {}
        self._expiries = Expiries()
        self._mortal = 0
        self._free = array("I")
        self._next = 1
        self._rows = 0
        self._grow()

    _place: npt.NDArray[np.uint64]
    _place_of: "memoryview[int]"
    _size_of: "memoryview[int]"
    _length_of: "memoryview[int]"
    _expires_of: "memoryview[int]"
    _note_of: "memoryview[int]"
    _retention_of: "memoryview[int]"

    def _grow(self) -> None:
        rows = self._rows + self._rows // 8 + 256
        for name, kind in _COLUMNS.items():
            column: npt.NDArray[Any] = np.zeros(rows, dtype=kind)
            if self._rows:
                column[: self._rows] = getattr(self, f"_{name}")
            setattr(self, f"_{name}", column)
            setattr(self, f"_{name}_of", column.data)
        self._links.grow(rows)
        self._table.grow(rows)
        self._rows = rows

    def __len__(self) -> int:
        return len(self._table)

    def __contains__(self, identity: Identity) -> bool:
        return self._table.find(identity) != 0

    # ---- look-up -----------------------------------------------------------------------------------------------------

    def hit(self, identity: Identity, now_ns: int) -> Hit | None:
        """What is known of a value that is held and has not expired."""
        row = self._table.find(identity)
        return None if not row or expired(self._expires_of[row], now_ns) else self._hit(row)

    def _hit(self, row: int) -> Hit:
        return Hit(self._length_of[row], Retention(self._retention_of[row]), self._expires_of[row], self._note_of[row])

    def _entry(self, row: int) -> Entry:
        return self._pinned.get(row) or Entry(self._place_of[row], self._size_of[row], self._hit(row), row)

    def get(self, identity: Identity) -> Entry | None:
        """What is held, expired or not."""
        row = self._table.find(identity)
        return self._entry(row) if row else None

    def pin(self, identity: Identity) -> Entry:
        """Hold on to a value that is there, until `unpin`. Raises KeyError."""
        row = self._table.find(identity)
        if not row:
            raise KeyError(identity)
        entry = self._pinned[row] = self._entry(row)
        entry.pins += 1
        return entry

    def unpin(self, entry: Entry) -> bool:
        """One pin less; whether that was the last."""
        entry.pins -= 1
        if not entry.pins and not entry.gone:
            del self._pinned[entry.row]
        return not entry.pins

    # ---- changes -----------------------------------------------------------------------------------------------------

    def add(self, identity: Identity, entry: Entry) -> Entry | None:
        """Hold this; what was held under the identity before is returned, and gone."""
        row = self._table.find(identity)
        main = bool(row) and self._links.queue[row] == MAIN
        before = self.remove(identity)
        row = self._free.pop() if self._free else self._next
        if row == self._next:
            self._next += 1
            if row >= self._rows:
                self._grow()
        hit = entry.hit
        self._place_of[row], self._size_of[row], self._length_of[row] = entry.place, entry.size, hit.length
        self._expires_of[row], self._note_of[row], self._retention_of[row] = hit.expires_ns, hit.note, hit.retention
        self._table.put(identity, row)
        if self._queues is None:
            self._links.push(row, self._class(row), SMALL, entry.size)
        else:
            self._queues.added(row, self._class(row), identity, entry.size, main=main)
        self.used += entry.size
        if hit.expires_ns != NEVER:
            self._expire_at(row, hit.expires_ns)
        return before

    def _class(self, row: int) -> int:
        return LONG if self._retention_of[row] >= Retention.LONG else SHORT

    def _expire_at(self, row: int, expires_ns: int) -> None:
        self._mortal += 1
        self._expiries.plan(row, expires_ns)
        if self._expiries.hints > 2 * self._mortal + 1024:  # many were put anew under the same keys
            rows = np.flatnonzero(self._links.queue).tolist()
            self._expiries.rebuild((row, expires) for row in rows if (expires := self._expires_of[row]) != NEVER)

    def touch(self, identity: Identity) -> None:
        """It was used just now."""
        row = self._table.find(identity)
        if row and self._queues is not None:
            self._queues.used_one(row)
        elif row:
            self._renew(row)

    def _renew(self, row: int) -> None:
        self._links.renew(row, self._class(row), self._size_of[row])

    def sort(self, ages: npt.NDArray[Any]) -> None:
        """Put everything in order, smallest `ages[place]` first: what was found, in whatever order, at the start."""
        rows = np.flatnonzero(self._links.queue)
        for row in rows[np.argsort(ages[self._place[rows].astype(np.int64)], kind="stable")].tolist():
            self._renew(row)

    def remove(self, identity: Identity) -> Entry | None:
        """Hold it no more."""
        row = self._table.pop(identity)
        if not row:
            return None
        entry = self._entry(row)
        self._pinned.pop(row, None)
        if self._queues is None:
            self._links.pull(row, self._class(row), entry.size)
        else:
            self._queues.removed(row, self._class(row), entry.size)
        self.used -= entry.size
        self._mortal -= self._expires_of[row] != NEVER
        self._expires_of[row] = NEVER
        self._free.append(row)
        entry.gone = True
        return entry

    def late(self, now_ns: int) -> Identity | None:
        """Who has expired; None when nobody has whom this did not name before. Who is pinned is passed over."""
        while row := self._expiries.due(now_ns, self._expires_of.__getitem__):
            if row not in self._pinned:
                return self._table.name(row)
        return None

    def victim(self, now_ns: int) -> Identity | None:
        """Who goes next; None when all is pinned or nothing is there."""
        if (late := self.late(now_ns)) is not None:
            return late
        for klass in (SHORT, LONG):
            row = self._queues.victim(klass, False, self._table.name, self._size_of) if self._queues is not None else 0
            # Without queues, or where many in a row are pinned: the oldest that is not.
            row = row or next((row for row in self._in_order(klass) if row not in self._pinned), 0)
            if row:
                return self._table.name(row)
        return None

    def _in_order(self, klass: int) -> Iterator[int]:
        yield from self._links.oldest_first(klass, SMALL)
        yield from self._links.oldest_first(klass, MAIN)

    # ---- listing -----------------------------------------------------------------------------------------------------

    def items(self, lock: threading.Lock, now_ns: int) -> Iterator[tuple[Identity, Hit]]:
        """Everything that is held when this begins and still is when its turn comes, not expired. Takes the owner's lock itself.

        Needs 64 bytes a value while it lasts.
        """
        with lock:
            rows, names = np.flatnonzero(self._links.queue).astype(np.uint32), self._table.names()
        held = (names[row * IDENTITY_BYTES : (row + 1) * IDENTITY_BYTES] for row in rows.tolist())
        while some := list(islice(held, STEP)):
            with lock:
                found = [(identity, hit) for identity in some if (hit := self.hit(identity, now_ns)) is not None]
            yield from found
