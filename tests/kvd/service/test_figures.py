"""Figures by namespace, by class, by operation and by reason: each adds up to the daemon's own, and their number is bounded."""

import hashlib
import math
from bisect import bisect_left
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.service.histogram import OPERATION_BOUNDS_S, Histogram
from kvd.status import quantile
from kvd.store.accounts import LIMIT
from kvd.store.identity import namespace_of
from kvd.store.index import Index
from kvd.store.retention import NEVER
from tests.support.daemon import Daemon, MakeDaemon
from tests.support.processes import wait_until

pytestmark = pytest.mark.real("kvd")

BY_NAMESPACE = {
    "entries": "entries",
    "hits_total": "hits_total",
    "misses_total": "misses_total",
    "get_bytes_total": "get_bytes_total",
    "sets_total": "sets_total",
    "set_bytes_total": "set_bytes_total",
    "evictions_total": "evictions_total",
}


def key(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


def shown(daemon: Daemon) -> dict[str, Any]:
    return daemon.run("stats", "--json").json()


def test_namespaces_and_classes_add_up(kvd_daemon: MakeDaemon) -> None:
    daemon = kvd_daemon(max_bytes="4MiB")
    label = namespace_of("a").hex()[:12]
    with daemon.client() as client:
        for name, count in (("a", 60), ("b", 40)):
            items = [(key(i), bytes(40_000)) for i in range(count)]
            client.put_many(items, namespace=name, retention="short" if name == "a" else "ephemeral")
            client.get_many([k for k, _ in items], namespace=name)
        client.get(key(1), namespace="never seen")
        wait_until(lambda: label in shown(daemon)["namespace_sets_total"], what="the namespaces to be shown")
        told = client.stats()
    assert told["namespace_sets_total"][label] == told["sets_by_retention_total"]["short"] == 60
    assert told["evictions_total"] > 0
    for name, whole in BY_NAMESPACE.items():
        assert sum(told[f"namespace_{name}"].values()) == told[whole], name
    for name, whole in (("entries_by_retention", "entries"), ("evictions_by_retention_total", "evictions_total")):
        assert sum(told[name].values()) == told[whole], name
    assert sum(told["bytes_by_retention"].values()) == sum(told["namespace_bytes"].values()) == told["entries"] * 40_000
    # The segment, which has the rows of other namespaces only from the next reshaping on, says the same.
    segment = shown(daemon)
    assert segment["namespace_sets_total"] == told["namespace_sets_total"]


def test_operations_are_timed_and_refusals_have_their_reason(kvd_daemon: MakeDaemon) -> None:
    daemon = kvd_daemon(max_bytes="1MiB", tier="32MiB")
    with daemon.client() as client:
        client.put(key(1), bytes(100_000), wait="tier")
        client.delete([key(1)], arena_only=True)
        assert client.get(key(1)) == bytes(100_000)  # waits for the tier
        client.put(key(2), b"v", retention="none")
        client.put(key(3), b"v", ttl_s=0)
        with client.write([4096]) as lease:
            lease.views[0][:1] = b"x"
            assert client.exists([key(1)]) == [True]
        client.flush()
        told = client.stats()
    counts = told["operation_seconds_count"]
    assert {op for op, count in counts.items() if count} >= {"lease", "reserve", "put_inline", "exists", "delete", "flush"}
    for op, buckets in told["operation_seconds_bucket"].items():
        assert list(buckets.values()) == sorted(buckets.values())
        assert buckets["+Inf"] == counts[op]
    assert {reason: count for reason, count in told["rejections_total"].items() if count} == {"retention_none": 1, "expired": 1}
    daemon.run("drain")
    with daemon.client() as client:
        assert client.put(key(4), b"v").reason == "draining"
        told = client.stats()
    assert told["rejections_total"]["draining"] == told["failures_total"]["draining"] == 1


def test_the_number_of_namespaces_shown_is_bounded(kvd_daemon: MakeDaemon) -> None:
    daemon = kvd_daemon(max_bytes="4MiB")
    with daemon.client() as client:
        for n in range(3 * LIMIT):
            client.put(key(1), b"v", namespace=f"tenant {n}")
        wait_until(lambda: len(shown(daemon)["namespace_sets_total"]) == LIMIT + 1, what="the namespaces to be shown")
        told = client.stats()
        assert told["namespace_sets_total"]["other"] == 2 * LIMIT
        assert sum(told["namespace_sets_total"].values()) == told["sets_total"] == 3 * LIMIT
        assert daemon.run("status").rc == 0


@given(st.lists(st.tuples(st.integers(0, 200), st.booleans()), max_size=400))
def test_accounts_never_lose_or_double_a_figure(steps: list[tuple[int, bool]]) -> None:
    """Namespaces that come, go, are forgotten and come again: what all accounts counted is what happened."""
    index = Index()
    before: dict[bytes, int] = {}
    for put, (number, stays) in enumerate(steps, 1):
        space = index.namespace(number.to_bytes(32, "big"))
        slot = index.add(space, put.to_bytes(32, "big"), put, 1, 3, NEVER)
        space.account.sets += 1
        if not stays and index.remove(slot):
            index.release(slot)
        index.forget_empty()
        accounts = [*index.accounts.own.values(), index.accounts.other]
        assert len(index.accounts.own) <= LIMIT
        assert sum(account.sets for account in accounts) == put
        assert index.accounts.other.sets >= before.get(b"", 0)
        before = {account.name: account.sets for account in accounts}
        for space in index.spaces.values():
            assert space.account is index.accounts.own.get(space.name, index.accounts.other)


@given(st.lists(st.floats(0, 20), min_size=1, max_size=50), st.sampled_from([0.5, 0.9, 0.99]))
def test_a_quantile_lies_in_the_bucket_of_the_true_one(seconds: list[float], share: float) -> None:
    histogram = Histogram(OPERATION_BOUNDS_S)
    for second in seconds:
        histogram.observe(second)
    rows = histogram.rows("x_seconds", "", {})
    buckets = {row.metric.labels["le"]: row.read() for row in rows if "le" in row.metric.labels}
    found = quantile(buckets, share)
    assert found is not None
    true = sorted(seconds)[math.ceil(share * len(seconds) - 1e-9) - 1]
    place = bisect_left(OPERATION_BOUNDS_S, true)
    lower = OPERATION_BOUNDS_S[place - 1] if place else 0.0
    upper = OPERATION_BOUNDS_S[place] if place < len(OPERATION_BOUNDS_S) else lower
    assert lower <= found <= upper
    assert quantile({"0.1": 0, "+Inf": 0}, share) is None
