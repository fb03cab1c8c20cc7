"""How a worker gets hold of the engine's KV memory and of the daemon.

`attach_worker` looks at the tensors the engine registered, works out where the bytes of a block lie, checks that with what
the engine's configuration says, and gives the rank its namespaces. What cannot be addressed as whole blocks is named in
the log, and then nothing of this engine is stored: a hit that left one layer out would be wrong, not slow.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvd.connector import fingerprint
from kvd.connector.direct_setup import set_up
from kvd.connector.groups import Group, Unsupported, groups_of, unit_bytes_of, unit_of
from kvd.connector.keys import chunk_tokens
from kvd.connector.layout import GroupLayout, View, group_layout
from kvd.connector.link import Link
from kvd.connector.metrics import Counters
from kvd.connector.mover import HostMover
from kvd.connector.pinning import Pinner, pinner_for
from kvd.connector.plan import RankIdentity
from kvd.connector.settings import Settings
from kvd.connector.worker import READ_SLICE_S, Mover, Worker
from kvd.wire.client import Client
from kvd.wire.connection import default_socket

logger = logging.getLogger("vllm.kvd")


FACTS_TIMEOUT_S = 10.0


class Links:
    """The links of one process, each made when first asked for: they differ in how long a call may take."""

    def __init__(self, settings: Settings, counters: Counters) -> None:
        self._settings = settings
        self._counters = counters
        self._made: dict[str, Link] = {}
        self._pinner: Pinner | None = None

    def lookup(self) -> Link:
        return self._link("lookup", self._settings.lookup_timeout_s)

    def save(self) -> Link:
        return self._link("save", self._settings.save_timeout_s)

    def load(self) -> Link:
        """A load is many short calls, so that a wedged daemon is told from a slow tier long before the load's deadline."""
        return self._link("load", min(READ_SLICE_S, self._settings.load_timeout_s))

    def direct(self) -> Link:
        """For what moves past the daemon: it may have to make room on a disk before it lends any."""
        return self._link("direct", READ_SLICE_S)

    def facts(self) -> Link:
        """For comparing facts with the last engine, in the background: nobody waits for it."""
        return self._link("facts", FACTS_TIMEOUT_S)

    def pin_for(self, device: Any) -> None:
        """From now on pin what connections map, where KV memory is on a GPU. To be called before they are made."""
        self._pinner = pinner_for(device)

    def daemon_expected(self) -> bool:
        """Whether something stands where the daemon's socket would: worth waiting for."""
        return Path(self._settings.socket or default_socket()).exists()

    def close(self) -> None:
        if self._pinner is not None:
            self._pinner.close()
        for link in self._made.values():
            link.close()

    def _lost(self, name: str) -> None:
        self._counters.add("down")
        if self._pinner is not None:
            self._pinner.unpin(name)

    def _link(self, name: str, timeout_s: float) -> Link:
        link = self._made.get(name)
        if link is None:
            socket = self._settings.socket

            def connect() -> Client:
                client = Client(socket, timeout_s=timeout_s)
                try:
                    client.ping()
                    if name in {"save", "direct"}:
                        # Maps the arena for writing now: it takes a second connection, which no step should wait for.
                        client.write([]).abort()
                    if self._pinner is not None and name in {"save", "load"}:
                        self._pinner.pin_soon(name, client)
                except BaseException:
                    client.close()
                    raise
                return client

            link = self._made[name] = Link(name, connect, on_loss=lambda: self._lost(name))
            link.start()
        return link


def attach_worker(
    vllm_config: Any,
    kv_cache_config: Any,
    kv_caches: Mapping[str, Any],
    *,
    settings: Settings,
    links: Links,
    counters: Counters,
    engine_version: str,
    saves: bool,
) -> tuple[RankIdentity, Worker | None]:
    """This rank's identity for the handshake, and its worker; None where its cache cannot be stored (the identity says why)."""
    try:
        groups = groups_of(kv_cache_config)
        _check_parallelism(vllm_config)
        _check_reuse(vllm_config, kv_cache_config)
        storage, device, layouts = find_layouts(groups, kv_cache_config, kv_caches)
    except Unsupported as problem:
        logger.warning("register_kv_caches: %s SKIPS kvd (%s)", *_split(str(problem)))
        return RankIdentity(problem=str(problem)), None
    replicas = max(1, getattr(kv_cache_config, "kv_tp_replicas", 1))
    mover = make_mover(storage, device, layouts)
    links.pin_for(device)
    unit = unit_of(groups)
    # Stages of a pipeline have different layers, and chunks of one size for all: there the size is not made to measure.
    unit_bytes = unit_bytes_of(kv_cache_config, groups) if vllm_config.parallel_config.pipeline_parallel_size == 1 else 0
    large = chunk_tokens(settings.chunk_tokens, unit, unit_bytes)
    direct = (
        set_up(
            settings,
            mover,
            device,
            links.direct(),
            longest=lambda: max(
                large // group.block_tokens * layout.block_bytes for group, layout in zip(groups, layouts, strict=True)
            ),
            counters=counters,
        )
        if settings.ais != "off"
        else None
    )
    chunk = large if direct is not None else chunk_tokens(settings.chunk_tokens, unit)
    facts = {
        **fingerprint.model_facts(vllm_config, engine_version),
        **fingerprint.parallel_facts(vllm_config, replicas),
        "chunk_tokens": str(chunk),
        "layout": str(kv_cache_config.kv_cache_layout),
    }
    of_groups = tuple(
        _group_facts(group, layout, kv_cache_config, kv_caches) for group, layout in zip(groups, layouts, strict=True)
    )
    namespaces = tuple(fingerprint.digest({**facts, **more}) for more in of_groups)
    identity = RankIdentity(
        namespaces,
        facts,
        chunk,
        tuple(layout.block_bytes for layout in layouts),
        group_facts=of_groups,
        direct=direct is not None,
    )
    # Of ranks that hold the same bytes only the first stores them.
    first = vllm_config.parallel_config.rank % replicas == 0
    worker = Worker(
        namespaces,
        mover,
        save_link=links.save(),
        load_link=links.load(),
        saves=saves and first,
        load_timeout_s=settings.load_timeout_s,
        load_threads=settings.load_threads,
        counters=counters,
        direct=direct,
        direct_link=links.direct() if direct is not None else None,
    )
    return identity, worker


def _split(problem: str) -> tuple[str, str]:
    """'layer: why' as the two halves of the log line that names what is skipped."""
    layer, colon, why = problem.partition(": ")
    return (layer, why) if colon else ("every layer", problem)


def _check_parallelism(vllm_config: Any) -> None:
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise Unsupported(f"context parallelism ({name}) spreads a block's tokens over ranks")


def _check_reuse(vllm_config: Any, kv_cache_config: Any) -> None:
    """Refuse models whose prefixes the engine itself never reuses, since what is computed of one depends on what follows it, or
    an answer needs every token computed: it hashes blocks and asks a connector all the same.
    """
    for group in kv_cache_config.kv_cache_groups:
        for spec in (getattr(group.kv_cache_spec, "kv_cache_specs", None) or {"": group.kv_cache_spec}).values():
            if getattr(spec, "non_causal", False):
                raise Unsupported(f"{group.layer_names[0]}: its attention is not causal, a prefix depends on what follows it")
    model = vllm_config.model_config
    if not getattr(model, "is_prefix_caching_supported", True):
        pooling = getattr(getattr(model, "pooler_config", None), "seq_pooling_type", None)
        kind = f"{pooling} pooling needs" if pooling else "this kind of model needs"
        raise Unsupported(f"{kind} every token computed: vLLM reuses no prefix of it")


def make_mover(storage: Any, device: Any, layouts: Sequence[GroupLayout]) -> Mover:
    """What copies between this storage and the arena."""
    if device.type != "cpu":
        from kvd.connector.device_mover import DeviceMover

        return DeviceMover(storage, device, layouts)
    import torch

    return HostMover(torch.empty(0, dtype=torch.uint8).set_(storage).numpy(), layouts)


def find_layouts(groups: Sequence[Group], kv_cache_config: Any, kv_caches: Mapping[str, Any]) -> tuple[Any, Any, list[GroupLayout]]:
    """The storage of all caches, its device, and the layout of each group. Raises Unsupported."""
    import torch

    storage: Any = None
    device: Any = None
    layouts = []
    for group in groups:
        views = {}
        for name in kv_cache_config.kv_cache_groups[group.id].layer_names:
            tensor = kv_caches.get(name)
            if not isinstance(tensor, torch.Tensor):
                raise Unsupported(f"{name}: its cache is not one tensor of blocks")
            if storage is None:
                storage, device = tensor.untyped_storage(), tensor.device
            elif tensor.untyped_storage().data_ptr() != storage.data_ptr():
                raise Unsupported(f"{name}: it lies in a buffer of its own")
            size = tensor.element_size()
            views[name] = View(
                tensor.storage_offset() * size, tuple(tensor.shape), tuple(step * size for step in tensor.stride()), size
            )
        _check_placement(views, kv_cache_config)
        layouts.append(group_layout(views, kv_cache_config.num_blocks, storage.nbytes()))
    return storage, device, layouts


def _check_placement(views: Mapping[str, View], kv_cache_config: Any) -> None:
    """The tensors and the engine's own account of where they lie must agree."""
    for tensor in getattr(kv_cache_config, "kv_cache_tensors", ()):
        for index, name in enumerate(getattr(tensor, "layers", ())):
            view = views.get(name)
            if view is None or not hasattr(tensor, "layer_stride"):
                continue
            ratio = view.shape[0] // kv_cache_config.num_blocks
            said = (tensor.offset + index * tensor.layer_stride, tensor.block_stride)
            seen = (view.offset, view.strides[0] * ratio)
            if said != seen:
                raise Unsupported(f"{name}: the engine says that it lies at {said} (offset, stride), its tensor says {seen}")


def _group_facts(group: Group, layout: GroupLayout, kv_cache_config: Any, kv_caches: Mapping[str, Any]) -> dict[str, str]:
    spec = kv_cache_config.kv_cache_groups[group.id]
    names = sorted(spec.layer_names, key=lambda name: (kv_caches[name].storage_offset(), name))
    tensors = dict.fromkeys(f"{kv_caches[name].dtype} {tuple(kv_caches[name].shape[1:])}" for name in names)
    return {
        "group": str(group.id),
        "layers": " ".join(names),
        "spec": f"{type(spec.kv_cache_spec).__name__} window {group.window} local {group.local}",
        "block_tokens": str(group.block_tokens),
        "tensors": ", ".join(tensors),
        "lanes": layout.shape,
    }
