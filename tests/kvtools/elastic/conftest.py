"""What the elastic tests share: a backing that only counts, and pools of real memory."""

from collections.abc import Callable, Iterator

import pytest

from kvtools.elastic.geometry import Geometry, PageMemory, choose, planes_of
from kvtools.elastic.manager import KVCacheManager
from kvtools.elastic.memory import open_memory
from kvtools.elastic.pages import PageAllocator

LAYERS, STRIDE, BLOCKS = 4, 16 << 10, 256


def small_geometry(granularity: int, *, blocks: int = BLOCKS, page_bytes: int = 128 << 10) -> Geometry:
    """Four layers one after the other, eight blocks of 16 KiB a page."""
    planes = planes_of((layer * STRIDE * blocks, STRIDE) for layer in range(LAYERS))
    return choose(planes, blocks, page_bytes=page_bytes, granularity=granularity)


class Real:
    """A manager over real CPU memory."""

    def __init__(self, *, blocks: int = BLOCKS, **options: int | bool) -> None:
        self.memory = open_memory("cpu", LAYERS * STRIDE * blocks)
        self.geometry = small_geometry(self.memory.granularity, blocks=blocks)
        self.pages = PageMemory(self.memory, self.geometry)
        self.allocator = PageAllocator(self.pages, self.geometry.pages, **options)  # type: ignore[arg-type]
        self.manager = KVCacheManager(self.allocator, blocks, self.geometry.blocks_per_page, self.geometry.page_bytes)

    def close(self) -> None:
        self.allocator.close()
        self.memory.close()


@pytest.fixture
def real() -> Iterator[Callable[..., Real]]:
    """Makes managers over real memory."""
    made: list[Real] = []

    def make(**options: int | bool) -> Real:
        made.append(Real(**options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.close()
