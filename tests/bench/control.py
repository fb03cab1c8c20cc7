"""Questions beside the floor: exists and leases in batches of 1024, single values of 64 KiB, and the empty round trip.

Single values are measured with client, daemon and floor on one core. Left to the scheduler, a round trip of 16 us takes 16 or
50 from one run to the next, on both sides, as often as a sleeping virtual core must be woken: that is the machine's time.
"""

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvd.bench.arena import private
from tests.bench.arena import keys_for
from tests.bench.floor import Echo, Exists, Floor, Lease, Store, running
from tests.bench.measure import Result, in_turn, medians

if TYPE_CHECKING:
    from kvd.wire.client import Client

BATCH = 1024
VALUE = 64 << 10


def measure(client: "Client", *, quick: bool = False) -> Iterator[Result]:
    """Batches first, then single values."""
    with running() as floor:
        yield from _batches(client, floor, quick=quick)
        yield from _singles(client, floor, quick=quick)


def _batches(client: "Client", floor: Floor, *, quick: bool) -> Iterator[Result]:
    rounds = 100 if quick else 400
    keys = keys_for(BATCH, "control")
    small = private(8 << 10)
    assert all(client.put_many([(key, small.data) for key in keys]))
    floor.ask(Store(keys, len(small)))

    def lease() -> None:
        # Offsets, as the floor answers them: 1024 memoryviews would be Python's time, not the daemon's.
        with client.read(keys) as held:
            assert len(held.offsets) == BATCH

    jobs = (
        ("exists", lambda: client.exists(keys), lambda: floor.ask(Exists(keys))),
        ("lease", lease, lambda: floor.ask(Lease(keys))),
    )
    for name, job, least in jobs:
        took, lowest, ratio = in_turn(job, least, rounds=rounds)
        yield Result(f"control.{name}.{BATCH}", f"{name}, batches of {BATCH}", BATCH / took, "keys/s", BATCH / lowest, ratio, 0.7)


@contextmanager
def one_core() -> Iterator[None]:
    """This thread and all threads of this process's children on one core."""
    allowed = os.sched_getaffinity(0)
    children = Path("/proc/thread-self/children").read_text().split()
    threads = [0, *(int(thread.name) for child in children for thread in Path(f"/proc/{child}/task").iterdir())]
    for thread in threads:
        os.sched_setaffinity(thread, {min(allowed)})
    try:
        yield
    finally:
        for thread in threads:
            os.sched_setaffinity(thread, allowed)


def _singles(client: "Client", floor: Floor, *, quick: bool) -> Iterator[Result]:
    source, target = private(VALUE), private(VALUE)
    keys = keys_for(512, "single")
    turn = itertools.cycle(keys)
    key = keys[0]
    for each in keys:  # the first put of each would measure the faulting in of its pages
        assert client.put(each, source.data)

    def get() -> None:
        assert client.get(key) is not None

    def put() -> None:
        assert client.put(next(turn), source.data)

    with one_core():
        echo, copy, got, stored = medians(
            [lambda: floor.ask(Echo()), lambda: np.copyto(target, source), get, put], rounds=5 if quick else 30
        )
    least = echo + copy
    for name, took, budget in (("get", got, 1.5), ("put", stored, 2.0)):
        yield Result(
            f"single.{name}.{VALUE}", f"single {name} of 64 KiB, p50", took, "s", least, took / least, budget, at_most=True
        )
