"""What `kvctl list` costs: CPU beside a bare interpreter, and modules that it must never load."""

import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvtools.segments import pool
from tests.support.processes import SCRIPTS, run_python

NEVER = {"rich", "textual", "pydantic", "asyncio", "psutil", "numpy", "torch", "yaml", "curses", "hashlib", "multiprocessing"}


def cpu_seconds(words: list[str], runs: int = 7) -> float:
    """The least CPU time of `words` over some runs: the minimum is what the work costs, the rest is the machine's."""
    best = float("inf")
    for _ in range(runs):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(words, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        best = min(best, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    return best


@pytest.mark.real("segments")
def test_listing_64_segments_costs_at_most_8_bare_interpreters(shm: Path) -> None:
    for i in range(64):
        pool.create_pool(f"kvcached_vLLM_{i}", 8 << 30, used_bytes=i << 26, root=shm)
    ratio = 0.0
    for attempt in range(4):
        bare = cpu_seconds([sys.executable, "-c", "pass"])
        ratio = cpu_seconds([str(SCRIPTS / "kvctl"), "--shm", str(shm), "list"]) / bare
        if ratio <= 8:
            return
        time.sleep(attempt)
    pytest.fail(f"kvctl list takes {ratio:.1f} times the CPU of python -c pass; the budget is 8")


@pytest.mark.parametrize(
    "words", [["list"], ["list", "--json"], ["limit", "x", "1G"], ["delete", "x", "--yes"], ["prune", "--yes"]]
)
def test_commands_load_nothing_heavy(shm: Path, words: list[str]) -> None:
    pool.create_pool("x", 8 << 30, root=shm)
    code = (
        "import json, sys; from kvtools import cli\n"
        f"status = cli.run_words('kvctl', 'kvtools.ctl.app:app', {['--shm', str(shm), *words]!r})\n"
        "sys.stderr.write('MODULES ' + json.dumps([status, sorted({name.partition('.')[0] for name in sys.modules})]))"
    )
    status, modules = json.loads(run_python(code).stderr.partition("MODULES ")[2])
    assert status == 0
    assert not set(modules) & NEVER


def test_segments_are_standard_library_only() -> None:
    code = (
        "import json, sys; from kvtools.segments import discover, files, owner, pool, stats\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules} - sys.stdlib_module_names)))"
    )
    foreign = set(json.loads(run_python(code).stdout)) - set(json.loads(run_python(_BARE).stdout))
    assert foreign == {"kvtools"}


_BARE = "import json, sys; print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules} - sys.stdlib_module_names)))"
