"""kill -9 of a real process in the middle of real writes: what survives reads back exactly or is a miss."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def kill(path: Path, rounds: int, budget: int) -> dict[str, int]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.kvd.disk.killer", str(path), str(rounds), "1", str(budget)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'daemon'}"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("budget", [2 << 30, 64 << 20], ids=["roomy", "evicting"])
def test_kill_in_the_middle_of_writes(tmp_path, budget):
    seen = kill(tmp_path / "store", 20, budget)
    assert seen["rounds"] == 20
    assert seen["hits"] > 0
    assert seen["notes"] > 40
    # A killed process leaves no page cache behind that the kernel would not write: nothing is ever found damaged.
    assert seen["corruptions"] == 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("budget", [2 << 30, 64 << 20], ids=["roomy", "evicting"])
def test_kill_in_the_middle_of_writes_many_rounds(tmp_path, budget):
    seen = kill(tmp_path / "store", 200, budget)
    assert (seen["rounds"], seen["corruptions"]) == (200, 0)
