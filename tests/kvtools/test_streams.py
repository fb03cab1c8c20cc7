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


@pytest.mark.parametrize(
    ("words", "unbuffered"),
    [
        (("kvctl", "list", "--json"), ""),
        (("kvctl", "list", "--json"), "1"),
        (("kvctl", "--help"), ""),
        (("kvtop", "--once"), ""),
        (("kvdoctor", "--version"), ""),
        (("kvd", "--help"), ""),
        (("kvtools", "--version"), ""),
    ],
)
def test_an_output_that_cannot_be_written_is_one_line(words: tuple[str, ...], unbuffered: str, tmp_path: Path) -> None:
    (tmp_path / "POOL").write_bytes(struct.pack("=3q", 1 << 30, 0, 0))
    env = {**os.environ, "KVTOOLS_SHM": str(tmp_path), "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        ran = subprocess.run([str(SCRIPTS / words[0]), *words[1:]], stdout=full, stderr=subprocess.PIPE, text=True, env=env)
    first, *rest = ran.stderr.splitlines()
    assert first.startswith(f"{words[0]}: error: ")
    assert first.endswith("No space left on device")
    assert [line.partition(":")[0] for line in rest] == ["hint"]
    assert ran.returncode == 1
    if not unbuffered:
        assert "cannot write to standard output" in first


def test_the_shell_goes_on_after_an_output_that_was_lost(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        ran = subprocess.run(
            [str(SCRIPTS / "kvctl"), "--shm", str(tmp_path), "shell"],
            input="list --json\nnonsense\nexit\n", stdout=full, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "XDG_STATE_HOME": str(tmp_path), "PYTHONUNBUFFERED": ""},
        )  # fmt: skip
    assert "Traceback" not in ran.stderr
    assert "cannot write to standard output" in ran.stderr


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
