"""Where the bytes of a block lie, for every layout the engine can choose, and the copies of them."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.connector.groups import Unsupported
from kvd.connector.layout import Lane, View, group_layout
from kvd.connector.mover import HostMover, runs

BLOCKS, HEADS, TOKENS, CHANNELS, LAYERS = 7, 2, 4, 6, 3
ORDERS = {"LBHNC": "LBHNC", "LBNHC": "LBNHC", "LHBNC": "LHBNC", "BLHNC": "BLHNC", "BLNHC": "BLNHC", "BHLNC": "BHLNC"}


def engine_memory(order: str, dtype: Any, *, offset: int = 0) -> tuple[np.ndarray, list[np.ndarray]]:
    """A buffer laid out in `order` and one [B, H, N, C] view of it per layer, as the engine makes them."""
    sizes = {"L": LAYERS, "B": BLOCKS, "H": HEADS, "N": TOKENS, "C": CHANNELS}
    item = np.dtype(dtype).itemsize
    total = int(np.prod(list(sizes.values()))) * item
    buffer = np.zeros(offset + total + 64, dtype=np.uint8)
    strides, step = {}, item
    for letter in reversed(order):
        strides[letter] = step
        step *= sizes[letter]
    views = []
    for layer in range(LAYERS):
        start = offset + layer * strides["L"]
        views.append(
            np.lib.stride_tricks.as_strided(
                buffer[start:].view(np.uint8)[: (buffer.size - start) // item * item].view(dtype),
                shape=(BLOCKS, HEADS, TOKENS, CHANNELS),
                strides=tuple(strides[letter] for letter in "BHNC"),
            )
        )
    return buffer, views


def as_view(buffer: np.ndarray, tensor: np.ndarray) -> View:
    offset = tensor.__array_interface__["data"][0] - buffer.__array_interface__["data"][0]
    return View(offset, tensor.shape, tensor.strides, tensor.itemsize)


def layout_of(buffer: np.ndarray, tensors: list[np.ndarray], blocks: int = BLOCKS) -> Any:
    return group_layout({f"layer.{i}": as_view(buffer, tensor) for i, tensor in enumerate(tensors)}, blocks, buffer.size)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8"])
def test_every_layout_survives_the_way_through_a_chunk(order: str, dtype: str) -> None:
    buffer, tensors = engine_memory(order, dtype, offset=64)
    generator = np.random.default_rng(1)
    for tensor in tensors:
        tensor[...] = generator.integers(0, 200, tensor.shape)
    layout = layout_of(buffer, tensors)
    assert layout.block_bytes == LAYERS * HEADS * TOKENS * CHANNELS * np.dtype(dtype).itemsize
    mover = HostMover(buffer, [layout])
    value = bytearray(mover.value_bytes(0, 3))
    mover.gather(0, [5, 2, 3], value)
    wanted = [tensor.copy() for tensor in tensors]
    for tensor in tensors:
        tensor[...] = 7
    mover.scatter(0, [4, 1, 6], bytes(value))
    for tensor, old in zip(tensors, wanted, strict=True):
        assert np.array_equal(tensor[[4, 1, 6]], old[[5, 2, 3]])
        assert (tensor[[0, 2, 3, 5]] == 7).all(), "no other block is touched"


def test_lanes_are_as_few_as_the_layout_allows() -> None:
    lanes = {order: len(layout_of(*engine_memory(order, "float32")).lanes) for order in ORDERS}
    assert lanes == {"LBHNC": 3, "LBNHC": 3, "LHBNC": 6, "BLHNC": 1, "BLNHC": 1, "BHLNC": 1}


def test_blocks_cut_up_for_small_kernels_are_whole_again() -> None:
    buffer, tensors = engine_memory("LBHNC", "float32")
    split = [t.reshape(BLOCKS, HEADS * 2, TOKENS // 2, CHANNELS).reshape(BLOCKS * 2, HEADS, TOKENS // 2, CHANNELS) for t in tensors]
    assert layout_of(buffer, split) == layout_of(buffer, tensors)


def test_padding_between_blocks_is_not_copied() -> None:
    buffer = np.zeros(7 * 128, dtype=np.uint8)
    layout = group_layout({"one": View(0, (7, 1, 25, 4), (128, 100, 4, 1), 1)}, 7, buffer.size)
    assert layout.lanes == (Lane(0, 128, 100),)


def test_groups_that_overlay_each_other_keep_their_blocks_apart() -> None:
    # Layers of two groups have one address; a block id belongs to one group at a time.
    buffer, tensors = engine_memory("LBHNC", "float32")
    layout = layout_of(buffer, tensors)
    mover = HostMover(buffer, [layout, layout])
    tensors[0][3] = 1
    tensors[0][4] = 2
    one, two = bytearray(mover.value_bytes(0, 1)), bytearray(mover.value_bytes(1, 1))
    mover.gather(0, [3], one)
    mover.gather(1, [4], two)
    assert one != two


@pytest.mark.parametrize(
    ("view", "why"),
    [
        (View(0, (8, 2), (2, 1), 1), "8 blocks in the tensor, 7 in the engine"),
        (View(0, (7, 4, 4), (16, 2, 1), 1), "overlap"),
        (View(0, (7, 100), (100, 1), 1), "beyond the cache's memory"),
        (View(0, (7, 32768, 1), (65536, 2, 1), 1), "more than 16384 pieces"),
        (View(0, (), (), 1), "0 blocks"),
    ],
)
def test_what_cannot_be_addressed_is_named(view: View, why: str) -> None:
    with pytest.raises(Unsupported, match=f"a.layer: .*{why}"):
        group_layout({"a.layer": view}, 7, 512)


def test_two_layers_on_the_same_bytes_are_refused() -> None:
    view = View(0, (7, 16), (16, 1), 1)
    with pytest.raises(Unsupported, match="share bytes"):
        group_layout({"one": view, "two": view}, 7, 512)


@given(st.lists(st.integers(0, 9), max_size=20))
def test_runs_cover_exactly_the_ids_that_are_not_zero(ids: list[int]) -> None:
    found = list(runs(ids))
    covered = {place + i: first + i for place, first, count in found for i in range(count)}
    assert covered == {place: block for place, block in enumerate(ids) if block}
    assert all(b[0] > a[0] + a[2] or ids[b[0]] != ids[b[0] - 1] + 1 for a, b in itertools.pairwise(found)), "runs are maximal"
