"""Real servers for tests, on loopback and ports of their own: Redis (one, or a cluster of three) and moto's S3.

Each is started at once and waited for by whoever first needs it, so that several start side by side.
"""

import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.support.processes import wait_until


def free_port() -> int:
    """A port that was free just now, with the one 10000 above it, where a cluster's nodes talk.

    Both are below 32768: the kernel gives those above to connections.
    """
    for _ in range(100):
        port = random.randrange(12000, 22000)
        with socket.socket() as probe, socket.socket() as bus:
            try:
                probe.bind(("127.0.0.1", port))
                bus.bind(("127.0.0.1", port + 10000))
            except OSError:
                continue
            return port
    raise AssertionError("no free port")


class Server:
    """A process that listens on `port`. `kill`, `freeze`, `thaw` and `start` do what they say, to our own process only."""

    def __init__(self) -> None:
        self.port = free_port()
        self.folder = Path(tempfile.mkdtemp(prefix="kvt-"))
        self.process: subprocess.Popen[bytes] | None = None
        self._ready = False

    def command(self) -> list[str]:
        raise NotImplementedError

    def answers(self) -> bool:
        raise NotImplementedError

    def start(self) -> "Server":
        log = (self.folder / "log").open("ab")
        with log:
            self.process = subprocess.Popen(self.command(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.folder)
        self._ready = False
        # In the middle of its exec it has no name yet, and who counts processes by name would miss it.
        cmdline = Path(f"/proc/{self.process.pid}/cmdline")
        wait_until(lambda: self.command()[0].encode() in cmdline.read_bytes(), what="the server's process")
        return self

    def wait(self) -> "Server":
        """Until it answers. AssertionError, with what it said, when it does not."""
        if not self._ready:
            try:
                wait_until(self._alive_and_answers, what=f"{self.command()[0]} to answer", timeout_s=30)
            except AssertionError as error:
                raise AssertionError(f"{error}: {(self.folder / 'log').read_text()[-2000:]}") from None
            self._ready = True
        return self

    def _alive_and_answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, f"{self.command()[0]} ended with {self.process.returncode}"
        return self.answers()

    def kill(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait(10)
            self.process = None

    def freeze(self) -> None:
        """It keeps its connections and answers nothing."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def remove(self) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


class RedisServer(Server):
    """redis-server without persistence. `words` are further settings."""

    def __init__(self, *words: str) -> None:
        super().__init__()
        self.words = words

    def command(self) -> list[str]:
        binary = shutil.which("redis-server")
        if binary is None:
            pytest.skip("needs redis-server")
        return [binary, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", *self.words]

    def ask(self, *words: bytes | str) -> bytes:
        """The raw answer to one command."""
        parts = [word.encode() if isinstance(word, str) else word for word in words]
        request = b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)
        with socket.create_connection(("127.0.0.1", self.port), timeout=5) as link:
            link.sendall(request)
            return link.recv(65536)

    def answers(self) -> bool:
        try:
            return self.ask("PING") in (b"+PONG\r\n", b"-NOAUTH Authentication required.\r\n")
        except OSError:
            return False


class RedisCluster:
    """Three masters with all slots."""

    def __init__(self) -> None:
        self.nodes = [RedisServer("--cluster-enabled", "yes") for _ in range(3)]
        try:
            self._join()
        except BaseException:
            self.remove()
            raise

    def _join(self) -> None:
        for node in self.nodes:
            node.start()
        for number, node in enumerate(self.nodes):
            node.wait()
            first, last = number * 5461, 16383 if number == 2 else (number + 1) * 5461 - 1
            assert node.ask("CLUSTER", "ADDSLOTSRANGE", str(first), str(last)) == b"+OK\r\n"
            if number:
                node.ask("CLUSTER", "MEET", "127.0.0.1", str(self.nodes[0].port))
        wait_until(
            lambda: all(b"cluster_state:ok" in node.ask("CLUSTER", "INFO") for node in self.nodes), what="the cluster", timeout_s=20
        )

    @property
    def port(self) -> int:
        return self.nodes[0].port

    def remove(self) -> None:
        for node in self.nodes:
            node.remove()


class MotoServer(Server):
    """moto's server: S3 in memory."""

    def command(self) -> list[str]:
        return [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]

    def answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/moto-api/", timeout=5):
                return True
        except (OSError, urllib.error.URLError):
            return False

    def request(self, method: str, path: str, body: bytes | None = None) -> bytes:
        """One plain HTTP request; moto checks no signatures."""
        url = f"http://127.0.0.1:{self.port}{path}"
        # The header tells moto which service and region an unsigned request is for.
        scope = "Credential=test/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
        headers = {"Authorization": f"AWS4-HMAC-SHA256 {scope}", "Content-Type": "application/octet-stream"}
        request = urllib.request.Request(url, data=body, method=method, headers=headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return bytes(answer.read())
