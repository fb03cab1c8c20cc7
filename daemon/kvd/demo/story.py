"""The daemon's story: store, read back, restart, read back again, with the numbers; then a pool segment and kvtop.

Everything is real: a daemon process, its socket and shared memory, a disk tier in a scratch folder, the same commands an
operator types. What is read is compared with what was stored, byte by byte. However the story ends (also by an error or
Ctrl-C) the daemon is stopped and segment and scratch folder are removed.
"""

import contextlib
import hashlib
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvd.demo.daemon import DemoDaemon, program
from kvd.demo.pool import NAME, DemoPool
from kvtools.errors import KvError
from kvtools.interrupts import interrupts_held
from kvtools.output import emit, paint
from kvtools.units import format_duration, format_rate, format_size

if TYPE_CHECKING:
    from kvd.wire.client import Client

CHUNK_BYTES = 1 << 20
CHUNKS = 96
Say = Callable[[str], None]


@contextlib.contextmanager
def scratch_folder(where: Path | None) -> Iterator[Path]:
    """A folder that is gone afterwards. By default under /var/tmp, which is a disk where /tmp may be memory."""
    parent = where or Path("/var/tmp")  # noqa: S108 - mkdtemp makes a private folder in it
    folder: Path | None = None
    try:
        with interrupts_held():
            folder = Path(tempfile.mkdtemp(prefix="kvtools-demo-", dir=parent if parent.is_dir() else None))
        yield folder
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


class Heading:
    """Numbers the steps of a story."""

    def __init__(self) -> None:
        self._number = 0

    def __call__(self, text: str) -> None:
        self._number += 1
        emit()
        emit(paint(f"{self._number}. {text}", "bold"))


def tell(where: Path | None, *, interactive: bool) -> None:
    """The whole story. Raises KvError where something does not hold."""
    with scratch_folder(where) as scratch, contextlib.ExitStack() as stack:
        step = Heading()
        daemon = DemoDaemon(scratch, max_bytes="256MiB", long_bytes="1GiB")
        stack.callback(daemon.stop)
        step("Start the daemon: 256 MiB of RAM, and 1 GiB of disk below it")
        start(daemon)
        from kvd.wire.client import Client

        client = stack.enter_context(contextlib.closing(Client(daemon.socket, namespace="demo")))
        load = Load()
        step(f"Store what an engine would: {CHUNKS} chunks of KV, {format_size(CHUNK_BYTES)} each")
        load.store(client)
        step("Read it back")
        load.read(client, "RAM")
        step("Stop the daemon and start it again: what was in RAM is gone")
        emit(f"   stopped in {format_duration(daemon.stop())}; {format_size(daemon.bytes_on_disk())} on disk")
        start(daemon)
        step("Read it back again")
        load.read(client, "disk")
        step("An engine's KV pool, and what it may hold")
        pool = stack.enter_context(DemoPool())
        run("kvctl", "list", NAME)
        run("kvctl", "limit", NAME, "2GiB")
        pool.obey()
        run("kvctl", "list", NAME)
        step("All of it on one screen")
        if interactive:
            with Traffic(client, load.keys, pool):
                run("kvtop")
        else:
            run("kvtop", "--once")
    emit()
    emit("Done. The daemon, the segment and the scratch folder are gone.")


def start(daemon: DemoDaemon) -> None:
    """Start it, showing command and time."""
    emit(f"   $ {daemon.command}")
    seconds = daemon.start()
    emit(f"   ready in {format_duration(seconds)}, pid {daemon.pid}")


def run(name: str, *words: str) -> None:
    """Show and run a command of this installation on our own terminal. Raises KvError when it fails."""
    emit(f"   $ {' '.join([name, *words])}")
    sys.stdout.flush()
    status = subprocess.run([*program(name), *words], check=False).returncode
    if status != 0:
        raise KvError(f"{name} {' '.join(words)} ended with status {status}")


class Load:
    """Random chunks under distinct keys, kept in this process to compare what comes back."""

    def __init__(self) -> None:
        import numpy as np

        self.keys = [hashlib.sha256(f"demo chunk {i}".encode()).digest() for i in range(CHUNKS)]
        self._sent: Any = np.random.default_rng().integers(0, 255, (CHUNKS, CHUNK_BYTES), dtype=np.uint8)

    def store(self, client: "Client") -> None:
        """Put all chunks, then wait until they are on disk."""
        begun = time.perf_counter()
        answers = client.put_many([(key, chunk.data) for key, chunk in zip(self.keys, self._sent, strict=True)])
        stored = time.perf_counter() - begun
        if refused := [answer.reason for answer in answers if not answer]:
            raise KvError(f"{len(refused)} of {CHUNKS} chunks were not stored: {refused[0]}")
        durability = client.flush(self.keys)
        flushed = time.perf_counter() - begun - stored
        total = format_size(self._sent.nbytes)
        emit(f"   stored {total} in {format_duration(stored)} ({format_rate(self._sent.nbytes / stored)})")
        emit(f"   on disk {format_duration(flushed)} later (durability: {durability})")

    def read(self, client: "Client", where: str) -> None:
        """Read all chunks into memory of our own and compare. Raises KvError for a miss or a wrong byte."""
        import numpy as np

        before = tier_hits(client)
        got = np.zeros_like(self._sent)
        begun = time.perf_counter()
        found = 0
        with client.read(self.keys) as lease:
            for view, place in zip(lease.views, got, strict=True):
                if view is not None:
                    np.copyto(place, np.frombuffer(view, np.uint8))
                    found += 1
        seconds = time.perf_counter() - begun
        from_disk = tier_hits(client) - before
        speed = format_rate(found * CHUNK_BYTES / seconds)
        emit(f"   {found} of {CHUNKS} found: hit rate {found / CHUNKS:.0%}, {from_disk} of them from disk")
        emit(f"   {format_size(found * CHUNK_BYTES)} in {format_duration(seconds)} ({speed}) from {where}")
        if found != CHUNKS:
            raise KvError(f"{CHUNKS - found} chunks are missing")
        if not np.array_equal(got, self._sent):
            raise KvError("what was read is not what was stored")
        emit("   every byte is the one that was stored")


def tier_hits(client: "Client") -> int:
    """Values that came from the tiers so far."""
    tiers: Sequence[dict[str, Any]] = client.stats()["tiers"]
    return sum(int(tier["hits_total"]) for tier in tiers)


class Traffic:
    """Some life on the dashboard while a person looks at it: reads, and a pool whose use swells and falls."""

    def __init__(self, client: "Client", keys: Sequence[bytes], pool: DemoPool) -> None:
        self._client, self._keys, self._pool = client, keys, pool
        self._enough = threading.Event()
        self._thread = threading.Thread(target=self._run, name="demo-traffic", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._enough.set()
        self._thread.join(10)

    def _run(self) -> None:
        begun = time.monotonic()
        with contextlib.suppress(KvError):  # the person may have stopped the daemon or deleted the segment: so be it
            for turn in range(1 << 30):
                if self._enough.wait(0.25):
                    return
                missing = hashlib.sha256(f"not stored {turn}".encode()).digest()
                self._client.get_many([self._keys[turn % CHUNKS], self._keys[turn * 7 % CHUNKS], missing])
                self._pool.serve(time.monotonic() - begun)
