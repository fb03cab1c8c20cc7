"""Pytest plugin: counts the tests that passed against real parts, and in CI turns a skip into a failure.

A test that runs against a real thing (an engine, the daemon, a terminal) carries `@pytest.mark.real("kvd", ...)`. When
KVTEST_COUNTS names a file, the plugin leaves one JSON object there for `tests.support.suites`, which adds them up:

    {"passed": 12, "failed": 1, "skipped": 1, "real": {"kvd": 7}, "declared": ["kvd", "tmux"], "skips": [[test, reason]],
     "failures": [[test, "call"]]}

`failures` says in which phase each failed (setup, call, teardown, collect). `declared` holds every part that some collected
test names, so that a part whose tests all vanished is noticed.
"""

import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import in_ci

ALLOWED_SKIPS = (
    (r"needs an? (AMD|NVIDIA) GPU", "no GPU on the machines that run continuous integration"),
    (r"needs hipFile", "needs AMD's driver and library"),
    (r"needs cuFile", "needs NVIDIA's driver and library"),
)
"""Skips that CI accepts: a pattern of the reason, and why that is fine there."""


def allowed(reason: str) -> str:
    """Why CI accepts this skip; empty where it does not."""
    return next((why for pattern, why in ALLOWED_SKIPS if re.search(pattern, reason)), "")


class RealParts:
    """Counts outcomes. One instance a pytest run (xdist's workers report to the controller, so it counts there)."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.real: Counter[str] = Counter()
        self.declared: set[str] = set()
        self.skips: list[tuple[str, str]] = []
        self.failures: list[tuple[str, str]] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            parts = [str(part) for mark in item.iter_markers("real") for part in mark.args]
            if parts:
                self.declared.update(parts)
                item.user_properties.append(("real", ",".join(sorted(set(parts)))))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            self._skip(report)
        elif report.failed:
            self.outcomes["failed"] += 1
            self.failures.append((report.nodeid, str(report.when)))
        elif report.when == "call":
            self.outcomes["passed"] += 1
            for name, value in report.user_properties:
                if name == "real":
                    self.real.update(str(value).split(","))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self._skip(report)
        elif report.failed:
            self.outcomes["failed"] += 1
            self.failures.append((report.nodeid, "collect"))

    def _skip(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        self.outcomes["skipped"] += 1
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        self.skips.append((report.nodeid, reason.removeprefix("Skipped: ")))

    @property
    def refused(self) -> list[tuple[str, str]]:
        """Skips that fail the run, in CI."""
        return [(test, reason) for test, reason in self.skips if not allowed(reason)] if in_ci() else []

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.refused and session.exitstatus == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if path := os.environ.get("KVTEST_COUNTS"):
            counts: dict[str, Any] = {
                **{word: self.outcomes[word] for word in ("passed", "failed", "skipped")},
                "real": dict(self.real),
                "declared": sorted(self.declared),
                "skips": self.skips,
                "failures": self.failures,
            }
            Path(path).write_text(json.dumps(counts))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for test, reason in self.refused:
            terminalreporter.write_line(f"SKIP REFUSED in CI: {test}: {reason}", red=True)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(RealParts(), "kvtools-real-parts")
