"""The miss-ratio curve of a sample against a full simulation of LRU, and that neither memory nor time have no bound."""

import itertools
import random
import time
from collections import OrderedDict

import numpy as np
import pytest
import xxhash

from kvd.store.accounts import Account
from kvd.store.arena import Arena
from kvd.store.extents import PAGE
from kvd.store.leases import Holder
from kvd.store.retention import NEVER, Retention
from kvd.store.reuse import FULL, Reuse
from kvd.store.store import ABSENT, Store
from tests.bench.policies import key_of
from tests.bench.traces import mixed

SPACE = bytes(32)
Use = tuple[int, int]
"""A key, and its bytes."""


def uses_of(requests: int, *, seed: int = 1) -> list[Use]:
    """What engines use, chunk by chunk, of 4 to 32 KiB each, as long as nothing is ever missing."""
    trace = mixed({"chats": 0.7, "agents": 0.25, "scans": 0.05}, requests, seed=seed)
    return [(chunk, 4096 * (1 + chunk % 8)) for request in trace for chunk in request]


def simulated(uses: list[Use], capacity: int) -> float:
    """Share of the bytes that an LRU cache of so many bytes really has."""
    cache: OrderedDict[int, int] = OrderedDict()
    held = hits = asked = 0
    for key, size in uses:
        asked += size
        if key in cache:
            cache.move_to_end(key)
            hits += size
            continue
        cache[key] = size
        held += size
        while held > capacity:
            held -= cache.popitem(last=False)[1]
    return hits / asked


def measured(uses: list[Use], samples: int) -> Reuse:
    """The same uses as the daemon counts them."""
    reuse, account = Reuse(samples=samples, limit=1 << 60), Account(b"")
    for n, (key, size) in enumerate(uses):
        mark = xxhash.xxh3_64_intdigest(key.to_bytes(8, "little"))
        account.set_bytes += size
        if reuse.holds(mark):
            reuse.use(mark, account, size)
        if n % 500 == 0:
            reuse.tick(1.0, [account], Account(b""))
    reuse.tick(1.0, [account], Account(b""))
    reuse._look(Account(b""))
    return reuse


@pytest.mark.parametrize(("samples", "worst"), [(1 << 20, 0.01), (4096, 0.03), (1024, 0.06)])
def test_the_curve_agrees_with_a_full_simulation(samples: int, worst: float) -> None:
    uses = uses_of(2500)
    total = sum({key: size for key, size in uses}.values())  # noqa: C416 - one size a key
    reuse = measured(uses, samples)
    if samples < 1 << 20:
        assert reuse.rate < 0.5
        assert len(reuse._last) <= samples
    else:
        assert reuse.rate == 1.0
    errors = {}
    for part in (0.02, 0.05, 0.1, 0.2, 0.4, 0.8):
        found = reuse.share(total * part)
        assert found is not None
        errors[part] = found - simulated(uses, int(total * part))
    assert max(map(abs, errors.values())) <= worst, errors


def test_the_curve_never_falls_with_size() -> None:
    reuse = measured(uses_of(300), 500)
    shares = [reuse.share(float(1 << power)) for power in range(10, 45)]
    assert all(b is not None and a is not None and b >= a for a, b in itertools.pairwise(shares))
    assert Reuse().share(1e9) is None


def test_accounts_have_curves_of_their_own_over_one_arena() -> None:
    reuse, often, once = Reuse(limit=1 << 60), Account(b"a"), Account(b"b")
    for turn in range(20):
        for n in range(50):
            often.get_bytes += 100
            reuse.use(hash(("often", n)), often, 100)
        for n in range(100):
            once.set_bytes += 100
            reuse.use(hash(("once", turn, n)), once, 100)
    # Between two uses of one that is used often lie 49 of its kind and 100 of the others.
    assert (reuse.share(10_000, often) or 0.0) < 0.1
    assert (reuse.share(20_000, often) or 0.0) > 0.9
    assert reuse.share(1e9, once) == 0.0
    reuse._look(Account(b""))
    assert 0.25 < (reuse.share(1e9) or 0.0) < 0.4
    assert reuse.largest == (often, once)
    # An account that is closed becomes part of `other`.
    other = Account(b"")
    reuse.tick(1.0, [often], other)
    assert reuse.share(1e9, once) is None
    assert reuse.share(1e9, other) == 0.0


def test_too_many_uses_in_a_tick_shrink_the_sample_at_once() -> None:
    reuse, account = Reuse(limit=50), Account(b"")
    begun = time.process_time()
    rng = random.Random(1)
    marks = [rng.getrandbits(60) for _ in range(2000)]
    looked = 0
    for _ in range(50):
        for mark in marks:
            if reuse.holds(mark):
                looked += reuse.use(mark, account, 10)
    assert looked < 2000
    assert reuse.rate < 1 / 16
    assert time.process_time() - begun < 5
    for tick in range(100):
        reuse.tick(float(tick), [account], Account(b""))
    assert reuse.rate < 1 / 16  # not soon


def test_a_sample_that_has_become_too_small_begins_anew() -> None:
    reuse, account, other = Reuse(limit=50), Account(b""), Account(b"")
    reuse.threshold = FULL >> 10
    mark = 5 << 24
    assert not reuse.tick(1.0, [account], other)
    reuse.use(mark, account, 10)
    assert not reuse.tick(300.0, [account], other)
    assert reuse.tick(700.0, [account], other)
    assert reuse.threshold == FULL >> 8
    assert not reuse.tick(1400.0, [account], other)  # nothing was used: nothing is known


def test_old_times_fade() -> None:
    reuse, account, other = Reuse(limit=1 << 60), Account(b""), Account(b"")
    for n in range(1000):
        reuse.use(hash(("once", n)), account, 10)
    for _ in range(3):
        reuse.use(hash("again"), account, 10)
    assert (reuse.share(1e9, account) or 0.0) < 0.1
    for hour in range(1, 60):
        reuse.tick(3600.0 * hour + 1, [account], other)
    for _ in range(300):
        account.get_bytes += 10
        reuse.use(hash("again"), account, 10)
    reuse.tick(3600.0 * 60 + 1, [account], other)
    assert (reuse.share(1e9, account) or 0.0) > 0.9


def test_the_store_counts_reads_and_puts_and_nothing_else() -> None:
    store = Store(Arena(64 * PAGE))
    try:
        holder = Holder()
        store.index.reuse.limit = 1 << 60
        for n in range(100):  # more than fit: what is evicted is remembered by the sample
            store.put_inline(SPACE, key_of(n), b"x" * 100, Retention.LONG, NEVER)
        slots = store.find(SPACE, [key_of(n) for n in range(100)])
        here = slots[slots != ABSENT]
        store.count(SPACE, len(here), 0, 100 * len(here))
        store.release(holder, store.pin(holder, here, 1e9).number)
        (single,) = here[:1].tolist()
        store.release(holder, store.pin_one(holder, single, 1e9).number)
        store.index.order(here)
        assert store.index.reuse.uses == 100 + len(here) + 1
        store.tick()
        # All puts were first uses, all reads came back: half and half, had there been room for all.
        share = store.index.reuse.share(1e9)
        assert share is not None
        assert abs(share - (len(here) + 1) / (100 + len(here) + 1)) < 0.02
        # A value that is put again after its eviction was used before, far away.
        gone = next(n for n in range(100) if slots[n] == ABSENT)
        before = store.index.reuse.curves[store.index.spaces[SPACE].account].cold
        store.put_inline(SPACE, key_of(gone), b"x" * 100, Retention.LONG, NEVER)
        assert store.index.reuse.curves[store.index.spaces[SPACE].account].cold == before
    finally:
        store.arena.close()


def test_a_new_sample_reaches_what_is_there_already() -> None:
    store = Store(Arena(256 * PAGE))
    try:
        index = store.index
        index.reuse.threshold = 1
        for n in range(1, 201):
            store.put_inline(SPACE, key_of(n), b"x", Retention.LONG, NEVER)
        assert int(index.sampled.sum()) == 0
        index.reuse.threshold = FULL
        for _ in index.sample_anew():
            pass
        assert int(index.sampled.sum()) == 200
        index.reuse.threshold = 1
        index.touch(store.find(SPACE, [key_of(n) for n in range(1, 201)]))
        assert int(np.sum(index.sampled)) == 0  # who is in the sample no more is not asked again
    finally:
        store.arena.close()
