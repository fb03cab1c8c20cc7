"""Every request that a tier could hold up ends by its own deadline, whatever hangs: all threads of a tier are inside calls."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from kvd.errors import DeadlinePassed, KvdError
from kvd.store.identity import namespace_of
from kvd.tiers.tier import LOAD_THREADS
from kvd.wire import protocol as p
from kvd.wire.client import Client
from tests.kvd.tiers.ram_tier import InProcess, RamTier, running
from tests.support.processes import wait_until

pytestmark = pytest.mark.real("kvd")

SPACE = namespace_of("default")
PATIENCE_S = 1.0


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def value(number: int) -> bytes:
    return bytes([number]) * 9000


@pytest.fixture
def tier(local_index: bool) -> RamTier:
    return RamTier(local_index=local_index)


@pytest.fixture
def daemon(tier: RamTier) -> Iterator[InProcess]:
    with running(tier) as made:
        yield made


@pytest.fixture
def client(daemon: InProcess) -> Iterator[Client]:
    with daemon.client(timeout_s=PATIENCE_S) as made:
        yield made


REQUESTS: dict[str, Callable[[Client], object]] = {
    "exists": lambda c: c.exists([key(1), key(99)]),
    "get": lambda c: c.get(key(1)),
    "read": lambda c: c.read([key(1), key(2)]).release(),
    "prefix": lambda c: c.prefix([key(1), key(2)]),
    "pinned prefix": lambda c: c.prefix([key(1), key(2)], pin_s=1),
    "prefetch": lambda c: c.prefetch([key(1), key(2)], deadline_s=0.5),
    "put waiting for the tier": lambda c: c.put(key(50), value(50), wait="tier"),
    "delete": lambda c: c.delete([key(3)]),
    "flush": lambda c: c.flush(timeout_s=0.5),
    "where": lambda c: c.connect().call(p.Where(0, SPACE, [key(1)]), p.Info),
    "keys": lambda c: c.connect().call(p.Keys(0, SPACE), p.KeyPage),
    "clear": lambda c: c.clear(),
}
SLACK_S = 7.0
"""A delete or clear may wait 5 s for tiers, over the client's own patience; a busy machine takes its time too."""


CASES = [(True, name) for name in REQUESTS] + [(False, name) for name in ("exists", "get", "pinned prefix", "where")]
"""With a tier that has its index in memory, and where it matters with one that must be asked."""


@pytest.mark.parametrize(("local_index", "name"), CASES)
def test_it_ends_by_its_deadline(daemon: InProcess, tier: RamTier, client: Client, name: str) -> None:
    with daemon.client(timeout_s=5) as other:
        assert all(other.put_many([(key(n), value(n)) for n in range(1, 30)], wait="tier"))
        assert other.put(key(77), value(77), retention="ephemeral")
        daemon.ask(lambda: [daemon.store._hide(slot) for n in range(1, 30) for slot in daemon.store.find(SPACE, [key(n)]).tolist()])
        for tap in (tier.loads, tier.stores, tier.deletes, tier.lookups):
            tap.close()
        askers = [threading.Thread(target=lambda n=n: _get(daemon, n)) for n in range(10, 10 + LOAD_THREADS)]
        for asker in askers:
            asker.start()
        (tier.loads if tier.capabilities.local_index else tier.lookups).until_blocked(4)
        began = time.monotonic()
        try:
            REQUESTS[name](client)
        except DeadlinePassed:
            pass
        assert time.monotonic() - began < PATIENCE_S + SLACK_S
        assert other.get(key(77)) in (value(77), None), "what is in RAM is served all the while (a clear takes it along)"
        tier.open_all()
        for asker in askers:
            asker.join()
    wait_until(lambda: daemon.pins() == 0, what="no pin to be left behind")


def _get(daemon: InProcess, number: int) -> None:
    with daemon.client(timeout_s=20) as client:
        try:
            client.get(key(number))
        except KvdError:
            pass


def test_a_load_whose_asker_has_gone_keeps_its_room_until_it_is_over() -> None:
    """A thread may be writing there: the room is neither free nor anybody else's before it has returned."""
    with running(tier := RamTier(), max_bytes=1 << 20) as daemon:
        with daemon.client(timeout_s=5) as client:
            assert client.put(key(1), b"x" * 600_000, wait="tier")
            daemon.evict_all()
        tier.loads.close()
        with daemon.client(timeout_s=20) as gone:
            gone.connect().submit(p.Lease(0, SPACE, [key(1)], 20_000))
            tier.loads.until_blocked()
        wait_until(lambda: daemon.ask(lambda: not daemon.daemon.server.connections), what="the asker to be gone")
        assert daemon.value_bytes() >= 600_000
        with daemon.client(timeout_s=1) as other:
            assert not other.put(key(2), b"y" * 600_000), "its room is not given away"
            tier.loads.open()
            wait_until(lambda: daemon.ask(lambda: not daemon.tier()._loads_under_way), what="the load to be over")
            assert other.put(key(2), b"y" * 600_000)
            assert other.get(key(2)) == b"y" * 600_000
