"""`resp` on real Redis servers: away at start, killed, frozen, full, foreign; a cluster of three; a daemon over it."""

import gc
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvd.tiers.adapters import registry, resp
from kvd.tiers.adapters.base import Adapter, AdapterError, Item, Loaded, Stored, Want
from kvd.tiers.adapters.resp import _glob
from tests.kvd.adapters.subjects import Resp
from tests.kvd.adapters.test_conformance import body, get, ident, put
from tests.kvd.tiers.ram_tier import running
from tests.support.processes import wait_until
from tests.support.servers import RedisCluster, RedisServer, Server, free_port

pytestmark = pytest.mark.real("redis")


def adapter_at(port: int, **more: Any) -> Adapter:
    (adapter,) = registry.build([{"type": "resp", "host": "127.0.0.1", "port": port, "timeout": "500ms", **more}])
    return adapter


@pytest.fixture
def redis(servers: dict[str, Server]) -> RedisServer:
    server = servers["redis"].wait()
    assert isinstance(server, RedisServer)
    server.ask("FLUSHALL")
    return server


@pytest.fixture
def own(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    """A server that the test may kill, with the settings of its parameter."""
    server = RedisServer(*getattr(request, "param", ()))
    server.start()
    try:
        server.wait()
        yield server
    finally:
        server.remove()


def test_a_server_that_is_away_at_the_start_is_used_when_it_comes(own: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    own.kill()
    adapter = adapter_at(own.port)
    adapter.open()
    assert "Connection refused" in caplog.text
    with pytest.raises(AdapterError, match=f"cannot store at 127.0.0.1:{own.port}"):
        put(adapter, 1)
    with pytest.raises(AdapterError):
        adapter.lookup([ident(1)])
    with pytest.raises(AdapterError):
        get(adapter, 1)
    with pytest.raises(AdapterError):
        adapter.delete([ident(1)])
    own.start().wait()
    assert put(adapter, 1).ok
    assert get(adapter, 1) == body(1)
    adapter.close()


def test_a_server_that_dies_at_work_and_comes_back_empty(own: RedisServer) -> None:
    adapter = adapter_at(own.port)
    adapter.open()
    put(adapter, 1)
    own.kill()
    with pytest.raises(AdapterError):
        get(adapter, 1)
    own.start().wait()
    assert get(adapter, 1) is Loaded.MISS
    assert put(adapter, 1).ok
    adapter.close()


def test_a_server_that_hangs_fails_within_the_timeout(own: RedisServer) -> None:
    adapter = adapter_at(own.port)
    adapter.open()
    put(adapter, 1)
    own.freeze()
    begun = time.monotonic()
    with pytest.raises(AdapterError, match="cannot load"):
        get(adapter, 1)
    assert time.monotonic() - begun < 3
    own.thaw()
    assert get(adapter, 1) == body(1)
    adapter.close()


@pytest.mark.parametrize("own", [("--maxmemory", "3mb", "--maxmemory-policy", "noeviction")], indirect=True)
def test_a_full_server_is_full_and_serves_what_it_has(own: RedisServer) -> None:
    adapter = adapter_at(own.port)
    adapter.open()
    results = [put(adapter, number, body(number, 200_000)) for number in range(20)]
    assert results[0].ok
    assert results[-1] == Stored(False, "full")
    assert get(adapter, 0, 200_000) == body(0, 200_000)
    assert adapter.usage().bytes_limit == 3 << 20
    adapter.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # see the end
@pytest.mark.parametrize("own", [("--requirepass", "open sesame")], indirect=True)
def test_a_password(own: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVT_PASSWORD", "open sesame")
    adapter = adapter_at(own.port, password="env:KVT_PASSWORD")
    adapter.open()
    assert put(adapter, 1).ok
    adapter.close()
    wrong = adapter_at(own.port, password="sesame")
    with pytest.raises(AdapterError) as caught:
        put(wrong, 1)
    assert "sesame" not in caught.value.message
    wrong.close()
    del caught
    gc.collect()  # redis-py leaves the socket of a refused password to the collector, which would warn in a later test


def test_expiry_is_the_servers_too(redis: RedisServer) -> None:
    adapter = adapter_at(redis.port)
    adapter.open()
    put(adapter, 1, expires_ns=time.time_ns() + 5_000_000_000)
    put(adapter, 2)
    left = int(redis.ask("PTTL", Resp.key(ident(1)))[1:])
    assert 3000 < left <= 5001
    assert redis.ask("PTTL", Resp.key(ident(2))) == b":-1\r\n"
    adapter.close()


def test_another_kind_of_key_is_damage(redis: RedisServer) -> None:
    adapter = adapter_at(redis.port)
    adapter.open()
    redis.ask("RPUSH", Resp.key(ident(1)), "x")
    assert adapter.lookup([ident(1)]) == [None]
    assert adapter.counters.corruptions == 1
    redis.ask("RPUSH", Resp.key(ident(1)), "x")
    assert get(adapter, 1) is Loaded.CORRUPT
    assert put(adapter, 1).ok
    redis.ask("DEL", Resp.key(ident(2)))
    redis.ask("RPUSH", Resp.key(ident(2)), "x")
    assert put(adapter, 2).ok, "a store replaces whatever is there"
    assert get(adapter, 2) == body(2)
    adapter.close()


def test_a_huge_value_in_our_place_is_not_fetched(redis: RedisServer) -> None:
    adapter = adapter_at(redis.port)
    adapter.open()
    put(adapter, 1)
    redis.ask("SETRANGE", Resp.key(ident(1)), str(64 << 20), "x")
    before = _sent(redis)
    assert get(adapter, 1) is Loaded.CORRUPT
    assert _sent(redis) - before < 100_000
    adapter.close()


def _sent(redis: RedisServer) -> int:
    text = redis.ask("INFO", "stats").decode()
    return int(text.partition("total_net_output_bytes:")[2].split()[0])


def test_values_above_the_limit_are_not_sent(redis: RedisServer) -> None:
    adapter = adapter_at(redis.port, max_value_bytes=1000)
    adapter.open()
    assert put(adapter, 1, bytes(1001)) == Stored(False, "too_large")
    assert put(adapter, 2, bytes(1000)).ok
    adapter.close()


def test_our_own_limit_on_the_servers_memory(redis: RedisServer) -> None:
    adapter = adapter_at(redis.port, max_capacity_gb=1e-6)
    adapter.open()
    assert put(adapter, 1) == Stored(False, "full")
    adapter.close()


@pytest.mark.parametrize("prefix", ["a*b:", "[x]?\\", "kv d/é:"])
def test_prefixes_keep_daemons_apart(redis: RedisServer, prefix: str) -> None:
    mine, other = adapter_at(redis.port, prefix=prefix), adapter_at(redis.port, prefix="axxb:", name="other")
    put(mine, 1)
    put(other, 2)
    redis.ask("SET", prefix + "README", "x")
    redis.ask("SET", prefix + "00" * 64, "x")
    assert [identity for identity, _ in mine.enumerate()] == [ident(1)]
    assert mine.delete_namespace(ident(1)[:32]) == 1
    assert get(other, 2) == body(2)
    mine.close()
    other.close()


def test_patterns_match_only_themselves() -> None:
    assert _glob(b"a*[b]?\\^") == b"a\\*\\[b\\]\\?\\\\\\^"


def test_usage_is_right_when_nothing_happens_any_more(redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last batch of a burst is counted too, though no call comes after it that could ask beside its own work."""
    adapter = adapter_at(redis.port, prefix="burst:")
    adapter.open()
    before = adapter.usage().entries
    for number in range(5):
        put(adapter, number)
    monkeypatch.setattr(resp, "USAGE_S", 0.0)
    wait_until(lambda: adapter.usage().entries == before + 5, what="the keys to be counted")
    adapter.close()


def test_a_server_that_goes_away_in_the_middle_of_a_listing_is_an_error_of_the_tier(own: RedisServer) -> None:
    """Names come a page at a time: each page is a question of its own, which may fail."""
    adapter = adapter_at(own.port)
    adapter.open()
    assert all(stored.ok for stored in adapter.store([Item(ident(n), memoryview(b"x")) for n in range(3 * resp.SCAN)]))
    listing = adapter.enumerate()
    next(listing)
    own.kill()
    with pytest.raises(AdapterError, match=f"cannot (list|look up) at 127.0.0.1:{own.port}"):
        list(listing)
    adapter.close()


def test_usage_is_there_right_after_the_start(redis: RedisServer) -> None:
    first = adapter_at(redis.port)
    for number in range(10):
        put(first, number)
    first.close()
    second = adapter_at(redis.port)
    second.open()
    assert second.usage().entries == 10
    assert second.usage().bytes_used > 50_000
    second.close()


@pytest.fixture(scope="module")
def cluster(servers: dict[str, Server]) -> Iterator[RedisCluster]:
    made = RedisCluster()
    try:
        yield made
    finally:
        made.remove()


@pytest.mark.usefixtures("cluster")
class TestCluster:
    """The daemon is told one node and finds the others."""

    def test_a_batch_goes_to_all_nodes(self, cluster: RedisCluster) -> None:
        adapter = adapter_at(cluster.port)
        adapter.open()
        numbers = range(60)
        items = [Item(ident(n), memoryview(body(n))) for n in numbers]
        assert all(stored.ok for stored in adapter.store(items))
        sizes = [int(node.ask("DBSIZE")[1:]) for node in cluster.nodes]
        assert sum(sizes) == 60
        assert min(sizes) > 5
        buffers = [bytearray(5000) for _ in numbers]
        assert adapter.load([Want(ident(n), memoryview(buffers[n])) for n in numbers]) == [Loaded.OK] * 60
        assert [bytes(buffer) for buffer in buffers] == [body(n) for n in numbers]
        assert all(adapter.lookup([ident(n) for n in numbers]))
        assert len(dict(adapter.enumerate())) == 60
        adapter._refresh(force=True)  # type: ignore[attr-defined]
        assert adapter.usage().entries == 60
        assert adapter.usage().bytes_used > 3 * 1_000_000
        assert adapter.delete([ident(n) for n in numbers]) == 60
        adapter.close()


def test_a_daemon_over_redis_survives_its_loss(own: RedisServer) -> None:
    keys = [bytes([i]) * 32 for i in range(20)]
    with running(adapter_at(own.port)) as daemon, daemon.client() as client:
        for i, key in enumerate(keys):
            assert client.put(key, bytes([i]) * 30_000)
        client.flush()
        daemon.evict_all()
        assert client.prefix(keys).length == 20
        assert client.get_many(keys) == [bytes([i]) * 30_000 for i in range(20)]
        own.kill()
        assert client.get(keys[3]) == bytes([3]) * 30_000, "RAM serves on"
        wait_until(lambda: daemon.evict_all() or client.exists([keys[3]]) == [False], what="brief leases to end")
        assert client.get(keys[3]) is None
        own.start().wait()
        assert client.put(keys[0], b"anew" * 5000)
        wait_until(lambda: own.ask("DBSIZE") == b":1\r\n", what="the value to arrive", timeout_s=15)
        daemon.settled()
        daemon.evict_all()
        wait_until(lambda: client.get(keys[0]) == b"anew" * 5000, what="the tier to be asked again", timeout_s=10)


def test_a_daemon_over_no_server_serves(servers: dict[str, Server]) -> None:
    with running(adapter_at(free_port())) as daemon, daemon.client() as client:
        assert client.put(b"k" * 32, b"value" * 1000)
        assert client.get(b"k" * 32) == b"value" * 1000
        assert client.get(b"x" * 32) is None
        assert daemon.tier().name == "resp"
