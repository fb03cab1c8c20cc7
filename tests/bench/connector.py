"""The connector's worker end to end, without an engine: blocks to the daemon and back, beside the same copies by memcpy.

A save is what a step waits for: look-up, reservation, copies, commit. A load is from `start` to the report: look-up, lease,
copies, check. The memory is laid out as an engine's: 16 layers of 32 KiB a block, chunks of 8 blocks (4 MiB), blocks next to
each other, as the engine's allocator hands them out to a prompt. The floor copies the same bytes piece by piece between that
memory and a private buffer. Past the daemon (GPU-direct's code by plain system calls) a load's floor is O_DIRECT reads of as
many bytes in one go, plus the copies.
"""

import contextlib
import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from kvd.bench.arena import private
from kvd.connector.attach import Links
from kvd.connector.direct_setup import set_up
from kvd.connector.fingerprint import salted
from kvd.connector.layout import GroupLayout, Lane
from kvd.connector.link import wait_up
from kvd.connector.metrics import Counters
from kvd.connector.mover import HostMover
from kvd.connector.plan import Load, Move, Save
from kvd.connector.settings import read_settings
from kvd.connector.worker import Worker
from tests.bench.arena import pages_of_arenas
from tests.bench.measure import Result, in_turn
from tests.support.daemon import Daemon

LAYERS, PAGE, CHUNK_BLOCKS = 16, 32 << 10, 8
CHUNKS = 32
BLOCKS = CHUNKS * CHUNK_BLOCKS + 1
CHUNK = LAYERS * PAGE * CHUNK_BLOCKS
BUDGET = 0.7
NAMESPACE, SALT = b"n" * 32, b"s" * 32


class Bench:
    """A worker over memory of its own, connected to a daemon."""

    def __init__(self, daemon: Daemon, **environ: str) -> None:
        # As the engine has it: aligned to 64 bytes, not to pages. (To 16, memcpy in pieces of this size takes twice as long.)
        self.memory = private(LAYERS * BLOCKS * PAGE + 64)[64:]
        self.memory[:] = np.random.default_rng(1).integers(0, 255, len(self.memory), dtype=np.uint8)
        layout = GroupLayout(tuple(Lane(layer * BLOCKS * PAGE, PAGE, PAGE) for layer in range(LAYERS)), BLOCKS)
        mover = HostMover(self.memory, [layout])
        counters = Counters()
        settings = read_settings({}, {"KVD_SOCKET": str(daemon.socket), **environ})
        self.links = Links(settings, counters)
        direct = set_up(settings, mover, None, self.links.direct(), longest=lambda: CHUNK, counters=counters)
        self.counters = counters
        self.worker = Worker(
            [NAMESPACE],
            mover,
            save_link=self.links.save(),
            load_link=self.links.load(),
            counters=counters,
            direct=direct,
            direct_link=self.links.direct() if direct is not None else None,
        )
        assert wait_up(self.links.save(), 5)
        assert wait_up(self.links.load(), 5)
        self.client = daemon.client(namespace=salted(NAMESPACE, SALT))
        self.private = private(CHUNKS * CHUNK)
        self.round = 0

    def moves(self, number: int) -> tuple[Move, ...]:
        ids = [tuple(range(1 + n * CHUNK_BLOCKS, 1 + (n + 1) * CHUNK_BLOCKS)) for n in range(CHUNKS)]
        return tuple(Move(number.to_bytes(16, "big") + n.to_bytes(16, "big"), (one,)) for n, one in enumerate(ids))

    def save(self) -> None:
        """New keys each time, so that everything is copied."""
        self.round += 1
        self.worker.save([Save("r", SALT, self.moves(self.round), retention="ephemeral")])

    def load(self) -> None:
        self.worker.start([Load("q", SALT, self.moves(1))])
        while not (results := self.worker.results(())).received:
            time.sleep(0.0005)  # as an engine's process does while a request waits
        assert not results.failed
        assert not results.bad_blocks

    def copy(self, *, out: bool) -> None:
        """The same pieces, by memcpy."""
        at = 0
        for chunk in range(CHUNKS):
            for layer in range(LAYERS):
                size = CHUNK_BLOCKS * PAGE
                start = layer * BLOCKS * PAGE + (1 + chunk * CHUNK_BLOCKS) * PAGE
                piece, private = self.memory[start : start + size], self.private[at : at + size]
                np.copyto(private, piece) if out else np.copyto(piece, private)
                at += size

    def close(self) -> None:
        self.worker.shutdown()
        self.links.close()
        self.client.close()


def measure(*, quick: bool = False) -> Iterator[Result]:
    """Save and load through the arena; load past it."""
    rounds = 3 if quick else 9
    total = CHUNKS * CHUNK
    what = f"{CHUNKS} chunks of {CHUNK >> 20} MiB"
    kind, pages = pages_of_arenas()
    paged = f"{what}, pages of {pages}"
    daemon = Daemon(max_bytes="512MiB", tier="2GiB")
    try:
        daemon.start()
        with contextlib.closing(Bench(daemon)) as bench:
            for _ in range(6):  # all of the arena is faulted in then, on both sides
                bench.save()
            took, floor, ratio = in_turn(bench.save, lambda: bench.copy(out=True), rounds=rounds)
            yield Result(f"connector.save{kind}", f"connector save, {paged}", total / took, "B/s", total / floor, ratio, BUDGET)
            bench.client.clear()
            bench.worker.save([Save("r", SALT, bench.moves(1), retention="ephemeral")])
            took, floor, ratio = in_turn(bench.load, lambda: bench.copy(out=False), rounds=rounds)
            yield Result(f"connector.load{kind}", f"connector load, {paged}", total / took, "B/s", total / floor, ratio, BUDGET)
            bench.client.clear()
        with contextlib.closing(Bench(daemon, KVD_AIS="require", KVD_DIRECT_STAGING="64MiB")) as bench:
            bench.worker.save([Save("r", SALT, bench.moves(1))])
            names = [move.key for move in bench.moves(1)]
            end = time.monotonic() + 60
            while not all(bench.client.exists(names)) and time.monotonic() < end:
                time.sleep(0.01)
            bench.client.flush(timeout_s=60)
            bench.client.clear(arena_only=True)
            raw = Raw(daemon.folder, total)
            took, floor, ratio = in_turn(bench.load, lambda: (raw.read(), bench.copy(out=False)), rounds=rounds)
            assert bench.counters.values()["direct_load_bytes"] > 0, "it did not go past the daemon"
            yield Result(
                "connector.direct", f"connector load past the daemon, {what}", total / took, "B/s", total / floor, ratio, BUDGET
            )
            raw.close()
    finally:
        daemon.remove()


class Raw:
    """A file of as many bytes, read past the page cache in pieces of a chunk."""

    def __init__(self, folder: Path, size: int) -> None:
        self.path, self.size = folder / "raw", size
        with self.path.open("wb") as file:
            for _ in range(size >> 20):
                file.write(os.urandom(4096) * 256)
            os.fsync(file.fileno())
        self.fd = os.open(self.path, os.O_RDONLY | os.O_DIRECT)
        self.buffer = mmap.mmap(-1, CHUNK)

    def read(self) -> None:
        for at in range(0, self.size, CHUNK):
            assert os.preadv(self.fd, [self.buffer], at) == CHUNK

    def close(self) -> None:
        os.close(self.fd)
        self.buffer.close()
        self.path.unlink()
