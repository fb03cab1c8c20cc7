"""A region file that was cut while the daemon was stopped: misses, counted and said; `kvd verify` finds it."""

import os
from collections.abc import Callable

import pytest

from tests.support.daemon import Daemon
from tests.support.processes import run_cli


@pytest.mark.real("kvd")
def test_a_file_cut_while_nobody_served_is_counted(kvd_daemon: Callable[..., Daemon]) -> None:
    daemon = kvd_daemon(tier="64MiB")
    keys = [os.urandom(32) for _ in range(6)]
    values = {key: os.urandom(1 << 20) for key in keys}
    with daemon.client() as client:
        assert all(client.put_many(list(values.items()), wait="tier"))
    daemon.stop()
    assert run_cli("kvd", "verify", daemon.tier).rc == 0
    largest = max(daemon.tier.glob("*.kvcache"), key=lambda path: path.stat().st_blocks)
    os.truncate(largest, 2 << 20)
    checked = run_cli("kvd", "verify", daemon.tier, "--json")
    assert checked.rc == 1
    assert checked.json()["directories"][0]["short_files"] == [largest.name]
    daemon.start()
    with daemon.client() as client:
        got = client.get_many(keys)
        assert all(value in (None, values[key]) for key, value in zip(keys, got, strict=True))
        assert None in got
        assert client.stats()["corruptions_total"] >= 1
    assert "shorter than it was made" in daemon.text()
    assert daemon.run("status", "--json").json()["health"] == "HEALTH_WARN"
