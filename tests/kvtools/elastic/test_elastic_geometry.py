"""Pages of any layout: the bytes of a mapped page are there, and nothing more than their granules."""

import ctypes
import mmap
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtools.elastic.geometry import Geometry, PageMemory, Plane, choose, planes_of
from kvtools.elastic.memory import DriverError, OutOfMemory, open_memory
from kvtools.errors import UsageError


def test_layers_one_after_the_other_are_a_plane_each() -> None:
    places = [(layer * 8192 * 32768, 32768) for layer in range(4)]
    assert planes_of(places) == tuple(Plane(base, stride) for base, stride in places)


def test_blocks_with_all_their_layers_are_one_plane() -> None:
    assert planes_of((layer * 4096, 4 * 4096) for layer in range(4)) == (Plane(0, 16384),)


def test_groups_that_overlay_each_other_share_planes() -> None:
    assert planes_of([(0, 4096), (1 << 20, 4096), (0, 4096), (1 << 20, 4096)]) == (Plane(0, 4096), Plane(1 << 20, 4096))


@pytest.mark.parametrize(
    ("stride", "granularity", "page", "blocks_per_page"),
    [
        (32768, 4096, 2 << 20, 64),
        (32768, 2 << 20, 2 << 20, 64),
        (36864, 4096, 2 << 20, 57),
        (49152, 2 << 20, 2 << 20, 128),  # whole granules within eight times the page
        (36864, 2 << 20, 2 << 20, 57),  # no such run: edges are shared
        (8 << 20, 2 << 20, 2 << 20, 1),
        (32768, 2 << 20, 4096, 64),  # never less than a granule
    ],
)
def test_the_length_of_a_page(stride: int, granularity: int, page: int, blocks_per_page: int) -> None:
    geometry = choose([Plane(0, stride)], 100_000, page_bytes=page, granularity=granularity)
    assert geometry.blocks_per_page == blocks_per_page
    assert geometry.page_bytes == blocks_per_page * stride
    assert geometry.capacity_bytes >= 100_000 * stride


def test_a_small_cache_is_one_page() -> None:
    assert choose([Plane(0, 4096)], 3, page_bytes=2 << 20, granularity=4096) == Geometry((Plane(0, 4096),), 3, 3)
    with pytest.raises(UsageError):
        choose([], 3, page_bytes=4096, granularity=4096)


def mapped(address: int, size: int) -> set[int]:
    """Granules of `[address, address + size)` that the kernel has the memory file under."""
    found = set()
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "kvtools-elastic" in line:
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            found |= {
                at // mmap.PAGESIZE
                for at in range(max(start, address) - address, min(end, address + size) - address, mmap.PAGESIZE)
            }
    return found


@settings(max_examples=40, deadline=None)
@given(
    strides=st.lists(st.integers(min_value=1, max_value=3 * 4096), min_size=1, max_size=3),
    per_page=st.integers(min_value=1, max_value=7),
    blocks=st.integers(min_value=1, max_value=40),
    steps=st.lists(st.sets(st.integers(min_value=0, max_value=39), min_size=1, max_size=6), max_size=12),
)
def test_exactly_the_granules_of_resident_pages_are_mapped(
    strides: list[int], per_page: int, blocks: int, steps: list[set[int]]
) -> None:
    planes, base = [], 0
    for stride in strides:
        planes.append(Plane(base, stride))
        base += stride * blocks
    geometry = Geometry(tuple(planes), blocks, min(per_page, blocks))
    memory = open_memory("cpu", base)
    pages = PageMemory(memory, geometry)
    try:
        for step in steps:
            chosen = {page for page in step if page < geometry.pages}
            coming = chosen - pages.resident
            pages.map(sorted(coming))
            pages.unmap(sorted(chosen - coming))
            size = memory.granularity
            runs = [run for page in pages.resident for run in geometry.runs(page, page + 1)]
            wanted = {granule for start, end in runs for granule in range(start // size, -(-end // size))}
            assert mapped(memory.address, memory.size) == wanted
            assert memory.mapped_bytes == len(wanted) * size
            for start, end in runs:
                ctypes.memset(memory.address + start, 1, end - start)
    finally:
        memory.close()


def test_all_or_nothing() -> None:
    memory = open_memory("cpu", 40 * 4096)
    pages = PageMemory(memory, Geometry((Plane(0, 4096), Plane(20 * 4096, 4096)), 20, 2))
    pages.map([1])
    with pytest.raises(DriverError, match="page 1 is mapped already"):
        pages.map([0, 1])
    assert pages.resident == {1}
    memory.min_free_bytes = 1 << 60
    with pytest.raises(OutOfMemory):
        pages.map([4, 5])
    assert pages.resident == {1}
    assert pages.mapped_bytes == 4 * 4096
    pages.unmap([0, 1, 2])
    assert pages.mapped_bytes == 0
    memory.close()
    with pytest.raises(UsageError, match="does not fit"):
        PageMemory(memory, Geometry((Plane(0, 4096),), 41, 1))
