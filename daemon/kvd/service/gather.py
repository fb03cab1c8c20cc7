"""Gathering a run of keys of one or more namespaces: pin what is in RAM, start promoting what is in a tier.

The run is worked off in blocks, from its start, all namespaces side by side. What lies further on is not pinned yet, so
that room for the first keys may come from evicting the last ones: when the arena is too small for the whole run, what is
served is its longest beginning that fits.

Room may have to be waited for: pages that are being faulted in, slices of a long eviction. Others are served meanwhile, and
what was pinned until then stays pinned.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvd.store.index import Slots
from kvd.store.store import ABSENT, Store
from kvd.tiers.fetch import NOTHING, Fetch, Known
from kvd.tiers.tiering import Tiering

log = logging.getLogger("kvd.tiers")

BLOCK = 16
STEP_S = 0.001
"""Nobody else is served for about this long."""
SUBMITTED = "Prefetch request submitted: %d total keys, %d L1 prefix hits, %d remaining for L2"
"""Logged at DEBUG, in the words that operators of LMCache look for."""


def log_submitted(slots: Slots) -> None:
    """Say at DEBUG how many of the values that are wanted, in order, are in RAM: `slots`, ABSENT where not."""
    if log.isEnabledFor(logging.DEBUG):
        here = next(iter(np.flatnonzero(slots == ABSENT).tolist()), len(slots))
        log.debug(SUBMITTED, len(slots), here, len(slots) - here)


@dataclass
class Part:
    """One namespace's share: a slot a key (ABSENT: being fetched, or nowhere), what of it we pinned, what is on its way."""

    slots: Slots
    pinned: list[Slots]
    fetch: Fetch | None = None


class Gathering:
    """Pins and promotions for `keys` in each namespace, until `let_go`. `length`: how many leading keys had room."""

    def __init__(
        self,
        store: Store,
        tiering: Tiering,
        namespaces: Sequence[bytes],
        keys: list[bytes],
        known: Known = NOTHING,
        *,
        client: object = None,
    ) -> None:
        self.store = store
        self.known = known
        self.client = client
        self.tiering = tiering
        self.keys = keys
        self.length = len(keys)
        self.parts = {name: Part(np.zeros(len(keys), dtype=np.int64), []) for name in namespaces}

    async def begin(self, deadline_s: float) -> "Gathering":
        """Pin and start promoting, waiting for room up to the deadline (event-loop time). Cancelled, it lets go of everything."""
        loop = asyncio.get_running_loop()
        since = loop.time()
        try:
            for start in range(0, len(self.keys), BLOCK):
                end = min(start + BLOCK, len(self.keys))
                before = {name: len(part.pinned) for name, part in self.parts.items()}
                for name, part in self.parts.items():
                    await self._block(name, part, start, end, deadline_s)
                if self.length < end and len(self.parts) > 1:
                    await self._side_by_side(start, end, before, deadline_s)
                if self.length < start + BLOCK:
                    break
                if loop.time() - since > STEP_S:
                    await asyncio.sleep(0)
                    since = loop.time()
        except BaseException:
            self.let_go()
            raise
        if self.tiering.tiers:
            for part in self.parts.values():
                log_submitted(part.slots)
        return self

    async def _block(self, namespace: bytes, part: Part, start: int, end: int, deadline_s: float) -> None:
        keys = self.keys[start:end]
        slots = self.store.find(namespace, keys)
        part.slots[start:end] = slots
        missing = np.flatnonzero(slots == ABSENT)
        here = slots[slots != ABSENT]
        self.store.index.pin(here)
        part.pinned.append(here)
        if missing.size:
            absent = [keys[i] for i in missing.tolist()]
            part.fetch = await self.tiering.fetch(namespace, absent, deadline_s, part.fetch, self.known, client=self.client)
            if part.fetch is not None and part.fetch.no_room is not None:
                short = keys.index(part.fetch.no_room)
                if self._yield_behind(part, start, short):
                    part.fetch.no_room = None
                    # In a short arena no key is pinned before all keys ahead of it have their room.
                    await self._key_by_key({namespace: part}, start + short, end, deadline_s)
                else:
                    self.length = min(self.length, start + short)

    async def _side_by_side(self, start: int, end: int, before: dict[bytes, int], deadline_s: float) -> None:
        """A block once more, key by key in all namespaces: what one had of it further on is what another lacked for the first.

        `before`: how many arrays each part had pinned before the block. What is on its way up takes room until it is there.
        """
        for name, part in self.parts.items():
            if part.fetch is not None:
                await self.tiering.wait(part.fetch, deadline_s)
            # From here on nothing is awaited: each pin is on our list, or off.
            taken = [np.empty(0, dtype=np.int64), *part.pinned[before[name] :]]
            del part.pinned[before[name] :]
            part.slots[start:end] = ABSENT
            if part.fetch is not None:
                part.fetch.no_room = None
                arrived = [part.fetch.slots.pop(key) for key in set(self.keys[start:end]) if key in part.fetch.slots]
                taken.append(np.array(arrived, dtype=np.int64))
            self.store.unpin(np.concatenate(taken))
        self.length = len(self.keys)
        await self._key_by_key(self.parts, start, end, deadline_s)

    def _yield_behind(self, part: Part, start: int, short: int) -> bool:
        """Let go of what was pinned in the block behind the key that found no room; False when there is nothing such."""
        behind = part.slots[start + short : start + BLOCK]
        held = behind[behind != ABSENT].copy()
        behind[:] = ABSENT
        if held.size:
            self.store.unpin(held)
            part.pinned[-1] = part.pinned[-1][: -held.size]
        return bool(held.size)

    async def _key_by_key(self, parts: dict[bytes, Part], start: int, end: int, deadline_s: float) -> None:
        """The keys [start, end), each in all of these namespaces before the next one, up to the first that finds no room."""
        for i in range(start, end):
            if self.length <= i:
                return
            for name, part in parts.items():
                await self._block(name, part, i, i + 1, deadline_s)

    async def wait(self, deadline_s: float) -> None:
        """Wait for what is on its way, up to the deadline (event-loop time)."""
        for part in self.parts.values():
            if part.fetch is not None:
                await self.tiering.wait(part.fetch, deadline_s)

    def take(self, namespace: bytes) -> Slots:
        """The slots of the first `length` keys as they are now, ABSENT for what is not there (yet)."""
        part = self.parts[namespace]
        slots = part.slots[: self.length].copy()
        if part.fetch is not None:
            for i in np.flatnonzero(slots == ABSENT).tolist():
                slots[i] = part.fetch.slots.get(self.keys[i], ABSENT)
        return slots

    def split(self, namespace: bytes) -> "Gathering":
        """This namespace's part, as a gathering of its own."""
        other = Gathering(self.store, self.tiering, (), [])
        other.keys, other.length = self.keys, self.length
        other.parts[namespace] = self.parts.pop(namespace)
        return other

    def let_go(self, namespace: bytes | None = None) -> None:
        """Take our pins off (of one namespace); what arrives later is not pinned for us."""
        for name in [namespace] if namespace is not None else list(self.parts):
            part = self.parts.pop(name, None)
            if part is None:
                continue
            for pinned in part.pinned:
                self.store.unpin(pinned)
            if part.fetch is not None:
                self.tiering.let_go(part.fetch)
