"""Hit rates of the arena's eviction policies on traces of engines' requests (see `traces`), through the daemon's own store.

A request finds the leading run of its chunks that is there, as an engine can use only that, reads those and puts the rest.
What counts is the share of chunks that need not be computed. Chunks are of one size, so that is the share of tokens too.
The floor of LRU is a cache without end; the floor of the others is LRU, in the same run on the same trace.
"""

from collections.abc import Iterator

import numpy as np
import psutil

from kvd.store.arena import Arena
from kvd.store.extents import PAGE
from kvd.store.index import Index
from kvd.store.leases import Holder
from kvd.store.retention import NEVER, Retention
from kvd.store.store import ABSENT, Store
from tests.bench.measure import Result, medians
from tests.bench.traces import TRACES, Request, mixed
from tests.support.daemon import Daemon

REQUESTS = 4000
PARTS = (0.02, 0.05, 0.15)
"""Sizes of the arena, as shares of all different chunks of the trace."""
POLICIES = ("LRU", "S3FIFO")


def key_of(number: int) -> bytes:
    """A key that is spread as digests are."""
    return (number * 0x9E3779B97F4A7C15 % (1 << 256)).to_bytes(32, "little")


def hit_share(trace: list[Request], capacity: int, policy: str, *, warm: int = 0) -> float:
    """Share of the trace's chunks that were there, in an arena of `capacity` chunks; the first `warm` requests only fill it."""
    store = Store(Arena(capacity * PAGE), scan_resistant=policy == "S3FIFO")
    try:
        hits = asked = 0
        holder, space = Holder(), bytes(32)
        for turn, request in enumerate(trace):
            keys = [key_of(number) for number in request]
            slots = store.find(space, keys)
            found = int((slots == ABSENT).argmax()) if (slots == ABSENT).any() else len(keys)
            if found:
                store.release(holder, store.pin(holder, slots[:found], 1e9).number)
            for key in keys[found:]:
                store.put_inline(space, key, b"x", Retention.LONG, NEVER)
            if turn >= warm:
                hits += found
                asked += len(keys)
        return hits / asked
    finally:
        store.arena.close()


def endless_share(trace: list[Request], *, warm: int = 0) -> float:
    """The same with room for everything."""
    seen: set[int] = set()
    hits = asked = 0
    for turn, request in enumerate(trace):
        found = next((i for i, number in enumerate(request) if number not in seen), len(request))
        seen.update(request)
        if turn >= warm:
            hits += found
            asked += len(request)
    return hits / asked


def sampling_cost(rounds: int) -> Result:
    """What `kvd size` adds to a look-up of 1024 keys with its lease, beside all the CPU that the daemon spends on one.

    None of these keys is watched: of a busy daemon's one in thousands is, and no more than 50 uses in a tenth of a second.
    """
    keys = [key_of(number) for number in range(1, 1025)]
    index = Index()
    space = index.namespace(bytes(32))
    slots = np.array([index.add(space, key, n, 1, Retention.LONG, NEVER) for n, key in enumerate(keys)], dtype=np.int64)
    index.sampled[:] = 0
    (added,) = medians((lambda: 1 in index.sampled[slots].tobytes(),), rounds=rounds)
    daemon = Daemon(max_bytes="64MiB").start()
    try:
        with daemon.client() as client:
            client.put_many([(key, b"x") for key in keys])
            process = psutil.Process(daemon.pid)
            for _ in range(50):  # the first ones shrink the sample
                client.read(keys).release()
            before, count = sum(process.cpu_times()[:2]), 100 * rounds
            for _ in range(count):
                client.read(keys).release()
            whole = (sum(process.cpu_times()[:2]) - before) / count
    finally:
        daemon.remove()
    return Result("policies.size.cpu", "kvd size: added to a lease of 1024 keys", added, "s", whole, added / whole, 0.01, True)


def measure(*, quick: bool = False) -> Iterator[Result]:
    """What `kvd size` costs, then each trace at three sizes."""
    yield sampling_cost(3 if quick else 20)
    requests = REQUESTS // 4 if quick else REQUESTS
    for name, shares in TRACES.items():
        trace = mixed(shares, requests)
        warm = requests // 5
        chunks = len({number for request in trace for number in request})
        endless = endless_share(trace, warm=warm)
        for part in PARTS:
            capacity = max(64, int(chunks * part))
            rates = {policy: hit_share(trace, capacity, policy, warm=warm) for policy in POLICIES}
            label = f"{name}, arena of {100 * part:g} %"
            slug = f"policies.{name.replace(', ', '.').replace(' ', '-').replace('%', 'pc')}.{part:g}"
            yield Result(f"{slug}.LRU", f"hits, {label}: LRU", 100 * rates["LRU"], "%", 100 * endless, rates["LRU"] / endless, 0.0)
            for policy in POLICIES[1:]:
                ratio = rates[policy] / rates["LRU"]
                yield Result(
                    f"{slug}.{policy}", f"hits, {label}: {policy}", 100 * rates[policy], "%", 100 * rates["LRU"], ratio, 0.95
                )
