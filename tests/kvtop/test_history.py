"""Histories keep the newest points, rates survive restarts of what they watch, and memory stays bounded."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtop.history import POINTS, History, Ring
from kvtop.snapshot import Series, Snapshot, Stats
from tests.kvtop import scenes


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=3 * POINTS), st.integers(0, 2 * POINTS))
def test_a_ring_keeps_the_newest(values: list[float], count: int) -> None:
    ring = Ring()
    for value in values:
        ring.push(value)
    kept = values[-POINTS:]
    assert len(ring) == len(kept)
    assert ring.last(count) == (kept[-count:] if count else [])


def _counter(value: float, mono_s: float, pid: int = 1) -> Snapshot:
    stats = Stats(kind="kvd", instance="x", schema=(Series(name="hits_total", kind="counter"),), values=(value,), pid=pid)
    return Snapshot(time_s=mono_s, mono_s=mono_s, stats=(stats,))


def test_counters_become_rates_over_the_monotonic_clock() -> None:
    history = History()
    for mono_s, value in ((0.0, 100), (2.0, 300), (4.0, 700)):
        history.feed(_counter(value, mono_s))
    assert history.points("kvd.x/hits_total") == [100.0, 200.0]
    assert history.rate("kvd.x/hits_total") == pytest.approx(150.0)


def test_a_counter_that_starts_anew_gives_no_rate_for_that_interval() -> None:
    history = History()
    for mono_s, value in ((0.0, 1000), (1.0, 1100), (2.0, 5), (3.0, 15)):
        history.feed(_counter(value, mono_s))
    assert history.points("kvd.x/hits_total") == [100.0, 10.0]


def test_one_reading_has_no_rate() -> None:
    history = History()
    history.feed(_counter(5, 0.0))
    assert history.rate("kvd.x/hits_total") is None
    assert history.rate("nothing") is None


def test_ratio_is_of_the_window_and_none_without_traffic() -> None:
    model = scenes.model(10)
    daemon = model.daemons[0]
    assert model.history.ratio(daemon.key("hits_total"), daemon.key("misses_total")) == pytest.approx(200 / 220)
    quiet = scenes.model(3, lambda tick: scenes.host(0, stats=(scenes.kvd(0),)))
    assert quiet.history.ratio("kvd.3f9ac1d2e4b5/hits_total", "kvd.3f9ac1d2e4b5/misses_total") is None


def test_series_that_are_gone_are_forgotten() -> None:
    history = History()
    for tick in range(3):
        history.feed(scenes.host(tick, segments=3))
    assert "segment/llama-70b/used" in set(history)
    for tick in range(3, POINTS + 70):
        history.feed(Snapshot(time_s=tick, mono_s=tick))
    assert not [key for key in history if key.startswith("segment/")]


def test_fifteen_minutes_of_a_hundred_segments_stay_small() -> None:
    history = History()
    busy = scenes.host(0, segments=100)
    for tick in range(POINTS + 10):
        history.feed(scenes.change(busy, time_s=busy.time_s + tick, mono_s=float(tick)))
    size = sum(sys.getsizeof(ring._data) for ring in history._rings.values())
    assert size < 5 << 20


def test_what_a_graph_covers_is_the_time_it_was_read_over() -> None:
    """Readings a second apart, then a minute, whatever the interval is by now; and a segment that came back after a gap."""
    history = History()
    for time_s in (100.0, 101.0, 102.0, 162.0, 222.0):
        history.feed(Snapshot(time_s=time_s, mono_s=time_s, segments=(scenes.segment("a"),)))
    history.feed(Snapshot(time_s=1000.0, mono_s=1000.0))
    history.feed(Snapshot(time_s=2000.0, mono_s=2000.0, segments=(scenes.segment("a"),)))
    assert history.covered_s("segment/a/used", 3) == 2000.0 - 162.0
    assert history.covered_s("segment/a/used", 60) == 1900.0
    assert history.covered_s("segment/b/used", 60) == 0.0
