"""A pool's live numbers in shared memory, `kvtools.pool.<name>`: what the 24 bytes of its segment cannot say.

Fragmentation above all: bytes that are mapped for pages in use while no block lies on them. No room in shared memory costs
the numbers, never the engine.
"""

import logging
from collections.abc import Mapping
from pathlib import Path

from kvtools.elastic.manager import KVCacheManager
from kvtools.errors import KvError
from kvtools.segments.files import SHM
from kvtools.segments.stats import Metric, StatsWriter, instance_of_pool

logger = logging.getLogger("vllm.kvtools")

GAUGES = {
    "capacity_bytes": ("bytes", "the reservation, in whole pages"),
    "effective_limit_bytes": ("bytes", "what the limit comes to: whole pages, within the reservation"),
    "page_bytes": ("bytes", "one page in all layers: what appears and vanishes together"),
    "block_bytes": ("bytes", "one block in all layers"),
    "mapped_bytes": ("bytes", "pages in use and in reserve"),
    "fragmentation_bytes": ("bytes", "mapped for pages in use, and no block lies there"),
    "pages_used": ("", "pages with a block in use or cached"),
    "pages_reserved": ("", "pages mapped ahead, or kept"),
    "pages_draining": ("", "pages closed to new blocks until the limit holds"),
    "blocks_used": ("", "blocks that requests hold"),
    "blocks_cached": ("", "blocks that only the prefix cache holds"),
    "over_limit_bytes": ("bytes", "in use above the limit"),
    "asleep": ("", "1 while the engine sleeps: nothing is mapped"),
}
COUNTERS = {
    "pages_mapped": ("", "pages mapped since the start"),
    "pages_unmapped": ("", "pages unmapped since the start"),
    "map_seconds": ("seconds", "spent in mapping"),
    "unmap_seconds": ("seconds", "spent in unmapping"),
    "map_failures": ("", "times the device had no room, or its driver failed"),
    "unmap_failures": ("", "times a driver did not unmap"),
    "limits": ("", "limits taken up"),
    "evicted_blocks": ("", "cached blocks given up for a limit or for room"),
}


def metrics() -> list[Metric]:
    """The schema: gauges, then every counter as `<name>_total`."""
    counted = [Metric(f"{name}_total", "counter", unit, text, float=unit == "seconds") for name, (unit, text) in COUNTERS.items()]
    return [Metric(name, "gauge", unit, text) for name, (unit, text) in GAUGES.items()] + counted


def gather(manager: KVCacheManager, *, cached: int, asleep: bool) -> dict[str, float]:
    """The numbers of this moment. `cached`: blocks the manager counts as held that only a prefix cache holds."""
    usage, counts = manager.usage(), manager.allocator.counts
    page = manager.page_bytes
    block = page // manager.blocks_per_page
    mapped = 0 if asleep else (usage.used_pages + usage.reserved_pages) * page
    return {
        "capacity_bytes": usage.pages * page,
        "effective_limit_bytes": usage.target_pages * page,
        "page_bytes": page,
        "block_bytes": block,
        "mapped_bytes": mapped,
        "fragmentation_bytes": 0 if asleep else usage.free_blocks * block,
        "pages_used": usage.used_pages,
        "pages_reserved": usage.reserved_pages,
        "pages_draining": usage.draining_pages,
        "blocks_used": usage.held_blocks - cached - manager.pinned_blocks,
        "blocks_cached": cached,
        "over_limit_bytes": manager.over_pages * page,
        "asleep": int(asleep),
        "pages_mapped_total": counts.mapped,
        "pages_unmapped_total": counts.unmapped,
        "map_seconds_total": counts.map_seconds,
        "unmap_seconds_total": counts.unmap_seconds,
        "map_failures_total": counts.map_failures,
        "unmap_failures_total": counts.unmap_failures,
    }


class Figures:
    """The writer of one pool's stats segment; silent where there is no room for it."""

    def __init__(self, name: str, *, root: Path = SHM) -> None:
        self._writer: StatsWriter | None = None
        try:
            self._writer = StatsWriter("pool", instance_of_pool(name), metrics(), root=root)
        except KvError as error:
            logger.warning("kvtools: no numbers of pool %s in shared memory: %s", name, error)

    def write(self, values: Mapping[str, float]) -> None:
        """Write the values and beat the heart."""
        writer = self._writer
        if writer is None:
            return
        with writer.update():
            for name, value in values.items():
                writer.set(writer.index(name), value)
        writer.heartbeat()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
