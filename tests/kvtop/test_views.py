"""What views say in words and numbers: labels whole, figures that can be read, and no claim about what was not looked into."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtop.snapshot import Problem, Snapshot, Stats
from kvtop.text import UNICODE, plain, span, visible_width, width_of, wrap
from kvtop.views import VIEWS
from kvtop.views.base import figure, grid_of
from kvtop.views.tiers import COLUMNS
from tests.kvtop import scenes

LONG = "tier_store_to_long_side_with_a_very_long_name_seconds"


def _labelled(tick: int) -> Snapshot:
    """A daemon whose names are longer than any column was made for."""
    one = scenes.kvd(tick)
    schema = [
        *(scenes.series(LONG, "bucket", "seconds", tier="nvme0", op="prefetch", le=le) for le in ("0.01", "+Inf")),
        *(scenes.series("get_with_an_equally_long_name_seconds", "bucket", "seconds", le=le) for le in ("0.01", "+Inf")),
        scenes.series("tier_reinserted_after_eviction_total", "counter", tier="nvme0", type="disk"),
        scenes.series("revoked_leases_of_readers_that_came_too_late_total", "counter"),
    ]
    values = (9.0, 10.0, 9.0, 10.0, 1234567.0, 7.0)
    return scenes.change(
        scenes.host(tick), stats=(scenes.change(one, schema=(*one.schema, *schema), values=(*one.values, *values)),)
    )


@pytest.mark.parametrize("width", [36, 60, 76, 116, 196])
def test_names_in_a_tiers_detail_are_whole_at_any_width(width: int) -> None:
    model = scenes.model(3, _labelled)
    view = VIEWS["tiers"]
    assert view.detail is not None
    for row in view.rows(model):
        lines = view.detail(model, row, width, 100).lines
        assert all(width_of(line) <= width for line in lines)
        text = "".join(plain(line) for line in lines).replace(" ", "")
        if row.item.name == "arena":
            assert "get_with_an_equally_long_name_seconds" in text
            assert "revoked_leases_of_readers_that_came_too_late_total" in text
        if row.item.name == "nvme0":
            assert f"{LONG}{{op=prefetch}}" in text
            assert "reinserted_after_eviction_total" in text
            assert "1,234,567" in text
            assert "p50" in text
            assert "…" not in text


def test_what_nobody_knows_a_tier_to_hold_is_not_shown_as_nothing() -> None:
    def unknown(tick: int) -> Snapshot:
        one = scenes.kvd(tick, tier_bytes_used__s3=0)
        schema = scenes.series("tier_usage_known", tier="s3", type="s3")
        return scenes.change(
            scenes.host(tick), stats=(scenes.change(one, schema=(*one.schema, schema), values=(*one.values, 0.0)),)
        )

    model = scenes.model(3, unknown)
    looks = {column.id: column.look for column in COLUMNS if column.look is not None}
    nvme, s3 = (next(row.item for row in VIEWS["tiers"].rows(model) if row.item.name == name) for name in ("nvme0", "s3"))
    assert [plain(looks[name](s3, 20, model)) for name in ("used", "entries", "bar")] == ["?", "?", "nobody can say"]
    assert plain(looks["used"](nvme, 9, model)) != "?"
    assert s3.share is None


@given(
    st.lists(st.tuples(st.text("abc_", min_size=1, max_size=40), st.text("0123456789,.", min_size=1, max_size=16)), max_size=9),
    st.integers(1, 200),
)
def test_a_grid_of_values_cuts_nothing_and_overruns_nothing(items: list[tuple[str, str]], width: int) -> None:
    lines = grid_of(items, width)
    assert all(width_of(line) <= width for line in lines)
    text = "".join(plain(line) for line in lines).replace(" ", "")
    assert all(name in text and value in text for name, value in items)


@given(st.text("ab é日\u200d ", max_size=80), st.integers(1, 50), st.integers(0, 20))
def test_wrapped_lines_fit_and_lose_nothing(text: str, width: int, hang: int) -> None:
    lines = wrap(span(text), width, hang=hang)
    if width > 1:  # a wide character has no place in one column
        assert all(width_of(line) <= width for line in lines)
    assert "".join(plain(line) for line in lines).replace(" ", "") == text.replace(" ", "")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, "0"), (-0.0, "0"), (3.0, "3"), (0.1 + 0.2, "0.3"), (1 / 3, "0.333333"), (0.00012345, "0.00012345"),
        (1e-7, "0.0000001"),
        (12.5, "12.5"), (1234567.891, "1,234,568"), (9999.99999, "10,000"), (-3.25, "-3.25"), (1 << 40, "1.1T"), (1e18, "1.00e+18"),
        (123456789.0, "123,456,789"),
    ],
)  # fmt: skip
def test_figures(value: float, shown: str) -> None:
    assert figure(value) == shown


@given(st.floats(-1e300, 1e300))
def test_every_figure_fits_and_is_near(value: float) -> None:
    text = figure(value)
    assert visible_width(text) <= 14
    if not text.endswith(tuple("kMGT")):
        assert math.isclose(float(text.replace(",", "")), value, rel_tol=0.006, abs_tol=0)


def test_a_folder_that_cannot_be_read_is_said_instead_of_what_is_not_in_it() -> None:
    shm = "/proc/7/root/dev/shm"
    for problems, wanted in (
        ((Problem(source=shm, message=f"cannot read {shm}: No such file or directory"),), f"cannot read {shm}: No such file"),
        ((), shm),
    ):
        model = scenes.model(1, lambda tick, p=problems: Snapshot(time_s=1, mono_s=1, shm=shm, problems=p))  # type: ignore[misc]
        for name in ("overview", "segments", "tiers", "metrics", "processes", "models"):
            told = VIEWS[name].empty(model) + "\n".join(plain(line) for line in VIEWS[name].above(model, 120, 20))
            assert wanted in told or name == "models", (name, told)
            claims = [words for words in ("no daemon", "no segments in", "nobody", "no process", "no segment,") if words in told]
            assert not claims if problems else claims, (name, told)


def test_recordings_of_a_time_that_named_no_folder() -> None:
    model = scenes.model(1, lambda tick: Snapshot(time_s=1, mono_s=1))
    assert VIEWS["tiers"].empty(model) == "no daemon publishes in /dev/shm: start one with kvd serve"


def test_both_alphabets_are_as_wide() -> None:
    from kvtop.text import ASCII

    for text in ("plain", "cut…", "日本é", "👩‍👩", Stats(kind="kvd", instance="ü").name):
        assert visible_width(ASCII.spell(text)) == visible_width(text)
        assert ASCII.spell(text).isascii()
        assert UNICODE.spell(text) == text
