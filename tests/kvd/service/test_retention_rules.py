"""Class and expiry of a value: what the last put said holds, up or down, in the arena and in every tier, over restarts.

The rules, as the man page states them (RETENTION): a put under a key that exists replaces value, class and expiry together;
`none` stores nothing and leaves what is there; `ephemeral` takes what tiers hold out of sight; a value that comes up from a tier
has the class and the expiry it went down with.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemon import Daemon, MakeDaemon
from tests.support.processes import wait_until

pytestmark = pytest.mark.real("kvd")

K = b"k" * 32
SIZES = [100, 50_000]
TIERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "disk": lambda path: {"type": "disk", "path": str(path / "disk"), "max_bytes": "64MiB"},
    "fs": lambda path: {"type": "fs", "base_path": str(path / "fs"), "max_bytes": "64MiB"},
    "raw_block": lambda path: {"type": "raw_block", "device_path": str(path / "slots"), "slot_bytes": 65536},
    "dax": lambda path: {"type": "dax", "device_path": str(path / "dax"), "slot_bytes": 65536, "max_dax_size_gb": 0.004},
}


@pytest.fixture(params=["disk", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fs", "raw_block", "dax"))])
def daemon(request: pytest.FixtureRequest, kvd_daemon: MakeDaemon, tmp_path: Path) -> Daemon:
    for name in ("slots", "dax"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(8 << 20)
    return kvd_daemon("--l2-adapter", json.dumps(TIERS[request.param](tmp_path)), max_bytes="4MiB")


def rows(daemon: Daemon) -> dict[str, tuple[str, bool]]:
    """Where the key is: place -> (class, whether it expires)."""
    found = daemon.run("keys", "--json").json()["keys"]
    return {row["place"]: (row["retention"], row["expires_at"] is not None) for row in found}


def test_the_last_put_decides_in_the_tier_too_over_restarts(daemon: Daemon) -> None:
    steps: list[tuple[str, float | None, int]] = [("long", None, 50_000), ("short", 3600.0, 100), ("long", None, 50_001)]
    for klass, ttl, size in steps:
        value = bytes([size % 256]) * size
        with daemon.client(timeout_s=20) as client:
            assert client.put(K, value, retention=klass, ttl_s=ttl, wait="tier")
        daemon.restart(kill=ttl is None)
        with daemon.client(timeout_s=20) as client:
            assert client.get(K) == value, (klass, ttl)
            told = rows(daemon)
            assert set(told.values()) == {(klass, ttl is not None)}, "the tier's copy and the promoted one"
            assert "arena" in told


def test_ephemeral_takes_what_the_tier_holds_out_of_sight_for_good(daemon: Daemon) -> None:
    with daemon.client(timeout_s=20) as client:
        for size in SIZES:
            assert client.put(K, b"old" * size, wait="tier")
            assert client.put(K, b"new" * size, retention="ephemeral")
            assert client.get(K) == b"new" * size
            client.flush()
            assert client.delete([K], arena_only=True) == 1
            assert client.get(K) is None
    daemon.restart()
    with daemon.client(timeout_s=20) as client:
        assert client.get(K) is None
        assert client.put(K, b"again", retention="ephemeral")
        assert client.put(K, b"up", retention="short", wait="tier")
    daemon.restart()
    with daemon.client(timeout_s=20) as client:
        assert client.get(K) == b"up", "upwards it goes to the tiers"


def test_none_stores_nothing_and_leaves_what_is_there(daemon: Daemon) -> None:
    with daemon.client(timeout_s=20) as client:
        assert client.put(K, b"stays", wait="tier")
        assert client.put(K, b"never", retention="none").reason == "retention_none"
        assert client.get(K) == b"stays"
        client.delete([K], arena_only=True)
        assert client.get(K) == b"stays"


def test_an_expiry_ends_a_value_everywhere_and_a_later_put_without_one_lifts_it(daemon: Daemon) -> None:
    with daemon.client(timeout_s=20) as client:
        assert client.put(K, b"a" * 50_000, ttl_s=0.8, wait="tier")
        assert client.put(b"l" * 32, b"b" * 50_000, ttl_s=0.8, wait="tier")
        assert client.put(b"l" * 32, b"c" * 50_000, wait="tier")
        client.delete([K, b"l" * 32], arena_only=True)
    daemon.restart(kill=True)
    with daemon.client(timeout_s=20) as client:
        wait_until(lambda: client.exists([K]) == [False], what="the expiry")
        assert client.get(K) is None
        assert client.get(b"l" * 32) == b"c" * 50_000
        deadline = time.monotonic() + 1.2
        while time.monotonic() < deadline:
            assert client.exists([K, b"l" * 32]) == [False, True]
            time.sleep(0.1)
    daemon.restart()
    with daemon.client(timeout_s=20) as client:
        assert client.get(K) is None, "expired is expired, whatever restarts"
