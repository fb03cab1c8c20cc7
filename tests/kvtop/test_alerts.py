"""What is wrong is said, in words and in the one word; rules can be set, changed and switched off."""

import pytest

from kvtools.errors import UsageError
from kvtop.alerts import CRITICAL, DEFAULTS, EMPTY, OK, WARNING, Rule, parse_rule, rules_from
from kvtop.model import Model
from kvtop.snapshot import Engine, Problem, Snapshot
from tests.kvtop import scenes
from tests.kvtop.scenes import GIB


def _after(*snapshots: Snapshot, rules: tuple[Rule, ...] = DEFAULTS) -> Model:
    model = Model(rules=rules)
    for snapshot in snapshots:
        model.take(snapshot)
    return model


def _texts(model: Model) -> list[str]:
    return [f"{alert.level} {alert.subject}: {alert.text}" for alert in model.alerts]


def test_a_healthy_host_is_ok_and_an_empty_one_is_empty() -> None:
    assert scenes.model(5).health == OK
    assert _after(Snapshot(time_s=0, mono_s=0)).health == EMPTY


@pytest.mark.parametrize(
    ("snapshot", "health", "words"),
    [
        (scenes.host(1, segments=0, stats=(), processes=()), EMPTY, ""),
        (scenes.change(scenes.host(), segments=(scenes.segment(owner="stale"),)), WARNING, "its engine is gone"),
        (scenes.change(scenes.host(), segments=(scenes.segment(used_bytes=50 * GIB),)), WARNING, "over its limit"),
        (scenes.change(scenes.host(), segments=(scenes.segment(used_bytes=44 * GIB),)), WARNING, "96 % of its limit"),
        (scenes.change(scenes.host(), stats=(scenes.kvd(state="silent"),)), CRITICAL, "silent for"),
        (scenes.change(scenes.host(), stats=(scenes.kvd(state="gone"),)), CRITICAL, "its writer is gone"),
        (scenes.change(scenes.host(), stats=(scenes.kvd(state="stale"),)), WARNING, "no stable reading"),
        (scenes.change(scenes.host(), stats=(scenes.kvd(tier_breaker_open__nvme0=1),)), WARNING, "circuit breaker open"),
        (
            scenes.change(scenes.host(), stats=(scenes.kvd(corruptions_total=2),)),
            WARNING,
            "2 corrupt values found since it started",
        ),
        (scenes.change(scenes.host(), stats=(scenes.kvd(quarantine_bytes=64 * GIB),)), WARNING, "quarantine.share"),
        (scenes.change(scenes.host(), shm_free_bytes=GIB), WARNING, "only 0.4 % free"),
        (
            scenes.change(scenes.host(), problems=(Problem(source="seg", message="permission denied"),)),
            WARNING,
            "permission denied",
        ),
        (scenes.change(scenes.host(), engines=(Engine(url="h:8000", problem="no answer"),)), WARNING, "no answer"),
    ],
)
def test_each_fact_is_told(snapshot: Snapshot, health: str, words: str) -> None:
    model = _after(snapshot)
    assert model.health == health
    assert words in "\n".join(_texts(model))
    assert bool(model.alerts) == bool(words)


def test_corruption_found_while_watching_is_critical() -> None:
    model = _after(scenes.host(0), scenes.change(scenes.host(1), stats=(scenes.kvd(1, corruptions_total=1),)))
    assert model.health == CRITICAL
    assert "just now" in model.alerts[0].text


def test_the_worst_comes_first() -> None:
    stats = (scenes.kvd(state="silent"),)
    model = _after(scenes.change(scenes.host(), stats=stats, segments=(scenes.segment(owner="stale"),)))
    assert [alert.level for alert in model.alerts] == ["crit", "warn"]


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("segment.share>=90", Rule("segment.share", ">=", 90.0)),
        ("segment.share >= 90%", Rule("segment.share", ">=", 90.0)),
        ("hit_rate<0.5:crit", Rule("hit_rate", "<", 0.5, "crit")),
        ("segment.free<4G:WARN", Rule("segment.free", "<", float(4 << 30))),
        ("rate(rejections_total)>0", Rule("rejections_total", ">", 0.0, "warn", rate=True)),
        ("leases_active!=0", Rule("leases_active", "!=", 0.0)),
        ("segment.share=off", "segment.share"),
    ],
)
def test_rules_parse(text: str, rule: Rule | str) -> None:
    assert parse_rule(text) == rule


@pytest.mark.parametrize("text", ["", "x", "x>", ">3", "x>y", "x>3:loud", "rate(x>3", "x)>3", "x>-1", "1x>2"])
def test_what_is_no_rule_is_an_error_that_names_it(text: str) -> None:
    with pytest.raises(UsageError, match="alert") as caught:
        parse_rule(text)
    assert caught.value.hint


def test_a_rule_replaces_the_default_for_its_measure_and_off_removes_it() -> None:
    assert Rule("segment.share", ">=", 95.0) in rules_from([])
    assert [r for r in rules_from(["segment.share>50"]) if r.measure == "segment.share"] == [Rule("segment.share", ">", 50.0)]
    assert not [r for r in rules_from(["segment.share=off"]) if r.measure == "segment.share"]


@pytest.mark.parametrize(
    "text",
    ["segment.share>10", "segment.free<1T",
     "arena.share>50", "hit_rate<0.99", "tier.share>10", "gpu.share>10", "shm.free_percent<90",
     "leases_active>=12", "tier_bytes_used>1G", "rate(hits_total)>1", "quarantine.share>=0"],
)  # fmt: skip
def test_every_measure_can_fire(text: str) -> None:
    model = _after(scenes.host(1), scenes.host(2), rules=rules_from([text]))
    assert model.alerts, text
    assert model.health == WARNING


def test_a_rule_over_what_nobody_publishes_is_itself_an_alert() -> None:
    rules = rules_from(["hit_rat<0.3", "leases_active>100000"])
    told = _texts(_after(scenes.host(), rules=rules))
    assert any("hit_rat is no measure" in text for text in told)
    assert not any("leases_active" in text for text in told)
    alone = scenes.host(1, segments=0, stats=(), processes=())
    assert not _texts(_after(alone, rules=rules)), "with nobody there to publish anything, it may be right"
