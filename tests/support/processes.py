"""Commands as an operator runs them, and what a test may have left behind.

Every test process carries KVTEST_RUN in its environment, which its children inherit: a process that outlives its
test is found by that mark in /proc, also after it was re-parented.
"""

import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCRIPTS = Path(sysconfig.get_path("scripts"))
SHARED_MEMORY = Path("/dev/shm")
RUN_ID = uuid.uuid4().hex[:12]
PREFIX = f"kvt-{RUN_ID[:6]}-"
"""What every pool segment of this run is named with, so that parallel runs on one machine do not meet."""

_MARK = f"KVTEST_RUN={RUN_ID}".encode()


@dataclass(frozen=True)
class Ran:
    """A finished command: its exit status and what it wrote."""

    rc: int
    stdout: str
    stderr: str

    def json(self) -> Any:
        """stdout as one JSON value; an AssertionError with both streams where it is none."""
        try:
            return json.loads(self.stdout)
        except ValueError:
            raise AssertionError(f"not JSON on stdout (exit {self.rc}): {self.stdout!r}; stderr: {self.stderr!r}") from None


def run_cli(
    command: str, *words: str | Path, env: Mapping[str, str] | None = None, stdin: str | None = None, timeout_s: float = 30.0
) -> Ran:
    """Run the console script `command` of this environment as a real process, with no terminal."""
    run = subprocess.run(
        [str(SCRIPTS / command), *map(str, words)],
        env={**os.environ, **(env or {})},
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    return Ran(run.returncode, run.stdout, run.stderr)


def run_python(code: str, *, env: Mapping[str, str] | None = None, timeout_s: float = 30.0) -> Ran:
    """Run `code` in a fresh interpreter of this environment."""
    run = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=timeout_s
    )
    return Ran(run.returncode, run.stdout, run.stderr)


def in_ci() -> bool:
    """Whether this is continuous integration, where nothing may be skipped."""
    return os.environ.get("CI", "").lower() in {"1", "true", "yes"}


def mark_environment() -> None:
    """Put this run's mark into the environment, for `survivors`."""
    os.environ["KVTEST_RUN"] = RUN_ID


def survivors() -> list[str]:
    """Processes of this run other than ourselves and our ancestors, as "pid command line"."""
    own = {os.getpid()}
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) in own:
            continue
        try:
            if _MARK in (folder / "environ").read_bytes().split(b"\0"):
                words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if words:  # a zombie has none: it is dead, its parent has not asked yet
                    found.append(f"{folder.name} {words.strip()}")
        except OSError:
            continue  # gone meanwhile, or not ours to read
    return found


def children() -> set[int]:
    """Pids of our live direct children; helpers of the interpreter itself (multiprocessing's tracker) not counted."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            pids = (task / "children").read_text().split()
        except OSError:
            continue
        for pid in pids:
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes()
            except OSError:
                continue
            if words and b"resource_tracker" not in words and b"forkserver" not in words:
                found.add(int(pid))
    return found


def mounts() -> set[str]:
    """What is mounted where."""
    return {" ".join(line.split()[:2]) for line in Path("/proc/self/mounts").read_text().splitlines()}


def shared_names() -> set[str]:
    """This run's entries in shared memory: what carries PREFIX."""
    return {name for name in os.listdir(SHARED_MEMORY) if name.startswith(PREFIX)}


def wait_until(condition: Any, *, timeout_s: float = 10.0, interval_s: float = 0.01, what: str = "the condition") -> Any:
    """The first true answer of `condition()`. AssertionError naming `what` when none comes in time."""
    deadline = time.monotonic() + timeout_s
    while True:
        if answer := condition():
            return answer
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout_s:g} s for {what}")
        time.sleep(interval_s)


def freeze(pid: int) -> None:
    """SIGSTOP, and wait until all of its threads stand still: on a busy machine one of them may answer once more."""
    os.kill(pid, signal.SIGSTOP)
    tasks = Path(f"/proc/{pid}/task")
    wait_until(lambda: all(map(_stands, tasks.iterdir())), what="all threads to stop")


def _stands(task: Path) -> bool:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return True  # it ended meanwhile


def compile_sources() -> None:
    """Byte-compile the packages: start-up tests measure what an installed command costs, whatever the environment says."""
    root = Path(__file__).resolve().parents[2]
    folders = [str(root / name) for name in ("kvtools", "tui/kvtop", "probes/kvdoctor", "daemon/kvd", "daemon/kvgate")]
    # A file that does not compile fails the tests that import it, with a better message than this could give.
    subprocess.run([sys.executable, "-m", "compileall", "-qq", *folders], check=False, stdin=subprocess.DEVNULL)
