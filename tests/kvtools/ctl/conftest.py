"""kvctl in this process, over a folder of its own: fast enough to try every word of it."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtools import cli
from tests.support.processes import Ran

GiB, MiB = 1 << 30, 1 << 20


@pytest.fixture
def shm(tmp_path: Path) -> Path:
    """An empty folder that stands for /dev/shm."""
    folder = tmp_path / "shm"
    folder.mkdir()
    return folder


@pytest.fixture
def kvctl(
    shm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Ran]]:
    """Runs kvctl's words in `shm`, with a state folder of its own and no terminal."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr("sys.stdin", open(os.devnull))  # noqa: SIM115 - closed with the fixture
    capsys.readouterr()

    def run(*words: str | Path) -> Ran:
        status = cli.run_words("kvctl", "kvtools.ctl.app:app", ["--shm", str(shm), *map(str, words)])
        out, err = capsys.readouterr()
        return Ran(status, out, err)

    yield run
    import sys

    sys.stdin.close()
