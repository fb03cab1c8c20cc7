"""The runner's own rules: what it counts, and that a skip in CI is a failure unless it is allowed by name."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support import suites
from tests.support.suites import Outcome, again, verdict

TESTS = """
import pytest

@pytest.mark.real("kvd", "disk")
def test_real(): pass

@pytest.mark.real("tmux")
def test_declared_but_skipped(): pytest.skip("{reason}")

@pytest.mark.real("kvd")
@pytest.mark.parametrize("n", [1, 2])
def test_twice(n): pass

def test_plain(): pass
"""


def run(folder: Path, reason: str, *, ci: bool) -> tuple[int, dict[str, Any], str]:
    """Exit status, counts and output of a pytest run over TESTS with only the counting plugin."""
    (folder / "test_some.py").write_text(TESTS.format(reason=reason))
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = real(part)\n")
    environment = {**os.environ, "KVTEST_COUNTS": str(folder / "counts.json"), "CI": "true" if ci else ""}
    root = Path(__file__).resolve().parents[2]
    environment["PYTHONPATH"] = str(root)
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "tests.support.real_parts", str(folder)],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
    )
    return ended.returncode, json.loads((folder / "counts.json").read_text()), ended.stdout


def test_counts_what_passed_against_each_part(tmp_path: Path) -> None:
    status, counts, _ = run(tmp_path, "no terminal", ci=False)
    assert status == 0
    assert (counts["passed"], counts["failed"], counts["skipped"]) == (4, 0, 1)
    assert counts["real"] == {"kvd": 3, "disk": 1}
    assert counts["declared"] == ["disk", "kvd", "tmux"]


def test_in_ci_a_skip_fails_the_run_and_is_named(tmp_path: Path) -> None:
    status, counts, output = run(tmp_path, "no terminal", ci=True)
    assert status == 1
    assert counts["skips"] == [["test_some.py::test_declared_but_skipped", "no terminal"]]
    assert "SKIP REFUSED in CI: test_some.py::test_declared_but_skipped: no terminal" in output


def test_in_ci_an_allowed_skip_passes(tmp_path: Path) -> None:
    status, _, _ = run(tmp_path, "needs an AMD GPU", ci=True)
    assert status == 0


def outcome(real: dict[str, int], *, ok: bool = True, passed: int = 5) -> Outcome:
    return Outcome("base", ok, 1.0, Counter(passed=passed), Counter(real), set(real))


def test_totals_and_parts_are_the_last_two_lines(capsys: pytest.CaptureFixture[str]) -> None:
    parts = {"vllm": 2, "kvd": 3, "segments": 1, "tmux": 1}
    assert verdict([outcome(parts), outcome({"kvd": 1})], everything=True, leaked=[], seconds=61.4)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == ["10 passed, 0 failed, 0 skipped in 61 s", "real parts: kvd=4 vllm=2 segments=1 tmux=1"]


def test_a_part_that_nobody_tested_fails_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert not verdict([outcome({"kvd": 3, "segments": 1, "tmux": 1, "redis": 0})], everything=True, leaked=[], seconds=1)
    assert "no test passed against these real parts: redis, vllm" in capsys.readouterr().out


def test_a_failed_step_fails_the_run() -> None:
    assert not verdict([outcome({}, ok=False)], everything=False, leaked=[], seconds=1)
    assert verdict([outcome({})], everything=False, leaked=[], seconds=1)


def test_what_is_left_in_shared_memory_fails_ci_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    assert not verdict([outcome({})], everything=False, leaked=["kvtools.kvd.x"], seconds=1)
    monkeypatch.delenv("CI")
    assert verdict([outcome({})], everything=False, leaked=["kvtools.kvd.x"], seconds=1)


@pytest.mark.parametrize(
    ("second", "phase", "count", "ok"),
    [
        ("passes", "call", 1, True),
        ("passes", "setup", 3, True),
        ("fails", "call", 1, False),
        ("passes", "teardown", 1, False),
        ("passes", "call", 4, False),
    ],
)
def test_what_failed_beside_others_gets_one_run_alone(
    second: str,
    phase: str,
    count: int,
    ok: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Few failures, none of them in a clean-up; and whoever reads the last lines learns of it."""
    marks = f"@pytest.mark.real('kvd')\n@pytest.mark.parametrize('n', range({count}))"
    (tmp_path / "test_some.py").write_text(f"import pytest\n{marks}\ndef test_it(n): assert {second == 'passes'}\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = real(part)\naddopts = -p tests.support.real_parts\n")
    monkeypatch.setattr(suites, "ROOT", tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    first = outcome({}, ok=False)
    first.status, first.failures = 1, [(f"test_some.py::test_it[{n}]", phase) for n in range(count)]
    first.counts["failed"] = count
    again([first], {"base": Path(sys.executable).parent})
    assert verdict([first], everything=False, leaked=[], seconds=1) is ok
    text = capsys.readouterr().out
    assert ("  failed beside the others, passed alone: test_some.py::test_it[0]" in text) is ok
    assert (f"{5 + count} passed, 0 failed" in text) is ok
