"""The arena from many processes at once, beside as many that copy between private buffers at once.

`Crowd` starts the workers and tells all of them at the same time what to do for how long; each answers how many bytes it
moved in how many seconds. The copies and the puts (or gets) are told in turn, so that both see the same machine.

A worker is this module as a program. It reads one order a line (`copy`, `put`, `get` or `save`, and seconds) and ends with
its input.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from kvd.bench.arena import MEMCPY, Batch
from kvd.bench.figures import Figure
from kvd.bench.own import NAMESPACE, Own
from kvd.errors import KvdError
from kvd.wire.client import Client

CROWD_BYTES = 64 << 20
"""Bytes that all workers together move at a time."""
ROUNDS = 3


def batch_bytes(size: int, clients: int) -> int:
    """One worker's share; at least two values."""
    return max(2 * size, CROWD_BYTES // clients)


class Crowd:
    """So many workers, ready."""

    def __init__(self, own: Own, socket: Path, size: int, clients: int) -> None:
        words = [sys.executable, "-m", "kvd.bench.clients", str(socket), str(size), str(batch_bytes(size, clients))]
        self.workers = [own.process([*words, str(i)], stop_s=2.0, talk=True) for i in range(clients)]
        for worker in self.workers:
            self._hear(worker)

    def rate(self, order: str, seconds: float) -> float:
        """Bytes a second of all together."""
        self.begin(order, seconds)
        return self.ended()

    def begin(self, order: str, seconds: float) -> None:
        """Tell all of them; `ended` has to be asked before the next order."""
        for worker in self.workers:
            assert worker.stdin is not None
            try:
                worker.stdin.write(f"{order} {seconds}\n")
                worker.stdin.flush()
            except BrokenPipeError:
                raise _gone() from None

    def ended(self) -> float:
        """Wait for all of them; bytes a second of all together."""
        return sum(moved / took for moved, took in map(self._hear, self.workers))

    def _hear(self, worker: "subprocess.Popen[str]") -> tuple[float, float]:
        assert worker.stdout is not None
        answer = worker.stdout.readline().split()
        if len(answer) != 2:
            raise _gone()
        return float(answer[0]), float(answer[1])

    def end(self) -> None:
        """Let them go."""
        for worker in self.workers:
            assert worker.stdin is not None
            worker.stdin.close()
        for worker in self.workers:
            worker.wait()


def _gone() -> KvdError:
    return KvdError("a client of the bench ended too early", hint="its message is above; fewer --clients need less memory")


def measure(own: Own, socket: Path, size: int, clients: int, seconds: float, step: Callable[[str], None]) -> Iterator[Figure]:
    """Put, then get, from that many clients."""
    crowd = Crowd(own, socket, size, clients)
    for order in ("put", "get"):
        step(f"arena {order}")
        crowd.rate(order, 0.0)
        crowd.rate("copy", 0.0)
        pairs = [(crowd.rate("copy", seconds / ROUNDS), crowd.rate(order, seconds / ROUNDS)) for _ in range(ROUNDS)]
        rate, floor = statistics.median(b for _, b in pairs), statistics.median(a for a, _ in pairs)
        ratio = statistics.median(b / a for a, b in pairs)
        yield Figure(f"arena {order}", size, clients, rate, "B/s", floor, MEMCPY, ratio)
    crowd.end()


def work(socket: Path, size: int, total: int, number: str) -> None:
    """Be a worker until there are no more orders."""
    batch = Batch(size, total, salt=f"client {number}/")
    with Client(socket, namespace=NAMESPACE, timeout_s=60) as client:
        jobs: dict[str, Callable[[], None]] = {
            "copy": batch.copy,
            "put": partial(batch.put, client),
            "get": partial(batch.get, client),
            "save": partial(batch.save, client),
        }
        _say(0, 0.0)
        for line in sys.stdin:
            order, seconds = line.split()
            begun = time.perf_counter()
            moved = 0
            while not moved or time.perf_counter() - begun < float(seconds):
                jobs[order]()
                moved += batch.bytes
            _say(moved, time.perf_counter() - begun)
            if order == "get":
                batch.check()


def _say(moved: int, took: float) -> None:
    sys.stdout.write(f"{moved} {took}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    work(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
