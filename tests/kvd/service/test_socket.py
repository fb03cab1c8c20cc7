"""The socket's life: who owns it, who may come in, what a second daemon, a stale file or a stranger finds."""

import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from kvd.wire import protocol as p
from tests.kvd.wire.raw import Raw
from tests.support.daemon import Daemon, MakeDaemon
from tests.support.processes import run_cli, wait_until

pytestmark = pytest.mark.real("kvd")

K = b"k" * 32
V = b"value" * 5000
NOBODY = 65534


def serve(*words: str | Path, timeout_s: float = 15.0) -> tuple[int, str]:
    """Exit status and stderr of a `kvd serve` that is expected to refuse."""
    run = run_cli("kvd", "serve", "--max-bytes", "4MiB", *words, timeout_s=timeout_s)
    assert run.stdout == ""
    assert "Traceback" not in run.stderr
    return run.rc, run.stderr


def as_nobody(work: Callable[[], object]) -> str:
    """What `work` returned or raised (by name) in a process of another user."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            answer = str(work())
        except BaseException as error:
            answer = type(error).__name__
        os.write(write_end, answer.encode())
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        answer = pipe.read()
    os.waitpid(pid, 0)
    return answer


class TestOwnership:
    def test_a_live_daemons_socket_is_refused_and_its_daemon_unharmed(self, kvd_daemon: MakeDaemon) -> None:
        daemon = kvd_daemon(max_bytes="4MiB")
        with daemon.client() as client:
            client.put(K, V)
            inode = daemon.socket.stat().st_ino
            rc, stderr = serve("--socket", daemon.socket)
            assert rc == 1
            assert f"a daemon is already running on {daemon.socket}" in stderr
            assert "--socket" in stderr
            assert client.get(K) == V
            assert daemon.socket.stat().st_ino == inode
            assert daemon.segment.exists()

    def test_a_stale_socket_is_replaced(self, kvd_daemon: MakeDaemon) -> None:
        daemon = kvd_daemon(max_bytes="4MiB")
        daemon.kill9()
        assert daemon.socket.exists()
        daemon.start()
        with daemon.client() as client:
            assert client.put(K, V)

    def test_a_live_socket_whose_lock_file_was_deleted_is_not_stolen_either(self, kvd_daemon: MakeDaemon) -> None:
        daemon = kvd_daemon(max_bytes="4MiB")
        Path(f"{daemon.socket}.lock").unlink()
        rc, stderr = serve("--socket", daemon.socket)
        assert rc == 1
        assert "already running" in stderr
        with daemon.client() as client:
            assert client.put(K, V)

    def test_another_programs_socket_is_not_stolen(self, kvd_daemon: MakeDaemon) -> None:
        daemon = kvd_daemon(max_bytes="4MiB", start=False)
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(str(daemon.socket))
            other.listen()
            rc, stderr = serve("--socket", daemon.socket)
            assert rc == 1
            assert str(daemon.socket) in stderr
            assert stat.S_ISSOCK(daemon.socket.stat().st_mode)

    @pytest.mark.parametrize("kind", ["file", "folder", "link"])
    def test_what_is_no_socket_is_not_touched(self, kvd_daemon: MakeDaemon, kind: str) -> None:
        daemon = kvd_daemon(max_bytes="4MiB", start=False)
        target = daemon.folder / "target"
        target.write_text("precious")
        if kind == "file":
            daemon.socket.write_text("precious")
        elif kind == "folder":
            daemon.socket.mkdir()
        else:
            daemon.socket.symlink_to(target)
        rc, stderr = serve("--socket", daemon.socket)
        assert rc == 2
        assert "is not a socket" in stderr
        assert target.read_text() == "precious"
        assert os.path.lexists(daemon.socket)

    def test_a_folder_that_is_not_there_is_not_made(self, tmp_path: Path) -> None:
        rc, stderr = serve("--socket", tmp_path / "a" / "b" / "kvd.sock")
        assert rc == 2
        assert "No such file or directory" in stderr
        assert "a folder that exists" in stderr
        assert list(tmp_path.iterdir()) == []

    def test_its_end_leaves_no_socket(self, kvd_daemon: MakeDaemon) -> None:
        daemon = kvd_daemon(max_bytes="4MiB", start=False)
        deep = daemon.folder / "a" / "kvd.sock"
        deep.parent.mkdir()
        daemon.words[daemon.words.index("--socket") + 1] = str(deep)
        daemon.socket = deep
        daemon.start()
        assert stat.S_ISSOCK(deep.stat().st_mode)
        assert daemon.stop() == 0
        assert not deep.exists()
        assert not daemon.segment.exists()

    @pytest.mark.parametrize("path", ["/proc/kvd.sock", "/dev/null/kvd.sock", "/tmp/" + "x" * 120 + "/kvd.sock"])
    def test_a_path_that_cannot_be_is_one_plain_line(self, path: str) -> None:
        rc, stderr = serve("--socket", path)
        assert rc == 2
        assert path in stderr or "too long" in stderr
        assert len(stderr.strip().splitlines()) <= 2

    def test_a_refused_start_leaves_no_lock_file(self, kvd_daemon: MakeDaemon, tmp_path: Path) -> None:
        """Not of its socket, not in a folder it could not use; and the lock of a daemon that runs stays that one's."""
        (tmp_path / "kvd.sock").write_text("precious")
        assert serve("--socket", tmp_path / "kvd.sock")[0] == 2
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "manifest.json").write_text('{"format": "another", "version": 1}')
        assert serve("--socket", tmp_path / "s", "--long-path", tmp_path / "other", "--long-bytes", "1MiB")[0] == 2
        assert serve("--socket", tmp_path / "s", "--metrics-port", "99999")[0] == 2
        assert serve("--socket", tmp_path / "s", "--socket-group", "no-such-group")[0] == 2
        assert sorted(path.name for path in tmp_path.rglob("*")) == ["kvd.sock", "manifest.json", "other"]
        daemon = kvd_daemon(max_bytes="4MiB")
        lock = Path(f"{daemon.socket}.lock")
        before = lock.stat().st_ino
        assert serve("--socket", daemon.socket)[0] == 1
        assert lock.stat().st_ino == before
        assert daemon.stop() == 0
        assert not lock.exists()

    def test_one_starts_at_a_time(self, kvd_daemon: MakeDaemon) -> None:
        """Many at once on one path: one serves, the others say who does."""
        daemon = kvd_daemon(max_bytes="4MiB", start=False)
        others = [kvd_daemon(max_bytes="4MiB", start=False) for _ in range(3)]
        for other in others:
            other.words[other.words.index("--socket") + 1] = str(daemon.socket)
        daemon.start()
        for other in others:
            with pytest.raises(AssertionError, match="already running"):
                other.start()
        with daemon.client() as client:
            assert client.ping() > 0


@pytest.fixture(scope="module")
def daemon(kvd_daemon_module: MakeDaemon) -> Daemon:
    made = kvd_daemon_module(max_bytes="4MiB")
    made.folder.chmod(0o755)
    return made


class TestAdmission:
    def test_the_socket_is_its_owners_alone(self, daemon: Daemon) -> None:
        assert stat.S_IMODE(daemon.socket.stat().st_mode) == 0o600

    @pytest.mark.skipif(os.geteuid() != 0, reason="needs root: to become another user")
    def test_another_user_is_not_let_in(self, daemon: Daemon) -> None:
        """Not by the file's mode, and, when that is loose, not by the daemon."""
        assert as_nobody(lambda: Raw(daemon.socket)) == "PermissionError"
        daemon.socket.chmod(0o666)
        try:
            assert as_nobody(lambda: Raw(daemon.socket)) in ("EOFError", "ConnectionResetError", "BrokenPipeError")
        finally:
            daemon.socket.chmod(0o600)
        with daemon.client() as client:
            assert client.stats()["refused_peers_total"] >= 1
        assert f"refused a connection of uid {NOBODY}" in daemon.text()

    @pytest.mark.skipif(os.geteuid() != 0, reason="needs root: to become another user")
    @pytest.mark.parametrize("flag", ["--allow-uid", "--allow-gid"])
    def test_an_allowed_user_is_let_in_and_can_read_and_write(self, kvd_daemon: MakeDaemon, flag: str) -> None:
        daemon = kvd_daemon("--socket-mode", "0660", "--socket-group", str(NOBODY), flag, str(NOBODY), max_bytes="4MiB")
        daemon.folder.chmod(0o755)
        status = daemon.socket.stat()
        assert (stat.S_IMODE(status.st_mode), status.st_gid) == (0o660, NOBODY)

        def work() -> bool:
            with daemon.client() as client:
                return bool(client.put(K, V)) and client.get(K) == V

        assert as_nobody(work) == "True"

    @pytest.mark.skipif(os.geteuid() != 0, reason="needs root: to become another user")
    def test_a_reader_cannot_reopen_the_arena_for_writing(self, kvd_daemon: MakeDaemon) -> None:
        daemon = kvd_daemon("--socket-mode", "0666", "--allow-uid", str(NOBODY), max_bytes="4MiB")
        daemon.folder.chmod(0o755)

        def work() -> str:
            raw = Raw(daemon.socket, p.Hello(p.VERSION, write=False))
            os.close(os.open(f"/proc/self/fd/{raw.fds[0]}", os.O_RDWR))
            return "reopened"

        assert as_nobody(work) == "PermissionError"

    def test_who_did_not_ask_to_write_may_not(self, daemon: Daemon) -> None:
        with Raw(daemon.socket, p.Hello(p.VERSION, write=False)) as raw:
            for request in (
                p.Reserve(1, [10]),
                p.PutInline(1, b"n" * 32, [K], [b"v"], 3),
                p.Commit(1, b"n" * 32, [1], [1], [K], 3),
            ):
                answer = raw.ask(request)
                assert isinstance(answer, p.Failed)
                assert answer.code == "read_only"
            assert raw.ask(p.Exists(1, b"n" * 32, [K])).flags == b"\0"

    def test_a_session_is_nothing_to_guess(self, daemon: Daemon) -> None:
        with Raw(daemon.socket, p.Hello(p.VERSION, write=True, attach=b"s" * 16)) as raw:
            assert isinstance(raw.welcome, p.Failed)
            assert not raw.fds

    @pytest.mark.skipif(os.geteuid() != 0, reason="needs root: to become another user")
    def test_a_session_of_another_process_gives_no_descriptor(self, daemon: Daemon) -> None:
        """Also to somebody who learned its name: the kernel says whose the connection is."""
        with Raw(daemon.socket, p.Hello(p.VERSION, write=False)) as raw:
            session = raw.welcome.session
            pid = os.fork()
            if pid == 0:
                thief = Raw(daemon.socket, p.Hello(p.VERSION, write=True, attach=session))
                os._exit(0 if isinstance(thief.welcome, p.Failed) and not thief.fds else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

    @pytest.mark.parametrize(
        "garbage",
        [
            b"GET / HTTP/1.1\r\nHost: kvd\r\n\r\n",
            b"\x10\x00\x00\x00" + b"\xc1" * 16,
            b"\x02\x00\x00\x00" + b"\x91\x01",
            b"\x00\x00\x00\x00",
            b"xy",
            b"\x40\x00\x00\x00half",
        ],
    )
    def test_garbage_in_place_of_a_greeting_is_counted_and_answered(self, daemon: Daemon, garbage: bytes) -> None:
        with daemon.client() as client:
            before = client.stats()["bad_frames_total"]
            raw = Raw(daemon.socket, None)
            raw.send(garbage)
            raw.link.shutdown(socket.SHUT_WR)
            answer = raw.answer()
            assert isinstance(answer, p.Failed)
            assert answer.code == "bad_frame"
            assert raw.hung_up()
            raw.close()
            assert client.stats()["bad_frames_total"] == before + 1
            Raw(daemon.socket, None).close()  # a look whether somebody is there says nothing, and is nothing bad
            assert client.ping() > 0
            assert client.stats()["bad_frames_total"] == before + 1

    def test_one_who_greets_and_says_no_more_costs_one_connection(self, daemon: Daemon) -> None:
        idle = [Raw(daemon.socket) for _ in range(20)]
        with daemon.client() as client:
            assert client.stats()["connections"] == 21
            for raw in idle:
                raw.close()
            wait_until(lambda: client.stats()["connections"] == 1, what="the idle ones to be let go")
