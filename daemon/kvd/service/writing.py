"""Requests that write: extents lent and committed, small values that come in the frame, and the waiting for their room.

A put that fits is answered in the same call. One that needs more room than the store makes in one go becomes a coroutine: it
waits for what the daemon itself does (slices of an eviction, pages being faulted in, values being moved) and, where the
client allows it, for tiers to take what is unwritten. Batches of more than STEP values are worked off in steps, with others
served in between (I5).
"""

import asyncio
from collections.abc import Awaitable

from kvd.service.server import Connection
from kvd.store.leases import Lent as LentExtent
from kvd.store.retention import Retention
from kvd.store.shortage import FOR_PUT, Short, Wanted
from kvd.store.store import Store
from kvd.tiers.tier import Receipt
from kvd.tiers.tiering import Tiering
from kvd.wire import protocol as p

OWN_S = 2.0
"""How long a put may wait for what the daemon itself has to do for its room, whatever else it was told to wait."""
RETENTIONS = tuple(Retention)
STEP = 512
"""Values stored in one go, at most."""

CLOGGED = "a tier that does not work has too many deletes waiting for it"

Result = p.Answer | Awaitable[p.Answer] | None


class Writing:
    """The part of `Operations` that writes. `lease_s`: how long extents are lent."""

    def __init__(self, store: Store, tiering: Tiering, *, lease_s: float) -> None:
        self.store = store
        self.tiering = tiering
        self.lease_s = lease_s

    def reserve(self, link: Connection, m: p.Reserve) -> Result:
        if (refused := self.may_write(link, m)) is not None:
            return refused
        if any(map(self.store.too_large, m.sizes)):
            self.store.counts.reject("too_large")
            return p.Failed(m.id, "too_large", f"a value is larger than the arena ({self.store.arena.capacity} bytes)")
        lent = self.store.reserve(link.holder, m.sizes, self.store.monotonic() + self.lease_s)
        if len(lent) == len(m.sizes) or (lent and m.partial):
            return _lent(m.id, lent)
        if self.store.short is not Short.FULL or (m.timeout_ms > 0 and self._room_may_come()):
            return self._reserve_slowly(link, m, lent)
        return self._no_room(link, m, lent, "no_room")

    def _room_may_come(self) -> bool:
        """Values are on their way to a tier that works, or brief leases are about to end."""
        return self.tiering.pending() or self.store.monotonic() < self.store.leases.brief_until_s + 0.1

    async def _reserve_slowly(self, link: Connection, m: p.Reserve, lent: list[LentExtent]) -> p.Answer:
        """No room at once: do what the daemon itself can do for it, then wait for tiers, up to the client's deadline (I5)."""
        loop, store = asyncio.get_running_loop(), self.store
        begun = loop.time()
        deadline = begun + m.timeout_ms / 1000
        try:
            while len(lent) < len(m.sizes) and not (lent and m.partial):
                size = m.sizes[len(lent)]
                offset = await self.tiering.rooms.make(size, max(deadline, begun + OWN_S), Wanted(FOR_PUT.why, link.peer.pid))
                if offset is not None:
                    lent.append(store.lend(link.holder, offset, size, store.monotonic() + self.lease_s))
                    lent += store.reserve(link.holder, m.sizes[len(lent) :], store.monotonic() + self.lease_s)
                elif not self._room_may_come() or not m.timeout_ms:
                    return self._no_room(link, m, lent, "no_room")
                elif loop.time() >= deadline:
                    return self._no_room(link, m, lent, "busy")
                else:
                    await self.tiering.wait_for_room(min(deadline, loop.time() + 0.05))
                    store.tick()
        except asyncio.CancelledError:
            for extent in lent:
                store.abort(link.holder, extent.serial)
            raise
        return _lent(m.id, lent)

    def _no_room(self, link: Connection, m: p.Reserve, lent: list[LentExtent], code: str) -> p.Answer:
        for extent in lent:
            self.store.abort(link.holder, extent.serial)
        self.store.counts.reject(code)
        why = "the arena is full of values on their way to a tier" if code == "busy" else "the arena is full of pinned values"
        return p.Failed(m.id, code, why)

    def commit(self, link: Connection, m: p.Commit) -> Result:
        if (refused := self.may_write(link, m)) is not None:
            return refused
        if len(m.keys) == 1 and m.wait_ms <= 0 and len(m.ahead) < 2:
            return self._commit_one(link, m)
        receipt = self.tiering.receipt(len(m.keys)) if m.wait_ms > 0 else None
        reasons: list[str] = []
        if len(m.keys) > STEP:
            return self._commit_slowly(link, m, reasons, receipt)
        self._commit_some(link, m, reasons, receipt)
        answer = self._committed(link, m, reasons)
        return answer if receipt is None else self._durable(answer, receipt, m.wait_ms)

    def _commit_one(self, link: Connection, m: p.Commit) -> p.Committed:
        """A single put, in as few steps as it takes."""
        store, holder = self.store, link.holder
        why = store.commit_one(holder, m.namespace, m.serials[0], m.keys[0], m.lengths[0], RETENTIONS[m.retention], m.expires_ns)
        reasons = [why] if why else []
        ahead = store.lend_ahead(holder, m.ahead[0], store.monotonic() + self.lease_s) if m.ahead else None
        if ahead is None:
            return p.Committed(m.id, reasons, 0, [], [])
        return p.Committed(m.id, reasons, 0, [ahead.serial], [ahead.offset])

    def _commit_some(self, link: Connection, m: p.Commit, reasons: list[str], receipt: Receipt | None) -> None:
        """Commit in one go, from where `reasons` ends."""
        begin = len(reasons)
        some = slice(begin, begin + STEP)
        rows = zip(m.serials[some], m.keys[some], m.lengths[some], strict=True)
        if receipt is None:
            reasons += self.store.commit(link.holder, m.namespace, rows, Retention(m.retention), m.expires_ns)
            return
        with self.tiering.noting(receipt):
            reasons += self.store.commit(link.holder, m.namespace, rows, Retention(m.retention), m.expires_ns)
        self.tiering.not_stored(receipt, sum(map(bool, reasons[begin:])))

    def _committed(self, link: Connection, m: p.Commit, reasons: list[str]) -> p.Committed:
        store = self.store
        ahead = store.reserve(link.holder, m.ahead, store.monotonic() + self.lease_s, ahead=True) if m.ahead else []
        return p.Committed(m.id, reasons if any(reasons) else [], 0, [e.serial for e in ahead], [e.offset for e in ahead])

    async def _commit_slowly(self, link: Connection, m: p.Commit, reasons: list[str], receipt: Receipt | None) -> p.Answer:
        while len(reasons) < len(m.keys):
            self._commit_some(link, m, reasons, receipt)
            await asyncio.sleep(0)
        answer = self._committed(link, m, reasons)
        return answer if receipt is None else await self._durable(answer, receipt, m.wait_ms)

    def put_inline(self, link: Connection, m: p.PutInline) -> Result:
        if (refused := self.may_write(link, m)) is not None:
            return refused
        receipt = self.tiering.receipt(len(m.keys)) if m.wait_ms > 0 else None
        reasons: list[str] = []
        if not self._put_some(m, reasons, receipt):
            return self._put_slowly(m, reasons, receipt)
        answer = p.Committed(m.id, reasons if any(reasons) else [], 0, [], [])
        return answer if receipt is None else self._durable(answer, receipt, m.wait_ms)

    def _put_some(self, m: p.PutInline, reasons: list[str], receipt: Receipt | None) -> bool:
        """Put values in one go, from where `reasons` ends; False when some are left: many, or room must be made for the next."""
        retention, begin = Retention(m.retention), len(reasons)
        with self.tiering.noting(receipt):
            for key, value in zip(m.keys[begin : begin + STEP], m.values[begin : begin + STEP], strict=True):
                why = self.store.put_inline(m.namespace, key, value, retention, m.expires_ns)
                if why == "no_room" and self.store.short is not Short.FULL:
                    break
                reasons.append(why)
        self.tiering.not_stored(receipt, sum(map(bool, reasons[begin:])))
        return len(reasons) == len(m.keys)

    async def _put_slowly(self, m: p.PutInline, reasons: list[str], receipt: Receipt | None) -> p.Answer:
        deadline = asyncio.get_running_loop().time() + OWN_S
        while not self._put_some(m, reasons, receipt):
            if len(reasons) % STEP == 0:
                await asyncio.sleep(0)
                continue
            i = len(reasons)
            offset = await self.tiering.rooms.make(len(m.values[i]), deadline, FOR_PUT)
            with self.tiering.noting(receipt):
                why = "no_room" if offset is None else self._put_at(m, i, offset)
            reasons.append(why)
            self.tiering.not_stored(receipt, bool(why))
            if offset is None:
                self.store.refuse(m.namespace, m.keys[i], why)
        answer = p.Committed(m.id, reasons if any(reasons) else [], 0, [], [])
        return answer if receipt is None else await self._durable(answer, receipt, m.wait_ms)

    def _put_at(self, m: p.PutInline, i: int, offset: int) -> str:
        return self.store.put_inline(m.namespace, m.keys[i], m.values[i], Retention(m.retention), m.expires_ns, offset)

    async def _durable(self, answer: p.Committed, receipt: Receipt, wait_ms: int) -> p.Answer:
        await asyncio.wait([receipt.done], timeout=wait_ms / 1000)
        answer.durability = int(receipt.weakest or 0) if receipt.done.done() else 0
        return answer

    def abort(self, link: Connection, m: p.Abort) -> Result:
        for serial in m.serials:
            self.store.abort(link.holder, serial)
        return p.Done(m.id)

    def may_write(self, link: Connection, m: p.Request) -> p.Failed | None:
        """Why this connection may not write (now), or None."""
        if not link.write:
            return p.Failed(m.id, "read_only", "this connection did not ask to write")
        if self.store.draining:
            return p.Failed(m.id, self.store.counts.reject("draining"), "the daemon takes no new writes")
        if self.tiering.tiers and self.tiering.clogged:
            return p.Failed(m.id, self.store.counts.reject("busy"), CLOGGED)
        return None


def _lent(number: int, lent: list[LentExtent]) -> p.Lent:
    return p.Lent(number, [extent.serial for extent in lent], [extent.offset for extent in lent])
