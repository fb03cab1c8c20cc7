"""Tables fit every width, drop the least important column first, and sort the same way every time."""

from hypothesis import given
from hypothesis import strategies as st

from kvtop.columns import GAP, Column, Order, Row, arrange, fit_columns, header, paint_row
from kvtop.query import Filter, Value, parse_filter
from kvtop.text import ASCII, plain, width_of
from kvtop.views import VIEWS
from tests.kvtop import scenes

WIDTHS = st.integers(1, 320)


@given(st.sampled_from(sorted(VIEWS)), WIDTHS)
def test_every_view_fits_every_width(view: str, width: int) -> None:
    columns = VIEWS[view].columns
    fitted = fit_columns(columns, width)
    assert fitted, "a table always has a column"
    assert sum(size for _, size in fitted) + GAP * (len(fitted) - 1) <= width
    assert all(size >= 1 for _, size in fitted)
    kept = {column.id for column, _ in fitted}
    dropped = [column for column in columns if column.id not in kept]
    if dropped:
        assert max(c.rank for c, _ in fitted) <= min(c.rank for c in dropped), "the least important ones go first"
    if width >= 16:
        assert min(columns, key=lambda c: c.rank).id in kept


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(0, 40), st.integers(0, 9)), min_size=1, max_size=12), WIDTHS)
def test_any_columns_fit_any_width(shapes: list[tuple[int, int, int]], width: int) -> None:
    columns = [Column(str(i), str(i), w, lambda item: None, most=m, rank=r) for i, (w, m, r) in enumerate(shapes)]
    fitted = fit_columns(columns, width)
    assert sum(size for _, size in fitted) + GAP * (len(fitted) - 1) <= width
    assert [c.id for c, _ in fitted] == [c.id for c in columns if c.id in {k.id for k, _ in fitted}], "in their order"
    for column, size in fitted:
        assert size <= max(column.width, column.most)


@given(st.sampled_from(sorted(VIEWS)), WIDTHS)
def test_every_row_is_as_wide_as_its_header(view: str, width: int) -> None:
    model = scenes.model(4)
    chosen = VIEWS[view]
    fitted = fit_columns(chosen.columns, width)
    want = sum(size for _, size in fitted) + GAP * (len(fitted) - 1)
    assert width_of(header(fitted, chosen.order, ASCII)) == want
    for row in chosen.rows(model):
        assert width_of(paint_row(row, fitted, model, ASCII)) == want


def _row(key: str, value: Value) -> Row:
    return Row(key, key, {"name": key, "value": value})


def test_sorting_is_stable_with_unknown_last() -> None:
    rows = [_row("b", 2), _row("a", 2), _row("c", None), _row("d", 5)]
    falling = [r.key for r in arrange(rows, Filter(), Order("value"))]
    rising = [r.key for r in arrange(rows, Filter(), Order("value", rising=True))]
    assert falling[0] == "d"
    assert falling[-1] == rising[-1] == "c"
    assert falling == [r.key for r in arrange(list(reversed(rows)), Filter(), Order("value"))], "not by arrival"


def test_filter_then_sort() -> None:
    rows = [_row("llama", 80), _row("qwen", 20), _row("llava", 95)]
    chosen = parse_filter("ll value>50", frozenset({"name", "value"}))
    assert [r.key for r in arrange(rows, chosen, Order("value"))] == ["llava", "llama"]


def test_the_sorted_column_carries_an_arrow_and_titles_are_clickable() -> None:
    fitted = fit_columns(VIEWS["segments"].columns, 120)
    line = header(fitted, Order("used"), ASCII)
    assert "USEDv" in plain(line)
    assert "USED^" in plain(header(fitted, Order("used", rising=True), ASCII))
    assert {part.action for part in line if part.text.strip()} == {f"screen.sort('{c.id}')" for c, _ in fitted}
