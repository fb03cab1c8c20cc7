"""Lines keep their width whatever stands in them, and bars tell the truth."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtop.text import (
    ASCII,
    STYLES,
    UNICODE,
    Glyphs,
    Line,
    Span,
    bar,
    beside,
    box,
    clip_text,
    fit,
    graph,
    plain,
    spark,
    spread,
    width_of,
)

TEXT = st.text(st.characters(exclude_categories=["Cc", "Cs", "Mn", "Me", "Cf"]), max_size=30)
LINE = st.lists(st.tuples(TEXT, st.sampled_from(STYLES)), max_size=5).map(lambda parts: tuple(Span(*part) for part in parts))
WIDTH = st.integers(0, 60)
GLYPHS = st.sampled_from([UNICODE, ASCII])


@given(LINE, WIDTH, st.booleans())
def test_fit_gives_exactly_the_width(line: Line, width: int, right: bool) -> None:
    assert width_of(fit(line, width, right=right)) == width


@given(TEXT, WIDTH)
def test_clip_never_exceeds_and_marks_what_is_missing(text: str, width: int) -> None:
    cut = clip_text(text, width)
    assert width_of((Span(cut),)) <= width
    if cut != text and width:
        assert cut.endswith("…")


def test_a_wide_character_is_never_split() -> None:
    assert clip_text("日本語", 4) == "日…"
    assert width_of(fit((Span("日本語"),), 4)) == 4


@given(LINE, LINE, WIDTH)
def test_spread_gives_exactly_the_width(left: Line, right: Line, width: int) -> None:
    assert width_of(spread(left, right, width)) == width


@given(st.lists(st.floats(0, 1e15), min_size=1, max_size=3), st.floats(0, 1e15), WIDTH, GLYPHS)
def test_bars_fill_their_width(amounts: list[float], total: float, width: int, glyphs: Glyphs) -> None:
    assert width_of(bar(width, [(amount, "used") for amount in amounts], total, glyphs)) == width


@given(st.integers(1, 1 << 40), st.integers(1, 1 << 40), st.integers(2, 60))
def test_a_part_above_zero_is_seen_and_over_is_marked(used: int, total: int, width: int) -> None:
    line = bar(width, [(used, "used")], total, ASCII)
    text = plain(line)
    assert text[0] in "#>"
    if used > total * 1.001:
        assert text[-1] == ASCII.over, "130 % must not look like 100 %"
        assert line[-1].style == "bad"
    elif used <= total:
        assert ASCII.over not in text


def test_used_prealloc_and_free_differ_in_glyph_not_only_in_colour() -> None:
    for glyphs in (UNICODE, ASCII):
        text = plain(bar(20, [(50, "used"), (25, "prealloc")], 100, glyphs))
        assert (text[0], text[12], text[19]) == (glyphs.full, glyphs.prealloc, glyphs.free)


def test_bar_lengths_are_proportional() -> None:
    assert plain(bar(10, [(40, "used"), (20, "prealloc")], 100, ASCII)) == "####==...."
    assert plain(bar(10, [(0, "used"), (0, "prealloc")], 100, ASCII)) == ".........."
    assert plain(bar(8, [(5, "used")], 0, ASCII)) == ">>>>>>>>"
    assert plain(bar(4, [(7, "used")], 16, UNICODE)) == "▇▇··"


@given(st.lists(st.floats(0, 1e12), max_size=80), st.integers(0, 60), GLYPHS)
def test_spark_is_as_wide_as_asked(values: list[float], width: int, glyphs: Glyphs) -> None:
    assert len(spark(values, width, glyphs)) == width


def test_spark_tells_zero_from_no_data() -> None:
    assert spark([0, 0, 4, 8], 6, ASCII, top=8) == "  __=%"


@given(st.lists(st.floats(0, 1e12), max_size=80), st.integers(1, 60), st.integers(1, 10), GLYPHS)
def test_graph_has_its_size(values: list[float], width: int, height: int, glyphs: Glyphs) -> None:
    lines = graph(values, width, height, glyphs)
    assert [width_of(line) for line in lines] == [width] * height


@given(TEXT, st.lists(LINE, max_size=6), st.integers(1, 60), st.integers(0, 9), TEXT, GLYPHS)
def test_boxes_are_rectangles(title: str, lines: list[Line], width: int, height: int, note: str, glyphs: Glyphs) -> None:
    made = box(title, lines, width, glyphs, note=note, height=height if height >= 2 else 0)
    assert {width_of(line) for line in made} <= {width}


@given(st.lists(st.lists(LINE, max_size=4), min_size=1, max_size=3), st.integers(1, 20))
def test_beside_makes_one_rectangle(blocks: list[list[Line]], each: int) -> None:
    lines = beside(blocks, [each] * len(blocks))
    assert {width_of(line) for line in lines} <= {each * len(blocks) + len(blocks) - 1}


def test_the_ascii_alphabet_is_ascii() -> None:
    assert all(str(getattr(ASCII, name)).isascii() for name in ASCII.__slots__)


@pytest.mark.parametrize("glyphs", [UNICODE, ASCII])
def test_states_are_told_by_different_glyphs(glyphs: Glyphs) -> None:
    assert len({glyphs.good, glyphs.warn, glyphs.bad, glyphs.off, glyphs.unknown}) == 5
