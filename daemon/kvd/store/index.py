"""identity -> where the value lies, and who goes first when room is needed.

A value is a *slot*: a row in a few numpy columns (first page, length, last use, expiry, pins, ...). A namespace is a dict
from its 32-byte keys to slot numbers. Rows instead of objects for two reasons: memory (about 45 bytes a row beside the
key and its dict entry) and batches: a request with a thousand keys is one pass of dict look-ups and then a handful of
vector operations, which is what lets one Python thread answer millions of keys a second. Memoryviews of the same columns
serve single keys, where numpy's scalars would cost more than the work.

Least recently used: every use writes a rising tick into the row, nothing else. When room is needed, the victims of a
class are found a batch at a time: a partial sort picks the oldest 1/32 of it, which then leave in order, each one only if
its tick is still the same (a later use made it younger than everything in the batch). So the order is exactly LRU inside
a class, a use costs one store, and an eviction an amortised few dozen nanoseconds, at any size. Of keys that are used
together the first counts as the last used: they are a prefix, and its end is of no use without its beginning.

With `scan_resistant` the order inside a class is S3-FIFO's instead (see `s3fifo`). Either way *temporary* values go before
all others: copies of what a tier holds, read once. A second read makes such a copy one like any other.

State of a slot: FREE, LIVE (found by its key), GONE (deleted or replaced while pinned: its bytes stay until the last pin
is off). Not thread-safe: the event loop owns it.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import repeat

import numpy as np
import numpy.typing as npt

from kvd.store.accounts import Account, Accounts
from kvd.store.expiry import Expiries
from kvd.store.retention import NEVER, Retention
from kvd.store.reuse import Reuse
from kvd.store.s3fifo import Queues

FREE, LIVE, GONE = 0, 1, 2
ABSENT = 0
"""Slot number of nothing: row 0 is never used."""

Slots = npt.NDArray[np.int64]

_ONE = np.uint32(1)
SAMPLE_STEP = 1000
EMPTY_NAMESPACES = 64
"""Namespaces that hold nothing and are remembered all the same."""
_TRIES = 64  # temporary values looked at for a victim
_VICTIMS = 32  # a batch of victims is this part of its class
_COLUMNS = {
    "start": np.uint32,  # first page in the arena
    "length": np.uint64,
    "tick": np.uint64,
    "expires": np.int64,
    "pins": np.uint32,
    "state": np.uint8,
    "klass": np.uint8,
    "dirty": np.uint16,  # tiers it is still on its way to, a bit each
    "sampled": np.uint8,  # its uses are looked at (see `reuse`)
    "passing": np.uint8,  # temporary: reads until it is one like any other
    "space": np.uint32,  # number of its namespace
}


class Namespace:
    """One namespace's keys. `account` is what `kvd stats` shows for it."""

    __slots__ = ("account", "bytes", "name", "number", "salt", "slots")

    def __init__(self, name: bytes, number: int, account: Account) -> None:
        self.name = name
        self.salt = hash(name)
        self.number = number
        self.account = account
        self.slots: dict[bytes, int] = {}
        self.bytes = 0


class Index:
    """Rows, namespaces and eviction order of one arena."""

    def __init__(self, *, scan_resistant: bool = False) -> None:
        self._rows = 0
        self.queues = Queues(len(Retention), self._blocked) if scan_resistant else None
        self.reuse = Reuse()
        self._temporary: deque[tuple[int, bytes]] = deque()
        self.keys: list[bytes | None] = []
        self._grow(1024)
        self._free: list[int] = []
        self._next = 1
        self._tick = 0
        self.accounts = Accounts()
        self.spaces: dict[bytes, Namespace] = {}
        self.by_number: list[Namespace] = []
        self._numbers: list[int] = []  # of namespaces forgotten
        self._emptied: set[int] = set()
        self.entries = 0
        self.gone = 0
        """Deleted or replaced values that a pin still holds."""
        self.live = [0] * len(Retention)
        self.live_bytes = [0] * len(Retention)
        self._victims: list[deque[tuple[int, int]]] = [deque() for _ in Retention]
        self._barren = [False] * len(Retention)  # nothing to take in that class until something changes
        self._any_barren = False
        self.mortal = 0
        """Live values that have an expiry."""
        self._expiries = Expiries()

    # ---- columns -------------------------------------------------------------------------------------------------

    def _grow(self, rows: int) -> None:
        for name, kind in _COLUMNS.items():
            column = np.zeros(rows, dtype=kind)
            if self._rows:
                column[: self._rows] = getattr(self, name)
            setattr(self, name, column)
            setattr(self, f"{name}_of", column.data)
        if self.queues is not None:
            self.queues.grow(rows)
        self.keys.extend(repeat(None, rows - self._rows))
        self._rows = rows

    start: npt.NDArray[np.uint32]
    length: npt.NDArray[np.uint64]
    tick: npt.NDArray[np.uint64]
    expires: npt.NDArray[np.int64]
    pins: npt.NDArray[np.uint32]
    state: npt.NDArray[np.uint8]
    klass: npt.NDArray[np.uint8]
    dirty: npt.NDArray[np.uint16]
    sampled: npt.NDArray[np.uint8]
    passing: npt.NDArray[np.uint8]
    space: npt.NDArray[np.uint32]
    start_of: "memoryview[int]"
    length_of: "memoryview[int]"
    tick_of: "memoryview[int]"
    expires_of: "memoryview[int]"
    pins_of: "memoryview[int]"
    state_of: "memoryview[int]"
    klass_of: "memoryview[int]"
    dirty_of: "memoryview[int]"
    sampled_of: "memoryview[int]"
    passing_of: "memoryview[int]"
    space_of: "memoryview[int]"

    @property
    def used(self) -> int:
        """Rows that were ever used are below this number."""
        return self._next

    # ---- look-up ---------------------------------------------------------------------------------------------------

    def namespace(self, name: bytes) -> Namespace:
        """The namespace of that name, made when new."""
        found = self.spaces.get(name)
        if found is None:
            number = self._numbers.pop() if self._numbers else len(self.by_number)
            found = self.spaces[name] = Namespace(name, number, self._account(name))
            self.by_number[number : number + 1] = [found]
            self._emptied.add(number)
        return found

    def _account(self, name: bytes) -> Account:
        """Where a new namespace's figures go: one that holds nothing makes way for it."""
        accounts = self.accounts
        if accounts.full:
            empty = (space for number in self._emptied if not (space := self.by_number[number]).slots)
            idle = next((space for space in empty if space.account is not accounts.other), None)
            if idle is not None:
                idle.account = accounts.close(idle.account)
        return accounts.open(name)

    def forget_empty(self) -> None:
        """Let go of namespaces that hold nothing (any more): tenants come and go. A few are kept, for their counters."""
        if len(self._emptied) <= EMPTY_NAMESPACES:
            return
        for number in self._emptied:
            space = self.by_number[number]
            if not space.slots:
                del self.spaces[space.name]
                self.accounts.close(space.account)
                self._numbers.append(number)
        self._emptied.clear()

    def find(self, space: Namespace, keys: Sequence[bytes], now_ns: int) -> Slots:
        """The live, unexpired slot of each key, ABSENT where there is none."""
        slots = np.fromiter(map(space.slots.get, keys, repeat(ABSENT)), dtype=np.int64, count=len(keys))
        if self.mortal:
            expires = self.expires[slots]
            slots[(expires != NEVER) & (expires <= now_ns)] = ABSENT
        return slots

    def find_one(self, space: Namespace, key: bytes, now_ns: int) -> int:
        """`find` for one key."""
        slot = space.slots.get(key, ABSENT)
        if slot and self.mortal:
            expires = self.expires_of[slot]
            if expires != NEVER and expires <= now_ns:
                return ABSENT
        return slot

    def hides(self, namespace: bytes, key: bytes) -> bool:
        """Whether there is a value under this key that look-ups miss: expired, and not swept yet."""
        space = self.spaces.get(namespace) if self.mortal else None
        return space is not None and key in space.slots

    def touch(self, slots: Slots) -> None:
        """These were used now, the first of them last."""
        self.order(slots)
        sampled = self.sampled[slots]
        if 1 in sampled.tobytes():
            for slot in slots[sampled == 1].tolist():
                self.note_use(slot)
        if self.queues is not None:
            self.queues.used(slots)
        if self._temporary:
            passing = self.passing[slots]
            self.passing[slots] = passing - (passing > 0)

    def order(self, slots: Slots) -> None:
        """The same, for the order alone: nobody read them."""
        count = len(slots)
        self._tick += count
        self.tick[slots] = np.arange(self._tick - 1, self._tick - 1 - count, -1, dtype=np.int64)

    def note_use(self, slot: int) -> None:
        """A sampled value was read or put."""
        space = self.by_number[self.space_of[slot]]
        key = self.keys[slot]
        if key is None or not self.reuse.use(hash(key) ^ space.salt, space.account, self.length_of[slot]):
            self.sampled_of[slot] = 0

    def sample_anew(self) -> Iterator[None]:
        """Flag the values of a new sample, in steps."""
        for start in range(1, self._next, SAMPLE_STEP):
            for slot in range(start, min(start + SAMPLE_STEP, self._next)):
                key = self.keys[slot]
                if key is not None:
                    self.sampled_of[slot] = self.reuse.holds(hash(key) ^ self.by_number[self.space_of[slot]].salt)
            yield

    def touch_one(self, slot: int) -> None:
        """`touch` for one slot."""
        self.tick_of[slot] = self._tick
        self._tick += 1
        if self.sampled_of[slot]:
            self.note_use(slot)
        if self.queues is not None:
            self.queues.used_one(slot)
        if self.passing_of[slot]:
            self.passing_of[slot] -= 1

    def make_temporary(self, slot: int) -> None:
        """This one goes before all others (a copy of what a tier holds), unless it is read more than once."""
        key = self.keys[slot]
        assert key is not None
        self.passing_of[slot] = 2
        self._temporary.append((slot, key))
        if len(self._temporary) > 2 * self.entries + 1024:  # most have left, or are temporary no more
            self._temporary = deque(row for row in self._temporary if self.keys[row[0]] is row[1] and self.passing_of[row[0]])

    # ---- changes ---------------------------------------------------------------------------------------------------

    def add(self, space: Namespace, key: bytes, page: int, length: int, klass: int, expires_ns: int) -> int:
        """Make a value visible under its key, which must be free; returns its slot."""
        slot = self._free.pop() if self._free else self._next
        if slot == self._next:
            self._next += 1
            if slot >= self._rows:
                self._grow(self._rows * 2)
        self.start_of[slot] = page
        self.length_of[slot] = length
        self.tick_of[slot] = self._tick
        self.expires_of[slot] = expires_ns
        self.pins_of[slot] = 0
        self.state_of[slot] = LIVE
        self.klass_of[slot] = klass
        self.dirty_of[slot] = 0
        self.passing_of[slot] = 0
        self.sampled_of[slot] = self.reuse.holds(hash(key) ^ space.salt)
        self.space_of[slot] = space.number
        self.keys[slot] = key
        space.slots[key] = slot
        space.bytes += length
        if expires_ns != NEVER:
            self._expire_at(slot, expires_ns)
        self._tick += 1
        self.entries += 1
        self.live[klass] += 1
        if self.queues is not None:
            self.queues.added(slot, klass, key, length)
        self.live_bytes[klass] += length
        self._barren[klass] = False
        return slot

    def change(self, slot: int, klass: int, expires_ns: int) -> None:
        """Give a live value another class and expiry."""
        old = self.klass_of[slot]
        if old != klass:
            if self.queues is not None:
                self.queues.removed(slot, old, self.length_of[slot])
                self.queues.added(slot, klass, self.keys[slot] or b"", self.length_of[slot])
            self.live[old] -= 1
            self.live[klass] += 1
            self.live_bytes[old] -= self.length_of[slot]
            self.live_bytes[klass] += self.length_of[slot]
            self.klass_of[slot] = klass
            self._barren[klass] = False
        self.mortal -= self.expires_of[slot] != NEVER
        self.expires_of[slot] = expires_ns
        if expires_ns != NEVER:
            self._expire_at(slot, expires_ns)

    def _expire_at(self, slot: int, expires_ns: int) -> None:
        self.mortal += 1
        self._expiries.plan(slot, expires_ns)
        if self._expiries.hints > 2 * self.mortal + 1024:
            slots = np.flatnonzero((self.state[: self._next] == LIVE) & (self.expires[: self._next] != NEVER))
            self._expiries.rebuild(zip(slots.tolist(), self.expires[slots].tolist(), strict=True))

    def remove(self, slot: int) -> bool:
        """Hide a live value. True when nothing pins it: the caller frees its pages and calls `release`."""
        space = self.by_number[self.space_of[slot]]
        key = self.keys[slot]
        assert key is not None
        assert self.state_of[slot] == LIVE
        del space.slots[key]
        if not space.slots:
            self._emptied.add(space.number)
        space.bytes -= self.length_of[slot]
        self.keys[slot] = None
        if self.queues is not None:
            self.queues.removed(slot, self.klass_of[slot], self.length_of[slot])
        self.entries -= 1
        self.live[self.klass_of[slot]] -= 1
        self.live_bytes[self.klass_of[slot]] -= self.length_of[slot]
        self.mortal -= self.expires_of[slot] != NEVER
        self.state_of[slot] = GONE
        self.gone += 1
        return self.pins_of[slot] == 0

    def release(self, slot: int) -> None:
        """The pages of a GONE slot are free: so is the slot."""
        self.gone -= 1
        self.state_of[slot] = FREE
        self._free.append(slot)

    def pin(self, slots: Slots) -> None:
        """One more pin on each (one, also on a slot that is in there twice: `unpin` of the same slots takes off as many)."""
        self.pins[slots] += _ONE

    def unpin(self, slots: Slots) -> list[int]:
        """One pin less on each; the GONE ones that nothing pins any more, to be freed by the caller."""
        self.pins[slots] -= _ONE
        self.stir()
        if not self.gone:
            return []
        ended = slots[(self.state[slots] == GONE) & (self.pins[slots] == 0)]
        return [] if not len(ended) else list(dict.fromkeys(ended.tolist()))

    def stir(self) -> None:
        """Something may be evictable that was not."""
        if self._any_barren:
            self._any_barren = False
            self._barren = [False] * len(self._barren)

    # ---- who goes first ----------------------------------------------------------------------------------------------

    def next_expired(self, now_ns: int) -> int:
        """A live slot whose expiry has passed, or ABSENT."""
        return self._expiries.due(now_ns, self._expiry_of) if self.mortal else ABSENT

    def _expiry_of(self, slot: int) -> int:
        return self.expires_of[slot] if self.state_of[slot] == LIVE else NEVER

    def victim(self, *, spare_dirty: bool = True, temporary_only: bool = False) -> int:
        """The slot to evict next, not pinned, or ABSENT: temporary ones, then the lowest class, least recently used in it.

        `spare_dirty` keeps values that are still on their way to a tier.
        """
        if self._temporary:
            slot = self._temporary_victim(spare_dirty)
            if slot:
                return slot
        if temporary_only:
            return ABSENT
        for klass, count in enumerate(self.live):
            if not count:
                continue
            slot = self._victim_of(klass, spare_dirty)
            if slot:
                return slot
        return ABSENT

    def _blocked(self, slot: int, spare_dirty: bool) -> bool:
        return bool(self.pins_of[slot] or (spare_dirty and self.dirty_of[slot]))

    def _temporary_victim(self, spare_dirty: bool) -> int:
        """The oldest temporary value that may go; what may not now is looked at again later."""
        for _ in range(min(len(self._temporary), _TRIES)):
            slot, key = self._temporary.popleft()
            if self.keys[slot] is key and self.passing_of[slot]:
                if not self._blocked(slot, spare_dirty):
                    return slot
                self._temporary.append((slot, key))
        return ABSENT

    def _victim_of(self, klass: int, spare_dirty: bool) -> int:
        if self.queues is not None:
            slot = self.queues.victim(klass, spare_dirty, self.keys.__getitem__, self.length_of)
            if slot:
                return slot
        batch = self._victims[klass]
        for refilled in (False, True):
            while batch:
                slot, tick = batch.popleft()
                if (
                    self.state_of[slot] == LIVE
                    and self.klass_of[slot] == klass
                    and self.tick_of[slot] == tick
                    and not self.pins_of[slot]
                    and not (spare_dirty and self.dirty_of[slot])
                ):
                    return slot
            if refilled or (self._barren[klass] and spare_dirty):
                break
            self._choose(klass, spare_dirty)
        return ABSENT

    def _choose(self, klass: int, spare_dirty: bool) -> None:
        """Fill a class's batch of victims with its oldest part, oldest first."""
        used = slice(0, self._next)
        eligible = (self.state[used] == LIVE) & (self.klass[used] == klass) & (self.pins[used] == 0)
        if spare_dirty:
            eligible &= self.dirty[used] == 0
        slots = np.flatnonzero(eligible)
        if not len(slots):
            self._barren[klass] = spare_dirty
            self._any_barren = True
            return
        ticks = self.tick[slots]
        count = min(len(slots), max(64, len(slots) // _VICTIMS))
        if count < len(slots):
            oldest = np.argpartition(ticks, count - 1)[:count]
            slots, ticks = slots[oldest], ticks[oldest]
        order = np.argsort(ticks, kind="stable")
        self._victims[klass].extend(zip(slots[order].tolist(), ticks[order].tolist(), strict=True))

    # ---- listing -----------------------------------------------------------------------------------------------------

    def live_slots(self, space: Namespace | None = None) -> Iterator[int]:
        """All live slots (of one namespace): a snapshot, safe to change while iterating."""
        if space is not None:
            return iter(list(space.slots.values()))
        return iter(np.flatnonzero(self.state[: self._next] == LIVE).tolist())
