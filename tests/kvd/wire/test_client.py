"""The client against a real daemon: every method, every size, and what it promises about views."""

import array
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvd import AsyncClient, Client
from kvd.errors import KvdError, LeaseLost, NoRoom, Unavailable
from kvd.store.identity import namespace_of
from kvd.wire import protocol as p
from kvd.wire.connection import default_socket
from tests.support.daemon import Daemon, MakeDaemon
from tests.support.processes import wait_until

pytestmark = pytest.mark.real("kvd")

SIZES = [0, 1, 63, 4095, 4096, 4097, 65535, 65536, 65537, 1 << 20, (3 << 20) + 5]


@pytest.fixture(scope="module")
def daemon(kvd_daemon_module: MakeDaemon) -> Daemon:
    return kvd_daemon_module(max_bytes="32MiB")


@pytest.fixture
def client(daemon: Daemon, request: pytest.FixtureRequest) -> Iterator[Client]:
    """In a namespace of the test's own."""
    with daemon.client(namespace=request.node.name) as made:
        yield made
        made.clear()


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def data(size: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed + size).bytes(size)


@pytest.mark.parametrize("size", SIZES)
def test_a_value_of_any_size_comes_back(client: Client, size: int) -> None:
    assert client.get(key(1)) is None
    result = client.put(key(1), data(size))
    assert result
    assert (result.reason, result.durability) == ("", "none")
    assert client.get(key(1)) == data(size)
    assert client.get_many([key(1), key(2), key(1)]) == [data(size), None, data(size)]
    with client.read([key(1)]) as lease:
        assert lease.views[0] is not None
        assert bytes(lease.views[0]) == data(size)


def test_many_values_of_mixed_sizes_come_back_in_order(client: Client) -> None:
    sizes = [(7919 * i) % 40_000 for i in range(300)]
    items = [(key(i), data(size, i)) for i, size in enumerate(sizes)]
    assert all(client.put_many(items))
    assert client.get_many([k for k, _ in items]) == [v for _, v in items]


def test_more_than_the_arena_holds_goes_through_it_in_windows(client: Client) -> None:
    """Neither a long put nor a long get needs all of it at once."""
    items = [(key(i), data(1 << 20, i)) for i in range(80)]
    assert all(client.put_many(items))
    values = client.get_many([k for k, _ in items])
    assert sum(value is not None for value in values) >= 20
    assert all(value is None or value == items[i][1] for i, value in enumerate(values))
    assert values[-1] is not None, "the youngest must be there"


@pytest.mark.parametrize(
    "buffer",
    [
        bytearray(b"x" * 10_000),
        memoryview(b"x" * 10_000),
        array.array("d", [1.5] * 2_000),
        np.arange(9_000, dtype=np.float32).reshape(30, 300),
        np.zeros(0, dtype=np.int64),
    ],
    ids=["bytearray", "memoryview", "array", "matrix", "nothing"],
)
def test_any_contiguous_buffer_can_be_put(client: Client, buffer: object) -> None:
    assert client.put(key(1), buffer)
    assert client.get(key(1)) == bytes(memoryview(buffer))  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", ["text", 5, None, np.zeros((8, 8))[:, ::2]], ids=["str", "int", "none", "strided"])
def test_what_is_no_buffer_is_an_error_before_anything_is_sent(client: Client, wrong: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        client.put(key(1), wrong)
    assert client.ping() > 0


@pytest.mark.parametrize("wrong", [b"", b"x" * 31, b"x" * 33, "x" * 32])
def test_keys_are_exactly_32_bytes(client: Client, wrong: Any) -> None:
    calls = [
        lambda: client.put(wrong, b"v"),
        lambda: client.put(wrong, b"v" * 10_000),
        lambda: client.put_many([(key(1), b"v"), (wrong, b"v")]),
        lambda: client.get(wrong),
        lambda: client.get_many([key(1), wrong]),
        lambda: client.get_into([wrong], [bytearray(9)]),
        lambda: client.read([wrong]),
        lambda: client.exists([wrong]),
        lambda: client.prefix([wrong]),
        lambda: client.prefetch([wrong]),
        lambda: client.delete([wrong]),
        lambda: client.flush([wrong]),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="32 bytes"):
            call()
    with client.write([5]) as lease, pytest.raises(ValueError, match="32 bytes"):
        lease.commit([wrong])


def test_a_namespace_is_a_name_or_32_bytes(daemon: Daemon) -> None:
    for wrong in (b"", b"x" * 31, b"x" * 33):
        with pytest.raises(ValueError, match="32 bytes"):
            Client(daemon.socket, namespace=wrong)
    with daemon.client(namespace="tenant") as named, daemon.client(namespace=namespace_of("tenant")) as raw:
        named.put(key(1), b"v")
        assert raw.get(key(1)) == b"v"
        raw.clear()


def test_get_into_fills_buffers_and_says_how_far(client: Client) -> None:
    for i, size in enumerate((10, 5000, 200_000)):
        client.put(key(i), data(size))
    buffers = [bytearray(b"\xaa" * room) for room in (10, 6000, 100_000, 50)]
    assert client.get_into([key(0), key(1), key(2), key(9)], buffers) == [10, 5000, None, None]
    assert buffers[0] == data(10)
    assert buffers[1] == data(5000) + b"\xaa" * 1000
    assert set(buffers[3]) == {0xAA}
    with pytest.raises(ValueError, match="1 buffers for 2 keys"):
        client.get_into([key(0), key(1)], [bytearray(1)])


class TestLeases:
    def test_views_cannot_be_written_through(self, client: Client) -> None:
        client.put(key(1), data(10_000))
        with client.read([key(1)]) as lease:
            view = lease.views[0]
            assert view is not None
            assert view.readonly
            with pytest.raises(TypeError):
                view[0] = 1
        link = client.connect()
        with pytest.raises((TypeError, ValueError)):
            np.asarray(link.mapping.read_bytes)[0] = 1

    def test_bytes_under_a_lease_do_not_change(self, client: Client) -> None:
        client.put(key(1), data(10_000, 1))
        with client.read([key(1)]) as lease:
            client.put(key(1), data(10_000, 2))
            client.delete([key(1)])
            for i in range(40):
                client.put(key(100 + i), data(1 << 20, i))
            assert lease.views[0] is not None
            assert bytes(lease.views[0]) == data(10_000, 1)
            lease.check()
        assert client.get(key(1)) is None

    def test_leaving_releases(self, client: Client) -> None:
        client.put(key(1), data(10_000))
        lease = client.read([key(1)])
        assert client.stats()["leases_active"] == 1
        lease.release()
        lease.release()
        assert client.stats()["leases_active"] == 0

    def test_a_lease_of_another_connection_cannot_be_ended(self, daemon: Daemon, client: Client) -> None:
        client.put(key(1), data(10_000))
        with client.read([key(1)]) as lease, daemon.client() as other:
            other.connect().tell(p.Release(0, [lease._number]))
            assert other.stats()["leases_active"] == 1
            with pytest.raises(LeaseLost):
                other.connect().call(p.Renew(0, lease._number), p.Done)

    def test_renewing_works_while_it_lives(self, client: Client) -> None:
        client.put(key(1), data(10_000))
        with client.read([key(1)]) as lease:
            lease.renew()
            client.connect().tell(p.Release(0, [lease._number]))
            with pytest.raises(LeaseLost):
                lease.renew()

    def test_hanging_up_voids_it(self, client: Client) -> None:
        client.put(key(1), data(10_000))
        lease = client.read([key(1)])
        client.close()
        assert not lease.valid
        with pytest.raises(LeaseLost):
            lease.check()

    def test_views_outlive_the_mapping_they_came_from(self, client: Client) -> None:
        """Void, and so of no use; but touching them must not crash the engine."""
        client.put(key(1), data(10_000))
        view = client.read([key(1)]).views[0]
        client.close()
        assert client.ping() > 0
        assert view is not None
        assert len(bytes(view)) == 10_000


class TestWriteLeases:
    def test_what_is_written_is_what_is_read(self, client: Client) -> None:
        sizes = [10, 5000, 1 << 20]
        with client.write(sizes) as lease:
            for view, size in zip(lease.views, sizes, strict=True):
                assert len(view) == size
                view[:] = data(size)
            assert not any(client.exists([key(i) for i in range(3)]))
            assert all(lease.commit([key(i) for i in range(3)]))
        assert client.get_many([key(i) for i in range(3)]) == [data(size) for size in sizes]

    def test_left_without_a_commit_everything_goes_back(self, client: Client) -> None:
        before = client.stats()["arena_bytes_used"]
        with client.write([1 << 20] * 4):
            assert client.stats()["arena_bytes_used"] == before + (4 << 20)
        assert client.stats()["arena_bytes_used"] == before

    def test_all_or_nothing(self, client: Client) -> None:
        before = client.stats()["arena_bytes_used"]
        with pytest.raises(NoRoom):
            client.write([8 << 20] * 5, timeout_s=0.2)
        assert client.stats()["arena_bytes_used"] == before
        with pytest.raises(NoRoom) as refused:
            client.write([33 << 20])
        assert "larger than the arena" in refused.value.message

    def test_the_keys_must_be_as_many_as_the_views(self, client: Client) -> None:
        with client.write([1, 2]) as lease, pytest.raises(ValueError, match="1 keys for 2 views"):
            lease.commit([key(1)])

    def test_a_second_commit_stores_nothing(self, client: Client) -> None:
        with client.write([5]) as lease:
            lease.views[0][:] = b"first"
            assert all(lease.commit([key(1)]))
            with pytest.raises(ValueError, match="keys for 0 views"):
                lease.commit([key(2)])
        assert client.get(key(1)) == b"first"


def test_too_large_is_a_result_and_not_an_error(client: Client) -> None:
    big = mmap.mmap(-1, 40 << 20)
    results = client.put_many([(key(1), b"small"), (key(2), big), (key(3), data(9000))])
    assert [bool(result) for result in results] == [True, False, True]
    assert results[1].reason == "too_large"
    assert client.get_many([key(1), key(2), key(3)]) == [b"small", None, data(9000)]
    big.close()


def test_everything_pinned_is_no_room_and_says_so(client: Client) -> None:
    for i in range(40):
        client.put(key(i), data(1 << 20, i))
    held = [i for i in range(40) if client.exists([key(i)])[0]]
    with client.read([key(i) for i in held]):
        client.timeout_s = 0.3
        assert client.put(key(100), data(8 << 20)).reason in ("no_room", "busy")
        results = client.put_many([(key(101), data(8 << 20)), (key(102), b"small")])
        assert results[0].reason in ("no_room", "busy")
        with pytest.raises(NoRoom):
            client.write([8 << 20])
    client.timeout_s = 5.0
    assert client.put(key(200), data(1 << 20))


def test_ttl_ends_a_value(client: Client) -> None:
    assert client.put(key(1), b"v", ttl_s=0.2)
    assert client.put(key(2), data(9000), ttl_s=0.2)
    assert client.exists([key(1), key(2)]) == [True, True]
    wait_until(lambda: client.get_many([key(1), key(2)]) == [None, None], what="both to expire")
    assert client.exists([key(1), key(2)]) == [False, False]
    for ttl in (0, -5):
        assert client.put(key(3), b"v", ttl_s=ttl).reason == "expired"


def test_exists_and_prefix_count_neither_hit_nor_miss(client: Client) -> None:
    client.put(key(1), b"v")
    before = client.stats()
    client.exists([key(1), key(2)])
    client.prefix([key(1), key(2)])
    after = client.stats()
    assert [after[n] - before[n] for n in ("gets_total", "hits_total", "misses_total")] == [0, 0, 0]
    client.get_many([key(1), key(2)])
    now = client.stats()
    assert [now[n] - after[n] for n in ("gets_total", "hits_total", "misses_total")] == [2, 1, 1]


class TestPrefix:
    def test_the_leading_run_in_all_namespaces(self, client: Client) -> None:
        for i in (0, 1, 2, 4):
            client.put(key(i), b"v", namespace="rank 0")
        for i in (0, 1, 3):
            client.put(key(i), b"v", namespace="rank 1")
        keys = [key(i) for i in range(5)]
        assert client.prefix(keys, namespaces=["rank 0"]).length == 3
        assert client.prefix(keys, namespaces=["rank 0", "rank 1"]).length == 2
        assert client.prefix(keys, namespaces=["rank 0", "rank 2"]).length == 0
        assert client.prefix([], namespaces=["rank 0"]).length == 0
        assert client.prefix(keys[:1], namespaces=["rank 0"]).token is None
        for name in ("rank 0", "rank 1"):
            client.clear(namespace=name)

    def test_a_token_pins_for_whoever_claims_it(self, daemon: Daemon, client: Client) -> None:
        for i in range(3):
            client.put(key(i), data(9000, i))
        found = client.prefix([key(i) for i in range(4)], pin_s=5)
        assert found.length == 3
        assert found.token is not None
        client.delete([key(0)])
        with daemon.client(namespace=client.namespace) as worker:
            with worker.claim(found.token) as lease:
                assert [bytes(view) for view in lease.views if view is not None] == [data(9000, i) for i in range(3)]
            with pytest.raises(LeaseLost):
                worker.claim(found.token)

    def test_a_token_ends_by_itself(self, client: Client) -> None:
        client.put(key(1), data(9000))
        found = client.prefix([key(1)], pin_s=0.2)
        assert client.stats()["tokens_active"] == 1
        wait_until(lambda: client.stats()["tokens_active"] == 0, what="the token to end")
        assert found.token is not None
        with pytest.raises(LeaseLost):
            client.claim(found.token)

    def test_unpinning_ends_it_without_counting_a_read(self, daemon: Daemon, client: Client) -> None:
        with daemon.client(namespace="unpin") as mine:
            mine.put(key(1), b"v" * 9000)
            before = mine.stats()
            token = mine.prefix([key(1)], pin_s=30).token
            assert token is not None
            assert mine.stats()["tokens_active"] == 1
            mine.unpin(token)
            mine.unpin(token)
            after = mine.stats()
            assert (after["tokens_active"], after["gets_total"]) == (0, before["gets_total"])
            with pytest.raises(LeaseLost):
                mine.claim(token)
            mine.clear()

    def test_only_its_namespaces_can_be_claimed_each_once(self, client: Client) -> None:
        for name in ("a", "b"):
            client.put(key(1), data(9000), namespace=name)
        token = client.prefix([key(1)], namespaces=["a", "b"], pin_s=5).token
        assert token is not None
        with pytest.raises(LeaseLost):
            client.claim(token, namespace="c")
        client.claim(token, namespace="a").release()
        with pytest.raises(LeaseLost):
            client.claim(token, namespace="a")
        client.claim(token, namespace="b").release()
        assert client.stats()["tokens_active"] == 0
        assert client.stats()["leases_active"] == 0
        for name in ("a", "b"):
            client.clear(namespace=name)


def test_delete_and_clear_count_what_there_was(daemon: Daemon, client: Client) -> None:
    for i in range(5):
        client.put(key(i), b"v")
    with daemon.client(namespace="another") as other:
        other.put(key(1), b"v")
        assert client.delete([key(0), key(0), key(9)]) == 1
        assert client.clear() == 4
        assert other.get(key(1)) == b"v"
        assert client.clear(all_namespaces=True) == 1


def test_flush_without_a_tier_reaches_nothing(client: Client) -> None:
    client.put(key(1), b"v")
    assert client.flush() == "none"
    assert client.put(key(2), b"v", wait="tier").durability == "none"


def test_unknown_words_are_errors(client: Client) -> None:
    with pytest.raises(ValueError, match="unknown retention 'forever'"):
        client.put(key(1), b"v", retention="forever")
    with pytest.raises(ValueError, match="unknown wait 'disk'"):
        client.put(key(1), b"v", wait="disk")


def test_the_socket_is_found_as_the_commands_find_it(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVD_SOCKET", str(daemon.socket))
    assert default_socket() == daemon.socket
    with Client() as client:
        assert client.ping() > 0
    monkeypatch.delenv("KVD_SOCKET")
    assert str(default_socket()).endswith("kvd.sock")


def test_no_daemon_is_one_plain_error_with_a_hint(daemon: Daemon) -> None:
    with Client(daemon.folder / "nobody.sock") as client, pytest.raises(Unavailable) as error:
        client.get(key(1))
    assert "no daemon at" in error.value.message
    assert "kvd serve" in str(error.value.hint)
    not_a_daemon = daemon.folder / "file"
    not_a_daemon.write_text("x")
    with Client(not_a_daemon) as client, pytest.raises(KvdError):
        client.ping()


@pytest.mark.asyncio
async def test_the_asynchronous_client_is_the_same(daemon: Daemon) -> None:
    async with AsyncClient(daemon.socket, namespace="async") as kv:
        assert await kv.put(key(1), data(100_000))
        assert await kv.get(key(1)) == data(100_000)
        assert await kv.exists([key(1), key(2)]) == [True, False]
        with await kv.read([key(1)]) as lease:
            assert bytes(lease.views[0]) == data(100_000)
        with await kv.write([10]) as lease:
            lease.views[0][:] = b"0123456789"
            assert all(lease.commit([key(2)]))
        assert await kv.get_many([key(2), key(3)]) == [b"0123456789", None]
        assert (await kv.prefix([key(1), key(2), key(3)])).length == 2
        assert (await kv.stats())["entries"] >= 2
        assert await kv.clear() == 2
        with pytest.raises(AttributeError):
            kv.nonsense  # noqa: B018


def test_a_closed_client_leaves_no_descriptor_and_no_mapping(daemon: Daemon) -> None:
    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("kvd-arena")

    before = held()
    for _ in range(5):
        with daemon.client() as client:
            client.put(key(1), data(100_000))
            client.get(key(1))
    client.__dict__.clear()
    wait_until(lambda: held() <= before, what="descriptors and mappings to go")
