"""What one request wants of the tiers, what is being loaded for whom, and how room is made for it, in key order."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvd.store.identity import Identity
from kvd.store.shortage import FROM_TIER
from kvd.store.store import ABSENT
from kvd.tiers.adapters.base import Hit

if TYPE_CHECKING:
    from kvd.tiers.tiering import Tiering

LOAD_ITEMS = 32
LOAD_BYTES = 16 << 20
"""One thread's share of a promotion, or the tier's budget where that is less: worth a thread, and one of several."""

Source = tuple[int, Hit]
"""A tier's number, and what it knows of a value."""
Known = Mapping[Identity, tuple[Source, ...]]
"""What tiers answered that had to be asked: all that have a value, in their order."""
NOTHING: Known = {}


@dataclass(slots=True, eq=False)
class Fetch:
    """What one request asked the tiers for. `slots` are pinned for it until `Tiering.let_go`.

    `client` takes turns with others; with `stays` what comes up is not temporary, whatever the policy.
    """

    client: object = None
    stays: bool = False
    slots: dict[bytes, int] = field(default_factory=dict)
    no_room: bytes | None = None
    """The first key there was no room for."""
    tasks: "list[asyncio.Future[int]]" = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    ended: bool = False


@dataclass(slots=True)
class Loading:
    """A load under way, and for whom; `void` once its key was deleted: what it brings must not become visible."""

    done: "asyncio.Future[int]"
    void: bool = False
    fetches: list[Fetch] = field(default_factory=list)


Row = tuple[bytes, Identity, Hit, int]
"""A value to load: key, identity, what the tier knows of it, and where in the arena its room is."""
Wanted = tuple[bytes, Identity, int, Hit]
"""The same before it has room: key, identity, the tier's number, and what that knows of it."""


class Maker:
    """Makes room for one fetch and hands shares to threads, in key order.

    `stale`: others have had their turn since the keys were looked for, so each is looked for again: it may have been
    deleted, put, or be on its way up for somebody else.
    """

    def __init__(self, tiering: "Tiering", fetch: Fetch, namespace: bytes, known: Known, deadline_s: float, *, stale: bool) -> None:
        self.tiering = tiering
        self.store = tiering.store
        self.fetch = fetch
        self.namespace = namespace
        self.known = known
        self.deadline_s = deadline_s
        self.stale = stale

    async def start(self, rows: list[Wanted]) -> None:
        """Load these, in this order, each from its tier, until room runs out (`Fetch.no_room`)."""
        shares: dict[int, list[Row]] = {}
        try:
            for row in rows:
                offset = await self._room_for(row, shares)
                if offset is None:
                    if self.fetch.no_room is not None:
                        return
                    continue
                key, identity, number, hit = row
                most = min(LOAD_BYTES, self.tiering.tiers[number].turns.budget)
                share = shares.get(number)
                if share and (len(share) >= LOAD_ITEMS or sum(held.length for _, _, held, _ in share) + hit.length > most):
                    self._spawn({number: shares.pop(number)})
                shares.setdefault(number, []).append((key, identity, hit, offset))
        finally:
            self._spawn(shares)

    async def _room_for(self, row: Wanted, shares: dict[int, list[Row]]) -> int | None:
        """Room for this value; None where it needs none, or there is none (`Fetch.no_room`)."""
        key, identity, number, hit = row
        if self.store.too_large(hit.length):  # stored when the arena was larger: a miss for this daemon
            return None
        if self._needless(number, key, identity, hit):
            return None
        offset = self.store.make_room(hit.length, FROM_TIER)
        if offset is None:
            self._spawn(shares)  # what has room need not wait for what has none yet
            self.stale = True
            offset = await self.tiering.rooms.make(hit.length, self.deadline_s, FROM_TIER)
            if offset is None:
                self.fetch.no_room = key
            elif self._needless(number, key, identity, hit):
                self.store.give_back(offset, hit.length)
                offset = None
        return offset

    def _spawn(self, shares: dict[int, list[Row]]) -> None:
        for number in list(shares):
            self.tiering.spawn(self.fetch, self.tiering.tiers[number], self.namespace, shares.pop(number))

    def _needless(self, number: int, key: bytes, identity: Identity, hit: Hit) -> bool:
        """Whether this needs no room (any more): it is on its way up, has come into RAM, or has left its tier."""
        if self.tiering.join(self.fetch, key, identity):
            return True
        if not self.stale:
            return False
        slots = self.store.find(self.namespace, [key])
        if slots[0] != ABSENT:
            self.store.index.pin(slots)
            self.fetch.slots[key] = int(slots[0])
            return True
        found = self.tiering.locate([identity], self.known).get(0)
        # A policy may have chosen another tier than the first; what that one has lost meanwhile, the others make good.
        return found is None or (self.tiering.policies.plain_source and found != (number, hit))
