"""Every KV layout and cache spec that vLLM has, as vLLM itself lays them out: blocks come through a chunk unchanged.

Most of these layouts no CPU engine runs; the memory, the specs and the views are made by vLLM's own allocator all the same.
"""

import contextlib
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from kvd.connector.attach import find_layouts, make_mover
from kvd.connector.device_mover import DeviceMover
from kvd.connector.groups import Group, Unsupported, groups_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the engine's imports warn of what its own libraries do
    import torch
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, validate_kv_cache_layout
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheTensor,
        MambaSpec,
        MLAAttentionSpec,
        SlidingWindowMLASpec,
        SlidingWindowSpec,
        UniformTypeKVCacheSpecs,
        compute_layout_strides,
    )
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker.utils import allocate_kv_cache

pytestmark = [pytest.mark.vllm, pytest.mark.real("vllm")]

BLOCKS, LAYERS = 9, 3
DENSE = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.bfloat16)
SPECS: dict[str, Any] = {
    "bfloat16": DENSE,
    "float32": FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32),
    "fp8": FullAttentionSpec(block_size=16, num_kv_heads=4, head_size=8, dtype=torch.uint8),
    "latent": MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16),
    "packed latent": MLAAttentionSpec(
        block_size=16, num_kv_heads=1, head_size=656, dtype=torch.uint8, cache_dtype_str="fp8_ds_mla", alignment=576
    ),
    "window": SlidingWindowSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.bfloat16, sliding_window=40),
    "local": ChunkedLocalAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.bfloat16, attention_chunk_size=64),
}


def engine(spec: Any, layout: KVCacheLayout, *, kernel: int | None = None) -> tuple[KVCacheConfig, dict[str, torch.Tensor]]:
    """One group of layers, allocated by vLLM, filled with bytes that tell every place from every other."""
    names = [f"model.layers.{i}.self_attn.attn" for i in range(LAYERS)]
    strides = compute_layout_strides(spec, BLOCKS, LAYERS, layout)
    tensor = KVCacheTensor(
        size=LAYERS * BLOCKS * spec.page_size_bytes, layers=names, layer_stride=strides[0], block_stride=strides[1]
    )
    config = KVCacheConfig(BLOCKS, [tensor], [KVCacheGroupSpec(names, spec)], kv_cache_layout=layout.name)
    caches = allocate_kv_cache(config, torch.device("cpu"), layout, [kernel] if kernel else None)
    everything = torch.empty(0, dtype=torch.uint8).set_(caches[names[0]].untyped_storage())
    everything.copy_(torch.randint(0, 255, everything.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1)))
    return config, caches


def block(cache: torch.Tensor, number: int) -> bytes:
    """The bytes of one of the engine's blocks in one layer, in the order of the view."""
    ratio = cache.shape[0] // BLOCKS
    return cache[number * ratio : (number + 1) * ratio].contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("layout", KVCacheLayout, ids=lambda layout: layout.name)
def test_blocks_come_through_a_chunk_unchanged(name: str, layout: KVCacheLayout) -> None:
    spec = SPECS[name]
    config, caches = engine(spec, layout)
    groups = groups_of(config)
    storage, device, layouts = find_layouts(groups, config, caches)
    dense = getattr(spec, "unpadded_page_size_bytes", spec.page_size_bytes)
    assert layouts[0].block_bytes == LAYERS * dense
    for mover in (make_mover(storage, device, layouts), DeviceMover(storage, device, layouts)):
        before = {layer: [block(cache, number) for number in range(BLOCKS)] for layer, cache in caches.items()}
        value = bytearray(mover.value_bytes(0, 4))
        mover.gather(0, [7, 1, 2, 5], value)
        mover.scatter(0, [3, 0, 4, 8], memoryview(bytes(value)))
        for layer, cache in caches.items():
            for number in range(BLOCKS):
                was = {3: 7, 4: 2, 8: 5}.get(number, number)
                assert block(cache, number) == before[layer][was], f"{layer} block {number}"


def test_both_movers_make_the_same_value() -> None:
    config, caches = engine(DENSE, KVCacheLayout.LHBNC)
    storage, device, layouts = find_layouts(groups_of(config), config, caches)
    values = []
    for mover in (make_mover(storage, device, layouts), DeviceMover(storage, device, layouts)):
        values.append(bytearray(mover.value_bytes(0, 2)))
        mover.gather(0, [4, 1], values[-1])
    assert values[0] == values[1]


def test_blocks_split_for_small_kernels_are_whole_blocks() -> None:
    config, caches = engine(DENSE, KVCacheLayout.LBHNC, kernel=8)
    assert caches["model.layers.0.self_attn.attn"].shape[0] == 2 * BLOCKS
    _, _, layouts = find_layouts(groups_of(config), config, caches)
    whole, whole_caches = engine(DENSE, KVCacheLayout.LBHNC)
    assert layouts == find_layouts(groups_of(whole), whole, whole_caches)[2]


def test_the_order_of_a_values_bytes_does_not_depend_on_the_number_of_blocks() -> None:
    config, caches = engine(DENSE, KVCacheLayout.LBHNC)
    _, _, layouts = find_layouts(groups_of(config), config, caches)
    assert layouts[0].shape == ",".join([str(DENSE.page_size_bytes)] * LAYERS)


def test_groups_of_every_kind_are_known_or_named() -> None:
    def config(*specs: Any) -> KVCacheConfig:
        return KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec([f"layer.{i}"], spec) for i, spec in enumerate(specs)])

    assert groups_of(config(*SPECS.values())) == (
        *(Group(i, 16) for i in range(5)),
        Group(5, 16, window=39),
        Group(6, 16, local=64),
    )
    two = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": DENSE, "b": SPECS["latent"]})
    assert groups_of(config(two)) == (Group(0, 16),)
    state = MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.float32,))
    with pytest.raises(Unsupported, match="MambaSpec"):
        groups_of(config(DENSE, state))


def test_memory_that_is_not_where_the_engine_says_is_refused() -> None:
    config, caches = engine(DENSE, KVCacheLayout.LBHNC)
    config.kv_cache_tensors[0].layer_stride += 64
    with pytest.raises(Unsupported, match=r"layers.1.*the engine says that it lies at"):
        find_layouts(groups_of(config), config, caches)
    with pytest.raises(Unsupported, match="not one tensor of blocks"):
        find_layouts(groups_of(config), config, {name: [cache] for name, cache in caches.items()})
    config, caches = engine(DENSE, KVCacheLayout.LBHNC)
    stranger = torch.zeros_like(caches["model.layers.2.self_attn.attn"])
    with pytest.raises(Unsupported, match="a buffer of its own"):
        find_layouts(groups_of(config), config, {**caches, "model.layers.2.self_attn.attn": stranger})


def _latent(size: int, **more: Any) -> MLAAttentionSpec:
    return MLAAttentionSpec(**{"block_size": 16, "num_kv_heads": 1, "head_size": size, "dtype": torch.bfloat16, **more})


def _sparse(main: MLAAttentionSpec, layers: int = LAYERS) -> KVCacheGroupSpec:
    """DSA: the latents and the indexer's keys, of another size, in one group."""
    indexer = _latent(132, dtype=torch.uint8)
    specs = {f"layers.{i}.attn": main for i in range(layers)} | {f"layers.{i}.indexer.k_cache": indexer for i in range(layers)}
    return KVCacheGroupSpec(list(specs), UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=specs))


MODELS: dict[str, list[KVCacheGroupSpec]] = {
    "sparse attention": [_sparse(_latent(576))],
    "sparse attention, packed latents": [_sparse(_latent(656, dtype=torch.uint8, cache_dtype_str="fp8_ds_mla"))],
    "sparse attention beside windows": [
        _sparse(_latent(576)),
        KVCacheGroupSpec(
            ["w.0", "w.1"],
            SlidingWindowMLASpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16, sliding_window=40),
        ),
    ],
    "full beside windows": [
        KVCacheGroupSpec(["f.0", "f.1"], DENSE),
        KVCacheGroupSpec(["w.0", "w.1"], SPECS["window"]),
    ],
    "padded pages": [
        KVCacheGroupSpec(
            ["p.0", "p.1"], FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=24, dtype=torch.uint8, page_size_padded=1024)
        )
    ],
}


def model(groups: list[KVCacheGroupSpec], layout: KVCacheLayout) -> tuple[KVCacheConfig, dict[str, torch.Tensor]]:
    """Laid out by vLLM as it would for a model with these groups, and filled."""
    wanted = SimpleNamespace(
        attention_config=SimpleNamespace(hisparse_config=None),
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: layout,
            num_gpu_blocks_override=BLOCKS,
            prefix_cache_retention_interval=None,
            enable_prefix_caching=True,
        ),
    )
    config = get_kv_cache_config_from_groups(wanted, groups, 1 << 22)
    assert config.num_blocks == BLOCKS
    object.__setattr__(config, "kv_cache_layout", layout.name)
    caches = allocate_kv_cache(config, torch.device("cpu"), layout, None)
    first = next(iter(caches.values()))
    everything = torch.empty(0, dtype=torch.uint8).set_(first.untyped_storage())
    everything.copy_(torch.randint(0, 255, everything.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(2)))
    return config, caches


def expressible() -> list[Any]:
    """The models, in every layout that vLLM itself has for them: pages of several sizes need block-outermost ones."""
    found = []
    for name, groups in MODELS.items():
        for layout in KVCacheLayout:
            with contextlib.suppress(ValueError):
                validate_kv_cache_layout(layout, groups)
                found.append(pytest.param(name, layout, id=f"{name}-{layout.name}"))
    return found


@pytest.mark.parametrize(("name", "layout"), expressible())
def test_every_layer_of_every_group_comes_through_whole(name: str, layout: KVCacheLayout) -> None:
    config, caches = model(MODELS[name], layout)
    groups = groups_of(config)
    storage, device, layouts = find_layouts(groups, config, caches)
    everything = torch.empty(0, dtype=torch.uint8).set_(storage)
    for mover in (make_mover(storage, device, layouts), DeviceMover(storage, device, layouts)):
        for group in groups:
            names = config.kv_cache_groups[group.id].layer_names
            before = {layer: [block(caches[layer], number) for number in range(BLOCKS)] for layer in names}
            value = bytearray(mover.value_bytes(group.id, 3))
            assert len(value) == 3 * sum(len(before[layer][0]) for layer in names), "each layer's bytes once, and no padding"
            mover.gather(group.id, [7, 1, 5], value)
            untouched = everything.clone()
            mover.scatter(group.id, [3, 0, 8], memoryview(bytes(value)))
            for layer in names:
                for number in range(BLOCKS):
                    was = {3: 7, 8: 5}.get(number, number)
                    assert block(caches[layer], number) == before[layer][was], f"{layer} block {number}"
            # And nothing else, not even padding: with the group's own bytes of those blocks cleared, the memory is equal.
            for memory in (untouched, everything):
                for lane in layouts[group.id].lanes:
                    for number in (3, 8):
                        memory[lane.offset + number * lane.stride :][: lane.length] = 0
            assert torch.equal(untouched, everything)


@pytest.mark.parametrize("gone", ["layers.1.indexer.k_cache", "layers.0.attn"])
def test_without_one_of_its_parts_nothing_of_a_sparse_model_is_stored(gone: str) -> None:
    """Latents without their indexer (or the other way round) would give the sparse top-k other tokens."""
    config, caches = model(MODELS["sparse attention"], KVCacheLayout.BLHNC)
    with pytest.raises(Unsupported, match=gone.replace(".", r"\.")):
        find_layouts(groups_of(config), config, {name: cache for name, cache in caches.items() if name != gone})
