"""What an adapter with an index in memory holds, in the order in which it goes: expired, short, long; least recent first.

With `scan_resistant` the order inside a class is S3-FIFO's (see `kvd.store.s3fifo`, whose shares and ghost these are): what is
read once passes through the small queue, and what was read again meanwhile goes on to the main one.

Values that a load is reading are pinned: they are neither evicted nor is their place given away before the load ends.
Not thread-safe: its owner holds a lock.
"""

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from kvd.store.identity import Identity
from kvd.store.retention import NEVER, Retention, expired
from kvd.store.s3fifo import MOVE_AT, SMALL_PART, USES_MAX, Ghost
from kvd.tiers.adapters.base import Hit


@dataclass(slots=True)
class Entry:
    """One value: where it is (the owner's own number) and what it takes there."""

    place: int
    size: int
    hit: Hit
    pins: int = 0
    gone: bool = False
    """Not held any more."""
    wiped: bool = False
    """Its place may be given away once the last pin is off."""
    uses: int = 0
    main: bool = False
    """In the main queue."""


class _Class:
    """The values of one class, next to go first: `small`, which LRU has alone, and `main`; and the bytes of each."""

    def __init__(self) -> None:
        self.queues: tuple[OrderedDict[Identity, None], OrderedDict[Identity, None]] = (OrderedDict(), OrderedDict())
        self.sizes = [0, 0]

    def push(self, identity: Identity, entry: Entry, *, main: bool) -> None:
        entry.main = main
        self.queues[main][identity] = None
        self.sizes[main] += entry.size

    def pull(self, identity: Identity, entry: Entry) -> None:
        del self.queues[entry.main][identity]
        self.sizes[entry.main] -= entry.size


class Ledger:
    """Entries by identity. `used` is the sum of their sizes."""

    def __init__(self, *, scan_resistant: bool = False) -> None:
        self.used = 0
        self._rows: dict[Identity, Entry] = {}
        self._classes = (_Class(), _Class())  # short, long
        self._ghost = Ghost() if scan_resistant else None
        self._mortal: list[tuple[int, Identity]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def get(self, identity: Identity, now_ns: int) -> Entry | None:
        """What is held and has not expired."""
        entry = self._rows.get(identity)
        return None if entry is None or expired(entry.hit.expires_ns, now_ns) else entry

    def add(self, identity: Identity, entry: Entry) -> Entry | None:
        """Hold this; what was held under the identity before is returned, and gone."""
        before = self.remove(identity)
        self._rows[identity] = entry
        known = self._ghost is not None and self._ghost.take(identity, len(self._rows))
        self._class_of(entry).push(identity, entry, main=known or (before is not None and before.main))
        self.used += entry.size
        if entry.hit.expires_ns != NEVER:
            heapq.heappush(self._mortal, (entry.hit.expires_ns, identity))
            if len(self._mortal) > 2 * len(self._rows) + 1024:  # many were put anew under the same keys
                self._mortal = [(e.hit.expires_ns, i) for i, e in self._rows.items() if e.hit.expires_ns != NEVER]
                heapq.heapify(self._mortal)
        return before

    def touch(self, identity: Identity) -> None:
        """It was used just now."""
        entry = self._rows.get(identity)
        if entry is None:
            return
        if self._ghost is None:
            self._class_of(entry).queues[0].move_to_end(identity)
        else:
            entry.uses = min(entry.uses + 1, USES_MAX)

    def _class_of(self, entry: Entry) -> _Class:
        return self._classes[entry.hit.retention >= Retention.LONG]

    def remove(self, identity: Identity) -> Entry | None:
        """Hold it no more."""
        entry = self._rows.pop(identity, None)
        if entry is not None:
            self._class_of(entry).pull(identity, entry)
            self.used -= entry.size
            entry.gone = True
        return entry

    def victim(self, now_ns: int) -> Identity | None:
        """Who goes next; None when all is pinned or nothing is there."""
        while self._mortal and (self._mortal[0][0] <= now_ns or self._mortal[0][1] not in self._rows):
            _, identity = heapq.heappop(self._mortal)
            entry = self._rows.get(identity)
            if entry is not None and expired(entry.hit.expires_ns, now_ns) and not entry.pins:
                return identity
        for held in self._classes:
            found = self._oldest(held) if self._ghost is None else self._unused(held, self._ghost)
            if found is not None:
                return found
        return None

    def _oldest(self, held: _Class) -> Identity | None:
        return next((identity for identity in held.queues[0] if not self._rows[identity].pins), None)

    def _unused(self, held: _Class, ghost: Ghost) -> Identity | None:
        """S3-FIFO's choice; what is pinned is put to the other end of its queue, at most once a value."""
        small, main = held.queues
        skipped = 0
        while (small or main) and skipped <= len(small) + len(main):
            is_main = not small or (bool(main) and held.sizes[0] * SMALL_PART < held.sizes[0] + held.sizes[1])
            identity = next(iter(held.queues[is_main]))
            entry = self._rows[identity]
            if entry.pins:
                skipped += 1
                held.queues[is_main].move_to_end(identity)
            elif not is_main and entry.uses >= MOVE_AT:
                held.pull(identity, entry)
                entry.uses = 0
                held.push(identity, entry, main=True)
            elif is_main and entry.uses:
                entry.uses -= 1
                main.move_to_end(identity)
            else:
                if not is_main:
                    ghost.add(identity, len(self._rows))
                return identity
        return None

    def items(self, now_ns: int) -> Iterator[tuple[Identity, Hit]]:
        """Everything held and not expired, as it is now."""
        for identity, entry in list(self._rows.items()):
            if not expired(entry.hit.expires_ns, now_ns):
                yield identity, entry.hit
