"""The disk tier beside O_DIRECT on the same disk: same block size, same queue depth, same memory, in the same run.

store and load: DiskAdapter on one side, called with 16 MiB of values at a time; on the other a preallocated file that is
written and read with plain pwritev and preadv, one block after the other. Both sides write over blocks that were written
before (a tier in use recycles its files). `one by one` is a call for every value, as the tier must do when it has no more.
recovery: 100 000 objects, from a clean stop and from a killed process. memory: bytes of Python objects for each entry.
"""

import contextlib
import mmap
import os
import shutil
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from kvd.store.identity import Identity
from kvd.store.retention import Retention
from kvd.tiers.adapters.base import Item, Loaded, Want
from kvd.tiers.adapters.disk import DiskAdapter
from kvtools.units import format_size
from tests.bench.measure import Result, in_turn

SIZES = (1 << 20, 16 << 20, 128 << 20)
BUDGET = 0.85
BUDGET_BYTES = 5 << 30
ROUND_BYTES = 512 << 20
CALL_BYTES = 16 << 20
OBJECTS = 100_000
RECOVERY_BUDGET_S = 1.0
ENTRY_BUDGET_BYTES = 192


def folder() -> Path:
    """A scratch folder on a real disk: /tmp may be memory. KVTOOLS_BENCH_DIR names another."""
    return Path(tempfile.mkdtemp(prefix="kvd-bench-", dir=os.environ.get("KVTOOLS_BENCH_DIR", "/var/tmp")))


def identity(number: int) -> Identity:
    """64 bytes that stand for `number`."""
    return b"bench".ljust(32, b".") + number.to_bytes(32, "big")


def measure(*, quick: bool = False) -> Iterator[Result]:
    """Store and load at each size and queue depth, then recovery and memory."""
    root = folder()
    rounds = 3 if quick else 9
    try:
        with contextlib.closing(_Pair(root)) as pair:
            for size in SIZES:
                for depth in (1, 4):
                    yield from _throughput(pair, size, depth, max(1, CALL_BYTES // size), rounds=rounds)
            yield from _throughput(pair, 1 << 20, 1, 1, rounds=rounds)
        yield from _recovery(root)
        yield _memory(root)
    finally:
        shutil.rmtree(root, ignore_errors=True)


class _Pair:
    """A store and a plain file of the same size, every block of both written once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.adapter = DiskAdapter("bench", root / "store", BUDGET_BYTES)
        self.adapter.open()
        self.raw = os.open(root / "raw", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self.raw, 0, BUDGET_BYTES)
        self.last = 0
        self.blocks = [memoryview(mmap.mmap(-1, 128 << 20)) for _ in range(4)]
        for number, block in enumerate(self.blocks):
            np.frombuffer(block, np.uint8)[:] = np.random.default_rng(number).integers(0, 255, len(block), dtype=np.uint8)
        for start in range(0, BUDGET_BYTES, 64 << 20):
            block = self.blocks[0][: 64 << 20]
            assert self.adapter.store([Item(self.fresh(), block, Retention.LONG, 0, block)])[0].ok
            os.pwritev(self.raw, [block], start)

    def fresh(self) -> Identity:
        """An identity that was never used."""
        self.last += 1
        return identity(self.last)

    def block(self, number: int, size: int) -> memoryview:
        """Memory for a value."""
        at = number * size % (512 << 20)
        return self.blocks[at // (128 << 20)][at % (128 << 20) :][:size]

    def close(self) -> None:
        """Remove both."""
        self.adapter.close()
        os.close(self.raw)
        (self.root / "raw").unlink()
        shutil.rmtree(self.root / "store")


def _spread(jobs: list[Callable[[], None]], depth: int) -> Callable[[], None]:
    """Run the jobs on `depth` threads."""

    def run() -> None:
        if depth == 1:
            for job in jobs:
                job()
            return
        rest = iter(jobs)
        lock = threading.Lock()

        def work() -> None:
            while True:
                with lock:
                    job = next(rest, None)
                if job is None:
                    return
                job()

        threads = [threading.Thread(target=work) for _ in range(depth)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return run


def _throughput(pair: _Pair, size: int, depth: int, batch: int, *, rounds: int) -> Iterator[Result]:
    count = ROUND_BYTES // size
    adapter, raw = pair.adapter, pair.raw
    calls = [range(start, start + batch) for start in range(0, count, batch)]
    names: list[Identity] = []
    turn = [0]

    def store(numbers: range) -> None:
        items = [Item(names[number], pair.block(number, size), Retention.LONG, 0, pair.block(number, size)) for number in numbers]
        assert all(result.ok for result in adapter.store(items))

    def load(numbers: range) -> None:
        wants = [Want(names[number], pair.block(number, size), pair.block(number, size)) for number in numbers]
        assert set(adapter.load(wants)) == {Loaded.OK}

    def place(number: int) -> int:
        return (turn[0] * ROUND_BYTES + number * size) % BUDGET_BYTES

    def write(numbers: range) -> None:
        for number in numbers:
            os.pwritev(raw, [pair.block(number, size)], place(number))

    def read(numbers: range) -> None:
        for number in numbers:
            os.preadv(raw, [pair.block(number, size)], place(number))

    def next_turn() -> None:
        turn[0] += 1
        names[:] = [pair.fresh() for _ in range(count)]
        _spread([partial(store, numbers) for numbers in calls], depth)()

    writes = in_turn(next_turn, _spread([partial(write, numbers) for numbers in calls], depth), rounds=rounds)
    reads = in_turn(
        _spread([partial(load, numbers) for numbers in calls], depth),
        _spread([partial(read, numbers) for numbers in calls], depth),
        rounds=rounds,
    )
    how = "" if batch > 1 or size > 1 << 20 else " one by one"
    for verb, (took, floor, ratio) in (("store", writes), ("load", reads)):
        yield Result(
            f"disk {verb} {size >> 20}MiB qd{depth}{how}", f"disk tier, {verb} {format_size(size)}{how}, queue depth {depth}",
            ROUND_BYTES / took, "B/s", ROUND_BYTES / floor, ratio, BUDGET,
        )  # fmt: skip


def _recovery(root: Path) -> Iterator[Result]:
    data = memoryview(bytes(5000))
    adapter = DiskAdapter("bench", root / "store", 2 << 30)
    adapter.open()
    for start in range(0, OBJECTS, 1000):
        adapter.store([Item(identity(number), data) for number in range(start, start + 1000)])
    killed = root / "killed"
    # What a killed process leaves: the files as they are, without what close() writes.
    shutil.copytree(root / "store", killed)
    adapter.close()
    for name, path in (("clean", root / "store"), ("killed", killed)):
        again = DiskAdapter("bench", path, 2 << 30)
        start = time.perf_counter()
        again.open()
        hits = again.lookup([identity(0), identity(OBJECTS - 1)])
        took = time.perf_counter() - start
        assert None not in hits
        assert again.usage().entries == OBJECTS
        again.close()
        shutil.rmtree(path)
        yield Result(
            f"disk recovery {name}", f"start with {OBJECTS} objects to the first answer, after a {name} stop",
            took, "s", RECOVERY_BUDGET_S, took / RECOVERY_BUDGET_S, 1.0, at_most=True,
        )  # fmt: skip


def _memory(root: Path) -> Result:
    adapter = DiskAdapter("bench", root / "store", 2 << 30)
    adapter.open()
    data = memoryview(bytes(100))
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for start in range(0, OBJECTS, 1000):
        adapter.store([Item(identity(number), data) for number in range(start, start + 1000)])
    each = (tracemalloc.get_traced_memory()[0] - before) / OBJECTS
    tracemalloc.stop()
    adapter.close()
    shutil.rmtree(root / "store")
    return Result(
        "disk memory", "Python memory for each entry of the disk tier", each, "B", ENTRY_BUDGET_BYTES, each / ENTRY_BUDGET_BYTES,
        1.0, at_most=True,
    )  # fmt: skip


if __name__ == "__main__":
    import json
    import sys

    for result in measure(quick="--quick" in sys.argv):
        print(json.dumps(result.as_json()), flush=True)
