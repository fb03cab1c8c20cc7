"""The disk tier beside a dict: any sequence of stores, overwrites, deletes, clears, clock steps, restarts and kills.

Two machines: one with room for everything, which must agree with the dict exactly; one with a small budget, which may have
evicted a value but must never hold another one.
"""

from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from kvd.store.retention import NEVER, Retention
from kvd.tiers.adapters.base import Durability, Hit, Loaded, Want
from kvd.tiers.adapters.disk import DiskAdapter
from kvd.tiers.adapters.disk.format import extent_bytes
from tests.kvd.disk.helpers import get_as, identity, item, value
from tests.kvd.disk.simstorage import SimStorage

ROOT = Path("/sim/store")
KEYS = [identity(number, namespace) for number in range(6) for namespace in range(2)]
lengths = st.sampled_from([0, 1, 255, 3840, 3841, 4096, 8191, 30_000]) | st.integers(0, 40_000)


class Machine(RuleBasedStateMachine):
    """What both machines do. `model` maps an identity to (bytes, retention, expiry)."""

    max_bytes = 64 << 20
    exact = True
    regions = 256 << 10

    batches: Bundle[list[tuple[bytes, bytes, Retention, int]]] = Bundle("batches")

    def __init__(self) -> None:
        super().__init__()
        self.io = SimStorage()
        self.now = 1_000_000
        self.seed = 0
        self.model: dict[bytes, tuple[bytes, Retention, int]] = {}
        self.adapter: DiskAdapter | None = None

    @initialize(durability=st.sampled_from([Durability.NONE, Durability.FSYNC]))
    def start(self, durability: Durability) -> None:
        self.durability = durability
        self.adapter = self.open()

    def open(self, region_bytes: int | None = None) -> DiskAdapter:
        adapter = DiskAdapter(
            "model", ROOT, self.max_bytes, region_bytes=region_bytes or self.regions, durability=self.durability, io=self.io,
            free_floor_bytes=0, housekeeping_s=0.0, clock_ns=lambda: self.now,
        )  # fmt: skip
        adapter.open()
        return adapter

    @rule(
        target=batches,
        names=st.lists(st.sampled_from(KEYS), min_size=1, max_size=8),
        sizes=st.lists(lengths, min_size=8, max_size=8),
        retention=st.sampled_from([Retention.SHORT, Retention.LONG]),
        ttl=st.sampled_from([NEVER, NEVER, 10, 1000]),
        arena=st.booleans(),
    )
    def store(self, names, sizes, retention, ttl, arena):
        batch = []
        for name, size in zip(names, sizes, strict=False):
            self.seed += 1
            batch.append((name, value(self.seed, size), retention, self.now + ttl if ttl else NEVER))
        results = self.adapter.store([item(name, data, kept, expires, arena=arena) for name, data, kept, expires in batch])
        assert all(result.ok for result in results)
        for name, data, kept, expires in batch:
            self.model[name] = (data, kept, expires)
        return multiple()

    @rule(names=st.lists(st.sampled_from(KEYS), max_size=6))
    def delete(self, names):
        held = {name for name in names if self.alive(name)}
        count = self.adapter.delete(names)
        assert count == len(held) if self.exact else count <= len(held)
        for name in names:
            self.model.pop(name, None)

    @rule(namespace=st.integers(0, 1))
    def clear(self, namespace):
        prefix = identity(0, namespace)[:32]
        self.adapter.delete_namespace(prefix)
        self.model = {name: kept for name, kept in self.model.items() if name[:32] != prefix}

    @rule(step=st.sampled_from([1, 9, 500, 2000]))
    def time_passes(self, step):
        self.now += step

    @rule(clean=st.booleans(), region=st.sampled_from([None, 128 << 10, 320 << 10]))
    def restart(self, clean, region):
        if clean:
            self.adapter.close()
        else:
            self.adapter._hasher.shutdown()
            self.adapter._read_threads.shutdown()
            self.io.kill()
        self.adapter = self.open(region)

    @rule()
    def sweep(self):
        self.adapter._house.sweep()
        assert {name for name, _ in self.adapter._catalog.index.items()} == {name for name, _ in self.adapter.enumerate()}

    @rule(names=st.lists(st.sampled_from(KEYS), min_size=1, max_size=8, unique=True))
    def load_many(self, names):
        hits = self.adapter.lookup(names)
        wants = [Want(name, memoryview(bytearray(hit.length if hit else 7))) for name, hit in zip(names, hits, strict=True)]
        for want, hit, result in zip(wants, hits, self.adapter.load(wants), strict=True):
            assert result is (Loaded.OK if hit else Loaded.MISS)
            if hit:
                assert bytes(want.into) == self.model[want.identity][0]

    def alive(self, name: bytes) -> bool:
        return name in self.model and not 0 < self.model[name][2] <= self.now

    @invariant()
    def agrees(self):
        if self.adapter is None:
            return
        for name in KEYS:
            result, data = get_as(self.adapter, name, arena=bool(name[0] & 1))
            if not self.alive(name) or (result is Loaded.MISS and not self.exact):
                assert (result, data) == (Loaded.MISS, None)
                continue
            kept, retention, expires = self.model[name]
            assert data == kept
            assert self.adapter.lookup([name]) == [Hit(len(kept), retention, expires)]
        listed = dict(self.adapter.enumerate())
        usage = self.adapter.usage()
        assert usage.entries == len(listed)
        assert usage.bytes_used == sum(extent_bytes(hit.length) for hit in listed.values())
        files = sum(len(file.data) for path, file in self.io.names.items() if path.suffix == ".kvcache")
        assert usage.bytes_used <= files <= usage.bytes_limit == self.max_bytes
        assert self.adapter.counters.corruptions == 0

    def teardown(self):
        if self.adapter is not None:
            self.adapter.close()


class Small(Machine):
    """Hardly any room."""

    max_bytes = 1 << 20
    regions = 256 << 10
    exact = False


Roomy = Machine
TestRoomy = pytest.mark.timeout(300)(Roomy.TestCase)
TestRoomy.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
TestSmall = pytest.mark.timeout(300)(Small.TestCase)
TestSmall.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("machine", [Roomy, Small])
def test_many_more_histories(machine):
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(machine, settings=settings(max_examples=1500, stateful_step_count=60, deadline=None))
