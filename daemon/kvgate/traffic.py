"""What each model is asked, how fast it answers, and since when nobody asked.

    begin(model) -> Ticket -> first_byte -> finish(status) or gone()

Counted at both ends: a request is *in flight* from `begin` to its end, and both move "last activity", so a stream that
runs for an hour is an hour of activity. A success is a final status below 400 whose body was passed on whole; a failure
is any status of 400 and more, an engine that broke off, and no answer at all; a client that went away is neither.

Kept per model: totals; one slot a second for the last hour (windowed rates at any rate of requests); histograms of latency
and time to first byte since the start. Kept over all models: the last 10 000 finished requests, from which windowed
quantiles are taken. Only configured models have a record, so a made-up name leaves no trace.

Concurrency: one event loop, no locks, nothing here waits.
"""

import time
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

HISTORY = 10_000
WINDOW_MAX_S = 3600
BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Upper bounds of the latency histograms' buckets; the last bucket has none."""


class Finished(NamedTuple):
    """One request that is over. Times in seconds on the monitor's clock."""

    model: str
    ended: float
    latency_s: float
    first_byte_s: float | None
    ok: bool


class Slots:
    """A count a second over the last hour; a slot is cleared when its second comes round again."""

    def __init__(self) -> None:
        self._counts = array("L", bytes(array("L").itemsize * WINDOW_MAX_S))
        self._seconds = array("Q", bytes(8 * WINDOW_MAX_S))

    def add(self, now: float) -> None:
        second = int(now)
        i = second % WINDOW_MAX_S
        if self._seconds[i] != second:
            self._seconds[i], self._counts[i] = second, 0
        self._counts[i] += 1

    def total(self, now: float, window_s: float) -> int:
        """Events in the last `window_s` seconds, the current second included (whole slots)."""
        oldest = now - min(window_s, WINDOW_MAX_S)
        return sum(count for count, second in zip(self._counts, self._seconds, strict=True) if oldest < second <= now)


@dataclass
class Histogram:
    """Counts by BOUNDS_S (the last one: above all of them), and the sum."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    total_s: float = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.total_s += seconds


@dataclass
class ModelTraffic:
    """One model's record."""

    name: str
    known_since: float
    in_flight: int = 0
    requests_total: int = 0
    succeeded_total: int = 0
    failed_total: int = 0
    cancelled_total: int = 0
    prompt_tokens_total: int = 0
    completion_tokens_total: int = 0
    stream_chunks_total: int = 0
    response_bytes_total: int = 0
    last_activity: float | None = None
    last_activity_wall: float | None = None
    latency: Histogram = field(default_factory=Histogram)
    first_byte: Histogram = field(default_factory=Histogram)
    arrivals: Slots = field(default_factory=Slots)
    failures: Slots = field(default_factory=Slots)

    def idle_s(self, now: float) -> float:
        """Seconds since anything happened; 0 while a request is in flight. A model never asked is idle since it is known."""
        if self.in_flight:
            return 0.0
        return max(0.0, now - (self.known_since if self.last_activity is None else self.last_activity))


class Ticket:
    """One request on its way; `finish` or `gone` exactly once (a second call does nothing)."""

    __slots__ = ("_first_byte_s", "_monitor", "_over", "_record", "_started", "chunks")

    def __init__(self, monitor: "TrafficMonitor", record: ModelTraffic, started: float) -> None:
        self._monitor, self._record, self._started = monitor, record, started
        self._first_byte_s: float | None = None
        self._over = False
        self.chunks = 0

    def first_byte(self) -> None:
        """The first byte of the answer's body is here."""
        if self._first_byte_s is None:
            self._first_byte_s = self._monitor.clock() - self._started
            self._record.first_byte.add(self._first_byte_s)

    def finish(self, ok: bool, *, sent: int = 0, prompt_tokens: int = 0, completion_tokens: int = 0) -> None:
        """The request is over, well or not."""
        if self._over:
            return
        record = self._record
        now = self._end(sent)
        if ok:
            record.succeeded_total += 1
        else:
            record.failed_total += 1
            record.failures.add(now)
        record.prompt_tokens_total += prompt_tokens
        record.completion_tokens_total += completion_tokens
        latency = now - self._started
        record.latency.add(latency)
        self._monitor.history.append(Finished(record.name, now, latency, self._first_byte_s, ok))

    def gone(self, *, sent: int = 0) -> None:
        """The client went away before the end."""
        if not self._over:
            self._end(sent)
            self._record.cancelled_total += 1

    def _end(self, sent: int) -> float:
        self._over = True
        record = self._record
        record.in_flight -= 1
        record.stream_chunks_total += self.chunks
        record.response_bytes_total += sent
        return self._monitor.touch(record)


class TrafficMonitor:
    """The records of all models."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time) -> None:
        self.clock, self.wall = clock, wall
        self.models: dict[str, ModelTraffic] = {}
        self.history: deque[Finished] = deque(maxlen=HISTORY)

    def know(self, names: Iterable[str]) -> None:
        """Keep records for exactly `names`: new ones start empty, the others' are forgotten."""
        names = list(names)
        now = self.clock()
        self.models = {name: self.models.get(name) or ModelTraffic(name, now) for name in names}

    def begin(self, model: str) -> Ticket:
        """A request for `model`, which must be known, has arrived."""
        record = self.models[model]
        record.in_flight += 1
        record.requests_total += 1
        now = self.touch(record)
        record.arrivals.add(now)
        return Ticket(self, record, now)

    def touch(self, record: ModelTraffic) -> float:
        now = self.clock()
        record.last_activity, record.last_activity_wall = now, self.wall()
        return now

    def idle_s(self, model: str) -> float:
        return self.models[model].idle_s(self.clock())

    def stats(self, model: str, window_s: float, idle_threshold_s: float) -> dict[str, object]:
        """The peer's fields (rates a minute, times in seconds), then ours. Raises KeyError for an unknown model."""
        record = self.models[model]
        now = self.clock()
        recent = [done for done in self.history if done.model == model and done.ended > now - window_s]
        latencies = sorted(done.latency_s for done in recent)
        first_bytes = sorted(done.first_byte_s for done in recent if done.first_byte_s is not None)
        finished = record.succeeded_total + record.failed_total
        idle_s = record.idle_s(now)
        minutes = max(min(window_s, WINDOW_MAX_S), 1.0) / 60.0
        return {
            "total_requests": record.requests_total,
            "successful_requests": record.succeeded_total,
            "failed_requests": record.failed_total,
            "request_rate": round(record.arrivals.total(now, window_s) / minutes, 3),
            "avg_response_time": round(record.latency.total_s / finished, 6) if finished else 0.0,
            "last_activity_time": record.last_activity_wall,
            "idle_time_seconds": round(idle_s, 3),
            "is_idle": idle_s >= idle_threshold_s,
            "cancelled_requests": record.cancelled_total,
            "in_flight": record.in_flight,
            "failure_rate": round(record.failures.total(now, window_s) / minutes, 3),
            "latency_seconds": quantiles(latencies),
            "first_byte_seconds": quantiles(first_bytes),
            "prompt_tokens": record.prompt_tokens_total,
            "completion_tokens": record.completion_tokens_total,
            "stream_chunks": record.stream_chunks_total,
            "response_bytes": record.response_bytes_total,
        }


def quantiles(ordered: list[float]) -> dict[str, float | None]:
    """p50, p90 and p99 of sorted values (nearest rank); None where there are none."""

    def rank(part: float) -> float | None:
        return round(ordered[min(len(ordered) - 1, int(part * len(ordered)))], 6) if ordered else None

    return {"p50": rank(0.5), "p90": rank(0.9), "p99": rank(0.99)}
