"""The connector's live numbers in shared memory: `/dev/shm/kvtools.connector.<pid>-<rank>`, one for each process.

kvtop and kvdoctor read them without asking the engine. A thread writes them twice a second and beats the heart; the
engine's threads only ever touch the counters. No room in shared memory costs the numbers, never the engine.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvd.connector.metrics import COUNTERS, REASONED, REASONS, Counters, split
from kvtools.errors import KvError
from kvtools.segments.files import SHM
from kvtools.segments.stats import Metric, StatsReader, StatsWriter, find_stats, remove_unlocked

logger = logging.getLogger("vllm.kvd")

PERIOD_S = 0.5

GAUGES = {
    "daemon_up": ("", "1 while the daemon is connected, 0 while it is looked for"),
    "loads_active": ("", "requests being loaded now"),
    "chunk_tokens": ("tokens", "tokens stored as one value"),
    "groups": ("", "cache groups stored"),
}


def _unit(name: str) -> str:
    return next((unit for unit in ("bytes", "seconds", "tokens") if name.endswith(f"_{unit}")), "")


INFO = "process_info"


def metrics(labels: Mapping[str, str] = MappingProxyType({})) -> list[Metric]:
    """The schema: every counter as `<name>_total`, then the gauges, and what this process belongs to as labels of one more."""
    counted = [
        Metric(f"{name}_total", "counter", _unit(name), text, float=name.endswith("_seconds")) for name, text in COUNTERS.items()
    ]
    for name, text in REASONED.items():
        counted += [Metric(f"{name}_total", "counter", "", text, {"reason": reason}) for reason in REASONS]
    gauges = [Metric(name, "gauge", unit, text) for name, (unit, text) in GAUGES.items()]
    return [*counted, *gauges, Metric(INFO, "gauge", "", "1; whose process this is is in the labels", dict(labels))]


class Publisher:
    """Writes one segment until closed. `gauges` is asked each time; it must be quick and thread-safe."""

    def __init__(
        self,
        instance: str,
        counters: Counters,
        gauges: Callable[[], Mapping[str, int]],
        *,
        labels: Mapping[str, str] = MappingProxyType({}),
        root: Path = SHM,
    ) -> None:
        self._counters = counters
        self._gauges = gauges
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        try:
            self._sweep(root)
            self._writer = StatsWriter("connector", instance, metrics(labels), root=root)
            self._writer.set(self._writer.index(INFO, **labels), 1)
        except KvError as error:
            logger.warning("kvd: no numbers in shared memory: %s", error)
            return
        self._thread = threading.Thread(target=self._run, name="kvd-segment", daemon=True)
        self._thread.start()

    @staticmethod
    def _sweep(root: Path) -> None:
        """Remove what engines left that were killed: every engine has another name, so no successor would."""
        for path in find_stats(root, "connector"):
            remove_unlocked(path)

    def close(self) -> None:
        """Write the last numbers and remove the segment."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(timeout=2.0)
            self._thread = None
            self._writer.close()

    def _run(self) -> None:
        while True:
            self._write()
            if self._ended.wait(PERIOD_S):
                return

    def _write(self) -> None:
        writer = self._writer
        with writer.update():
            for key, value in self._counters.values().items():
                name, reason = split(key)
                writer.set(writer.index(f"{name}_total", **({"reason": reason} if reason else {})), value)
            for name, number in self._gauges().items():
                writer.set(writer.index(name), number)
        writer.heartbeat()


def engines(daemon: str, *, root: Path = SHM) -> list[dict[str, Any]]:
    """The engines on this host that belong to a daemon (its instance), each with the sums of its live processes' counters.

    `external_hit_rate` is what vLLM shows as its external prefix cache hit rate since start; None before the first request.
    """
    found: dict[str, dict[str, Any]] = {}
    for path in find_stats(root, "connector"):
        try:
            with StatsReader(path) as reader:
                reading = reader.read()
        except KvError:
            continue
        info = next((metric.labels for metric in reading.schema if metric.name == INFO), {})
        if not reading.alive or info.get("daemon") != daemon:
            continue
        engine = found.setdefault(info.get("engine", ""), {"engine": info.get("engine", ""), "processes": 0})
        engine["processes"] += 1
        for metric, value in zip(reading.schema, reading.values, strict=True):
            if metric.type == "counter":
                engine[metric.name] = engine.get(metric.name, 0) + value
    for engine in found.values():
        asked = engine.get("query_tokens_total", 0)
        engine["external_hit_rate"] = engine.get("query_hit_tokens_total", 0) / asked if asked else None
    return list(found.values())
