"""Every number of the gate as one table; /metrics and the stats segment are two renderings of it.

A row is a metric, as the stats segment describes one, and its value. Labels are only ever configured model names, so the
table is as long as the configuration and no longer; beyond 64 models the segment adds the later ones up under `other`.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from kvgate.router import Router
from kvgate.sleep import State
from kvgate.traffic import BOUNDS_S, Histogram
from kvtools.segments.stats import Metric

STATES = tuple(State)
_STATE_HELP = "What the model is: " + ", ".join(f"{i} {state.value}" for i, state in enumerate(STATES))


class Row(NamedTuple):
    """One value and what it means."""

    metric: Metric
    value: float


def _row(name: str, kind: str, unit: str, text: str, labels: dict[str, str], value: float) -> Row:
    return Row(Metric(name, kind, unit, text, labels, float=unit == "seconds" and kind != "bucket"), value)


_TRAFFIC = (
    ("requests_total", "counter", "", "Requests that named this model", "requests_total"),
    ("requests_succeeded_total", "counter", "", "Answered below status 400, whole", "succeeded_total"),
    ("requests_failed_total", "counter", "", "Answered with status 400 or more, broken off, or not at all", "failed_total"),
    ("requests_cancelled_total", "counter", "", "Ended by the client", "cancelled_total"),
    ("requests_in_flight", "gauge", "", "Requests that run or wait", "in_flight"),
    ("prompt_tokens_total", "counter", "tokens", "Prompt tokens, where the engine reported usage", "prompt_tokens_total"),
    (
        "completion_tokens_total",
        "counter",
        "tokens",
        "Completion tokens, where the engine reported usage",
        "completion_tokens_total",
    ),
    ("stream_chunks_total", "counter", "", "Server-sent events passed on", "stream_chunks_total"),
    ("response_bytes_total", "counter", "bytes", "Body bytes passed on", "response_bytes_total"),
)
_MACHINE = (
    ("sleeps_total", "Times put to sleep"),
    ("wakes_total", "Times woken"),
    ("sleep_failures_total", "Sleeps the engine refused or did not finish"),
    ("wake_failures_total", "Wake-up attempts that failed"),
)


def table(router: Router) -> Iterator[Row]:
    """All rows, in a fixed order."""
    yield _row("models", "gauge", "", "Configured models", {}, len(router.backends))
    for name, backend in router.backends.items():
        record, machine, lane = router.traffic.models[name], backend.machine, backend.lane
        labels = {"model": name}
        for metric, kind, unit, text, field in _TRAFFIC:
            yield _row(metric, kind, unit, text, labels, getattr(record, field))
        yield _row("idle_seconds", "gauge", "seconds", "Since the last request began or ended", labels, router.traffic.idle_s(name))
        for metric, text in _MACHINE:
            yield _row(metric, "counter", "", text, labels, getattr(machine, metric))
        yield _row("wake_seconds", "gauge", "seconds", "What the last wake-up took", labels, machine.last_wake_s)
        yield _row("healthy", "gauge", "", "1 when the last health check found the engine", labels, int(machine.reachable))
        yield _row("requests_running", "gauge", "", "Requests that are with the engine", labels, lane.running)
        yield _row("requests_queued", "gauge", "", "Requests that wait for a place", labels, lane.waiting)
        yield _row(
            "queue_rejected_total", "counter", "", "Requests refused because the queue was full", labels, lane.rejected_total
        )
        yield _row("queue_timeouts_total", "counter", "", "Requests whose time in the queue ran out", labels, lane.timeouts_total)
        yield _row("state", "gauge", "", _STATE_HELP, labels, STATES.index(machine.state))
        yield from _histogram("latency_seconds", "Arrival to the end of the answer", labels, record.latency)
        yield from _histogram("first_byte_seconds", "Arrival to the first byte of the answer", labels, record.first_byte)


def _histogram(name: str, text: str, labels: dict[str, str], histogram: Histogram) -> Iterator[Row]:
    total = 0
    for bound, count in zip((*map(str, BOUNDS_S), "+Inf"), histogram.counts, strict=True):
        total += count
        yield _row(f"{name}_bucket", "bucket", "seconds", text, {**labels, "le": bound}, total)
    yield _row(f"{name}_sum", "counter", "seconds", text, labels, histogram.total_s)
    yield _row(f"{name}_count", "counter", "", text, labels, total)


def prometheus(rows: Iterable[Row]) -> str:
    """The table in Prometheus' text format: rows of one metric together, names with the prefix kvgate_."""
    families: dict[str, list[Row]] = {}
    for row in rows:
        families.setdefault(row.metric.name, []).append(row)
    lines: list[str] = []
    described: set[str] = set()
    for name, members in families.items():
        family, kind = name, members[0].metric.type
        for suffix in ("_bucket", "_sum", "_count"):
            if name.endswith("seconds" + suffix):
                family, kind = name.removesuffix(suffix), "histogram"
        if family not in described:
            described.add(family)
            lines += [f"# HELP kvgate_{family} {members[0].metric.help}", f"# TYPE kvgate_{family} {kind}"]
        for row in members:
            labels = ",".join(f'{key}="{_escape(value)}"' for key, value in row.metric.labels.items())
            lines.append(f"kvgate_{name}{{{labels}}} {row.value}" if labels else f"kvgate_{name} {row.value}")
    return "\n".join(lines) + "\n"


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
