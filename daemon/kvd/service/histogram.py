"""Latencies as cumulative buckets: what a stats segment and Prometheus can both show."""

from bisect import bisect_left
from collections.abc import Callable

from kvtools.segments.stats import Metric

BOUNDS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)

Row = tuple[Metric, Callable[[], float]]


class Histogram:
    """Seconds, counted by bucket. One thread observes; a reader may see a bucket one observation ahead of another."""

    __slots__ = ("counts", "total_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.total_s = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.total_s += seconds

    @property
    def count(self) -> int:
        return sum(self.counts)

    def up_to(self, bound: int) -> int:
        """Observations in the first `bound` + 1 buckets."""
        return sum(self.counts[: bound + 1])

    def rows(self, name: str, help_: str, labels: dict[str, str]) -> list[Row]:
        """`<name>_bucket` a bound (label le, seconds, +Inf last), `<name>_sum` and `<name>_count`."""
        made: list[Row] = []
        for i, bound in enumerate((*map(str, BOUNDS_S), "+Inf")):
            metric = Metric(f"{name}_bucket", "bucket", "seconds", help_, {**labels, "le": bound})
            made.append((metric, lambda i=i: self.up_to(i)))  # type: ignore[misc]
        made.append((Metric(f"{name}_sum", "counter", "seconds", help_, labels, float=True), lambda: self.total_s))
        made.append((Metric(f"{name}_count", "counter", "", help_, labels), lambda: self.count))
        return made
