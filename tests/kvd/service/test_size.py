"""`kvd size` against a real daemon: the sentence, the table, the object, and what it says when it knows nothing."""

import itertools
import time
from collections.abc import Callable

import pytest

from kvd import sizing
from tests.support.daemon import Daemon
from tests.support.processes import wait_until

pytestmark = pytest.mark.real("kvd")


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def test_a_working_set_larger_than_the_arena_shows_what_more_ram_brings(kvd_daemon: Callable[..., Daemon]) -> None:
    """24 MiB are used again and again in an arena of 16 MiB, which LRU is too small for: twice as much has it all."""
    daemon = kvd_daemon(max_bytes="16MiB")
    assert "nothing is known yet" in daemon.run("size").stdout
    with daemon.client(namespace="model") as client:
        for _ in range(6):
            for n in range(96):
                if client.get(key(n)) is None:
                    client.put(key(n), bytes(256 << 10))
                if n % 16 == 0:
                    time.sleep(0.1)  # not too many uses at once: the sample is to stay whole
        wait_until(lambda: _share(daemon, 2.0) > 0.6, what="the curve to be published")
    assert _share(daemon, 0.5) < 0.1
    assert _share(daemon, 1.0) < 0.1
    out = daemon.run("size").stdout
    assert out.startswith("with twice the RAM ")
    assert "of tokens hit, with half" in out
    assert "NAMESPACE" in out
    body = daemon.run("size", "--json").json()
    assert body["schema"] == "kvd.size/1"
    assert body["arena_bytes"] == 16 << 20
    assert {curve["namespace"] for curve in body["curves"]} >= {"all"}
    points = body["curves"][0]["points"]
    assert [point["arena_bytes"] for point in points] == [(16 << 20) * s // 4 for s in (1, 2, 4, 8, 16, 32)]
    assert all(a["hit_share"] <= b["hit_share"] for a, b in itertools.pairwise(points))


def _share(daemon: Daemon, scale: float) -> float:
    body = daemon.run("stats", "--json").json()
    return sizing.curves(body).get("all", {}).get(scale, -1.0)


def test_what_was_used_a_moment_ago_is_not_said_to_be_nothing() -> None:
    body = {"arena_bytes_limit": 1 << 20, "size_hit_share": {"all/1.0": -1.0}}
    assert list(sizing.page(body | {"sets_total": 0, "gets_total": 0})) == ["nothing is known yet: no value was read or put"]
    assert "ask again" in next(iter(sizing.page(body | {"sets_total": 1, "gets_total": 0})))


def test_a_namespace_has_its_own_line(kvd_daemon: Callable[..., Daemon]) -> None:
    daemon = kvd_daemon(max_bytes="16MiB")
    for name in ("one", "two"):
        with daemon.client(namespace=name) as client:
            for n in range(20):
                client.put(key(n), bytes(1000))
            for _ in range(4):
                client.get_many([key(n) for n in range(20)])
    wait_until(lambda: len(daemon.run("size", "--json").json()["curves"]) == 3, what="both namespaces")
    shares = [curve["points"][2]["hit_share"] for curve in daemon.run("size", "--json").json()["curves"]]
    assert all(share > 0.5 for share in shares)


def test_the_sentence() -> None:
    assert sizing.sentence({0.5: 0.58, 1.0: 0.711, 2.0: 0.8}) == "with twice the RAM 71 % -> 80 % of tokens hit, with half 58 %"
