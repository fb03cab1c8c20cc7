"""Timing: rounds of the thing and its floor in turn, so that both see the same machine; medians, so that one hiccup is none."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Result:
    """One measured number beside its floor. `budget` bounds `ratio`: at least it, or at most it when `at_most`."""

    name: str
    what: str
    value: float
    unit: str
    floor: float
    ratio: float
    budget: float
    at_most: bool = False

    @property
    def ok(self) -> bool:
        return self.ratio <= self.budget if self.at_most else self.ratio >= self.budget

    @property
    def half(self) -> bool:
        """Whether at least half the budget is reached."""
        return self.ratio <= 2 * self.budget if self.at_most else self.ratio >= self.budget / 2

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok}


def seconds(job: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    job()
    return time.perf_counter() - start


def in_turn(job: Callable[[], object], floor: Callable[[], object], *, rounds: int) -> tuple[float, float, float]:
    """Median seconds of `job`, of `floor`, and the median over rounds of floor/job (1.0: as fast as the floor)."""
    job()
    floor()
    times, floors = [], []
    for i in range(rounds):
        # Which goes first alternates too: the second finds warmer caches.
        first, second = (job, floor) if i % 2 else (floor, job)
        a, b = seconds(first), seconds(second)
        times.append(a if i % 2 else b)
        floors.append(b if i % 2 else a)
    ratio = statistics.median(f / t for f, t in zip(floors, times, strict=True))
    return statistics.median(times), statistics.median(floors), ratio


def medians(jobs: Sequence[Callable[[], object]], *, rounds: int) -> list[float]:
    """Median seconds of one call of each job, for jobs of microseconds: a hundred calls of each in turn, `rounds` times."""
    times: list[list[float]] = [[] for _ in jobs]
    for turn in range(rounds + 1):
        for kept, job in zip(times, jobs, strict=True):
            some = [seconds(job) for _ in range(100)]
            if turn:  # the first turn warms up
                kept += some
    return [statistics.median(kept) for kept in times]
