"""The runner behind `make test`, `make check`, `make lint` and `make slow`.

    python -m tests.support.suites all      linters, the base suite, the engine suite; a part nobody tested fails the run
    python -m tests.support.suites check    linters and the base suite
    python -m tests.support.suites lint     linters only
    python -m tests.support.suites slow     what is marked slow, in both environments

Each suite is a pytest process in its own environment (.venv, .venv-vllm); they run side by side, since most tests wait for
processes and time-outs rather than for a core. That is a load which no other machine has, so up to AGAIN_AT_MOST tests that
failed in it are run once more when all is quiet; one that passes then is named as such, with its first failure
above, and is a defect all the same: of the test or of what it tests. The last lines say, for all suites together, how many
tests passed and how many of those ran against each real part. Exit status 0 only when everything passed.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from kvtools.segments.stats import remove_unlocked
from tests.support import system_packages
from tests.support.processes import in_ci, mounts
from tests.support.real_parts import allowed

ROOT = Path(__file__).resolve().parents[2]
BASE = ROOT / ".venv" / "bin"
ENGINE = ROOT / ".venv-vllm" / "bin"
BESIDE = {
    "tiers": ["tests/kvd/adapters"],
    "tools": ["tests/kvtop", "tests/kvdoctor", "tests/kvgate"],
}
"""Parts of the base suite that are suites of their own: servers that hang or are away, screens, mounts that do not answer."""
AGAIN_AT_MOST = 3
"""Failed tests that get a second run. More of them are no accident."""
REQUIRED = ("vllm", "kvd", "segments", "tmux")
"""Real parts that `all` must have tested, beside those that some test declares."""


@dataclass
class Outcome:
    """What became of one step, and of the tests in it."""

    name: str
    ok: bool
    seconds: float
    counts: Counter[str] = field(default_factory=Counter)
    real: Counter[str] = field(default_factory=Counter)
    declared: set[str] = field(default_factory=set)
    skips: list[tuple[str, str]] = field(default_factory=list)
    failures: list[tuple[str, str]] = field(default_factory=list)
    output: str = ""
    status: int = 0
    """pytest's exit status; 1: tests failed, and nothing worse."""
    only_alone: list[str] = field(default_factory=list)
    """Tests that failed beside the others and passed when run again."""

    def line(self) -> str:
        tests = "".join(f", {self.counts[word]} {word}" for word in ("passed", "failed", "skipped") if self.counts.total())
        return f"{self.name}: {'ok' if self.ok else 'FAILED'}{tests} ({self.seconds:.0f} s)"


def lint() -> Outcome:
    """All linters, two at a time; only what is wrong is shown."""
    pages = sorted(str(page) for page in (ROOT / "man" / "man1").glob("*.1"))
    commands: list[list[str]] = [
        [str(BASE / "mypy")],
        [str(BASE / "ruff"), "check", "."],
        [str(BASE / "ruff"), "format", "--check", "."],
        [str(BASE / "lint-imports")],
        *[["bash", "-n", str(script)] for script in (ROOT / ".ci" / "run", ROOT / "tests" / "support" / "setup.sh")],
    ]
    missing_mandoc = not shutil.which("mandoc")
    if pages and not missing_mandoc:
        commands.append(["mandoc", "-T", "lint", "-W", "warning", *pages])

    def run(command: list[str]) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL)

    start = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        runs = list(pool.map(run, commands))
    ok = not (missing_mandoc and in_ci())
    for command, ended in zip(commands, runs, strict=True):
        if ended.returncode != 0:
            ok = False
            print(f"--- {' '.join([Path(command[0]).name, *command[1:]])}\n{ended.stdout}{ended.stderr}", flush=True)
    if missing_mandoc:
        print("lint: mandoc is not installed: the man pages were not linted", flush=True)
    return Outcome("lint", ok, time.monotonic() - start)


def suite(name: str, python: Path, arguments: Sequence[str], *, aside: bool = False) -> Outcome:
    """One pytest process, its output as it comes, or at the end when it runs `aside` of another.

    Not `ok` when it could not run or its counts are missing.
    """
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvtools-suite-") as scratch:
        counts, log = Path(scratch) / "counts.json", Path(scratch) / "log"
        command = [str(python / "python"), "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
        environment = {**os.environ, "KVTEST_COUNTS": str(counts), "KVTEST_BESIDE": "1"}
        if not aside:
            print(f"=== {name} suite", flush=True)
        with log.open("wb") as file:
            run = subprocess.run(
                command,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                env=environment,
                stdout=file if aside else None,
                stderr=file if aside else None,
            )
        seconds = time.monotonic() - start
        found = json.loads(counts.read_text()) if counts.exists() else None
        output = f"=== {name} suite\n{log.read_text(errors='replace')}" if aside else ""
    if found is None:
        return Outcome(name, False, seconds, output=output)
    return Outcome(
        name,
        run.returncode == 0,
        seconds,
        Counter({word: found[word] for word in ("passed", "failed", "skipped")}),
        Counter(found["real"]),
        set(found["declared"]),
        [(test, reason) for test, reason in found["skips"]],
        [(test, phase) for test, phase in found["failures"]],
        output,
        run.returncode,
    )


def again(outcomes: Sequence[Outcome], pythons: Mapping[str, Path]) -> None:
    """Run once more, alone, what failed, where that is little and failed in no clean-up: what was left behind was left behind."""
    failed = [outcome for outcome in outcomes if outcome.failures]
    phases = {phase for outcome in failed for _, phase in outcome.failures}
    if sum(len(outcome.failures) for outcome in failed) > AGAIN_AT_MOST or phases & {"teardown", "collect"}:
        return
    for outcome in failed:
        tests = [test for test, _ in outcome.failures]
        second = suite(f"{outcome.name}, what failed, again", pythons[outcome.name], ["-m", "", *tests])
        if second.ok and second.counts == Counter(passed=len(tests)):
            outcome.ok, outcome.only_alone = outcome.status == 1, tests
            outcome.counts += Counter(passed=len(tests))
            outcome.counts["failed"] = 0
            outcome.real += second.real


def suites(which: str, *, engine: bool) -> list[Outcome]:
    """The base suite, its parts that have one of their own, and the engine's suite, side by side: each finds its own leftovers."""
    base = f"not vllm and {which}"
    aside = [(name, BASE, ["-m", base, *folders]) for name, folders in BESIDE.items()]
    aside += [("engine", ENGINE, ["-m", f"vllm and {which}"])] if engine else []
    with ThreadPoolExecutor(len(aside)) as pool:
        beside = [pool.submit(suite, name, python, words, aside=True) for name, python, words in aside]
        left_out = [f"--ignore={folder}" for folders in BESIDE.values() for folder in folders]
        outcomes = [suite("base", BASE, ["-m", base, *left_out])]
        for one in beside:
            outcomes.append(one.result())
            print(outcomes[-1].output, flush=True)
    again(outcomes, {"base": BASE, **{name: python for name, python, _ in aside}})
    return outcomes


def verdict(outcomes: Sequence[Outcome], *, everything: bool, leaked: Sequence[str], seconds: float) -> bool:
    """Print what happened and return whether all is well. The last two lines are the totals and the real parts."""
    total: Counter[str] = Counter()
    real: Counter[str] = Counter()
    declared = set(REQUIRED) if everything else set()
    for outcome in outcomes:
        total += outcome.counts
        real += outcome.real
        declared |= outcome.declared
    print()
    for outcome in outcomes:
        print(outcome.line())
        for test, reason in outcome.skips:
            print(f"  skipped: {test}: {reason}" + (f" (allowed: {why})" if (why := allowed(reason)) else ""))
        for test in outcome.only_alone:
            print(f"  failed beside the others, passed alone: {test}")
    for name in leaked:
        print(f"left behind: {name}")
    untested = sorted(part for part in declared if not real[part]) if everything else []
    if untested:
        print("no test passed against these real parts: " + ", ".join(untested))
    if not declared and not total:
        return all(outcome.ok for outcome in outcomes)
    print(f"{total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped in {seconds:.0f} s")
    print("real parts: " + " ".join(f"{part}={real[part]}" for part in sorted(declared | set(real), key=lambda p: (-real[p], p))))
    return all(outcome.ok for outcome in outcomes) and not untested and not (leaked and in_ci())


def ours_in_shared_memory(folder: Path = Path("/dev/shm")) -> set[str]:
    """Names there that look like this project's. On a machine where others test too, some may be theirs."""
    return {entry.name for entry in folder.iterdir() if entry.name.startswith(("kvtools.", "kvt-")) or entry.suffix == ".kvtools"}


def of_a_killed_process(name: str, folder: Path = Path("/dev/shm")) -> bool:
    """Whether this was live numbers whose writer is gone: what kill -9 leaves by design. It is removed, as `kvctl prune` does."""
    return name.startswith("kvtools.") and (remove_unlocked(folder / name) or not (folder / name).exists())


def main(words: Sequence[str]) -> int:
    mode = words[0] if len(words) == 1 else ""
    if mode not in {"all", "check", "lint", "slow"}:
        print("usage: python -m tests.support.suites all | check | lint | slow", file=sys.stderr)
        return 2
    start = time.monotonic()
    before, mounted = ours_in_shared_memory(), mounts()
    system_packages.ensure()
    outcomes = [] if mode == "slow" else [lint()]
    if mode != "lint":
        outcomes += suites("slow" if mode == "slow" else "not slow and not soak", engine=mode in {"all", "slow"})
    leaked = [f"{name} in shared memory" for name in sorted(ours_in_shared_memory() - before) if not of_a_killed_process(name)]
    leaked += [f"mount {name}" for name in sorted(mounts() - mounted)]
    return 0 if verdict(outcomes, everything=mode == "all", leaked=leaked, seconds=time.monotonic() - start) else 1


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
