"""`kvtools demo` as a process: the story with its numbers, and that nothing is left however it ends."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd.demo.pool import NAME
from kvtools.segments.owner import OwnerInfo, OwnerLock
from tests.support.processes import SCRIPTS, SHARED_MEMORY, run_cli, survivors, wait_until

pytestmark = [pytest.mark.real("kvd", "segments"), pytest.mark.timeout(120)]


def nothing_left(scratch: Path) -> None:
    """No folder, no daemon, no segment."""
    assert list(scratch.iterdir()) == []
    assert [line for line in survivors() if str(scratch) in line] == []
    assert not (SHARED_MEMORY / NAME).exists()
    assert not (SHARED_MEMORY / f"{NAME}.kvtools").exists()


def test_the_story(tmp_path: Path) -> None:
    ran = run_cli("kvtools", "demo", "--path", tmp_path, timeout_s=90)
    assert ran.rc == 0, ran.stderr
    steps = re.findall(r"^(\d)\. ", ran.stdout, re.MULTILINE)
    assert steps == list("1234567")
    from_ram, from_disk = re.findall(r"96 of 96 found: hit rate 100%, (\d+) of them from disk", ran.stdout)
    assert (from_ram, from_disk) == ("0", "96")
    assert ran.stdout.count("every byte is the one that was stored") == 2
    assert "durability: none" not in ran.stdout
    assert len(re.findall(r"[\d.]+ [KMG]iB/s", ran.stdout)) >= 3
    assert ran.stdout.endswith("Done. The daemon, the segment and the scratch folder are gone.\n")
    nothing_left(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("after", ["1. Start", "3. Read it back", "ready in"])
def test_stopped_in_the_middle(tmp_path: Path, number: signal.Signals, after: str) -> None:
    demo = subprocess.Popen(
        [str(SCRIPTS / "kvtools"), "demo", "--path", str(tmp_path)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert demo.stdout is not None
    for line in demo.stdout:
        if after in line:
            break
    demo.send_signal(number)
    _, errors = demo.communicate(timeout=60)
    assert demo.returncode == 130
    assert "Traceback" not in errors
    nothing_left(tmp_path)


def test_ends_with_one_line_when_something_is_in_the_way(tmp_path: Path) -> None:
    """Another demo holds the pool: refused with its name, and the daemon that was started goes again."""
    with OwnerLock.acquire(NAME, OwnerInfo("another demo")):
        ran = run_cli("kvtools", "demo", "--path", tmp_path, timeout_s=90)
    assert ran.rc == 5
    assert ran.stderr.startswith("kvtools: error: ")
    assert len(ran.stderr.strip().splitlines()) <= 2
    nothing_left(tmp_path)


def test_no_folder() -> None:
    ran = run_cli("kvtools", "demo", "--path", "/dev/null/none")
    assert (ran.rc, ran.stdout) == (2, "")
    assert ran.stderr.startswith("kvtools: error: not a folder: /dev/null/none\nhint: ")


def test_no_engine(tmp_path: Path) -> None:
    ran = run_cli("kvtools", "demo", "--engine", tmp_path)
    assert ran.rc == 2
    assert len(ran.stderr.strip().splitlines()) == 2


@pytest.fixture
def terminal() -> Iterator[list[str]]:
    """A tmux server of its own; the list is its command."""
    if not shutil.which("tmux"):
        pytest.skip("needs tmux: apt-get install tmux")
    command = ["tmux", "-L", f"kvt-{uuid.uuid4().hex[:8]}"]
    subprocess.run([*command, "-f", "/dev/null", "new-session", "-d", "-x", "120", "-y", "40", "sh"], check=True)
    yield command
    subprocess.run([*command, "kill-server"], check=True)
    wait_until(lambda: subprocess.run([*command, "ls"], capture_output=True).returncode != 0, what="tmux to end")


@pytest.mark.real("tmux")
def test_on_a_terminal_it_ends_in_kvtop(tmp_path: Path, terminal: list[str]) -> None:
    def screen() -> str:
        return subprocess.run([*terminal, "capture-pane", "-p"], capture_output=True, text=True, check=True).stdout

    line = shlex.join([str(SCRIPTS / "kvtools"), "demo", "--path", str(tmp_path)])
    subprocess.run([*terminal, "send-keys", f"{line}; echo status=$?", "Enter"], check=True)
    wait_until(lambda: NAME in screen() and "1. Start" not in screen() and "$ kvtop" not in screen(), timeout_s=60, what="kvtop")
    subprocess.run([*terminal, "send-keys", "q"], check=True)
    wait_until(lambda: "status=0" in screen(), timeout_s=30, what="the end of the demo")
    assert "Done." in screen()
    nothing_left(tmp_path)
