"""Output streams as they come: closed, narrow, and messages that would move the cursor."""

import os
import shlex
import struct
import subprocess
from pathlib import Path

import pytest

from kvtools.errors import UsageError
from kvtools.segments.discover import look
from kvtools.units import parse_duration, parse_size
from tests.support.processes import SCRIPTS, run_cli, wait_until


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


CLOSED = "cannot write to standard output: it is closed"
FULL = "cannot write to standard output: No space left on device"
SHOWING = [
    ("kvctl", "list", "--json"),
    ("kvtop", "--once"),
    ("kvdoctor", "explain", "gpu.present"),
    ("kvd", "--version"),
    ("kvgate", "--help"),
]


@pytest.mark.parametrize(
    ("words", "where", "said", "buffered"),
    [
        *((words, *way) for words in SHOWING for way in ((">&-", CLOSED, ""), (">/dev/full", FULL, ""))),
        (("kvtop", "--check"), ">/dev/full", FULL, "1"),
        (("kvd", "serve", "--show-config"), ">/dev/full", FULL, "1"),
    ],
)
def test_data_that_reached_nobody_is_a_failure(
    words: tuple[str, ...], where: str, said: str, buffered: str, tmp_path: Path
) -> None:
    command = shlex.join([str(SCRIPTS / words[0]), *words[1:]])
    env = {**os.environ, "KVTOOLS_SHM": str(tmp_path), "PYTHONUNBUFFERED": buffered}
    ran = subprocess.run(["bash", "-c", f"{command} {where} </dev/null"], capture_output=True, text=True, env=env)
    assert ran.returncode == 1, ran.stderr
    error, hint = ran.stderr.splitlines()
    assert error == f"{words[0]}: error: {said}"
    assert hint.startswith("hint: ")
    assert "--debug" not in hint


def test_closed_streams_hinder_nobody_who_does_not_use_them(tmp_path: Path) -> None:
    """A file that is opened later must not get the number of a closed stream; stdin may be closed as well."""
    record = tmp_path / "a.kvrec"
    command = f"exec {SCRIPTS / 'kvtop'} --record {record} -r 0.1 --shm {tmp_path} <&- >&- 2>&-"
    process = subprocess.Popen(["bash", "-c", command])
    wait_until(lambda: record.exists() and record.stat().st_size > 100, timeout_s=30, what="a reading")
    process.terminate()
    assert process.wait(20) == 0
    assert record.read_bytes().startswith(b"KVTREC\r\n")
    ran = subprocess.run(
        ["bash", "-c", f"{SCRIPTS / 'kvctl'} list <&- >&-"],
        capture_output=True,
        text=True,
        env={**os.environ, "KVTOOLS_SHM": str(tmp_path)},
    )
    assert (ran.returncode, ran.stderr) == (0, f"no segments in {tmp_path}\n"), "nothing to show: nothing is lost"


def test_a_lost_output_keeps_the_status_of_what_went_wrong(tmp_path: Path) -> None:
    ran = subprocess.run(["bash", "-c", f"{SCRIPTS / 'kvctl'} --shm {tmp_path} show nosuch >&-"], capture_output=True, text=True)
    assert (ran.returncode, ran.stderr.splitlines()[0]) == (3, "kvctl: error: no segment named nosuch")
