"""What went wrong in the system this one replaces, each as a test of its own: measured there, impossible here."""

import time
from pathlib import Path

import numpy as np
import pytest

from kvd.store.arena import Arena
from kvd.store.extents import PAGE
from kvd.store.retention import NEVER, Retention
from kvd.store.store import Store
from tests.support.daemon import Daemon, MakeDaemon
from tests.support.processes import run_cli, wait_until

pytestmark = pytest.mark.real("kvd")

K = b"k" * 32
MIB = 1 << 20


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def rss(daemon: Daemon) -> int:
    """Private bytes of the daemon: the arena, which is shared, not counted."""
    status = Path(f"/proc/{daemon.pid}/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssAnon"))


@pytest.fixture(scope="module")
def lasting(kvd_daemon_module: MakeDaemon) -> Daemon:
    return kvd_daemon_module(max_bytes="32MiB", tier="256MiB")


def test_equal_keys_of_two_namespaces_never_meet(lasting: Daemon) -> None:
    """There: the arena was keyed by the bare key; the second namespace's value answered for the first."""
    with lasting.client() as client:
        for size in (20, 50_000):
            for name in ("a", "b"):
                assert client.put(K, name.encode() * size, namespace=name, wait="tier")
            for _ in range(2):
                assert [client.get(K, namespace=name) for name in ("a", "b", "c")] == [b"a" * size, b"b" * size, None]
                for name in ("a", "b"):
                    client.delete([K], arena_only=True, namespace=name)


def test_the_very_first_value_is_not_empty(kvd_daemon: MakeDaemon) -> None:
    """There: slot number 0 was taken for "none", so one block in 32 came back as a hit without bytes."""
    daemon = kvd_daemon(max_bytes="64MiB")
    with daemon.client() as client:
        with client.write([MIB] * 32) as lease:
            for i, view in enumerate(lease.views):
                np.frombuffer(view, dtype=np.uint8)[:] = i + 1
            assert all(lease.commit([key(i) for i in range(32)]))
        for i, data in enumerate(client.get_many([key(i) for i in range(32)])):
            assert data == bytes([i + 1]) * MIB


def test_what_is_written_through_a_lease_reaches_the_tier(lasting: Daemon) -> None:
    """There: reserve and commit with retention=long never got to disk, only values sent over the socket did."""
    with lasting.client(namespace="leased") as client:
        with client.write([100_000]) as lease:
            lease.views[0][:] = b"l" * 100_000
            assert lease.commit([K], retention="long", wait="tier")[0]
        assert client.delete([K], arena_only=True) == 1
        assert client.get(K) == b"l" * 100_000


def test_an_expired_value_does_not_come_back_from_the_tier(kvd_daemon: MakeDaemon) -> None:
    """There: the disk knew nothing of a value's time to live, and brought it back for ever."""
    daemon = kvd_daemon(max_bytes="8MiB", tier="64MiB")
    with daemon.client() as client:
        for n, size in enumerate((100, 50_000)):
            assert client.put(key(n), b"t" * size, ttl_s=0.6, wait="tier")
        assert client.put(key(9), b"stays", ttl_s=3600, wait="tier")
        client.delete([key(0), key(1), key(9)], arena_only=True)
        wait_until(lambda: client.exists([key(0), key(1)]) == [False, False], what="both to expire")
        assert client.get_many([key(0), key(1), key(9)]) == [None, None, b"stays"]
    daemon.restart(kill=True)
    with daemon.client() as client:
        assert client.get_many([key(0), key(1), key(9)]) == [None, None, b"stays"]


def test_retention_none_is_stored_nowhere(lasting: Daemon) -> None:
    """There: it was cached like any other."""
    with lasting.client(namespace="none") as client:
        before = client.stats()
        for data in (b"small", b"large" * 10_000):
            result = client.put(K, data, retention="none")
            assert (bool(result), result.reason) == (False, "retention_none")
        after = client.stats()
        assert client.exists([K]) == [False]
        assert (after["sets_total"], after["entries"]) == (before["sets_total"], before["entries"])


def test_eviction_honours_class_and_recency(kvd_daemon: MakeDaemon) -> None:
    """There: the arena evicted in the order of putting, whatever the class and whatever was used."""
    daemon = kvd_daemon(max_bytes="8MiB")
    with daemon.client() as client:
        value = b"x" * (MIB - PAGE)  # eight of these fit
        for i in range(8):
            client.put(key(i), value, retention=("long", "ephemeral")[i % 2])
        client.get_many([key(1), key(0)])
        order = []
        for i in range(7):
            assert client.put(key(100 + i), value)
            here = client.exists([key(i) for i in range(8)])
            order += [i for i in range(8) if not here[i] and i not in order]
        assert order == [3, 5, 7, 1, 2, 4, 6]


def test_a_tiny_first_value_fixes_nothing(kvd_daemon: MakeDaemon) -> None:
    """There: it set the slot size for life. Large values then went elsewhere, leases failed, batches missed, memory exploded."""
    daemon = kvd_daemon(max_bytes="256MiB")
    with daemon.client() as client:
        client.ping()
        before = rss(daemon)
        began = time.monotonic()
        assert client.put(key(0), b"0123456789")
        assert time.monotonic() - began < 1
        items = [(key(1 + i), bytes([i]) * (MIB + i)) for i in range(32)]
        assert all(client.put_many(items))
        assert client.get_many([k for k, _ in items]) == [v for _, v in items]
        with client.write([64 * MIB]) as lease:
            assert len(lease.views[0]) == 64 * MIB
        with client.read([key(0), key(1)]) as read:
            assert [view and len(view) for view in read.views] == [10, MIB]
        assert client.get(key(0)) == b"0123456789"
        assert rss(daemon) - before < 16 * MIB


def test_a_key_whose_own_reserve_evicted_it_can_be_saved_again(kvd_daemon: MakeDaemon) -> None:
    """There: the commit was accepted, the get missed, and the slot was lost for ever."""
    daemon = kvd_daemon(max_bytes="1MiB")
    with daemon.client() as client:
        for round_ in range(20):
            with client.write([700_000]) as lease:
                lease.views[0][:3] = b"%03d" % round_
                assert lease.commit([K])[0]
            data = client.get(K)
            assert data is not None
            assert data[:3] == b"%03d" % round_
        assert client.stats()["entries"] == 1
        client.delete([K])
        assert client.stats()["arena_bytes_used"] == 0


def test_a_view_does_not_change_under_its_reader(lasting: Daemon) -> None:
    """There: views were not pinned; after some churn one showed another key's bytes."""
    with lasting.client(namespace="churn") as client:
        client.put(K, b"1111" * 25_000)
        with client.read([K]) as lease:
            for i in range(100):
                client.put(key(i), b"2222" * 200_000, retention="ephemeral")
            assert client.stats()["evictions_total"] > 50
            view = lease.views[0]
            assert view is not None
            assert bytes(view) == b"1111" * 25_000


def test_keys_that_differ_in_one_byte_are_different_keys(lasting: Daemon) -> None:
    """There: 56 bits of a key were looked at."""
    keys = [bytes(31 - i) + b"\1" + bytes(i) for i in range(32)]
    with lasting.client(namespace="bits") as client:
        assert all(client.put_many([(k, k * 200) for k in keys], wait="tier"))
        assert client.get_many(keys) == [k * 200 for k in keys]
        client.delete(keys, arena_only=True)
        assert client.get_many(keys) == [k * 200 for k in keys]


def test_a_tier_of_another_size_reads_the_old_one_right_or_not_at_all(kvd_daemon: MakeDaemon) -> None:
    """There: a changed geometry was laid over the old bytes, and other keys' values came out."""
    daemon = kvd_daemon(max_bytes="16MiB", tier="128MiB")
    items = [(key(i), np.random.default_rng(i).bytes(100_000 + i)) for i in range(300)]
    with daemon.client(timeout_s=20) as client:
        assert all(client.put_many(items))
        client.flush()
    for size, least in (("1GiB", 300), ("32MiB", 50)):
        daemon.stop()
        daemon.words[daemon.words.index("--long-bytes") + 1] = size
        daemon.start()
        with daemon.client(timeout_s=20) as client:
            got = client.get_many([k for k, _ in items])
            assert all(data is None or data == items[i][1] for i, data in enumerate(got))
            assert sum(data is not None for data in got) >= least
            assert client.stats()["tiers"][0]["bytes_used"] <= client.stats()["tiers"][0]["bytes_limit"]


def test_a_value_the_tier_refuses_is_not_called_durable(kvd_daemon: MakeDaemon) -> None:
    """There: the refusal was logged, and the put accepted as if it were on disk."""
    daemon = kvd_daemon(max_bytes="64MiB", tier="16MiB")
    with daemon.client(timeout_s=20) as client:
        limit = client.stats()["tiers"][0]["max_value_bytes"]
        fits, too_large = client.put_many([(key(1), b"f" * 4096), (key(2), b"t" * (limit + 1))], wait="tier")
        assert too_large.stored
        assert too_large.durability == "none"
        assert fits.stored
        assert client.get(key(2)) == b"t" * (limit + 1)
        assert client.stats()["tiers"][0]["store_failures_total"] == 1


def test_a_value_that_comes_up_is_not_written_down_again(kvd_daemon: MakeDaemon) -> None:
    """There: eight values stored and read back were sixteen writes to disk."""
    daemon = kvd_daemon(max_bytes="4MiB", tier="64MiB")
    with daemon.client() as client:
        assert all(client.put_many([(key(i), bytes([i]) * 100_000) for i in range(20)], wait="tier"))
        before = client.stats()["tiers"][0]["stores_total"]
        for _ in range(3):
            client.delete([key(i) for i in range(20)], arena_only=True)
            assert client.get_many([key(i) for i in range(20)]) == [bytes([i]) * 100_000 for i in range(20)]
        client.flush()
        stats = client.stats()
        assert stats["promotions_total"] == 60
        assert stats["tiers"][0]["stores_total"] == before == 20


def test_evicted_keys_do_not_come_back_with_the_bytes_of_others(kvd_daemon: MakeDaemon) -> None:
    """There: evictions were not in the journal; after a restart it put old keys onto slots that others had by then."""
    daemon = kvd_daemon(max_bytes="8MiB", tier="16MiB")
    with daemon.client(timeout_s=20) as client:
        for i in range(120):
            assert client.put(key(i), key(i) * 8000, wait="tier" if i % 10 == 9 else "")
    for kill in (True, False):
        daemon.restart(kill=kill)
        with daemon.client(timeout_s=20) as client:
            got = client.get_many([key(i) for i in range(120)])
            assert all(data in (None, key(i) * 8000) for i, data in enumerate(got))
            assert 10 < sum(data is not None for data in got) < 120
            tier = client.stats()["tiers"][0]
            assert tier["bytes_used"] <= tier["bytes_limit"]


def test_a_torn_log_loses_nothing_that_comes_after_it(kvd_daemon: MakeDaemon) -> None:
    """There: the next line was glued to the torn one, and with it everything after it was lost."""
    daemon = kvd_daemon(max_bytes="8MiB", tier="64MiB")
    with daemon.client(timeout_s=20) as client:
        assert all(client.put_many([(key(i), key(i) * 1000) for i in range(40)], wait="tier"))
        client.delete([key(i) for i in range(10)])
    daemon.kill9()
    log = daemon.tier / "deletes.kvlog"
    with log.open("ab") as file:
        file.write(b"torn" * 700)
    daemon.start()
    with daemon.client(timeout_s=20) as client:
        client.delete([key(i) for i in range(10, 20)])
        assert client.put(key(99), b"later", wait="tier")
    for kill in (True, False):
        daemon.restart(kill=kill)
        with daemon.client(timeout_s=20) as client:
            assert client.get_many([key(i) for i in range(40)]) == [None] * 20 + [key(i) * 1000 for i in range(20, 40)]
            assert client.get(key(99)) == b"later"


def test_overwriting_and_deleting_for_ever_takes_no_more_room(kvd_daemon: MakeDaemon) -> None:
    """There: the journal grew by a line a put, without bound, since no snapshot was ever written."""
    daemon = kvd_daemon(max_bytes="8MiB", tier="64MiB")

    def size() -> int:
        return sum(path.stat().st_size for path in daemon.tier.iterdir())

    with daemon.client(timeout_s=20) as client:
        for round_ in range(30):
            client.put_many([(key(i), bytes([round_]) * 20_000) for i in range(40)], wait="tier")
            client.delete([key(i) for i in range(round_ % 2, 40, 2)])
        for round_ in range(60):
            client.put_many([(key(i), bytes([round_]) * 20_000) for i in range(40)], wait="tier")
            client.delete([key(i) for i in range(round_ % 2, 40, 2)])
        assert size() <= 66 * MIB
    daemon.restart()
    assert (daemon.tier / "deletes.kvlog").stat().st_size < MIB


def test_the_start_writes_no_probe(kvd_daemon: MakeDaemon) -> None:
    """There: 2 GB were written to the tier and read back before the socket was there: 14.5 s."""
    daemon = kvd_daemon(max_bytes="8MiB", tier="512MiB")
    assert sum(path.stat().st_blocks * 512 for path in daemon.tier.rglob("*") if path.is_file()) < 16 * MIB


def test_a_stopped_daemon_leaves_its_successors_socket(kvd_daemon: MakeDaemon) -> None:
    """There: a second daemon took the path, and the end of the first one took the second's socket away."""
    daemon = kvd_daemon(max_bytes="8MiB")
    second = run_cli("kvd", "serve", "--socket", daemon.socket, "--max-bytes", "1MiB")
    assert second.rc == 1
    assert "already running" in second.stderr
    with daemon.client() as client:
        assert client.put(K, b"v")
    assert daemon.stop() == 0
    daemon.start()
    with daemon.client() as client:
        assert client.put(K, b"v")


def evictions_per_second(entries: int) -> float:
    """Puts a second into a full store of so many one-page values: each evicts one."""
    arena = Arena(entries * PAGE)
    arena.settle(arena.capacity)
    store = Store(arena)
    n = b"n" * 32
    for i in range(entries):
        store.put_inline(n, key(i), b"v", Retention.LONG, NEVER)
    began = time.process_time()
    count = 4000
    for i in range(count):
        assert store.put_inline(n, key(entries + i), b"v", Retention.LONG, NEVER) == ""
    took = time.process_time() - began
    assert store.counts.evictions == count
    arena.close()
    return count / took


def test_an_eviction_costs_the_same_among_200_and_20_000() -> None:
    """There: 2 000 puts a second with 2 000 entries, 90 with 20 000."""
    few = max(evictions_per_second(200) for _ in range(2))
    many = max(evictions_per_second(20_000) for _ in range(2))
    assert many > few / 2, f"{few:.0f} and {many:.0f} a second"


def test_stats_cost_the_same_whatever_is_stored(kvd_daemon: MakeDaemon) -> None:
    """There: 10 ms with 100 000 entries, and everybody waited for it."""
    daemon = kvd_daemon(max_bytes="256MiB")
    with daemon.client() as client:

        def cost() -> float:
            times = []
            for _ in range(30):
                began = time.perf_counter()
                client.stats()
                times.append(time.perf_counter() - began)
            return min(times)

        few = cost()
        assert all(client.put_many([(key(i), b"v") for i in range(20_000)]))
        assert client.stats()["entries"] == 20_000
        assert cost() < few * 3 + 0.001


def test_memory_follows_what_is_held(kvd_daemon: MakeDaemon) -> None:
    """There: a thousand entries' index and frames stayed behind. Here: fill, clear, fill again, and nothing grows."""
    daemon = kvd_daemon(max_bytes="128MiB")
    with daemon.client() as client:
        sizes = []
        for _ in range(4):
            assert all(client.put_many([(np.random.default_rng().bytes(32), b"v" * 100) for _ in range(6_000)]))
            client.clear()
            sizes.append(rss(daemon))
        assert sizes[-1] - sizes[0] < 4 * MIB, sizes
        assert sizes[-1] < 64 * MIB + 40 * MIB, "over the size after imports by more than its allowance"
