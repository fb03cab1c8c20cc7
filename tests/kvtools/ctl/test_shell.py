"""The interactive shell, on a real terminal and fed lines: it runs kvctl's commands and nothing else."""

import os
import pty
import re
import select
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtools.ctl import shell
from kvtools.segments import pool
from tests.support.processes import SCRIPTS, run_cli

from .conftest import GiB


@pytest.fixture
def feed(
    shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., tuple[str, str]]]:
    """Runs the shell on given lines in this process; stdout and stderr."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("KVTOOLS_SHM", str(shm))

    def run(*lines: str) -> tuple[str, str]:
        left = iter(lines)

        def read(prompt: str) -> str:
            line = next(left, None)
            if line is None:
                raise EOFError
            if line == "^C":
                raise KeyboardInterrupt
            return line

        assert shell.run_shell(shm, read=read) == 0
        return capsys.readouterr()

    return run


def test_commands_run_where_the_shell_looks(feed: Callable[..., tuple[str, str]], shm: Path) -> None:
    pool.create_pool("x", 8 * GiB, root=shm)
    out, err = feed("list", "limit x 4G", "kvctl limit x 2G", "", "  # a remark", "show 'x'")
    assert "x: limit 8 GiB -> 4 GiB" in out
    assert "x: limit 4 GiB -> 2 GiB" in out
    assert "history" in out
    assert "error" not in err
    assert pool.read_pool("x", root=shm).limit_bytes == 2 * GiB


@pytest.mark.parametrize(
    "line",
    [
        "!touch {owned}",
        "touch {owned}",
        "; touch {owned}",
        "$(touch {owned})",
        "`touch {owned}`",
        "list; touch {owned}",
        "limit",
        "list | tee {owned}",
    ],
)
def test_no_line_reaches_a_system_shell(feed: Callable[..., tuple[str, str]], tmp_path: Path, line: str) -> None:
    owned = tmp_path / "owned"
    _, err = feed(line.format(owned=owned))
    assert "kvctl: error:" in err
    assert not owned.exists()


def test_errors_end_nothing_and_are_the_commands_own(feed: Callable[..., tuple[str, str]], shm: Path) -> None:
    pool.create_pool("VLLM", 8 * GiB, root=shm)
    out, err = feed("lst", "show VLM", "limit VLLM 4X", "'open", "^C", "watch -i 1ms", "list VLLM")
    assert "no such command 'lst'\nhint: did you mean list?\n(status 2)" in err
    assert "no segment named VLM\nhint: did you mean VLLM?\n(status 3)" in err
    assert "not a size: '4X'" in err
    assert "no closing quotation" in err
    assert "8 GiB" in out, "the last line still ran"


@pytest.mark.parametrize("last", ["exit", "quit", "exit now"])
def test_leaving(feed: Callable[..., tuple[str, str]], last: str) -> None:
    out, _ = feed(last, "list --json")
    assert out == ""


def test_help_and_a_shell_in_the_shell(feed: Callable[..., tuple[str, str]]) -> None:
    out, err = feed("help", "help limit", "?", "shell", "--help")
    assert out.count("Usage: kvctl [OPTIONS] COMMAND") == 3
    assert "Usage: kvctl limit" in out
    assert "already in the shell" in err


def test_completion_of_commands_options_and_names(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTOOLS_SHM", str(shm))
    for name in ("VLLM_1", "VLLM_2", "a b", "kvcached_vLLM_9"):
        pool.create_pool(name, GiB, root=shm)
    assert shell.candidates("", "li") == ["list ", "limit ", "limit-percent "]
    assert shell.candidates("", "e") == ["exit "]
    assert shell.candidates("limit ", "VL") == ["VLLM_1 ", "VLLM_2 "]
    assert shell.candidates("show ", "a") == ["'a b' "]
    assert shell.candidates("limit VLLM_1 ", "--w") == ["--wait "]
    assert shell.candidates("frobnicate ", "x") == []
    assert shell.candidates("apply ", f"{shm}/VLLM_1") == [f"{shm}/VLLM_1 "]
    assert shell.candidates("apply ", str(shm)) == [f"{shm}/"]
    assert shell.candidates("apply ", "/none/x") == []
    assert shell.candidates("show 'open ", "x") == []


def test_paths_complete_as_files_in_the_system_shell() -> None:
    assert run_cli("kvctl", "apply", "pl", env={"KVTOOLS_COMPLETE": "1"}).stdout == "*files\n"


def talk(shm: Path, state: Path, *turns: tuple[str, str]) -> tuple[int, str]:
    """Bare kvctl on a real terminal: wait for each pattern, type each answer. Status and all it showed."""
    pid, fd = pty.fork()
    if pid == 0:
        os.environ.update(KVTOOLS_SHM=str(shm), XDG_STATE_HOME=str(state), TERM="dumb")
        os.execv(SCRIPTS / "kvctl", ["kvctl"])
    shown, seen = "", 0
    for pattern, answer in turns:
        deadline = time.monotonic() + 15
        while not (found := re.search(pattern, shown[seen:])):
            assert time.monotonic() < deadline, f"waited for {pattern!r}: {shown!r}"
            if select.select([fd], [], [], 0.2)[0]:
                try:
                    shown += os.read(fd, 65536).decode(errors="replace")
                except OSError:
                    break
        seen += found.end() if found else 0
        if answer:
            # readline shows its prompt an instant before it waits: a signal in between is seen at the next key only.
            time.sleep(0.2 if answer == "\x03" else 0.0)
            os.write(fd, answer.encode())
    while True:
        try:
            data = os.read(fd, 65536)
        except OSError:
            break
        if not data:
            break
        shown += data.decode(errors="replace")
    os.close(fd)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), shown


def test_on_a_terminal_with_completion_and_history(shm: Path, tmp_path: Path) -> None:
    pool.create_pool("VLLM_MODEL_1", 8 * GiB, root=shm)
    code, shown = talk(
        shm,
        tmp_path,
        ("kvctl> ", "limit VLL\t4G\n"),
        (r"8 GiB -> 4 GiB", ""),
        ("kvctl> ", "\x03"),
        ("kvctl> ", "watch -i 50ms\n"),
        ("segment in", "\x03"),
        ("kvctl> ", "\x04"),
    )
    assert code == 0, shown
    assert pool.read_pool("VLLM_MODEL_1", root=shm).limit_bytes == 4 * GiB
    history = tmp_path / "kvtools" / "kvctl_history"
    assert history.read_text().splitlines()[-2:] == ["limit VLLM_MODEL_1 4G", "watch -i 50ms"]
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    code, shown = talk(shm, tmp_path, ("kvctl> ", "\x10\x10\n"), ("unchanged", "exit\n"))
    assert code == 0, shown
    assert "limit 4 GiB, unchanged" in shown, "the line before the last one ran again"


def test_no_place_for_a_history_is_no_failure(shm: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, shown = talk(shm, tmp_path / "file", ("kvctl> ", "exit\n"))
    assert code == 0, shown


def test_without_a_terminal_bare_kvctl_prints_help_and_exits_2() -> None:
    ran = run_cli("kvctl", stdin="list\n")
    assert (ran.rc, ran.stdout, ran.stderr.startswith("Usage: kvctl")) == (2, "", True)
