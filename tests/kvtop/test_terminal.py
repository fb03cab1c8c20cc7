"""The real command on a real terminal (tmux), against real segments that change underneath: seen, resized, used, left."""

import os
import re
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtools.segments import owner, pool
from kvtools.segments.stats import Metric, StatsWriter
from kvtop.recording import Recording
from tests.kvtop.scenes import GIB, MIB
from tests.support.processes import SCRIPTS, wait_until

pytestmark = [
    pytest.mark.real("tmux", "segments"),
    pytest.mark.skipif(not shutil.which("tmux"), reason="needs tmux: apt-get install tmux"),
]


class Tmux:
    """kvtop in a tmux of its own (a private socket), killed with it."""

    def __init__(self, folder: Path, size: tuple[int, int]) -> None:
        self._socket = f"kvt-{uuid.uuid4().hex[:8]}"
        self.folder = folder
        self.size = size
        self.before = ""
        """What the shell does first, such as `ulimit -f 4; `."""

    def run(self, *words: str) -> str:
        done = subprocess.run(["tmux", "-L", self._socket, *words], capture_output=True, text=True, timeout=10)
        return done.stdout

    def start(self, *words: str, **environment: str) -> None:
        """kvtop with these options; its exit status goes to a file."""
        # COLUMNS and LINES are exported on purpose: some shells do, and the screen must follow the terminal all the same.
        given = {"TERM": "xterm-256color", "LANG": "C.UTF-8", "COLUMNS": "80", "LINES": "24", **environment}
        settings = " ".join(f"{name}={value}" for name, value in given.items())
        command = (
            f"{self.before}env -u NO_COLOR {settings} {SCRIPTS / 'kvtop'} {' '.join(words)} 2> {self.folder / 'err'};"
            f" echo $? > {self.folder / 'rc'}; sleep 60"
        )
        self.run("-f", "/dev/null", "new-session", "-d", "-x", str(self.size[0]), "-y", str(self.size[1]), command)

    def keys(self, *names: str) -> None:
        for name in names:
            self.run("send-keys", name)

    def burst(self, *words: str) -> None:
        """All of it in one write to the terminal."""
        self.run("send-keys", *words)

    def screen(self, *options: str) -> str:
        return self.run("capture-pane", "-p", *options)

    def until(self, text: str, timeout_s: float = 40.0) -> str:
        """The screen, once it matches."""
        try:
            wait_until(lambda: re.search(text, self.screen()), timeout_s=timeout_s, what=f"{text!r} on the screen")
        except AssertionError as error:
            raise AssertionError(f"{error}:\n{self.screen()}") from None
        return self.screen()

    def left(self) -> int:
        """kvtop's exit status, once it has ended."""
        path = self.folder / "rc"
        wait_until(lambda: path.exists() and path.read_text().strip(), what="the end of kvtop")
        return int(path.read_text())

    def said(self) -> str:
        """What kvtop wrote on stderr."""
        return (self.folder / "err").read_text()

    def close(self) -> None:
        self.run("kill-server")


@pytest.fixture
def shm(tmp_path: Path) -> Path:
    root = tmp_path / "shm"
    root.mkdir()
    return root


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Callable[[int, int], Tmux]]:
    made: list[Tmux] = []

    def make(width: int, height: int) -> Tmux:
        made.append(Tmux(tmp_path, (width, height)))
        return made[-1]

    yield make
    for one in made:
        one.close()


def _metrics() -> list[Metric]:
    return [
        *(Metric(name, "counter", "", "") for name in ("hits_total", "misses_total", "get_bytes_total", "set_bytes_total")),
        *(Metric(name, "gauge", "bytes", "") for name in ("arena_bytes_used", "arena_bytes_limit")),
    ]


def _pid(shm: Path) -> int:
    (path,) = (path for path in Path("/proc").iterdir() if path.name.isdigit() and _is_ours(path, shm))
    return int(path.name)


def test_a_full_disk_is_seen_told_and_the_status(terminal: Callable[[int, int], Tmux], shm: Path, tmp_path: Path) -> None:
    """The kernel's own limit for files stands in for a full disk; it is hit while everybody looks on, in the middle of a record."""
    pool.create_pool("engine-a", 8 * GIB, used_bytes=GIB, root=shm)
    screen = terminal(80, 24)
    screen.before = "ulimit -f 2; "
    screen.start("-r", "0.1", "--shm", str(shm), "--record", str(tmp_path / "a.kvrec"))
    text = screen.until("not recorded: File too large")
    assert "▲ WARN" in text.splitlines()[0]
    assert "not recorded: File too large" in text.splitlines()[0]
    screen.until("WARN +recording +nothing recorded since")
    screen.run("resize-window", "-x", "40", "-y", "10")
    text = screen.until("NO REC")
    assert re.match(" kvtop  ▲ WARN .*▲ NO REC", text)
    screen.until("▲ WARN +recording +nothing")  # the alert, once the line over it has gone
    screen.keys("6")
    screen.until("recording +nothing reco")
    screen.keys("3")
    assert "NO REC" in screen.until("no daemon").splitlines()[0], "in every view"
    screen.keys("q")
    assert screen.left() == 1
    error, hint = screen.said().splitlines()
    assert re.fullmatch(
        r"kvtop: error: [0-9]+ of [0-9]+ readings were not recorded to .*/a.kvrec, the first at [0-9:]{8}: File too large", error
    )
    assert hint.startswith("hint: free some room")
    recording = Recording(tmp_path / "a.kvrec")
    assert len(recording) >= 1
    assert recording.damage == []
    recording.close()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_signal_ends_a_recording_whole(
    terminal: Callable[[int, int], Tmux], shm: Path, tmp_path: Path, number: signal.Signals, status: int
) -> None:
    pool.create_pool("engine-a", 8 * GIB, used_bytes=GIB, root=shm)
    screen = terminal(80, 24)
    screen.start("-r", "0.1", "--shm", str(shm), "--record", str(tmp_path / "a.kvrec"))
    screen.until("REC [0-9]")
    os.kill(_pid(shm), number)
    assert screen.left() == status
    assert screen.said() == ""
    wait_until(lambda: "REC" not in screen.screen(), what="the terminal's own screen")
    recording = Recording(tmp_path / "a.kvrec")
    assert recording.at(len(recording) - 1).segments[0].name == "engine-a"
    assert recording.damage == []
    recording.close()


def test_a_burst_of_keys_reaches_what_it_opens(terminal: Callable[[int, int], Tmux], shm: Path) -> None:
    """Many keys in one write, as a paste or a script sends them."""
    for name in ("engine-a", "engine-b"):
        pool.create_pool(name, 8 * GIB, used_bytes=GIB * (1 + (name == "engine-b")), root=shm)
    screen = terminal(80, 24)
    screen.start("-r", "0.5", "--shm", str(shm), "--view", "segments")
    screen.until("engine-b")
    screen.burst("/used>1.5G", "Enter")
    screen.until("1 of 2")
    screen.burst("l", "6G", "Enter", "y")
    wait_until(lambda: pool.read_pool("engine-b", root=shm).limit_bytes == 6 * GIB, what="the limit in the segment")
    screen.burst("Escape")
    screen.until("2 rows")
    screen.burst("/engine-a", "Enter", "d", "engine-a", "Enter")
    wait_until(lambda: not (shm / "engine-a").exists(), what="the end of the segment")
    screen.burst(":tiers", "Enter")
    screen.until("no daemon publishes")
    screen.burst(":quit", "Enter")
    assert screen.left() == 0


@pytest.mark.parametrize("size", [(80, 24), (200, 50)])
def test_a_live_host_on_a_real_terminal(terminal: Callable[[int, int], Tmux], shm: Path, size: tuple[int, int]) -> None:
    pool.create_pool("engine-a", 8 * GIB, used_bytes=GIB, root=shm)
    pool.create_pool("engine-b", 4 * GIB, used_bytes=2 * GIB, root=shm)
    writer = StatsWriter("kvd", "0123456789ab", _metrics(), root=shm)
    lock = owner.OwnerLock.acquire("engine-a", owner.OwnerInfo(engine="vllm", model="llama", page_bytes=2 * MIB), root=shm)
    screen = terminal(*size)
    try:
        writer.set(writer.index("arena_bytes_limit"), 32 * GIB)
        writer.heartbeat()
        screen.start("-r", "0.2", "--shm", str(shm), COLORTERM="truecolor")
        text = screen.until("engine-b")
        assert "● live" in text
        assert "? unknown" in text
        assert len(text.splitlines()) <= size[1]

        # Numbers move, hit rates come, a segment appears, an engine dies: each is on the screen within moments.
        pool.write_usage("engine-a", 5 * GIB, 0, root=shm)
        screen.until(r"engine-a .* 5 GiB")
        for _ in range(8):
            writer.add(writer.index("hits_total"), 90)
            writer.add(writer.index("misses_total"), 10)
            writer.heartbeat()
            time.sleep(0.25)
        screen.until(r"now 90\.0 %")
        pool.create_pool("engine-new", GIB, root=shm)
        screen.until("engine-new")
        lock.close(remove=False)
        screen.until(r"✖ stale")
        writer.heartbeat()
        screen.keys("6")
        screen.until("its engine died")

        # A limit, typed and answered on the real terminal, is in the real segment.
        screen.keys("2")
        screen.until("PREALLOC")
        screen.keys("/")
        screen.until(r"(?m)^ ?/$")  # the line to type into is there: on a busy machine that takes a moment
        screen.keys("e", "n", "g", "i", "n", "e", "-", "b", "Enter")
        screen.until("1 of 3")
        screen.keys("l")
        screen.until("limit of engine-b")
        screen.keys("6", "G", "Enter")
        screen.until("write it")
        screen.keys("y")
        wait_until(lambda: pool.read_pool("engine-b", root=shm).limit_bytes == 6 * GIB, what="the limit in the segment")

        # Any size at any moment, down to almost nothing, and back.
        for width, height in ((30, 8), (3, 2), (1, 1), (size[0] + 7, size[1] + 3)):
            screen.run("resize-window", "-x", str(width), "-y", str(height))
            time.sleep(0.3)
        screen.until("engine-b")
        screen.until("╰─.*─╯")
        assert max(len(line) for line in screen.screen().splitlines()) == size[0] + 7
        screen.keys("q")
        assert screen.left() == 0
    finally:
        lock.close()
        writer.close()


def test_every_row_within_5_segments_at_80x24_and_more_than_fit_scroll(terminal: Callable[[int, int], Tmux], shm: Path) -> None:
    """Where kvcached's viewer crashes (5 segments at 80x24) and drops what does not fit."""
    for number in range(40):
        pool.create_pool(f"engine-{number:02d}", GIB, used_bytes=number * MIB, root=shm)
    screen = terminal(80, 24)
    screen.start("-r", "0.5", "--shm", str(shm), "--view", "segments")
    screen.until("engine-39")
    assert "40 rows" in screen.screen()
    screen.keys("G")
    screen.until("engine-00")
    (pid,) = (path for path in Path("/proc").iterdir() if path.name.isdigit() and _is_ours(path, shm))
    memory = int((pid / "status").read_text().partition("VmRSS:")[2].split()[0])
    assert memory < 50 << 10, "KiB resident"
    screen.keys("C-c")
    assert screen.left() == 0


def test_no_color_really_is_none(terminal: Callable[[int, int], Tmux], shm: Path) -> None:
    pool.create_pool("engine-a", GIB, used_bytes=2 * GIB, root=shm)
    screen = terminal(80, 24)
    screen.start("-r", "0.5", "--shm", str(shm), NO_COLOR="1")
    screen.until("engine-a")
    raw = screen.screen("-e")
    assert not re.search(r"\x1b\[[0-9;]*(?:[34][0-7]|9[0-7]|10[0-7]|[34]8)(?:[;m])", raw), "no colour sequence at all"
    assert "▲ WARN" in screen.until("▲ WARN")
    screen.keys("q")
    assert screen.left() == 0


def test_sixteen_colours_are_the_terminals_own(terminal: Callable[[int, int], Tmux], shm: Path) -> None:
    pool.create_pool("engine-a", GIB, used_bytes=GIB // 2, root=shm)
    screen = terminal(80, 24)
    screen.start("-r", "0.5", "--shm", str(shm), TERM="xterm")
    screen.until("engine-a")
    raw = screen.screen("-e")
    assert not re.search(r"\x1b\[[0-9;]*[34]8[;:]", raw), "no 256-colour or RGB sequence"
    screen.keys("q")
    assert screen.left() == 0


def test_a_signal_leaves_the_terminal_as_it_was(terminal: Callable[[int, int], Tmux], shm: Path) -> None:
    screen = terminal(80, 24)
    screen.start("-r", "0.5", "--shm", str(shm))
    screen.until("EMPTY")
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit() and _is_ours(path, shm)]
    assert len(pids) == 1
    os.kill(pids[0], 15)
    assert screen.left() == 0
    wait_until(lambda: "EMPTY" not in screen.screen(), what="the terminal's own screen")


def _is_ours(path: Path, shm: Path) -> bool:
    try:
        words = (path / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return str(shm).encode() in words and any(word.endswith(b"/kvtop") for word in words)
