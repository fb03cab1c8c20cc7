"""The entry point `vllm.general_plugins`: KVTOOLS_SEGMENT=NAME makes an engine's KV cache elastic, and nothing else does.

It runs in every process of an engine before the model runner is imported, and puts hooks where that process will pass:

engine core   Executor.initialize_from_config   the workers have their memory: begin the session (vllm_engine)
              Executor.sleep, wake_up           the prefix cache is forgotten before contents are
workers       WorkerWrapperBase.init_device     the worker's class is known: give it elastic memory (vllm_worker)
server        CoreEngineProcManager.shutdown    the engine core has a moment to take its files away

Refusals are errors at the start, each with what to do: an engine of another version (what is hooked here is no public
interface: see VERSIONS), a part that is not where it should be, kvcached beside it. Without KVTOOLS_SEGMENT (or
kvcached's ENABLE_KVCACHED) nothing is imported and nothing is touched.
"""

import functools
import importlib.util
import logging
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from kvtools.elastic.settings import Settings, claim, read_settings
from kvtools.errors import KvError, Refused

logger = logging.getLogger("vllm.kvtools")

VERSIONS = ((0, 32), (0, 33))
"""Releases of vLLM whose inside this was written for: 0.32 is what the tests run, 0.33 was compared name by name."""


def register() -> None:
    """What vLLM calls in each of its processes."""
    if not (os.environ.get("KVTOOLS_SEGMENT") or os.environ.get("ENABLE_KVCACHED")):
        return
    try:
        settings = _decide(os.environ)
        if settings is None:
            return
        _check_version()
        _hook(settings)
    except KvError as error:
        raise RuntimeError(told(error)) from None


def told(error: KvError) -> str:
    """An error of ours as one line for vLLM's traceback: it prints no hints."""
    return f"kvtools: {error.message}" + (f" ({error.hint})" if error.hint else "")


def _decide(environ: Mapping[str, str]) -> Settings | None:
    """The settings where the pool is asked for, None where it stays off. Raises Refused, UsageError."""
    reason = claim(environ, kvcached_installed=importlib.util.find_spec("kvcached") is not None)
    if reason:
        logger.warning("kvtools: %s", reason)
        return None
    settings = read_settings(environ)
    if settings.segment is None:
        return None
    for notice in settings.notices:
        logger.warning("kvtools: %s", notice)
    return settings


def _check_version() -> None:
    import vllm

    found = re.match(r"(\d+)\.(\d+)", vllm.__version__)
    if found is None or (int(found[1]), int(found[2])) not in VERSIONS:
        known = ", ".join(f"{major}.{minor}" for major, minor in VERSIONS)
        raise Refused(
            f"the elastic pool knows vLLM {known}, and this is {vllm.__version__}",
            hint="unset KVTOOLS_SEGMENT to run without it, or install a release of kvtools for this vLLM",
        )


def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Put `make(original)` in place of `owner.name`, once. Raises Refused when there is no such thing."""
    original = getattr(owner, name, None)
    if original is None:
        where = getattr(owner, "__name__", str(owner))
        raise Refused(
            f"this vLLM has no {where}.{name}, which the elastic pool needs",
            hint="unset KVTOOLS_SEGMENT, or install a release of kvtools for this vLLM",
        )
    if getattr(original, "_kvtools", False):
        return
    made = make(original)
    made._kvtools = True
    setattr(owner, name, made)


GRACE_S = 15.0
"""How long an engine core may take to end before its server kills it: what vLLM itself gives on ROCm, for what holds devices."""


def patient(original: Any) -> Any:
    """`CoreEngineProcManager.shutdown` that lets the engine core end.

    A server that is ended with SIGTERM (systemd, containers, Ctrl-C) passes the signal on and kills the engine core in the
    same instant, unless --shutdown-timeout says otherwise: the pool's files would be left behind, as if it had crashed.
    """

    @functools.wraps(original)
    def shutdown(self: Any, timeout: float | None = None) -> Any:
        # A zero that is what is left of a longer time is no zero of ours: that time is over.
        at_once = timeout == 0 and not getattr(self, "_request_shutdown_timeout", 0)
        return original(self, GRACE_S if at_once else timeout)

    return shutdown


def _hook(settings: Settings) -> None:
    from vllm.v1.executor.abstract import Executor
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    def initialize(original: Any) -> Any:
        def initialize_from_config(self: Any, kv_cache_configs: Any) -> Any:
            from kvtools.elastic import vllm_engine

            if not any(config.kv_cache_tensors for config in kv_cache_configs):
                logger.warning("kvtools: this model has no KV cache, so KVTOOLS_SEGMENT means nothing here")
                return original(self, kv_cache_configs)
            try:
                vllm_engine.check(self, settings, kv_cache_configs)
                result = original(self, kv_cache_configs)
                vllm_engine.begin(self, settings)
            except KvError as error:
                raise RuntimeError(told(error)) from None
            return result

        return initialize_from_config

    def device(original: Any) -> Any:
        def init_device(self: Any, *args: Any, **more: Any) -> Any:
            from kvtools.elastic import vllm_worker

            vllm_worker.install(type(self.worker), settings)
            return original(self, *args, **more)

        return init_device

    def asleep(original: Any) -> Any:
        def sleep(self: Any, level: int = 1) -> Any:
            from kvtools.elastic import vllm_engine

            session = vllm_engine.session_of(self)
            if session is None or self.is_sleeping:
                return original(self, level)
            session.before_sleep()
            return original(self, level)

        return sleep

    def awake(original: Any) -> Any:
        def wake_up(self: Any, tags: list[str] | None = None) -> Any:
            from kvtools.elastic import vllm_engine

            result = original(self, tags)
            session = vllm_engine.session_of(self)
            if session is not None:
                session.after_wake(tags)
            return result

        return wake_up

    from vllm.v1.engine.utils import CoreEngineProcManager

    if hasattr(CoreEngineProcManager, "shutdown"):
        replace(CoreEngineProcManager, "shutdown", patient)
    replace(Executor, "initialize_from_config", initialize)
    replace(Executor, "sleep", asleep)
    replace(Executor, "wake_up", awake)
    replace(WorkerWrapperBase, "init_device", device)
