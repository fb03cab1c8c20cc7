"""Ranks in step: several workers' real memory behind one page allocator, and one of them that has no room or fails."""

from collections.abc import Iterator
from typing import Any

import pytest

from kvtools.elastic.geometry import PageMemory
from kvtools.elastic.manager import KVCacheManager
from kvtools.elastic.memory import DriverError, OutOfMemory, VirtualMemory, open_memory
from kvtools.elastic.pages import PageAllocator
from kvtools.elastic.vllm_engine import WorkerBacking
from kvtools.elastic.vllm_worker import WorkerMemory, _elastic
from tests.kvtools.elastic.conftest import BLOCKS, LAYERS, STRIDE, small_geometry

SIZE = LAYERS * STRIDE * BLOCKS


class Worker:
    """What the plug-in makes of a worker."""

    def __init__(self) -> None:
        self.memory = open_memory("cpu", SIZE)
        self._kvtools_memory = WorkerMemory(PageMemory(self.memory, small_geometry(self.memory.granularity)))

    @property
    def resident(self) -> set[int]:
        return self._kvtools_memory.pages.resident


class Ranks:
    """Two workers, and the engine core's allocator and manager over both."""

    def __init__(self) -> None:
        self.workers = [Worker(), Worker()]
        self.backing = WorkerBacking(self.rpc)
        shape = self.backing.ask("describe")[0]
        pages = -(-shape["blocks"] // shape["blocks_per_page"])
        self.allocator = PageAllocator(self.backing, pages, min_reserved=0, max_reserved=0, resident=[0])
        self.manager = KVCacheManager(self.allocator, shape["blocks"], shape["blocks_per_page"], shape["page_bytes"])

    def rpc(self, name: str, args: tuple[Any, ...]) -> list[Any]:
        """As an executor's collective_rpc: every rank is called, and answers."""
        assert name == "kvtools_elastic"
        return [_elastic(worker, *args) for worker in self.workers]

    @property
    def resident(self) -> list[set[int]]:
        return [worker.resident for worker in self.workers]


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    both = Ranks()
    yield both
    for worker in both.workers:
        worker.memory.close()


def test_all_ranks_map_and_unmap_the_same_pages(ranks: Ranks) -> None:
    blocks = ranks.manager.alloc(20)
    assert blocks is not None
    assert ranks.resident == [{0, 1, 2}] * 2
    ranks.manager.free(blocks)
    assert ranks.resident == [set()] * 2


def test_one_rank_without_room_takes_it_back_from_the_others(ranks: Ranks) -> None:
    held = ranks.manager.alloc(8)
    assert ranks.resident == [{0}] * 2
    ranks.workers[1].memory.min_free_bytes = 1 << 60
    assert ranks.manager.alloc(8) is None
    with pytest.raises(OutOfMemory, match=r"^rank 1: the device has .* free"):
        ranks.backing.map([1, 2])
    assert ranks.resident == [{0}] * 2
    assert ranks.workers[0].memory.mapped_bytes == ranks.manager.page_bytes
    assert ranks.allocator.counts.map_failures
    ranks.workers[1].memory.min_free_bytes = 0
    assert ranks.manager.alloc(8) is not None
    assert ranks.resident == [{0, 1}] * 2
    assert held is not None


class Failing:
    """Makes one of a memory's two ways fail while it is entered."""

    def __init__(self, memory: VirtualMemory, way: str) -> None:
        self._memory = memory
        self._way = way

    def __enter__(self) -> None:
        def fail(*_: int) -> None:
            raise DriverError("it broke")

        setattr(self._memory, self._way, fail)

    def __exit__(self, *_: object) -> None:
        delattr(self._memory, self._way)


def test_a_driver_that_fails_on_one_rank_is_an_error_and_leaves_the_ranks_in_step(ranks: Ranks) -> None:
    with Failing(ranks.workers[0].memory, "_map"), pytest.raises(DriverError, match=r"^rank 0: it broke"):
        ranks.backing.map([1, 2])
    assert ranks.resident == [{0}] * 2
    ranks.backing.map([1, 2])
    with Failing(ranks.workers[1].memory, "_unmap"), pytest.raises(DriverError, match=r"^rank 1: it broke"):
        ranks.backing.unmap([1, 2])
    assert ranks.resident == [{0}, {0, 1, 2}]
    ranks.backing.unmap([1, 2])
    assert ranks.resident == [{0}] * 2


def test_what_a_rank_could_not_take_back_is_not_lost(ranks: Ranks) -> None:
    assert ranks.manager.alloc(8) is not None
    ranks.workers[1].memory.min_free_bytes = 1 << 60
    with Failing(ranks.workers[0].memory, "_unmap"):
        assert ranks.manager.alloc(8) is None
    assert ranks.resident == [{0, 1}, {0}]
    ranks.workers[1].memory.min_free_bytes = 0
    blocks = ranks.manager.alloc(8)
    assert blocks is not None
    assert ranks.resident == [{0, 1}] * 2
    ranks.manager.free(blocks)
    assert ranks.resident == [{0}] * 2


def test_ranks_that_sleep_map_nothing_and_wake_with_the_pages_they_had(ranks: Ranks) -> None:
    blocks = ranks.manager.alloc(20)
    assert blocks is not None
    for worker in ranks.workers:
        worker._kvtools_memory.sleep()
    assert ranks.resident == [{0, 1, 2}] * 2, "nobody said that nothing cached is left"
    ranks.backing.ask("arm")
    for worker in ranks.workers:
        worker._kvtools_memory.sleep()
    assert ranks.resident == [set()] * 2
    assert ranks.manager.alloc(8) is None
    ranks.manager.free(blocks[8:])
    for worker in ranks.workers:
        worker._kvtools_memory.wake()
    assert ranks.resident == [{0}] * 2, "those that were freed meanwhile do not come back"
    assert ranks.manager.alloc(20) is not None
