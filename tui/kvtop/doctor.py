"""kvdoctor's answers for the doctor view: its facts and rules (kvdoctor.api), run on a thread, never by the screen.

Commands are not run and no probe file is made: what a dashboard does by itself must be cheap and leave no trace. The full look is
the command kvdoctor's. kvdoctor is part of the same package but may be missing from a cut-down installation; that is then said.
"""

import time
from dataclasses import dataclass
from pathlib import Path

from kvtools.segments.files import SHM

DEADLINE_S = 5.0


@dataclass(frozen=True, slots=True)
class Check:
    """One check's result, flat."""

    id: str
    group: str
    status: str
    title: str
    observed: str
    expected: str
    why: str
    fix: str
    scope: str
    need: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What the doctor said, or why it could not."""

    direct: str
    posix: str
    checks: tuple[Check, ...]
    next_step: str
    at_s: float
    took_s: float
    problem: str = ""


def examine(shm: Path = SHM) -> Diagnosis:
    """Look at this host, with its segments in `shm`. Takes up to `DEADLINE_S` and never raises."""
    begun = time.monotonic()
    try:
        from kvdoctor.api import collect_host, judge

        report = judge(collect_host(run_tools=False, deadline_s=DEADLINE_S, shm=shm))
    except Exception as error:  # noqa: BLE001 - the thread's edge: whatever a host does to the doctor, the dashboard goes on
        return Diagnosis("unknown", "unknown", (), "", time.time(), time.monotonic() - begun, f"{type(error).__name__}: {error}")
    checks = tuple(
        Check(
            result.id, result.group, result.status, result.title, result.observed, result.expected,
            result.why, result.fix, result.scope, result.need,
        )
        for result in report.results
    )  # fmt: skip
    return Diagnosis(report.verdict, report.posix, checks, report.next_step, time.time(), time.monotonic() - begun)
