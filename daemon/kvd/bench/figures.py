"""One measurement beside its floor: what it is, how it is timed, and how far the bench has come."""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtools.output import note
from kvtools.units import format_duration, format_rate

LEAST_PAIRS = 3
BAR = 24


@dataclass
class Figure:
    """One measurement and the floor's in the same run.

    `unit`: B/s and keys/s, where `ratio` is measured/floor and more is better; s, where less is. `size`: bytes of a value
    (0: none), `clients`: processes at once, `floor_is`: what the floor does.
    """

    name: str
    size: int
    clients: int
    rate: float
    unit: str
    floor: float
    floor_is: str
    ratio: float

    def shown(self, value: float) -> str:
        """A value of this figure for people."""
        if self.unit == "s":
            return format_duration(value)
        return format_rate(value) if self.unit == "B/s" else f"{value / 1e6:.2f} M/s"


def pairwise(job: Callable[[], object], floor: Callable[[], object], seconds: float) -> tuple[float, float, float]:
    """(median seconds of job, of floor, median of floor/job), the two in turn for `seconds`, at least three pairs."""
    job()
    floor()
    pairs: list[tuple[float, float]] = []
    end = time.perf_counter() + seconds
    while len(pairs) < LEAST_PAIRS or time.perf_counter() < end:
        start = time.perf_counter()
        floor()
        middle = time.perf_counter()
        job()
        pairs.append((time.perf_counter() - middle, middle - start))
    took = statistics.median(a for a, _ in pairs)
    least = statistics.median(b for _, b in pairs)
    return took, least, statistics.median(b / a for a, b in pairs)


def medians(jobs: Sequence[Callable[[], object]], seconds: float) -> list[float]:
    """Median seconds of one call of each job, for jobs of microseconds: fifty calls of each in turn."""
    times: list[list[float]] = [[] for _ in jobs]
    for job in jobs:
        job()
    end = time.perf_counter() + seconds
    while len(times[0]) < 3 * 50 or time.perf_counter() < end:
        for kept, job in zip(times, jobs, strict=True):
            for _ in range(50):
                start = time.perf_counter()
                job()
                kept.append(time.perf_counter() - start)
    return [statistics.median(kept) for kept in times]


class Progress:
    """A bar on a terminal, a line a step elsewhere; on stderr, as all that is not data."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.done = 0
        self._live = sys.stderr.isatty()

    def step(self, what: str) -> None:
        """The next measurement begins."""
        if self._live:
            full = BAR * self.done // max(1, self.steps)
            sys.stderr.write(f"\r\033[K[{'#' * full}{'.' * (BAR - full)}] {self.done + 1}/{self.steps} {what}")
            sys.stderr.flush()
        else:
            note(f"{what} ...")
        self.done += 1

    def of(self, about: str) -> Callable[[str], None]:
        """`step` for measurements of one kind."""
        return lambda what: self.step(f"{what}, {about}")

    def end(self) -> None:
        """Take the bar off the screen."""
        if self._live:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()
