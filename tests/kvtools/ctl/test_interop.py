"""kvcached's segments in our tools and ours in its tools: recorded results always, the real programs where they are at hand.

KVCACHED_SRC names a checkout of kvcached, KVCACHED_PYTHON an interpreter with numpy and posix_ipc (this one if not set). Its
package wants some torch to be importable before anything else; its command line never uses it, so where there is none an
empty module stands in for it.
"""

import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtools.segments import pool
from tests.support.processes import Ran, run_cli

from .conftest import GiB, MiB

CASES = Path(__file__).parents[2] / "cases" / "kvcached"
SEGMENTS: dict[str, str] = json.loads((CASES / "segments.json").read_text())


@pytest.fixture
def theirs(shm: Path) -> Path:
    """A folder with the bytes that kvcached's tracker wrote."""
    for name, data in SEGMENTS.items():
        (shm / name).write_bytes(bytes.fromhex(data))
    return shm


def test_our_json_says_of_each_segment_what_theirs_says_first(kvctl: Callable[..., Ran], theirs: Path) -> None:
    recorded = json.loads((CASES / "list.json").read_text())
    ours = kvctl("list", "--json").json()["segments"]
    assert [{key: one[key] for key in list(one)[:3]} for one in ours] == recorded
    assert [list(one)[:3] for one in ours] == [list(one) for one in recorded], "in the same order"


def test_our_table_has_their_columns_and_percentages(kvctl: Callable[..., Ran], theirs: Path) -> None:
    def cells(text: str) -> list[tuple[str, str]]:
        return [(line.split()[0], re.findall(r"[\d.]+ %", line)[0]) for line in text.splitlines()[1:]]

    ours = kvctl("list").stdout
    assert ours.split("\n")[0].split()[:4] == ["IPC", "Limit", "Used", "%"]
    assert cells(ours) == cells((CASES / "list.txt").read_text())


@pytest.mark.parametrize("one", json.loads((CASES / "limit.json").read_text()), ids=lambda one: f"{one['ipc']} {one['size']}")
def test_our_limit_leaves_the_bytes_that_theirs_leaves(kvctl: Callable[..., Ran], shm: Path, one: dict[str, str]) -> None:
    (shm / one["ipc"]).write_bytes(bytes.fromhex(one["before"]))
    assert kvctl("limit", one["ipc"], one["size"], "--yes").rc == 0
    assert (shm / one["ipc"]).read_bytes().hex() == one["after"]


class Kvcached:
    """The real one: its command line and its tracker, run from a checkout."""

    def __init__(self, source: Path, stand_in: Path) -> None:
        self._python = os.environ.get("KVCACHED_PYTHON", sys.executable)
        self._env = {**os.environ, "PYTHONPATH": f"{source}:{stand_in}", "TERM": "xterm"}

    def kvctl(self, *words: str) -> Ran:
        ran = subprocess.run(
            [self._python, "-m", "kvcached.cli.kvctl", *words],
            env=self._env,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
        return Ran(ran.returncode, ran.stdout, ran.stderr)

    def track(self, name: str, body: str) -> "subprocess.Popen[str]":
        """A process with its MemInfoTracker `t` on segment `name`, running `body` and then waiting for a line."""
        head = f"from kvcached.mem_info_tracker import MemInfoTracker\nt = MemInfoTracker({8 * GiB})\n"
        code = f"{head}{body}\nprint('up', flush=True)\ninput()"
        words = [self._python, "-c", code]
        tracker = subprocess.Popen(
            words, env={**self._env, "KVCACHED_IPC_NAME": name}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert tracker.stdout is not None
        assert tracker.stdout.readline() == "up\n"
        return tracker

    def kvtop(self, *names: str) -> str:
        """What its kvtop draws in its first two seconds."""
        pid, fd = pty.fork()
        if pid == 0:
            os.execve(self._python, [self._python, "-m", "kvcached.cli.kvtop", *names], self._env)
        shown, deadline = b"", time.monotonic() + 15
        while time.monotonic() < deadline and b"Press" not in shown:
            if select.select([fd], [], [], 0.1)[0]:
                shown += os.read(fd, 65536)
        os.write(fd, b"q")
        while True:
            try:
                if not os.read(fd, 65536):
                    break
            except OSError:
                break
        os.close(fd)
        os.waitpid(pid, 0)
        return shown.decode(errors="replace")


if os.environ.get("KVCACHED_SRC"):

    @pytest.fixture
    def kvcached(tmp_path: Path) -> Kvcached:
        (tmp_path / "stand-in").mkdir()
        (tmp_path / "stand-in" / "torch.py").write_text("")
        return Kvcached(Path(os.environ["KVCACHED_SRC"]), tmp_path / "stand-in")

    def test_their_tools_work_on_our_segments(kvcached: Kvcached, shm_name: Callable[[], str]) -> None:
        name = shm_name()
        pool.create_pool(name, 8 * GiB, used_bytes=3 * GiB, prealloc_bytes=256 * MiB)
        listed = {one["ipc"]: one for one in kvcached.kvctl("list", "--json").json()}
        assert listed[name] == {"ipc": name, "limit_bytes": 8 * GiB, "used_bytes": 3 * GiB}
        assert kvcached.kvctl("limit", name, "4G").rc == 0
        reading = pool.read_pool(name)
        assert (reading.limit_bytes, reading.used_bytes, reading.prealloc_bytes) == (4 * GiB, 3 * GiB, 256 * MiB)
        assert name in kvcached.kvtop(name)
        assert f"Deleted IPC '{name}'" in kvcached.kvctl("delete", name).stdout
        assert not Path("/dev/shm", name).exists()

    def test_our_tools_work_on_a_live_tracker_of_theirs(kvcached: Kvcached, shm_name: Callable[[], str]) -> None:
        name = shm_name()
        obey = "import time\nwhile (n := t.check_and_get_resize_target({0}, 4, 2)) is None: time.sleep(0.01)\nprint(n, flush=True)"
        tracker = kvcached.track(name, f"t.update_memory_usage({3 * GiB}, {256 * MiB})")
        shown: dict[str, Any] = run_cli("kvctl", "show", name, "--json").json()
        assert (shown["used_bytes"], shown["prealloc_bytes"], shown["state"]) == (3 * GiB, 256 * MiB, "unknown")
        assert [one["pid"] for one in shown["likely_owners"]] == [tracker.pid]
        ran = run_cli("kvctl", "delete", name, "--yes")
        assert (ran.rc, f"pid {tracker.pid}" in ran.stderr) == (5, True)
        assert run_cli("kvctl", "limit", name, "4G").rc == 0
        tracker.communicate("\n")
        assert not Path("/dev/shm", name).exists(), "its own end removes its segment"
        follower = kvcached.track(
            name, f"import threading\nthreading.Thread(target=lambda: exec({obey.format(GiB)!r}, dict(t=t))).start()"
        )
        assert run_cli("kvctl", "limit", name, "4G").rc == 0
        assert follower.stdout is not None
        assert follower.stdout.readline().strip() == str(4 * GiB // 8), "the limit a real tracker of theirs sees is ours"
        follower.communicate("\n")

    def test_their_recorded_results_are_still_theirs(kvcached: Kvcached) -> None:
        try:
            for name, data in SEGMENTS.items():
                Path("/dev/shm", name).write_bytes(bytes.fromhex(data))
            listed = [one for one in kvcached.kvctl("list", "--json").json() if one["ipc"] in SEGMENTS]
        finally:
            for name in SEGMENTS:
                Path("/dev/shm", name).unlink(missing_ok=True)
        assert listed == json.loads((CASES / "list.json").read_text())
