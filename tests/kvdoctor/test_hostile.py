"""Trees that mean harm, or are merely broken: every file of a host replaced by something that blocks, never ends or lies."""

import gzip
import io
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvdoctor import api
from kvdoctor.capture import Recording, write_capture
from kvdoctor.collect.engines import scan_processes
from kvdoctor.collect.source import Source, open_regular
from kvdoctor.fix import script
from kvdoctor.report import Progress, lines
from kvdoctor.rules.base import quote
from kvtools.errors import TimedOut, UsageError
from tests.support.processes import Ran

LaidOut = Callable[[str], tuple[Path, dict[str, Any]]]


def fifo(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


def circle(path: Path) -> None:
    path.symlink_to(path.name)


def folder(path: Path) -> None:
    path.mkdir()


def listener(path: Path) -> None:
    """A socket's file; bound by a short name, because a socket address holds 108 bytes."""
    with socket.socket(socket.AF_UNIX) as sock:
        short = Path("/tmp") / f"kvdoctor-{os.getpid()}"
        sock.bind(str(short))
        shutil.move(short, path)


def device(path: Path) -> None:
    """/dev/zero under another name: endless, and opening a device may set it off."""
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))
    except PermissionError:
        path.symlink_to("/dev/zero")


def noise(path: Path) -> None:
    path.write_bytes(os.urandom(4096) + b"\x1b[2J\x00\n")


def nested(path: Path) -> None:
    path.write_bytes(b"[" * 200_000)


BOMB = gzip.compress(bytes(16 << 20))


def bomb(path: Path) -> None:
    path.write_bytes(BOMB)


KINDS = (fifo, endless, circle, folder, listener, device, noise, nested, bomb)


def replace_all(tree: Path, make: Callable[[Path], None]) -> int:
    files = [path for path in tree.rglob("*") if path.is_file() and not path.is_symlink()]
    for path in files:
        path.unlink()
        make(path)
    return len(files)


@pytest.mark.parametrize("make", KINDS, ids=lambda kind: kind.__name__)
def test_a_mounted_host_whose_files_are_all_alike(laid_out: LaidOut, make: Callable[[Path], None]) -> None:
    capture, _ = laid_out("00-base-amd-good")
    assert replace_all(capture / "root", make) > 40
    started = time.monotonic()
    facts = api.collect_host(capture / "root", ["/nvme/kvd-long"], deadline_s=2.0)
    report = api.judge(facts)
    assert time.monotonic() - started < 20, "a hang would be for ever"
    assert report.verdict != "ready"
    assert "\x1b" not in json.dumps(report.to_json())


@pytest.mark.parametrize("make", KINDS, ids=lambda kind: kind.__name__)
def test_a_capture_whose_answers_are_all_alike(
    doctor: Callable[..., Ran], laid_out: LaidOut, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], None]
) -> None:
    monkeypatch.setattr(api, "CAPTURE_DEADLINE_S", 2.0)
    capture, _ = laid_out("00-base-amd-good")
    for name in ("paths", "processes", "shm", "scripts", "segments", "devices", "statx", "log"):
        (capture / "cmd" / f"{name}.json").touch()
    replace_all(capture / "cmd", make)
    ran = doctor("--from", capture)
    assert ran.rc in (0, 1, 7)
    assert ran.stderr == ""
    assert "\x1b" not in ran.stdout
    (capture / "case.json").unlink()
    make(capture / "case.json")
    ran = doctor("--from", capture)
    assert ran.rc == 2
    assert ran.stderr.startswith(f"kvdoctor: error: {capture / 'case.json'}: ")


def test_a_look_that_does_not_come_back_says_where(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A file that never answers, as on a dead mount: here a read that waits for the end of the test."""
    end = threading.Event()
    real = Source.read_bytes

    def stuck(self: Source, path: str, limit: int = 4096) -> bytes | None:
        if path == "/etc/os-release":
            self.host_path(path)
            end.wait()
        return real(self, path, limit)

    monkeypatch.setattr(Source, "read_bytes", stuck)
    started = time.monotonic()
    try:
        with pytest.raises(TimedOut) as caught:
            api.collect_host(tmp_path, [str(tmp_path)], deadline_s=0.2)
    finally:
        end.set()
    assert time.monotonic() - started < 20
    assert caught.value.message == f"the look does not come back from {tmp_path}/etc/os-release within 0.2 s"


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("text")
    with open_regular(tmp_path / "text") as file:
        assert file.read() == b"text"
    for make in (fifo, listener, device):
        make(tmp_path / make.__name__)
        with pytest.raises(OSError, match="not a regular file"):
            open_regular(tmp_path / make.__name__)


@pytest.mark.parametrize("path", ["", " ", "\t"])
def test_an_empty_path_is_a_slip_of_the_shell(path: str) -> None:
    with pytest.raises(UsageError, match="--path is empty"):
        api.collect_host(paths=[path], run_tools=False)


def test_a_path_that_can_never_be_is_a_failure_and_says_why(tmp_path: Path) -> None:
    circle(tmp_path / "circle")
    (tmp_path / "file").touch()
    wanted = {
        str(tmp_path / "circle"): "its links go in a circle",
        str(tmp_path / ("x" * 300)): "its name is too long",
        str(tmp_path / "file" / "below"): "a part of it is no directory",
        str(tmp_path / "none"): "no such directory",
    }
    report = api.judge(api.collect_host(paths=list(wanted), run_tools=False), only=["storage.exists"])
    assert {item.scope: (item.status, item.observed) for item in report.results} == {k: ("fail", v) for k, v in wanted.items()}


def test_a_current_directory_that_is_gone(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    enter = f'cd {gone} && rmdir {gone} && exec "$@"'

    def run(shell: str, *words: str | Path) -> Ran:
        command = ["/bin/sh", "-c", shell, "sh", sys.executable, "-m", "kvdoctor", *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL)
        return Ran(done.returncode, done.stdout, done.stderr)

    named = run(enter, "--json", "--path", tmp_path)
    assert [item["status"] for item in named.json()["results"] if item["id"] == "storage.exists"] == ["pass"]
    gone.mkdir()
    relative = run(enter, "--path", "here")
    assert relative.rc == 2
    assert relative.stderr.splitlines()[-2] == "kvdoctor: error: --path here: the current directory is gone"
    gone.mkdir()
    facts_of_none = run(enter, "--root", "/", "--json", "--only", "storage.exists").json()
    assert {item["status"] for item in facts_of_none["results"]} <= {"unknown", "pass"}, "a running kvd may name one"


def test_names_in_a_printed_script_are_words_of_the_shell(laid_out: LaidOut, tmp_path: Path) -> None:
    """The mount point is the host's to choose: what --fix prints must stay one harmless word of it."""
    capture, _ = laid_out("21-ext4-writeback-hidden")
    evil = "/mnt/a b;touch ${OWNED}#"
    facts = api.collect_capture(capture)
    assert facts.paths[0].mount is not None
    facts.paths[0].mount.point = evil
    lines = [line for line in script(api.judge(facts)) if "umount" in line]
    assert lines == [f"umount '{evil}'"]
    facts.paths[0].mount.point = "/mnt/a\nreboot"
    lines = list(script(api.judge(facts)))
    assert all(line.isprintable() for line in lines)
    assert """umount "$(printf '/mnt/a\\012reboot')\"""" in lines
    facts.paths[0].mount.point = "/mnt/a\n"
    assert any(line.startswith("# umount $'/mnt/a\\012'") for line in script(api.judge(facts))), "sh cannot write that name"


@given(st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), min_size=1, max_size=20))
@settings(max_examples=60, deadline=None)
def test_a_quoted_name_is_that_name_for_the_shell(name: str) -> None:
    quoted = quote(name)
    assert quoted.isprintable()
    shell = "bash" if quoted.startswith("$'") else "sh"
    told = subprocess.run([shell, "-c", f"printf %s {quoted}"], capture_output=True, env={**os.environ, "LC_ALL": "C.UTF-8"}).stdout
    assert told == os.fsencode(name)


def test_control_characters_of_a_path_reach_nobodys_terminal(doctor: Callable[..., Ran], tmp_path: Path) -> None:
    evil = tmp_path / "a\nb\x1b[31m\x07c"
    for words in (["--path", evil], ["--path", evil, "-v"], ["--path", evil, "--fix"], ["--path", evil, "--json"]):
        ran = doctor(*words)
        assert not {"\x1b", "\x07"} & set(ran.stdout + ran.stderr)
        assert "\nb" not in ran.stdout + ran.stderr
    ran = doctor("capture", evil, "--path", tmp_path)
    assert ran.rc == 0
    assert not {"\x1b", "\x07"} & set(ran.stdout + ran.stderr)
    assert (evil / "case.json").exists()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_fits_a_line_and_escapes_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    stream = Terminal()
    draw = Progress(stream)
    draw("/mnt/\x1b[2J\n" + "x" * 200)
    draw.done()
    told = stream.getvalue().removeprefix("\r\033[K").removesuffix("\r\033[K")
    assert told.isprintable()
    assert len(told) == 39


STRANGE = (
    *(None, [], {}, "", "x" * 300, "\u00b2", 1e308, -1, 10**400, -(10**30), True, False, 0, 1.5),
    *([[]], [None], {"a": None}, "\x1b[2J\n", "/../.."),
)


def nodes(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The place of every value in a JSON tree."""
    yield path
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for name, item in items:
        yield from nodes(item, (*path, name))


def with_value(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    changed = json.loads(json.dumps(tree))
    here = changed
    for name in path[:-1]:
        here = here[name]
    here[path[-1]] = value
    return changed


@pytest.fixture(scope="module")
def this_host(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A capture of this machine with an engine, a daemon and segments in it: every kind of JSON file a capture has."""
    folder = tmp_path_factory.mktemp("capture") / "host"
    recording = Recording()
    facts = api.collect_host(paths=[str(folder.parent)], run_tools=False, recorder=recording)
    recording.value("processes", {
        "engines": [{"pid": 7, "args": ["vllm", "serve"], "environ": {"PYTHONHASHSEED": "0"}, "cgroup": ""}],
        "daemons": [{"pid": 8, "args": ["kvd", "serve", "--long-path", "/kv", "--max-bytes", "1G"], "environ": {}, "cgroup": "/a"}],
    })  # fmt: skip
    values = {"daemon_up": 1.0, "loads_total": 3, "tier_breaker_open{tier=disk}": 0}
    recording.value(
        "segments", [{"name": "kvtools.connector.7-0", "kind": "connector", "health": "ok", "age_s": 0.1, "values": values}]
    )
    write_capture(recording, facts, folder, redact=True)
    return folder


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_json_of_a_capture_may_hold_anything_anywhere(this_host: Path, data: st.DataObject) -> None:
    files = [*sorted(this_host.glob("cmd/*.json")), this_host / "case.json"]
    file = data.draw(st.sampled_from(files))
    text = file.read_text()
    tree = json.loads(text)
    place = data.draw(st.sampled_from(list(nodes(tree))))
    file.write_text(json.dumps(with_value(tree, place, data.draw(st.sampled_from(STRANGE)))))
    try:
        report = api.judge(api.collect_capture(this_host))
    except UsageError:
        assert file.name == "case.json", "a case that is no object is refused by name"
    else:
        json.dumps(report.to_json(), allow_nan=False)
        assert all("\x1b" not in line for line in lines(report, verbose=True))
    finally:
        file.write_text(text)


def test_below_another_root_only_its_own_processes_count(tmp_path: Path) -> None:
    """A mounted image, or a captured tree, does not run what runs here."""
    script = "import time; print('up', flush=True); time.sleep(60)"
    here = subprocess.Popen([sys.executable, "-c", script, "kvd serve", "--long-path", "/here"], stdout=subprocess.PIPE)
    try:
        assert here.stdout is not None
        here.stdout.readline()
        assert here.pid in [one["pid"] for one in scan_processes()["daemons"]]
        assert scan_processes(str(tmp_path)) == {"engines": [], "daemons": []}
        (tmp_path / "proc" / "77").mkdir(parents=True)
        (tmp_path / "proc" / "77" / "cmdline").write_bytes(b"kvd\0serve\0--long-path\0/there\0")
        (tmp_path / "proc" / "77" / "environ").write_bytes(b"KVD_SOCKET=/run/there.sock\0")
        (daemon,) = scan_processes(str(tmp_path))["daemons"]
        assert (daemon["pid"], daemon["args"][-1], daemon["environ"]) == (77, "/there", {"KVD_SOCKET": "/run/there.sock"})
    finally:
        here.kill()
        here.communicate()
