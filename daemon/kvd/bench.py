"""`kvd bench`: what this host can do, each figure beside its floor in the same run.

arena   put and get of batches through a daemon, beside the same copies between two private buffers (value by value)
disk    stores to and loads from the disk tier, beside O_DIRECT writes and reads of the same directory, same block size,
        same number in flight
Ratios count, not rates: they are taken pairwise, so that a noisy neighbour slows both sides alike.
"""

import contextlib
import hashlib
import math
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import numpy as np

from kvd.errors import KvdError, Unavailable
from kvd.wire.client import Client
from kvtools.errors import UsageError
from kvtools.output import emit, emit_json, note, table
from kvtools.units import format_rate, format_size, parse_size

BATCH_BYTES = 64 << 20
IN_FLIGHT = 4


@dataclass
class Figure:
    """One measurement: bytes a second, the floor's in the same run, and the median of the pairwise ratios."""

    name: str
    size: int
    rate: float
    floor: float
    ratio: float


def run(socket: Path | None, path: Path | None, sizes: list[str], seconds: float, json: bool) -> None:
    """Measure and print. Raises UsageError for sizes that cannot be measured."""
    if not seconds < math.inf:  # nan, too
        raise UsageError("--seconds is no number of seconds", hint="from 0.1 to 60")
    if path is not None and not path.is_dir():
        raise UsageError(f"--path {path} is not a directory", hint="name a directory on the disk to measure")
    wanted = [parse_size(text) for text in sizes]
    for size in wanted:
        if not 4096 < size <= 256 << 20:
            raise UsageError(f"cannot measure values of {format_size(size)}", hint="sizes above 4KiB and up to 256MiB")
    figures: list[Figure] = []
    with _daemon(socket, path, max(wanted)) as client:
        for size in wanted:
            note(f"arena, {format_size(size)} ...")
            figures += _arena(client, size, seconds)
        if path is not None:
            for size in wanted:
                note(f"disk, {format_size(size)} ...")
                figures += _disk(client, path, size, seconds)
    if json:
        emit_json("kvd.bench/1", {"figures": [asdict(figure) for figure in figures]})
        return
    rows = [(f.name, format_size(f.size), format_rate(f.rate), format_rate(f.floor), f"{f.ratio:.2f}") for f in figures]
    for line in table(("WHAT", "VALUE", "MEASURED", "FLOOR", "RATIO"), rows, right=(1, 2, 3, 4)):
        emit(line)


@contextlib.contextmanager
def _daemon(socket: Path | None, path: Path | None, largest: int) -> Iterator[Client]:
    """A client of the named daemon, or of one of our own that ends with the measurement."""
    if socket is not None:
        with Client(socket, namespace="kvd bench", timeout_s=60) as client:
            client.ping()
            yield client
            client.clear()
        return
    scratch = Path(tempfile.mkdtemp(prefix="kvd-bench-"))
    arena = max(512 << 20, 4 * largest)
    command = [sys.executable, "-m", "kvd", "serve", "--socket", str(scratch / "kvd.sock"), "--max-bytes", str(arena)]
    command += ["--log-level", "WARNING", "--drain-timeout", "1s"]
    tier = Path(tempfile.mkdtemp(prefix="kvd-bench-", dir=path)) if path is not None else None
    if tier is not None:
        command += ["--long-path", str(tier), "--long-bytes", str(8 * max(BATCH_BYTES, 2 * largest))]
    daemon = subprocess.Popen(command)
    try:
        with Client(scratch / "kvd.sock", namespace="kvd bench", timeout_s=60) as client:
            _wait_for(client, daemon)
            yield client
    finally:
        daemon.terminate()
        daemon.wait()
        shutil.rmtree(scratch, ignore_errors=True)
        if tier is not None:
            shutil.rmtree(tier, ignore_errors=True)


def _wait_for(client: Client, daemon: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            client.ping()
        except Unavailable:
            if daemon.poll() is not None or time.monotonic() > deadline:
                raise KvdError("the daemon to measure did not start", hint="its message is above") from None
            time.sleep(0.02)
        else:
            return


def _keys(size: int, count: int) -> list[bytes]:
    return [hashlib.sha256(f"{size}/{i}".encode()).digest() for i in range(count)]


def _pairwise(job: Callable[[], object], floor: Callable[[], object], amount: int, seconds: float) -> tuple[float, float, float]:
    """(bytes a second of job, of floor, median of the ratios), the two in turn for `seconds`, at least three pairs."""
    job()
    floor()
    pairs: list[tuple[float, float]] = []
    end = time.perf_counter() + seconds
    while len(pairs) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        floor()
        middle = time.perf_counter()
        job()
        pairs.append((time.perf_counter() - middle, middle - start))
    took = statistics.median(a for a, _ in pairs)
    least = statistics.median(b for _, b in pairs)
    return amount / took, amount / least, statistics.median(b / a for a, b in pairs)


def _arena(client: Client, size: int, seconds: float) -> Iterator[Figure]:
    count = max(2, min(1024, BATCH_BYTES // size))
    source = np.random.default_rng(1).integers(0, 255, count * size, dtype=np.uint8)
    target = source.copy()
    parts = [source[i * size : (i + 1) * size] for i in range(count)]
    places = [target[i * size : (i + 1) * size] for i in range(count)]
    keys = _keys(size, count)

    def copy() -> None:
        for part, place in zip(parts, places, strict=True):
            np.copyto(place, part)

    def put() -> None:
        if not all(client.put_many(list(zip(keys, parts, strict=True)), retention="ephemeral")):
            raise KvdError("the daemon refused a put", hint="measure a daemon with room to spare")

    def get() -> None:
        if client.get_into(keys, places) != [size] * count:
            raise KvdError("a value that was just put is gone", hint="measure a daemon with room to spare")

    yield Figure("arena put", size, *_pairwise(put, copy, count * size, seconds))
    yield Figure("arena get", size, *_pairwise(get, copy, count * size, seconds))
    if not np.array_equal(source, target):
        raise KvdError("what came back is not what was put")


def _disk(client: Client, path: Path, size: int, seconds: float) -> Iterator[Figure]:
    count = max(2, min(256, BATCH_BYTES // size))
    keys = _keys(-size, count)
    buffers = [np.random.default_rng(i).integers(0, 255, size, dtype=np.uint8) for i in range(count)]
    items = list(zip(keys, buffers, strict=True))

    def store() -> None:
        if not all(client.put_many(items)):
            raise KvdError("the daemon refused a put")
        client.flush(timeout_s=60)

    def load() -> None:
        client.delete(keys, arena_only=True)
        if client.prefetch(keys, deadline_s=60) != count:
            raise KvdError("a value that was just stored did not come back from the disk tier")

    with _Raw(path, size, count) as raw:
        yield Figure("disk store", size, *_pairwise(store, raw.write, count * size, seconds))
        yield Figure("disk load", size, *_pairwise(load, raw.read, count * size, seconds))
    client.delete(keys)


class _Raw:
    """The device itself: O_DIRECT writes (then one fdatasync, as a flush ends with one) and reads, IN_FLIGHT at once."""

    def __init__(self, path: Path, size: int, count: int) -> None:
        self.size = size + 4095 & ~4095
        self.count = count
        self.name = path / f".kvd-bench-{os.getpid()}"
        self.buffers = [mmap.mmap(-1, self.size) for _ in range(IN_FLIGHT)]
        for buffer in self.buffers:
            buffer[:] = os.urandom(4096) * (self.size // 4096)
        self.threads = ThreadPoolExecutor(IN_FLIGHT)

    def __enter__(self) -> Self:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            self.fd = os.open(self.name, flags | os.O_DIRECT, 0o600)
        except OSError:
            note(f"{self.name.parent} takes no O_DIRECT: the floor is buffered")
            self.fd = os.open(self.name, flags, 0o600)
        os.posix_fallocate(self.fd, 0, self.size * self.count)
        return self

    def __exit__(self, *_: object) -> None:
        self.threads.shutdown()
        os.close(self.fd)
        self.name.unlink(missing_ok=True)

    def write(self) -> None:
        list(self.threads.map(lambda i: os.pwritev(self.fd, [self.buffers[i % IN_FLIGHT]], i * self.size), range(self.count)))
        os.fdatasync(self.fd)

    def read(self) -> None:
        list(self.threads.map(lambda i: os.preadv(self.fd, [self.buffers[i % IN_FLIGHT]], i * self.size), range(self.count)))
