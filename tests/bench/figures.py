"""What the figures cost the daemon that keeps them: its event loop does nothing else meanwhile.

timing: of one request, beside the empty round trip of the bare server. publish: every value of a daemon with as many namespaces
as are shown, all of them changed, beside the time until the next publication. reshape: the segment made anew because another
namespace is shown, beside the least time between two of them.
"""

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kvd.service import stats
from kvd.service.histogram import OPERATION_BOUNDS_S, Histogram
from kvd.service.operations import Operations
from kvd.service.server import Server
from kvd.store.accounts import LIMIT
from kvd.store.arena import Arena
from kvd.store.retention import NEVER, Retention
from kvd.store.room import Rooms
from kvd.store.store import Store
from kvd.tiers.tiering import Tiering
from tests.bench.floor import Echo, running
from tests.bench.measure import Result, medians

PART_BUDGET = 0.02
TIMING_BUDGET = 0.05
MANY = 1000


def measure(*, quick: bool = False) -> Iterator[Result]:
    """Three results."""
    rounds = 3 if quick else 20
    yield _timing(rounds)
    yield from asyncio.run(_publishing(10 * rounds))


def _timing(rounds: int) -> Result:
    histogram = Histogram(OPERATION_BOUNDS_S)

    def many() -> None:
        for _ in range(MANY):
            begun = time.perf_counter()
            histogram.observe(time.perf_counter() - begun)

    with running() as floor:
        took, echo = medians([many, lambda: floor.ask(Echo())], rounds=rounds)
    each = took / MANY
    return Result("figures.timing", "timing one request", each, "s", echo, each / echo, TIMING_BUDGET, at_most=True)


def _cpu_seconds(job: Callable[[], None]) -> float:
    """CPU time of one call: what it takes of the event loop, whoever else is on the machine."""
    begun = time.process_time()
    job()
    return time.process_time() - begun


async def _publishing(rounds: int) -> list[Result]:
    store = Store(Arena(8 << 20))
    tiering = Tiering(store, Rooms(store))
    operations = Operations(store, tiering, instance="bench", changed=lambda: None, info=dict)
    server = Server(Path("unused.sock"), operations)
    for n in range(LIMIT):
        store.put_inline(n.to_bytes(32, "big"), bytes(32), b"v", Retention.LONG, NEVER)
    accounts = list(store.index.accounts.own.values())
    with tempfile.TemporaryDirectory(prefix="kvt-", dir="/dev/shm") as folder:
        publisher = stats.Publisher(stats.Table(store, tiering, server, operations), "bench", root=Path(folder))

        def publish() -> None:
            for account in accounts:
                account.hits += 1
            for histogram in operations.seconds.values():
                histogram.observe(0.001)
            publisher.publish()

        made = []
        for name, job, period in (("publish", publish, stats.PUBLISH_S), ("reshape", publisher.reshape, stats.RESHAPE_S)):
            job()
            took = sorted(_cpu_seconds(job) for _ in range(rounds))[rounds // 2]
            what = f"{name} {len(publisher.rows)} figures, CPU, beside the {period:g} s between two"
            made.append(Result(f"figures.{name}", what, took, "s", period, took / period, PART_BUDGET, at_most=True))
        publisher.close()
    return made
