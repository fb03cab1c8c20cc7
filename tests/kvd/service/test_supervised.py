"""Under a service manager: the socket it passes, what SIGHUP takes over."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvd.wire.client import Client
from tests.support.daemon import Daemon
from tests.support.processes import SCRIPTS, wait_until

MakeDaemon = Callable[..., Daemon]

ACTIVATE = """
import os, socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1] + ".new")
listener.listen(8)
os.rename(sys.argv[1] + ".new", sys.argv[1])
os.dup2(listener.fileno(), 3)
os.set_inheritable(3, True)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS="1")
os.execv(sys.argv[2], sys.argv[2:])
"""


@pytest.mark.real("kvd")
def test_a_socket_passed_by_the_manager_is_served_and_left_in_place() -> None:
    with tempfile.TemporaryDirectory(prefix="kvt-") as folder:
        path = Path(folder) / "kvd.sock"
        words = [str(SCRIPTS / "kvd"), "serve", "--socket", str(path), "--max-bytes", "8MiB"]
        daemon = subprocess.Popen([sys.executable, "-c", ACTIVATE, str(path), *words], stderr=subprocess.PIPE)
        try:
            wait_until(path.exists, what="the socket")
            with Client(path, timeout_s=20) as client:  # connects at once, and is answered when the daemon is up
                assert client.put(bytes(32), b"value")
                assert client.get(bytes(32)) == b"value"
        finally:
            daemon.terminate()
            _, log = daemon.communicate(timeout=20)
        assert daemon.returncode == 0, log.decode()
        assert path.exists(), "the manager's socket is the manager's to remove"


@pytest.mark.real("kvd")
def test_sighup_takes_over_what_can_change_and_names_what_cannot(kvd_daemon: MakeDaemon, tmp_path: Path) -> None:
    config = tmp_path / "kvd.toml"
    config.write_text('eviction_policy = "LRU"\n')
    daemon = kvd_daemon("--config", config, max_bytes="1MiB")
    keys = [os.urandom(32) for _ in range(40)]
    with daemon.client(timeout_s=1) as client:
        assert all(client.put_many([(key, bytes(100_000)) for key in keys], retention="ephemeral"))
        config.write_text('eviction_policy = "noop"\nmetrics_port = 9\nlog_format = "json"\nlog_level = "DEBUG"\n')
        daemon.signal(signal.SIGHUP)
        wait_until(lambda: "settings reloaded" in daemon.text(), what="the reload")
        assert "wait for a restart: log_format, metrics_port\n" in daemon.text()
        time.sleep(0.4)  # leases of the puts before have ended
        assert not client.put(os.urandom(32), bytes(900_000)), "noop: a full arena refuses"
        config.write_text("eviction = 1\n")
        daemon.signal(signal.SIGHUP)
        wait_until(lambda: "were not reloaded" in daemon.text(), what="the refusal")
        assert client.ping() < 1


def test_sockets_of_another_process_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvd.service.server import inherited_socket

    monkeypatch.setenv("LISTEN_FDS", "1")
    monkeypatch.setenv("LISTEN_PID", str(os.getpid() + 1))
    assert inherited_socket() is None


def test_a_host_that_suits_the_disk_tier_badly_is_said_in_one_line_a_path(tmp_path: Path) -> None:
    from kvd.service.settings import preflight

    (line,) = preflight([tmp_path, tmp_path / "not there"])
    assert str(tmp_path / "not there") in line
    assert "kvdoctor --path" in line
    assert "\n" not in line
