"""Values written and read past the daemon through parts of its files: real daemon, real files, real deaths."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvd.errors import Draining, LeaseLost, ProtocolError
from kvd.service.direct import DirectDesk
from kvd.tiers.adapters.base import Capabilities
from kvd.wire import protocol as p
from kvd.wire.client import Client
from kvd.wire.direct import Extent
from tests.kvd.disk.helpers import value
from tests.support.daemon import Daemon, MakeDaemon
from tests.support.processes import wait_until

pytestmark = pytest.mark.real("kvd")

ROOT = Path(__file__).parents[3]
SIZE = 200_000
KEYS = [bytes([n]) * 32 for n in range(250)]


@pytest.fixture
def daemon(kvd_daemon: MakeDaemon) -> Daemon:
    return kvd_daemon(max_bytes="8MiB", tier="64MiB")


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    with daemon.client() as client:
        yield client


def path_of(client: Client, extent: Extent) -> Path:
    return Path(client.connect().welcome.roots[extent.root][0]) / extent.name


def write(client: Client, extent: Extent | None, data: bytes) -> None:
    assert extent is not None
    fd = os.open(path_of(client, extent), os.O_RDWR)
    try:
        assert os.pwrite(fd, data, extent.offset) == len(data) == extent.length
        os.fdatasync(fd)
    finally:
        os.close(fd)


def read(client: Client, extent: Extent | None) -> bytes:
    assert extent is not None
    with path_of(client, extent).open("rb") as file:
        file.seek(extent.offset)
        return file.read(extent.length)


def put(client: Client, *keys: bytes, **more) -> None:
    with client.direct_write(keys, [SIZE] * len(keys), **more) as lent:
        for key, extent in zip(keys, lent.extents, strict=True):
            write(client, extent, value(key[0], SIZE))
        assert all(lent.commit(range(len(keys))))


def test_a_value_written_past_the_daemon_is_a_value_in_every_way(daemon: Daemon, client: Client) -> None:
    lent = client.direct_write(KEYS[:3], [SIZE] * 3)
    for key, extent in zip(KEYS, lent.extents, strict=False):
        write(client, extent, value(key[0], SIZE))
    assert client.exists(KEYS[:3]) == [False] * 3, "not before it is committed"
    assert [result.reason for result in lent.commit([0, 2])] == ["", ""]
    assert client.exists(KEYS[:3]) == [True, False, True]
    assert client.prefix([KEYS[0], KEYS[2]]).length == 2
    for _ in range(2):
        with client.direct_read(KEYS[:3]) as held:
            assert held.extents[1] is None
            assert [read(client, held.extents[i]) for i in (0, 2)] == [value(0, SIZE), value(2, SIZE)]
        assert client.get(KEYS[2]) == value(2, SIZE), "and through the arena"
        daemon.restart(kill=True)
    tier = client.stats()["tiers"][0]
    assert tier["entries"] == 2
    assert tier["bytes_used"] == 2 * (4096 + 200_704)
    assert client.delete([KEYS[0]]) == 1
    assert client.direct_read([KEYS[0]]).extents == [None]


def test_every_figure_counts_it(daemon: Daemon, client: Client) -> None:
    put(client, *KEYS[:4])
    client.direct_read(KEYS[:5]).release()
    client.direct_write([KEYS[9]], [SIZE]).abort()
    wait_until(lambda: client.stats()["tiers"][0]["direct_given_back_total"] == 1)
    stats = client.stats()
    assert (stats["sets_total"], stats["set_bytes_total"]) == (4, 4 * SIZE)
    assert (stats["gets_total"], stats["hits_total"], stats["get_bytes_total"]) == (4, 4, 4 * SIZE)
    (tier,) = stats["tiers"]
    assert (tier["stores_total"], tier["direct_stores_total"], tier["direct_store_bytes_total"]) == (4, 4, 4 * SIZE)
    assert (tier["hits_total"], tier["direct_loads_total"], tier["direct_load_bytes_total"]) == (4, 4, 4 * SIZE)
    assert tier["unchecked_total"] == 4
    assert (stats["direct_leases_active"], stats["direct_loans_active"], stats["direct_loans_quarantined"]) == (0, 0, 0)


def test_verify_lists_what_has_no_checksum(daemon: Daemon, client: Client) -> None:
    put(client, KEYS[0])
    daemon.stop()
    ran = daemon.run("verify", str(daemon.tier), "--json")
    assert ran.rc == 0, ran.stderr
    (report,) = ran.json()["directories"]
    (absent,) = report["absent_checksums"]
    assert KEYS[0].hex() in absent
    text = daemon.run("verify", str(daemon.tier)).stdout
    assert "absent_checksums         1\n" in text
    assert absent in text
    daemon.start()


def test_a_value_that_the_arena_stored_can_be_held_once_it_is_in_the_tier(client: Client) -> None:
    client.put(KEYS[0], value(0, SIZE), wait="tier")
    assert client.direct_read([KEYS[0]]).extents == [None], "while it is in the arena, that is where to read it"
    client.delete([KEYS[0]], arena_only=True)
    with client.direct_read([KEYS[0]]) as held:
        assert read(client, held.extents[0]) == value(0, SIZE)
        assert held.extents[0] is not None
        assert len(held.extents[0].checksum) == 16


@pytest.mark.parametrize("how", ["delete", "clear"])
def test_what_is_deleted_while_it_is_written_does_not_come_back(client: Client, how: str) -> None:
    lent = client.direct_write([KEYS[0]], [SIZE])
    write(client, lent.extents[0], value(0, SIZE))
    if how == "delete":
        client.delete([KEYS[0]])
    else:
        client.clear()
    (result,) = lent.commit([0])
    assert (result.stored, result.reason) == (False, "lease_lost")
    assert client.exists([KEYS[0]]) == [False]


def test_what_may_not_be_lent_is_refused_with_its_reason(kvd_daemon: MakeDaemon, daemon: Daemon, client: Client) -> None:
    assert client.direct_write([KEYS[0]], [SIZE], retention="ephemeral").reasons == ["unwanted"]
    assert client.direct_write([KEYS[0]], [100]).reasons == ["too_small"]
    with kvd_daemon(max_bytes="8MiB").client() as bare:
        assert bare.direct_write([KEYS[0]], [SIZE]).reasons == ["no_tier"]
        assert bare.direct_read([KEYS[0]]).extents == [None]
    assert daemon.run("drain").rc == 0
    with pytest.raises(Draining):
        client.direct_write([KEYS[0]], [SIZE])


def test_a_time_to_live_holds(client: Client) -> None:
    put(client, KEYS[0], ttl_s=0.5)
    wait_until(lambda: client.exists([KEYS[0]]) == [False])
    assert client.direct_read([KEYS[0]]).extents == [None]


def test_the_budget_holds_and_the_oldest_go(daemon: Daemon, client: Client) -> None:
    size = 1 << 20
    for n in range(100):
        lent = client.direct_write([KEYS[n]], [size])
        write(client, lent.extents[0], value(n, size))
        assert lent.commit([0])[0], lent.reasons
    there = client.exists(KEYS[:100])
    assert there[99]
    assert not there[0]
    assert sum(file.stat().st_size for file in daemon.tier.glob("*.kvcache")) <= 64 << 20
    for n in [n for n, one in enumerate(there) if one]:
        with client.direct_read([KEYS[n]]) as held:
            assert read(client, held.extents[0]) == value(n, size)


BORROWER = """
import os, sys, time
from pathlib import Path
from kvd.wire.client import Client
client = Client(Path(sys.argv[1]))
lent = client.direct_write([b"b" * 32], [200_000])
held = client.direct_read([b"k" * 32])
assert lent.extents[0] is not None and held.extents[0] is not None
if sys.argv[2] == "hangup":
    client.close()
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("how", ["kill", "hangup"])
def test_a_borrower_that_leaves_is_waited_for_until_its_process_is_gone(daemon: Daemon, client: Client, how: str) -> None:
    client.put(b"k" * 32, value(1, SIZE), wait="tier")
    client.delete([b"k" * 32], arena_only=True)
    borrower = subprocess.Popen(
        [sys.executable, "-c", BORROWER, str(daemon.socket), how], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        assert borrower.stdout is not None
        assert borrower.stdout.readline() == "ready\n"
        if how == "hangup":
            wait_until(lambda: client.stats()["direct_loans_quarantined"] == 1)
            assert client.stats()["direct_leases_active"] == 0
        borrower.send_signal(signal.SIGKILL)
        borrower.wait(10)
    finally:
        borrower.kill()
        borrower.stdout.close()
    wait_until(lambda: client.stats()["direct_loans_active"] == 0)
    assert client.stats()["direct_leases_active"] == 0
    assert client.exists([b"b" * 32]) == [False]


def test_a_lost_connection_ends_the_reading(daemon: Daemon, client: Client) -> None:
    put(client, KEYS[0])
    held = client.direct_read([KEYS[0]])
    lent = client.direct_write([KEYS[1]], [SIZE])
    daemon.restart(kill=True)
    with pytest.raises(LeaseLost):
        held.check()
    assert lent.commit([0])[0].reason == "lease_lost"


def test_many_at_once(client: Client) -> None:
    failures = []

    def work(start: int) -> None:
        try:
            put(client, *KEYS[start : start + 10])
            with client.direct_read(KEYS[start : start + 10]) as held:
                assert [read(client, extent) for extent in held.extents] == [
                    value(key[0], SIZE) for key in KEYS[start : start + 10]
                ]
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(start,)) for start in range(0, 60, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert client.stats()["tiers"][0]["entries"] == 60


def test_two_folders_are_two_roots(kvd_daemon: MakeDaemon, tmp_path: Path) -> None:
    words = [word for name in "ab" for word in ("--long-path", str(tmp_path / name))]
    with kvd_daemon(*words, "--long-bytes", "64MiB", max_bytes="8MiB").client() as client:
        roots = client.connect().welcome.roots
        assert [root[0] for root in roots] == [str(tmp_path / "a"), str(tmp_path / "b")]
        assert [root[2] for root in roots] == [(tmp_path / name).stat().st_ino for name in "ab"]
        put(client, *KEYS[:20])
        with client.direct_read(KEYS[:20]) as held:
            assert {extent.root for extent in held.extents if extent is not None} == {0, 1}
            assert [read(client, extent) for extent in held.extents] == [value(key[0], SIZE) for key in KEYS[:20]]


def test_the_greeting_of_an_earlier_daemon_names_no_roots() -> None:
    earlier = msgspec.msgpack.encode([2, 1, "kvd 0.1.0", 4711, 1 << 26, b"s" * 16, 30.0, "abc"])
    welcome = p.welcome_decoder.decode(earlier)
    assert isinstance(welcome, p.Welcome)
    assert welcome.roots == []


def test_not_more_than_a_part_of_the_tier_is_lent_at_a_time(client: Client) -> None:
    lent = [client.direct_write([KEYS[n]], [4 << 20]) for n in range(8)]
    assert [one.reasons[0] for one in lent] == [""] * 4 + ["full"] * 4
    lent[0].abort()
    assert client.direct_write([KEYS[0]], [4 << 20]).reasons == [""]


def test_requests_that_cannot_be_meant_are_refused(client: Client) -> None:
    space, one = b"n" * 32, KEYS[:1]
    strange = [
        p.DirectReserve(1, space, one, [], 3),
        p.DirectReserve(1, space, one, [-1], 3),
        p.DirectReserve(1, b"n" * 31, [b"k" * 33], [SIZE], 3),
        p.DirectReserve(1, space, one, [SIZE], 9),
        p.DirectReserve(1, space, [b"k" * 32] * 1025, [SIZE] * 1025, 3),
        p.DirectCommit(1, [1], [b"short"]),
        p.DirectCommit(1, [1], [b"c" * 16] * 2),
        p.DirectHold(1, b"n" * 31, [b"k" * 33]),
    ]
    client.direct_write(KEYS[:1], [SIZE]).abort()  # this connection may write
    for request in strange:
        with pytest.raises(ProtocolError):
            client.connect().call(request, p.Done)
    assert client.ping() > 0


def test_a_folder_of_a_stripe_that_is_away_is_a_root_that_nobody_finds(tmp_path: Path) -> None:
    adapter = SimpleNamespace(capabilities=Capabilities(direct_extents=True), direct_roots=lambda: [tmp_path / "away", tmp_path])
    tiering: Any = SimpleNamespace(tiers=[SimpleNamespace(adapter=adapter)])
    store: Any = None
    away, there = DirectDesk(store, tiering, lease_s=30.0).roots()
    assert away == (str(tmp_path / "away"), 0, 0)
    assert there == (str(tmp_path), tmp_path.stat().st_dev, tmp_path.stat().st_ino)
