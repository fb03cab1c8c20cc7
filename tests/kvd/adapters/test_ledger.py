"""What goes next: the sums are right whatever is done, nothing pinned goes, and S3-FIFO keeps what is used from a scan."""

import random
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.store.retention import NEVER, Retention
from kvd.tiers.adapters.base import Hit
from kvd.tiers.adapters.ledger import Entry, Ledger

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
    for what, number, size, retention, expires_ns in actions:
        identity = name(number)
        if what == "add":
            made = entry(size, retention, expires_ns)
            assert ledger.add(identity, made) is held.get(identity)
            held[identity] = made
        elif what == "touch":
            ledger.touch(identity)
        elif what == "remove":
            assert ledger.remove(identity) is held.pop(identity, None)
        elif what == "evict":
            victim = ledger.victim(NOW)
            free = {one for one, kept in held.items() if not kept.pins}
            assert (victim is None) == (not free)
            if victim is not None:
                assert victim in free
                late = {one for one in free if held[one].hit.expires_ns not in (NEVER, NOW + 1)}
                short = {one for one in free if held[one].hit.retention < Retention.LONG}
                assert victim in (late or short or free)
                ledger.remove(victim)
                del held[victim]
        elif identity in held:
            held[identity].pins = what == "pin"
        assert len(ledger) == len(held)
        assert ledger.used == sum(kept.size for kept in held.values())
        for group in ledger._classes:
            for queue, total in zip(group.queues, group.sizes, strict=True):
                assert total == sum(held[one].size for one in queue)


def share_found(*, scan_resistant: bool) -> float:
    """A hundred places; forty prompts that come again and again, and between them long documents that come once."""
    ledger, chance = Ledger(scan_resistant=scan_resistant), random.Random(7)
    found = asked = 0

    def use(number: int) -> bool:
        there = ledger.get(name(number), NOW) is not None
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


@pytest.mark.parametrize("scan_resistant", [False, True])
def test_a_value_takes_the_memory_that_the_documentation_says(scan_resistant: bool) -> None:
    """daemon/ADAPTERS.md: about 500 bytes. A terabyte in values of 1 MiB is half a gigabyte of index: not to grow unnoticed."""
    ledger, count = Ledger(scan_resistant=scan_resistant), 20_000
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(count):
            ledger.add(name(number << 300), entry((1 << 20) + number))
        assert tracemalloc.get_traced_memory()[0] - before < 550 * count
    finally:
        tracemalloc.stop()
