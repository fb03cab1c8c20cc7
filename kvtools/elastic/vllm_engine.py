"""The engine core's side: one session an engine, between vLLM's scheduler and its workers' memory.

scheduler -> block pool (vllm_blocks) -> manager -> WorkerBacking -> executor.collective_rpc -> every rank's kvtools_elastic

Mapping is one call to all ranks, in order with the steps. Where one rank has no room, the others take back what they mapped, and
the scheduler finds too few free blocks: it preempts a request, as it does when a cache of fixed size is full.

**Whose turn it is.** `turn` is held by every entry into the engine core that touches blocks or talks to the workers; the pool's
follower takes it for its own work while the engine is idle (no requests, nothing in flight). So blocks are touched by the engine's
own thread during a step, else by the follower, under one lock, never by both.
"""

import atexit
import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Sequence
from multiprocessing.util import Finalize
from typing import Any

from kvtools.elastic.figures import Figures
from kvtools.elastic.manager import KVCacheManager
from kvtools.elastic.memory import DriverError, OutOfMemory
from kvtools.elastic.pages import PageAllocator
from kvtools.elastic.pool import Pool
from kvtools.elastic.settings import Settings
from kvtools.elastic.tracker import MemInfoTracker
from kvtools.elastic.vllm_blocks import adopt
from kvtools.elastic.vllm_plugin import replace
from kvtools.errors import Refused
from kvtools.segments.owner import OwnerInfo, read_owner
from kvtools.units import format_size

logger = logging.getLogger("vllm.kvtools")

REGISTERING = ("Nixl", "Mooncake", "MoRIIO", "P2pNccl")
"""Connectors that register the whole cache with a network card or a peer: memory that comes and goes cannot be registered."""


class WorkerBacking:
    """Pages in the workers, all ranks in step."""

    def __init__(self, rpc: Callable[..., Any]) -> None:
        self._rpc = rpc

    def ask(self, verb: str, pages: Sequence[int] = ()) -> list[Any]:
        """Every rank's answer. Raises OutOfMemory, DriverError with the first rank that failed."""
        answers = self._rpc("kvtools_elastic", args=(verb, list(pages)))
        for rank, (status, value) in enumerate(answers):
            if status != "ok":
                raise (OutOfMemory if status == "oom" else DriverError)(f"rank {rank}: {value}")
        return [value for _, value in answers]

    def map(self, pages: Sequence[int]) -> None:
        try:
            self.ask("map", pages)
        except (OutOfMemory, DriverError):
            with contextlib.suppress(
                DriverError
            ):  # a rank that cannot give them back has them already when they are asked for anew
                self.ask("unmap", pages)  # where it had worked
            raise

    def unmap(self, pages: Sequence[int]) -> None:
        self.ask("unmap", pages)


def check(executor: Any, settings: Settings, configs: Sequence[Any]) -> None:
    """Refuse, before anything is allocated, what cannot work. Raises Refused."""
    config = executor.vllm_config
    name = segment_name(settings, config)
    owner = read_owner(name)
    if owner is not None and owner.alive:
        raise Refused(
            f"segment {name} is owned by a running engine ({owner.info.engine}, pid {owner.pid})",
            hint="give each engine a KVTOOLS_SEGMENT of its own",
        )
    connector = config.kv_transfer_config.kv_connector if config.kv_transfer_config is not None else ""
    if connector and connector.startswith(REGISTERING):
        raise Refused(f"{connector} registers the KV cache's memory, which an elastic one takes away", hint="unset KVTOOLS_SEGMENT")
    if any(group.host_resident for one in configs for group in one.kv_cache_groups):
        raise Refused("this model keeps KV groups in host memory (HiSparse), which is not elastic", hint="unset KVTOOLS_SEGMENT")


def segment_name(settings: Settings, config: Any) -> str:
    """The segment of this engine core: data-parallel ranks after the first have one each."""
    assert settings.segment is not None
    rank = config.parallel_config.data_parallel_rank
    return f"{settings.segment}-dp{rank}" if rank else settings.segment


class Session:
    """One engine core's pool, from the workers' allocation to its shutdown."""

    def __init__(self, executor: Any, settings: Settings) -> None:
        self.executor = executor
        self.settings = settings
        self.turn = threading.RLock()
        self.backing = WorkerBacking(executor.collective_rpc)
        ranks = self.backing.ask("describe")
        shapes = {(rank["blocks"], rank["blocks_per_page"]) for rank in ranks}
        if len(shapes) != 1:
            raise Refused(f"ranks page their caches differently ({sorted(shapes)})", hint="unset KVTOOLS_SEGMENT")
        ((blocks, per_page),) = shapes
        self.page_bytes = max(rank["page_bytes"] for rank in ranks)
        allocator = PageAllocator(
            self.backing,
            -(-blocks // per_page),
            min_reserved=settings.min_reserved_pages if settings.prealloc else 0,
            max_reserved=settings.max_reserved_pages,
            resident=[0],
        )
        self.manager = KVCacheManager(allocator, blocks, per_page, self.page_bytes)
        self.pool: Pool | None = None
        self.core: Any = None
        config = executor.vllm_config
        name = segment_name(settings, config)
        devices = [rank["device"] for rank in ranks if rank["device"]]
        info = _describe(config, devices, allocator.pages * self.page_bytes, self.page_bytes)
        limit = min(settings.limit or info.start_capacity_bytes, info.start_capacity_bytes)
        self._tracker = MemInfoTracker(name, info, limit_bytes=limit)
        self._figures = Figures(name)
        logger.info(
            "kvtools: elastic KV cache, segment %s: %s reserved in pages of %s (%d blocks), limit %s",
            name, format_size(info.start_capacity_bytes), format_size(self.page_bytes), per_page, format_size(limit),
        )  # fmt: skip

    def take_over(self, kv_cache_manager: Any) -> None:
        """vLLM's KV cache manager is made: its blocks are ours from now on."""
        block_pool, coordinator = kv_cache_manager.block_pool, kv_cache_manager.coordinator
        if self.pool is not None or block_pool.num_gpu_blocks != self.manager.blocks:
            return
        queue = adopt(block_pool, self.manager, ahead=self.settings.min_reserved_pages if self.settings.prealloc else 0)
        needed = coordinator.get_num_blocks_to_allocate

        @functools.wraps(needed)
        def get_num_blocks_to_allocate(*args: Any, **more: Any) -> int:
            count: int = needed(*args, **more)
            queue.prepare(count)
            return count

        coordinator.get_num_blocks_to_allocate = get_num_blocks_to_allocate
        self.block_pool = block_pool
        self.pool = Pool(
            self.manager, self._tracker, self.settings, figures=self._figures, turn=self.turn, idle=self.idle, cache=queue
        )
        self.pool.start()

    def idle(self) -> bool:
        """Whether the engine core has nothing to do: no request, nothing in flight. False until it is complete."""
        core = self.core
        if core is None or not hasattr(core, "step_fn"):
            return False  # still being made, on a thread that does not know of `turn`
        return not (
            core.scheduler.has_unfinished_requests()
            or getattr(core, "batch_queue", None)
            or getattr(core, "engines_running", False)
        )

    def before_step(self) -> None:
        """Called with `turn` held at the start of each step."""
        pool = self.pool
        if pool is not None:
            pool.touch()
            if pool.attention:
                pool.work()

    def before_sleep(self) -> None:
        """Forget the prefix cache, whose contents are about to go, and let the workers drop them. Raises RuntimeError."""
        with self.turn:
            if not self.block_pool.reset_prefix_cache():
                raise RuntimeError("kvtools: requests still hold KV blocks: their contents would be lost in this sleep")
            self.manager.trim()
            self.backing.ask("arm")
            if self.pool is not None:
                self.pool.asleep = True

    def after_wake(self, tags: list[str] | None) -> None:
        """The workers have mapped their pages again."""
        if self.pool is not None and (tags is None or "kv_cache" in tags):
            self.pool.asleep = False

    def close(self) -> None:
        """End following and remove the pool's files."""
        if self.pool is not None:
            self.pool.close()
        else:
            self._figures.close()
            self._tracker.close()


_sessions: dict[int, Session] = {}


def session_of(executor: Any) -> Session | None:
    """The session of this executor's engine."""
    return _sessions.get(id(executor))


def begin(executor: Any, settings: Settings) -> None:
    """The workers have their memory: make the session and hook the engine core around it. Raises Refused, KvErrors."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager as Theirs
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    session = Session(executor, settings)
    _sessions[id(executor)] = session
    atexit.register(session.close)
    Finalize(session, session.close, exitpriority=100)  # processes of multiprocessing run no atexit handlers

    def adopting(original: Any) -> Any:
        @functools.wraps(original)
        def init(self: Any, *args: Any, **more: Any) -> None:
            original(self, *args, **more)
            for one in _sessions.values():
                one.take_over(self)

        return init

    replace(Theirs, "__init__", adopting)
    for name in ("step", "step_with_batch_queue"):
        replace(EngineCore, name, functools.partial(_turned, step=True))
    for name in ENTRIES:
        if hasattr(EngineCore, name):
            replace(EngineCore, name, _turned)
    replace(EngineCoreProc, "_handle_client_request", _turned)
    replace(EngineCoreProc, "_notify_idle_state_callbacks", _turned)
    replace(EngineCoreProc, "run_busy_loop", _known)
    replace(EngineCore, "shutdown", _closing)


ENTRIES = (
    "add_request", "abort_requests", "post_step", "reset_prefix_cache", "reset_encoder_cache", "reset_mm_cache",
    "pause_scheduler", "resume_scheduler", "sleep", "wake_up", "release_kv_cache_memory", "execute_dummy_batch",
    "collective_rpc", "add_lora", "remove_lora", "list_loras", "pin_lora", "profile", "save_sharded_state",
    "compute_weight_checksums", "get_supported_tasks",
)  # fmt: skip
"""Ways into the engine core that touch blocks or talk to the workers; an engine process goes through two more."""


def _turned(original: Any, step: bool = False) -> Any:
    @functools.wraps(original)
    def with_turn(self: Any, *args: Any, **more: Any) -> Any:
        session = session_of(self.model_executor)
        if session is None:
            return original(self, *args, **more)
        with session.turn:
            session.core = self
            if step:
                session.before_step()
            return original(self, *args, **more)

    return with_turn


def _known(original: Any) -> Any:
    @functools.wraps(original)
    def run_busy_loop(self: Any) -> Any:
        session = session_of(self.model_executor)
        if session is not None:
            session.core = self
        return original(self)

    return run_busy_loop


def _closing(original: Any) -> Any:
    @functools.wraps(original)
    def shutdown(self: Any, *args: Any, **more: Any) -> Any:
        session = _sessions.pop(id(self.model_executor), None)
        if session is not None:
            atexit.unregister(session.close)
            session.close()
        return original(self, *args, **more)

    return shutdown


def _describe(config: Any, devices: Sequence[str], capacity: int, page: int) -> OwnerInfo:
    import vllm

    parallel = config.parallel_config
    return OwnerInfo(
        "vllm",
        model=str(config.model_config.model),
        devices=tuple(dict.fromkeys(devices)),
        tp_size=parallel.tensor_parallel_size,
        pp_size=parallel.pipeline_parallel_size,
        dp_rank=parallel.data_parallel_rank,
        start_capacity_bytes=capacity,
        page_bytes=page,
        version=str(vllm.__version__),
    )
