"""What an adapter with an index in memory holds, in the order in which it goes: expired, short, long; least recent first.

Values that a load is reading are pinned: they are neither evicted nor is their place given away before the load ends.
Not thread-safe: its owner holds a lock.
"""

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from kvd.store.identity import Identity
from kvd.store.retention import NEVER, Retention, expired
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


class Ledger:
    """Entries by identity. `used` is the sum of their sizes."""

    def __init__(self) -> None:
        self.used = 0
        self._rows: dict[Identity, Entry] = {}
        self._orders: dict[bool, OrderedDict[Identity, None]] = {False: OrderedDict(), True: OrderedDict()}
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
        self._orders[entry.hit.retention >= Retention.LONG][identity] = None
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
        if entry is not None:
            self._orders[entry.hit.retention >= Retention.LONG].move_to_end(identity)

    def remove(self, identity: Identity) -> Entry | None:
        """Hold it no more."""
        entry = self._rows.pop(identity, None)
        if entry is not None:
            del self._orders[entry.hit.retention >= Retention.LONG][identity]
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
        for order in self._orders.values():
            for identity in order:
                if not self._rows[identity].pins:
                    return identity
        return None

    def items(self, now_ns: int) -> Iterator[tuple[Identity, Hit]]:
        """Everything held and not expired, as it is now."""
        for identity, entry in list(self._rows.items()):
            if not expired(entry.hit.expires_ns, now_ns):
                yield identity, entry.hit
