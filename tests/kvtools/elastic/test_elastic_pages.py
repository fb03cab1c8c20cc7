"""The page allocator: watermarks, limits, a device without room, a driver that fails, and the thread that maps ahead."""

import threading
from collections.abc import Sequence

import pytest

from kvtools.elastic.memory import DriverError, OutOfMemory
from kvtools.elastic.pages import PageAllocator, PoolExhausted
from tests.support.processes import wait_until


class Device:
    """A backing with room for so many pages, which may be told to fail."""

    def __init__(self, room: int = 1 << 30) -> None:
        self.room = room
        self.there: set[int] = set()
        self.calls: list[tuple[str, int]] = []
        self.stuck = False
        self.gate = threading.Event()
        self.gate.set()

    def map(self, pages: Sequence[int]) -> None:
        self.gate.wait(10)
        if len(self.there) + len(pages) > self.room:
            raise OutOfMemory("no room")
        assert not self.there & set(pages)
        self.there |= set(pages)
        self.calls.append(("map", len(pages)))

    def unmap(self, pages: Sequence[int]) -> None:
        if self.stuck:
            raise DriverError("it does not")
        assert self.there >= set(pages)
        self.there -= set(pages)
        self.calls.append(("unmap", len(pages)))


def test_the_reserve_is_taken_first_and_the_lowest_page_is_mapped_next() -> None:
    device = Device()
    allocator = PageAllocator(device, 10, min_reserved=2, max_reserved=3)
    assert allocator.refill() == 2
    assert (allocator.reserved, allocator.used, device.there) == (2, 0, {0, 1})
    assert sorted(allocator.take(3)) == [0, 1, 2]
    assert (allocator.reserved, allocator.used, allocator.mapped) == (0, 3, 3)


def test_freed_pages_stay_up_to_the_upper_mark() -> None:
    device = Device()
    allocator = PageAllocator(device, 10, min_reserved=1, max_reserved=3)
    taken = allocator.take(8)
    allocator.give(taken)
    assert (allocator.reserved, allocator.used, device.there) == (3, 0, {0, 1, 2})
    assert allocator.trim() == 3
    assert device.there == set()
    assert (allocator.counts.mapped, allocator.counts.unmapped) == (8, 8)


def test_a_limit_unmaps_the_reserve_and_then_lets_no_page_come() -> None:
    device = Device()
    allocator = PageAllocator(device, 10, min_reserved=4, max_reserved=4)
    allocator.refill()
    taken = allocator.take(2)
    assert allocator.reserved == 2
    allocator.resize(3)
    assert (allocator.reserved, allocator.used) == (1, 2)
    taken += allocator.take(5)
    assert len(taken) == 3, "as many as the limit has"
    with pytest.raises(PoolExhausted, match="all 3 pages"):
        allocator.take(1)
    allocator.resize(1)
    assert allocator.used == 3, "pages in use are their owner's"
    allocator.give(taken[:2])
    assert (allocator.used, allocator.reserved, len(device.there)) == (1, 0, 1)
    allocator.resize(99)
    assert allocator.target == 10
    assert allocator.room == 9
    allocator.resize(0)
    assert allocator.target == 1


def test_a_device_with_less_room_gives_what_it_has() -> None:
    device = Device(room=3)
    allocator = PageAllocator(device, 10, min_reserved=0, max_reserved=0)
    assert sorted(allocator.take(5)) == [0, 1, 2]
    with pytest.raises(OutOfMemory):
        allocator.take(1)
    assert allocator.counts.map_failures == 3
    device.room = 5
    assert sorted(allocator.take(5)) == [3, 4]


def test_mapping_ahead_rests_after_the_device_had_no_room() -> None:
    device = Device(room=0)
    allocator = PageAllocator(device, 10, min_reserved=2)
    assert allocator.short == 2
    assert allocator.refill() == 0
    assert allocator.short == 0, "not at once again"
    device.room = 9
    wait_until(lambda: allocator.short == 2, what="the end of the rest")
    assert allocator.refill() == 2
    allocator.secure(6, ahead=1)
    assert allocator.reserved == 7
    device.room = 8
    allocator.secure(10)
    assert allocator.reserved == 8, "as far as it goes, and no error"


def test_a_driver_that_does_not_unmap_loses_no_page() -> None:
    device = Device()
    allocator = PageAllocator(device, 4, min_reserved=0, max_reserved=0)
    taken = allocator.take(4)
    device.stuck = True
    allocator.give(taken)
    assert (allocator.reserved, allocator.used, allocator.counts.unmap_failures) == (4, 0, 1)
    device.stuck = False
    assert allocator.trim() == 4
    assert (allocator.mapped, device.there) == (0, set())


def test_a_thread_maps_ahead() -> None:
    device = Device()
    allocator = PageAllocator(device, 20, min_reserved=3, max_reserved=5, prealloc=True)
    try:
        wait_until(lambda: allocator.reserved == 3, what="the first reserve")
        allocator.take(2)
        wait_until(lambda: len(allocator.ready) == 3, what="the next one")
        assert len(device.there) == 5
    finally:
        allocator.close()


def test_whoever_needs_the_page_that_is_being_mapped_ahead_waits_for_it() -> None:
    device = Device()
    allocator = PageAllocator(device, 1, min_reserved=1, max_reserved=1)
    device.gate.clear()
    filler = threading.Thread(target=allocator.refill)
    filler.start()
    wait_until(lambda: allocator.reserved == 1, what="the page to be in flight")
    found: list[list[int]] = []
    taker = threading.Thread(target=lambda: found.append(allocator.take(1)))
    taker.start()
    device.gate.set()
    taker.join(10)
    filler.join(10)
    assert found == [[0]]
    assert (allocator.used, allocator.reserved) == (1, 0)


def test_a_limit_that_falls_while_pages_are_mapped_ahead_holds() -> None:
    device = Device()
    allocator = PageAllocator(device, 10, min_reserved=6, max_reserved=6)
    device.gate.clear()
    filler = threading.Thread(target=allocator.refill)
    filler.start()
    wait_until(lambda: allocator.reserved == 6, what="pages in flight")
    allocator.resize(2)
    device.gate.set()
    filler.join(10)
    assert len(device.there) == allocator.reserved == 2


def test_what_keeps_pages_away_is_said_once_and_room_of_ones_own_ends_the_rest(caplog: pytest.LogCaptureFixture) -> None:
    device = Device(room=3)
    allocator = PageAllocator(device, 10, min_reserved=1, max_reserved=0)
    taken = allocator.take(3)
    for _ in range(100):  # an engine asks at every step
        allocator.secure(2)
        allocator.refill()
    assert caplog.text.count("kvtools: no page more: no room (requests wait until there is room)") == 1
    assert allocator.counts.map_failures < 10, "nor is the device asked each time"
    allocator.give(taken[:2])
    assert len(device.there) == 2
    allocator.secure(2)
    assert len(device.there) == 3, "what was given back is there at once"
