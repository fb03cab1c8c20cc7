"""A real `kvd serve` in a scratch folder: started, asked, killed, restarted by tests.

    def test_survives(kvd_daemon):
        daemon = kvd_daemon(tier="256MiB")
        with daemon.client() as client: ...
        daemon.kill9()
        daemon.start()

Sockets live in a short folder of their own: a Unix socket's path ends at 108 bytes, which pytest's folders can exceed.
Readiness is what the daemon itself says over NOTIFY_SOCKET, so a test neither sleeps nor connects too early.
"""

import hashlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pytest

from tests.support.processes import SCRIPTS, SHARED_MEMORY, Ran, freeze, run_cli

if TYPE_CHECKING:
    from kvd.wire.client import Client


class Daemon:
    """One daemon and its folder. `start` and `stop` may alternate; socket and tier folder stay the same."""

    def __init__(self, *words: str | Path, max_bytes: str = "64MiB", tier: str | None = None, env: Mapping[str, str] | None = None):
        self.folder = Path(tempfile.mkdtemp(prefix="kvt-"))
        self.socket = self.folder / "kvd.sock"
        self.tier = self.folder / "tier"
        self.log = self.folder / "kvd.log"
        self.env = dict(env or {})
        self.launcher: list[str] = []
        """What starts it, such as `unshare ...`; it is the process that signals go to then."""
        self.words = ["serve", "--socket", str(self.socket), "--max-bytes", max_bytes, *map(str, words)]
        if tier is not None:
            self.tier.mkdir()
            self.words += ["--long-path", str(self.tier), "--long-bytes", tier]
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self.process is not None, "the daemon was not started"
        return self.process.pid

    @property
    def segment(self) -> Path:
        """Its stats segment (named after the socket's real path)."""
        instance = hashlib.sha256(os.path.realpath(self.socket).encode()).hexdigest()[:12]
        return SHARED_MEMORY / f"kvtools.kvd.{instance}"

    def start(self, *, wait_s: float = 20.0) -> "Daemon":
        """Start it and wait until it says that it is ready. AssertionError with its log when it ends or stays silent."""
        assert self.process is None, "the daemon is running"
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
            address = self.folder / "notify"
            address.unlink(missing_ok=True)
            notify.bind(str(address))
            notify.settimeout(0.05)
            with self.log.open("ab") as log:
                self.process = subprocess.Popen(
                    [*self.launcher, str(SCRIPTS / "kvd"), *self.words],
                    env={**os.environ, **self.env, "NOTIFY_SOCKET": str(address)},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            deadline = time.monotonic() + wait_s
            while True:
                try:
                    if b"READY=1" in notify.recv(4096):
                        return self
                except TimeoutError:
                    pass
                if (status := self.process.poll()) is not None:
                    self.process = None
                    raise AssertionError(f"kvd serve ended with {status} before it was ready:\n{self.text()}")
                if time.monotonic() > deadline:
                    self.kill9()
                    raise AssertionError(f"kvd serve was not ready after {wait_s:g} s:\n{self.text()}")

    def kill9(self) -> None:
        """kill -9, now."""
        self.signal(signal.SIGKILL)
        self.wait()

    def stop(self, *, timeout_s: float = 30.0) -> int:
        """SIGTERM, and its exit status."""
        self.signal(signal.SIGTERM)
        return self.wait(timeout_s=timeout_s)

    def restart(self, *, kill: bool = False) -> "Daemon":
        """Stop (or kill -9) and start again on the same socket and tier."""
        if kill:
            self.kill9()
        else:
            self.stop()
        return self.start()

    def signal(self, number: signal.Signals) -> None:
        if number is signal.SIGSTOP:
            freeze(self.pid)
        else:
            os.kill(self.pid, number)

    def wait(self, *, timeout_s: float = 30.0) -> int:
        """Wait for its end; the exit status, negative for a signal."""
        assert self.process is not None, "the daemon was not started"
        status = self.process.wait(timeout_s)
        self.process = None
        return status

    def text(self) -> str:
        """Its log so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def run(self, *words: str | Path, stdin: str | None = None, timeout_s: float = 30.0) -> Ran:
        """A `kvd` command against this daemon."""
        return run_cli("kvd", *words, env={"KVD_SOCKET": str(self.socket)}, stdin=stdin, timeout_s=timeout_s)

    def client(self, **options: Any) -> "Client":
        """A client connected to this daemon."""
        from kvd.wire.client import Client

        return Client(self.socket, **options)

    def remove(self) -> None:
        """Stop it if it runs, and remove all it left: its folder and, after kill -9, its stats segment."""
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)
            self.process = None
        self.segment.unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)


class MakeDaemon(Protocol):
    """What the fixture `kvd_daemon` is: call it for a started daemon; `start=False` for one that is only set up."""

    def __call__(
        self,
        *words: str | Path,
        max_bytes: str = "64MiB",
        tier: str | None = None,
        env: Mapping[str, str] | None = None,
        start: bool = True,
    ) -> Daemon: ...


def _factory() -> Iterator[MakeDaemon]:
    made: list[Daemon] = []

    def make(
        *words: str | Path,
        max_bytes: str = "64MiB",
        tier: str | None = None,
        env: Mapping[str, str] | None = None,
        start: bool = True,
    ) -> Daemon:
        daemon = Daemon(*words, max_bytes=max_bytes, tier=tier, env=env)
        made.append(daemon)
        return daemon.start() if start else daemon

    try:
        yield make
    finally:
        for daemon in reversed(made):
            daemon.remove()


@pytest.fixture
def kvd_daemon() -> Iterator[MakeDaemon]:
    """Makes daemons for one test: `kvd_daemon("--flag", max_bytes="64MiB", tier="256MiB")`."""
    yield from _factory()


@pytest.fixture(scope="module")
def kvd_daemon_module() -> Iterator[MakeDaemon]:
    """The same for a whole test module: for tests that only ask."""
    yield from _factory()
