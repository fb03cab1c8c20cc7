"""The ordered list of tiers below the arena: what goes down, what comes up.

Down: the store tells of every new value (`stored`); those of class short and long are queued at each tier. Up: `fetch`
finds out which tier has what the arena lacks, makes room, loads, and admits the values, each pinned for who asked, so
that a later promotion cannot evict an earlier one of the same request. Two requests for one key share one load.

Room for promotions is made by one request after the other, each in key order: so two requests for one key make room for it
once, and the first is served before the second takes its room away.

Two orders matter for I1 and are kept here: a delete dooms its identity at once, before any thread has heard of it, and
voids loads of it that are under way; and a value that is evicted before it reached its tier dooms what the tier may still
hold under that key from an earlier put.

Nothing here waits for a tier on behalf of a key that is in RAM (I5).
"""

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from kvd.store.identity import NAMESPACE_BYTES, Identity
from kvd.store.retention import Retention
from kvd.store.room import Rooms
from kvd.store.store import ABSENT, Store
from kvd.store.tombstones import Fate
from kvd.tiers.adapters.base import Adapter, AdapterError, Durability, Hit, Loaded, Want
from kvd.tiers.fetch import NOTHING, Fetch, Known, Loading, Maker, Row, Source
from kvd.tiers.forgetting import Erased, Forgotten, carried_out, trouble
from kvd.tiers.policies import Asking, PrefetchPolicy, StorePolicy, TierState, Value
from kvd.tiers.tier import IN_FLIGHT, TASKS, TIERS_MAX, Receipt, Tier
from kvtools.errors import UsageError

log = logging.getLogger("kvd.tiers")

ERASE_ITEMS = 4096
UNREADABLE = "it is encrypted with a key that is not among old_keys"
CLEAR_S = 50.0
"""How long a clear waits for tiers to have done it: less than the least patient client of its own, `kvd clear`, waits."""
ASK_S = 2.0
"""How long a tier without an index in memory may take to answer a look-up, whatever the client's deadline."""


class Flushed(NamedTuple):
    """What a flush came to: the weakest durability reached, how many values may end with the daemon, and why, where a tier said."""

    durability: Durability = Durability.NONE
    left: int = 0
    why: str = ""


class Tiering:
    """All tiers of one daemon. `in_flight`: requests that load from one tier at the same time."""

    def __init__(
        self,
        store: Store,
        rooms: Rooms,
        *,
        promote: bool = False,
        policies: Asking | None = None,
        in_flight: int = IN_FLIGHT,
    ) -> None:
        self.store = store
        self.rooms = rooms
        self._turn = asyncio.Lock()
        """Whose turn it is to make room."""
        self.promote = promote
        """What a tier gives is also stored in those before it that lack it."""
        self.policies = policies or Asking(StorePolicy(), PrefetchPolicy())
        self.in_flight = in_flight
        store.buffering = not self.policies.keeps
        self._holders: dict[int, list[int]] = {}
        """Which tiers took a value that may leave the arena once all have answered, by slot."""
        self.tiers: list[Tier] = []
        self._loading: dict[Identity, Loading] = {}
        self._clearing: list[bytes | None] = []
        """Namespaces (None: all) that are being cleared."""
        self._copying: set[asyncio.Task[None]] = set()
        self._room = asyncio.Event()
        self._receipt: Receipt | None = None
        store.listener.stored = self._stored
        store.listener.removed = self._removed

    async def open(self, adapters: Iterable[Adapter]) -> None:
        """Open all adapters, in order. Raises what the first one that fails raises."""
        for number, adapter in enumerate(adapters):
            if number >= TIERS_MAX:
                raise UsageError(f"more than {TIERS_MAX} tiers", hint="stripe directories with several --long-path")
            tier = Tier(adapter, self.store, changed=self._progress, number=number, requests=self.in_flight, settled=self._settled)
            self.tiers.append(tier)
            adapter.attach(self.store.arena.view)
            bury = self.store.tombstones.note_many
            adapter.listen(functools.partial(bury, fate=Fate.EVICTED, place=tier.name, why="room in the tier"))
            await tier.open()

    async def close(self, deadline_s: float) -> None:
        """Close all tiers, each within the deadline."""
        await asyncio.gather(*(tier.close(deadline_s) for tier in self.tiers))

    # ---- down --------------------------------------------------------------------------------------------------------

    def receipt(self, count: int) -> Receipt | None:
        """A receipt for `count` values about to be put; None when there is no tier to wait for."""
        return Receipt(count * len(self.tiers), asyncio.get_running_loop()) if self.tiers else None

    @contextlib.contextmanager
    def noting(self, receipt: Receipt | None) -> Iterator[None]:
        """What is stored inside (where nothing may be awaited) goes on this receipt."""
        self._receipt = receipt
        try:
            yield
        finally:
            self._receipt = None

    def not_stored(self, receipt: Receipt | None, count: int) -> None:
        """So many of its values were refused: no tier will hear of them."""
        if receipt is not None:
            for _ in range(count * len(self.tiers)):
                receipt.note(Durability.NONE)

    def _stored(self, slot: int, replaced: bool) -> None:
        store = self.store
        if store.index.klass_of[slot] >= Retention.SHORT:
            targets = self.tiers if self.policies.plain_store else self._targets(slot)
            for tier in targets:
                tier.write(slot, self._receipt)
        else:
            if self.tiers:
                self._doom([store.identity_of(slot)])
            if self._receipt is not None:
                for _ in self.tiers:
                    self._receipt.note(Durability.NONE)
        if self._loading and (loading := self._loading.get(store.identity_of(slot))):
            loading.void = True

    def _targets(self, slot: int) -> list[Tier]:
        """The tiers that the store policy sends a value to; the others forget what they hold under its key."""
        value = self._value(slot)
        chosen = self.policies.targets(value, [self._state(tier) for tier in self.tiers])
        others = [tier for tier in self.tiers if tier.number not in chosen]
        if others:
            self._doom([value.identity], others)
        if self._receipt is not None:
            for _ in others if chosen else others[1:]:
                self._receipt.skip()
            if not chosen:
                self._receipt.note(Durability.NONE)
        return [tier for tier in self.tiers if tier.number in chosen]

    def _state(self, tier: Tier) -> TierState:
        return TierState(tier.number, tier.name, tier.adapter.type, tier.adapter.capabilities, not tier.broken)

    def _value(self, slot: int) -> Value:
        index = self.store.index
        return Value(self.store.identity_of(slot), index.length_of[slot], Retention(index.klass_of[slot]), index.expires_of[slot])

    def _settled(self, slot: int, number: int, took: bool) -> None:
        """A tier has answered for a value; when all have, and one took it, the policy may send it out of the arena."""
        if self.policies.keeps:
            return
        if took:
            self._holders.setdefault(slot, []).append(number)
        if self.store.index.dirty_of[slot]:
            return
        holders = self._holders.pop(slot, None)
        key = self.store.index.keys[slot]
        if holders and key is not None and self.policies.leaves(self._value(slot), holders):
            self.store.let_go(slot, key)
            self._room.set()

    def _removed(self, slot: int) -> None:
        """Called before a value is hidden. One that is still on its way must not arrive after all, and what a tier holds

        under its key from an earlier put is out of date: the erase is queued behind the write that may be under way.
        """
        self._holders.pop(slot, None)
        for tier in self.tiers:
            if tier.untaken:
                tier.untaken.discard(self.store.identity_of(slot))
        if dirty := self.store.index.dirty_of[slot]:
            for tier in self.tiers:
                if dirty >> tier.number & 1:  # what the others have taken is up to date
                    tier.waiting -= 1
                    tier.erase([self.store.identity_of(slot)])

    def _doom(self, identities: list[Identity], tiers: Sequence[Tier] | None = None) -> None:
        for tier in self.tiers if tiers is None else tiers:
            if tier.adapter.capabilities.local_index:
                held = [i for i, hit in zip(identities, tier.adapter.lookup(identities), strict=True) if hit]
                if held:
                    tier.erase(held)
            else:
                tier.erase(identities)

    def _progress(self) -> None:
        self.store.evict_dirty = any(tier.broken for tier in self.tiers)
        self._room.set()

    def tick(self) -> None:
        """Periodic: notice tiers that hang."""
        for tier in self.tiers:
            tier.look()

    @property
    def clogged(self) -> bool:
        """Whether some tier has more deletes waiting than it may have: no more changes are taken."""
        return any(tier.clogged for tier in self.tiers)

    def pending(self) -> bool:
        """Whether values are on their way to a tier that works: room may come of it."""
        return any(tier.busy and not tier.broken for tier in self.tiers)

    async def wait_for_room(self, deadline_s: float) -> bool:
        """Wait for a tier to have taken something; False at the deadline (event-loop time)."""
        self._room.clear()
        try:
            async with asyncio.timeout_at(deadline_s):
                await self._room.wait()
        except TimeoutError:
            return False
        return True

    async def flush(self, identities: Sequence[Identity] = ()) -> Flushed:
        """Wait until everything stored so far has been offered to the tiers; what that came to.

        Of all values of the arena or of these identities, `left` are in no state to outlive the daemon: some tier has refused
        them, or cannot keep what it had taken.
        """
        if not self.tiers:
            return Flushed()
        reached = await asyncio.gather(*(tier.flush() for tier in self.tiers))
        weakest = min(durability for durability, _, _ in reached)
        refused = set().union(*(tier.untaken for tier in self.tiers))
        lost = sum(values for _, _, values in reached)
        if identities:
            held = self.has(identities)
            left = sum(identity in refused or not there for identity, there in zip(identities, held, strict=True))
            left = len(identities) if lost else left
        else:
            left = len(refused) + lost
        return Flushed(Durability.NONE if left else weakest, left, "; ".join(why for _, why, _ in reached if why))

    def stranded(self) -> Flushed | None:
        """What waits in vain for tiers that do not work; None where all of them do."""
        broken = [tier for tier in self.tiers if tier.broken]
        left = sum(max(1, tier.waiting) for tier in broken)
        why = "; ".join(trouble(tier) for tier in broken)
        return Flushed(Durability.NONE, left, why) if broken else None

    async def delete(self, identities: list[Identity], timeout_s: float = 5.0) -> Forgotten:
        """Forget these in every tier; how many identities some tier held.

        Look-ups miss them at once. A tier that is out of order gets its deletes when it is back: no wait for that.
        """
        held: set[Identity] = set()
        erased: list[Erased] = []
        for tier in self.tiers:
            found = identities
            if tier.adapter.capabilities.local_index:
                # Its own index, not `has`: that is empty while the tier is out of order, and what it holds would come back.
                found = [i for i, hit in zip(identities, tier.adapter.lookup(identities), strict=True) if hit]
                held.update(i for i in found if i not in tier.doomed)
            if found:
                erased.append((tier, tier.erase(found), len(found)))
        for identity in identities:
            if loading := self._loading.get(identity):
                loading.void = True
        return await carried_out(len(held), erased, timeout_s)

    async def clear(
        self, namespace: bytes | None, timeout_s: float = CLEAR_S, *, arena: AsyncIterator[list[Identity]] | None = None
    ) -> Forgotten:
        """Forget everything (of one namespace) in every tier. Raises AdapterError, at the end, where one could not.

        `arena` clears the arena, step by step; a value that was there and in tiers counts once. Look-ups miss what is being
        cleared from the first moment: what a reader brought up meanwhile would stay in the arena, cleared or not.
        """
        gone: set[Identity] = set()
        unlisted = 0
        failed: list[tuple[str, str]] = []
        erased: list[Erased] = []
        self._clearing.append(namespace)
        try:
            for identity, loading in self._loading.items():
                if self._being_cleared(identity):
                    loading.void = True
            if arena is not None:
                async for identities in arena:
                    gone.update(identities)
            for tier in self.tiers:
                try:
                    if not tier.adapter.capabilities.enumerate:
                        unlisted += await tier.call(tier.adapter.clear, namespace)
                        continue
                    held = await tier.call(_held, tier.adapter, namespace)
                except AdapterError as error:
                    failed.append((tier.name, error.message))
                    continue
                for start in range(0, len(held), ERASE_ITEMS):
                    some = held[start : start + ERASE_ITEMS]
                    gone.update(some)
                    erased.append((tier, tier.erase(some), len(some)))
                    await asyncio.sleep(0)
        finally:
            self._clearing.remove(namespace)
        forgotten = await carried_out(max(len(gone), unlisted), erased, timeout_s)
        if failed:
            names, why = zip(*failed, strict=True)
            raise AdapterError(f"all is forgotten but what is in tier {', '.join(names)}: {'; '.join(why)}")
        return forgotten

    def _being_cleared(self, identity: Identity) -> bool:
        return None in self._clearing or identity[:NAMESPACE_BYTES] in self._clearing

    # ---- up ----------------------------------------------------------------------------------------------------------

    @property
    def must_ask(self) -> bool:
        """Whether there are tiers that can only be asked with I/O, and may be asked now."""
        return any(not tier.adapter.capabilities.local_index and not tier.breaker.open for tier in self.tiers)

    async def ask(self, identities: Sequence[Identity], deadline_s: float) -> Known:
        """Ask the tiers without an index in memory, all at once, for what no other tier has; until the deadline at most."""
        where = self.locate(identities)
        left = list(dict.fromkeys(identity for i, identity in enumerate(identities) if i not in where))
        return await self._asked(left, deadline_s) if left else NOTHING

    async def _asked(self, identities: list[Identity], deadline_s: float) -> Known:
        asked = [tier for tier in self.tiers if not tier.adapter.capabilities.local_index]
        deadline_s = min(deadline_s, asyncio.get_running_loop().time() + ASK_S)
        known: dict[Identity, tuple[Source, ...]] = {}
        answers = await asyncio.gather(*(tier.ask(identities, deadline_s) for tier in asked))
        for tier, found in zip(asked, answers, strict=True):
            for identity, hit in zip(identities, found, strict=True):
                if hit is not None:
                    known[identity] = (*known.get(identity, ()), (tier.number, hit))
        return known

    def has(self, identities: Sequence[Identity], known: Known = NOTHING) -> list[bool]:
        """Whether some tier with a local index, or one of those that were asked, holds each."""
        where = self.locate(identities, known)
        return [i in where for i in range(len(identities))]

    def numbers(self, identities: Sequence[Identity], known: Known = NOTHING) -> list[int]:
        """The number of the tier that each would come from; the first one's for what none is known to hold."""
        where = self.locate(identities, known)
        return [where[i][0] if i in where else 0 for i in range(len(identities))]

    async def fetch(
        self,
        namespace: bytes,
        keys: list[bytes],
        deadline_s: float,
        fetch: Fetch | None = None,
        known: Known = NOTHING,
        *,
        client: object = None,
        stays: bool = False,
    ) -> Fetch | None:
        """Start loading what tiers hold of these keys (which the arena lacks), in `fetch` or a new one.

        The answer's tasks complete one by one; slots appear in it pinned. Stops at the first key there is no room for, be it
        that none can be made or not by the deadline (event-loop time).
        None when there was no fetch and no tier holds any of the keys.
        """
        if not self.tiers:
            return fetch
        identities = [namespace + key for key in keys]
        where = self.locate(identities, known)
        if not where:
            return fetch
        if not self.policies.plain_source:
            await self._choose_sources(identities, where, known, deadline_s)
        fetch = fetch or Fetch(client, stays)
        first = {key: i for i, key in reversed(list(enumerate(keys))) if i in where}
        # In key order, whichever tier each comes from: room that one's later keys took would cut the run short at another's.
        rows = [(keys[i], identities[i], *where[i]) for i in sorted(first.values())]
        stale = self._turn.locked() or not self.policies.plain_source
        maker = Maker(self, fetch, namespace, known, deadline_s, stale=stale)
        try:
            async with asyncio.timeout_at(deadline_s):
                await self._turn.acquire()
        except TimeoutError:
            fetch.no_room = keys[min(first.values())]
            return fetch
        try:
            await maker.start(rows)
        except asyncio.CancelledError:
            self.let_go(fetch)
            raise
        finally:
            self._turn.release()
        return fetch

    async def _choose_sources(
        self, identities: Sequence[Identity], where: dict[int, Source], known: Known, deadline_s: float
    ) -> None:
        """Where several tiers have a value, let the policy say which of them loads it; those that must be asked are."""
        places = list(where)
        unasked = list(dict.fromkeys(identities[i] for i in places if identities[i] not in known))
        if unasked and self.must_ask:
            known = {**known, **await self._asked(unasked, deadline_s)}
        found = [dict(zip(places, tier.has([identities[i] for i in places]), strict=True)) for tier in self.tiers]
        for i in places:
            holders = {number: hit for number, hits in enumerate(found) if (hit := hits[i]) is not None}
            for number, hit in known.get(identities[i], ()):
                holders.setdefault(number, hit)
            if len(holders) > 1:
                hit = where[i][1]
                value = Value(identities[i], hit.length, hit.retention, hit.expires_ns)
                number = self.policies.source(value, sorted(holders))
                where[i] = number, holders[number]

    def locate(self, identities: Sequence[Identity], known: Known = NOTHING) -> dict[int, tuple[int, Hit]]:
        """Position -> (number of the first tier that has it, what it knows of it); those that need no asking first."""
        where: dict[int, tuple[int, Hit]] = {}
        left = list(range(len(identities)))
        for number, tier in enumerate(self.tiers):
            if not left:
                break
            found = tier.has([identities[i] for i in left])
            for i, hit in zip(left, found, strict=True):
                if hit is not None:
                    where[i] = (number, hit)
            left = [i for i in left if i not in where]
        for i in left if known else ():
            for source in known.get(identities[i], ()):
                if identities[i] not in self.tiers[source[0]].doomed:
                    where[i] = source
                    break
        if where and (self._clearing or self.store.index.mortal):
            # Under a key whose newest value has just expired in RAM, a tier may still hold an older one: that stays hidden.
            hides = self.store.index.hides
            for i in list(where):
                identity = identities[i]
                if self._being_cleared(identity) or hides(identity[:NAMESPACE_BYTES], identity[NAMESPACE_BYTES:]):
                    del where[i]
        return where

    def spawn(self, fetch: Fetch, tier: Tier, namespace: bytes, share: list[Row]) -> None:
        """Load a share, whose room was made, when its turn has come, for this fetch and whoever joins.

        Elsewhere, when the tier stops working before.
        """
        size = sum(hit.length for _, _, hit, _ in share)
        loop = asyncio.get_running_loop()
        entries = []
        for key, identity, _, _ in share:
            loading = self._loading[identity] = Loading(loop.create_future())
            entries.append(loading)
            self._join(fetch, key, loading)

        def begin(*, elsewhere: bool = False) -> None:
            task = loop.create_task(self._load(tier, namespace, share, entries, elsewhere=elsewhere))
            task.add_done_callback(_log_failure)
            if not elsewhere:
                task.add_done_callback(lambda _: tier.turns.done(fetch, size))

        tier.turns.submit(fetch, fetch.client, size, begin, partial(begin, elsewhere=True))
        tier.turns.go()

    def join(self, fetch: Fetch, key: bytes, identity: Identity) -> bool:
        """Wait along for a load of this that is under way; False when there is none."""
        under_way = self._loading.get(identity)
        if under_way is None or under_way.void:
            return False
        self._join(fetch, key, under_way)
        return True

    def _join(self, fetch: Fetch, key: bytes, loading: Loading) -> None:
        """When that load is done, pin what it brought for this fetch."""
        fetch.keys.append(key)
        fetch.tasks.append(loading.done)
        loading.fetches.append(fetch)

        def arrived(done: "asyncio.Future[int]") -> None:
            slot = done.result()
            if slot and not fetch.ended:
                self.store.index.pin(np.array([slot], dtype=np.int64))
                fetch.slots[key] = slot

        loading.done.add_done_callback(arrived)

    async def _load(
        self, tier: Tier, namespace: bytes, share: list[Row], entries: list[Loading], *, elsewhere: bool = False
    ) -> None:
        store = self.store
        # While it waited for its turn, everybody who wanted a value may have gone: only the others are worth reading.
        wanted = [i for i, loading in enumerate(entries) if not loading.void and any(not fetch.ended for fetch in loading.fetches)]
        sources: list[Source | None] = [None] * len(share)
        for i, source in zip(wanted, await self._read(tier, [share[i] for i in wanted], elsewhere=elsewhere), strict=True):
            sources[i] = source
        raised: dict[int, list[int]] = {}  # number of the tier that gave it -> slots
        for (key, identity, hit, offset), loading, source in zip(share, entries, sources, strict=True):
            slot = ABSENT
            if source is not None and not loading.void:
                number, found = source
                store.arena.zero_slack(offset, hit.length)
                value = Value(identity, hit.length, found.retention, found.expires_ns)
                stays = any(fetch.stays for fetch in loading.fetches) or self.policies.stays(value, number)
                slot = store.admit(namespace, key, offset, hit.length, found.retention, found.expires_ns, temporary=not stays)
                if slot:
                    raised.setdefault(number, []).append(slot)
            else:
                store.give_back(offset, hit.length)
            if self._loading.get(identity) is loading:
                del self._loading[identity]
            # A pin for the moment between here and the callbacks that pin it for each who asked.
            pin = np.array([slot] if slot else [], dtype=np.int64)
            store.index.pin(pin)
            loading.done.set_result(slot)
            asyncio.get_running_loop().call_soon(store.unpin, pin)
        for number, slots in raised.items() if self.promote else ():
            if number:
                self._copy(self.tiers[:number], slots)

    def _copy(self, tiers: Sequence[Tier], slots: list[int]) -> None:
        """Store these values, which a later tier gave, in each of `tiers` that lacks them."""
        task = asyncio.get_running_loop().create_task(self._copy_to(tiers, slots))
        self._copying.add(task)
        task.add_done_callback(self._copying.discard)
        task.add_done_callback(_log_failure)

    async def _copy_to(self, tiers: Sequence[Tier], slots: list[int]) -> None:
        index = self.store.index
        rows = [(slot, index.keys[slot], self.store.identity_of(slot)) for slot in slots]
        for tier in tiers:
            found = await tier.ask([identity for _, _, identity in rows], asyncio.get_running_loop().time() + ASK_S)
            for (slot, key, _), hit in zip(rows, found, strict=True):
                if hit is None and key is not None and index.keys[slot] is key:  # else it has gone from the arena meanwhile
                    tier.copy(slot)

    async def _read(self, first: Tier, share: list[Row], *, elsewhere: bool = False) -> "list[Source | None]":
        """Fill the room of each value from `first`, and what that has lost or damaged from the other tiers, in order.

        `elsewhere`: from the others alone. Answers which tier gave each value, and what it knows of it; None where none did.
        """
        sources: list[Source | None] = [None] * len(share)
        for tier in [*([] if elsewhere else [first]), *(tier for tier in self.tiers if tier is not first)]:
            hits = {i: hit for i, (_, _, hit, _) in enumerate(share) if sources[i] is None}
            if not hits:
                break
            if tier is not first:
                found = await tier.ask([share[i][1] for i in hits], asyncio.get_running_loop().time() + ASK_S)
                hits = {i: hit for i, hit in zip(hits, found, strict=True) if hit is not None and hit.length == share[i][2].length}
            if hits:
                await self._read_from(tier, share, hits, sources)
        return sources

    async def _read_from(self, tier: Tier, share: list[Row], hits: dict[int, Hit], sources: "list[Source | None]") -> None:
        arena = self.store.arena
        task = next(TASKS)
        log.debug("Submitted load task %d to adapter %d (%s) with %d keys.", task, tier.number, tier.name, len(hits))
        places = [(share[i][1], share[i][3], hit.length, hit.note) for i, hit in hits.items()]
        results = await tier.load([Want(i, arena.slice(o, n), arena.padded(o, n), note) for i, o, n, note in places])
        for (i, hit), result in zip(hits.items(), results, strict=True):
            if result is Loaded.OK:
                sources[i] = tier.number, hit
            elif result is Loaded.CORRUPT:
                self.store.tombstones.note(share[i][1], Fate.CORRUPT, place=tier.name)
            elif share[i][1] in tier.adapter.unreadable:
                self.store.tombstones.note(share[i][1], Fate.CORRUPT, place=tier.name, why=UNREADABLE)
        loaded = results.count(Loaded.OK)
        log.debug("Load task %d completed: adapter %d (%s), %d of %d keys.", task, tier.number, tier.name, loaded, len(results))

    async def wait(self, fetch: Fetch, deadline_s: float) -> None:
        """Wait until all of a fetch has arrived (or not), or the deadline (event-loop time)."""
        left = [task for task in fetch.tasks if not task.done()]
        if left:
            timeout = deadline_s - asyncio.get_running_loop().time()
            if timeout > 0:
                await asyncio.wait(left, timeout=timeout)
        await asyncio.sleep(0)  # let the callbacks of what is done run: they pin

    def let_go(self, fetch: Fetch) -> None:
        """Take the fetch's pins off; what arrives later is not pinned for it."""
        fetch.ended = True
        if fetch.slots:
            self.store.unpin(np.array(list(fetch.slots.values()), dtype=np.int64))
            fetch.slots.clear()


def _held(adapter: Adapter, namespace: bytes | None) -> list[Identity]:
    return list(adapter.identities(namespace))


def _log_failure(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error("a promotion failed unexpectedly", exc_info=task.exception())
