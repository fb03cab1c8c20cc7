"""What `kvd status` makes of the figures: each thing that can be wrong, its word, its code and its exit status."""

import copy
import time
from typing import Any

import pytest

from kvd import commands, status
from kvd.service.stats import of_reading
from kvtools.segments.stats import StatsReader
from tests.support.daemon import Daemon, MakeDaemon
from tests.support.processes import wait_until

pytestmark = pytest.mark.real("kvd")


@pytest.fixture(scope="module")
def daemon(kvd_daemon_module: MakeDaemon) -> Daemon:
    made = kvd_daemon_module(max_bytes="8MiB", tier="64MiB")
    with made.client(namespace="tenant") as client:
        client.put_many([(n.to_bytes(32, "big"), bytes(50_000)) for n in range(10)], retention="short", wait="tier")
        client.get_many([n.to_bytes(32, "big") for n in range(20)])
    wait_until(lambda: len(made.run("stats", "--json").json()["namespace_sets_total"]) > 1, what="the namespace to be shown")
    return made


@pytest.fixture
def body(daemon: Daemon) -> dict[str, Any]:
    return copy.deepcopy(daemon.run("status", "--json").json())


def test_all_is_well(daemon: Daemon, body: dict[str, Any]) -> None:
    assert (body["health"], body["reasons"], body["checks"]) == ("HEALTH_OK", [], [])
    page = daemon.run("status").stdout
    assert page.splitlines()[0] == "  health: HEALTH_OK"
    for line in ("  services:", "  data:", "  io since the start:"):
        assert line in page.splitlines()
    assert "10 in the arena, 10 in disk" in page
    assert "short 10 (488 KiB)" in page
    assert "(50 % found)" in page
    assert "20 keys, 50.0 % found" in page
    assert "p50" in page


def test_what_comes_to_a_tier_is_values_and_what_nobody_can_count_is_no_number(body: dict[str, Any]) -> None:
    body["tiers"][0].update(queue=57, waiting=32, usage_known=0, entries=0, bytes_used=0)
    for page in ("\n".join(status.page(body, [])), "\n".join(status.tiers_page(body))):
        assert "32 on their way" in page
        assert "57" not in page
        assert "nobody can say" in page
        assert "0 in disk" not in page
    del body["tiers"][0]["waiting"], body["tiers"][0]["usage_known"]
    assert "57 on their way" in "\n".join(status.tiers_page(body)), "a daemon of before says no more"


@pytest.mark.parametrize(
    ("code", "severity", "change"),
    [
        ("DAEMON_STUCK", status.ERR, {"heartbeat_age_s": 60.0}),
        ("DRAINING", status.WARN, {"draining": 1}),
        ("QUARANTINE", status.WARN, {"quarantine_bytes": 4096}),
        ("TICK_ERRORS", status.ERR, {"tick_errors_total": 3}),
        ("POLICY_ERRORS", status.WARN, {"policy_errors_total": 3}),
        ("EVICTED_UNWRITTEN", status.WARN, {"evictions_unwritten_total": 3}),
        ("TIER_DOWN", status.ERR, {"tier": {"breaker_open": 1}}),
        ("TIER_DEGRADED", status.WARN, {"tier": {"parts_down": 1}}),
        ("TIER_CORRUPT", status.WARN, {"tier": {"corruptions_total": 2}}),
        ("TIER_REFUSED", status.WARN, {"tier": {"untaken": 2}}),
        ("TIER_KEY_UNKNOWN", status.WARN, {"tier": {"keys_unknown_total": 2}}),
        ("TIER_GIVEN_UP", status.WARN, {"tier": {"given_up_total": 2}}),
    ],
)
def test_each_thing_that_can_be_wrong(body: dict[str, Any], code: str, severity: str, change: dict[str, Any]) -> None:
    body["tiers"][0].update(change.pop("tier", {}))
    body.update(change)
    (check,) = status.checks(body)
    assert (check.code, check.severity) == (code, severity)
    assert status.health([check]) == severity
    lines = list(status.page(body, [check]))
    assert lines[0] == f"  health: {severity}"
    assert lines[1].strip() == check.message


def test_the_worst_comes_first_and_names_the_health(body: dict[str, Any]) -> None:
    body["draining"] = 1
    body["tiers"][0]["breaker_open"] = 1
    found = status.checks(body)
    assert [check.code for check in found] == ["TIER_DOWN", "DRAINING"]
    assert status.health(found) == status.ERR


def test_a_draining_daemon_is_a_warning_and_no_failure(kvd_daemon: MakeDaemon) -> None:
    daemon = kvd_daemon(max_bytes="1MiB")
    assert daemon.run("drain").rc == 0
    wait_until(lambda: daemon.run("stats", "--json").json()["draining"], what="the drain to be published")
    run = daemon.run("status", "--json")
    assert (run.rc, run.json()["health"]) == (0, "HEALTH_WARN")
    assert [check["code"] for check in run.json()["checks"]] == ["DRAINING"]
    assert "nothing asked for yet" in daemon.run("status").stdout


def test_a_clock_that_was_set_back_makes_no_time_negative(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    with StatsReader(daemon.segment.name, daemon.segment.parent) as reader:
        reading = reader.read()
    monkeypatch.setattr(time, "time_ns", lambda: reading.created_ns - 3600 * 10**9)
    body = commands._with_age(of_reading(reading), reading)
    assert (body["uptime_s"], body["heartbeat_age_s"]) == (0, 0)
