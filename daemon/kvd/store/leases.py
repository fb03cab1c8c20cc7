"""Pins on bytes: read leases, extents lent for writing, and the quarantine.

Read lease: its slots are pinned until it is released, its connection ends or its deadline passes. Numbers are never used
twice (the number is the generation): whoever comes late with an old one finds out. A client need not ask: it counted the
same deadline from before it sent the request, so its clock runs out first.

Extent lent for writing: somebody else's process may be copying into it at any moment. It is reused only after its holder
commits or aborts, or the holder's process is known to be gone. A passed deadline or a lost connection puts it in
quarantine instead: a stalled copy may still be landing there.

This module only keeps the books; `store.Store` acts on what `expire` and `drop` return. Not thread-safe: the event loop.
"""

import heapq
from dataclasses import dataclass, field

from kvd.store.index import Slots

_FEW = 1024
"""Deadlines that may wait without anybody asking whether what they are about has ended."""


class Holder:
    """A connection that holds leases. `process` stands for its process: quarantined extents wait for that to end."""

    __slots__ = ("lent", "lent_pages", "process", "reads")

    def __init__(self, process: object = None) -> None:
        self.process = process
        self.reads: set[int] = set()
        self.lent: dict[int, Lent] = {}  # serial -> extent
        self.lent_pages = 0


@dataclass(slots=True)
class Lent:
    """One extent lent for writing."""

    serial: int
    offset: int
    length: int
    pages: int
    quarantined: bool


@dataclass(slots=True)
class ReadLease:
    """Slots pinned for one holder until released or `deadline_s` (monotonic). One slot is kept as a bare number."""

    number: int
    holder: Holder
    slots: Slots | int
    deadline_s: float


@dataclass
class Dropped:
    """What ended: the caller unpins the read leases' slots and frees the extents."""

    leases: list[ReadLease] = field(default_factory=list)
    extents: list[Lent] = field(default_factory=list)


class Leases:
    """All pins of one store."""

    def __init__(self) -> None:
        self.reads: dict[int, ReadLease] = {}
        self.quarantine: dict[int, tuple[object, Lent]] = {}  # serial -> (process, extent)
        self.quarantine_pages = 0
        self._number = 1
        self._serial = 1
        self._deadlines: list[tuple[float, int]] = []  # heap: (when, number of a read lease)
        self._lent_deadlines: list[tuple[float, int, int, Holder]] = []  # heap: (when, first serial, how many, whose)
        self._many, self._many_lent = _FEW, _FEW
        self.revoked = 0
        self.brief_until_s = 0.0
        """When the last brief lease will have ended: whoever needs room may wait for that."""

    # ---- reading -----------------------------------------------------------------------------------------------------

    def open_read(self, holder: Holder, slots: Slots | int, deadline_s: float) -> ReadLease:
        """A new read lease over slots that the caller has pinned."""
        number = self._number
        self._number += 1
        lease = self.reads[number] = ReadLease(number, holder, slots, deadline_s)
        holder.reads.add(number)
        self._end_at(deadline_s, number)
        return lease

    def close_read(self, number: int, holder: Holder) -> ReadLease | None:
        """End a read lease of `holder`; None when it is no longer (or was never) its own."""
        lease = self.reads.get(number)
        if lease is None or lease.holder is not holder:
            return None
        del self.reads[number]
        holder.reads.discard(number)
        return lease

    def renew(self, lease: ReadLease, deadline_s: float) -> None:
        """Make a read lease last until then."""
        lease.deadline_s = deadline_s
        self._end_at(deadline_s, lease.number)

    def _end_at(self, when_s: float, number: int) -> None:
        """Plan an end. What was closed long before it is swept out now and then: a busy client closes thousands a second."""
        heapq.heappush(self._deadlines, (when_s, number))
        if len(self._deadlines) > self._many:
            self._deadlines = [due for due in self._deadlines if self._still_due(*due)]
            heapq.heapify(self._deadlines)
            self._many = 2 * len(self._deadlines) + _FEW

    def _still_due(self, when_s: float, number: int) -> bool:
        lease = self.reads.get(number)
        return lease is not None and lease.deadline_s == when_s

    # ---- writing -----------------------------------------------------------------------------------------------------

    def lend(self, holder: Holder, extents: list[tuple[int, int, int]], deadline_s: float) -> list[Lent]:
        """These extents (offset, length, pages) are now `holder`'s to write."""
        serial = self._serial
        self._serial += len(extents)
        lent = [Lent(serial + n, offset, length, pages, False) for n, (offset, length, pages) in enumerate(extents)]
        for extent in lent:
            holder.lent[extent.serial] = extent
            holder.lent_pages += extent.pages
        if lent:
            self._lent_until(deadline_s, serial, len(lent), holder)
        return lent

    def lend_one(self, holder: Holder, offset: int, length: int, pages: int, deadline_s: float) -> Lent:
        """`lend` of one extent."""
        serial = self._serial
        self._serial += 1
        lent = holder.lent[serial] = Lent(serial, offset, length, pages, False)
        holder.lent_pages += pages
        self._lent_until(deadline_s, serial, 1, holder)
        return lent

    def _lent_until(self, deadline_s: float, serial: int, count: int, holder: Holder) -> None:
        heapq.heappush(self._lent_deadlines, (deadline_s, serial, count, holder))
        if len(self._lent_deadlines) > self._many_lent:
            self._lent_deadlines = [
                due for due in self._lent_deadlines if any(n in due[3].lent for n in range(due[1], due[1] + due[2]))
            ]
            heapq.heapify(self._lent_deadlines)
            self._many_lent = 2 * len(self._lent_deadlines) + _FEW

    def take_back(self, holder: Holder, serial: int) -> Lent | None:
        """The holder is done with this extent (commit or abort): it is no longer lent, nor in quarantine.

        None when it is not this holder's. `quarantined` tells a commit that it comes too late.
        """
        lent = holder.lent.pop(serial, None)
        if lent is None:
            return None
        holder.lent_pages -= lent.pages
        if lent.quarantined and self.quarantine.pop(serial, None) is not None:
            self.quarantine_pages -= lent.pages
        return lent

    # ---- endings -----------------------------------------------------------------------------------------------------

    def expire(self, now_s: float) -> Dropped:
        """Everything whose deadline has passed: read leases end, lent extents go to quarantine."""
        dropped = Dropped()
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, number = heapq.heappop(self._deadlines)
            lease = self.reads.get(number)
            if lease is not None and lease.deadline_s <= now_s:
                self.close_read(number, lease.holder)
                dropped.leases.append(lease)
                self.revoked += 1
        while self._lent_deadlines and self._lent_deadlines[0][0] <= now_s:
            _, first, count, holder = heapq.heappop(self._lent_deadlines)
            for serial in range(first, first + count):
                if serial in holder.lent:
                    self._isolate(holder, holder.lent[serial])
        return dropped

    def next_deadline(self) -> float | None:
        """Monotonic seconds of the next thing `expire` would end, or None."""
        heads = [heap[0][0] for heap in (self._deadlines, self._lent_deadlines) if heap]
        return min(heads) if heads else None

    def drop(self, holder: Holder) -> Dropped:
        """The connection is gone: its read leases end, its extents go to quarantine until its process is gone."""
        dropped = Dropped([self.reads.pop(number) for number in holder.reads])
        holder.reads.clear()
        for lent in holder.lent.values():
            self._isolate(holder, lent)
        holder.lent.clear()
        holder.lent_pages = 0
        return dropped

    def process_gone(self, process: object) -> Dropped:
        """That process has ended: nobody can still be copying into what its connections had been lent."""
        ended = [serial for serial, (owner, _) in self.quarantine.items() if owner is process]
        dropped = Dropped()
        for serial in ended:
            _, lent = self.quarantine.pop(serial)
            self.quarantine_pages -= lent.pages
            dropped.extents.append(lent)
        return dropped

    def waits_for(self, process: object) -> bool:
        """Whether something in quarantine waits for that process."""
        return any(owner is process for owner, _ in self.quarantine.values())

    def _isolate(self, holder: Holder, lent: Lent) -> None:
        if not lent.quarantined:
            lent.quarantined = True
            self.quarantine[lent.serial] = (holder.process, lent)
            self.quarantine_pages += lent.pages
