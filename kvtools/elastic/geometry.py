"""Which bytes a page of blocks means, and mapping such pages.

A *page* is a run of `blocks_per_page` consecutive block ids: what appears and vanishes together. Its bytes lie in every
*plane* of the cache: plane p holds block b at `base + b * stride`. An engine whose layers lie one after the other has a plane
a layer; one that keeps all layers of a block together has one plane. Cache groups that overlay each other share planes,
which is sound because a block id belongs to one group at a time. So any layout that can be written as planes works, and
no layout is asked to align: a granule (what the driver maps, 2 MiB on GPUs, 4 KiB on the CPU) that two pages share is mapped
when the first of them comes and unmapped when the last one goes.

`choose` picks the run length: about `page_bytes` of each plane, whole granules where a run of at most eight times that is.
"""

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtools.elastic.memory import DriverError, VirtualMemory
from kvtools.errors import UsageError


class Backing(Protocol):
    """What puts physical memory under pages: here (PageMemory), or in an engine's workers."""

    def map(self, pages: Sequence[int]) -> None:
        """All of them, or none: raises OutOfMemory, DriverError."""

    def unmap(self, pages: Sequence[int]) -> None:
        """Raises DriverError; may be tried again."""


@dataclass(frozen=True, order=True)
class Plane:
    """Block b at bytes `[base + b * stride, base + (b + 1) * stride)`."""

    base: int
    stride: int


@dataclass(frozen=True)
class Geometry:
    """A cache of `blocks` blocks in `planes`, paged by `blocks_per_page`."""

    planes: tuple[Plane, ...]
    blocks: int
    blocks_per_page: int

    @property
    def pages(self) -> int:
        return -(-self.blocks // self.blocks_per_page)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all planes."""
        return sum(plane.stride for plane in self.planes)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all planes; the last page may be shorter."""
        return self.block_bytes * self.blocks_per_page

    @property
    def capacity_bytes(self) -> int:
        """The reservation, in whole pages."""
        return self.pages * self.page_bytes

    def runs(self, first: int, last: int) -> list[tuple[int, int]]:
        """Start and end byte of pages `[first, last)` in each plane."""
        begin = first * self.blocks_per_page
        end = min(last * self.blocks_per_page, self.blocks)
        return [(plane.base + begin * plane.stride, plane.base + end * plane.stride) for plane in self.planes]


def planes_of(places: Iterable[tuple[int, int]]) -> tuple[Plane, ...]:
    """Planes for layers at (base, stride): layers that share a block's stretch are one plane, and so are overlaid groups."""
    planes: list[Plane] = []
    for base, stride in sorted(set(places)):
        last = planes[-1] if planes else None
        if last and last.stride == stride and base < last.base + stride:
            continue
        planes.append(Plane(base, stride))
    return tuple(planes)


def choose(planes: Sequence[Plane], blocks: int, *, page_bytes: int, granularity: int) -> Geometry:
    """The geometry whose pages hold about `page_bytes` (rounded up to blocks) of each plane."""
    if not planes or blocks < 1:
        raise UsageError("a cache without blocks cannot be elastic")
    stride = max(plane.stride for plane in planes)
    wanted = max(1, -(-max(page_bytes, granularity) // stride))
    step = math.lcm(*(math.lcm(plane.stride, granularity) // plane.stride for plane in planes))
    if step <= 8 * wanted:
        wanted = -(-wanted // step) * step
    return Geometry(tuple(planes), blocks, min(wanted, blocks))


_NO_EDGES: Counter[int] = Counter()


class PageMemory:
    """Pages of a geometry in one VirtualMemory. Thread-safe.

    A granule that a page fills is its own; only those at the ends of its runs can be others' too. So users are counted for
    these alone, and pages in a row are mapped by one call a plane.
    """

    def __init__(self, memory: VirtualMemory, geometry: Geometry) -> None:
        end = max(plane.base + plane.stride * geometry.blocks for plane in geometry.planes)
        if end > memory.size:
            raise UsageError(f"a cache of {end} bytes does not fit the {memory.size} reserved")
        self.memory = memory
        self.geometry = geometry
        per_page, blocks = geometry.blocks_per_page, geometry.blocks
        self._planes = [(p.base, p.stride * per_page, p.base + p.stride * blocks) for p in geometry.planes]
        """First byte, bytes a page, and end of each plane."""
        self._lock = threading.Lock()
        self._edges: Counter[int] = Counter()
        self.resident: set[int] = set()
        """Pages mapped now."""

    @property
    def mapped_bytes(self) -> int:
        """Physical bytes promised; on the CPU they come at first touch."""
        return self.memory.mapped_bytes

    def map(self, pages: Sequence[int]) -> None:
        """Put memory under `pages`: all or none. Raises OutOfMemory, DriverError."""
        with self._lock:
            if again := self.resident.intersection(pages):
                raise DriverError(f"page {min(again)} is mapped already")
            done: list[tuple[int, int, int]] = []
            try:
                for first, last in _rows(pages):
                    for i in range(len(self._planes)):
                        self._map_row(first, last, i)
                        done.append((first, last, i))
            except BaseException:
                for row in done:
                    self._unmap_row(*row)
                raise
            self.resident.update(pages)

    def unmap(self, pages: Sequence[int]) -> None:
        """Take the memory from under `pages`; those that are not mapped are passed over. Raises DriverError."""
        with self._lock:
            for first, last in _rows(self.resident.intersection(pages)):
                for i in range(len(self._planes)):
                    self._unmap_row(first, last, i)
                self.resident.difference_update(range(first, last))

    def _map_row(self, first: int, last: int, plane: int) -> None:
        start, end, edges = self._row(first, last, plane)
        self._between(start, end, self.memory.map)
        if edges:
            self._edges.update(edges)

    def _unmap_row(self, first: int, last: int, plane: int) -> None:
        start, end, edges = self._row(first, last, plane)
        if edges:
            self._edges.subtract(edges)
        try:
            self._between(start, end, self.memory.unmap)
        except BaseException:
            self._edges.update(edges)
            raise

    def _row(self, first: int, last: int, plane: int) -> tuple[int, int, Counter[int]]:
        """Bytes of pages `[first, last)` in one plane, and how many of them lie on each granule that they do not fill."""
        size = self.memory.granularity
        base, length, whole = self._planes[plane]
        start, end = base + first * length, min(base + last * length, whole)
        if not (start % size or end % size or length % size):
            return start, end, _NO_EDGES
        edges: Counter[int] = Counter()
        for at in range(base + first * length, end, length):
            edges.update({edge // size for edge in (at, min(at + length, end)) if edge % size})
        return start, end, edges

    def _between(self, start: int, end: int, act: Callable[[int, int], None]) -> None:
        """`act` on the granules of `[start, end)`, without those at its ends that other pages lie on too."""
        size = self.memory.granularity
        first, last = start // size, -(-end // size)
        if self._edges.get(first):
            first += 1
        if last > first and self._edges.get(last - 1):
            last -= 1
        if last > first:
            act(first * size, (last - first) * size)


def _rows(pages: Iterable[int]) -> list[tuple[int, int]]:
    """Pages as stretches [first, last + 1)."""
    rows: list[tuple[int, int]] = []
    for page in sorted(pages):
        if rows and rows[-1][1] == page:
            rows[-1] = (rows[-1][0], page + 1)
        else:
            rows.append((page, page + 1))
    return rows
