"""The decisions about what is in RAM: what is stored, found, pinned, evicted and refused. No I/O, no waiting.

A value's way in: `reserve` lends extents, the client fills its own mapping of them, `commit` makes the values visible;
or `put_inline` for small ones that came in a frame. Its way out: `lease` pins what is there, the client reads its
mapping, `release` unpins. A put under a key that exists makes a new value and hides the old one; bytes under a pin never
change. Whoever needs to know of a new value (tiers) or of one that left is told through `Listener`.

Room is made in slices: a call evicts SLICE values at most, and where that is not enough, `short` says what room is waiting
for: another slice, pages that are being faulted in, values that must be moved together (`room.Rooms` does and awaits all
that), or nothing that the daemon could do. Eviction by the policy's order ends when enough pages are free: when they do not
lie together, values are moved, so that one large value costs the arena no more than its own size.

Invariants kept here: I1 (full identity is the only way to a value), I2 (pins, quarantine), I3 for the arena, I6 (pages are
counted as taken). Not thread-safe: the event loop owns it, and no method takes longer than its batch.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvd.store.accounts import Account
from kvd.store.arena import Arena
from kvd.store.extents import PAGE, pages_of
from kvd.store.identity import Identity
from kvd.store.index import ABSENT, GONE, LIVE, Index, Namespace, Slots
from kvd.store.leases import Dropped, Holder, Leases, Lent, ReadLease
from kvd.store.retention import NEVER, Retention, expired
from kvd.store.shortage import AHEAD, FOR_PUT, Short, Wanted
from kvd.store.tombstones import Fate, Tombstones

LEND_AHEAD_PART = 16
"""At most this part of the arena is lent ahead to one connection, and 64 MiB."""
LEND_AHEAD_BYTES = 64 << 20
CLEAR_STEP = 1000
TICK_EVICT_S = 0.002
"""How long a tick evicts for at most."""
SLICE = 256
"""Values evicted in one go, at most: about a millisecond."""
LEND_STEP = 2048
"""Extents lent in one go, at most."""
SMALL_PAGES = 256
"""For values up to this size (1 MiB) as much again is evicted before anything is moved: the next hole is near."""


@dataclass
class Counts:
    """What happened since start."""

    sets: int = 0
    set_bytes: int = 0
    gets: int = 0
    get_bytes: int = 0
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    expirations: int = 0
    deletes: int = 0
    evicted_dirty: int = 0
    evictions_ahead: int = 0
    """Of `evictions`, because of the watermark."""
    released: int = 0
    """Values that left because tiers hold them (store policy skip_l1)."""
    promotions: int = 0
    moves: int = 0
    move_bytes: int = 0
    tick_errors: int = 0
    """Times that periodic work (eviction, expiry, deadlines) has failed."""
    rejections: dict[str, int] = field(default_factory=dict)
    sets_by: list[int] = field(default_factory=lambda: [0] * len(Retention))
    evictions_by: list[int] = field(default_factory=lambda: [0] * len(Retention))
    """Of `sets` and `evictions`, by class."""

    def reject(self, reason: str) -> str:
        self.rejections[reason] = self.rejections.get(reason, 0) + 1
        return reason


@dataclass
class Listener:
    """What the store tells: `stored(slot, replaced)` after a commit, `removed(slot)` before a value is hidden."""

    stored: Callable[[int, bool], None] = lambda slot, replaced: None
    removed: Callable[[int], None] = lambda slot: None


class Store:
    """All values in one arena."""

    def __init__(
        self,
        arena: Arena,
        *,
        clock_ns: Callable[[], int] = time.time_ns,
        monotonic: Callable[[], float] = time.monotonic,
        scan_resistant: bool = False,
    ) -> None:
        self.arena = arena
        self.index = Index(scan_resistant=scan_resistant)
        self.leases = Leases()
        self.tombstones = Tombstones(clock_ns=clock_ns)
        self.counts = Counts()
        self.listener = Listener()
        self.clock_ns = clock_ns
        self.monotonic = monotonic
        self.draining = False
        self.evict_dirty = False
        """Set while a tier's breaker is open: what cannot be written to it may be evicted unwritten (and is counted)."""
        self.evicting = True
        """False for the eviction policy `noop`: a full arena refuses."""
        self.buffering = False
        """The arena is a buffer on the way to tiers: what no tier took makes room also with `noop`."""
        self.watermark: float | None = None
        """Share of the arena above which `tick` evicts `ratio` of the bytes used; None: only on demand."""
        self.ratio = 0.2
        self._surplus = 0  # bytes that `tick` has still to evict
        self._sampling: Iterator[None] = iter(())
        self.short = Short.FULL
        """Why the last attempt to find room found none."""
        self._slice = SLICE

    # ---- writing -----------------------------------------------------------------------------------------------------

    def reserve(self, holder: Holder, sizes: Sequence[int], deadline_s: float, *, ahead: bool = False) -> list[Lent]:
        """Lend extents for the first sizes that get room, in order; the list is shorter where room ran out (see `short`).

        `ahead` lends a bounded reserve for puts to come and evicts nothing that is still on its way to a tier.
        """
        extents: list[tuple[int, int, int]] = []
        bound = min(self.arena.capacity // LEND_AHEAD_PART, LEND_AHEAD_BYTES) // PAGE - holder.lent_pages
        alloc = self.arena.alloc
        self._slice = SLICE
        for size in sizes:
            if len(extents) >= LEND_STEP:
                self.short = Short.SLICE
                break
            pages = size + 4095 >> 12 or 1
            bound -= pages
            if ahead and bound < 0:
                break
            offset = alloc(size)
            if offset is None:
                offset = self._room(size, Wanted(FOR_PUT.why, getattr(holder.process, "pid", 0)))
                if offset is None:
                    break
            extents.append((offset, size, pages))
        return self.leases.lend(holder, extents, deadline_s)

    def lend_ahead(self, holder: Holder, size: int, deadline_s: float) -> Lent | None:
        """`reserve` of one size `ahead`."""
        bound = min(self.arena.capacity // LEND_AHEAD_PART, LEND_AHEAD_BYTES) // PAGE
        pages = size + 4095 >> 12 or 1
        if holder.lent_pages + pages > bound:
            return None
        offset = self.arena.alloc(size)
        if offset is None:
            offset = self.make_room(size, Wanted(FOR_PUT.why, getattr(holder.process, "pid", 0)))
        return None if offset is None else self.leases.lend_one(holder, offset, size, pages, deadline_s)

    def lend(self, holder: Holder, offset: int, size: int, deadline_s: float) -> Lent:
        """Lend room of `make_room`."""
        return self.leases.lend(holder, [(offset, size, pages_of(size))], deadline_s)[0]

    def too_large(self, size: int) -> bool:
        """Whether no eviction could ever make room for a value of this size."""
        return pages_of(size) * PAGE > self.arena.capacity

    def commit(
        self,
        holder: Holder,
        namespace: bytes,
        rows: Iterable[tuple[int, bytes, int]],
        retention: Retention,
        expires_ns: int,
    ) -> list[str]:
        """Make what was written to lent extents visible. `rows`: (serial, key, length) each.

        One '' or reason for refusal a row; a refused row's extent is free.
        """
        space = self.index.namespace(namespace)
        refusal = self.refusal(retention, expires_ns)
        reasons: list[str] = []
        slots: list[int] = []
        for serial, key, length in rows:
            done = self._commit_row(holder, space, serial, key, length, retention, expires_ns, refusal)
            if isinstance(done, int):
                slots.append(done)
                done = ""
            reasons.append(done)
        if len(slots) > 1 and self.index.queues is None:
            # As in a look-up, the first of them counts as the last used: the beginning of a prefix outlives its end.
            self.index.order(np.array(slots, dtype=np.int64))
        return reasons

    def commit_one(
        self, holder: Holder, namespace: bytes, serial: int, key: bytes, length: int, retention: Retention, expires_ns: int
    ) -> str:
        """`commit` of one value: single puts are worth their own path."""
        space = self.index.namespace(namespace)
        refusal = self.refusal(retention, expires_ns)
        done = self._commit_row(holder, space, serial, key, length, retention, expires_ns, refusal)
        return "" if isinstance(done, int) else done

    def _commit_row(
        self,
        holder: Holder,
        space: Namespace,
        serial: int,
        key: bytes,
        length: int,
        retention: Retention,
        expires_ns: int,
        refusal: str,
    ) -> int | str:
        """Its slot, or the reason why it was refused."""
        lent = self.leases.take_back(holder, serial)
        if lent is None:
            return self.counts.reject("lease_lost")
        pages = length + 4095 >> 12 or 1
        why = "lease_lost" if lent.quarantined else "oversize" if pages > lent.pages else refusal
        if why:
            self._free(lent.offset, lent.pages)
            return self.refuse(space.name, key, why)
        if lent.pages > pages:
            self._free(lent.offset + pages * PAGE, lent.pages - pages)
        if length & 4095 or not length:
            self.arena.zero_slack(lent.offset, length)
        return self._insert(space, key, lent.offset, length, retention, expires_ns)

    def put_inline(
        self, namespace: bytes, key: bytes, data: bytes, retention: Retention, expires_ns: int, offset: int | None = None
    ) -> str:
        """Store a small value that came in a frame, in room of `make_room` where that is given; '' or the reason why not.

        A `no_room` that `short` says can be mended is not counted as a refusal: make room, and put again.
        """
        why = self.refusal(retention, expires_ns)
        if not why and self.too_large(len(data)):
            why = "too_large"
        if not why and offset is None:
            offset = self.make_room(len(data), FOR_PUT)
            if offset is None:
                why = "no_room"
                if self.short is not Short.FULL:
                    return why
        if why:
            if offset is not None:
                self.give_back(offset, len(data))
            return self.refuse(namespace, key, why)
        assert offset is not None
        self.arena.fill(offset, data)
        self._insert(self.index.namespace(namespace), key, offset, len(data), retention, expires_ns)
        return ""

    def refuse(self, namespace: bytes, key: bytes, why: str) -> str:
        """Count and note a refused put; answers `why`."""
        self.tombstones.note(namespace + key, Fate.REFUSED, why=why)
        return self.counts.reject(why)

    def refusal(self, retention: Retention, expires_ns: int) -> str:
        """Why a put with these properties is refused whatever its size, or ''."""
        if self.draining:
            return "draining"
        if retention == Retention.NONE:
            return "retention_none"
        return "expired" if expired(expires_ns, self.clock_ns()) else ""

    def abort(self, holder: Holder, serial: int) -> bool:
        """The holder will not write there any more."""
        lent = self.leases.take_back(holder, serial)
        if lent is None:
            return False
        self._free(lent.offset, lent.pages)
        return True

    def admit(
        self,
        namespace: bytes,
        key: bytes,
        offset: int,
        length: int,
        retention: Retention,
        expires_ns: int,
        *,
        temporary: bool = False,
    ) -> int:
        """A value read from a tier into room of `make_room` becomes visible, unless the key has been put meanwhile.

        Returns its slot, or ABSENT (the room is free then). A `temporary` one is the first to go again.
        """
        space = self.index.namespace(namespace)
        if key in space.slots or expired(expires_ns, self.clock_ns()):
            self._free(offset, pages_of(length))
            return space.slots.get(key, ABSENT)
        self.counts.promotions += 1
        slot = self.index.add(space, key, offset // PAGE, length, retention, expires_ns)
        if temporary:
            self.index.make_temporary(slot)
        return slot

    def make_room(self, length: int, wanted: Wanted) -> int | None:
        """Offset of room for a value, or None: then `short` says what would help."""
        self._slice = SLICE
        return self._room(length, wanted)

    def give_back(self, offset: int, length: int) -> None:
        """Room of `make_room` that was not used."""
        self._free(offset, pages_of(length))

    def _insert(self, space: Namespace, key: bytes, offset: int, length: int, retention: Retention, expires_ns: int) -> int:
        old = space.slots.get(key)
        if old is not None:
            self._hide(old)
        slot = self.index.add(space, key, offset // PAGE, length, retention, expires_ns)
        self._count_set(space.account, retention, length)
        if self.index.sampled_of[slot]:
            self.index.note_use(slot)
        self.listener.stored(slot, old is not None)
        return slot

    def _room(self, length: int, wanted: Wanted) -> int | None:
        """Offset of room for `length` bytes, evicting for it where that is allowed, can succeed, and is no more than a slice."""
        offset = self.arena.alloc(length)
        if offset is not None or self.too_large(length):
            self.short = Short.FULL
            return offset
        pages, extents = pages_of(length), self.arena.extents
        if self.arena.grows_for(pages):
            self.short = Short.GROWTH
            return None
        enough = pages + min(pages, SMALL_PAGES) if pages <= SMALL_PAGES else pages
        now = self.clock_ns()
        while extents.ready_pages < enough:
            slot = self._next_to_go(now, wanted) if self._slice else ABSENT
            if not slot:
                self.short = Short.SLICE if not self._slice else Short.MOVES if extents.ready_pages >= pages else Short.FULL
                return None
            self._slice -= 1
            self._hide(slot)
            offset = self.arena.alloc(length)
            if offset is not None:
                return offset
        self.short = Short.MOVES
        return None

    def _next_to_go(self, now_ns: int, wanted: Wanted) -> int:
        """Who leaves next when room is needed, counted and noted already; ABSENT when nobody may."""
        slot = self.index.next_expired(now_ns)
        if slot:
            self.counts.expirations += 1
            self._bury(slot, Fate.EXPIRED)
            return slot
        may = self.evicting or self.buffering
        slot = self.index.victim(temporary_only=not may)
        if not slot and may and self.evict_dirty:
            slot = self.index.victim(spare_dirty=False)
            self.counts.evicted_dirty += bool(slot)
        if slot:
            self._count_eviction(slot)
            self._bury(slot, Fate.EVICTED, *wanted)
        return slot

    def evict_one(self, slot: int, wanted: Wanted) -> None:
        """Evict a value that a plan names."""
        self._count_eviction(slot)
        self._bury(slot, Fate.EVICTED, *wanted)
        self.counts.evicted_dirty += bool(self.index.dirty_of[slot])
        self._hide(slot)

    def let_go(self, slot: int, key: bytes) -> bool:
        """Drop a value that tiers hold now, unless it has left or changed meanwhile; who reads it goes on reading."""
        if self.index.keys[slot] is not key or self.index.dirty_of[slot]:
            return False
        self._hide(slot)
        self.counts.released += 1
        return True

    def _count_eviction(self, slot: int) -> None:
        index = self.index
        self.counts.evictions += 1
        self.counts.evictions_by[index.klass_of[slot]] += 1
        index.by_number[index.space_of[slot]].account.evictions += 1

    def _bury(self, slot: int, fate: Fate, why: str = "", pid: int = 0) -> None:
        """Remember why a live value goes; before it is hidden."""
        self.tombstones.note(self.identity_of(slot), fate, why=why, pid=pid)

    def _hide(self, slot: int) -> None:
        self.listener.removed(slot)
        if self.index.remove(slot):
            self._free_slot(slot)

    def _free_slot(self, slot: int) -> None:
        index = self.index
        self.arena.extents.free(index.start_of[slot], pages_of(index.length_of[slot]))
        index.release(slot)

    def _free(self, offset: int, pages: int) -> None:
        self.arena.extents.free(offset // PAGE, pages)

    # ---- reading -----------------------------------------------------------------------------------------------------

    def find(self, namespace: bytes, keys: Sequence[bytes]) -> Slots:
        """Live slots of these keys, ABSENT where there is none. Counts nothing."""
        space = self.index.spaces.get(namespace)
        if space is None:
            return np.zeros(len(keys), dtype=np.int64)
        return self.index.find(space, keys, self.clock_ns())

    def pin(self, holder: Holder, slots: Slots, deadline_s: float) -> ReadLease:
        """Pin these (non-ABSENT) slots in a new lease; they count as used now."""
        self.index.pin(slots)
        self.index.touch(slots)
        return self.leases.open_read(holder, slots, deadline_s)

    def pin_one(self, holder: Holder, slot: int, deadline_s: float) -> ReadLease:
        """`pin` for one slot."""
        self.index.pins_of[slot] += 1
        self.index.touch_one(slot)
        return self.leases.open_read(holder, slot, deadline_s)

    def release(self, holder: Holder, number: int) -> bool:
        """End a read lease; False when it had ended already (revoked: what was read is void)."""
        lease = self.leases.close_read(number, holder)
        if lease is None:
            return False
        self.unpin(lease.slots)
        return True

    def unpin(self, slots: Slots | int) -> None:
        """Take one pin off each; values deleted meanwhile are freed with their last pin."""
        if isinstance(slots, int):
            index = self.index
            index.pins_of[slots] -= 1
            index.stir()
            if index.gone and index.state_of[slots] == GONE and not index.pins_of[slots]:
                self._free_slot(slots)
            return
        for slot in self.index.unpin(slots):
            self._free_slot(slot)

    def _count_set(self, account: Account, retention: Retention, length: int) -> None:
        counts = self.counts
        counts.sets += 1
        counts.set_bytes += length
        counts.sets_by[retention] += 1
        account.sets += 1
        account.set_bytes += length

    def count_set(self, namespace: bytes, retention: Retention, length: int) -> None:
        """Account for a value that was stored past the arena."""
        space = self.index.spaces.get(namespace)
        self._count_set(self.index.accounts.other if space is None else space.account, retention, length)

    def count(self, namespace: bytes, hits: int, misses: int, size: int) -> None:
        """Account for one look-up that was meant to read."""
        counts = self.counts
        counts.gets += hits + misses
        counts.hits += hits
        counts.misses += misses
        counts.get_bytes += size
        space = self.index.spaces.get(namespace)
        account = self.index.accounts.other if space is None else space.account
        account.hits += hits
        account.misses += misses
        account.get_bytes += size

    # ---- removing ----------------------------------------------------------------------------------------------------

    def delete(self, namespace: bytes, keys: Sequence[bytes], *, why: str = "deleted by a client", pid: int = 0) -> int:
        """Hide these values; pinned bytes stay until unpinned. Returns how many there were."""
        slots = self.find(namespace, keys)
        found = list(dict.fromkeys(slots[slots != ABSENT].tolist()))
        for slot in found:
            self._bury(slot, Fate.DELETED, why, pid)
            self._hide(slot)
        self.counts.deletes += len(found)
        return len(found)

    def clear(self, namespace: bytes | None = None) -> int:
        """Hide every value (of one namespace)."""
        return sum(map(len, self.clearing(namespace)))

    def clearing(self, namespace: bytes | None = None) -> Iterator[list[Identity]]:
        """The same in steps, each with the identities that it hid: what is put in between stays."""
        index = self.index
        spaces = (
            list(index.spaces.values()) if namespace is None else [index.spaces[namespace]] if namespace in index.spaces else []
        )
        for space in spaces:
            rows = list(space.slots.items())
            for start in range(0, len(rows), CLEAR_STEP):
                hidden = []
                for key, slot in rows[start : start + CLEAR_STEP]:
                    if index.keys[slot] is key:  # else it left meanwhile, or was put anew
                        self._bury(slot, Fate.DELETED, "cleared")
                        self._hide(slot)
                        hidden.append(space.name + key)
                self.counts.deletes += len(hidden)
                yield hidden

    def tick(self) -> None:
        """Periodic work: end what is past its deadline, drop what has expired. Bounded a call."""
        self._drop(self.leases.expire(self.monotonic()))
        self.index.forget_empty()
        now = self.clock_ns()
        for _ in range(1000):
            slot = self.index.next_expired(now)
            if not slot:
                break
            self.counts.expirations += 1
            self._bury(slot, Fate.EXPIRED)
            self._hide(slot)
        if self.watermark is not None:
            self._keep_below(self.watermark)
        accounts = self.index.accounts
        if self.index.reuse.tick(self.monotonic(), list(accounts.own.values()), accounts.other):
            self._sampling = self.index.sample_anew()
        next(self._sampling, None)

    def _keep_below(self, watermark: float) -> None:
        """Evict `ratio` of the bytes used once they are above the watermark: a slice of TICK_EVICT_S a call, until it is done.

        What is pinned, or on its way to a tier, is passed over; when nothing else is left, the next time begins anew.
        """
        used = self.arena.used_bytes
        if self._surplus <= 0 and used > self.arena.capacity * watermark:
            self._surplus = int(used * self.ratio)
        end = self.monotonic() + TICK_EVICT_S
        while self._surplus > 0 and self.monotonic() < end:
            slot = self.index.victim()
            if not slot:
                self._surplus = 0
                return
            self._surplus -= pages_of(self.index.length_of[slot]) * PAGE
            self._count_eviction(slot)
            self._bury(slot, Fate.EVICTED, *AHEAD)
            self.counts.evictions_ahead += 1
            self._hide(slot)

    def connection_lost(self, holder: Holder) -> None:
        """Its read leases end; what it had been lent goes to quarantine."""
        self._drop(self.leases.drop(holder))

    def process_gone(self, process: object) -> None:
        """What its connections had left in quarantine is free."""
        self._drop(self.leases.process_gone(process))

    def _drop(self, dropped: Dropped) -> None:
        for lease in dropped.leases:
            self.unpin(lease.slots)
        for lent in dropped.extents:
            self._free(lent.offset, lent.pages)

    # ---- facts about a slot ------------------------------------------------------------------------------------------

    def identity_of(self, slot: int) -> bytes:
        """The 64 bytes a live slot is stored under."""
        key = self.index.keys[slot]
        assert key is not None
        return self.index.by_number[self.index.space_of[slot]].name + key

    def is_live(self, slot: int) -> bool:
        return self.index.state_of[slot] == LIVE

    def memory_of(self, slot: int) -> tuple[memoryview, memoryview]:
        """The daemon's views of a slot's bytes: exact, and padded to its last page."""
        offset, length = self.index.start_of[slot] * PAGE, self.index.length_of[slot]
        return self.arena.slice(offset, length), self.arena.padded(offset, length)


__all__ = ["ABSENT", "GONE", "LIVE", "NEVER", "Counts", "Listener", "Store"]
