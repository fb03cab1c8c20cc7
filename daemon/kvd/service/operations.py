"""One method a request: the store first, the tiers where the store has nothing.

Each method returns its answer at once when RAM decides, or a coroutine when a tier must be asked or room must come of a
tier's work; those have the client's deadline. Nothing in RAM ever waits for one of them (I5).
"""

import asyncio
import logging
import os
import secrets
from collections.abc import Awaitable, Callable, Sequence
from time import perf_counter
from typing import Any

import numpy as np

from kvd.service import rounds
from kvd.service.direct import DirectDesk
from kvd.service.faults import fault
from kvd.service.gather import Gathering, log_submitted
from kvd.service.histogram import OPERATION_BOUNDS_S, Histogram
from kvd.service.server import Connection
from kvd.service.writing import CLOGGED, Writing
from kvd.store.extents import PAGE
from kvd.store.index import Slots
from kvd.store.store import ABSENT, Store
from kvd.store.tombstones import Fate
from kvd.tiers.fetch import NOTHING, Known, Source
from kvd.tiers.tiering import Flushed, Tiering
from kvd.wire import protocol as p
from kvtools import __version__

log = logging.getLogger("kvd.operations")

LEASE_S = 30.0
"""How long a lease lasts unless renewed or released; also the most that a token may ask for."""
BRIEF_S = 0.5
"""A lease asked for no longer than this may be left to run out; who needs room waits for it."""
ROOM_POLL_S = 0.005
DRAIN_LEAST_S = 0.25
PIN_ROOM_S = 1.0
"""How long a prefix that is to be pinned may wait for what the daemon itself has to do for its room."""
INLINE_TOTAL = 1 << 20
ASK_KEYS = 256
"""Keys of a prefix that are asked for at a time."""
ASK_BEFORE_DELETE_S = 0.5
RESULT = p.Answer | Awaitable[p.Answer] | None
TIMED: dict[type[p.Request], str] = {
    p.Exists: "exists",
    p.Prefix: "prefix",
    p.Lease: "lease",
    p.Claim: "claim",
    p.Prefetch: "prefetch",
    p.Reserve: "reserve",
    p.Commit: "commit",
    p.PutInline: "put_inline",
    p.Delete: "delete",
    p.Clear: "clear",
    p.Flush: "flush",
}
"""Requests whose latency is kept, by the word they have in stats."""

_MISSING = np.uint64(p.MISSING)
_PAGE = np.uint64(PAGE)


class Operations:
    """Serves requests out of one store and its tiers. `changed` is called after each, to keep the stats fresh."""

    def __init__(
        self, store: Store, tiering: Tiering, *, instance: str, changed: Callable[[], None], info: Callable[[], dict[str, Any]]
    ) -> None:
        self.store = store
        self.tiering = tiering
        self.instance = instance
        self.changed = changed
        self.info = info
        self.drain: Callable[[], Awaitable[Flushed]] | None = None
        self.tokens: dict[bytes, Gathering] = {}
        """Prefixes pinned and not claimed yet, by the 16 random bytes that claim them, from any connection."""
        self.writing = Writing(store, tiering, lease_s=LEASE_S)
        self.direct = DirectDesk(store, tiering, lease_s=LEASE_S)
        self._methods: dict[type[p.Request], Callable[[Connection, Any], RESULT]] = {
            p.Exists: self.exists,
            p.Lease: self.lease,
            p.Release: self.release,
            p.Reserve: self.writing.reserve,
            p.Commit: self.writing.commit,
            p.PutInline: self.writing.put_inline,
            p.Abort: self.writing.abort,
            p.Prefix: self.prefix,
            p.Claim: self.claim,
            p.Renew: self.renew,
            p.Prefetch: self.prefetch,
            p.Delete: self.delete,
            p.Clear: self.clear,
            p.Flush: self.flush,
            p.Stats: self.stats,
            p.Keys: self.keys,
            p.Drain: self.drain_now,
            p.Ping: self.ping,
            p.Where: self.where,
            p.Unpin: self.unpin,
            p.DirectReserve: lambda link, m: self.writing.may_write(link, m) or self.direct.reserve(link, m),
            p.DirectCommit: self.direct.commit,
            p.DirectAbort: self.direct.abort,
            p.DirectHold: self.direct.hold,
            p.DirectRelease: self.direct.release,
            p.Why: self.why,
            p.Note: self.note,
        }
        self.seconds = {word: Histogram(OPERATION_BOUNDS_S) for word in TIMED.values()}
        self._observe = {kind: self.seconds[word].observe for kind, word in TIMED.items()}

    # ---- what the server asks for ------------------------------------------------------------------------------------

    def handle(self, link: Connection, request: p.Request) -> RESULT:
        self.changed()
        kind = type(request)
        observe = self._observe.get(kind)
        if observe is None:
            return self._answer(kind, link, request)
        begun = perf_counter()
        answer = self._answer(kind, link, request)
        if answer is None or isinstance(answer, p.Answer):
            observe(perf_counter() - begun)
            return answer
        return _observed(answer, begun, observe)

    def _answer(self, kind: type[p.Request], link: Connection, request: p.Request) -> RESULT:
        if why := fault(request):
            return p.Failed(request.id, "bad_request", why)
        return self._methods[kind](link, request)

    def welcome(self, session: bytes) -> p.Welcome:
        capacity, roots = self.store.arena.capacity, self.direct.roots()
        slow = any(not tier.adapter.capabilities.local_index for tier in self.tiering.tiers)
        return p.Welcome(p.VERSION, f"kvd {__version__}", os.getpid(), capacity, session, LEASE_S, self.instance, roots, slow)

    def descriptor(self, write: bool) -> int:
        arena = self.store.arena
        return arena.fd if write else arena.read_only_fd

    def lost(self, link: Connection) -> None:
        self.store.connection_lost(link.holder)
        self.direct.connection_lost(link)
        if not self.store.leases.waits_for(link.peer) and not self.direct.waits_for(link.peer):
            link.peer.close()
        elif not link.peer.when_gone(asyncio.get_running_loop(), lambda: self._gone(link)):
            log.warning(
                "pid %d left extents it may still write to, and this host cannot tell when it ends: kept apart", link.peer.pid
            )
        self.changed()

    def _gone(self, link: Connection) -> None:
        self.store.process_gone(link.peer)
        self.direct.process_gone(link.peer)

    # ---- reading -----------------------------------------------------------------------------------------------------

    def exists(self, link: Connection, m: p.Exists) -> RESULT:
        slots = self.store.find(m.namespace, m.keys)
        flags = slots != ABSENT
        if self.tiering.tiers and not flags.all():
            missing = np.flatnonzero(~flags).tolist()
            identities = [m.namespace + m.keys[i] for i in missing]
            flags[missing] = self.tiering.has(identities)
            if m.timeout_ms > 0 and self.tiering.must_ask and not flags.all():
                return self._exists_below(m, flags, missing, identities)
        return p.Flags(m.id, flags.tobytes())

    async def _exists_below(self, m: p.Exists, flags: Any, missing: list[int], identities: list[bytes]) -> p.Answer:
        known = await self.tiering.ask(identities, _deadline(m.timeout_ms))
        flags[missing] |= self.tiering.has(identities, known)
        return p.Flags(m.id, flags.tobytes())

    def lease(self, link: Connection, m: p.Lease) -> RESULT:
        if len(m.keys) == 1:
            fast = self._lease_one(link, m)
            if fast is not None:
                return fast
        slots = self.store.find(m.namespace, m.keys)
        missing = slots == ABSENT
        if m.timeout_ms > 0 and self.tiering.tiers and missing.any():
            return self._lease_from_tiers(link, m)
        return self._answer_lease(link, m, m.namespace, slots)

    def _lease_one(self, link: Connection, m: p.Lease) -> p.Answer | None:
        """The same for one key that is in RAM: single requests are worth their own path."""
        store = self.store
        space = store.index.spaces.get(m.namespace)
        slot = store.index.find_one(space, m.keys[0], store.clock_ns()) if space is not None else ABSENT
        if not slot:
            return None
        length = store.index.length_of[slot]
        offset = store.index.start_of[slot] * PAGE
        store.count(m.namespace, 1, 0, length)
        if length <= m.inline:
            store.index.touch_one(slot)
            return p.Leased(m.id, 0, b"\0" * 8, length.to_bytes(8, "little"), {0: bytes(store.arena.slice(offset, length))})
        lease = store.pin_one(link.holder, slot, self._until(m))
        return p.Leased(m.id, lease.number, offset.to_bytes(8, "little"), length.to_bytes(8, "little"))

    async def _lease_from_tiers(self, link: Connection, m: p.Lease) -> p.Answer:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + m.timeout_ms / 1000
        known = await self._ask([m.namespace], m.keys, deadline)
        while True:
            gathering = await Gathering(self.store, self.tiering, [m.namespace], m.keys, known, client=link).begin(deadline)
            try:
                if gathering.length or loop.time() >= deadline:
                    await gathering.wait(deadline)
                    # No room for even the first key, to the last: what is not in RAM then is as good as missing.
                    gathering.length = gathering.length or len(m.keys)
                    return self._answer_lease(link, m, m.namespace, gathering.take(m.namespace))
            finally:
                gathering.let_go()
            await asyncio.sleep(ROOM_POLL_S)  # room comes when somebody releases something

    async def _ask(self, namespaces: Sequence[bytes], keys: list[bytes], deadline: float) -> Known:
        """What tiers that must be asked have of what is not in RAM; nothing, at once, where there are none."""
        if not self.tiering.must_ask:
            return NOTHING
        absent = []
        for namespace in namespaces:
            slots = self.store.find(namespace, keys)
            absent += [namespace + keys[i] for i in np.flatnonzero(slots == ABSENT).tolist()]
        return await self.tiering.ask(absent, deadline) if absent else NOTHING

    def _answer_lease(self, link: Connection, m: p.Lease | p.Claim, namespace: bytes, slots: Slots) -> p.Leased:
        store, index = self.store, self.store.index
        missing = slots == ABSENT
        lengths = index.length[slots]
        offsets = index.start[slots].astype(np.uint64) * _PAGE
        offsets[missing] = _MISSING
        misses = int(missing.sum())
        store.count(namespace, len(slots) - misses, misses, int(lengths.sum()))
        inline: dict[int, bytes] | None = None
        pinned = ~missing
        limit = m.inline if isinstance(m, p.Lease) else 0
        if limit and (small := np.flatnonzero(pinned & (lengths <= limit))).size and int(lengths[small].sum()) <= INLINE_TOTAL:
            inline = {i: bytes(store.arena.slice(int(offsets[i]), int(lengths[i]))) for i in small.tolist()}
            index.touch(slots[small])
            pinned[small] = False
        number = 0
        if pinned.any():
            number = store.pin(link.holder, slots[pinned], self._until(m)).number
        return p.Leased(m.id, number, offsets.tobytes(), lengths.tobytes(), inline)

    def _until(self, m: p.Lease | p.Claim) -> float:
        """When a new read lease ends by itself."""
        now = self.store.monotonic()
        if isinstance(m, p.Lease) and m.hold_ms > 0:
            until = now + min(m.hold_ms / 1000, LEASE_S)
            leases = self.store.leases
            leases.brief_until_s = max(leases.brief_until_s, min(until, now + BRIEF_S))
            return until
        return now + LEASE_S

    def release(self, link: Connection, m: p.Release) -> RESULT:
        for number in m.leases:
            self.store.release(link.holder, number)
        return p.Done(m.id)

    def renew(self, link: Connection, m: p.Renew) -> RESULT:
        lease = self.store.leases.reads.get(m.lease)
        if lease is None or lease.holder is not link.holder:
            return p.Failed(m.id, "lease_lost", "the lease has ended")
        self.store.leases.renew(lease, self.store.monotonic() + LEASE_S)
        return p.Done(m.id)

    def prefix(self, link: Connection, m: p.Prefix) -> RESULT:
        length = self._leading(m, NOTHING)
        if length < len(m.keys) and m.timeout_ms > 0 and self.tiering.must_ask:
            return self._prefix_below(link, m)
        return self._pin_prefix(link, m, length, NOTHING) if m.pin_ms > 0 and length else self._found(m, length, NOTHING)

    def _found(self, m: p.Prefix, length: int, known: Known, token: bytes = b"") -> p.PrefixFound:
        sources = rounds.sources(self.store, self.tiering, m.namespaces, m.keys[:length], known) if m.where else b""
        return p.PrefixFound(m.id, length, token, sources)

    def _leading(self, m: p.Prefix, known: Known) -> int:
        """How many leading keys RAM and tiers have, as far as is known."""
        length = len(m.keys)
        for namespace in m.namespaces:
            slots = self.store.find(namespace, m.keys[:length])
            flags = slots != ABSENT
            if self.tiering.tiers and not flags.all():
                missing = np.flatnonzero(~flags).tolist()
                flags[missing] = self.tiering.has([namespace + m.keys[i] for i in missing], known)
            if not flags.all():
                length = int(np.argmin(flags))
        return length

    async def _prefix_below(self, link: Connection, m: p.Prefix) -> p.Answer:
        """The same with tiers that must be asked: block by block, since what lies behind the first gap is of no use."""
        deadline = _deadline(m.timeout_ms)
        known: dict[bytes, tuple[Source, ...]] = {}
        asked, length = 0, self._leading(m, known)
        while asked <= length < len(m.keys) and asyncio.get_running_loop().time() < deadline:
            asked = length + ASK_KEYS
            known.update(await self._ask(m.namespaces, m.keys[length:asked], deadline))
            length = self._leading(m, known)
        return await self._pin_prefix(link, m, length, known) if m.pin_ms > 0 and length else self._found(m, length, known)

    async def _pin_prefix(self, link: Connection, m: p.Prefix, length: int, known: Known) -> p.Answer:
        """Pin what RAM has under a token and start promoting the rest; shorter where there is no room for all of it."""
        seconds = min(m.pin_ms / 1000, LEASE_S)
        found = self._found(m, length, known)
        gathering = Gathering(self.store, self.tiering, m.namespaces, m.keys[:length], known, client=link)
        await gathering.begin(asyncio.get_running_loop().time() + max(PIN_ROOM_S, m.timeout_ms / 1000))
        if not gathering.length:
            gathering.let_go()
            return p.PrefixFound(m.id, 0, b"")
        token = secrets.token_bytes(16)
        self.tokens[token] = gathering
        asyncio.get_running_loop().call_later(seconds, self._end_token, token)
        return p.PrefixFound(m.id, gathering.length, token, found.sources[: gathering.length])

    def _end_token(self, token: bytes) -> None:
        gathering = self.tokens.pop(token, None)
        if gathering is not None:
            gathering.let_go()

    def claim(self, link: Connection, m: p.Claim) -> RESULT:
        gathering = self.tokens.get(m.token)
        if gathering is None or m.namespace not in gathering.parts:
            return p.Failed(m.id, "lease_lost", "the token has ended, or was claimed")
        mine = gathering.split(m.namespace)
        if not gathering.parts:
            del self.tokens[m.token]
        return self._claimed(link, m, mine)

    def unpin(self, link: Connection, m: p.Unpin) -> RESULT:
        gathering = self.tokens.get(m.token)
        if gathering is not None and m.namespace in gathering.parts:
            gathering.split(m.namespace).let_go()
            if not gathering.parts:
                del self.tokens[m.token]
        return p.Done(m.id)

    async def _claimed(self, link: Connection, m: p.Claim, gathering: Gathering) -> p.Answer:
        try:
            await gathering.wait(asyncio.get_running_loop().time() + m.timeout_ms / 1000)
            return self._answer_lease(link, m, m.namespace, gathering.take(m.namespace))
        finally:
            gathering.let_go()

    async def _prefetch_below(self, link: Connection, m: p.Prefetch) -> p.Answer:
        deadline = _deadline(m.timeout_ms)
        known = await self._ask([m.namespace], m.keys, deadline)
        slots = self.store.find(m.namespace, m.keys)
        log_submitted(slots)
        absent = [m.keys[i] for i in np.flatnonzero(slots == ABSENT).tolist()]
        fetch = await self.tiering.fetch(m.namespace, absent, deadline, known=known, client=link, stays=True)
        if fetch is None:
            return p.Count(m.id, 0)
        try:
            await self.tiering.wait(fetch, deadline)
            return p.Count(m.id, len(fetch.slots))
        finally:
            self.tiering.let_go(fetch)

    def prefetch(self, link: Connection, m: p.Prefetch) -> RESULT:
        return self._prefetch_below(link, m) if self.tiering.tiers else p.Count(m.id, 0)

    # ---- removing and asking -----------------------------------------------------------------------------------------

    def delete(self, link: Connection, m: p.Delete) -> RESULT:
        if not m.arena_only:
            self.direct.void(m.namespace, m.keys)
        if m.arena_only or not self.tiering.tiers:
            why = "dropped from the arena by a client" if m.arena_only else "deleted by a client"
            return p.Count(m.id, self.store.delete(m.namespace, m.keys, why=why, pid=link.peer.pid))
        return self._delete_everywhere(m, link.peer.pid)

    async def _delete_everywhere(self, m: p.Delete, pid: int) -> p.Answer:
        keys = list(dict.fromkeys(m.keys))
        identities = [m.namespace + key for key in keys]
        # Only for the count: what is not in RAM is asked for, briefly, before it is gone.
        known = await self._ask([m.namespace], keys, asyncio.get_running_loop().time() + ASK_BEFORE_DELETE_S)
        if self.tiering.clogged:
            return p.Failed(m.id, "busy", CLOGGED)
        held = (self.store.find(m.namespace, keys) != ABSENT) | np.array(self.tiering.has(identities, known), dtype=bool)
        self.store.delete(m.namespace, keys, pid=pid)
        done = await self.tiering.delete(identities)
        return p.Count(m.id, int(held.sum()), done.left, done.why)

    def clear(self, link: Connection, m: p.Clear) -> RESULT:
        if not m.arena_only:
            self.direct.void(m.namespace or None)
        return self._cleared(m)

    async def _cleared(self, m: p.Clear) -> p.Answer:
        return p.Count(m.id, *await rounds.clear(self.store, self.tiering, m.namespace or None, arena_only=m.arena_only))

    async def _flush(self, m: p.Flush) -> p.Answer:
        try:
            async with asyncio.timeout(m.timeout_ms / 1000 if m.timeout_ms > 0 else None):
                return _done(m.id, await self.tiering.flush([m.namespace + key for key in m.keys]))
        except TimeoutError:
            return p.Failed(m.id, "timeout", "values are still on their way to a tier")

    def flush(self, link: Connection, m: p.Flush) -> RESULT:
        return self._flush(m)

    def stats(self, link: Connection, m: p.Stats) -> RESULT:
        return p.Info(m.id, self.info())

    def keys(self, link: Connection, m: p.Keys) -> RESULT:
        return rounds.page(self.store, self.tiering, m)

    def where(self, link: Connection, m: p.Where) -> RESULT:
        return self._where(m)

    async def _where(self, m: p.Where) -> p.Answer:
        return p.Info(m.id, {"places": await rounds.places(self.store, self.tiering, m.namespace, m.keys)})

    def note(self, link: Connection, m: p.Note) -> RESULT:
        identities = [m.namespace + key for key in m.keys]
        self.store.tombstones.note_many(identities, Fate.UNSAVED, place="", why=m.why, pid=link.peer.pid)
        return p.Done(m.id)

    def why(self, link: Connection, m: p.Why) -> RESULT:
        return rounds.why(self.store, self.tiering, m)

    async def _drained(self, m: p.Drain) -> p.Answer:
        assert self.drain is not None
        try:
            async with asyncio.timeout(max(DRAIN_LEAST_S, m.timeout_ms / 1000)):
                return _done(m.id, await self.drain())
        except TimeoutError:
            if (stranded := self.tiering.stranded()) is not None:
                return _done(m.id, stranded)
            return p.Failed(m.id, "timeout", "values are still on their way to a tier; no new writes are taken until a restart")

    def drain_now(self, link: Connection, m: p.Drain) -> RESULT:
        return self._drained(m)

    def ping(self, link: Connection, m: p.Ping) -> RESULT:
        return p.Done(m.id)


async def _observed(work: Awaitable[p.Answer], begun: float, observe: Callable[[float], None]) -> p.Answer:
    """The rest of a request that waits for a tier or for room."""
    answer = await work
    observe(perf_counter() - begun)
    return answer


def _deadline(timeout_ms: int) -> float:
    """Event-loop time at which a client stops waiting."""
    return asyncio.get_running_loop().time() + timeout_ms / 1000


def _done(number: int, flushed: Flushed) -> p.Done:
    return p.Done(number, int(flushed.durability), flushed.left, flushed.why)
