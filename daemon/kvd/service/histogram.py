"""Latencies as cumulative buckets: what a stats segment and Prometheus can both show."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from kvtools.segments.stats import Metric

TIER_BOUNDS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Of calls into a tier: 0.1 ms to 10 s."""
OPERATION_BOUNDS_S = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0)
"""Of requests: 10 us, which is a look into RAM, to 5 s, which is a client's patience."""


class Changing(Protocol):
    """What several rows belong to. `changes` differs whenever one of their values does: who publishes compares it first."""

    @property
    def changes(self) -> object: ...


class Row(NamedTuple):
    """A metric and what reads its value now. `of`: what it changes together with, if anything."""

    metric: Metric
    read: Callable[[], float]
    of: Changing | None = None


class Histogram:
    """Seconds, counted by bucket. One thread observes; a reader may see a bucket one observation ahead of another."""

    __slots__ = ("bounds", "count", "counts", "total_s")

    def __init__(self, bounds: Sequence[float] = TIER_BOUNDS_S) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.count = 0
        self.total_s = 0.0

    @property
    def changes(self) -> object:
        return self.count

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.total_s += seconds
        self.count += 1

    def up_to(self, bound: int) -> int:
        """Observations in the first `bound` + 1 buckets."""
        return sum(self.counts[: bound + 1])

    def rows(self, name: str, help_: str, labels: dict[str, str]) -> list[Row]:
        """`<name>_bucket` a bound (label le, seconds, +Inf last), `<name>_sum` and `<name>_count`."""
        made: list[Row] = []
        for i, bound in enumerate((*map(str, self.bounds), "+Inf")):
            metric = Metric(f"{name}_bucket", "bucket", "seconds", help_, {**labels, "le": bound})
            made.append(Row(metric, lambda i=i: self.up_to(i), self))  # type: ignore[misc]
        made.append(Row(Metric(f"{name}_sum", "counter", "seconds", help_, labels, float=True), lambda: self.total_s, self))
        made.append(Row(Metric(f"{name}_count", "counter", "", help_, labels), lambda: self.count, self))
        return made
