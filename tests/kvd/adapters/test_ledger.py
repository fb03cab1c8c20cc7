"""What goes next: the sums are right whatever is done, nothing pinned goes, and S3-FIFO keeps what is used from a scan."""

import random
import threading
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.store.retention import NEVER, Retention
from kvd.store.s3fifo import MAIN, SMALL
from kvd.tiers.adapters.base import Hit
from kvd.tiers.adapters.ledger import LONG, SHORT, STEP, Entry, Ledger

NOW = 1_000


def name(number: int) -> bytes:
    return number.to_bytes(64, "big")


def entry(size: int, retention: Retention = Retention.LONG, expires_ns: int = NEVER) -> Entry:
    return Entry(0, size, Hit(size, retention, expires_ns))


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["add", "touch", "remove", "pin", "unpin", "evict"]),
        st.integers(0, 12),
        st.integers(1, 5),
        st.sampled_from([Retention.SHORT, Retention.LONG]),
        st.sampled_from([NEVER, NOW - 1, NOW + 1]),
    ),
    max_size=80,
)


@pytest.mark.parametrize("scan_resistant", [False, True])
@given(actions=ACTIONS)
def test_sums_and_pins_hold_whatever_is_done(scan_resistant: bool, actions: list[tuple[str, int, int, Retention, int]]) -> None:
    ledger = Ledger(scan_resistant=scan_resistant)
    held: dict[bytes, Entry] = {}
    pinned: dict[bytes, Entry] = {}
    for what, number, size, retention, expires_ns in actions:
        identity = name(number)
        if what == "add":
            made = entry(size, retention, expires_ns)
            assert same(ledger.add(identity, made), held.get(identity), pinned.pop(identity, None))
            held[identity] = made
        elif what == "touch":
            ledger.touch(identity)
        elif what == "remove":
            assert same(ledger.remove(identity), held.pop(identity, None), pinned.pop(identity, None))
        elif what == "evict":
            victim = ledger.victim(NOW)
            free = {one for one in held if one not in pinned}
            assert (victim is None) == (not free)
            if victim is not None:
                assert victim in free
                late = {one for one in free if held[one].hit.expires_ns not in (NEVER, NOW + 1)}
                short = {one for one in free if held[one].hit.retention < Retention.LONG}
                assert victim in (late or short or free)
                ledger.remove(victim)
                del held[victim]
        elif what == "pin" and identity in held:
            pinned[identity] = ledger.pin(identity)
        elif what == "unpin" and identity in pinned:
            last = pinned[identity].pins == 1
            assert ledger.unpin(pinned[identity]) == last
            if last:
                del pinned[identity]
        assert len(ledger) == len(held)
        assert ledger.used == sum(kept.size for kept in held.values())
        assert dict(ledger.items(threading.Lock(), NOW)) == {
            one: kept.hit for one, kept in held.items() if kept.hit.expires_ns in (NEVER, NOW + 1)
        }
        for one in map(name, range(13)):
            assert (one in ledger) == (one in held)
        for klass in (SHORT, LONG):
            for queue in (SMALL, MAIN):
                total = sum(held[ledger._table.name(row)].size for row in ledger._links.oldest_first(klass, queue))
                assert ledger._links._bytes[klass][queue] == total


def same(found: Entry | None, kept: Entry | None, pinned: Entry | None) -> bool:
    """What left is what was held, and one object with what a load has pinned."""
    if found is None or kept is None:
        return found is kept
    return found.gone and found.hit == kept.hit and found.size == kept.size and (pinned is None or found is pinned)


def share_found(*, scan_resistant: bool) -> float:
    """A hundred places; forty prompts that come again and again, and between them long documents that come once."""
    ledger, chance = Ledger(scan_resistant=scan_resistant), random.Random(7)
    found = asked = 0

    def use(number: int) -> bool:
        there = name(number) in ledger
        if there:
            ledger.touch(name(number))
            return True
        while ledger.used >= 100:
            victim = ledger.victim(NOW)
            assert victim is not None
            ledger.remove(victim)
        ledger.add(name(number), entry(1))
        return False

    for turn in range(400):
        for _ in range(20):
            found += use(chance.randrange(40))
            asked += 1
        for number in range(100):
            use(1000 + 100 * turn + number)
    return found / asked


def test_what_is_read_once_does_not_drive_out_what_is_read_often() -> None:
    assert share_found(scan_resistant=False) < 0.5
    assert share_found(scan_resistant=True) > 0.9


@pytest.mark.parametrize("count", [20_000, 131_073])
@pytest.mark.parametrize("scan_resistant", [False, True])
def test_a_value_takes_the_memory_that_a_tier_may_have(scan_resistant: bool, count: int) -> None:
    """At most 192 bytes, also just behind a power of two, where tables have just grown."""
    ledger = Ledger(scan_resistant=scan_resistant)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(count):
            ledger.add(name(number << 300), entry((1 << 20) + number))
        assert tracemalloc.get_traced_memory()[0] - before < 192 * count
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("scan_resistant", [False, True])
def test_what_was_found_goes_in_the_order_of_its_age(scan_resistant: bool) -> None:
    ledger = Ledger(scan_resistant=scan_resistant)
    ages = np.random.default_rng(3).permutation(300)
    for place in range(300):
        ledger.add(name(place), Entry(place, 1, Hit(1, Retention.LONG)))
    ledger.sort(ages)
    went = []
    while (victim := ledger.victim(NOW)) is not None:
        went.append(victim)
        ledger.remove(victim)
    assert went == [name(int(place)) for place in np.argsort(ages)]


@pytest.mark.parametrize("scan_resistant", [False, True])
def test_many_pinned_values_do_not_hide_the_one_that_is_not(scan_resistant: bool) -> None:
    ledger = Ledger(scan_resistant=scan_resistant)
    for number in range(300):
        ledger.add(name(number), entry(1))
        if number != 200:
            ledger.pin(name(number))
    assert ledger.victim(NOW) == name(200)
    ledger.remove(name(200))
    assert ledger.victim(NOW) is None


def test_what_is_listed_may_change_meanwhile() -> None:
    ledger, lock = Ledger(), threading.Lock()
    for number in range(3 * STEP):
        ledger.add(name(number), entry(1))
    listed = ledger.items(lock, NOW)
    found = [next(listed)[0]]
    for number in range(2 * STEP, 3 * STEP):
        ledger.remove(name(number))
    for number in range(9000, 9000 + STEP):  # in the rows of those
        ledger.add(name(number), entry(1))
    found += [identity for identity, _ in listed]
    assert found == [name(number) for number in range(2 * STEP)]
