"""Questions and single values, beside the least that a Python server over the same kind of socket must do for them."""

import itertools
from collections.abc import Callable, Iterator

import numpy as np

from kvd.bench.arena import keys, private
from kvd.bench.figures import Figure, medians, pairwise
from kvd.bench.floor import Echo, Exists, Floor, Lease, Store
from kvd.bench.own import Own
from kvd.errors import KvdError
from kvd.wire.client import Client

BATCH = 1024
SMALL = 8 << 10
VALUE = 64 << 10
BARE = "bare server"


def measure(own: Own, client: Client, seconds: float, step: Callable[[str], None]) -> Iterator[Figure]:
    """exists and leases in batches, then one get and one put."""
    floor = Floor(own.folder(), own.process)
    own.undo(floor.close)
    yield from _batches(client, floor, seconds, step)
    yield from _singles(client, floor, seconds, step)


def _batches(client: Client, floor: Floor, seconds: float, step: Callable[[str], None]) -> Iterator[Figure]:
    names = keys("control", BATCH)
    if not all(client.put_many([(key, bytes(SMALL)) for key in names], retention="ephemeral")):
        raise KvdError("the daemon refused a put", hint="measure a daemon with room to spare")
    floor.ask(Store(names, SMALL))

    def lease() -> None:
        with client.read(names) as held:
            if len(held.offsets) != BATCH:
                raise KvdError("a value that was just put is gone", hint="measure a daemon with room to spare")

    for name, job, least in (
        ("exists", lambda: client.exists(names), lambda: floor.ask(Exists(names))),
        ("lease", lease, lambda: floor.ask(Lease(names))),
    ):
        step(f"{name}, {BATCH} keys")
        took, lowest, ratio = pairwise(job, least, seconds)
        yield Figure(name, 0, 1, BATCH / took, "keys/s", BATCH / lowest, BARE, ratio)
    client.delete(names)


def _singles(client: Client, floor: Floor, seconds: float, step: Callable[[str], None]) -> Iterator[Figure]:
    source, target = private(VALUE), private(VALUE)
    names = keys("single", 256)
    turn = itertools.cycle(names)

    def put() -> None:
        if not client.put(next(turn), source, retention="ephemeral"):
            raise KvdError("the daemon refused a put", hint="measure a daemon with room to spare")

    step("single get and put")
    put()
    jobs = [lambda: floor.ask(Echo()), lambda: np.copyto(target, source), lambda: client.get(names[0]), put]
    echo, copy, got, stored = medians(jobs, seconds)
    for name, took in (("single get", got), ("single put", stored)):
        yield Figure(name, VALUE, 1, took, "s", echo + copy, f"{BARE} + memcpy", took / (echo + copy))
    client.delete(names)
