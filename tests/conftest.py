"""Fixtures of all suites. The daemon is in tests/support/daemon.py, running commands in tests/support/processes.py."""

import importlib.util
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import processes
from tests.support.processes import Ran, in_ci

pytest_plugins = ["tests.support.real_parts", "tests.support.daemon"]

HAVE_ENGINE = importlib.util.find_spec("vllm") is not None

if importlib.util.find_spec("hypothesis") is not None:
    from hypothesis import settings

    # How long an example takes says how busy this machine is; pytest-timeout ends what hangs.
    settings.register_profile("kvtools", deadline=None)
    settings.load_profile("kvtools")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave files for the engine to the environment that has it, and there, under `-m vllm`, leave out the rest."""
    if collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    for_engine = "mark.vllm" in collection_path.read_text(errors="replace")
    only_engine = HAVE_ENGINE and "vllm" in (config.getoption("markexpr", "") or "")
    return True if (for_engine and not HAVE_ENGINE) or (only_engine and not for_engine) else None


@pytest.fixture(scope="session", autouse=True)
def _whole_run() -> Iterator[None]:
    """Commands start from compiled sources, with signals as a shell would leave them, and no process outlives the run."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):  # nohup and background jobs have them ignored: it is inherited
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    processes.mark_environment()
    processes.compile_sources()
    yield
    left = _patiently(processes.survivors)
    assert not left, f"processes left behind: {left}"


@pytest.fixture(autouse=True)
def _no_leaks() -> Iterator[None]:
    """No process, mount or named piece of shared memory outlives its test."""

    def present() -> tuple[set[str], set[str], set[str]]:
        # Mounts name nobody: they may be those of a suite beside this one, whose runner compares them before and after all.
        mounts = processes.mounts() if in_ci() and "KVTEST_BESIDE" not in os.environ else set()
        return set(map(str, processes.children())), mounts, processes.shared_names()

    before = present()

    def left() -> list[str]:
        now = present()
        return [f"{kind} {name}" for kind, old, new in zip(_KINDS, before, now, strict=True) for name in sorted(new - old)]

    yield
    remaining = _patiently(left)
    assert not remaining, f"the test left behind: {remaining}"


_KINDS = ("process", "mount", "shared memory")


def _patiently(check: Callable[[], list[str]]) -> list[str]:
    """What `check` still finds after a second: a process that was just killed needs a moment to go."""
    deadline = time.monotonic() + 1.0
    while (left := check()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


@pytest.fixture
def shm_name() -> Iterator[Callable[[], str]]:
    """Makes names for pool segments that nobody else uses; what they name, and its sidecar, is removed after the test."""
    names: list[str] = []
    numbers = itertools.count()

    def make(stem: str = "seg") -> str:
        names.append(f"{processes.PREFIX}{stem}{next(numbers)}")
        return names[-1]

    yield make
    for name in names:
        for path in (processes.SHARED_MEMORY / name, processes.SHARED_MEMORY / f"{name}.kvtools"):
            path.unlink(missing_ok=True)


@pytest.fixture
def cli() -> Callable[..., Ran]:
    """Runs a console script as a real process: `cli("kvctl", "list", "--json").json()`."""
    return processes.run_cli
