"""One client, many threads: requests pipeline, a slow one holds nobody up, late answers give back what came with them."""

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvd.errors import DeadlinePassed, KvdError
from kvd.wire import protocol as p
from kvd.wire.client import Client
from tests.kvd.tiers.ram_tier import InProcess, RamTier, running
from tests.support.processes import wait_until

pytestmark = pytest.mark.real("kvd")


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def in_threads(jobs: list[Callable[[], None]], timeout_s: float = 30.0) -> None:
    """Run all at once; the first failure of any is ours."""
    failures: list[BaseException] = []

    def run(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
        assert not thread.is_alive(), "a thread hangs"
    if failures:
        raise failures[0]


@pytest.fixture
def tier() -> RamTier:
    return RamTier()


@pytest.fixture
def daemon(tier: RamTier) -> Iterator[InProcess]:
    with running(tier, max_bytes=16 << 20) as made:
        yield made


@pytest.fixture
def client(daemon: InProcess) -> Iterator[Client]:
    with daemon.client() as made:
        yield made


def test_threads_share_one_connection_and_never_see_each_others_values(daemon: InProcess, client: Client) -> None:
    """Small and large values, puts, gets, leases, all at once."""

    def worker(number: int) -> Callable[[], None]:
        def work() -> None:
            random = np.random.default_rng(number)
            for step in range(60):
                size = int(random.choice([10, 4000, 5000, 70_000, 300_000]))
                name = key(number * 1000 + step % 7)
                value = bytes([number, step]) * (size // 2)
                if client.put(name, value):
                    got = client.get(name)
                    assert got is None or got == value
                with client.read([name]) as lease:
                    assert lease.views[0] is None or bytes(lease.views[0]) == value
                assert client.get(key(999_999)) is None

        return work

    in_threads([worker(n) for n in range(8)])
    assert daemon.ask(lambda: len(daemon.daemon.server.connections)) == 1
    assert not client.connect()._waiters
    client.ping()
    wait_until(lambda: daemon.pins() == 0, what="all pins to be off")


def test_a_get_that_waits_for_a_tier_holds_nobody_up(daemon: InProcess, tier: RamTier, client: Client) -> None:
    client.put(key(1), b"slow" * 5000, wait="tier")
    daemon.evict_all()
    client.put(key(2), b"fast" * 5000)
    daemon.settled()
    tier.loads.close()
    got: list[bytes | None] = []
    slow = threading.Thread(target=lambda: got.append(client.get(key(1))))
    slow.start()
    tier.loads.until_blocked()
    began = time.monotonic()
    for _ in range(100):
        assert client.get(key(2)) == b"fast" * 5000
    assert time.monotonic() - began < 2.0
    assert not got
    tier.loads.open()
    slow.join(10)
    assert got == [b"slow" * 5000]


def test_the_one_who_reads_hands_over_when_it_gives_up(daemon: InProcess, tier: RamTier, client: Client) -> None:
    """The thread that reads the socket times out; another that waits longer must get its answer all the same."""
    client.put_many([(key(n), b"x" * 9000) for n in (1, 2)], wait="tier")
    daemon.evict_all()
    tier.loads.close()
    outcome: dict[str, object] = {}

    def impatient() -> None:
        try:
            client.connect().call(p.Lease(0, client.namespace, [key(1)], 20_000), p.Leased, 0.3)
        except DeadlinePassed as error:
            outcome["impatient"] = error

    def patient() -> None:
        outcome["patient"] = client.get(key(2))

    first = threading.Thread(target=impatient)
    first.start()
    tier.loads.until_blocked()
    second = threading.Thread(target=patient)
    second.start()
    first.join(5)
    assert isinstance(outcome.get("impatient"), DeadlinePassed)
    tier.loads.open()
    second.join(10)
    assert outcome["patient"] == b"x" * 9000


def test_a_late_answer_gives_back_what_it_pinned(daemon: InProcess, tier: RamTier, client: Client) -> None:
    client.put(key(1), b"x" * 9000, wait="tier")
    daemon.evict_all()
    tier.loads.close()
    link = client.connect()
    with pytest.raises(DeadlinePassed):
        link.call(p.Lease(0, client.namespace, [key(1)], 20_000), p.Leased, 0.1)
    tier.loads.open()
    wait_until(lambda: daemon.ask(lambda: len(daemon.store.leases.reads)) == 1, what="the late lease")
    assert client.ping() > 0, "the connection is whole"
    wait_until(lambda: daemon.ask(lambda: len(daemon.store.leases.reads)) == 0, what="the late lease to be given back")
    wait_until(lambda: daemon.pins() == 0, what="the pin to be off")


def test_a_late_answer_gives_back_what_it_was_lent(daemon: InProcess, tier: RamTier, client: Client) -> None:
    """The arena is full of values that the tier has not taken: a reserve waits, its asker gives up, room comes."""
    tier.stores.close()
    client.timeout_s = 1.0
    wrote = 0
    while client.put(key(wrote), b"x" * (1 << 20)):
        wrote += 1
    link = client.connect()
    with pytest.raises(DeadlinePassed):
        link.call(p.Reserve(0, [8 << 20], 20_000), p.Lent, 0.1)
    tier.stores.open()
    client.timeout_s = 5.0
    wait_until(lambda: daemon.ask(lambda: any(c.holder.lent for c in daemon.daemon.server.connections.values())), what="the loan")
    assert client.ping() > 0

    def lent() -> bool:
        return any(extent.length == 8 << 20 for c in daemon.daemon.server.connections.values() for extent in c.holder.lent.values())

    wait_until(lambda: not daemon.ask(lent), what="the loan to be given back")


def test_many_who_wait_for_one_key_share_one_load(daemon: InProcess, tier: RamTier, client: Client) -> None:
    client.put(key(1), b"x" * 90_000, wait="tier")
    daemon.evict_all()
    tier.loads.close()
    before = tier.loads.calls
    clients = [daemon.client() for _ in range(4)]
    got: list[bytes | None] = []
    threads = [threading.Thread(target=lambda c=c: got.append(c.get(key(1)))) for c in [client, client, *clients]]
    for thread in threads:
        thread.start()
    tier.loads.until_blocked()
    time.sleep(0.2)
    tier.loads.open()
    for thread in threads:
        thread.join(10)
    assert got == [b"x" * 90_000] * 6
    assert tier.loads.calls - before == 1
    for other in clients:
        other.close()
    assert daemon.ask(lambda: daemon.store.counts.promotions) == 1


def test_more_waiting_requests_than_the_limit_are_all_answered(daemon: InProcess, tier: RamTier, client: Client) -> None:
    """Above the limit the daemon stops reading this connection, and only this one."""
    tier.stores.close()
    client.put(key(1), b"x" * 9000)
    tier.stores.until_blocked()
    link = client.connect()
    requests = [p.Flush(0, client.namespace, [], 20_000) for _ in range(200)]
    waiters = [link.submit(request) for request in requests]
    with daemon.client() as other:
        assert other.get(key(1)) == b"x" * 9000
        waiting = daemon.ask(lambda: max(len(c._waiting) for c in daemon.daemon.server.connections.values()))
        assert waiting <= 64
    tier.stores.open()
    for waiter, request in zip(waiters, requests, strict=True):
        link.wait(waiter, request, p.Done, 10)


def test_lent_ahead_goes_back_when_idle_and_when_closed(daemon: InProcess, client: Client) -> None:
    def lent() -> int:
        return daemon.ask(lambda: sum(c.holder.lent_pages for c in daemon.daemon.server.connections.values()))

    client.put(key(1), b"x" * 100_000)
    assert lent() > 0
    wait_until(lambda: lent() == 0, timeout_s=5, what="what was lent ahead to be given back")
    client.put(key(1), b"x" * 100_000)
    client.close()
    wait_until(lambda: daemon.ask(lambda: not daemon.daemon.server.connections), what="the connection to end")
    assert daemon.ask(lambda: daemon.store.leases.quarantine_pages) == 0


def test_writers_of_one_key_leave_one_whole_value(daemon: InProcess, tier: RamTier, client: Client) -> None:
    """Eight threads put and read one key: every read is one of the values, whole."""

    def writer(number: int) -> Callable[[], None]:
        def write() -> None:
            for _ in range(40):
                assert client.put(key(1), bytes([number]) * 50_000)
                value = client.get(key(1))
                assert value is not None
                assert len(value) == 50_000
                assert value == value[:1] * 50_000

        return write

    in_threads([writer(n) for n in range(1, 9)])
    client.flush()
    daemon.evict_all()
    last = client.get(key(1))
    assert last == tier.values[client.namespace + key(1)][0]


def test_closing_under_waiting_threads_ends_their_calls(daemon: InProcess, tier: RamTier, client: Client) -> None:
    client.put(key(1), b"x" * 9000, wait="tier")
    daemon.evict_all()
    tier.loads.close()
    ended: list[object] = []

    def ask() -> None:
        link = client.connect()
        try:
            link.call(p.Lease(0, client.namespace, [key(1)], 20_000), p.Leased, 20)
        except KvdError as error:
            ended.append(error)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    tier.loads.until_blocked()
    wait_until(lambda: client.connect()._read_by_someone and len(client.connect()._waiters) == 2, what="three waiting calls")
    client.close()
    for thread in threads:
        thread.join(5)
    assert len(ended) == 3
    tier.loads.open()
    wait_until(lambda: daemon.pins() == 0, what="no pin to be left of the requests that nobody waits for")
