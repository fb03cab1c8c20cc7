"""`lmcache` on a real `lmcache_server`: away, killed, frozen, strange answers, large and many values; a daemon over it."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvd.tiers.adapters import registry
from kvd.tiers.adapters.base import Adapter, AdapterConfigError, AdapterError, Item, Loaded, Stored, Want
from kvd.tiers.adapters.lmcache import KEY_BYTES
from tests.kvd.adapters.test_conformance import body, get, ident, put
from tests.kvd.tiers.ram_tier import running
from tests.support.processes import wait_until
from tests.support.servers import LmcacheServer, Server, free_port


def adapter_at(port: int, **more: Any) -> Adapter:
    (adapter,) = registry.build([{"type": "lmcache", "remote_url": f"lm://127.0.0.1:{port}", "timeout": "2s", **more}])
    return adapter


@pytest.fixture
def server(servers: dict[str, Server]) -> LmcacheServer:
    """Everybody's."""
    made = servers["lmcache"].wait()
    assert isinstance(made, LmcacheServer)
    return made


@pytest.fixture
def own() -> Iterator[LmcacheServer]:
    """A server that the test may kill."""
    made = LmcacheServer()
    try:
        made.start().wait()
        yield made
    finally:
        made.remove()


@pytest.mark.real("lmcache")
def test_what_lmcaches_own_table_of_keys_makes_of_ours(server: LmcacheServer) -> None:
    """The server parses and compares keys: two that differ in one bit of namespace or key are two."""
    adapter = adapter_at(server.port, prefix="parsed-keys")
    adapter.open()
    spaces = [bytes(32), bytes(31) + b"\1", b"\x80" + bytes(31), b"\xff" * 32]
    identities = [space + key for space in spaces for key in spaces]
    assert all(len(adapter._key(identity, 0)) == KEY_BYTES for identity in identities)  # type: ignore[attr-defined]
    assert all(stored.ok for stored in adapter.store([Item(one, memoryview(one)) for one in identities]))
    buffers = [bytearray(64) for _ in identities]
    wants = [Want(one, memoryview(buffer)) for one, buffer in zip(identities, buffers, strict=True)]
    assert adapter.load(wants) == [Loaded.OK] * 16
    assert [bytes(buffer) for buffer in buffers] == identities
    adapter.close()


@pytest.mark.real("lmcache")
def test_large_and_many_values(server: LmcacheServer) -> None:
    adapter = adapter_at(server.port, prefix="many")
    adapter.open()
    big = body(1, 40 << 20)
    assert put(adapter, 1, big).ok
    assert get(adapter, 1, 40 << 20) == big
    assert get(adapter, 1, 5000) is Loaded.MISS
    numbers = range(1000, 1300)
    assert all(stored.ok for stored in adapter.store([Item(ident(n), memoryview(body(n, 100))) for n in numbers]))
    assert all(adapter.lookup([ident(n) for n in numbers]))
    assert adapter.delete([ident(1), *(ident(n) for n in numbers)]) == 301
    assert server.ask(2, f"many@1@0@{ident(1).hex()}@uint8") == b"", "what was deleted takes no memory there"
    adapter.close()


@pytest.mark.real("lmcache")
def test_an_answer_in_two_parts_does_not_wait_for_an_acknowledgement(server: LmcacheServer) -> None:
    """The server writes a frame and then the bytes; the kernel acknowledges the first part when it likes: 40 ms, a look-up."""
    adapter = adapter_at(server.port, prefix="parts")
    adapter.open()
    put(adapter, 1)
    times = []
    for _ in range(40):
        begun = time.monotonic()
        assert adapter.lookup([ident(1)])[0] is not None
        times.append(time.monotonic() - begun)
    adapter.close()
    assert sorted(times)[len(times) // 2] < 0.03


@pytest.mark.real("lmcache")
def test_an_envelope_that_was_damaged_hides_its_value_until_it_is_stored_again(server: LmcacheServer) -> None:
    adapter = adapter_at(server.port, prefix="envelopes")
    adapter.open()
    for number, damage in enumerate((b"x", b"y" * 128, b"z" * 100_000)):
        put(adapter, number)
        server.ask(1, f"envelopes@1@1@{ident(number).hex()}@uint8", damage)
        assert adapter.lookup([ident(number), ident(99)]) == [None, None]
        assert adapter.counters.corruptions == number + 1
        assert put(adapter, number).ok
        assert adapter.lookup([ident(number)])[0] is not None
        assert get(adapter, number) == body(number)
    adapter.close()


@pytest.mark.real("lmcache")
def test_a_server_that_hangs_fails_within_the_timeout_and_writes_nothing_late(server: LmcacheServer) -> None:
    adapter = adapter_at(server.port, prefix="hangs", timeout="300ms")
    adapter.open()
    assert put(adapter, 1).ok
    into = bytearray(b"\x5a" * 5000)
    server.freeze()
    try:
        begun = time.monotonic()
        with pytest.raises(AdapterError, match=r"cannot load at 127.0.0.1:\d+: timed out"):
            adapter.load([Want(ident(1), memoryview(into))])
        assert time.monotonic() - begun < 10
    finally:
        server.thaw()
    wait_until(server.answers, what="the server to go on")
    assert get(adapter, 1) == body(1)
    assert bytes(into) == b"\x5a" * 5000
    adapter.close()


@pytest.mark.slow  # each start of the server imports torch
@pytest.mark.real("lmcache")
def test_a_server_that_dies_and_comes_back_empty(own: LmcacheServer) -> None:
    adapter = adapter_at(own.port)
    adapter.open()
    assert put(adapter, 1).ok
    own.kill()
    for call in (lambda: put(adapter, 1), lambda: get(adapter, 1), lambda: adapter.lookup([ident(1)])):
        with pytest.raises(AdapterError, match="Connection refused"):
            call()
    own.start().wait()
    assert get(adapter, 1) is Loaded.MISS
    assert put(adapter, 1).ok
    assert get(adapter, 1) == body(1)
    adapter.close()


@pytest.mark.real("lmcache")
def test_a_daemon_over_the_server(server: LmcacheServer) -> None:
    keys = [bytes([i]) * 32 for i in range(20)]
    with running(adapter_at(server.port, prefix="daemon")) as daemon, daemon.client() as client:
        for i, key in enumerate(keys):
            assert client.put(key, bytes([i]) * 30_000)
        client.flush()
        daemon.evict_all()
        assert client.prefix(keys).length == 20
        assert client.get_many(keys) == [bytes([i]) * 30_000 for i in range(20)]


def test_no_server_at_the_start_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    adapter = adapter_at(free_port())
    adapter.open()
    assert "cannot connect at 127.0.0.1" in caplog.text
    assert "serving without it until it answers" in caplog.text
    with pytest.raises(AdapterError):
        put(adapter, 1)
    adapter.close()


@pytest.mark.parametrize(
    ("answer", "why"),
    [(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 3, "none of LMCache's"), (b"", "closed the connection"), (b"\xc8\0\0\0", "closed")],
)
def test_somebody_else_at_that_port(answer: bytes, why: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            link, _ = listener.accept()
            with link, contextlib.suppress(OSError):  # who asked may be gone at any of these calls
                link.recv(65536)
                link.sendall(answer)
                link.shutdown(socket.SHUT_WR)
                link.recv(65536)

        thread = threading.Thread(target=serve)
        thread.start()
        adapter = adapter_at(listener.getsockname()[1])
        with pytest.raises(AdapterError, match=why):
            adapter.lookup([ident(1)])
        adapter.close()
        thread.join()


def test_values_above_the_limit_are_not_sent() -> None:
    assert put(adapter_at(free_port(), max_value_bytes=1000), 1, bytes(1001)) == Stored(False, "too_large")


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ({"remote_url": "redis://h:1"}, "field 'remote_url': not lm://HOST:PORT: 'redis://h:1'"),
        ({"remote_url": "lm://h"}, "field 'remote_url': not lm://HOST:PORT"),
        ({"prefix": "a@b"}, "field 'prefix': not a prefix"),
        ({"prefix": "a" * 12}, "field 'prefix': not a prefix"),
        ({"eviction": {"eviction_policy": "LRU"}}, "field 'eviction': this type cannot evict"),
    ],
)
def test_what_cannot_be_meant(more: dict[str, Any], line: str) -> None:
    with pytest.raises(AdapterConfigError) as caught:
        registry.build([{"type": "lmcache", "remote_url": "lm://h:1", **more}])
    assert caught.value.message.startswith(f"adapter lmcache (lmcache): {line}")
