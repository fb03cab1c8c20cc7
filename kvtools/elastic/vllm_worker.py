"""The worker's side: the KV cache lies in elastic memory, and pages come and go as the engine core says.

vLLM allocates its cache with one `torch.zeros` inside `allocate_kv_cache`; while that runs for the real cache (not for the
small one of a profiling run) the call is answered with a view of reserved address space. Page 0 is mapped at once and always:
it holds the null block, which padding and warm-up touch. Everything else is mapped by `kvtools_elastic`, a method that the engine
core calls through the executor, in order with the model's steps and on all ranks: what a step uses was mapped before it, and
what is unmapped, no step before it still uses (the device is waited for).

Answers are values, never exceptions: an exception in one rank would leave the other ranks' answers in the executor's queues.

Sleep and wake of the worker are hooked here. Sleep unmaps all pages, the null block's too, but only after the engine core has
said that nothing cached is left (`arm`): contents are gone for good. Wake maps the same pages again, empty.
"""

import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

from kvtools.elastic.geometry import Geometry, PageMemory, choose, planes_of
from kvtools.elastic.memory import OutOfMemory, open_memory
from kvtools.elastic.settings import Settings
from kvtools.elastic.vllm_plugin import replace, told
from kvtools.errors import KvError, Refused

logger = logging.getLogger("vllm.kvtools")

Answer = tuple[str, Any]
"""("ok", value), ("oom", text) or ("error", text)."""


class WorkerMemory:
    """One worker's cache: its pages, and whether it sleeps."""

    def __init__(self, pages: PageMemory) -> None:
        self.pages = pages
        self.asleep = False
        self._armed = False
        self._kept: set[int] = set()
        pages.map([0])

    def describe(self) -> dict[str, Any]:
        """What the engine core has to know, plain values only."""
        geometry = self.pages.geometry
        return {
            "blocks": geometry.blocks,
            "blocks_per_page": geometry.blocks_per_page,
            "page_bytes": geometry.page_bytes,
            "kind": self.pages.memory.kind,
            "device": self.pages.memory.uuid,
            "pid": os.getpid(),
        }

    def map(self, pages: Sequence[int]) -> None:
        if self.asleep:
            raise OutOfMemory("the engine sleeps: nothing is mapped until it wakes")
        # Those that are here already this rank could not give back when another one had no room: see WorkerBacking.map.
        self.pages.map([page for page in pages if page not in self.pages.resident])

    def unmap(self, pages: Sequence[int]) -> None:
        if self.asleep:
            self._kept.difference_update(pages)
            return
        self.pages.memory.synchronize()
        self.pages.unmap(pages)

    def arm(self) -> None:
        """The engine core has forgotten what is cached: the next sleep may drop contents."""
        self._armed = True

    def sleep(self) -> None:
        if self.asleep:
            return
        if not self._armed:
            logger.error("kvtools: this sleep did not come by the engine: its prefix cache may be in use, so KV memory stays")
            return
        self._armed = False
        self._kept = set(self.pages.resident)
        self.pages.memory.synchronize()
        self.pages.unmap(sorted(self._kept))
        self.asleep = True
        logger.info("kvtools: asleep: pages of KV memory given back: %d", len(self._kept))

    def wake(self) -> None:
        """Raises OutOfMemory, DriverError; it sleeps on then."""
        if not self.asleep:
            return
        self.pages.map(sorted(self._kept))
        self.asleep = False
        logger.info("kvtools: awake: pages of KV memory mapped, empty: %d", len(self._kept))

    def release(self) -> None:
        """The worker ends: no page stays. The addresses do, as long as the process: tensors over them may outlive the worker."""
        try:
            self.pages.unmap(sorted(self.pages.resident))
        except KvError as error:
            logger.debug("kvtools: at the end: %s", error)  # the driver may be gone already


def install(worker: type, settings: Settings) -> None:
    """Give the worker class elastic memory: once a process, before its model runner is made."""

    def initialize(original: Any) -> Any:
        def initialize_from_config(self: Any, kv_cache_config: Any) -> Any:
            _substitute_in(_allocators(), settings)
            _real.append(self)
            try:
                return original(self, kv_cache_config)
            finally:
                _real.clear()

        return initialize_from_config

    def asleep(original: Any) -> Any:
        def sleep(self: Any, level: int = 1) -> Any:
            result = original(self, level)
            if (memory := getattr(self, "_kvtools_memory", None)) is not None:
                memory.sleep()
            return result

        return sleep

    def awake(original: Any) -> Any:
        def wake_up(self: Any, tags: list[str] | None = None) -> Any:
            result = original(self, tags)
            if (memory := getattr(self, "_kvtools_memory", None)) is not None and (tags is None or "kv_cache" in tags):
                try:
                    memory.wake()
                except KvError as error:
                    raise RuntimeError(told(error)) from None
            return result

        return wake_up

    def ended(original: Any) -> Any:
        def shutdown(self: Any) -> Any:
            result = original(self)
            if (memory := getattr(self, "_kvtools_memory", None)) is not None:
                memory.release()
            return result

        return shutdown

    replace(worker, "initialize_from_config", initialize)
    replace(worker, "shutdown", ended)
    replace(worker, "sleep", asleep)
    replace(worker, "wake_up", awake)
    if not hasattr(worker, "kvtools_elastic"):
        worker.kvtools_elastic = _elastic  # type: ignore[attr-defined]


def _elastic(worker: Any, verb: str, pages: Sequence[int] = ()) -> Answer:
    """The method the engine core calls on every rank: describe, map, unmap, arm."""
    memory: WorkerMemory | None = getattr(worker, "_kvtools_memory", None)
    if memory is None:
        return "error", "this worker's KV cache is not elastic"
    try:
        if verb == "describe":
            return "ok", memory.describe()
        if verb == "arm":
            memory.arm()
        elif verb == "map":
            memory.map(pages)
        else:
            memory.unmap(pages)
        return "ok", None
    except OutOfMemory as error:
        return "oom", error.message
    except KvError as error:
        return "error", error.message


_real: list[Any] = []
"""The worker whose real cache is being allocated, if one is."""


def _allocators() -> list[Any]:
    """Every module that has the function by name: it is imported from one into the others."""
    import vllm.v1.worker.utils as utils

    names = ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.attn_utils")
    return [utils, *(sys.modules[name] for name in names if hasattr(sys.modules.get(name), "allocate_kv_cache"))]


def _substitute_in(modules: Sequence[Any], settings: Settings) -> None:
    def around(original: Any) -> Any:
        def allocate_kv_cache(kv_cache_config: Any, device: Any, layout: Any, *args: Any, **more: Any) -> Any:
            if not _real or not kv_cache_config.kv_cache_tensors:
                return original(kv_cache_config, device, layout, *args, **more)
            worker = _real[-1]
            with _substitute(lambda size: _make(worker, size, kv_cache_config, device, layout, settings)) as done:
                result = original(kv_cache_config, device, layout, *args, **more)
            if len(done) != 1:
                raise RuntimeError(told(Refused("this vLLM allocates its KV cache in another way", hint="unset KVTOOLS_SEGMENT")))
            return result

        return allocate_kv_cache

    for module in modules:
        replace(module, "allocate_kv_cache", around)


def _substitute(make: Any) -> Any:
    """While entered, a flat int8 `torch.zeros` is answered by `make(size)`; enters as the list of what was made."""
    import torch
    from torch.overrides import TorchFunctionMode

    class Substitute(TorchFunctionMode):  # type: ignore[misc]
        def __enter__(self) -> list[Any]:
            super().__enter__()
            self.done: list[Any] = []
            return self.done

        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if function is torch.zeros and kwargs.get("dtype") is torch.int8 and len(args) == 1 and isinstance(args[0], int):
                self.done.append(make(args[0]))
                return self.done[-1]
            return function(*args, **kwargs)

    return Substitute()


def _make(worker: Any, size: int, config: Any, device: Any, layout: Any, settings: Settings) -> Any:
    """Reserve `size` bytes for this worker's cache; the tensor over them."""
    import torch

    if not (layout.is_block_compact or layout.is_block_outermost):
        raise RuntimeError(told(Refused(f"blocks lie in pieces in the KV layout {layout.name}", hint="unset KVTOOLS_SEGMENT")))
    kind = device.type if device.type == "cpu" or torch.version.hip is None else "hip"
    index = device.index if device.index is not None else (0 if kind == "cpu" else torch.cuda.current_device())
    try:
        memory = open_memory(kind, size, device=index, min_free_bytes=settings.min_free)
        worker._kvtools_memory = WorkerMemory(PageMemory(memory, _geometry(config, memory.granularity, settings)))
    except KvError as error:
        raise RuntimeError(told(error)) from None
    return memory.tensor(size)


def _geometry(config: Any, granularity: int, settings: Settings) -> Geometry:
    places = [
        (tensor.offset + i * tensor.layer_stride, tensor.block_stride)
        for tensor in config.kv_cache_tensors
        for i in range(len(tensor.layers))
    ]
    return choose(planes_of(places), config.num_blocks, page_bytes=settings.page_size, granularity=granularity)
