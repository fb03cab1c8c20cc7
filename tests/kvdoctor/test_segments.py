"""Segments and a running daemon, seen without its socket."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvdoctor import api
from kvdoctor.collect.segments import FROZEN_S, scan
from kvtools.segments.pool import create_pool
from kvtools.segments.stats import Metric, StatsWriter
from tests.support.processes import Ran


@pytest.mark.real("segments")
def test_writers_alive_frozen_and_gone(tmp_path: Path) -> None:
    metrics = [Metric("gets_total", "counter", "", "Gets."), Metric("private", "gauge", "", "Not for us.")]
    writer = StatsWriter("kvd", "abc", metrics, root=tmp_path)
    writer.set(writer.index("gets_total"), 41)
    now = time.time_ns()
    rows = scan(tmp_path, now)
    assert [(row["name"], row["kind"], row["health"], row["values"]) for row in rows] == [
        ("kvtools.kvd.abc", "kvd", "ok", {"gets_total": 41})
    ]
    later = scan(tmp_path, now + int((FROZEN_S + 5) * 1e9))
    assert later[0]["health"] == "frozen"
    writer.close()
    assert [row for row in scan(tmp_path, now) if row["health"] == "ok"] == []


@pytest.mark.real("segments")
def test_pools_and_broken_files(tmp_path: Path) -> None:
    create_pool("VLLM", 1 << 30, root=tmp_path)
    (tmp_path / "kvtools.kvd.broken").write_bytes(b"not a segment")
    rows = {row["name"]: row for row in scan(tmp_path, time.time_ns())}
    assert (rows["VLLM"]["kind"], rows["VLLM"]["health"]) == ("pool", "unknown")
    assert rows["kvtools.kvd.broken"]["health"] == "broken"


def test_no_shared_memory_folder(tmp_path: Path) -> None:
    assert scan(tmp_path / "nowhere", 0)[0]["health"] == "broken"


@pytest.mark.real("kvd")
def test_a_running_daemon_is_seen_and_its_path_judged(kvd_daemon: Callable[..., Any], cli: Callable[..., Ran]) -> None:
    daemon = kvd_daemon(tier="64MiB")
    with daemon.client() as client:
        client.put(bytes(32), b"x" * 4096)
        assert client.get(bytes(32)) is not None
    facts = api.collect_host()
    mine = next(item for item in facts.segments if item.name == daemon.segment.name)
    assert (mine.kind, mine.health) == ("kvd", "ok")
    assert str(daemon.tier) in [path.path for path in facts.paths]
    assert next(path for path in facts.paths if path.path == str(daemon.tier)).want == 64 << 20
    report = cli("kvdoctor", "--json", "--only", "kvd").json()
    states = {item["scope"]: item["status"] for item in report["results"] if item["id"] == "kvd.segments"}
    assert states[daemon.segment.name] == "pass"


@pytest.mark.real("kvd")
def test_a_killed_daemon_leaves_a_stale_segment_that_is_named(kvd_daemon: Callable[..., Any]) -> None:
    daemon = kvd_daemon()
    daemon.kill9()
    report = api.judge(api.collect_host(run_tools=False), only=["kvd.segments"])
    mine = next(item for item in report.results if item.scope == daemon.segment.name)
    assert mine.status == "warn"
    assert mine.commands == ["kvctl prune"]
