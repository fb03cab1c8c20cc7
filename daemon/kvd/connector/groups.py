"""Cache groups: layers that share one block table, and which blocks of it a chunk must hold.

A full-attention group needs every block before a hit's end. A sliding-window group needs only the blocks its window still
reaches, and the engine frees the others while the request runs: of a chunk it stores the tail that a hit ending exactly
there would need. What a hit needs from an earlier chunk is always part of that chunk's own tail, so hits may end at any
stored chunk's end. Positions are in tokens, blocks are indices into the request's block table.

Pure arithmetic, the same on the scheduler's and the workers' side.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


class Unsupported(Exception):
    """This engine's cache cannot be stored; the message says which part and why."""


@dataclass(frozen=True)
class Group:
    """One cache group. `window`: tokens before a hit's end that are still read; None: all of them.

    `local`: attention restarts at every multiple of this many tokens (chunked local attention); 0: it does not.
    """

    id: int
    block_tokens: int
    window: int | None = None
    local: int = 0

    @property
    def partial(self) -> bool:
        """Whether a chunk holds less than all of its blocks, so that a hit must end exactly where a chunk does."""
        return self.window is not None or self.local > 0

    def first_needed(self, end: int) -> int:
        """Index of the first block that a hit of `end` tokens (a whole number of blocks) reads."""
        if self.window is not None:
            return max(0, (end - self.window) // self.block_tokens)
        if self.local:
            # At a multiple of `local` nothing before the end is read; one block is kept so that there is a value to find.
            return min(end // self.local * self.local, max(0, end - self.block_tokens)) // self.block_tokens
        return 0

    def stored(self, start: int, end: int) -> range:
        """Indices of the blocks that the chunk [start, end) holds for this group."""
        return range(max(start // self.block_tokens, self.first_needed(end)), end // self.block_tokens)


def unit_of(groups: Iterable[Group]) -> int:
    """Tokens that are whole blocks in every group: hits and chunks end at multiples of it."""
    return math.lcm(*(group.block_tokens for group in groups))


def groups_of(kv_cache_config: Any) -> tuple[Group, ...]:
    """The groups whose blocks can be found again by hash, from vLLM's KVCacheConfig. Raises Unsupported.

    Groups the engine itself keeps out of prefix caching or of transfers (scratch, replicas) are left out: it rebuilds them.
    """
    ids: Sequence[int] = getattr(kv_cache_config, "prefix_cacheable_group_ids", range(len(kv_cache_config.kv_cache_groups)))
    found = tuple(_group(index, kv_cache_config.kv_cache_groups[index]) for index in ids)
    if not found:
        raise Unsupported("the engine has no cache group that prefix caching covers")
    return found


def unit_bytes_of(kv_cache_config: Any, groups: Iterable[Group]) -> int:
    """Bytes of `unit_of` tokens in all layers of all groups, by the engine's own account: the same number on both sides."""
    groups = tuple(groups)
    unit = unit_of(groups)
    total = 0
    for group in groups:
        cached = kv_cache_config.kv_cache_groups[group.id]
        specs = getattr(cached.kv_cache_spec, "kv_cache_specs", None)
        pages = (
            [spec.page_size_bytes for spec in specs.values()]
            if specs
            else [cached.kv_cache_spec.page_size_bytes] * len(cached.layer_names)
        )
        total += sum(pages) * unit // group.block_tokens
    return total


def _group(index: int, group: Any) -> Group:
    spec = group.kv_cache_spec
    layers = getattr(spec, "kv_cache_specs", None)
    specs = list(layers.values()) if layers else [spec]
    shapes = {_shape(index, one, group.layer_names) for one in specs}
    if len(shapes) != 1:
        raise Unsupported(f"{group.layer_names[0]}: the layers of cache group {index} do not share one window")
    return shapes.pop()


def _shape(index: int, spec: Any, layer_names: Sequence[str]) -> Group:
    # By class names, not isinstance: the classes move between releases, and a full-attention spec of a model that slides
    # (hybrid manager off) also carries `sliding_window`, where it means nothing for what must be stored.
    kinds = {kind.__name__ for kind in type(spec).__mro__}
    if "FullAttentionSpec" in kinds and "RSWASpec" not in kinds:
        return Group(index, spec.block_size)
    if "SlidingWindowSpec" in kinds:
        return Group(index, spec.block_size, window=spec.sliding_window - 1 + getattr(spec, "extra_retained_tokens", 0))
    if "ChunkedLocalAttentionSpec" in kinds:
        return Group(index, spec.block_size, local=spec.attention_chunk_size)
    raise Unsupported(f"{layer_names[0]}: {type(spec).__name__} is not a cache of whole token blocks")
