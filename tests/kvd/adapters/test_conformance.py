"""What holds for every adapter: values come back exactly or not at all, damage is a counted miss that can be stored again,
and what is held is counted and can be evicted, also after a restart."""

import contextlib
import random
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvd.store.identity import Identity
from kvd.store.retention import Retention
from kvd.tiers.adapters import envelope, registry
from kvd.tiers.adapters.base import Adapter, AdapterError, Item, Loaded, Stored, Want
from kvd.tiers.adapters.kind import Eviction
from tests.kvd.adapters.subjects import SUBJECTS, Subject
from tests.support.servers import Server

SIZES = (0, 1, 127, 4095, 4096, 4097, 70_001)


def ident(number: int, space: int = 1) -> Identity:
    return space.to_bytes(32, "big") + random.Random(number).randbytes(32)


def body(number: int, size: int = 5000) -> bytes:
    return random.Random(number * 7919 + size).randbytes(size)


def put(adapter: Adapter, number: int, data: bytes | None = None, **more: int) -> Stored:
    value = body(number) if data is None else data
    item = Item(ident(number), memoryview(value).toreadonly(), Retention(more.get("retention", 3)), more.get("expires_ns", 0))
    return adapter.store([item])[0]


def get(adapter: Adapter, number: int, size: int = 5000) -> bytes | Loaded:
    """The value, or what became of the load."""
    into = bytearray(size)
    (result,) = adapter.load([Want(ident(number), memoryview(into))])
    return bytes(into) if result is Loaded.OK else result


@pytest.fixture
def subject(request: pytest.FixtureRequest, tmp_path: Path, servers: dict[str, Server]) -> Iterator[Subject]:
    kind = SUBJECTS[request.param]
    made = kind(tmp_path, servers[kind.needs].wait() if kind.needs else None)
    try:
        yield made
    finally:
        made.stop()


def over(names: Iterable[str]) -> pytest.MarkDecorator:
    """The test runs over these; those on a server count as tests of a real part."""
    parts = {name: SUBJECTS[name].part or SUBJECTS[name].needs for name in names}
    rows = [pytest.param(name, marks=[pytest.mark.real(part)] if part else []) for name, part in parts.items()]
    return pytest.mark.parametrize("subject", rows, indirect=True)


everybody = over(SUBJECTS)
damageable = over(name for name, kind in SUBJECTS.items() if kind.damageable)
looking = over(name for name, kind in SUBJECTS.items() if kind.damageable and not kind.indexed and name != "disk")
"""Those whose look-ups see the medium; the others know by heart what is there, and a load finds damage."""
shared = over(name for name, kind in SUBJECTS.items() if kind.shared)
indexed = over(name for name, kind in SUBJECTS.items() if kind.capped and kind.scan_resistant)
capped = over(name for name, kind in SUBJECTS.items() if kind.capped)


@everybody
def test_values_of_every_size_come_back(subject: Subject) -> None:
    with subject.opened() as adapter:
        items = [Item(ident(size), memoryview(body(1, size)), Retention.LONG) for size in SIZES]
        assert all(stored.ok for stored in adapter.store(items))
        hits = adapter.lookup([ident(size) for size in SIZES])
        assert [hit.length for hit in hits if hit is not None] == list(SIZES)
        buffers = [bytearray(size) for size in SIZES]
        wants = [Want(ident(size), memoryview(buffer)) for size, buffer in zip(SIZES, buffers, strict=True)]
        assert adapter.load(wants) == [Loaded.OK] * len(SIZES)
        assert [bytes(buffer) for buffer in buffers] == [body(1, size) for size in SIZES]
        assert adapter.counters.hits == len(SIZES)
        assert adapter.counters.load_bytes == sum(SIZES)
        assert adapter.counters.stores == len(SIZES)


@everybody
def test_results_are_per_item_and_in_order(subject: Subject) -> None:
    with subject.opened() as adapter:
        put(adapter, 1)
        put(adapter, 3)
        assert [hit is not None for hit in adapter.lookup([ident(1), ident(2), ident(3)])] == [True, False, True]
        buffers = [bytearray(5000) for _ in range(3)]
        results = adapter.load([Want(ident(n), memoryview(b)) for n, b in zip((1, 2, 3), buffers, strict=True)])
        assert results == [Loaded.OK, Loaded.MISS, Loaded.OK]
        assert (bytes(buffers[0]), bytes(buffers[2])) == (body(1), body(3))
        assert adapter.counters.misses == 1
        assert adapter.lookup([]) == []
        assert adapter.load([]) == []
        assert adapter.store([]) == []


@everybody
def test_the_last_value_stored_under_a_key_is_the_one(subject: Subject) -> None:
    with subject.opened() as adapter:
        put(adapter, 1, b"old" * 100)
        put(adapter, 1, b"new!" * 100)
        assert get(adapter, 1, 400) == b"new!" * 100
        assert get(adapter, 1, 300) is Loaded.MISS
        assert adapter.usage().entries in (0, 1)
    if subject.make().capabilities.durable:
        with subject.opened() as adapter:
            assert get(adapter, 1, 400) == b"new!" * 100


@everybody
def test_a_buffer_of_another_size_is_a_miss(subject: Subject) -> None:
    with subject.opened() as adapter:
        put(adapter, 1)
        for size in (0, 1, 4999, 5001, 20000):
            assert get(adapter, 1, size) is Loaded.MISS
        assert get(adapter, 1) == body(1)


@everybody
def test_keys_of_other_namespaces_are_other_values(subject: Subject) -> None:
    with subject.opened() as adapter:
        key = b"\xff" * 32
        spaces = [b"\0" * 32, b"\xff" * 32, b"/" * 32, b"\n.." + b"%" * 29]
        adapter.store([Item(space + key, memoryview(body(i)), Retention.LONG) for i, space in enumerate(spaces)])
        for i, space in enumerate(spaces):
            into = bytearray(5000)
            assert adapter.load([Want(space + key, memoryview(into))]) == [Loaded.OK]
            assert into == body(i)
        if adapter.capabilities.enumerate:
            assert {identity for identity, _ in adapter.enumerate()} == {space + key for space in spaces}
            assert adapter.delete_namespace(spaces[0]) == 1
            assert [hit is not None for hit in adapter.lookup([space + key for space in spaces])] == [False, True, True, True]


@everybody
def test_what_has_expired_or_is_damaged_is_found_to_be_deleted(subject: Subject) -> None:
    """`kvd clear` forgets everything, and a clock that is set back brings nothing back."""
    with subject.opened() as adapter:
        if not adapter.capabilities.enumerate:
            return
        clock = getattr(adapter, "_clock_ns", None)
        if clock is not None:
            adapter.store([Item(ident(1), memoryview(body(1)), Retention.LONG, expires_ns=time.time_ns() + 3600 * 10**9)])
            adapter._clock_ns = lambda: time.time_ns() + 7200 * 10**9  # type: ignore[attr-defined]
        put(adapter, 2)
        if adapter.capabilities.durable:
            raw = subject.raw(ident(2))
            subject.set_raw(ident(2), raw[:16] + bytes([raw[16] ^ 1]) + raw[17:])
        found = set(adapter.identities(None))
        assert found == {ident(2)} | ({ident(1)} if clock is not None else set())
        assert found == set(adapter.identities(ident(1)[:32]))
        assert list(adapter.identities(b"another" * 4 + b"name")) == []
        adapter.delete_namespace(ident(1)[:32])
        assert list(adapter.identities(None)) == []
        if clock is not None:
            adapter._clock_ns = clock  # type: ignore[attr-defined]
            assert adapter.lookup([ident(1)]) == [None]


@everybody
def test_deleted_is_gone_also_after_a_restart(subject: Subject) -> None:
    with subject.opened() as adapter:
        for number in range(4):
            put(adapter, number)
        assert adapter.delete([ident(0), ident(2), ident(99)]) == 2
        assert [hit is not None for hit in adapter.lookup([ident(n) for n in range(4)])] == [False, True, False, True]
        assert get(adapter, 0) is Loaded.MISS
    with subject.opened() as adapter:
        assert get(adapter, 0) is Loaded.MISS
        assert get(adapter, 1) == (body(1) if adapter.capabilities.durable else Loaded.MISS)


@everybody
def test_what_has_expired_is_a_miss(subject: Subject) -> None:
    with subject.opened() as adapter:
        soon = time.time_ns() + 300_000_000
        assert put(adapter, 1, expires_ns=soon).ok
        assert put(adapter, 2, expires_ns=time.time_ns() + 3600 * 10**9).ok
        hit = adapter.lookup([ident(1)])[0]
        assert hit is None or hit.expires_ns == soon
        assert not put(adapter, 3, expires_ns=time.time_ns() - 1).ok
        time.sleep(max(0, soon - time.time_ns()) / 1e9 + 0.02)
        assert adapter.lookup([ident(1), ident(3)]) == [None, None]
        assert get(adapter, 1) is Loaded.MISS
        assert get(adapter, 2) == body(2)


@everybody
def test_class_and_expiry_are_kept(subject: Subject) -> None:
    late = time.time_ns() + 3600 * 10**9
    with subject.opened() as adapter:
        put(adapter, 1, retention=2, expires_ns=late)
        put(adapter, 2, retention=3)
        hits = adapter.lookup([ident(1), ident(2)])
        assert [(hit.retention, hit.expires_ns) for hit in hits if hit] == [(Retention.SHORT, late), (Retention.LONG, 0)]
        if adapter.capabilities.enumerate:
            assert dict(adapter.enumerate())[ident(1)] == hits[0]


@indexed
def test_a_scan_does_not_drive_out_what_is_read_again_and_again(subject: Subject) -> None:
    """S3FIFO in an `eviction` object is the arena's policy of that name."""
    limit = 1 << 20
    with subject.opened(max_bytes=limit, eviction=Eviction("S3FIFO")) as adapter:
        for number in range(4):
            assert put(adapter, number).ok
        for turn in range(3):
            assert [get(adapter, number) == body(number) for number in range(4)] == [True] * 4, turn
            for number in range(100, 300):
                assert put(adapter, 1000 * turn + number).ok
                assert adapter.usage().bytes_used <= limit
        assert adapter.counters.evictions > 100


@capped
def test_it_stays_within_its_limit_and_says_what_it_holds(subject: Subject, caplog: pytest.LogCaptureFixture) -> None:
    limit = 1 << 20
    with subject.opened(max_bytes=limit) as adapter:
        for number in range(260):
            assert put(adapter, number).ok
            assert adapter.usage().bytes_used <= limit
        held = [n for n in range(260) if get(adapter, n) == body(n)]
        assert 259 in held
        assert 80 < len(held) < 260
        assert adapter.counters.evictions == 260 - len(held)
        usage = adapter.usage()
        assert usage.entries == len(held)
        assert limit - 16384 < usage.bytes_limit <= limit
        assert put(adapter, 1000, bytes(limit + 1)) == Stored(False, "too_large")
        assert f"a value of {limit + 1} bytes is not stored" in caplog.text, "a tier that takes none must not look as if it did"
        before = adapter.usage()
    if not adapter.capabilities.durable:
        return
    with subject.opened(max_bytes=limit) as adapter:
        assert adapter.usage() == before
        for number in range(300, 360):
            assert put(adapter, number).ok
        assert adapter.usage().bytes_used <= limit
        assert adapter.counters.evictions > 50


@capped
def test_noop_refuses_what_does_not_fit(subject: Subject) -> None:
    with subject.opened(max_bytes=256 << 10, eviction=Eviction("noop")) as adapter:
        results = [put(adapter, number) for number in range(80)]
        kept = [number for number, stored in enumerate(results) if stored.ok]
        assert 10 < len(kept) < 80
        assert {stored.reason for stored in results if not stored.ok} == {"full"}
        assert all(get(adapter, number) == body(number) for number in kept)
        adapter.delete([ident(kept[0])])
        assert put(adapter, 500).ok


@capped
def test_a_watermark_drops_a_share(subject: Subject) -> None:
    with subject.opened(max_bytes=1 << 20, eviction=Eviction("LRU", 0.5, 0.5)) as adapter:
        peak = 0
        for number in range(130):
            assert put(adapter, number).ok
            peak = max(peak, adapter.usage().bytes_used)
        assert peak <= (1 << 19) + 16384
        assert adapter.usage().bytes_used < peak


def _damaged(subject: Subject, how: str) -> bytes:
    """The first value's object with this done to it."""
    whole = subject.raw(ident(1))
    flipped = bytearray(whole)
    flipped[envelope.SIZE + 2500] ^= 0x10
    head = bytearray(whole)
    head[80] ^= 1
    return {
        "empty": b"",
        "truncated": whole[:-1],
        "header": whole[: envelope.SIZE],
        "longer": whole + b"\0",
        "flipped": bytes(flipped),
        "head flipped": bytes(head),
        "foreign": subject.raw(ident(2)),
        "noise": random.Random(5).randbytes(len(whole)),
    }[how]


@damageable
@pytest.mark.parametrize(
    "where", ["missing", "empty", "truncated", "header", "longer", "flipped", "head flipped", "foreign", "noise"]
)
def test_a_damaged_object_is_a_miss_that_can_be_stored_again(subject: Subject, where: str) -> None:
    with subject.opened() as adapter:
        put(adapter, 1)
        put(adapter, 2)
        if where == "missing":
            subject.remove(ident(1))
        else:
            subject.set_raw(ident(1), _damaged(subject, where))
        result = get(adapter, 1)
        if where == "longer" and subject.slack:
            assert result == body(1)
            return
        assert result in (Loaded.MISS, Loaded.CORRUPT)
        assert adapter.counters.corruptions == (result is Loaded.CORRUPT)
        assert adapter.counters.misses == (result is Loaded.MISS)
        is_missing = where == "missing" and not subject.indexed
        assert (result is Loaded.MISS) == (is_missing or (where == "empty" and subject.empty_is_missing))
        assert get(adapter, 1) is Loaded.MISS, "what is damaged is taken away"
        assert put(adapter, 1).ok
        assert get(adapter, 1) == body(1)
        assert get(adapter, 2) == body(2)


@damageable
@pytest.mark.parametrize("where", ["empty", "truncated", "header", "longer", "head flipped", "foreign", "noise"])
def test_damage_that_a_look_up_sees_is_counted_and_taken_away(
    subject: Subject, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A daemon loads only what a look-up has found: what that passes over in silence would lie there for ever."""
    with subject.opened() as adapter:
        put(adapter, 1)
        put(adapter, 2)
        subject.set_raw(ident(1), _damaged(subject, where))
        hits = adapter.lookup([ident(1), ident(2), ident(3)])
        assert [hit is not None for hit in hits[1:]] == [True, False]
        if hits[0] is not None or (where == "empty" and subject.empty_is_missing):
            assert adapter.counters.corruptions == 0, "it is for the load to find"
            return
        assert adapter.counters.corruptions == 1
        assert "1 found by a look-up" in caplog.text
        assert adapter.lookup([ident(1)]) == [None]
        assert adapter.counters.corruptions == 1, "it is gone"
        assert put(adapter, 1).ok
        assert get(adapter, 1) == body(1)


@damageable
def test_damage_while_it_was_away(subject: Subject) -> None:
    with subject.opened() as adapter:
        for number in range(4):
            put(adapter, number)
    if not adapter.capabilities.durable:
        return
    subject.set_raw(ident(0), subject.raw(ident(0))[:1000])
    subject.set_raw(ident(1), subject.raw(ident(3)))
    with subject.opened() as adapter:
        assert get(adapter, 0) in (Loaded.MISS, Loaded.CORRUPT)
        assert get(adapter, 1) in (Loaded.MISS, Loaded.CORRUPT)
        assert get(adapter, 2) == body(2)
        assert put(adapter, 0).ok
        assert get(adapter, 0) == body(0)


@shared
def test_two_daemons_on_one_medium(subject: Subject) -> None:
    with subject.opened() as one, subject.opened() as two:
        put(one, 1)
        assert get(two, 1) == body(1)
        put(two, 1, b"second" * 10)
        assert get(one, 1, 60) == b"second" * 10
        assert one.delete([ident(1)]) == 1
        assert get(two, 1, 60) is Loaded.MISS
        put(two, 2)
        assert one.lookup([ident(2)])[0] is not None


@everybody
def test_loads_and_stores_at_once_never_mix(subject: Subject) -> None:
    """Sixteen threads store, load and delete four keys: what a load gives is one of the values stored, whole."""
    from concurrent.futures import ThreadPoolExecutor

    with subject.opened() as adapter:

        def work(seed: int) -> int:
            dice = random.Random(seed)
            seen = 0
            for _ in range(25):
                number = dice.randrange(4)
                step = dice.randrange(3)
                if step == 0:
                    put(adapter, number, bytes([dice.randrange(256)]) * 5000)
                elif step == 1:
                    value = get(adapter, number)
                    assert isinstance(value, Loaded) or len(set(value)) == 1
                    assert value is not Loaded.CORRUPT
                    seen += isinstance(value, bytes)
                elif not dice.randrange(4):
                    adapter.delete([ident(number)])
            return seen

        with ThreadPoolExecutor(16) as threads:
            assert sum(threads.map(work, range(16))) > 0


@pytest.mark.parametrize(
    "spec",
    [
        {"type": "resp", "host": "127.0.0.1"},
        {"type": "s3", "bucket": "kv-cache", "aws_access_key_id": "a", "aws_secret_access_key": "b"},
        {"type": "lmcache"},
        {"type": "hfbucket", "bucket_handle": "hf://buckets/a/b"},
        {"type": "mooncake_store", "local_hostname": "127.0.0.1"},
    ],
    ids=lambda spec: spec["type"],
)
def test_a_server_that_accepts_and_says_nothing_holds_up_nobody_who_asks_for_usage(spec: dict[str, Any]) -> None:
    """Usage is asked for on the event loop: while another thread connects, or waits for an answer, it is there at once."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        where = {"resp": {"port": port}, "s3": {"s3_endpoint": url}, "lmcache": {"remote_url": f"lm://127.0.0.1:{port}"}}
        where |= {"hfbucket": {"endpoint": url}, "mooncake_store": {"master_server_address": f"127.0.0.1:{port}"}}
        (adapter,) = registry.build([{**spec, **where[spec["type"]], "timeout": "1s"}])
        begun = threading.Event()

        def ask() -> None:
            begun.set()
            with contextlib.suppress(AdapterError):
                adapter.lookup([ident(1)])

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        begun.wait()
        slowest, asked = 0.0, 0
        until = time.monotonic() + 3.0
        while thread.is_alive() and time.monotonic() < until:
            start = time.monotonic()
            adapter.usage()
            slowest = max(slowest, time.monotonic() - start)
            asked += 1
            time.sleep(0.01)
        assert asked > 5, "it was not waiting at all"
        assert slowest < 0.4
    thread.join(15.0 if spec["type"] == "mooncake_store" else 1.0)  # that one has a child process
