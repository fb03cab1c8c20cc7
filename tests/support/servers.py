"""Real servers for tests, on loopback and ports of their own: Redis (one, or a cluster of three), moto's S3, Mooncake.

Each is started at once and waited for by whoever first needs it, so that several start side by side.
"""

import importlib.util
import os
import random
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import freeze, wait_until

ENGINE = Path(__file__).resolve().parents[2] / ".venv-vllm"


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

    def environment(self) -> dict[str, str]:
        return dict(os.environ)

    def answers(self) -> bool:
        raise NotImplementedError

    def start(self) -> "Server":
        log = (self.folder / "log").open("ab")
        with log:
            self.process = subprocess.Popen(
                self.command(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.folder, env=self.environment()
            )
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
        freeze(self.process.pid)

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


class MooncakePool(Server):
    """mooncake_master, and a host that gives it 256 MiB of memory: two processes that live and die together."""

    def __init__(self, memory: str = "256 MB") -> None:
        super().__init__()
        self.memory = memory
        self.metrics = free_port()
        self.host_port = free_port()
        self.host: subprocess.Popen[bytes] | None = None
        self._client: Any = None

    def client(self) -> Any:
        """A plain client of the pool in this process, connected when first asked for."""
        if self._client is None:
            import mooncake.store

            client = mooncake.store.MooncakeDistributedStore()
            code = client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", f"127.0.0.1:{self.port}")
            assert code == 0, f"Mooncake's client does not start (code {code})"
            self._client = client
        return self._client

    def remove(self) -> None:
        if self._client is not None:
            self._client.close()
        super().remove()

    @staticmethod
    def _binary(name: str) -> str:
        found = importlib.util.find_spec("mooncake")
        if found is None or found.origin is None:
            pytest.skip("needs the Python package mooncake-transfer-engine-non-cuda")
        return str(Path(found.origin).with_name(name))

    def command(self) -> list[str]:
        ports = [f"--rpc_port={self.port}", f"--metrics_port={self.metrics}", "--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1"]
        return [self._binary("mooncake_master"), *ports, "--rpc_thread_num=2", "--logtostderr"]

    def start(self) -> "Server":
        super().start()
        self.start_host()
        return self

    def start_host(self) -> None:
        """The process whose memory the pool is; it waits for the master by itself."""
        words = [
            f"--port={self.host_port}",
            f"--global_segment_size={self.memory}",
            f"--master_server_address=127.0.0.1:{self.port}",
        ]
        command = [self._binary("mooncake_client"), "--host=127.0.0.1", *words, "--metadata_server=P2PHANDSHAKE", "--logtostderr"]
        with (self.folder / "host.log").open("ab") as log:
            environment = {**os.environ, "MC_TCP_BIND_ADDRESS": "127.0.0.1"}
            self.host = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.folder, env=environment
            )
        cmdline = Path(f"/proc/{self.host.pid}/cmdline")
        wait_until(lambda: command[0].encode() in cmdline.read_bytes(), what="the host's process")
        self._ready = False

    def answers(self) -> bool:
        """The host's memory is in the pool."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics}/metrics", timeout=5) as answer:
                lines = answer.read().decode().splitlines()
        except OSError:
            return False
        return any(line.startswith("master_total_capacity_bytes ") and not line.endswith(" 0") for line in lines)

    def kill(self) -> None:
        self.kill_host()
        super().kill()

    def kill_host(self) -> None:
        if self.host is not None:
            self.host.send_signal(signal.SIGCONT)
            self.host.kill()
            self.host.wait(10)
            self.host = None

    def freeze_host(self) -> None:
        assert self.host is not None
        freeze(self.host.pid)

    def thaw_host(self) -> None:
        assert self.host is not None
        self.host.send_signal(signal.SIGCONT)


LMCACHE = """
import runpy, socket
bind = socket.socket.bind
def reuse(self, address):
    self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return bind(self, address)
socket.socket.bind = reuse
runpy.run_module("lmcache.v1.server", run_name="__main__")
"""
"""LMCache's server as it is, but that it can be started again at once where it was killed."""


class LmcacheServer(Server):
    """LMCache's own remote server. It needs torch, so it runs in the engine's environment."""

    def command(self) -> list[str]:
        python = ENGINE / "bin" / "python"
        if not (ENGINE / "lmcache").is_dir():
            pytest.skip("needs the engine's environment with LMCache: make .venv-vllm/.ready")
        return [str(python), "-c", LMCACHE, "127.0.0.1", str(self.port)]

    def environment(self) -> dict[str, str]:
        quiet = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"}
        return {**os.environ, "PYTHONPATH": str(ENGINE / "lmcache"), **quiet}

    def ask(self, command: int, key: str, body: bytes = b"") -> bytes | None:
        """One command, past the adapter: the value that came (b"" for the answer to HEALTH), None for FAIL."""
        frame = struct.pack("<9i150s", command, len(body), 4, 6, 0, len(body), 0, 0, 0, key.encode().ljust(150))
        with socket.create_connection(("127.0.0.1", self.port), timeout=10) as link, link.makefile("rb") as answers:
            link.sendall(frame + body)
            if command == 1:
                link.sendall(struct.pack("<9i150s", 5, 0, 4, 6, 0, 0, 0, 0, 0, key.encode().ljust(150)))
            code, length = struct.unpack("<9i", answers.read(36))[:2]
            return answers.read(length) if code == 200 else None

    def answers(self) -> bool:
        try:
            return self.ask(5, "kvd@1@0@00@uint8") == b""
        except (OSError, struct.error):
            return False


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
