"""Making room by moving values together: they keep their bytes, readers keep theirs, and a mix of sizes fills the arena."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

import numpy as np
import pytest

from kvd.store.arena import Arena
from kvd.store.extents import PAGE
from kvd.store.leases import Holder
from kvd.store.retention import NEVER, Retention
from kvd.store.room import Rooms
from kvd.store.shortage import FOR_PUT, Short
from kvd.store.store import ABSENT, Store

pytestmark = pytest.mark.asyncio
N = b"n" * 32
MIB = 1 << 20


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


class Scene:
    """A store, its rooms, and what was put there: number -> size."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.store = Store(arena)
        self.rooms = Rooms(self.store)
        self.holder = Holder()
        self.sizes: dict[int, int] = {}

    async def put(self, number: int, size: int) -> bool:
        offset = await self.rooms.make(size, asyncio.get_running_loop().time() + 30, FOR_PUT)
        if offset is None:
            return False
        lent = self.store.lend(self.holder, offset, size, 1e18)
        self.stamps(offset, size)[:] = number % 251
        assert self.store.commit(self.holder, N, [(lent.serial, key(number), size)], Retention.LONG, NEVER) == [""]
        self.sizes[number] = size
        return True

    def stamps(self, offset: int, size: int) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
        """One byte of each page of it and its last one: what is written, and looked at, of a value."""
        every = self.arena.bytes[offset : offset + size : PAGE]
        self.arena.bytes[offset + size - 1] = every[0] if size > 1 else self.arena.bytes[offset]
        return every

    def delete(self, number: int) -> None:
        assert self.store.delete(N, [key(number)]) == 1
        del self.sizes[number]

    def slot(self, number: int) -> int:
        return int(self.store.find(N, [key(number)])[0])

    def check(self) -> None:
        """Every value that is there has its own bytes, and its own pages."""
        taken = 0
        for number, size in self.sizes.items():
            slot = self.slot(number)
            if slot == ABSENT:
                continue
            exact, padded = self.store.memory_of(slot)
            assert len(exact) == size
            assert (np.frombuffer(exact, np.uint8)[::PAGE] == number % 251).all(), f"value {number} is not what was put"
            taken += len(padded)
        assert self.arena.used_bytes == taken

    @property
    def held(self) -> set[int]:
        return {number for number in self.sizes if self.slot(number) != ABSENT}


@contextlib.asynccontextmanager
async def scene(size: int, *, evicting: bool = True) -> AsyncIterator[Scene]:
    arena = Arena(size)
    made = Scene(arena)
    made.store.evicting = evicting
    try:
        yield made
    finally:
        made.rooms.close()
        arena.close()


async def riddled(made: Scene, *, values: int = 64, size: int = MIB) -> None:
    """A full arena with every second value deleted."""
    for number in range(values):
        assert await made.put(number, size)
    for number in range(0, values, 2):
        made.delete(number)


def held_copies(made: Scene, monkeypatch: pytest.MonkeyPatch) -> tuple[asyncio.Event, asyncio.Event]:
    """From now on a value being moved waits: (set when a copy begins, to be set when copies may go on)."""
    loop, copying, go_on = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
    copy = made.arena.copy

    def slow(source: int, target: int, length: int) -> None:
        loop.call_soon_threadsafe(copying.set)
        asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(20)
        copy(source, target, length)

    monkeypatch.setattr(made.arena, "copy", slow)
    return copying, go_on


async def test_values_are_moved_together_for_a_large_one() -> None:
    async with scene(64 * MIB, evicting=False) as made:
        await riddled(made)
        assert await made.put(1000, 32 * MIB)
        assert made.store.counts.moves > 0
        assert made.store.counts.evictions == 0
        assert made.held == {*range(1, 64, 2), 1000}
        made.check()
        assert not await made.put(1001, PAGE), "now it is full"


async def test_a_large_value_costs_no_more_than_its_size() -> None:
    """Evicting until it happens to fit would take nearly all: the oldest go, as many bytes of them as it needs."""
    async with scene(64 * MIB) as made:
        for number in range(16384):
            assert await made.put(number, PAGE)
        order = list(range(16384))
        random.Random(1).shuffle(order)
        for number in order:
            made.store.index.touch_one(made.slot(number))
        assert await made.put(99999, 8 * MIB)
        assert made.store.counts.evictions <= 2048 + 256
        gone = {number for number in range(16384) if made.slot(number) == ABSENT}
        assert gone <= set(order[: 2048 + 256])
        made.sizes = {number: PAGE for number in made.sizes if number not in gone} | {99999: 8 * MIB}
        made.check()


async def test_what_a_reader_holds_stays_where_it_is() -> None:
    async with scene(64 * MIB, evicting=False) as made:
        await riddled(made)
        pinned = {number: made.store.index.start_of[made.slot(number)] for number in range(1, 64, 4)}
        slots = np.array([made.slot(number) for number in pinned], dtype=np.int64)
        lease = made.store.pin(made.holder, slots, 1e18)
        assert not await made.put(1000, 32 * MIB), "values that readers hold lie in every way"
        assert await made.put(1001, 3 * MIB)
        assert {number: made.store.index.start_of[made.slot(number)] for number in pinned} == pinned
        made.check()
        made.store.release(made.holder, lease.number)
        made.delete(1001)
        assert await made.put(1000, 32 * MIB)
        made.check()


async def test_a_reader_that_comes_while_a_value_is_copied_keeps_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned in its old place while the copy lasts: the copy does not count, and the old place is not used again."""
    async with scene(16 * MIB, evicting=False) as made:
        await riddled(made, values=16)
        copying, go_on = held_copies(made, monkeypatch)
        putting = asyncio.create_task(made.put(1000, 4 * MIB))
        await copying.wait()
        before = {number: made.store.index.start_of[made.slot(number)] for number in made.held}
        slots = np.array([made.slot(number) for number in before], dtype=np.int64)
        lease = made.store.pin(made.holder, slots, 1e18)
        go_on.set()
        assert not await putting
        assert {number: made.store.index.start_of[made.slot(number)] for number in before} == before
        made.check()
        made.store.release(made.holder, lease.number)
        monkeypatch.undo()
        assert await made.put(1000, 4 * MIB)
        made.check()


async def test_a_value_deleted_while_it_is_copied_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    async with scene(16 * MIB, evicting=False) as made:
        await riddled(made, values=16)
        copying, go_on = held_copies(made, monkeypatch)
        putting = asyncio.create_task(made.put(1000, 4 * MIB))
        await copying.wait()
        for number in list(made.sizes):
            made.delete(number)
        go_on.set()
        assert await putting
        made.check()
        made.delete(1000)
        assert made.arena.used_bytes == 0
        assert await made.put(1, 16 * MIB), "all of it is one piece again"


async def test_a_request_cancelled_while_its_values_are_copied_frees_its_room_when_the_copy_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with scene(16 * MIB, evicting=False) as made:
        await riddled(made, values=16)
        copying, go_on = held_copies(made, monkeypatch)
        putting = asyncio.create_task(made.put(1000, 4 * MIB))
        await copying.wait()
        putting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await putting
        assert made.arena.used_bytes > 8 * MIB, "the copy goes on, and what it writes to is nobody else's"
        go_on.set()
        while made.rooms._plans:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0)
        made.check()
        assert made.arena.used_bytes == 8 * MIB


async def test_an_eviction_of_many_lets_others_in() -> None:
    """A slice at a time: what is ready to run meanwhile runs between the slices."""
    async with scene(64 * MIB) as made:
        for number in range(16384):
            assert await made.put(number, PAGE)
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        beside = asyncio.create_task(other())
        assert await made.put(99999, 16 * MIB)
        beside.cancel()
        assert turns > 3000 // 256


async def test_no_room_that_could_be_made_is_told_from_none() -> None:
    async with scene(16 * MIB) as made:
        await riddled(made, values=16)
        found = made.store.make_room(4 * MIB, FOR_PUT), made.store.short
        assert found == (None, Short.MOVES)
        made.store.pin(made.holder, np.array([made.slot(n) for n in made.held], dtype=np.int64), 1e18)
        found = made.store.make_room(9 * MIB, FOR_PUT), made.store.short
        assert found == (None, Short.FULL)


@pytest.mark.parametrize("gone", [0.1, 0.4])
async def test_nine_tenths_of_two_gib_are_usable_by_any_mix_of_sizes(gone: float) -> None:
    """4 KiB to 128 MiB, every octave as likely, `noop`: each time a value is refused, a part of what is there is deleted."""
    chance = random.Random(f"{gone}")
    async with scene(2 << 30, evicting=False) as made:
        number = 0
        full: list[float] = []
        while len(full) < 12:
            number += 1
            size = int(2 ** chance.uniform(12, 27))
            if await made.put(number, size):
                continue
            full.append(made.arena.used_bytes / made.arena.capacity)
            made.check()
            for victim in chance.sample(sorted(made.sizes), max(1, int(len(made.sizes) * gone))):
                made.delete(victim)
        assert min(full) >= 0.9, full
        assert made.store.counts.moves > 0
