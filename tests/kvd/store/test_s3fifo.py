"""S3-FIFO in the index: the same victims as a plain implementation of the paper's rules, and what it is for: scans pass by."""

from collections import deque

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvd.store.index import ABSENT, Index
from kvd.store.retention import NEVER, Retention
from kvd.store.s3fifo import GHOST_LEAST, MOVE_AT, SMALL_PART, USES_MAX, Ghost


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "little")


class Plain:
    """One class's queues as lists of numbers, newest last."""

    def __init__(self) -> None:
        self.small: deque[int] = deque()
        self.main: deque[int] = deque()
        self.uses: dict[int, int] = {}
        self.sizes: dict[int, int] = {}
        self.ghost: dict[int, int] = {}
        self.departures = 0

    def add(self, number: int, size: int) -> None:
        self.sizes[number], self.uses[number] = size, 0
        known = self.ghost.get(number)
        if known is not None and self.departures - known <= max(len(self.sizes), GHOST_LEAST // 2):
            del self.ghost[number]
            self.main.append(number)
        else:
            self.small.append(number)

    def remove(self, number: int) -> None:
        (self.small if number in self.small else self.main).remove(number)
        del self.sizes[number], self.uses[number]

    def victim(self, blocked: set[int]) -> int | None:
        while self.sizes:
            small = sum(self.sizes[n] for n in self.small)
            queue = self.small if self.small and (small * SMALL_PART >= sum(self.sizes.values()) or not self.main) else self.main
            number = queue[0]
            assert number not in blocked  # the machine below asks only when nothing is
            if queue is self.small and self.uses[number] >= MOVE_AT:
                queue.popleft()
                self.uses[number] = 0
                self.main.append(number)
            elif queue is self.main and self.uses[number]:
                queue.rotate(-1)
                self.uses[number] -= 1
            else:
                if queue is self.small:
                    self.departures += 1
                    self.ghost[number] = self.departures
                return number
        return None


class Machine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.index = Index(scan_resistant=True)
        self.space = self.index.namespace(bytes(32))
        self.plain = Plain()

    def slot(self, number: int) -> int:
        return self.space.slots[key_of(number)]

    @rule(number=st.integers(0, 60), size=st.integers(0, 50))
    def add(self, number: int, size: int) -> None:
        if number not in self.plain.sizes:
            self.index.add(self.space, key_of(number), 1, size, Retention.LONG, NEVER)
            self.plain.add(number, size)

    @precondition(lambda self: self.plain.sizes)
    @rule(data=st.data())
    def use(self, data: st.DataObject) -> None:
        numbers = data.draw(st.lists(st.sampled_from(sorted(self.plain.sizes)), min_size=1, max_size=5, unique=True))
        if len(numbers) == 1:
            self.index.touch_one(self.slot(numbers[0]))
        else:
            self.index.touch(np.array([self.slot(n) for n in numbers], dtype=np.int64))
        for number in numbers:
            self.plain.uses[number] = min(USES_MAX, self.plain.uses[number] + 1)

    @precondition(lambda self: self.plain.sizes)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        self.drop(data.draw(st.sampled_from(sorted(self.plain.sizes))))

    @rule()
    def evict(self) -> None:
        expected = self.plain.victim(set())
        slot = self.index.victim()
        assert slot == (ABSENT if expected is None else self.slot(expected))
        if expected is not None:
            self.drop(expected)

    def drop(self, number: int) -> None:
        slot = self.slot(number)
        assert self.index.remove(slot)
        self.index.release(slot)
        self.plain.remove(number)

    @invariant()
    def the_sums_agree(self) -> None:
        queues = self.index.queues
        assert queues is not None
        held = queues._bytes[Retention.LONG]
        assert held[1] == sum(self.plain.sizes[n] for n in self.plain.small)
        assert held[2] == sum(self.plain.sizes[n] for n in self.plain.main)


TestS3Fifo = Machine.TestCase
TestS3Fifo.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


def fill(index: Index, numbers: range, capacity: int) -> int:
    """Add these, evicting for room in a cache of so many values; how many were evicted."""
    space = index.namespace(bytes(32))
    gone = 0
    for number in numbers:
        if index.entries >= capacity:
            slot = index.victim()
            index.remove(slot)
            index.release(slot)
            gone += 1
        index.add(space, key_of(number), 1, 4096, Retention.LONG, NEVER)
    return gone


def test_a_scan_passes_by_what_is_used() -> None:
    kept = {}
    for resistant in (False, True):
        index = Index(scan_resistant=resistant)
        space = index.namespace(bytes(32))
        fill(index, range(100), 1000)
        for _ in range(2):
            index.touch(np.array([space.slots[key_of(n)] for n in range(100)], dtype=np.int64))
        fill(index, range(10_000, 14_000), 1000)
        kept[resistant] = sum(key_of(n) in space.slots for n in range(100))
    assert kept == {False: 0, True: 100}


def test_what_comes_back_soon_stays() -> None:
    """Evicted unused from the small queue, put again: now it is in the main queue, and outlives the next scan."""
    index = Index(scan_resistant=True)
    space = index.namespace(bytes(32))
    fill(index, range(1000), 100)
    assert key_of(850) not in space.slots
    fill(index, range(850, 851), 100)
    fill(index, range(2000, 2500), 100)
    assert key_of(850) in space.slots


def test_keys_that_are_no_digests_are_told_apart() -> None:
    """Numbers written big-endian differ in their last bytes only."""
    ghost = Ghost()
    keys = [number.to_bytes(32, "big") for number in range(600)]
    for key in keys[:300]:
        ghost.add(key, 400)
    assert sum(ghost.take(key, 400) for key in keys[300:]) == 0
    assert sum(ghost.take(key, 400) for key in keys[:300]) >= 290
    assert not any(ghost.take(key, 400) for key in keys)


def test_pinned_and_unwritten_values_are_passed_over_and_found_later() -> None:
    index = Index(scan_resistant=True)
    space = index.namespace(bytes(32))
    fill(index, range(500), 1000)
    slots = np.array([space.slots[key_of(n)] for n in range(500)], dtype=np.int64)
    index.pin(slots[:250])
    for slot in slots[250:499].tolist():
        index.dirty_of[slot] = 1
    assert index.victim() == slots[499]  # far behind what may not go
    index.remove(int(slots[499]))
    index.release(int(slots[499]))
    assert index.victim() == ABSENT
    assert index.victim(spare_dirty=False) in slots[250:499]
    index.unpin(slots[:250])
    assert index.victim() in slots[:250]


def test_temporary_values_go_first_until_they_are_read_twice() -> None:
    for resistant in (False, True):
        index = Index(scan_resistant=resistant)
        space = index.namespace(bytes(32))
        fill(index, range(10), 100)
        slots = [space.slots[key_of(n)] for n in range(10)]
        for slot in slots[5:8]:
            index.make_temporary(slot)
        index.touch_one(slots[5])
        index.touch(np.array([slots[6]], dtype=np.int64))
        index.touch(np.array([slots[6], slots[9]], dtype=np.int64))
        order = []
        while slot := index.victim(temporary_only=True):
            order.append(slot)
            index.remove(slot)
            index.release(slot)
        assert order == [slots[5], slots[7]]
        # A row that is used again for another value is not temporary any more.
        index.make_temporary(slots[9])
        index.remove(slots[9])
        index.release(slots[9])
        again = index.add(space, key_of(77), 1, 10, Retention.LONG, NEVER)
        assert again == slots[9]
        assert index.victim(temporary_only=True) == ABSENT


def test_the_list_of_temporary_values_is_bounded() -> None:
    index = Index()
    space = index.namespace(bytes(32))
    for number in range(5000):
        slot = index.add(space, key_of(number), 1, 10, Retention.LONG, NEVER)
        index.make_temporary(slot)
        index.remove(slot)
        index.release(slot)
    assert len(index._temporary) <= 1100
