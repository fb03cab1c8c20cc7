"""A tier whose calls do not return: no error ever comes, and still nobody waits for it for long."""

import os

import pytest

from kvd.tiers import tier as tiers
from tests.kvd.tiers.ram_tier import RamTier, running
from tests.support.processes import wait_until


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "STUCK_S", 0.3)


def test_a_hanging_store_counts_as_broken_and_the_arena_evicts_instead() -> None:
    ram = RamTier()
    with running(ram, max_bytes=8 << 20) as daemon, daemon.client(timeout_s=5) as client:
        ram.stores.close()
        keys = [os.urandom(32) for _ in range(30)]
        assert client.put(keys[0], bytes(1 << 20))
        ram.stores.until_blocked()
        wait_until(lambda: daemon.ask(lambda: daemon.store.evict_dirty), what="the tier to be found out")
        assert all(client.put(key, bytes(1 << 20)) for key in keys), "a full arena takes new values all the same"
        stats = client.stats()
        assert stats["evictions_unwritten_total"] > 0
        assert stats["tiers"][0]["breaker_open"] == 1
        ram.stores.open()
        wait_until(lambda: daemon.ask(lambda: not daemon.tier().broken), what="the tier to go on")
        assert client.put(os.urandom(32), bytes(1 << 20), wait="tier").durability == "fsync"


def test_hanging_loads_make_its_values_misses_at_once() -> None:
    ram = RamTier()
    with running(ram, max_bytes=8 << 20) as daemon, daemon.client(timeout_s=1) as client:
        key, other = os.urandom(32), os.urandom(32)
        assert client.put(key, b"value" * 2000, wait="tier")
        assert client.put(other, b"other" * 2000, wait="tier")
        daemon.evict_all()
        ram.loads.close()
        assert client.read([key], timeout_s=0.2).views == [None]
        wait_until(lambda: daemon.ask(lambda: daemon.tier().broken), what="the tier to be found out")
        assert client.exists([other]) == [False]
        assert client.get(other) is None, "not waited for"
        ram.loads.open()
        wait_until(lambda: daemon.ask(lambda: not daemon.tier().broken), what="the tier to go on")
        assert client.get(other) == b"other" * 2000
