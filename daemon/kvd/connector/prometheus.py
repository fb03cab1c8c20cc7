"""The counters in vLLM's own metrics: one `vllm:kvd_<name>` counter each, on the engine's /metrics and in get_metrics()."""

from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvd.connector.metrics import COUNTERS, REASONED, join, split, summary


class KvdStats(KVConnectorStats):
    """The growth of the counters since the last report, joined over ranks and processes by adding up."""

    data: dict[str, float]

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        join(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        return summary(self.data)

    def is_empty(self) -> bool:
        return not self.data


class KvdPrometheus(KVConnectorPromMetrics):
    """Registers the counters in the front end's process; the metric classes are those vLLM hands in."""

    def __init__(
        self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter = metric_types[Counter]
        # Every series is there from the start, at 0: a rate needs a beginning, and an absent series means an absent connector.
        self._counters: dict[tuple[str, int], Any] = {}
        for name, text in COUNTERS.items():
            metric = counter(name=f"vllm:kvd_{name}", documentation=f"kvd: {text}.", labelnames=labelnames)
            for engine, labels in per_engine_labelvalues.items():
                self._counters[name, engine] = metric.labels(*labels)
        self._reasoned = {
            name: counter(name=f"vllm:kvd_{name}", documentation=f"kvd: {text}.", labelnames=[*labelnames, "reason"])
            for name, text in REASONED.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for key, value in transfer_stats_data.items():
            name, reason = split(key)
            if value <= 0:
                continue
            if reason and name in self._reasoned:
                self._reasoned[name].labels(*self.per_engine_labelvalues[engine_idx], reason).inc(value)
            elif (name, engine_idx) in self._counters:
                self._counters[name, engine_idx].inc(value)
