"""`mooncake_store` on a real master and a real host, over TCP: away, killed, frozen, full; with the arena registered; a daemon."""

import contextlib
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvd.tiers.adapters import registry
from kvd.tiers.adapters.base import Adapter, AdapterConfigError, AdapterError, AdapterFull, Item, Loaded, Want
from kvd.tiers.adapters.mooncake import MooncakeAdapter, read_metrics
from tests.kvd.adapters.subjects import Shared
from tests.kvd.adapters.test_conformance import body, get, ident, put
from tests.kvd.tiers.ram_tier import running
from tests.support.processes import run_cli, wait_until
from tests.support.servers import MooncakePool, Server

pytestmark = pytest.mark.real("mooncake")


def adapter_at(pool: MooncakePool, **more: Any) -> Adapter:
    where = {"master_server_address": f"127.0.0.1:{pool.port}", "local_hostname": "127.0.0.1", "timeout": "2s"}
    (adapter,) = registry.build([{"type": "mooncake_store", **where, **more}])
    return adapter


@contextlib.contextmanager
def opened(adapter: Adapter) -> Iterator[Adapter]:
    adapter.open()
    try:
        yield adapter
    finally:
        adapter.close()


@pytest.fixture
def own() -> Iterator[MooncakePool]:
    """A pool that the test may kill."""
    pool = MooncakePool()
    try:
        pool.start().wait()
        yield pool
    finally:
        pool.remove()


@pytest.fixture
def pool(servers: dict[str, Server]) -> MooncakePool:
    """Everybody's."""
    made = servers["mooncake"].wait()
    assert isinstance(made, MooncakePool)
    return made


def test_a_master_that_is_away_at_the_start_is_used_when_it_comes(own: MooncakePool, caplog: pytest.LogCaptureFixture) -> None:
    own.kill()
    with opened(adapter_at(own)) as adapter:
        assert "Connection refused; serving without it until it answers" in caplog.text
        for call in (lambda: put(adapter, 1), lambda: get(adapter, 1), lambda: adapter.lookup([ident(1)])):
            with pytest.raises(AdapterError, match=f"cannot reach the master at 127.0.0.1:{own.port}"):
                call()
        with pytest.raises(AdapterError):
            adapter.delete([ident(1)])
        own.start().wait()
        assert put(adapter, 1).ok
        assert get(adapter, 1) == body(1)


@pytest.mark.slow  # Mooncake's client tries for seconds before it says so
def test_a_pool_that_dies_and_comes_back_empty(own: MooncakePool) -> None:
    with opened(adapter_at(own)) as adapter:
        assert put(adapter, 1).ok
        own.kill()
        with pytest.raises(AdapterError, match=r"it is away|it does not answer"):
            adapter.lookup([ident(1)])
        begun = time.monotonic()
        with pytest.raises(AdapterError, match="Connection refused"):
            put(adapter, 1)
        assert time.monotonic() - begun < 2, "once it is known to be away it is not waited for"
        own.start().wait()
        wait_until(lambda: _quietly(lambda: put(adapter, 2).ok), what="the pool to be used again", timeout_s=20)
        assert get(adapter, 1) is Loaded.MISS
        assert get(adapter, 2) == body(2)


def _quietly(check: Any) -> bool:
    try:
        return bool(check())
    except AdapterError:
        return False


def test_a_master_that_hangs_fails_within_the_timeout(own: MooncakePool) -> None:
    with opened(adapter_at(own)) as adapter:
        assert put(adapter, 1).ok
        own.freeze()
        begun = time.monotonic()
        with pytest.raises(AdapterError, match="it does not answer"):
            adapter.lookup([ident(1)])
        assert time.monotonic() - begun < 15
        own.thaw()
        wait_until(lambda: _quietly(lambda: get(adapter, 1) == body(1)), what="the master to answer")


def test_a_host_that_hangs_costs_its_values_and_writes_nothing_late(own: MooncakePool) -> None:
    with opened(adapter_at(own)) as adapter:
        value = body(1, 1 << 20)
        assert put(adapter, 1, value).ok
        own.freeze_host()
        into = np.full(1 << 20, 0x5A, np.uint8)
        begun = time.monotonic()
        assert adapter.load([Want(ident(1), memoryview(into))]) == [Loaded.MISS]
        assert time.monotonic() - begun < 15
        assert adapter.counters.io_errors == 1
        into[:] = 0x5A  # the buffer is somebody else's now
        own.thaw_host()
        wait_until(lambda: get(adapter, 1, 1 << 20) == value, what="the host to answer")
        assert (into == 0x5A).all()


def test_a_host_that_died_costs_its_values_only(own: MooncakePool) -> None:
    with opened(adapter_at(own)) as adapter:
        assert put(adapter, 1).ok
        own.kill_host()
        assert get(adapter, 1) is Loaded.MISS
        own.start_host()
        own.wait()
        wait_until(lambda: _quietly(lambda: put(adapter, 2).ok), what="the new host to be used", timeout_s=20)
        assert get(adapter, 2) == body(2)


def test_values_outlive_the_daemon_and_not_the_memory_it_gave(own: MooncakePool) -> None:
    with opened(adapter_at(own)) as adapter:
        assert put(adapter, 1).ok
    with opened(adapter_at(own, global_segment_size="64MiB", local_hostname="localhost")) as adapter:
        assert get(adapter, 1) == body(1)
        assert put(adapter, 1, b"other" * 10).ok, "a put under a key that exists replaces"
        assert get(adapter, 1, 50) == b"other" * 10


def test_a_pool_that_is_full_makes_room_or_refuses_and_loses_nothing_it_confirms() -> None:
    pool = MooncakePool("16 MB")
    try:
        pool.start().wait()
        with opened(adapter_at(pool, master_metrics_address=f"127.0.0.1:{pool.metrics}")) as adapter:
            reasons = {put(adapter, number, body(number, 1 << 20)).reason for number in range(12)}
            assert reasons == {""}
            results = [_put_or_full(adapter, number) for number in range(12, 30)]
            assert set(results) <= {"", "full"}
            seen = [get(adapter, number, 1 << 20) for number in range(30)]
            assert all(value in (body(number, 1 << 20), Loaded.MISS) for number, value in enumerate(seen))
            wait_until(lambda: adapter.usage().entries >= 8, what="the master's numbers")
            usage = adapter.usage()
            assert usage.bytes_limit == 16 << 20
            assert 8 << 20 < usage.bytes_used <= 16 << 20
            assert usage.entries >= 8
    finally:
        pool.remove()


def _put_or_full(adapter: Adapter, number: int) -> str:
    try:
        return put(adapter, number, body(number, 1 << 20)).reason
    except AdapterFull:
        return "full"


def test_where_only_registered_memory_will_do_the_rest_is_copied(pool: MooncakePool) -> None:
    """As over RDMA: the arena is used in place, other buffers by way of the client's own."""
    adapter = MooncakeAdapter(
        "pool", lambda: Shared(pool.client()), where="the pool", prefix="registered/", zero_copy_anywhere=False
    )
    arena = np.zeros(4 << 20, np.uint8)
    adapter.attach(memoryview(arena))
    with opened(adapter):
        try:
            inside, outside = memoryview(arena)[4096 : 4096 + 70_001], memoryview(bytearray(70_001))
            inside[:] = body(1, 70_001)
            assert adapter._in_place(inside)
            assert not adapter._in_place(outside)
            assert adapter.store([Item(ident(1), inside), Item(ident(2), memoryview(body(2, 70_001)))])[1].ok
            for number in (1, 2):
                for into in (memoryview(arena)[1 << 20 : (1 << 20) + 70_001], outside):
                    assert adapter.load([Want(ident(number), into)]) == [Loaded.OK]
                    assert bytes(into) == body(number, 70_001)
            assert get(adapter, 2, 5000) is Loaded.MISS
            assert get(adapter, 3) is Loaded.MISS
        finally:
            pool.client().unregister_buffer(int(arena.ctypes.data))


def test_more_objects_than_one_call_takes(pool: MooncakePool) -> None:
    with opened(MooncakeAdapter("pool", lambda: Shared(pool.client()), where="the pool", prefix="many/")) as adapter:
        numbers = range(700)
        assert all(stored.ok for stored in adapter.store([Item(ident(n), memoryview(body(n, 100))) for n in numbers]))
        assert all(adapter.lookup([ident(n) for n in numbers]))
        buffers = [bytearray(100) for _ in numbers]
        assert set(adapter.load([Want(ident(n), memoryview(buffers[n])) for n in numbers])) == {Loaded.OK}
        assert all(buffers[n] == body(n, 100) for n in numbers)
        assert adapter.delete([ident(n) for n in numbers]) == 700


def test_clearing_takes_what_is_ours(pool: MooncakePool) -> None:
    other = MooncakeAdapter("other", lambda: Shared(pool.client()), where="the pool", prefix="a.b/c")
    with opened(other), opened(MooncakeAdapter("pool", lambda: Shared(pool.client()), where="the pool", prefix="a.b/")) as adapter:
        elsewhere = Item(b"\xaa" * 64, memoryview(b"x" * 100))
        assert all(stored.ok for stored in adapter.store([Item(ident(n), memoryview(body(n))) for n in range(5)]))
        assert adapter.store([elsewhere])[0].ok
        assert put(other, 1).ok
        pool.client().put("axb/" + "00" * 32 + "/" + "00" * 32, b"a dot is a dot")
        assert adapter.clear(ident(0)[:32]) == 5
        assert [hit is not None for hit in adapter.lookup([ident(1), elsewhere.identity])] == [False, True]
        assert adapter.clear(None) == 1
        assert get(other, 1) == body(1)
        assert pool.client().is_exist("axb/" + "00" * 32 + "/" + "00" * 32) == 1


def test_a_daemon_over_the_pool(own: MooncakePool) -> None:
    keys = [bytes([i]) * 32 for i in range(20)]
    with running(adapter_at(own)) as daemon, daemon.client() as client:
        for i, key in enumerate(keys):
            assert client.put(key, random.Random(i).randbytes(30_000))
        client.flush()
        daemon.evict_all()
        assert client.prefix(keys).length == 20
        assert client.get_many(keys) == [random.Random(i).randbytes(30_000) for i in range(20)]
        assert client.put(b"k" * 32, b"later" * 1000)
        client.flush()
        assert client.clear() == 21
        assert client.get_many([*keys, b"k" * 32]) == [None] * 21
        assert client.put(keys[3], random.Random(3).randbytes(30_000))
        own.kill()
        assert client.get(keys[3]) == random.Random(3).randbytes(30_000), "RAM serves on"


def test_the_masters_numbers() -> None:
    page = "# HELP x\nmaster_allocated_bytes 5\nmaster_total_capacity_bytes 1.0e2\nmaster_key_count 3\nother 9\n"
    usage = read_metrics(page)
    assert (usage.bytes_used, usage.bytes_limit, usage.entries) == (5, 100, 3)


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ({"master_server_address": "here"}, "field 'master_server_address': not host:port: 'here'"),
        ({"master_server_address": "here:0"}, "field 'master_server_address': not host:port"),
        ({"protocol": "udp"}, "field 'protocol': not one of tcp, rdma"),
        ({"per_op_workers": {"put": 3}}, "field 'per_op_workers': unknown operation 'put'"),
        ({"per_op_workers": {"store": 0}}, "field 'per_op_workers': not a number from 1 to 256: 0"),
        ({"eviction": {"eviction_policy": "LRU"}}, "field 'eviction': this type cannot evict"),
        ({"global_segment_size": -1}, "field 'global_segment_size'"),
    ],
)
def test_what_cannot_be_meant(more: dict[str, Any], line: str) -> None:
    with pytest.raises(AdapterConfigError) as caught:
        registry.build([{"type": "mooncake_store", "master_server_address": "h:1", "local_hostname": "h", **more}])
    assert caught.value.message.startswith(f"adapter mooncake_store (mooncake_store): {line}")


@pytest.mark.real("kvd")
def test_a_system_library_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").touch()
    (tmp_path / "mooncake" / "store.py").write_text(
        "raise ImportError('libibverbs.so.1: cannot open shared object file: No such file or directory')"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    spec = '{"type": "mooncake_store", "master_server_address": "127.0.0.1:1", "local_hostname": "127.0.0.1"}'
    ran = run_cli("kvd", "serve", "--socket", str(tmp_path / "s"), "--max-bytes", "1M", "--l2-adapter", spec)
    assert ran.rc == 2
    assert ran.stderr.splitlines()[-2:] == [
        (
            "kvd: error: adapter mooncake_store (mooncake_store): mooncake does not load: libibverbs.so.1: "
            "cannot open shared object file: No such file or directory"
        ),
        "hint: apt-get install libibverbs1",
    ]
