"""A process with elastic pools, driven by JSON lines: what an engine is to kvctl, without a model.

    python -m tests.kvtools.elastic.pool_main ROOT NAME[:RESERVED_BYTES] ...

Commands: ["alloc", pool, blocks], ["free", pool, blocks], ["read", pool], ["write", pool] and ["close"]. Blocks hold a byte each of
their own, so that "read" says whether any was lost.
"""

import ctypes
import json
import sys
from pathlib import Path

from kvtools.elastic.figures import Figures
from kvtools.elastic.geometry import PageMemory, choose, planes_of
from kvtools.elastic.manager import KVCacheManager
from kvtools.elastic.memory import open_memory
from kvtools.elastic.pages import PageAllocator
from kvtools.elastic.pool import Pool
from kvtools.elastic.settings import read_settings
from kvtools.elastic.tracker import MemInfoTracker
from kvtools.segments.owner import OwnerInfo

LAYERS, STRIDE = 2, 64 << 10


class Engine:
    """One pool and the blocks it handed out, oldest first."""

    def __init__(self, root: Path, name: str, reserve: int) -> None:
        settings = read_settings()
        blocks = reserve // (LAYERS * STRIDE)
        self.memory = open_memory("cpu", reserve, min_free_bytes=settings.min_free)
        planes = planes_of((layer * STRIDE * blocks, STRIDE) for layer in range(LAYERS))
        self.geometry = choose(planes, blocks, page_bytes=settings.page_size, granularity=self.memory.granularity)
        allocator = PageAllocator(
            PageMemory(self.memory, self.geometry),
            self.geometry.pages,
            min_reserved=settings.min_reserved_pages,
            max_reserved=settings.max_reserved_pages,
            prealloc=settings.prealloc,
        )
        self.manager = KVCacheManager(allocator, blocks, self.geometry.blocks_per_page, self.geometry.page_bytes)
        info = OwnerInfo("test", start_capacity_bytes=self.geometry.capacity_bytes, page_bytes=self.geometry.page_bytes)
        tracker = MemInfoTracker(name, info, limit_bytes=settings.limit, memory=self.memory, root=root)
        assert tracker.device() is not None
        self.pool = Pool(self.manager, tracker, settings, figures=Figures(name, root=root))
        self.pool.start()
        self.held: list[int] = []

    def _touch(self, block: int, byte: int) -> None:
        for plane in self.geometry.planes:
            ctypes.memset(self.memory.address + plane.base + block * plane.stride, byte, plane.stride)

    def _whole(self, block: int) -> bool:
        starts = (self.memory.address + plane.base + block * plane.stride for plane in self.geometry.planes)
        return all(ctypes.string_at(start, STRIDE) == bytes([block % 251 + 1]) * STRIDE for start in starts)

    def alloc(self, count: int) -> bool:
        blocks = self.manager.alloc(count)
        for block in blocks or ():
            self._touch(block, block % 251 + 1)
        self.held += blocks or ()
        return blocks is not None

    def free(self, count: int) -> int:
        going, self.held = self.held[:count], self.held[count:]
        self.manager.free(going)
        return len(self.held)

    def read(self) -> bool:
        return all(self._whole(block) for block in self.held)

    def resident(self) -> int:
        return self.memory.resident_bytes  # type: ignore[attr-defined]


def main(root: Path, names: list[str]) -> None:
    engines = {}
    for word in names:
        name, _, reserve = word.partition(":")
        engines[name] = Engine(root, name, int(reserve or 64 << 20))
    print("up", flush=True)
    for line in sys.stdin:
        verb, *words = json.loads(line)
        if verb == "close":
            break
        name, *rest = words
        print(json.dumps(getattr(engines[name], verb)(*rest)), flush=True)
    for engine in engines.values():
        engine.pool.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
