"""A stats segment's names become a daemon and its tiers; what has no place is still shown somewhere."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtop.daemon import daemon_of, histograms, quantiles
from kvtop.snapshot import Stats
from kvtop.views import VIEWS
from kvtop.views.models import uses
from tests.kvtop import scenes
from tests.kvtop.scenes import series


def test_known_names() -> None:
    daemon = daemon_of(scenes.kvd(10))
    assert daemon.get("hits_total") == 2000
    assert daemon.hit_ratio == pytest.approx(200 / 220)
    assert [tier.name for tier in daemon.tiers] == ["nvme0", "s3"]
    assert [tier.type for tier in daemon.tiers] == ["disk", "s3"]
    assert daemon.tiers[0].limit_bytes == 2048 << 30
    assert not daemon.tiers[0].broken


def test_rejections_are_summed_over_reasons() -> None:
    assert daemon_of(scenes.kvd(1, rejections_total=4)).rejections == 4


def test_an_old_daemon_without_a_name_still_shows() -> None:
    stats = Stats(kind="kvd", instance="old", schema=(series("hits_total", "counter"),), values=(5.0,))
    daemon = daemon_of(stats)
    assert daemon.hit_ratio == 1.0
    assert daemon.tiers == ()
    assert daemon.get("arena_bytes_limit") == 0


def test_every_published_value_is_in_the_metrics_view() -> None:
    model = scenes.model(2)
    keys = {row.item.series.key for row in VIEWS["metrics"].rows(model)}
    assert keys == {one.key for one in scenes.kvd().schema}
    assert "a_name_of_the_future" in keys


def _histogram(*counts: float) -> Stats:
    edges = ("0.001", "0.01", "0.1", "+Inf")
    return Stats(kind="kvd", instance="x", schema=tuple(series("get_seconds", "bucket", le=e) for e in edges), values=counts)


def test_quantiles_interpolate_inside_a_bucket() -> None:
    assert quantiles(_histogram(50, 100, 100, 100), "get_seconds", (0.5, 0.75)) == pytest.approx([0.001, 0.0055])


def test_a_quantile_beyond_the_last_edge_is_that_edge() -> None:
    assert quantiles(_histogram(0, 0, 0, 10), "get_seconds", (0.5,)) == [0.1]


def test_no_observations_no_quantile() -> None:
    assert quantiles(_histogram(0, 0, 0, 0), "get_seconds", (0.5,)) is None
    assert quantiles(_histogram(1, 1, 1, 1), "put_seconds", (0.5,)) is None


@given(st.lists(st.integers(0, 1000), min_size=4, max_size=4).map(sorted))
def test_quantiles_rise_and_stay_inside(counts: list[int]) -> None:
    found = quantiles(_histogram(*map(float, counts)), "get_seconds", (0.1, 0.5, 0.9, 0.99))
    if counts[-1] == 0:
        assert found is None
        return
    assert found is not None
    assert found == sorted(found)
    assert all(0 <= value <= 0.1 and not math.isnan(value) for value in found)


def test_histograms_lists_label_sets_without_le() -> None:
    assert histograms(scenes.kvd()) == {"get_seconds": [{}], "tier_load_seconds": [{"tier": "nvme0"}]}


def test_a_daemons_namespaces_are_rows_with_what_they_hold_and_hit() -> None:
    """kvd publishes figures of a namespace as namespace_<figure>{namespace=...}."""
    names = ("namespace_bytes", "namespace_hits_total", "namespace_misses_total")
    schema = tuple(series(name, namespace=label) for label in ("9f86d081884c", "other") for name in names)
    stats = scenes.change(scenes.kvd(1), schema=schema, values=(3 << 30, 90.0, 10.0, 5.0, 0.0, 0.0))
    found = {use.name: use for use in uses(scenes.model(1, lambda tick: scenes.change(scenes.host(tick), stats=(stats,))))}
    one = found["9f86d081884c"]
    assert (one.kind, one.held_bytes, one.hit_ratio) == ("namespace", 3 << 30, pytest.approx(0.9))
    assert (found["other"].held_bytes, found["other"].hit_ratio) == (5, None)
