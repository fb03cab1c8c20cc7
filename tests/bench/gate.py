"""What the gate costs in front of an engine that costs nothing.

The upstream is a bare asyncio protocol that answers a request with a constant, or a stream of 10 000 chunks. It, the gate
(pinned to one core) and this client are three processes. Direct and through the gate are asked in turn.

- added latency: median of one request at a time through the gate, less the median direct.
- requests a second: 64 connections; what the gate answers in one second *of its CPU*, so that a busy machine does not count.
- one stream of 10 000 chunks: time direct over time through the gate.
- memory: resident size of the gate with 1000 streams open that say nothing.

`python -m tests.bench.gate` measures this alone. Where KVCACHED_SRC (or `--peer DIR`) names a checkout of ovg-project/kvcached,
the front end of that project's controller is asked the same on the same upstream, in the same run; it needs aiohttp and yaml.
"""

import asyncio
import contextlib
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import psutil
import uvloop

from tests.bench.measure import Result
from tests.support.processes import SCRIPTS
from tests.support.servers import free_port

CHUNKS = 10_000
STREAMS = 7
"""Pairs of streams a round: one lasts as long as a hiccup of the scheduler."""
IDLE_STREAMS = 1000
_SMALL = (
    b'{"id":"x","object":"text_completion","choices":[{"index":0,"text":"hi"}],"usage":{"prompt_tokens":1,"completion_tokens":1}}'
)
_ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(_SMALL), _SMALL)
_STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_CHUNK = b'data: {"choices":[{"index":0,"text":"token"}]}\n\n'
_ONE_CHUNK = b"%x\r\n%s\r\n" % (len(_CHUNK), _CHUNK)


class Upstream(asyncio.Protocol):
    """An engine that answers at once; `"idle"` in a body opens a stream and says nothing more."""

    def __init__(self) -> None:
        self.pending = b""
        self.writable = asyncio.Event()
        self.writable.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    def data_received(self, data: bytes) -> None:
        self.pending += data
        while (end := self.pending.find(b"\r\n\r\n")) >= 0:
            found = re.search(rb"content-length:\s*(\d+)", self.pending[:end], re.IGNORECASE)
            whole = end + 4 + (int(found[1]) if found else 0)
            if len(self.pending) < whole:
                return
            request, self.pending = self.pending[:whole], self.pending[whole:]
            self.answer(request)

    def answer(self, request: bytes) -> None:
        if b"/is_sleeping" in request[:40]:
            self.transport.write(b'HTTP/1.1 200 OK\r\ncontent-length: 22\r\n\r\n{"is_sleeping": false}')
        elif b'"idle"' in request:
            self.transport.write(_STREAM + _ONE_CHUNK)
        elif b'"stream"' in request:
            self.task = asyncio.ensure_future(self.stream())
        else:
            self.transport.write(_ANSWER)

    async def stream(self) -> None:
        self.transport.write(_STREAM)
        for i in range(CHUNKS):
            self.transport.write(_ONE_CHUNK)
            await self.writable.wait()
            if i % 16 == 15:
                await asyncio.sleep(0)  # so that chunks leave in many writes, as tokens do
        self.transport.write(b"0\r\n\r\n")


async def _upstream() -> None:
    server = await asyncio.get_running_loop().create_server(Upstream, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def _request(**more: object) -> bytes:
    body = json.dumps({"model": "m", "prompt": "hello", "max_tokens": 1, **more}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(body) + body


class Connection:
    """One keep-alive connection of the client."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def open(cls, port: int) -> "Connection":
        return cls(*await asyncio.open_connection("127.0.0.1", port, limit=1 << 22))

    async def head(self, request: bytes) -> bytes:
        self.writer.write(request)
        head = await self.reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        return head

    async def ask(self, request: bytes) -> None:
        found = re.search(rb"content-length: (\d+)", await self.head(request), re.IGNORECASE)
        assert found
        await self.reader.readexactly(int(found[1]))

    async def stream(self) -> None:
        await self.head(_request(stream=True))
        await self.reader.readuntil(b"\r\n0\r\n\r\n")

    def close(self) -> None:
        self.writer.close()


async def _latency(port: int, count: int) -> float:
    """Median seconds of one request after the other."""
    connection, request, times = await Connection.open(port), _request(), []
    for _ in range(count):
        start = time.perf_counter()
        await connection.ask(request)
        times.append(time.perf_counter() - start)
    connection.close()
    return statistics.median(times)


async def _load(port: int, count: int, connections: int = 64) -> None:
    """`count` requests over many connections at once."""
    request = _request()

    async def one() -> None:
        connection = await Connection.open(port)
        for _ in range(count // connections):
            await connection.ask(request)
        connection.close()

    await asyncio.gather(*(one() for _ in range(connections)))


async def _stream(port: int) -> float:
    connection = await Connection.open(port)
    start = time.perf_counter()
    await connection.stream()
    took = time.perf_counter() - start
    connection.close()
    return took


async def _idle_streams(port: int) -> AsyncIterator[None]:
    connections = [await Connection.open(port) for _ in range(IDLE_STREAMS)]
    for connection in connections:
        await connection.head(_request(stream=True, idle=True))
    yield
    for connection in connections:
        connection.close()


@contextlib.contextmanager
def _engine() -> Iterator[int]:
    """The upstream's port."""
    upstream = subprocess.Popen([sys.executable, "-m", "tests.bench.gate", "--upstream"], stdout=subprocess.PIPE, text=True)
    try:
        assert upstream.stdout is not None
        yield int(upstream.stdout.readline())
    finally:
        _end(upstream)


@contextlib.contextmanager
def _gate(engine: int) -> Iterator[tuple[int, psutil.Process]]:
    """The gate in front of `engine`: its port and process."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "models.yaml"
        config.write_text(f"m: {{host: 127.0.0.1, port: {engine}}}\nrouter: {{max_concurrency: 2000}}\n")
        command = [str(SCRIPTS / "kvgate"), "serve", "--config", str(config), "--port", "0"]
        gate = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            os.sched_setaffinity(gate.pid, {min(os.sched_getaffinity(0))})
            assert gate.stderr is not None
            port = next(int(found[1]) for line in gate.stderr if (found := re.search(r"serving .*:(\d+)$", line)))
            next(line for line in gate.stderr if "-> awake" in line)
            yield port, psutil.Process(gate.pid)
        finally:
            _end(gate)


_PEER_LOGGER = "import logging\n\n\ndef get_kvcached_logger(*_):\n    return logging.getLogger('peer')\n"
"""All that the peer's front end takes from its own package, which needs torch; at its default level it logs only errors."""


@contextlib.contextmanager
def _peer(source: Path, engine: int) -> Iterator[tuple[int, psutil.Process]]:
    """The front end of kvcached's controller in front of `engine`: its port and process."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "kvcached"
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "utils.py").write_text(_PEER_LOGGER)
        config = Path(folder) / "peer.yaml"
        config.write_text(
            f"instances:\n- {{name: m, model: m, engine: vllm, engine_args: ['--host=127.0.0.1', '--port={engine}']}}\n"
        )
        port = free_port()
        words = [sys.executable, str(source / "controller" / "frontend.py"), "--config_path", str(config), "--port", str(port)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join((folder, str(source / "controller")))}
        peer = subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True)
        try:
            os.sched_setaffinity(peer.pid, {min(os.sched_getaffinity(0))})
            _wait_for(port, peer)
            yield port, psutil.Process(peer.pid)
        finally:
            _end(peer)


def _wait_for(port: int, process: "subprocess.Popen[str]") -> None:
    for _ in range(200):
        with socket.socket() as sock:
            if sock.connect_ex(("127.0.0.1", port)) == 0:
                return
        if process.poll() is not None:
            break
        time.sleep(0.05)
    raise AssertionError(f"nothing listens on port {port}")


def _end(process: "subprocess.Popen[str]") -> None:
    process.terminate()
    process.communicate()


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


@dataclass(frozen=True)
class Numbers:
    """What one front end costs. Seconds, bytes; `stream` is (direct, through)."""

    direct: float
    added: float
    per_cpu: float
    per_wall: float
    stream: tuple[float, float]
    share: float
    resident_mib: float


async def _numbers(engine: int, port: int, process: psutil.Process, *, quick: bool) -> Numbers:
    rounds, count = (3, 200) if quick else (7, 600)
    await _load(port, 640)
    direct, through, streams = [], [], []
    for _ in range(rounds):
        direct.append(await _latency(engine, count))
        through.append(await _latency(port, count))
        streams += [(await _stream(engine), await _stream(port)) for _ in range(STREAMS)]
    before, start = _cpu(process), time.perf_counter()
    total = 6400 if quick else 32_000
    await _load(port, total)
    per_cpu, per_wall = total / (_cpu(process) - before), total / (time.perf_counter() - start)
    async for _ in _idle_streams(port):
        resident = process.memory_info().rss / (1 << 20)
    return Numbers(
        direct=statistics.median(direct),
        added=statistics.median(t - d for t, d in zip(through, direct, strict=True)),
        per_cpu=per_cpu,
        per_wall=per_wall,
        stream=(statistics.median(d for d, _ in streams), statistics.median(t for _, t in streams)),
        share=statistics.median(d / t for d, t in streams),
        resident_mib=resident,
    )


async def _measure(quick: bool) -> list[Result]:
    peers: list[Result] = []
    with _engine() as engine:
        with _gate(engine) as (port, process):
            found = await _numbers(engine, port, process, quick=quick)
        if source := os.environ.get("KVCACHED_SRC"):
            with _peer(Path(source), engine) as (port, process):
                peers = _beside(found, await _numbers(engine, port, process, quick=quick))
    base, added, resident = found.direct * 1e3, found.added * 1e3, found.resident_mib
    (direct, took), cpu = found.stream, found.per_cpu
    memory = f"resident with {IDLE_STREAMS} idle streams"
    return [
        Result("gate.latency", "added latency of a small request, p50", added, "ms", base, added, 1.5, at_most=True),
        Result("gate.requests", "small requests a second of the gate's CPU", cpu, "1/s", found.per_wall, cpu / 2000, 1.0),
        Result("gate.stream", f"one stream of {CHUNKS} chunks", took, "s", direct, found.share, 0.9),
        Result("gate.memory", memory, resident, "MiB", 150, resident / 150, 1.0, at_most=True),
        *peers,
    ]


def _beside(gate: Numbers, peer: Numbers) -> list[Result]:
    """kvgate's figures with the peer's as their floor."""
    name, of = "gate.peer", "kvcached's front end on the same upstream"
    added, per_cpu, share = gate.added / peer.added, gate.per_cpu / peer.per_cpu, gate.share / peer.share
    memory = gate.resident_mib / peer.resident_mib
    return [
        Result(
            f"{name}.latency",
            f"added latency, p50, beside {of}",
            gate.added * 1e3,
            "ms",
            peer.added * 1e3,
            added,
            1.0,
            at_most=True,
        ),
        Result(f"{name}.requests", f"requests a second of CPU, beside {of}", gate.per_cpu, "1/s", peer.per_cpu, per_cpu, 1.0),
        Result(f"{name}.stream", f"stream's speed as share of direct, beside {of}", gate.share, "", peer.share, share, 1.0),
        Result(
            f"{name}.memory",
            f"resident with {IDLE_STREAMS} idle streams, beside {of}",
            gate.resident_mib,
            "MiB",
            peer.resident_mib,
            memory,
            1.0,
            at_most=True,
        ),
    ]


async def _compare(source: Path, quick: bool) -> None:
    """Both front ends on one upstream, twice in turn; prints a line of JSON each."""
    with _engine() as engine:
        for _ in range(2):
            with _gate(engine) as (port, process):
                print(json.dumps({"front": "kvgate", **asdict(await _numbers(engine, port, process, quick=quick))}), flush=True)
            with _peer(source, engine) as (port, process):
                print(json.dumps({"front": "kvcached", **asdict(await _numbers(engine, port, process, quick=quick))}), flush=True)


def measure(*, quick: bool = False) -> Iterator[Result]:
    """Four results."""
    yield from uvloop.run(_measure(quick))


if __name__ == "__main__":
    if "--upstream" in sys.argv:
        uvloop.run(_upstream())
    elif "--peer" in sys.argv:
        uvloop.run(_compare(Path(sys.argv[sys.argv.index("--peer") + 1]), "--quick" in sys.argv))
        sys.exit()
    for result in measure(quick="--quick" in sys.argv):
        print(json.dumps(result.as_json()), flush=True)
