"""What engines' connectors say of themselves: is the daemon there, what do loads and saves move, did anything fail.

A connector publishes one stats segment a process of its engine (a scheduler, and a worker a rank), so every figure here is a sum
over segments; each counts in one process only. Pure functions over snapshots.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvtop.history import History
from kvtop.snapshot import FRESH, Snapshot, Stats

KIND = "connector"


@dataclass(frozen=True, slots=True)
class Connectors:
    """The connectors of a host together."""

    all: tuple[Stats, ...]
    fresh: tuple[Stats, ...]

    def total(self, name: str) -> float:
        """Sum of a value over all that publish it."""
        return sum(values_of(stats).get(name, 0.0) for stats in self.fresh)

    def rate(self, history: History, name: str) -> float | None:
        """Sum of a counter's rates; None before the second reading of any."""
        rates = [rate for stats in self.fresh if (rate := history.rate(f"{stats.name}/{name}")) is not None]
        return sum(rates) if rates else None

    @property
    def away(self) -> Sequence[Stats]:
        """Those whose daemon is not there."""
        return [stats for stats in self.fresh if values_of(stats).get("daemon_up") == 0]


def connectors_of(snapshot: Snapshot) -> Connectors:
    """The connectors of a snapshot."""
    found = tuple(stats for stats in snapshot.stats if stats.kind == KIND)
    return Connectors(found, tuple(stats for stats in found if stats.state == FRESH))


def values_of(stats: Stats) -> Mapping[str, float]:
    """Its values without labels, by name."""
    return {
        series.name: value
        for series, value in zip(stats.schema, stats.values, strict=False)
        if not series.labels and series.kind != "bucket"
    }
