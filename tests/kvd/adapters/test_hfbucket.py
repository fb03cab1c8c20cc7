"""`hfbucket` through the real huggingface_hub and hf_xet, on a Hub of the tests: away, refusing, full, paged; a daemon over it."""

import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvd.tiers.adapters import registry
from kvd.tiers.adapters.base import Adapter, AdapterConfigError, AdapterError, Item, Loaded, Stored
from tests.kvd.adapters.subjects import HfBucket
from tests.kvd.adapters.test_conformance import body, get, ident, put
from tests.kvd.tiers.ram_tier import running
from tests.support.fake_hub import PAGE, TOKEN, FakeHub

pytestmark = pytest.mark.real("huggingface_hub")
BUCKET = "owner/kv"


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    """One that the test may take away, with a bucket."""
    made = FakeHub()
    made.buckets[BUCKET] = {}
    made.start()
    try:
        yield made
    finally:
        made.remove()


def adapter_at(hub: FakeHub, **more: Any) -> Adapter:
    spec = {"type": "hfbucket", "bucket_handle": f"hf://buckets/{BUCKET}/some/where", "endpoint": hub.url, "token": TOKEN}
    (adapter,) = registry.build([{**spec, **more}])
    return adapter


def test_a_hub_that_is_away_at_the_start_is_used_when_it_comes(hub: FakeHub, caplog: pytest.LogCaptureFixture) -> None:
    hub.kill()
    adapter = adapter_at(hub)
    begun = time.monotonic()
    adapter.open()
    assert "Connection refused; serving without it until it answers" in caplog.text
    for call in (lambda: put(adapter, 1), lambda: get(adapter, 1), lambda: adapter.lookup([ident(1)])):
        with pytest.raises(AdapterError, match=rf"at hf://buckets/{BUCKET}: .*Connection refused"):
            call()
    with pytest.raises(AdapterError):
        adapter.delete([ident(1)])
    assert time.monotonic() - begun < 10, "the library would have tried for minutes"
    hub.start()
    assert put(adapter, 1).ok
    assert get(adapter, 1) == body(1)
    adapter.close()


def test_a_token_that_is_none_is_not_shown(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = adapter_at(hub, token="hf_sesame")
    adapter.open()
    with pytest.raises(AdapterError, match="401") as caught:
        put(adapter, 1)
    assert "sesame" not in caught.value.message
    adapter.close()
    monkeypatch.setenv("KVT_HF", TOKEN)
    for more in ({"token": "env:KVT_HF"}, {"token": None, "token_env": "KVT_HF"}):
        adapter = adapter_at(hub, **more)
        assert put(adapter, 1).ok
        adapter.close()


def test_a_bucket_that_is_not_there_is_made_where_that_was_asked_for(hub: FakeHub) -> None:
    del hub.buckets[BUCKET]
    adapter = adapter_at(hub)
    adapter.open()
    with pytest.raises(AdapterError, match="404"):
        put(adapter, 1)
    adapter.close()
    adapter = adapter_at(hub, create_bucket_if_missing="true")
    adapter.open()
    assert put(adapter, 1).ok
    adapter.close()
    assert [path.count("/") for path in hub.buckets[BUCKET]] == [4]


def test_what_the_hub_refuses_is_refused_alone(hub: FakeHub) -> None:
    adapter = adapter_at(hub)
    adapter.open()
    hub.failing.add(HfBucket.path(ident(2)))
    items = [Item(ident(number), memoryview(body(number))) for number in (1, 2, 3)]
    assert [stored.reason for stored in adapter.store(items)] == ["", "io_error", ""]
    assert adapter.usage().entries == 2
    assert get(adapter, 2) is Loaded.MISS
    hub.failing.clear()
    assert put(adapter, 2).ok
    adapter.close()


def test_a_delete_that_the_hub_refuses_is_an_error(hub: FakeHub) -> None:
    """What somebody else has deleted is none."""
    adapter = adapter_at(hub, max_capacity_gb=1)
    adapter.open()
    for number in (1, 2, 3):
        put(adapter, number)
    hub.failing.add(HfBucket.path(ident(2)))
    with pytest.raises(AdapterError, match="refused by the test"):
        adapter.delete([ident(number) for number in (1, 2, 3)])
    assert get(adapter, 2) == body(2)
    hub.failing.clear()
    adapter.delete([ident(number) for number in (1, 2, 3)])
    assert adapter.usage().entries == 0
    adapter._unlink([ident(2)])  # type: ignore[attr-defined]
    adapter.close()


def test_its_limit_holds_also_after_a_restart(hub: FakeHub) -> None:
    room = 6 * (128 + 5000)
    adapter = adapter_at(hub, max_capacity_gb=(room + 100) / (1 << 30))
    adapter.open()
    for number in range(6):
        assert put(adapter, number).ok
    assert get(adapter, 0) == body(0), "used just now"
    assert put(adapter, 6).ok
    assert [get(adapter, number) == body(number) for number in range(7)] == [True, False, True, True, True, True, True]
    assert put(adapter, 9, bytes(room)) == Stored(False, "too_large")
    before = adapter.usage()
    assert before.bytes_used == room
    adapter.close()
    adapter = adapter_at(hub, max_capacity_gb=(room + 100) / (1 << 30))
    adapter.open()
    assert adapter.usage() == before
    assert put(adapter, 7).ok
    assert adapter.counters.evictions == 1
    assert sum(row["size"] for row in hub.buckets[BUCKET].values()) == adapter.usage().bytes_used == room
    adapter.close()


def test_a_listing_of_several_pages_and_nothing_of_others(hub: FakeHub) -> None:
    adapter = adapter_at(hub)
    numbers = range(PAGE + 20)
    assert all(stored.ok for stored in adapter.store([Item(ident(n), memoryview(body(n, 10))) for n in numbers]))
    hub.api().batch_bucket_files(BUCKET, add=[(b"x" * 200, "some/where/v1/README"), (b"y" * 200, "some/where/v1/00/11")])
    adapter.close()
    adapter = adapter_at(hub)
    adapter.open()
    assert adapter.usage().entries == len(numbers)
    before = len(hub.requests)
    assert len(dict(adapter.enumerate())) == len(numbers)
    tokens = [line for line in hub.requests[before:] if "xet-read-token" in line]
    assert len(tokens) <= 1, "one token for a batch of envelopes"
    assert len(dict(adapter.enumerate())) == len(numbers)
    assert len([line for line in hub.requests[before:] if "xet-read-token" in line]) == len(tokens), "contents are known by now"
    assert adapter.delete_namespace(ident(0)[:32]) == len(numbers)
    assert len(hub.buckets[BUCKET]) == 2
    adapter.close()


def test_a_daemon_over_a_hub_that_hangs_serves_what_is_in_ram(hub: FakeHub) -> None:
    keys = [bytes([i]) * 32 for i in range(6)]
    with running(adapter_at(hub)) as daemon, daemon.client() as client:
        assert all(client.put_many([(key, key * 1000) for key in keys]))
        client.flush()
        daemon.evict_all()
        assert client.get_many(keys) == [key * 1000 for key in keys]
        hub.freeze()
        try:
            assert client.get(keys[0]) == keys[0] * 1000
            assert client.put(b"n" * 32, b"new" * 1000)
            assert client.get(b"n" * 32) == b"new" * 1000
            assert client.get(b"x" * 32) is None
        finally:
            hub.thaw()


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ({"bucket_handle": "s3://b"}, "field 'bucket_handle': not a bucket: 's3://b'"),
        ({"bucket_handle": "hf://buckets/only"}, "field 'bucket_handle': not a bucket"),
        ({"bucket_handle": "hf://buckets/../x"}, "field 'bucket_handle': not a bucket"),
        ({"num_workers": 0}, "field 'num_workers'"),
        ({"metadata_cache": 3}, "unknown field 'metadata_cache'"),
    ],
)
def test_what_cannot_be_meant(more: dict[str, Any], line: str) -> None:
    with pytest.raises(AdapterConfigError) as caught:
        registry.build([{"type": "hfbucket", "bucket_handle": "hf://buckets/a/b", **more}])
    assert caught.value.message.startswith(f"adapter hfbucket (hfbucket): {line}")
