"""Writing a capture: bounded in time whatever lies below, all or nothing, and nothing left beside it however it ends."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvdoctor.capture import Recording, pack, write_capture
from kvdoctor.facts import Facts
from kvtools.errors import KvError, TimedOut, UsageError
from tests.kvdoctor.test_real_host import in_mount_namespace, needs
from tests.support.processes import Ran, wait_until

WRITER = Path(__file__).parents[2] / "probes/kvdoctor/collect/capture_writer.py"


def entry(path: str, data: bytes = b"x") -> tuple[str, str, bytes]:
    return (path, "file", data)


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts a writer whose input stays open: it has begun, and waits for more."""
    started: list[subprocess.Popen[bytes]] = []

    def start(folder: Path, *entries: tuple[str, str, bytes]) -> subprocess.Popen[bytes]:
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", str(WRITER), str(folder)], stdin=subprocess.PIPE, stderr=subprocess.PIPE
        )
        started.append(child)
        assert child.stdin is not None
        child.stdin.write(pack(entries))
        child.stdin.flush()
        wait_until(lambda: any(place.name == "begun" for place in tmp_path.rglob("begun")), what="the first file")
        return child

    yield start
    for child in started:
        child.kill()
        child.wait()
        for stream in (child.stdin, child.stderr):
            assert stream is not None
            stream.close()


def scratch(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name.startswith("."))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_writer_that_is_told_to_stop_leaves_nothing(
    writer: Callable[..., subprocess.Popen[bytes]], tmp_path: Path, number: signal.Signals
) -> None:
    child = writer(tmp_path / "host", entry("begun"))
    assert len(scratch(tmp_path)) == 1
    child.send_signal(number)
    assert child.wait(10) == 128 + number
    assert os.listdir(tmp_path) == []


def test_what_a_killed_writer_left_is_removed_by_the_next(writer: Callable[..., subprocess.Popen[bytes]], tmp_path: Path) -> None:
    child = writer(tmp_path / "host", entry("begun"))
    child.kill()
    child.wait(10)
    (left,) = scratch(tmp_path)
    write_capture(Recording(), Facts(), tmp_path / "other", redact=True)
    assert scratch(tmp_path) == [left], "another name's is not ours to judge"
    write_capture(Recording(), Facts(), tmp_path / "host", redact=True)
    assert sorted(os.listdir(tmp_path)) == ["host", "other"]


def test_what_a_living_writer_holds_stays(writer: Callable[..., subprocess.Popen[bytes]], tmp_path: Path) -> None:
    child = writer(tmp_path / "host", entry("begun"))
    write_capture(Recording(), Facts(), tmp_path / "host", redact=True)
    assert len(scratch(tmp_path)) == 1
    assert child.stdin is not None
    child.stdin.close()
    assert child.wait(10) == 3, "the destination is another's by now"
    assert scratch(tmp_path) == []
    assert (tmp_path / "host/case.json").exists()
    assert not (tmp_path / "host/begun").exists()


def test_nobodys_hidden_files_are_touched(tmp_path: Path) -> None:
    (tmp_path / ".host.kvdoctor-notes").write_text("mine")
    (tmp_path / ".host.kvdoctor-link").symlink_to(tmp_path)
    (tmp_path / ".host.old").mkdir()
    write_capture(Recording(), Facts(), tmp_path / "host", redact=True)
    assert sorted(os.listdir(tmp_path)) == [".host.kvdoctor-link", ".host.kvdoctor-notes", ".host.old", "host"]


def children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


@pytest.mark.real("host")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_capture_that_is_ended_leaves_all_or_nothing(tmp_path: Path, number: signal.Signals) -> None:
    """Whenever the signal comes, before, during or after the writing: a whole capture or none, and nothing beside it."""
    seen = set()
    for delay in (0.05, 0.2, 0.3, 0.4):
        home = tmp_path / f"{delay}" / "host"
        home.parent.mkdir()
        child = subprocess.Popen(
            [sys.executable, "-m", "kvdoctor", "capture", str(home), "--path", str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        time.sleep(delay)
        child.send_signal(number)
        _, error = child.communicate(timeout=30)
        seen.add(child.returncode)
        # Ctrl-C while the interpreter itself starts is Python's own to show.
        assert number == signal.SIGINT or b"Traceback" not in error
        wait_until(lambda home=home: scratch(home.parent) == [], what="the writer to have cleaned up")
        assert not home.exists() or json.loads((home / "case.json").read_text())["captured"]
    assert seen <= {0, 128 + number, -number, 1 if number == signal.SIGINT else 0}


@pytest.mark.real("host")
def test_a_frozen_destination_costs_its_deadline(tmp_path: Path) -> None:
    needs("mkfs.xfs", "xfs_freeze", "unshare")
    answer = in_mount_namespace("capture", tmp_path)
    frozen, thawed = answer["frozen"], answer["thawed"]
    assert frozen["seconds"] < 20, "the hang itself is for ever"
    assert (frozen["rc"], frozen["stdout"]) == (6, "")
    line, hint = frozen["stderr"].splitlines()
    assert line.startswith(f"kvdoctor: error: {answer['ice']}/host does not take the capture within ")
    assert "state D" in line
    assert hint.startswith("hint: the file system there is frozen")
    assert thawed["rc"] == 0, thawed["stderr"]
    assert answer["left"] == ["host"], "what the abandoned writer left is gone"


@pytest.mark.real("host")
def test_a_full_file_system_has_its_own_advice(tmp_path: Path) -> None:
    needs("unshare")
    answer = in_mount_namespace("full", tmp_path)
    (proof,) = json.loads(answer["proof"]["stdout"])["results"]
    assert proof["status"] == "fail"
    assert "No space left on device" in proof["observed"]
    assert proof["fix"].startswith("The file system there is full")
    assert proof["commands"] == []
    assert answer["capture"]["rc"] == 1
    assert "No space left on device" in answer["capture"]["stderr"]
    assert "hint: the file system there is full" in answer["capture"]["stderr"]
    assert answer["left"] == ["ballast"]


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda place: place.write_text("file"), UsageError),
        (lambda place: place.symlink_to("/tmp"), UsageError),
        (lambda place: place.symlink_to("nowhere"), UsageError),
        (lambda place: (place.mkdir(), (place / "mine").write_text("x")), UsageError),
        (lambda place: place.parent.joinpath("host").symlink_to("host"), UsageError),
    ],
)
def test_a_destination_that_is_taken(tmp_path: Path, make: Callable[[Path], object], kind: type[KvError]) -> None:
    make(tmp_path / "host")
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(kind, match=r"is there and (not empty|no directory)"):
        write_capture(Recording(), Facts(), tmp_path / "host", redact=True)
    assert sorted(os.listdir(tmp_path)) == before


def test_names_no_file_can_have(tmp_path: Path) -> None:
    with pytest.raises(KvError, match="File name too long"):
        write_capture(Recording(), Facts(), tmp_path / ("x" * 300), redact=True)
    (tmp_path / "file").touch()
    with pytest.raises(KvError, match=r"Not a directory|File exists"):
        write_capture(Recording(), Facts(), tmp_path / "file" / "host", redact=True)
    assert os.listdir(tmp_path) == ["file"]


def test_a_writer_that_is_merely_slow_cleans_up_at_its_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not frozen, only slow: SIGTERM comes before SIGKILL."""
    slow = tmp_path / "slow.py"
    slow.write_text(
        WRITER.read_text().replace(
            "def write(stream", "def write(a, b):\n    import time\n    time.sleep(60)\n\n\ndef unused(stream"
        )
    )
    from kvdoctor.collect import tools

    real = tools.run
    monkeypatch.setattr(tools, "run", lambda key, argv, *rest, **more: real(key, [*argv[:3], str(slow), *argv[4:]], *rest, **more))
    place = tmp_path / "place"
    place.mkdir()
    with pytest.raises(TimedOut, match="does not take the capture within"):
        write_capture(Recording(), Facts(), place / "host", redact=True, deadline_s=1.0)
    assert os.listdir(place) == []


def test_a_killed_look_leaves_no_child_behind(doctor: Callable[..., Ran], tmp_path: Path) -> None:
    """Ctrl-C and SIGTERM during --prove: the child that writes a gigabyte ends with its parent."""
    child = subprocess.Popen(
        [sys.executable, "-m", "kvdoctor", "--prove", "--path", str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    found: list[int] = []

    def proving() -> bool:
        for pid in children(child.pid):
            try:
                if b"proof_disk.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
            except OSError:
                continue
        return bool(found) or child.poll() is not None

    wait_until(proving, what="the proof")
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=30)
    if found:
        assert child.returncode in (143, 0, 1, 7)
        wait_until(lambda: not Path(f"/proc/{found[0]}").exists(), what="the proof's end")
    assert list(tmp_path.iterdir()) == []
