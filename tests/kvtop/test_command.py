"""The command's edges: options that cannot be meant, locales, addresses that do not answer, pictures that cannot be written."""

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
from kvtop.engines import fetch
from kvtop.model import Model
from kvtop.snapshot import Engine
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
