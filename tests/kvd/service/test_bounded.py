"""Whatever clients do or fail to do, what the daemon keeps for them is bounded, and given back."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd.errors import NoRoom
from kvd.wire import protocol as p
from kvd.wire.client import Client
from tests.kvd.tiers.ram_tier import InProcess, RamTier, running
from tests.kvd.wire.raw import Raw
from tests.support.daemon import Daemon, MakeDaemon
from tests.support.processes import wait_until

pytestmark = pytest.mark.real("kvd")

K = b"k" * 32
N = b"n" * 32
MIB = 1 << 20


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def rss(daemon: Daemon) -> int:
    """Private bytes of the daemon: the arena, which is shared, not counted."""
    status = Path(f"/proc/{daemon.pid}/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssAnon"))


@pytest.fixture(scope="module")
def daemon(kvd_daemon_module: MakeDaemon) -> Daemon:
    return kvd_daemon_module(max_bytes="64MiB")


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    with daemon.client(namespace=N) as made:
        yield made
        made.clear(all_namespaces=True)


def test_a_client_that_reads_no_answers_is_not_read_from(daemon: Daemon, client: Client) -> None:
    """Fifty megabytes of questions, gigabytes of answers: the daemon stops listening to that one and serves the others."""
    client.put_many([(key(i), b"v" * 4000) for i in range(1000)])
    before = rss(daemon)
    request = bytes(p.encode(p.Lease(1, N, [key(i) for i in range(250)], 0, 4096)))
    greedy = [Raw(daemon.socket) for _ in range(4)]
    for raw in greedy:
        raw.link.setblocking(False)
    sent = 0
    quiet = time.monotonic()
    while time.monotonic() - quiet < 0.5:
        for raw in greedy:
            try:
                sent += raw.link.send(request)
                quiet = time.monotonic()
            except BlockingIOError:
                pass
    grown = rss(daemon) - before
    began = time.monotonic()
    assert client.get(key(1)) == b"v" * 4000
    assert time.monotonic() - began < 1
    for raw in greedy:
        raw.close()
    assert grown < 32 * MIB, f"{sent} bytes were taken in"
    wait_until(lambda: client.stats()["connections"] == 1, what="the greedy ones to be let go")


def test_half_a_frame_costs_half_a_frame(daemon: Daemon, client: Client) -> None:
    """Twenty connections announce the largest frame there is and send a tenth of it."""
    client.ping()
    before = rss(daemon)
    waiting = [Raw(daemon.socket) for _ in range(20)]
    for raw in waiting:
        raw.link.sendall(p.LENGTH.pack(p.MAX_FRAME) + bytes(p.MAX_FRAME // 10))
    wait_until(lambda: client.ping() > 0, what="an answer")
    assert rss(daemon) - before < 20 * 2 * p.MAX_FRAME // 10 + 16 * MIB
    for raw in waiting:
        raw.close()


def test_namespaces_that_are_empty_again_cost_nothing(daemon: Daemon, client: Client) -> None:
    """Tenants come and go by the thousand: a salt for each request must not add up."""
    client.ping()
    sizes = []
    for round_ in range(5):
        with Raw(daemon.socket) as raw:
            for i in range(10_000):
                space = (round_ * 10_000 + i).to_bytes(32, "big")
                raw.send(p.PutInline(0, space, [K], [b"v"], 1), p.Delete(0, space, [K]))
            raw.ask(p.Ping(1))
        sizes.append(rss(daemon))
    # 100 bytes kept of each would be 4 MiB; the notes of what was deleted are a ring, which fills up meanwhile.
    assert sizes[4] - sizes[0] < 4 * MIB, sizes
    wait_until(lambda: client.stats()["namespaces"] < 100, what="empty namespaces to be forgotten")


def test_refused_puts_make_no_namespaces(daemon: Daemon, client: Client) -> None:
    before = client.stats()["namespaces"]
    with Raw(daemon.socket) as raw:
        for i in range(100):
            raw.send(p.PutInline(0, (7 << 200 | i).to_bytes(32, "big"), [K], [b"v"], 0))
        raw.ask(p.Ping(1))
    assert client.stats()["namespaces"] == before


class TestLeavers:
    """Requests whose asker is gone before they are answered, in the tightest moments there are."""

    @pytest.fixture
    def tier(self) -> RamTier:
        return RamTier()

    @pytest.fixture
    def inside(self, tier: RamTier) -> Iterator[InProcess]:
        with running(tier) as made:
            yield made

    def nothing_left(self, inside: InProcess) -> None:
        wait_until(lambda: not inside.ask(lambda: inside.daemon.server.connections), what="all connections to end")
        wait_until(lambda: inside.pins() == 0, what="all pins to be off")
        assert inside.ask(lambda: len(inside.store.leases.reads)) == 0
        assert inside.ask(lambda: inside.daemon.operations.tokens) == {}

    def test_claims(self, inside: InProcess, tier: RamTier) -> None:
        with inside.client(namespace=N) as client:
            client.put_many([(key(i), b"x" * 9000) for i in range(3)], wait="tier")
            for held in (True, False):
                if not held:
                    inside.evict_all()
                for _ in range(30):
                    token = client.prefix([key(i) for i in range(3)], pin_s=20).token
                    assert token is not None
                    leaver = Raw(inside.socket)
                    leaver.send(p.Claim(1, token, N, 5000))
                    leaver.close()
        self.nothing_left(inside)

    def test_leases_and_prefetches_from_a_slow_tier(self, inside: InProcess, tier: RamTier) -> None:
        with inside.client(namespace=N) as client:
            client.put_many([(key(i), b"x" * 9000) for i in range(40)], wait="tier")
        inside.evict_all()
        tier.loads.close()
        for i in range(40):
            leaver = Raw(inside.socket)
            leaver.send(p.Lease(1, N, [key(i)], 5000), p.Prefetch(2, N, [key(39 - i)], 5000))
            if i % 2:
                leaver.link.shutdown(socket.SHUT_RDWR)
            leaver.close()
        tier.loads.open()
        self.nothing_left(inside)

    def test_reserves_that_wait_for_room(self, inside: InProcess, tier: RamTier) -> None:
        tier.stores.close()
        with inside.client(namespace=N) as client, contextlib.suppress(NoRoom):
            for number in range(100):
                assert all(client.write([MIB], wait_s=0.1).commit([key(number)]))
                assert number < 99, "it is never full"
        for _ in range(10):
            leaver = Raw(inside.socket)
            leaver.send(p.Reserve(1, [4 * MIB], 5000))
            leaver.close()
        tier.stores.open()
        self.nothing_left(inside)
        inside.settled()
        with inside.client(namespace=N) as client:
            assert client.put(key(1000), b"y" * (4 * MIB))

    def test_puts_that_wait_for_a_tier(self, inside: InProcess, tier: RamTier) -> None:
        tier.stores.close()
        for i in range(20):
            leaver = Raw(inside.socket)
            leaver.send(p.PutInline(1, N, [key(i)], [b"v"], 3, 0, 5000), p.Flush(2, N, [], 5000))
            leaver.close()
        tier.stores.open()
        self.nothing_left(inside)
        inside.settled()
        assert len(tier.values) == 20, "what was accepted is stored, whoever asked"


def test_a_listing_of_many_keys_holds_nobody_up(daemon: Daemon, client: Client) -> None:
    """Somebody lists everything, page by page, while somebody else reads single values."""
    assert all(client.put_many([(key(i), b"v") for i in range(15_000)]))
    done = threading.Event()
    pages: list[int] = []

    def list_all() -> None:
        with daemon.client() as other:
            after, more = b"", True
            while more:
                page = other.connect().call(p.Keys(0, b"", after, 1000), p.KeyPage)
                pages.append(len(page.rows))
                more = page.more
                after = page.rows[-1][0] + page.rows[-1][4].encode()
        done.set()

    threading.Thread(target=list_all).start()
    worst = 0.0
    while not done.is_set():
        began = time.perf_counter()
        assert client.get(key(1)) == b"v"
        worst = max(worst, time.perf_counter() - began)
    assert sum(pages) == 15_000
    assert worst < 0.25, f"a get waited {worst * 1e3:.0f} ms"
