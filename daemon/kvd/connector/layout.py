"""Where the bytes of a block lie, whatever KV layout the engine has.

vLLM allocates one buffer for everything and gives each layer a view `[block, head, token, channel]` with strides. A *lane*
is one run of bytes that repeats with the block number: it starts at `offset + block * stride` and is `length` long. A
layer whose blocks are dense is one lane; one whose heads lie apart is a lane a head; layers that touch inside a block are
one lane together. A group's chunk holds lane after lane, each with its blocks in order, so that a run of consecutive
blocks is one copy. No scale or packing needs to be known, since no block is ever split.

Cache groups overlay each other in the buffer: an address is (a layer's group, a block id), never a block id alone.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvd.connector.groups import Unsupported

MAX_LANES = 16384
"""A layout in more pieces than this is copied slower than computed: it is refused."""


@dataclass(frozen=True, order=True)
class Lane:
    """Bytes `[offset + b * stride, ... + length)` of the buffer for every block b."""

    offset: int
    stride: int
    length: int


@dataclass(frozen=True)
class View:
    """One layer's tensor as numbers: byte offset into the buffer, shape and byte strides, dimension 0 the block."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int


@dataclass(frozen=True)
class GroupLayout:
    """The lanes of one cache group, in the order of the bytes in a chunk."""

    lanes: tuple[Lane, ...]
    blocks: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all of the group's layers."""
        return sum(lane.length for lane in self.lanes)

    @property
    def shape(self) -> str:
        """What of the layout decides the order of a chunk's bytes: for the namespace. Not the number of blocks."""
        return ",".join(str(lane.length) for lane in self.lanes)


def group_layout(views: Mapping[str, View], num_blocks: int, buffer_bytes: int) -> GroupLayout:
    """The lanes of a group whose layers are `views`. Raises Unsupported, naming the layer that cannot be addressed."""
    lanes: list[Lane] = []
    for name, view in views.items():
        lanes += _lanes(name, view, num_blocks)
        if len(lanes) > MAX_LANES:
            raise Unsupported(f"{name}: a block lies in more than {MAX_LANES} pieces")
    merged = _merge(sorted(lanes))
    for lane in merged:
        if lane.offset < 0 or lane.offset + (num_blocks - 1) * lane.stride + lane.length > buffer_bytes:
            raise Unsupported(f"{next(iter(views))}: its blocks reach beyond the cache's memory")
    return GroupLayout(tuple(merged), num_blocks)


def _lanes(name: str, view: View, num_blocks: int) -> list[Lane]:
    """A layer's lanes, unmerged: every dimension that is not part of the innermost run is walked."""
    if not view.shape or view.shape[0] % num_blocks:
        raise Unsupported(f"{name}: {view.shape[0] if view.shape else 0} blocks in the tensor, {num_blocks} in the engine")
    # Back ends with small kernels cut a block into several: a stride inside the block like any other.
    ratio = view.shape[0] // num_blocks
    stride = view.strides[0] * ratio
    inner = sorted(
        (
            (step, size)
            for step, size in zip((view.strides[0], *view.strides[1:]), (ratio, *view.shape[1:]), strict=True)
            if size > 1
        ),
    )
    length = view.itemsize
    while inner and inner[0][0] == length:
        length *= inner.pop(0)[1]
    if any(step < length for step, _ in inner) or stride <= 0:
        raise Unsupported(f"{name}: its blocks overlap (strides {view.strides})")
    starts = itertools.product(*(range(0, step * size, step) for step, size in reversed(inner)))
    return [Lane(view.offset + sum(start), stride, length) for start in itertools.islice(starts, MAX_LANES + 1)]


def _merge(lanes: Sequence[Lane]) -> list[Lane]:
    """Lanes that touch inside a block become one; the order stays that of addresses. Raises Unsupported if any overlap."""
    merged: list[Lane] = []
    for lane in lanes:
        last = merged[-1] if merged else None
        if last and lane.stride == last.stride and lane.offset < last.offset + last.length:
            raise Unsupported("two layers of one cache group share bytes")
        if (
            last
            and lane.stride == last.stride
            and lane.offset == last.offset + last.length
            and last.length + lane.length <= lane.stride
        ):
            merged[-1] = Lane(last.offset, last.stride, last.length + lane.length)
        else:
            merged.append(lane)
    return merged
