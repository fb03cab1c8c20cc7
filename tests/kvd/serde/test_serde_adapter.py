"""Adapters behind a chain: values of every adapter come back, damage is a counted miss, other chains' values are nobody's,
memory keeps to its budget, and a daemon with one serves what it stored before its restart."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvd import status
from kvd.store.identity import namespace_of
from kvd.store.retention import Retention
from kvd.tiers.adapters import registry
from kvd.tiers.adapters.base import Adapter, AdapterConfigError, AdapterError, Item, Loaded, Want
from kvd.tiers.adapters.mock import MockAdapter
from kvd.tiers.serde.adapter import SerdeAdapter
from kvd.tiers.serde.buffers import Buffers, rounded
from kvd.tiers.serde.chain import Chain
from kvd.tiers.serde.compression import Lz4, Zstd
from tests.kvd.serde.test_stages import KEY, OTHER, sample
from tests.kvd.tiers.ram_tier import RamTier, running

SPACE = namespace_of("model a")
CHAIN = [{"type": "zstd", "shuffle": 2}, {"type": "aesgcm", "key": KEY.hex()}]
SIZES = (0, 1, 4000, 70_001, 300_000)


def ident(number: int, space: bytes = SPACE) -> bytes:
    return space + number.to_bytes(32, "big")


def build(spec: dict[str, Any]) -> Adapter:
    (adapter,) = registry.build([registry.Spec(spec)])
    adapter.open()
    return adapter


@pytest.fixture(params=["fs", "disk", "raw_block", "dax", "mock"])
def spec(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "slots").touch()
    return {
        "fs": {"type": "fs", "base_path": str(tmp_path / "fs"), "max_bytes": "64MiB"},
        "disk": {"type": "disk", "path": str(tmp_path / "disk"), "max_bytes": "64MiB"},
        "raw_block": {
            "type": "raw_block",
            "device_path": str(tmp_path / "slots"),
            "slot_bytes": "512KiB",
            "capacity_bytes": "16MiB",
        },
        "dax": {"type": "dax", "device_path": str(tmp_path / "slots"), "slot_bytes": "512KiB", "max_dax_size_gb": 1 / 64},
        "mock": {"type": "mock", "max_size_gb": 0.1, "mock_bandwidth_gb": 64},
    }[request.param]


@pytest.fixture
def adapter(spec: dict[str, Any]) -> Iterator[Adapter]:
    made = build(spec | {"serde": CHAIN})
    yield made
    made.close(1.0)


def put(adapter: Adapter, number: int, data: bytes, **more: Any) -> bool:
    return adapter.store([Item(ident(number), memoryview(data), Retention.LONG, **more)])[0].ok


def get(adapter: Adapter, number: int, size: int) -> bytes | Loaded:
    into = bytearray(size)
    (result,) = adapter.load([Want(ident(number), memoryview(into))])
    return bytes(into) if result is Loaded.OK else result


def test_values_come_back_with_their_own_lengths(adapter: Adapter, spec: dict[str, Any]) -> None:
    assert all(one.ok for one in adapter.store([Item(ident(n), memoryview(sample(n)), Retention.LONG) for n in SIZES]))
    hits = adapter.lookup([ident(n) for n in SIZES])
    assert [hit and hit.length for hit in hits] == list(SIZES)
    for again in (False, True):  # with what the look-up said, and without
        buffers = [bytearray(n) for n in SIZES]
        wants = [
            Want(ident(n), memoryview(b), None, 0 if again else hit.note)
            for n, b, hit in zip(SIZES, buffers, hits, strict=True)
            if hit
        ]
        assert adapter.load(wants) == [Loaded.OK] * len(SIZES)
        assert [bytes(b) for b in buffers] == [sample(n) for n in SIZES]
    assert sorted((i, hit.length) for i, hit in adapter.enumerate()) == sorted((ident(n), n) for n in SIZES)
    assert get(adapter, 4000, 4001) is Loaded.MISS
    assert adapter.delete([ident(1), ident(2)]) == 1
    assert adapter.delete_namespace(SPACE) == len(SIZES) - 1
    assert list(adapter.enumerate()) == []


@pytest.mark.parametrize("spec", ["fs", "disk", "raw_block", "dax"], indirect=True)
def test_a_restart_keeps_everything(spec: dict[str, Any]) -> None:
    first = build(spec | {"serde": CHAIN})
    for n in SIZES:
        assert put(first, n, sample(n), expires_ns=1 << 62)
    first.close(1.0)
    second = build(spec | {"serde": CHAIN})
    hits = second.lookup([ident(n) for n in SIZES])
    assert [hit and (hit.length, hit.expires_ns) for hit in hits] == [(n, 1 << 62) for n in SIZES]
    assert [get(second, n, n) for n in SIZES] == [sample(n) for n in SIZES]
    second.close(1.0)
    # With another key, and the old one still named; then with the new one alone.
    rotated = [CHAIN[0], {"type": "aesgcm", "key": OTHER.hex(), "old_keys": [KEY.hex()]}]
    third = build(spec | {"serde": rotated})
    assert put(third, 7, sample(500))
    assert get(third, 4000, 4000) == sample(4000)
    third.close(1.0)
    fourth = build(spec | {"serde": [CHAIN[0], {"type": "aesgcm", "key": OTHER.hex()}]})
    assert get(fourth, 7, 500) == sample(500)
    assert get(fourth, 4000, 4000) is Loaded.MISS
    assert fourth.describe()["serde_keys_unknown"] == 1
    assert list(fourth.unreadable) == [ident(4000)]
    assert fourth.counters.load_bytes == fourth.lookup([ident(7)])[0].note, "what could not be read is no byte loaded"  # type: ignore[union-attr]
    assert put(fourth, 4000, sample(4000))
    assert not fourth.unreadable
    assert get(fourth, 4000, 4000) == sample(4000)
    fourth.close(1.0)


@pytest.mark.parametrize("spec", ["fs", "disk", "raw_block"], indirect=True)
def test_without_the_chain_or_with_another_there_is_nothing(spec: dict[str, Any]) -> None:
    one = build(spec | {"serde": CHAIN})
    put(one, 1, sample(5000))
    one.close(1.0)
    for other in (None, {"type": "zstd"}, {"type": "lz4"}):
        adapter = build(spec | ({"serde": other} if other else {}))
        assert adapter.lookup([ident(1)]) == [None]
        for size in range(1, 9000, 250):
            assert get(adapter, 1, size) is Loaded.MISS
        adapter.close(1.0)
    plain = build(spec)
    put(plain, 2, sample(100))
    plain.close(1.0)
    again = build(spec | {"serde": CHAIN})
    assert again.lookup([ident(1), ident(2)])[1] is None
    assert get(again, 1, 5000) == sample(5000)
    assert get(again, 2, 100) is Loaded.MISS
    again.close(1.0)


def test_a_changed_file_is_a_counted_miss_that_can_be_stored_again(tmp_path: Path) -> None:
    """Damage below the envelope's checksum is the inner adapter's to find; a forger who mends that meets the cipher."""
    adapter = build({"type": "fs", "base_path": str(tmp_path / "fs"), "serde": CHAIN})
    assert isinstance(adapter, SerdeAdapter)
    put(adapter, 1, sample(5000))
    put(adapter, 2, sample(6000))
    there = adapter._there
    # Number 2's bytes under number 1's name, with a sound envelope of the inner adapter.
    raw = bytearray(10_000)
    (hit,) = adapter.inner.lookup([there(ident(2))])
    assert hit is not None
    body = memoryview(raw)[: hit.length]
    assert adapter.inner.load([Want(there(ident(2)), body)]) == [Loaded.OK]
    adapter.inner.store([Item(there(ident(1)), body, Retention.LONG, note=hit.note)])
    assert get(adapter, 1, 6000) is Loaded.CORRUPT
    assert adapter.counters.corruptions == 1
    assert adapter.lookup([ident(1)]) == [None]
    assert put(adapter, 1, sample(5000))
    assert get(adapter, 1, 5000) == sample(5000)
    adapter.close(1.0)


def test_a_clear_leaves_nothing_that_was_stored_before_the_chain_or_with_another() -> None:
    """Nobody finds those any more, but they are somebody's prompts all the same."""
    tier, other = MockAdapter("mock", 1 << 20, float(1 << 30)), namespace_of("model b")

    def spaces() -> list[bytes]:
        return sorted(identity[:32] for identity, _ in tier.enumerate())

    lz4 = SerdeAdapter(tier, Chain([Lz4()]))
    for space in (SPACE, other):
        tier.store([Item(ident(1, space), memoryview(b"p" * 4000))])
    lz4.store([Item(ident(2), memoryview(b"l" * 4000))])
    with running(SerdeAdapter(tier, Chain([Zstd()]))) as daemon, daemon.client(namespace=SPACE) as client:
        assert client.put(bytes(32), b"z" * 4000, wait="tier")
        assert len(spaces()) == 4
        client.clear()
        assert spaces() == sorted([other, lz4._space(SPACE)]), "whose those of another chain are, it cannot know"
        client.clear(all_namespaces=True)
        assert not spaces()


def test_a_bad_chain_ends_the_start(tmp_path: Path) -> None:
    base = {"type": "fs", "base_path": str(tmp_path / "fs")}
    with pytest.raises(AdapterConfigError, match="unknown type 'gzip'"):
        build(base | {"serde": {"type": "gzip"}})
    with pytest.raises(AdapterConfigError, match="serde_buffer_bytes without serde"):
        build(base | {"serde_buffer_bytes": "1GiB"})
    assert not (tmp_path / "fs").exists()


def test_an_adapter_that_keeps_no_notes_is_told_apart_at_the_first_value() -> None:
    adapter = SerdeAdapter(RamTier(), Chain([Zstd()]))
    for _ in range(2):
        with pytest.raises(AdapterError, match="does not keep the note"):
            put(adapter, 1, sample(100))


def test_secrets_do_not_show() -> None:
    shown = str(registry.Spec({"type": "fs", "serde": [{"type": "aesgcm", "key": KEY.hex(), "old_keys": [OTHER.hex(), "env:A"]}]}))
    assert KEY.hex() not in shown
    assert OTHER.hex() not in shown
    assert '["***", "env:A"]' in shown


# ---- memory ------------------------------------------------------------------------------------------------------------


def test_buffers_keep_to_their_budget_whoever_asks() -> None:
    buffers = Buffers(1 << 20)
    most, lock = 0, threading.Lock()

    def work(seed: int) -> None:
        nonlocal most
        for n in range(60):
            with buffers.lend([(seed * 7919 + n * 104729) % 500_000, 4096]) as lent:
                with lock:
                    most = max(most, buffers.held)
                lent[0][:1] = b"x" if len(lent[0]) else b""

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert buffers.held == 0
    assert 500_000 < most <= buffers.peak <= 1 << 20
    assert buffers._idle_bytes <= 1 << 20
    with buffers.lend([3 << 20]) as lent:  # larger than all: alone
        assert len(lent[0]) == 3 << 20
    assert buffers._idle_bytes <= 1 << 20


def test_rounding_wastes_an_eighth_at_most() -> None:
    for length in (0, 1, 4096, 4097, 70_000, 1 << 20, (1 << 20) + 1, 99_999_999):
        assert length <= rounded(length) <= max(4096, length * 9 / 8 + 4096)
        assert rounded(length) % 4096 == 0


def test_many_values_at_once_pass_a_small_budget(tmp_path: Path) -> None:
    adapter = build({"type": "mock", "max_size_gb": 0.1, "mock_bandwidth_gb": 64, "serde": CHAIN, "serde_buffer_bytes": "1MiB"})
    assert isinstance(adapter, SerdeAdapter)
    failures: list[int] = []

    def work(base: int) -> None:
        items = [Item(ident(base + n), memoryview(sample(40_000 + n)), Retention.LONG) for n in range(20)]
        if not all(one.ok for one in adapter.store(items)):
            failures.append(base)
        buffers = [bytearray(40_000 + n) for n in range(20)]
        results = adapter.load([Want(ident(base + n), memoryview(buffer)) for n, buffer in enumerate(buffers)])
        if results != [Loaded.OK] * 20 or [bytes(b) for b in buffers] != [sample(40_000 + n) for n in range(20)]:
            failures.append(base)

    threads = [threading.Thread(target=work, args=(1000 * n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert adapter.store_buffers.held == adapter.load_buffers.held == 0


def test_what_cannot_be_decrypted_is_told_and_stored_anew(tmp_path: Path) -> None:
    """After one failed load it is no hit any more, or an engine would wait for it in vain for ever; with its key it is back."""
    old = {"type": "fs", "base_path": str(tmp_path / "fs"), "serde": {"type": "aesgcm", "key": KEY.hex()}}
    new = old | {"serde": {"type": "aesgcm", "key": OTHER.hex()}}
    keys = [bytes([i]) * 32 for i in range(3)]

    with running(*registry.build([registry.Spec(old)])) as before, before.client() as client:
        assert all(client.put_many([(key, key * 100) for key in keys]))
        client.flush()
    with running(*registry.build([registry.Spec(new)])) as other, other.client() as client:
        assert client.prefix(keys).length == 3, "nobody has tried to read them"
        assert client.get_many(keys) == [None] * 3
        assert client.prefix(keys).length == 0
        assert "old_keys" in client.why(keys[:1]).notes[0][0][0].why
        tier = client.stats()["tiers"][0]
        assert tier["keys_unknown_total"] == 3
        assert [check.code for check in status.checks(client.stats() | {"heartbeat_age_s": 0})] == ["TIER_KEY_UNKNOWN"]
        assert client.put(keys[0], b"anew")
        assert client.delete(keys[1:2]) == 0, "nobody could have read it"
        client.flush()
        other.evict_all()
        assert client.get(keys[0]) == b"anew"
    both = old | {"serde": {"type": "aesgcm", "key": KEY.hex(), "old_keys": [OTHER.hex()]}}
    with running(*registry.build([registry.Spec(both)])) as after, after.client() as client:
        assert client.get_many(keys) == [b"anew", None, keys[2] * 100]
