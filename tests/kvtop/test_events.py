"""What changed between two ticks is told once, in words."""

import pytest

from kvtop.events import KEPT, changes
from kvtop.model import Model
from kvtop.snapshot import LimitNote, Problem, Segment, Snapshot, Stats
from tests.kvtop import scenes
from tests.kvtop.scenes import GIB, segment


def _told(before: Snapshot, after: Snapshot) -> list[str]:
    return [f"{level} {subject}: {text}" for level, subject, text in changes(before, after)]


def _with(*segments: Segment) -> Snapshot:
    return scenes.change(scenes.host(0), segments=segments)


def _stats(*stats: Stats) -> Snapshot:
    return scenes.change(scenes.host(0), stats=stats)


def test_nothing_happened() -> None:
    assert _told(scenes.host(0), scenes.host(0)) == []


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (_with(), _with(segment()), "info llama-70b: appeared, limit 48 GiB"),
        (_with(segment()), _with(), "warn llama-70b: removed"),
        (_with(segment(owner="stale")), _with(), "info llama-70b: removed"),
        (_with(segment()), _with(segment(limit_bytes=40 * GIB)), "info llama-70b: limit 48 GiB -> 40 GiB"),
        (_with(segment()), _with(segment(owner="stale")), "warn llama-70b: its engine died (pid 4711)"),
        (_with(segment(owner="stale")), _with(segment(pid=9)), "info llama-70b: taken over by pid 9"),
        (_stats(), _stats(scenes.kvd()), "info kvd.3f9ac1d2e4b5: started (pid 4242)"),
        (_stats(scenes.kvd()), _stats(), "warn kvd.3f9ac1d2e4b5: gone"),
        (_stats(scenes.kvd()), _stats(scenes.kvd(state="silent")), "crit kvd.3f9ac1d2e4b5: silent: no heartbeat"),
        (_stats(scenes.kvd(state="silent")), _stats(scenes.kvd()), "info kvd.3f9ac1d2e4b5: answers again"),
        (_stats(scenes.kvd()), _stats(scenes.kvd(state="gone")), "crit kvd.3f9ac1d2e4b5: its writer ended (pid 4242)"),
        (
            _stats(scenes.kvd()),
            _stats(scenes.kvd(corruptions_total=3)),
            "crit kvd.3f9ac1d2e4b5: 3 corrupt values found (each was a miss)",
        ),
        (
            _stats(scenes.kvd()),
            _stats(scenes.kvd(tier_breaker_open__nvme0=1)),
            "warn kvd.3f9ac1d2e4b5 tier nvme0: degraded: circuit breaker opened",
        ),
        (
            _stats(scenes.kvd(tier_breaker_open__s3=1)),
            _stats(scenes.kvd()),
            "info kvd.3f9ac1d2e4b5 tier s3: works again: circuit breaker closed",
        ),
        (
            _stats(scenes.kvd()),
            _stats(scenes.kvd(tier_corruptions_total__nvme0=1)),
            "crit kvd.3f9ac1d2e4b5 tier nvme0: 1 corrupt values found on it",
        ),
    ],
)
def test_each_change_is_told_once(before: Snapshot, after: Snapshot, told: str) -> None:
    assert _told(before, after) == [told]
    assert _told(after, after) == []


def test_a_limit_change_names_who_made_it() -> None:
    note = LimitNote(limit_bytes=40 * GIB, by="kvctl limit, uid 0", at_s=1.0, state="pending")
    told = _told(_with(segment()), _with(segment(limit_bytes=40 * GIB, limits=(note,))))
    assert told == ["info llama-70b: limit 48 GiB -> 40 GiB by kvctl limit, uid 0"]


def test_over_and_back_under_the_limit() -> None:
    over = _with(segment(used_bytes=50 * GIB))
    assert _told(_with(segment()), over) == ["warn llama-70b: over its limit by 4 GiB"]
    assert _told(over, _with(segment())) == ["info llama-70b: back under its limit"]


def test_a_restarted_writer_is_told_and_its_counters_are_not_compared() -> None:
    before = scenes.kvd(5, corruptions_total=1)
    after = scenes.change(scenes.kvd(0, corruptions_total=4), pid=5000)
    assert _told(_stats(before), _stats(after)) == ["warn kvd.3f9ac1d2e4b5: restarted (pid 4242 -> 5000)"]


def test_sources_that_fail_and_come_back() -> None:
    bad = scenes.change(scenes.host(0), problems=(Problem(source="/dev/shm", message="permission denied"),))
    assert _told(scenes.host(0), bad) == ["warn /dev/shm: permission denied"]
    assert _told(bad, scenes.host(0)) == ["info /dev/shm: readable again"]


def test_a_segment_that_was_damaged_was_not_removed() -> None:
    cut = scenes.change(_with(), problems=(Problem(source="llama-70b", message="is not a pool segment: 10 bytes"),))
    assert _told(_with(segment()), cut) == ["warn llama-70b: is not a pool segment: 10 bytes"]
    assert _told(cut, _with()) == ["info llama-70b: removed"]
    assert "info llama-70b: readable again" in _told(cut, _with(segment()))


def test_the_health_word_is_logged_when_it_changes_with_the_reason() -> None:
    model = Model()
    for tick, state in enumerate(("fresh", "fresh", "silent", "fresh")):
        model.take(scenes.change(scenes.host(tick), stats=(scenes.kvd(tick, state=state),)))
    told = [(event.level, event.text.partition(":")[0]) for event in model.log if event.subject == "health"]
    assert told == [("crit", "OK -> CRIT"), ("info", "CRIT -> OK")]
    assert "silent for" in next(event.text for event in model.log if event.subject == "health")


def test_the_log_is_bounded_and_numbered() -> None:
    model = Model()
    for number in range(KEPT + 20):
        model.note("info", "x", str(number))
    assert len(model.log) == KEPT
    assert model.log[-1].number == KEPT + 20
