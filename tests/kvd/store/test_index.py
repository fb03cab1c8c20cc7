"""The index against plain models: who is found, who goes first, what expires, what a pin keeps."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvd.store.index import ABSENT, FREE, GONE, Index, Namespace
from kvd.store.retention import NEVER, Retention

CLASSES = st.sampled_from([Retention.EPHEMERAL, Retention.SHORT, Retention.LONG])


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "little")


def one(slot: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    return np.array([slot], dtype=np.int64)


class Row:
    """What the model knows of one live value."""

    def __init__(self, slot: int, klass: Retention, expires: int) -> None:
        self.slot = slot
        self.klass = klass
        self.expires = expires
        self.pins = 0
        self.dirty = False


class Model(RuleBasedStateMachine):
    """Two namespaces with equal keys; `order` is least recently used first; time moves by rules."""

    @initialize()
    def begin(self) -> None:
        self.index = Index()
        self.spaces = [self.index.namespace(bytes([n]) * 32) for n in range(2)]
        self.rows: dict[tuple[int, int], Row] = {}
        self.order: list[tuple[int, int]] = []
        self.gone: dict[int, int] = {}  # slot -> pins
        self.now = 1000

    def space(self, number: int) -> Namespace:
        return self.spaces[number]

    def used(self, who: tuple[int, int]) -> None:
        self.order.remove(who)
        self.order.append(who)

    def live(self, row: Row) -> bool:
        return row.expires == NEVER or row.expires > self.now

    @rule(space=st.integers(0, 1), key=st.integers(0, 15), klass=CLASSES, ttl=st.one_of(st.none(), st.integers(1, 50)))
    def put(self, space: int, key: int, klass: Retention, ttl: int | None) -> None:
        who = (space, key)
        if who in self.rows:
            self.hide(who)
        expires = NEVER if ttl is None else self.now + ttl
        slot = self.index.add(self.space(space), key_of(key), 1, 10, klass, expires)
        self.rows[who] = Row(slot, klass, expires)
        self.order.append(who)

    def hide(self, who: tuple[int, int]) -> None:
        row = self.rows.pop(who)
        self.order.remove(who)
        free = self.index.remove(row.slot)
        assert free == (row.pins == 0)
        if free:
            self.index.release(row.slot)
        else:
            self.gone[row.slot] = row.pins

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        self.hide(data.draw(st.sampled_from(sorted(self.rows))))

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), many=st.booleans())
    def touch(self, data: st.DataObject, many: bool) -> None:
        names = st.sampled_from(sorted(self.rows))
        chosen = data.draw(st.lists(names, min_size=1, max_size=8, unique=True)) if many else [data.draw(names)]
        if many:
            self.index.touch(np.array([self.rows[who].slot for who in chosen], dtype=np.int64))
        else:
            self.index.touch_one(self.rows[chosen[0]].slot)
        for who in reversed(chosen):  # the first of a batch counts as the last used
            self.used(who)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        """As a lease does: pinned and used."""
        who = data.draw(st.sampled_from(sorted(self.rows)))
        self.index.pin(one(self.rows[who].slot))
        self.index.touch(one(self.rows[who].slot))
        self.rows[who].pins += 1
        self.used(who)

    @precondition(lambda self: any(row.pins for row in self.rows.values()))
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        """A lease ends: what it pinned was used until now, as far as the order goes from its start."""
        who = data.draw(st.sampled_from(sorted(who for who, row in self.rows.items() if row.pins)))
        assert self.index.unpin(one(self.rows[who].slot)) == []
        self.rows[who].pins -= 1
        self.index.touch_one(self.rows[who].slot)
        self.used(who)

    @precondition(lambda self: self.gone)
    @rule(data=st.data())
    def unpin_gone(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.gone)))
        self.gone[slot] -= 1
        ended = self.index.unpin(one(slot))
        if self.gone[slot]:
            assert ended == []
        else:
            assert ended == [slot]
            del self.gone[slot]
            self.index.release(slot)

    @rule(seconds=st.integers(1, 30))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds

    @rule()
    def expire_one(self) -> None:
        """Whatever has expired first (by expiry) comes first; nothing that has not expired ever comes."""
        slot = self.index.next_expired(self.now)
        due = [(row.expires, who) for who, row in self.rows.items() if not self.live(row)]
        if not due:
            assert slot == ABSENT
            return
        first = min(expires for expires, _ in due)
        found = [who for who, row in self.rows.items() if row.slot == slot]
        assert found
        assert self.rows[found[0]].expires == first
        self.hide(found[0])

    @rule()
    def evict(self) -> None:
        """Exactly the least recently used of the lowest class that is not pinned."""
        ranked = [who for who in self.order if not self.rows[who].pins]
        slot = self.index.victim()
        if not ranked:
            assert slot == ABSENT
            return
        expected = min(ranked, key=lambda who: (self.rows[who].klass, self.order.index(who)))
        assert slot == self.rows[expected].slot
        self.hide(expected)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "rows"):
            return
        index = self.index
        assert index.entries == len(self.rows)
        assert index.gone == len(self.gone)
        for number, space in enumerate(self.spaces):
            keys = [key_of(key) for key in range(16)]
            found = index.find(space, keys, self.now).tolist()
            rows = [self.rows.get((number, key)) for key in range(16)]
            assert found == [row.slot if row and self.live(row) else ABSENT for row in rows]
            assert [index.find_one(space, key, self.now) for key in keys] == found
            assert space.bytes == 10 * sum(who[0] == number for who in self.rows)
        for klass in Retention:
            assert index.live[klass] == sum(row.klass == klass for row in self.rows.values())
        assert all(index.state_of[slot] == GONE for slot in self.gone)


Model.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestIndex = Model.TestCase


def filled(count: int, klass: Retention = Retention.LONG) -> tuple[Index, Namespace]:
    index = Index()
    space = index.namespace(b"n" * 32)
    for i in range(count):
        index.add(space, key_of(i), i, 1, klass, NEVER)
    return index, space


def test_the_order_stays_exact_over_several_batches_of_victims() -> None:
    """A batch of victims is a 32nd of the class: uses between the batches must still count."""
    index, space = filled(10_000)
    rng = np.random.default_rng(5)
    order = list(range(10_000))
    position = {k: k for k in order}
    clock = 10_000
    for step in range(6000):
        if step % 3 == 0:
            key = int(rng.integers(10_000))
            slot = space.slots.get(key_of(key), ABSENT)
            if slot:
                index.touch_one(slot)
                position[key] = clock
                clock += 1
        victim = index.victim()
        key = min(position, key=position.__getitem__) if step % 500 == 0 else None
        found = int.from_bytes(index.keys[victim] or b"", "little")
        if key is not None:
            assert found == key
        del position[found]
        index.remove(victim)
        index.release(victim)


def test_unwritten_values_are_spared_unless_told_otherwise() -> None:
    index, space = filled(100)
    for slot in index.live_slots():
        index.dirty_of[slot] = 1
    assert index.victim() == ABSENT
    assert index.victim() == ABSENT
    oldest = space.slots[key_of(0)]
    assert index.victim(spare_dirty=False) == oldest
    index.dirty_of[space.slots[key_of(7)]] = 0
    index.stir()
    assert index.victim() == space.slots[key_of(7)]


def test_a_class_that_had_nothing_to_take_is_looked_at_again_when_a_pin_ends() -> None:
    index, _ = filled(3)
    slots = np.array(list(index.live_slots()), dtype=np.int64)
    index.pin(slots)
    assert index.victim() == ABSENT
    index.unpin(slots[1:2])
    assert index.victim() == slots[1]


def test_a_slot_twice_in_one_pin_is_unpinned_by_one_unpin() -> None:
    index, space = filled(1)
    slot = space.slots[key_of(0)]
    both = np.array([slot, slot], dtype=np.int64)
    index.pin(both)
    assert not index.remove(slot)
    assert index.unpin(both) == [slot]


def test_a_changed_class_moves_the_value_and_its_expiry() -> None:
    index, space = filled(2)
    first, second = space.slots[key_of(0)], space.slots[key_of(1)]
    index.change(first, Retention.EPHEMERAL, 50)
    assert index.live[Retention.EPHEMERAL] == index.live[Retention.LONG] == 1
    assert index.victim() == first
    assert index.next_expired(49) == ABSENT
    index.change(second, Retention.LONG, 40)
    index.change(second, Retention.LONG, NEVER)
    assert index.next_expired(60) == first
    assert index.next_expired(60) == ABSENT


def test_many_values_grow_the_columns_without_losing_any() -> None:
    index, space = filled(5000)
    keys = [key_of(i) for i in range(5001)]
    slots = index.find(space, keys, 0)
    assert slots[-1] == ABSENT
    assert index.start[slots[:-1]].tolist() == list(range(5000))
    assert index.state_of[ABSENT] == FREE


@pytest.mark.parametrize("rounds", [20_000])
def test_overwriting_a_key_with_a_long_ttl_does_not_pile_up_expiries(rounds: int) -> None:
    """Memory follows what is held, not what was ever put."""
    index = Index()
    space = index.namespace(b"n" * 32)
    for i in range(rounds):
        slot = index.add(space, key_of(0), 1, 1, Retention.LONG, 10**18 + i)
        index.remove(slot)
        index.release(slot)
    assert index._expiries.hints < rounds // 4
