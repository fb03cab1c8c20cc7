"""Names, safe opening and the two kinds of lock, on real files."""

import fcntl
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvtools.errors import NotFound, Refused, TimedOut, Unreachable, UsageError
from kvtools.segments import files
from tests.support.processes import wait_until


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "a/b", "/dev/shm/x", "../x", "a\0b", "x" * 256, "ü" * 128])
def test_bad_names_are_usage_errors(name: str) -> None:
    with pytest.raises(UsageError):
        files.check_name(name)


@pytest.mark.parametrize("name", ["x", "x" * 255, "ü" * 127, "名前", "a b", "-x", "kvcached_vLLM_1", "\udcff\udcfe", "a\x1b[31m"])
def test_names_the_file_system_takes_are_taken(name: str, tmp_path: Path) -> None:
    (tmp_path / files.check_name(name)).write_bytes(b"x")
    os.close(files.open_file(name, os.O_RDONLY, root=tmp_path))


def test_an_error_about_a_name_shows_no_control_characters() -> None:
    with pytest.raises(UsageError) as caught:
        files.check_name("a\x1b[2J/b")
    assert "\x1b" not in caught.value.message


def test_missing_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no segment named gone"):
        files.open_file("gone", os.O_RDONLY, root=tmp_path)


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR])
def test_only_regular_files_are_opened_and_nothing_blocks(tmp_path: Path, flags: int) -> None:
    (tmp_path / "target").write_bytes(b"x" * 24)
    (tmp_path / "link").symlink_to("target")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(tmp_path / "socket"))
        for name in ("link", "dangling", "folder", "fifo", "socket"):
            with pytest.raises(Unreachable, match=rf"segment {name} is (not a regular file|a symbolic link)"):
                files.open_file(name, flags, root=tmp_path)


def test_exclusive_creation_of_an_existing_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"")
    with pytest.raises(Refused, match="exists already"):
        files.open_file("x", os.O_RDWR | os.O_CREAT | os.O_EXCL, root=tmp_path)


def test_a_descriptor_does_not_leak_into_children(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"")
    fd = files.open_file("x", os.O_RDONLY, root=tmp_path)
    assert not os.get_inheritable(fd)
    os.close(fd)


@pytest.fixture
def flock_held(tmp_path: Path):
    """A file whose flock another process holds."""
    path = tmp_path / "held"
    path.write_bytes(bytes(24))
    code = f"import fcntl,time; f=open({str(path)!r},'rb'); fcntl.flock(f,2); print('held',flush=True); time.sleep(60)"
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    holder.stdout.readline()
    yield path
    holder.kill()
    holder.wait()
    holder.stdout.close()


def test_a_held_flock_times_out_with_a_hint(flock_held: Path) -> None:
    fd = os.open(flock_held, os.O_RDONLY)
    start = time.monotonic()
    with pytest.raises(TimedOut, match=r"segment held stayed locked by another process for 0\.1 s") as caught:
        files.flock(fd, fcntl.LOCK_SH, what="segment held", timeout_s=0.1)
    assert 0.1 <= time.monotonic() - start < 2
    assert "fuser" in caught.value.hint
    os.close(fd)


def test_a_patience_that_is_what_others_left_is_said_in_round_figures(flock_held: Path) -> None:
    fd = os.open(flock_held, os.O_RDONLY)
    with pytest.raises(TimedOut, match=r"for 2 s$"):
        files.flock(fd, fcntl.LOCK_SH, what="segment held", timeout_s=1.9993, clock=iter([0.0, 9.0]).__next__)
    os.close(fd)


def test_a_process_that_nobody_has_buried_is_gone_all_the_same() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        start = files.process_start(child.pid)
        assert files.process_story(child.pid, start, 0) == f"pid {child.pid} runs"
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert files.process_start(child.pid) == start, "its entry is still there"
        assert files.process_story(child.pid, start, 0) == f"pid {child.pid} is gone"


THREADS = """
import ctypes, platform, threading, time
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
print("up", flush=True)
input()
ctypes.CDLL(None).syscall(60 if platform.machine() == "x86_64" else 93, 0)  # exit(2) of the first thread alone
"""


def test_a_process_whose_threads_are_still_ending_is_not_gone() -> None:
    with subprocess.Popen([sys.executable, "-c", THREADS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        start = files.process_start(child.pid)
        child.stdin.write("\n")
        child.stdin.flush()
        stat = Path(f"/proc/{child.pid}/stat")
        wait_until(lambda: b") Z " in stat.read_bytes(), what="its first thread to end")
        assert files.process_story(child.pid, start, 0) == f"pid {child.pid} runs", "it holds its locks"
        child.kill()


def test_waiting_for_a_flock_never_sleeps_past_its_deadline(flock_held: Path) -> None:
    fd = os.open(flock_held, os.O_RDONLY)
    now = [0.0]

    def sleep(seconds: float) -> None:
        assert now[0] + seconds <= 1.0 + 1e-9
        now[0] += seconds

    with pytest.raises(TimedOut):
        files.flock(fd, fcntl.LOCK_EX, what="x", timeout_s=1.0, clock=lambda: now[0], sleep=sleep)
    assert now[0] == pytest.approx(1.0)
    os.close(fd)


def test_a_life_lock_is_seen_through_a_read_only_descriptor(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"")
    owner, reader = os.open(path, os.O_RDWR), os.open(path, os.O_RDONLY)
    assert not files.held_for_life(reader)
    assert files.lock_for_life(owner)
    assert files.held_for_life(reader)
    assert not files.held_for_life(owner), "an owner does not conflict with itself"
    second = os.open(path, os.O_RDWR)
    assert not files.lock_for_life(second)
    os.close(owner)
    assert not files.held_for_life(reader)
    assert files.lock_for_life(second)
    os.close(second)
    os.close(reader)


def test_a_life_lock_does_not_stop_flock(tmp_path: Path) -> None:
    """What lets an operator write the sidecar of a live engine."""
    path = tmp_path / "x"
    path.write_bytes(b"")
    owner, other = os.open(path, os.O_RDWR), os.open(path, os.O_RDWR)
    assert files.lock_for_life(owner)
    files.flock(other, fcntl.LOCK_EX, what="x", timeout_s=0)
    os.close(owner)
    os.close(other)


def test_a_killed_process_drops_its_life_lock(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"")
    code = (
        "import os,time; from kvtools.segments import files;"
        f"fd=os.open({str(path)!r},os.O_RDWR); assert files.lock_for_life(fd); print('held',flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    reader = os.open(path, os.O_RDONLY)
    assert files.held_for_life(reader)
    holder.kill()
    holder.wait()
    holder.stdout.close()
    assert not files.held_for_life(reader)
    os.close(reader)


def test_process_facts_are_those_of_the_kernel() -> None:
    own = os.getpid()
    assert files.process_start(own) == int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    assert files.process_start(2**22 + 1) == 0
    assert files.pid_namespace() == os.stat("/proc/self/ns/pid").st_ino


def test_process_stories() -> None:
    own, namespace = os.getpid(), files.pid_namespace()
    assert files.process_story(own, files.process_start(own), namespace) == f"pid {own} runs"
    assert files.process_story(own, 1, namespace) == f"pid {own} is another process now"
    assert files.process_story(own, 1, namespace + 1) == f"pid {own} in another pid namespace"
    assert files.process_story(2**22 + 1, 1, namespace) == f"pid {2**22 + 1} is gone"
