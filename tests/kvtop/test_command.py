"""The command's edges: options that cannot be meant, locales, addresses that do not answer, pictures that cannot be written."""

import asyncio
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtools.segments import pool
from kvtop.columns import Order, fit_columns
from kvtop.engines import fetch
from kvtop.model import Model
from kvtop.once import document, once_lines
from kvtop.query import Filter
from kvtop.record import Writer
from kvtop.snapshot import Engine
from kvtop.text import ASCII, plain
from kvtop.views import VIEWS
from tests.kvtop import scenes
from tests.kvtop.scenes import GIB
from tests.support.processes import Ran

Cli = Callable[..., Ran]


@pytest.fixture
def shm(tmp_path: Path) -> Path:
    """A folder with one segment."""
    folder = tmp_path / "shm"
    folder.mkdir()
    pool.create_pool("engine-a", 8 * GIB, used_bytes=3 * GIB, root=folder)
    return folder


@pytest.mark.real("segments")
@pytest.mark.parametrize(("locale", "plain"), [({"LC_ALL": "C"}, True), ({"LANG": "C"}, True), ({"LC_CTYPE": "POSIX"}, True),
                                               ({"LANG": "C.UTF-8"}, False), ({}, False)])  # fmt: skip
def test_a_locale_without_unicode_means_ascii(shm: Path, locale: dict[str, str], plain: bool) -> None:
    """Python itself writes UTF-8 under every one of these."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG"))}
    ran = subprocess.run([sys.executable, "-m", "kvtop", "--once", "--shm", str(shm)], env=environ | locale, capture_output=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.isascii() == plain


@pytest.mark.parametrize("words", [
    ["--metrics", "a b"], ["--metrics", "http://127.0.0.1:19475/ü"], ["--metrics", "http://[::1/metrics"], ["--metrics", "h:0"],
    ["--record-max", "abc"], ["--record-max", "1K"], ["--size", "0x0"],
])  # fmt: skip
@pytest.mark.parametrize("way", ["--once", "--check", "--json"])
def test_an_option_that_cannot_be_meant_is_said_whatever_else_is_asked(cli: Cli, shm: Path, words: list[str], way: str) -> None:
    ran = cli("kvtop", way, "--shm", str(shm), *words)
    assert ran.rc == 2
    assert ran.stdout == ""
    assert re.fullmatch(r"kvtop: error: [^\n]+\nhint: [^\n]+\n", ran.stderr), ran.stderr


def _hang_up(there: socket.socket) -> None:
    there.accept()[0].close()


def test_an_engine_that_cannot_be_asked_is_an_alert(shm: Path) -> None:
    assert fetch("h..i:80/metrics").problem, "a name that no resolver takes"
    with socket.create_server(("127.0.0.1", 0)) as there:
        port = there.getsockname()[1]
        thread = threading.Thread(target=_hang_up, args=(there,))
        thread.start()
        problem = fetch(f"127.0.0.1:{port}/metrics").problem
        thread.join()
    assert problem.startswith("no answer")
    snapshot = scenes.host(0)
    model = Model()
    model.take(scenes.change(snapshot, engines=(Engine(url="h:1/metrics", problem=problem),)))
    assert any("no answer" in alert.text for alert in model.alerts)


@pytest.mark.real("segments")
def test_a_picture_that_cannot_be_written_leaves_the_old_one(cli: Cli, shm: Path, tmp_path: Path) -> None:
    folder = tmp_path / "pictures"
    folder.mkdir()
    picture = folder / "a.svg"
    picture.write_text("the old one")
    environ = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    script = f"ulimit -f 1; exec {sys.executable} -m kvtop --export-svg {picture} --shm {shm}"
    ran = subprocess.run(["bash", "-c", script], env=environ, capture_output=True, text=True)
    assert ran.returncode == 1
    assert ran.stderr.startswith(f"kvtop: error: cannot write {picture}: File too large")
    assert picture.read_text() == "the old one"
    assert os.listdir(folder) == ["a.svg"]


@pytest.mark.real("segments")
def test_a_replay_shows_the_named_segments_only(cli: Cli, tmp_path: Path) -> None:
    with Writer(tmp_path / "r") as writer:
        writer.write(scenes.host(0, segments=5))
    first, second = (segment.name for segment in scenes.host(0, segments=5).segments[:2])
    ran = cli("kvtop", "--once", "--json", "--replay", tmp_path / "r", first)
    assert [segment["ipc"] for segment in ran.json()["segments"]] == [first]
    ran = cli("kvtop", "--once", "--replay", tmp_path / "r", first, "nobody")
    assert ran.rc == 3
    assert second not in ran.stdout


def test_memory_held_with_a_limit_of_zero_is_over_the_limit_and_first() -> None:
    none, full = scenes.segment("none", limit_bytes=0, used_bytes=1, prealloc_bytes=0), scenes.segment("full", used_bytes=99 << 40)
    model = Model(glyphs=ASCII)
    model.take(scenes.change(scenes.host(0), segments=(full, none)))
    lines = [plain(line) for line in once_lines(model, VIEWS["segments"], 100, Filter(), Order("share"))]
    assert re.match("none .*>over", lines[2])
    assert any("none" in line and "memory with a limit of 0" in line for line in map(str, model.alerts))
    assert document(model)["segments"][1]["held_percent"] is None  # type: ignore[index]


@pytest.mark.parametrize(("width", "height"), [(40, 10), (80, 24)])
def test_every_reason_can_be_read_on_a_small_screen(width: int, height: int) -> None:
    segments = tuple(scenes.segment(f"engine-with-a-long-name-{number}", owner="stale") for number in range(20))
    model = Model(glyphs=ASCII)
    model.take(scenes.change(scenes.host(0), segments=segments))
    app = scenes.dashboard(model)
    text = scenes.drive(app, size=(width, height))
    assert any("WARN" in row and "engine-with-a-long-name" in row for row in text[1:]), "the worst of them, beside the table"
    shown: set[str] = set()
    app = scenes.dashboard(model)

    async def read() -> None:
        async with app.run_test(size=(width, height)) as pilot:
            await pilot.press("a")
            for _ in range(40):
                await pilot.pause()
                shown.update(re.findall("engine-with-a-long-name-[0-9]+", " ".join(scenes.grid_text(app))))
                await pilot.press("pagedown")

    asyncio.run(read())
    assert len(shown) == 20


def test_events_keep_level_and_text_on_a_small_screen() -> None:
    kept = [column.id for column, _ in fit_columns(VIEWS["events"].columns, 40)]
    assert {"level", "subject", "text"} <= set(kept)
    assert "holds" in [column.id for column, _ in fit_columns(VIEWS["processes"].columns, 40)]
