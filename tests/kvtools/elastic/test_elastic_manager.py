"""Blocks over pages: best fit, draining, regrowth, reservations; and a model that any order of calls must agree with."""

import ctypes
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvtools.elastic.manager import KVCacheManager
from kvtools.elastic.pages import PageAllocator
from kvtools.errors import UsageError
from tests.kvtools.elastic.conftest import LAYERS, STRIDE, Real
from tests.kvtools.elastic.test_elastic_pages import Device

Make = Callable[..., Real]


def write(real: Real, block: int, byte: int) -> None:
    """Fill the block in all layers."""
    for plane in real.geometry.planes:
        ctypes.memset(real.memory.address + plane.base + block * plane.stride, byte, plane.stride)


def intact(real: Real, block: int, byte: int) -> bool:
    return all(
        ctypes.string_at(real.memory.address + plane.base + block * plane.stride, plane.stride) == bytes([byte]) * plane.stride
        for plane in real.geometry.planes
    )


def test_blocks_come_with_memory_and_pages_go_with_their_last_block(real: Make) -> None:
    one = real(min_reserved=0, max_reserved=0)
    blocks = one.manager.alloc(20)
    assert blocks is not None
    assert sorted(blocks) == list(range(20))
    for block in blocks:
        write(one, block, block)
    assert all(intact(one, block, block) for block in blocks)
    assert one.memory.resident_bytes == 20 * STRIDE * LAYERS
    assert one.memory.mapped_bytes == 3 * one.geometry.page_bytes
    one.manager.free(blocks[:8])
    assert one.memory.mapped_bytes == 2 * one.geometry.page_bytes
    one.manager.free(blocks[8:])
    assert one.memory.mapped_bytes == one.memory.resident_bytes == 0


def test_the_fullest_page_that_holds_the_run_is_used(real: Make) -> None:
    manager = real(min_reserved=0, max_reserved=0).manager
    first, second, third = (manager.alloc(8) for _ in range(3))
    assert first is not None
    assert second is not None
    assert third is not None
    manager.free(first[:5])
    manager.free(second[:3])
    manager.free(third[:7])
    taken = manager.alloc(3)
    assert taken is not None
    assert {block // 8 for block in taken} == {1}, "page 1 has exactly three"
    taken = manager.alloc(6)
    assert taken is not None
    assert {block // 8 for block in taken} == {2}
    taken = manager.alloc(6)
    assert taken is not None
    assert manager.usage().used_pages == 3, "5 and 1 that are left, without another page"
    assert manager.usage().free_blocks == 0


def test_a_limit_below_use_drains_and_holds_when_todays_blocks_are_gone(real: Make) -> None:
    one = real(min_reserved=2, max_reserved=4)
    manager, page = one.manager, one.geometry.page_bytes
    blocks = manager.alloc(80)
    assert blocks is not None
    random.Random(1).shuffle(blocks)
    manager.free(blocks[:30])
    state = manager.resize(4 * page)
    assert (state.effective_bytes, state.over_pages) == (4 * page, 6)
    assert state.reason == f"{6 * page} B in use above it"
    assert one.allocator.reserved == 0, "the reserve goes first"
    assert len(manager.draining) == 6
    fresh: list[int] = []
    for block in blocks[30:]:
        manager.free([block])
        # As busy as can be: whatever can be had is taken at once. The limit is met all the same.
        while (more := manager.alloc(1)) is not None:
            fresh += more
    assert manager.over_pages == 0
    assert manager.usage().used_pages <= 4
    assert one.memory.mapped_bytes <= 4 * page
    assert not manager.draining
    manager.free(fresh)
    assert manager.resize(10 << 40).reason.startswith("lowered to the reservation")
    assert manager.available_size() == manager.blocks


def test_growing_again_opens_what_was_drained(real: Make) -> None:
    one = real(min_reserved=0, max_reserved=0)
    manager = one.manager
    blocks = manager.alloc(64)
    assert blocks is not None
    manager.free(blocks[::2])
    manager.resize(2 * one.geometry.page_bytes)
    assert manager.available_size() == 8, "two pages stay open, half empty"
    manager.resize(one.geometry.capacity_bytes)
    assert not manager.draining
    assert manager.available_size() == manager.blocks - 32
    assert manager.resize(one.geometry.page_bytes - 1).reason


def test_a_pinned_page_is_never_drained(real: Make) -> None:
    one = real(min_reserved=0, max_reserved=0)
    null = one.manager.alloc(1)
    assert null == [0]
    one.manager.pin(0)
    rest = one.manager.alloc(40)
    assert rest is not None
    one.manager.resize(1)
    assert 0 not in one.manager.draining
    one.manager.free(rest)
    assert one.manager.over_pages == 0
    assert one.manager.limit_state().reason == "one page stays"


def test_reservations(real: Make) -> None:
    manager = real(min_reserved=0, max_reserved=0).manager
    assert manager.try_to_reserve(10)
    assert not manager.try_to_reserve(manager.blocks)
    assert manager.available_size() == manager.blocks
    first = manager.alloc(4)
    assert first is not None
    assert manager.available_size() == manager.blocks - 4
    more = manager.alloc(8)
    assert more is not None
    assert len(set(first + more)) == 12
    manager.try_to_reserve(3)
    manager.free_reserved()
    assert manager.usage().held_blocks == 12
    manager.clear()
    assert manager.usage() == (manager.allocator.pages, manager.allocator.pages, 0, 0, 0, 0, 0)
    assert manager.alloc(manager.blocks) is not None


def test_what_is_not_held_cannot_be_freed(real: Make) -> None:
    manager = real().manager
    blocks = manager.alloc(2)
    assert blocks is not None
    manager.free(blocks)
    for wrong in (blocks[0], 255, -1, 256):
        with pytest.raises(ValueError, match="not in use"):
            manager.free([wrong])
    with pytest.raises(UsageError):
        KVCacheManager(PageAllocator(Device(), 4), 100, 8, 1)


def test_a_device_without_room_is_no_error_and_costs_nothing() -> None:
    device = Device(room=2)
    manager = KVCacheManager(PageAllocator(device, 10, min_reserved=0, max_reserved=0), 80, 8, 8)
    assert manager.alloc(24) is None
    assert device.there == set(), "what came is given back"
    assert manager.usage().used_pages == 0
    blocks = manager.alloc(16)
    assert blocks is not None
    assert manager.alloc(1) is None
    manager.free(blocks[:1])
    assert manager.alloc(1) == blocks[:1]
    manager.secure(100)
    assert manager.certain == 0


def test_a_short_last_page_that_is_not_needed_does_not_stay_open() -> None:
    """Page 2 has one block: taken for the second of two pages it is too little, and with a third one too much."""
    device = Device()
    device.there = {1, 2}
    allocator = PageAllocator(device, 3, min_reserved=0, max_reserved=0, resident=[1, 2])
    manager = KVCacheManager(allocator, 9, 4, 4)
    blocks = manager.alloc(7)
    assert blocks is not None
    assert {block // 4 for block in blocks} == {0, 1}
    assert allocator.used == 2
    manager.resize(4)
    manager.free(blocks)
    assert (manager.over_pages, device.there) == (0, set())
    blocks = manager.alloc(9)
    assert blocks is None, "the limit"
    manager.resize(12)
    blocks = manager.alloc(9)
    assert blocks is not None
    assert allocator.used == 3


class Model(RuleBasedStateMachine):
    """Any order of calls: no block twice, none without memory, the limit obeyed, and every block found again in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.device = Device(room=12)
        self.allocator = PageAllocator(self.device, 12, min_reserved=1, max_reserved=2)
        self.manager = KVCacheManager(self.allocator, 45, 4, 4)
        self.held: list[int] = []

    @rule(count=st.integers(min_value=1, max_value=12))
    def alloc(self, count: int) -> None:
        certain = self.manager.certain
        blocks = self.manager.alloc(count)
        if blocks is None:
            assert count > certain
            return
        assert len(blocks) == len(set(blocks)) == count
        assert not set(blocks) & set(self.held)
        assert not {block // 4 for block in blocks} & self.manager.draining
        self.held += blocks

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        chosen: Any = data.draw(st.sets(st.sampled_from(self.held), max_size=10)) if self.held else set()
        self.manager.free(list(chosen))
        self.held = [block for block in self.held if block not in chosen]

    @rule(pages=st.integers(min_value=0, max_value=14))
    def resize(self, pages: int) -> None:
        before = len(self.device.there)
        self.manager.resize(4 * pages)
        assert len(self.device.there) <= max(before, 1)

    @rule()
    def refill(self) -> None:
        self.allocator.refill()

    @rule()
    def trim(self) -> None:
        self.manager.trim()

    @rule(count=st.integers(min_value=1, max_value=20))
    def secure(self, count: int) -> None:
        self.manager.secure(count, ahead=1)

    @rule(room=st.integers(min_value=0, max_value=12))
    def another_takes_memory(self, room: int) -> None:
        self.device.room = max(room, len(self.device.there))

    @invariant()
    def books_agree(self) -> None:
        usage = self.manager.usage()
        used = {block // 4 for block in self.held}
        assert usage.held_blocks == len(self.held)
        assert usage.used_pages == len(used) == self.allocator.used
        assert used <= self.device.there
        assert usage.used_pages + usage.reserved_pages == len(self.device.there)
        assert usage.used_pages + usage.reserved_pages <= max(usage.target_pages, usage.used_pages)
        assert usage.draining_pages == self.manager.over_pages
        assert self.manager.draining <= used
        assert usage.free_blocks == sum(min(4, 45 - 4 * page) for page in used) - len(self.held)

    def teardown(self) -> None:
        self.manager.free(self.held)
        self.device.room = 12
        self.manager.resize(4 * 12)
        assert self.manager.alloc(45) is not None


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
