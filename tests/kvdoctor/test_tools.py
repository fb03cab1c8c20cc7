"""External commands: whatever one does, kvdoctor goes on in time."""

import os
import sys
import time
from pathlib import Path

import pytest

from kvdoctor.collect import tools
from kvdoctor.collect.source import Source
from tests.support.processes import wait_until


def script(code: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", code]


def test_output_and_status() -> None:
    run = tools.run("x", script("import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"), 10)
    assert (run.state, run.rc, run.out, run.err) == ("ok", 3, "out\n", "err\n")
    assert run.answered


def test_missing_and_not_executable(tmp_path: Path) -> None:
    assert tools.run("x", ["/nowhere/amd-smi"], 1).state == "missing"
    plain = tmp_path / "plain"
    plain.write_text("no program")
    run = tools.run("x", [str(plain)], 1)
    assert (run.state, run.rc, run.answered) == ("missing", 126, False)


def test_one_that_ignores_sigterm_is_killed_with_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    code = (
        "import os, signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "child = subprocess.Popen([sys.executable, '-I', '-S', '-c', 'import time; time.sleep(60)']);"
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}'); print('begun', flush=True); time.sleep(60)"
    )
    started = time.monotonic()
    run = tools.run("amd-smi", script(code), 1.0)
    assert time.monotonic() - started < 1.0 + tools.GRACE_S + 0.5
    assert run.state == "hung"
    assert run.out == "begun\n", "what was said before the deadline is kept"
    for pid in pids.read_text().split():
        wait_until(
            lambda pid=pid: not Path(f"/proc/{pid}").exists() or tools.process_state(int(pid))[0] == "Z", what=f"the end of {pid}"
        )


def test_a_grandchild_that_keeps_the_pipes_open_costs_nothing(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    code = (
        "import subprocess, sys;"
        "child = subprocess.Popen([sys.executable, '-I', '-S', '-c', 'import time; time.sleep(5)'], start_new_session=True);"
        f"open({str(pid_file)!r}, 'w').write(str(child.pid)); print('done')"
    )
    started = time.monotonic()
    run = tools.run("x", script(code), 10)
    assert run.state == "ok"
    assert run.out == "done\n"
    assert time.monotonic() - started < 4
    os.kill(int(pid_file.read_text()), 9)


def test_endless_output_is_cut() -> None:
    run = tools.run("x", script("import sys\nwhile True: sys.stdout.write('x' * 65536)"), 1.0)
    assert run.state == "hung"
    assert len(run.out) == tools.MAX_OUTPUT


def test_bytes_that_are_no_text() -> None:
    run = tools.run("x", script("import sys; sys.stdout.buffer.write(b'\\xff\\xfe')"), 10)
    assert run.out == "\ufffd\ufffd"


def test_slow_tools_run_beside_each_other() -> None:
    source = Source(deadline_s=10, tool_deadline_s=5)
    started = time.monotonic()
    for number in range(5):
        source.start(f"slow{number}", script("import time; time.sleep(0.5); print('late')"))
    assert [source.answer(f"slow{number}").out for number in range(5)] == ["late\n"] * 5  # type: ignore[union-attr]
    assert time.monotonic() - started < 2.3


def test_the_run_as_a_whole_is_bounded() -> None:
    source = Source(deadline_s=0.6, tool_deadline_s=30)
    started = time.monotonic()
    source.start("stuck", script("import time; time.sleep(30)"))
    run = source.answer("stuck")
    assert run is not None
    assert run.state == "hung"
    assert time.monotonic() - started < 2.5


@pytest.mark.parametrize(
    ("hang", "state"), [("sleep-forever; ignore SIGTERM\n", "hung"), ("abandoned after 5.0 s, state D\n", "abandoned")]
)
def test_a_captured_hang(tmp_path: Path, hang: str, state: str) -> None:
    (tmp_path / "amd-smi.hang").write_text(hang)
    run = Source(tmp_path / "root", commands=tmp_path).answer("amd-smi")
    assert run is not None
    assert (run.state, run.answered) == (state, False)


def test_a_captured_command_that_was_not_found(tmp_path: Path) -> None:
    (tmp_path / "modinfo-amdgpu.rc").write_text("127\n")
    source = Source(tmp_path / "root", commands=tmp_path)
    run = source.answer("modinfo-amdgpu")
    assert run is not None
    assert not run.answered
    assert source.answer("dkms-status") is None, "nobody asked"
