"""The whole store against a dict: no sequence of puts, reads, pins, deletes, evictions and clock steps gives wrong bytes."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvd.store.arena import Arena
from kvd.store.extents import PAGE, pages_of
from kvd.store.leases import Holder, Lent, ReadLease
from kvd.store.retention import NEVER, Retention
from kvd.store.store import ABSENT, Store

SPACES = [b"a" * 32, b"b" * 32]
KEYS = [bytes([n]) * 32 for n in range(8)]
PAGES = 24
LEASE_S = 30.0

Who = tuple[int, int]


class Clocks:
    """Both clocks of a store, moved by hand."""

    def __init__(self) -> None:
        self.s = 100.0

    def monotonic(self) -> float:
        return self.s

    def ns(self) -> int:
        return int(self.s * 1e9)


class Model(RuleBasedStateMachine):
    """`values` is what must be there unless it was evicted; what was evicted may be absent, and never wrong."""

    @initialize(evicting=st.booleans())
    def begin(self, evicting: bool) -> None:
        self.clocks = Clocks()
        self.arena = Arena(PAGES * PAGE)
        self.store = Store(self.arena, clock_ns=self.clocks.ns, monotonic=self.clocks.monotonic)
        self.store.evicting = evicting
        self.removed: list[tuple[int, int]] = []
        self.store.listener.removed = self.on_removed
        self.values: dict[Who, tuple[bytes, int]] = {}
        self.holders = [Holder(object()) for _ in range(3)]
        self.leases: list[tuple[Holder, ReadLease, list[tuple[int, bytes]]]] = []
        self.lent: list[tuple[Holder, Lent, bytes]] = []
        self.content = 0

    def on_removed(self, slot: int) -> None:
        identity = self.store.identity_of(slot)
        self.values.pop((SPACES.index(identity[:32]), KEYS.index(identity[32:])), None)

    def fresh(self, length: int) -> bytes:
        self.content += 1
        return (self.content.to_bytes(4, "little") * (length // 4 + 1))[:length]

    def teardown(self) -> None:
        if hasattr(self, "arena"):
            self.arena.close()

    # ---- writing -----------------------------------------------------------------------------------------------------

    @rule(
        space=st.integers(0, 1),
        key=st.integers(0, 7),
        length=st.one_of(st.integers(0, 64), st.integers(0, 5 * PAGE)),
        retention=st.sampled_from(list(Retention)),
        ttl=st.one_of(st.none(), st.integers(-1, 40)),
    )
    def put_inline(self, space: int, key: int, length: int, retention: Retention, ttl: int | None) -> None:
        data = self.fresh(length)
        expires = NEVER if ttl is None else self.clocks.ns() + ttl * 10**9
        why = self.store.put_inline(SPACES[space], KEYS[key], data, retention, expires)
        if retention is Retention.NONE:
            assert why == "retention_none"
        elif ttl is not None and ttl <= 0:
            assert why == "expired"
        else:
            assert why in ("", "no_room")
        if not why:
            self.values[space, key] = (data, expires)

    @rule(who=st.integers(0, 2), sizes=st.lists(st.integers(0, 6 * PAGE), min_size=1, max_size=3))
    def reserve(self, who: int, sizes: list[int]) -> None:
        holder = self.holders[who]
        lent = self.store.reserve(holder, sizes, self.clocks.s + LEASE_S)
        for extent in lent:
            data = self.fresh(extent.length)
            self.arena.slice(extent.offset, extent.length)[:] = data
            self.lent.append((holder, extent, data))

    @precondition(lambda self: self.lent)
    @rule(data=st.data(), space=st.integers(0, 1), key=st.integers(0, 7), shorter=st.booleans())
    def commit(self, data: st.DataObject, space: int, key: int, shorter: bool) -> None:
        at = data.draw(st.integers(0, len(self.lent) - 1))
        holder, extent, content = self.lent.pop(at)
        if shorter:
            content = content[: len(content) // 2]
        late = extent.quarantined
        rows = [(extent.serial, KEYS[key], len(content))]
        (why,) = self.store.commit(holder, SPACES[space], rows, Retention.LONG, NEVER)
        assert why == ("lease_lost" if late else "")
        if not why:
            self.values[space, key] = (content, NEVER)

    @precondition(lambda self: self.lent)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        holder, extent, _ = self.lent.pop(data.draw(st.integers(0, len(self.lent) - 1)))
        assert self.store.abort(holder, extent.serial)
        assert not self.store.abort(holder, extent.serial)

    # ---- reading -----------------------------------------------------------------------------------------------------

    @rule(who=st.integers(0, 2), space=st.integers(0, 1), keys=st.lists(st.integers(0, 7), min_size=1, max_size=5))
    def lease(self, who: int, space: int, keys: list[int]) -> None:
        slots = self.store.find(SPACES[space], [KEYS[key] for key in keys])
        seen = []
        for slot, key in zip(slots.tolist(), keys, strict=True):
            expected = self.values.get((space, key))
            if expected is None or (expected[1] != NEVER and expected[1] <= self.clocks.ns()):
                assert slot == ABSENT
                continue
            assert slot != ABSENT
            assert bytes(self.store.memory_of(slot)[0]) == expected[0]
            seen.append((slot, expected[0]))
        found = slots[slots != ABSENT]
        if len(found):
            lease = self.store.pin(self.holders[who], found, self.clocks.s + LEASE_S)
            self.leases.append((self.holders[who], lease, seen))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        holder, lease, seen = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        self.unchanged(seen)
        assert self.store.release(holder, lease.number)
        assert not self.store.release(holder, lease.number)

    def unchanged(self, seen: list[tuple[int, bytes]]) -> None:
        for slot, content in seen:
            assert bytes(self.store.memory_of(slot)[0]) == content

    # ---- removing, time, and clients that go -----------------------------------------------------------------------------

    @rule(space=st.integers(0, 1), keys=st.lists(st.integers(0, 7), max_size=4))
    def delete(self, space: int, keys: list[int]) -> None:
        now = self.clocks.ns()
        there = {k for k in keys if (v := self.values.get((space, k))) and (v[1] == NEVER or v[1] > now)}
        assert self.store.delete(SPACES[space], [KEYS[key] for key in keys]) == len(there)
        assert not there & {key for at, key in self.values if at == space}

    @rule(space=st.one_of(st.none(), st.integers(0, 1)))
    def clear(self, space: int | None) -> None:
        count = sum(space is None or who[0] == space for who in self.values)
        assert self.store.clear(None if space is None else SPACES[space]) == count
        assert not any(space is None or who[0] == space for who in self.values)

    @rule(seconds=st.integers(1, 25))
    def time_passes(self, seconds: int) -> None:
        """Deadlines end leases: what they pinned may go, and a writer that comes late is told so."""
        self.clocks.s += seconds
        self.store.tick()
        ended = [entry for entry in self.leases if entry[1].deadline_s <= self.clocks.s]
        for holder, lease, _ in ended:
            assert not self.store.release(holder, lease.number)
        self.leases = [entry for entry in self.leases if entry not in ended]
        for (space, key), (_, expires) in list(self.values.items()):
            assert expires == NEVER or expires > self.clocks.ns(), (space, key)

    @rule(who=st.integers(0, 2), process_too=st.booleans())
    def connection_lost(self, who: int, process_too: bool) -> None:
        holder = self.holders[who]
        for _, _, seen in [entry for entry in self.leases if entry[0] is holder]:
            self.unchanged(seen)
        left = sum(pages_of(extent.length) for owner, extent, _ in self.lent if owner is holder)
        before = self.store.leases.quarantine_pages
        late = sum(pages_of(e.length) for owner, e, _ in self.lent if owner is holder and e.quarantined)
        self.store.connection_lost(holder)
        assert self.store.leases.quarantine_pages == before + left - late
        if process_too:
            self.store.process_gone(holder.process)
            self.leases = [entry for entry in self.leases if entry[0] is not holder]
            self.lent = [entry for entry in self.lent if entry[0] is not holder]
            self.holders[who] = Holder(object())
        else:
            # Its process may be copying still: nothing may be given out until it is known to be gone.
            kept = [extent for owner, extent, _ in self.lent if owner is holder]
            taken = self.store.reserve(Holder(object()), [PAGE] * PAGES, self.clocks.s + LEASE_S)
            lent = {extent.offset // PAGE for extent in taken}
            for extent in kept:
                first = extent.offset // PAGE
                assert not lent & set(range(first, first + pages_of(extent.length)))
            for extent in taken:
                self.store._free(extent.offset, extent.pages)
            self.store.leases._lent_deadlines.clear()
            self.leases = [entry for entry in self.leases if entry[0] is not holder]
            self.lent = [entry for entry in self.lent if entry[0] is not holder]
            self.store.process_gone(holder.process)
            self.holders[who] = Holder(object())

    # ---- what holds always -----------------------------------------------------------------------------------------------

    @invariant()
    def pages_add_up(self) -> None:
        if not hasattr(self, "store"):
            return
        index = self.store.index
        taken = sum(pages_of(int(index.length_of[slot])) for slot in range(1, index._next) if index.state_of[slot])
        lent = sum(extent.pages for _, extent, _ in self.lent)
        assert self.arena.used_bytes == (taken + lent) * PAGE

    @invariant()
    def pinned_bytes_do_not_change(self) -> None:
        for _, _, seen in getattr(self, "leases", []):
            self.unchanged(seen)

    @invariant()
    def slack_is_zero(self) -> None:
        """What lies between a value's end and its page's end goes to disk with it: it must not be another's bytes."""
        if not hasattr(self, "store"):
            return
        for slot in self.store.index.live_slots():
            exact, padded = self.store.memory_of(slot)
            assert not any(padded[len(exact) :])

    @invariant()
    def every_value_is_where_it_was_put(self) -> None:
        if not hasattr(self, "values"):
            return
        for (space, key), (content, expires) in self.values.items():
            slot = int(self.store.find(SPACES[space], [KEYS[key]])[0])
            if expires == NEVER or expires > self.clocks.ns():
                assert bytes(self.store.memory_of(slot)[0]) == content
            else:
                assert slot == ABSENT


Model.TestCase.settings = settings(max_examples=40, stateful_step_count=35, deadline=None)
TestStore = Model.TestCase
