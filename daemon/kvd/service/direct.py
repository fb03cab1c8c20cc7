"""Extents of a tier's files, lent to engines and held for them: what GPU-direct asks of the daemon (DESIGN 5.6).

The adapter knows the files (see its lending desk); here are the books: whose loan or lease it is, until when, and what ends
it. The rules are those of the arena's leases. A *lease* on what is held ends with its release, its deadline or its
connection. A *loan* for writing ends with its commit or abort; a passed deadline or a lost connection puts it in
quarantine until the process is known to be gone, because a device's write may still be landing there.

A delete or clear voids the loans of what it names: a value committed afterwards would be back from the dead.

Concurrency: the event loop; the adapter's methods run on the tier's threads. What they return is booked, or given back, also
when the request that asked for it has been cancelled in the meantime.
"""

import asyncio
import heapq
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from kvd.service.server import Connection
from kvd.store.identity import NAMESPACE_BYTES
from kvd.store.retention import Retention
from kvd.store.store import ABSENT, Store
from kvd.tiers.adapters.base import AdapterError, AdapterFull, DirectExtent, Reservation, Stored
from kvd.tiers.tier import Tier
from kvd.tiers.tiering import Tiering
from kvd.wire import protocol as p

log = logging.getLogger("kvd.direct")

T = TypeVar("T")

Root = tuple[str, int, int]

LENT_PART = 4
"""At most this part of a tier is lent for writing at a time: what is lent pushes out what is stored."""


@dataclass(eq=False, slots=True)
class Loan:
    """One extent lent for writing."""

    extent: DirectExtent
    tier: Tier
    link: Connection
    retention: Retention
    quarantined: bool = False
    void: bool = False

    def lost(self) -> bool:
        """Whether a commit comes too late."""
        return self.quarantined or self.void


@dataclass(eq=False, slots=True)
class Lease:
    """Extents held for one reader."""

    tier: Tier
    link: Connection
    extents: list[DirectExtent] = field(default_factory=list)


def _root(path: Path) -> Root:
    """A folder by name, device and inode; by zeros, which no client finds, where it is away (one of a stripe may be)."""
    try:
        status = path.stat()
    except OSError:
        return str(path), 0, 0
    return str(path), status.st_dev, status.st_ino


class DirectDesk:
    """All loans and leases of one daemon. `lease_s`: how long each lasts."""

    def __init__(self, store: Store, tiering: Tiering, *, lease_s: float) -> None:
        self.store = store
        self.tiering = tiering
        self.lease_s = lease_s
        self.loans: dict[int, Loan] = {}
        self.leases: dict[int, Lease] = {}
        self.revoked = 0
        """Leases that ended by their deadline."""
        self._number = 1
        self._deadlines: list[tuple[float, int]] = []  # heap: (when, number of a loan or lease)
        self._roots: list[Root] | None = None

    # ---- state -------------------------------------------------------------------------------------------------------

    def roots(self) -> list[Root]:
        """The folders that extents lie in, for clients to find in their own view of the file system."""
        if self._roots is None:
            tier = self._tier()
            paths = tier.adapter.direct_roots() if tier is not None else []
            self._roots = [_root(path) for path in paths]
        return self._roots

    @property
    def quarantine(self) -> int:
        """Loans whose deadline or connection is gone, and whose borrower may still be writing."""
        return sum(loan.quarantined for loan in self.loans.values())

    def _tier(self) -> Tier | None:
        return next((tier for tier in self.tiering.tiers if tier.adapter.capabilities.direct_extents), None)

    def _where(self, extent: DirectExtent) -> tuple[int, str]:
        """(root, name) of an extent's file."""
        folder = str(extent.file.parent)
        return next(number for number, root in enumerate(self.roots()) if root[0] == folder), extent.file.name

    @property
    def lent_bytes(self) -> int:
        """Bytes lent for writing now."""
        return sum(loan.extent.length for loan in self.loans.values())

    # ---- writing -----------------------------------------------------------------------------------------------------

    async def reserve(self, link: Connection, m: p.DirectReserve) -> p.Answer:
        """Lend room for each value; the reason where there is none."""
        tier = self._tier()
        if tier is None:
            return p.DirectLent(m.id, [(0, 0, "", 0, 0)] * len(m.keys), ["no_tier"] * len(m.keys))
        retention = Retention(m.retention)
        wanted = [
            Reservation(m.namespace + key, length, retention, m.expires_ns) for key, length in zip(m.keys, m.lengths, strict=True)
        ]
        lent: list[DirectExtent | str]
        try:
            if self.lent_bytes + sum(m.lengths) > (tier.adapter.usage().bytes_limit or sum(m.lengths)) // LENT_PART:
                raise AdapterFull("too much is lent already")
            lent = await self._booked(tier.lending(tier.adapter.lend, wanted), lambda late: self._return(tier, late))
        except AdapterFull:
            lent = ["full"] * len(wanted)
        except AdapterError:
            lent = ["io_error"] * len(wanted)
        rows, reasons = [], []
        for one in lent:
            if isinstance(one, str):
                rows.append((0, 0, "", 0, 0))
                reasons.append(one)
                self.store.counts.reject(one)
                continue
            number = self._next()
            self.loans[number] = Loan(one, tier, link, retention)
            rows.append((number, *self._where(one), one.offset, one.generation))
            reasons.append("")
        return p.DirectLent(m.id, rows, reasons)

    async def commit(self, link: Connection, m: p.DirectCommit) -> p.Answer:
        """Make values of loans. `reasons` as in Commit; the durability is the weakest one reached."""
        checksums = m.checksums or [b""] * len(m.serials)
        answers = [await self._commit(link, serial, checksum) for serial, checksum in zip(m.serials, checksums, strict=True)]
        refused = any(not answer.ok for answer in answers)
        weakest = min((int(answer.durability) for answer in answers if answer.ok), default=0)
        return p.Committed(m.id, [answer.reason for answer in answers] if refused else [], weakest, [], [])

    async def _commit(self, link: Connection, serial: int, checksum: bytes) -> Stored:
        loan = self.loans.get(serial)
        if loan is None or loan.link is not link:
            return self._refused("lease_lost")
        del self.loans[serial]
        if loan.lost():
            self._give_back(loan.tier, loan.extent)
            return self._refused("lease_lost")
        tier, extent = loan.tier, loan.extent
        try:
            stored = await self._booked(tier.lending(tier.adapter.fill, extent, checksum), lambda _: None)
        except AdapterFull:
            return self._refused("full")
        except AdapterError:
            self._give_back(tier, extent)
            return self._refused("io_error")
        if loan.lost():
            # Deleted while it became visible: which of the two came first in the tier, nobody can say.
            tier.erase([extent.identity])
            return self._refused("lease_lost")
        if not stored.ok:
            return self._refused(stored.reason)
        self.store.count_set(extent.identity[:NAMESPACE_BYTES], loan.retention, extent.length)
        return stored

    def _refused(self, reason: str) -> Stored:
        self.store.counts.reject(reason)
        return Stored(False, reason)

    def abort(self, link: Connection, m: p.DirectAbort) -> p.Answer:
        """The borrower is done with these, and they are no values."""
        for serial in m.serials:
            loan = self.loans.get(serial)
            if loan is not None and loan.link is link:
                del self.loans[serial]
                self._give_back(loan.tier, loan.extent)
        return p.Done(m.id)

    def void(self, namespace: bytes | None, keys: Iterable[bytes] | None = None) -> None:
        """Forget what is being written under these keys (None: all of the namespace; no namespace: all)."""
        if not self.loans:
            return
        identities = None if keys is None or namespace is None else {namespace + key for key in keys}
        for loan in self.loans.values():
            identity = loan.extent.identity
            named = identity in identities if identities is not None else namespace is None or identity.startswith(namespace)
            loan.void |= named

    # ---- reading -----------------------------------------------------------------------------------------------------

    async def hold(self, link: Connection, m: p.DirectHold) -> p.Answer:
        """Where values lie, under a lease. None: in the arena, which is quicker than any file, or nowhere."""
        tier = self._tier()
        nothing = p.DirectHeld(m.id, 0, [None] * len(m.keys))
        wanted = [i for i, slot in enumerate(self.store.find(m.namespace, m.keys).tolist()) if slot == ABSENT]
        if tier is None or not wanted:
            return nothing
        identities = [m.namespace + m.keys[i] for i in wanted]
        try:
            held = await self._booked(tier.lending(tier.adapter.hold, identities), lambda late: self._return(tier, late))
        except AdapterError:
            return nothing
        lease = Lease(tier, link)
        rows: list[tuple[int, str, int, int, int, bytes] | None] = [None] * len(m.keys)
        for i, extent in zip(wanted, held, strict=True):
            if extent is None or extent.identity in tier.doomed:
                self._return(tier, [extent])
                continue
            lease.extents.append(extent)
            rows[i] = (*self._where(extent), extent.offset, extent.length, extent.generation, extent.checksum)
        if not lease.extents:
            return nothing
        number = self._next()
        self.leases[number] = lease
        self.store.count(m.namespace, len(lease.extents), 0, sum(extent.length for extent in lease.extents))
        return p.DirectHeld(m.id, number, rows)

    def release(self, link: Connection, m: p.DirectRelease) -> p.Answer:
        """The reader is done. A lease that has ended is no error: its reader knows by its own clock."""
        for number in m.leases:
            lease = self.leases.get(number)
            if lease is not None and lease.link is link:
                self._end(number)
        return p.Done(m.id)

    # ---- endings -----------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Periodic: what has passed its deadline."""
        now = self.store.monotonic()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, number = heapq.heappop(self._deadlines)
            if number in self.leases:
                self._end(number)
                self.revoked += 1
            elif number in self.loans:
                self.loans[number].quarantined = True

    def connection_lost(self, link: Connection) -> None:
        """Its leases end; its loans wait for its process to end."""
        for number in [number for number, lease in self.leases.items() if lease.link is link]:
            self._end(number)
        for loan in self.loans.values():
            loan.quarantined |= loan.link is link

    def waits_for(self, process: object) -> bool:
        """Whether a loan in quarantine waits for that process."""
        return any(loan.link.peer is process for loan in self.loans.values())

    def process_gone(self, process: object) -> None:
        """Nobody can still be writing to what its connections had been lent."""
        for number in [number for number, loan in self.loans.items() if loan.link.peer is process]:
            loan = self.loans.pop(number)
            self._give_back(loan.tier, loan.extent)

    def _next(self) -> int:
        number = self._number
        self._number += 1
        heapq.heappush(self._deadlines, (self.store.monotonic() + self.lease_s, number))
        return number

    def _end(self, number: int) -> None:
        lease = self.leases.pop(number)
        self._return(lease.tier, lease.extents)

    def _return(self, tier: Tier, extents: Sequence[DirectExtent | str | None]) -> None:
        for extent in extents:
            if isinstance(extent, DirectExtent):
                self._give_back(tier, extent)

    @staticmethod
    def _give_back(tier: Tier, extent: DirectExtent) -> None:
        try:
            tier.adapter.give_back(extent)
        except (AdapterError, OSError) as error:
            log.warning("tier %s: giving back an extent failed: %s", tier.name, error)

    async def _booked(self, work: Awaitable[T], undo: Callable[[T], None]) -> T:
        """The result of `work`; undone when it comes after the request was cancelled (its connection is gone)."""
        task = asyncio.ensure_future(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(lambda done: undo(done.result()) if not done.cancelled() and done.exception() is None else None)
            raise
