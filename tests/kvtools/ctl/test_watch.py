"""kvctl watch: rounds into a pipe, JSON lines, in place on a terminal of any size, and ends that leave the terminal well."""

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtools.segments import pool
from tests.support.processes import SCRIPTS, Ran

from .conftest import GiB, MiB

Kvctl = Callable[..., Ran]


def test_rounds_into_a_pipe_are_stamped_tables(kvctl: Kvctl, shm: Path) -> None:
    pool.create_pool("x", 8 * GiB, used_bytes=GiB, root=shm)
    ran = kvctl("watch", "--count", "2", "-i", "50ms")
    assert (ran.rc, ran.stderr, "\033" in ran.stdout) == (0, "", False)
    assert len(re.findall(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  1 segment in ", ran.stdout, re.MULTILINE)) == 2


def test_changes_of_use_are_shown(shm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from kvtools.ctl.watching import Watch

    pool.create_pool("x", 8 * GiB, used_bytes=GiB, root=shm)
    watch = Watch([], root=shm, as_json=False, interval_s=1)
    watch.round()
    pool.write_usage("x", GiB + 512 * MiB, 0, root=shm)
    watch.round()
    pool.write_usage("x", GiB, 0, root=shm)
    watch.round()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("x ")]
    assert [line.split("unknown")[1].strip() for line in lines] == ["", "+512 MiB", "-512 MiB"]


def test_json_lines(kvctl: Kvctl, shm: Path) -> None:
    pool.create_pool("x", 8 * GiB, root=shm)
    lines = kvctl("watch", "--count", "3", "-i", "50ms", "--json").stdout.splitlines()
    bodies = [json.loads(line) for line in lines]
    assert [body["schema"] for body in bodies] == ["kvctl.watch/1"] * 3
    assert bodies[0]["at_ns"] < bodies[1]["at_ns"] < bodies[2]["at_ns"]
    assert bodies[0]["segments"][0]["ipc"] == "x"


@pytest.mark.parametrize("interval", ["0", "1ms", "2d", "x", "-1"])
def test_intervals_out_of_range(kvctl: Kvctl, interval: str) -> None:
    assert kvctl("watch", "-i", interval).rc == 2


def test_a_segment_that_goes_away_does_not_end_the_watch(shm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from kvtools.ctl.watching import Watch

    pool.create_pool("x", 8 * GiB, root=shm)
    watch = Watch(["x"], root=shm, as_json=False, interval_s=1)
    watch.round()
    (shm / "x").unlink()
    watch.round()
    (shm / "x").write_bytes(b"foreign")
    watch.round()
    out = capsys.readouterr().out
    assert "x: no segment named x" in out
    assert "x: x is not a pool segment: 7 bytes" in out


def watch_at_terminal(shm: Path, rows: int, columns: int) -> tuple[int, str]:
    """The real `kvctl watch` on a terminal of that size, two rounds, ended by Ctrl-C: status and all it wrote."""
    pid, fd = pty.fork()
    if pid == 0:
        time.sleep(0.05)  # until the parent has set the size
        os.execv(SCRIPTS / "kvctl", ["kvctl", "--shm", str(shm), "watch", "-i", "50ms"])
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    shown, ended = b"", False
    while True:
        try:
            data = os.read(fd, 65536)
        except OSError:
            break
        if not data:
            break
        shown += data
        if not ended and shown.count(b"\033[J") >= 2:
            os.write(fd, b"\x03")
            ended = True
    os.close(fd)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), shown.decode()


@pytest.mark.parametrize(("rows", "columns"), [(24, 80), (5, 20), (2, 10), (1, 1), (60, 200)])
def test_in_place_on_a_terminal_of_any_size(shm: Path, rows: int, columns: int) -> None:
    for i in range(30):
        pool.create_pool(f"engine-{i:02}", 8 * GiB, used_bytes=GiB, root=shm)
    code, shown = watch_at_terminal(shm, rows, columns)
    assert code == 130
    assert shown.startswith("\033[?1049h\033[?25l\033[?7l")
    assert "\033[?7h\033[?25h\033[?1049l" in shown, "the terminal gets its cursor, wrapping and screen back"
    frame = shown.split("\033[H")[1].split("\033[J")[0]
    assert frame.count("\n") <= max(rows - 1, 1)
    if rows == 24:
        assert "... 10 more" in frame
    if rows == 60:
        assert "engine-29" in frame


def test_a_long_name_pushes_nobodys_numbers_off_a_terminal(shm: Path) -> None:
    long = "model-" + "x" * 58  # as long as kvcached lets one be
    pool.create_pool(long, 8 * GiB, used_bytes=3 * GiB, root=shm)
    pool.create_pool("short", 8 * GiB, used_bytes=5 * GiB, root=shm)
    _, shown = watch_at_terminal(shm, 24, 80)
    frame = shown.split("\033[H")[1].split("\033[J")[0].replace("\033[K", "")
    lines = [re.sub(r"\033\[[0-9;]*m", "", line) for line in frame.splitlines()]
    assert max(map(len, lines[1:])) <= 80, "the first line has the path of a scratch folder"
    assert long in lines, "complete, above its numbers"
    assert "3 GiB" in lines[lines.index(long) + 1]
    (short,) = [line for line in lines if line.startswith("short ")]
    assert "5 GiB" in short
    _, shown = watch_at_terminal(shm, 24, 200)
    assert re.search(rf"{long} .*3 GiB", shown), "one line each where there is room"


def test_a_reader_that_goes_away_ends_it(shm: Path) -> None:
    pool.create_pool("x", 8 * GiB, root=shm)
    words = [SCRIPTS / "kvctl", "--shm", shm, "watch", "-i", "50ms"]
    watch = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert watch.stdout is not None
    assert watch.stderr is not None
    watch.stdout.readline()
    watch.stdout.close()
    assert (watch.wait(timeout=10), watch.stderr.read()) == (141, b"")
    watch.stderr.close()
