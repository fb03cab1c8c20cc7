"""KvdConnector: what vLLM calls. Translates, guards, and leaves the work to `scheduler` and `worker`.

Any exception that leaves a connector method ends the engine, in every process. So each public method is wrapped: what goes
wrong is logged with its traceback and counted, and the method answers "nothing stored", "nothing to do" or "failed". The
one exception is the constructor with a setting that cannot be meant: that is said at start-up, before anything is served.

vLLM makes one object in the scheduler's process and one in each worker. Only the handshake goes from the workers to the
scheduler before the first request: it carries the namespaces.
"""

import functools
import logging
import os
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import vllm
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from kvd.connector import book, describe, prometheus
from kvd.connector.attach import Links, attach_worker
from kvd.connector.direct_setup import StartRefused
from kvd.connector.groups import Unsupported, groups_of, unit_bytes_of
from kvd.connector.link import Link, wait_up
from kvd.connector.metrics import Counters
from kvd.connector.plan import Known, Plan, RankIdentity, Report
from kvd.connector.scheduler import Scheduler, Step
from kvd.connector.segment import Publisher
from kvd.connector.settings import Settings, read_settings
from kvd.connector.view import View
from kvd.connector.worker import Results, Worker
from kvd.wire.connection import default_socket
from kvtools.errors import UsageError
from kvtools.segments.stats import instance_of_path

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.kvd")

CONNECT_WAIT_S = 5.0
"""How long start-up waits for a daemon whose socket is there, so that the first request already finds it."""


@dataclass
class KvdMetadata(KVConnectorMetadata):
    """Scheduler to workers, every step."""

    plan: Plan = field(default_factory=Plan)
    known: Known = field(default_factory=Known)
    """Told once, and again after a reset, for who asks the workers."""


@dataclass
class KvdHandshake(KVConnectorHandshakeMetadata):
    """Worker to scheduler, once."""

    identity: RankIdentity = field(default_factory=RankIdentity)


@dataclass
class KvdWorkerMetadata(KVConnectorWorkerMetadata):
    """Workers to scheduler, in steps with something to say."""

    report: Report = field(default_factory=Report)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, KvdWorkerMetadata)
        self.report.join(other.report)
        return self


Params = ParamSpec("Params")
Answer = TypeVar("Answer")


def guarded(default: Callable[[], Any]) -> Callable[[Callable[Params, Answer]], Callable[Params, Answer]]:
    """Let nothing out: on an exception log it, count it and answer `default()`."""

    def wrap(method: Callable[Params, Answer]) -> Callable[Params, Answer]:
        @functools.wraps(method)
        def call(*args: Params.args, **kwargs: Params.kwargs) -> Answer:
            try:
                return method(*args, **kwargs)
            except StartRefused:
                raise
            except Exception as error:  # noqa: BLE001 - the engine's edge: an exception here would end the engine
                _stumbled(args[0], method.__name__, error)
                answer: Answer = default()
                return answer

        return call

    return wrap


def _stumbled(connector: Any, method: str, error: Exception) -> None:
    counters = getattr(connector, "_counters", None)
    if counters is not None:
        counters.add("errors")
    # A fault that repeats every step must not fill the disk with tracebacks.
    seen = getattr(connector, "_stumbles", 0)
    connector._stumbles = seen + 1
    if seen < 10 or seen % 1000 == 0:
        logger.error("kvd: error in %s (number %d); the engine serves on without it", method, seen + 1, exc_info=error)


def _nothing() -> None:
    return None


class KvdConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM's side of kvd: see the package's docstring for the command line."""

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = self._kv_transfer_config
        self._settings = _meant(transfer.kv_connector_extra_config)
        self._counters = Counters()
        self._scheduler: Scheduler | None = None
        self._worker: Worker | None = None
        self._identity = RankIdentity(problem="the engine has not registered its cache")
        self._links = Links(self._settings, self._counters)
        self._publisher: Publisher | None = None
        self._introduction: dict[int, RankIdentity] = {}
        self._results = Results()
        self._known = Known()
        self._saves = self._settings.save and transfer.kv_role != "kv_consumer"
        self._loads = self._settings.load and transfer.kv_role != "kv_producer"
        if role == KVConnectorRole.SCHEDULER:
            self._begin(vllm_config, kv_cache_config)

    @guarded(_nothing)
    def _begin(self, vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> None:
        """The scheduler's half of construction."""
        for notice in self._settings.notices:
            logger.warning("kvd: %s", notice)
        self._choose_recompute()
        try:
            groups = groups_of(kv_cache_config)
        except Unsupported as problem:
            logger.warning("kvd: nothing will be stored: %s", problem)
            return
        cache = vllm_config.cache_config
        eagle = any(getattr(group, "is_eagle_group", False) for group in kv_cache_config.kv_cache_groups)
        self._scheduler = Scheduler(
            self._settings,
            groups,
            self._links.lookup(),
            hash_tokens=kv_cache_config.hash_block_size or cache.block_size,
            hash_source=lambda: _hash_source(str(cache.prefix_caching_hash_algo)),
            save=self._saves,
            load=self._loads,
            reuse_local=bool(cache.enable_prefix_caching),
            drop_units=int(eagle),
            unit_bytes=unit_bytes_of(kv_cache_config, groups) if vllm_config.parallel_config.pipeline_parallel_size == 1 else 0,
            say_view=self._say_view,
            counters=self._counters,
        )

    def _say_view(self, view: View) -> None:
        """With the first request: who this engine is, into the daemon's book and, with the next step, to the workers."""
        self._known = Known(view.hashes.none_hash, view.tenant)
        book.compare_soon(self._links.facts(), replace(view, name=f"pid {os.getpid()} on {platform.node()}"))

    def _choose_recompute(self) -> None:
        """A failed load must be recomputed, not end its request: vLLM's default is the other way round.

        The engine reads the field right after it has made this object. Under MultiConnector the parent's field counts, and
        only the operator can set that one.
        """
        transfer = self._kv_transfer_config
        if transfer.kv_load_failure_policy != "recompute":
            transfer.kv_load_failure_policy = "recompute"
            logger.info(
                "kvd: kv_load_failure_policy is now 'recompute': what cannot be loaded is computed. Under MultiConnector write "
                '"kv_load_failure_policy":"recompute" beside "kv_connector":"MultiConnector"'
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: a save that is lost is a miss later, nothing more."""
        return False

    # ---- worker side -------------------------------------------------------------------------------------------------

    @guarded(_nothing)
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._identity, self._worker = attach_worker(
            self._vllm_config,
            self._kv_cache_config,
            kv_caches,
            settings=self._settings,
            links=self._links,
            counters=self._counters,
            engine_version=vllm.__version__,
            saves=self._saves,
        )
        if self._worker is not None:
            self._publish(str(self._vllm_config.parallel_config.rank), self._links.load(), len(self._identity.namespaces))
        describe.expose(self)

    def _publish(self, who: str, link: Link, groups: int) -> None:
        """Show this process's numbers in shared memory from now on."""
        if not self._settings.stats or self._publisher is not None:
            return
        worker, chunk = self._worker, self._scheduler.chunk if self._scheduler is not None else self._identity.chunk_tokens

        def gauges() -> dict[str, int]:
            loads = worker.loading if worker is not None else 0
            return {"daemon_up": int(link.look()), "loads_active": loads, "chunk_tokens": chunk, "groups": groups}

        socket = Path(self._settings.socket or default_socket()).absolute()
        labels = {"daemon": instance_of_path(socket), "engine": str(self._kv_transfer_config.engine_id or "")[:12]}
        self._publisher = Publisher(f"{os.getpid()}-{who}", self._counters, gauges, labels=labels)

    @guarded(_nothing)
    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Who this worker is. MultiConnector passes on one child's handshake only, and a transport beside us needs it more:

        there the identity goes with the first step's worker metadata.
        """
        if get_kv_transfer_group() is self:
            return KvdHandshake(self._identity)
        self._introduction = {self._vllm_config.parallel_config.rank: self._identity}
        return None

    @guarded(_nothing)
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        plan = self._plan()
        if not plan.loads:
            return
        if self._worker is None:
            # Accepted by the scheduler, so it must be reported: nobody else ends the wait.
            self._results.received |= {load.request_id for load in plan.loads}
            self._results.failed |= {load.request_id for load in plan.loads}
            return
        self._worker.start(plan.loads, fenced=not _frees_late())

    @guarded(_nothing)
    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are complete before their request is scheduled: there is nothing to wait for.

        Layer by layer beside the forward pass is what the engine offers for synchronous loads only, and those are not safe in
        0.32: their blocks count as cached at once, so when a load fails, other requests with this prefix are computed from
        what was never filled (seen: wrong tokens, with a chunk limit that lets them run before the first one is recomputed).
        """

    @guarded(_nothing)
    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are saved whole, all layers at once, in `wait_for_save`."""

    @guarded(_nothing)
    def wait_for_save(self) -> None:
        if self._worker is not None:
            plan = self._plan()
            self._worker.save(plan.saves)
            self._worker.tell_unsaved(plan.unsaved)

    @guarded(KVConnectorTransferResults)
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results, self._results = self._results, Results()
        if self._worker is not None:
            fresh = self._worker.results(finished_req_ids)
            results.received |= fresh.received
            results.failed |= fresh.failed
            # Asked for next, in the same step: reported a step later, the engine would already have sampled from garbage.
            self._results.bad_blocks = fresh.bad_blocks
        return KVConnectorTransferResults(finished_recving=results.received, failed_recving=results.failed)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        results = self.get_transfer_results(finished_req_ids)
        return None, results.finished_recving or None

    @guarded(set)
    def get_block_ids_with_load_errors(self) -> set[int]:
        bad, self._results.bad_blocks = self._results.bad_blocks, set()
        return bad

    @guarded(_nothing)
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        report = self._worker.report() if self._worker is not None else Report()
        report.identities, self._introduction = self._introduction, {}
        return KvdWorkerMetadata(report) if report.failed or report.identities else None

    def _plan(self) -> Plan:
        metadata = self._connector_metadata
        if not isinstance(metadata, KvdMetadata):
            return Plan()
        if metadata.known.none_hash:
            self._known = metadata.known
        return metadata.plan

    def describe(self) -> dict[str, Any]:
        """Who this worker is and how it is doing, as plain JSON: see `describe`."""
        return describe.of_worker(
            self._vllm_config,
            self._kv_cache_config,
            self._identity,
            settings=self._settings,
            known=self._known,
            saves=self._saves,
            loads=self._loads,
            links=self._links,
        )

    # ---- scheduler side ----------------------------------------------------------------------------------------------

    @guarded(_nothing)
    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]) -> None:
        self._shake([metadata[rank] for rank in sorted(metadata)])

    @guarded(_nothing)
    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        self._shake([metadata[rank] for rank in sorted(metadata)])

    def _shake(self, metadata: Sequence[KVConnectorHandshakeMetadata]) -> None:
        ranks = [one.identity for one in metadata if isinstance(one, KvdHandshake)]
        if ranks:
            self._meet(ranks)

    def _meet(self, ranks: Sequence[RankIdentity]) -> None:
        if self._scheduler is None:
            return
        parallel = self._vllm_config.parallel_config
        problem = self._scheduler.introduce(ranks, parallel.tensor_parallel_size * parallel.pipeline_parallel_size)
        if problem:
            logger.warning("kvd: nothing will be stored: %s", problem)
            return
        wait_up(self._links.lookup(), CONNECT_WAIT_S if self._links.daemon_expected() else 0.2)
        self._publish("scheduler", self._links.lookup(), len(self._scheduler.groups))
        logger.info(
            "kvd: ready: chunks of %d tokens, %d ranks, %d cache groups, daemon %s",
            self._scheduler.chunk,
            len(ranks),
            len(self._scheduler.groups),
            "connected" if self._links.lookup().up else "not there yet",
        )

    @guarded(_nothing)
    def on_new_request(self, request: "Request") -> None:
        if self._scheduler is not None:
            self._scheduler.arrived(request)

    @guarded(lambda: (0, False))
    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        tokens = self._scheduler.match(request, num_computed_tokens) if self._scheduler is not None else 0
        return tokens, bool(tokens)  # asynchronous, always: see wait_for_layer_load

    @guarded(_nothing)
    def update_state_after_alloc(self, request: "Request", blocks: Any, num_external_tokens: int) -> None:
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    @guarded(dict)
    def get_external_cache_hit_sources(self, request: "Request", num_external_tokens: int) -> dict[Any, int]:
        """Which tier a hit came from, for vLLM's `prompt_tokens_cached_by_source`. What several hosts share has no word there."""
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        told = self._scheduler.sources_of(request.request_id) if self._scheduler is not None else {}
        names = {"arena": CacheHitSource.HOST, "disk": CacheHitSource.DISK, "remote": CacheHitSource.EXTERNAL_UNSPECIFIED}
        found = {names[name]: tokens for name, tokens in told.items()}
        return found if sum(found.values()) == num_external_tokens else {CacheHitSource.EXTERNAL_UNSPECIFIED: num_external_tokens}

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        if self._scheduler is None:
            return KvdMetadata()
        plan = self._planned(scheduler_output)
        known, self._known = self._known, Known()
        return KvdMetadata(plan if plan is not None else self._scheduler.doomed(), known)

    @guarded(_nothing)
    def _planned(self, output: "SchedulerOutput") -> Plan | None:
        assert self._scheduler is not None
        state = getattr(output, "kv_connector_block_state", None)
        new = {request.req_id: request for request in output.scheduled_new_reqs}
        steps = [Step(r.req_id, r.num_computed_tokens, output.num_scheduled_tokens[r.req_id]) for r in new.values()]
        cached = output.scheduled_cached_reqs
        steps += [
            Step(request_id, computed, output.num_scheduled_tokens[request_id])
            for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        ]

        def table_of(request_id: str) -> Sequence[Sequence[int]] | None:
            return state.get_block_ids(request_id) if state is not None else None

        return self._scheduler.plan(steps, table_of)

    @guarded(_nothing)
    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        if self._scheduler is None:
            return
        metadata = connector_output.kv_connector_worker_meta
        report = metadata.report if isinstance(metadata, KvdWorkerMetadata) else Report()
        if report.identities:
            self._meet([report.identities[rank] for rank in sorted(report.identities)])
        self._scheduler.heard(
            sorted(connector_output.finished_recving or ()),
            sorted(getattr(connector_output, "failed_recving", None) or ()),
            report,
        )

    @guarded(lambda: (False, None))
    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        if self._scheduler is not None:
            self._scheduler.finished(request.request_id)
        return False, None

    @guarded(lambda: (False, None))
    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self._scheduler is not None:
            self._scheduler.finished(request.request_id)
        return False, None

    @guarded(lambda: False)
    def reset_cache(self) -> bool | None:
        return self._scheduler.reset() if self._scheduler is not None else True

    @guarded(tuple)
    def take_events(self) -> Iterable[Any]:
        return ()

    # ---- both sides --------------------------------------------------------------------------------------------------

    @guarded(_nothing)
    def get_kv_connector_stats(self) -> "prometheus.KvdStats | None":
        grown = self._counters.growth()
        return prometheus.KvdStats(data=grown) if grown else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> "prometheus.KvdStats":
        return prometheus.KvdStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> "prometheus.KvdPrometheus":
        return prometheus.KvdPrometheus(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @guarded(_nothing)
    def shutdown(self) -> None:
        # First, since it takes no time: the engine kills its processes when it has waited long enough, or at once.
        if self._publisher is not None:
            self._publisher.close()
        if self._worker is not None:
            self._worker.shutdown()
        if self._scheduler is not None:
            self._scheduler.close()
        self._links.close()


def _frees_late() -> bool:
    """Whether the engine frees a request's blocks only when no step under way writes into them any more.

    It does so for consumers. The role that counts is the outermost connector's: under a MultiConnector that is a producer, as in
    front of a transport, blocks come to our loads while a step may still write the token that nobody wants.
    """
    outermost = get_kv_transfer_group() if has_kv_transfer_group() else None
    config = getattr(outermost, "_kv_transfer_config", None)
    return bool(getattr(config, "is_kv_consumer", False))


def _meant(extra: dict[str, Any] | None) -> Settings:
    """The settings. What cannot be meant ends the start: the engine shows an error's text only, so the hint goes into it."""
    try:
        return read_settings(extra)
    except UsageError as error:
        raise UsageError(f"{error.message} ({error.hint})" if error.hint else error.message) from None


def _hash_source(algorithm: str) -> tuple[str, str]:
    """What the engine's block hashes are made with. NONE_HASH is the seed as used, random ones included."""
    from vllm.v1.core import kv_cache_utils

    none_hash = getattr(kv_cache_utils, "NONE_HASH", None)
    return algorithm, bytes(none_hash).hex() if none_hash is not None else os.environ.get("PYTHONHASHSEED", "")
