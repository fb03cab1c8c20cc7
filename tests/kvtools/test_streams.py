"""Output streams as they come: closed, narrow, and messages that would move the cursor."""

import os
import struct
import subprocess
from pathlib import Path

import pytest

from kvtools.errors import UsageError
from kvtools.segments.discover import look
from kvtools.units import parse_duration, parse_size
from tests.support.processes import SCRIPTS, run_cli


@pytest.mark.parametrize("words", [("kvctl", "list"), ("kvtop", "--once"), ("kvdoctor", "--version"), ("kvd", "--help")])
def test_a_closed_stdout_is_no_traceback(words: tuple[str, ...], tmp_path: Path) -> None:
    command = " ".join([str(SCRIPTS / words[0]), *words[1:]]) + " >&-"
    ran = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env={**os.environ, "KVTOOLS_SHM": str(tmp_path)})
    assert "Traceback" not in ran.stderr
    assert ran.returncode in (0, 1)


def test_a_stream_without_the_letters_gets_escapes(tmp_path: Path) -> None:
    (tmp_path / "模型_é").write_bytes(struct.pack("=3q", 1 << 30, 0, 0))
    ran = run_cli("kvctl", "--shm", str(tmp_path), "list", env={"PYTHONIOENCODING": "ascii"})
    assert (ran.rc, "Traceback" in ran.stderr) == (0, False)
    assert r"\u6a21" in ran.stdout


def test_errors_show_control_characters_and_do_not_send_them() -> None:
    ran = run_cli("kvd", "ping", "--socket", "/nowhere/a\x1b[31mb")
    assert ran.rc == 4
    assert "\x1b" not in ran.stderr


@pytest.mark.parametrize("parse", [parse_size, parse_duration])
def test_numbers_of_thousands_of_digits_are_no_numbers(parse: object) -> None:
    assert callable(parse)
    for digits in (100, 5000, 100_000):
        with pytest.raises(UsageError):
            parse("9" * digits)


def test_an_owner_file_of_junk_makes_nothing_stale(tmp_path: Path) -> None:
    (tmp_path / "POOL").write_bytes(struct.pack("=3q", 1 << 30, 0, 0))
    (tmp_path / "POOL.kvtools").write_bytes(os.urandom(24))
    found = look(tmp_path)
    (pool,) = found.pools
    assert pool.state == "unknown"
    assert not found.leftovers
    ran = run_cli("kvctl", "--shm", str(tmp_path), "prune", "--yes")
    assert (tmp_path / "POOL").exists(), ran.stdout
