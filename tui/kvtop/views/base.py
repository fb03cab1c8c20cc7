"""What a view is: a table, what stands above it, what stands below it, all as functions of the model and a width.

A view never touches a terminal. `above` and `below` are told how many rows they may use and must not use more;
`share_height` decides that. The screen (kvtop.screens.main) and `--once` (kvtop.once) draw the same views.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvtools.output import visible_width
from kvtools.units import format_size
from kvtop.columns import Column, Order, Row
from kvtop.model import Model
from kvtop.text import FRAME_FROM, Line, Span, box, cell, fit, safe, span, wrap


def nothing(model: Model, width: int, height: int) -> list[Line]:
    """An empty part."""
    return []


class Detail(NamedTuple):
    """Everything about one row: what the frame says, and the lines in it (perhaps more than the room they were made for)."""

    title: str
    note: str
    lines: list[Line]


DetailOf = Callable[[Model, Row, int, int], Detail]
"""(model, row, columns, rows) -> the detail of a row. Graphs fit the rows given; text may be longer, and scrolls when alone."""


@dataclass(frozen=True, slots=True)
class View:
    """One tab. `rows` gives the table's rows, `detail` what Enter shows (also the pane under the table where there is room)."""

    id: str
    title: str
    columns: tuple[Column, ...]
    rows: Callable[[Model], Sequence[Row]]
    order: Order
    empty: Callable[[Model], str]
    """What to say when there are no rows at all."""
    above: Callable[[Model, int, int], list[Line]] = nothing
    detail: DetailOf | None = None
    pane: int = 0
    """Rows of `detail` to show under the table where the screen has room; 0: only on Enter."""
    spare: bool = False
    """The pane takes only what the table leaves when all its rows are shown."""


def pane_lines(view: View, model: Model, row: Row | None, width: int, height: int, *, whole: bool = False) -> list[Line]:
    """The framed detail of a row: exactly `height` rows, or with `whole` as many as it needs and no fewer."""
    if row is None or view.detail is None or width <= 0 or height <= 0:
        return []
    framed = width >= FRAME_FROM and height >= 3
    inner, room = (width - 4, height - 2) if framed else (width, height)
    detail = view.detail(model, row, inner, room)
    lines = detail.lines if whole else detail.lines[:room]
    if not framed:
        return [fit(line, width) for line in lines]
    return box(detail.title, lines, width, model.glyphs, note=detail.note, height=max(height, len(lines) + 2))


@dataclass(frozen=True, slots=True)
class Share:
    """How a view's height is divided. `table` counts its header line; all are at least 0 and sum to at most the height."""

    above: int
    table: int
    pane: int


SMALL_PANE = 5


def share_height(height: int, above: int, pane: int, rows: int, *, spare: bool = False) -> Share:
    """Divide `height`: the table gets its header and up to three rows first, then what is above, then the pane, then all.

    Rows that the table cannot use make the pane larger, up to twice what it asked for, and give a small one (`SMALL_PANE` rows at
    least) where what it asked for does not fit.
    """
    height = max(0, height)
    least = min(height, 1 + min(max(rows, 1), 3))
    up = min(above, max(0, height - least))
    rest = height - up
    needed = max(least, rows + 1 if spare else min(rows + 1, 8))
    left = rest - max(needed, rows + 2)
    low = min(2 * pane, left) if pane else 0
    if low < pane:
        low = pane if rest - pane >= needed else left if left >= SMALL_PANE else 0
    return Share(up, rest - low, low)


WHOLE_PAGE = 10_000
"""The height where nothing has to be left out: a page of text."""

SHM = "/dev/shm"  # noqa: S108 - a name to show


def unread(model: Model) -> str:
    """Why the folder of segments could not be read; empty when it was."""
    shm = (model.snapshot.shm if model.snapshot else "") or SHM
    for problem in model.snapshot.problems if model.snapshot else ():
        if problem.source == shm:
            return safe(problem.message if shm in problem.message else f"{shm}: {problem.message}")
    return ""


def nothing_in(text: str) -> Callable[[Model], str]:
    """What a table says that has no rows: `text` with {shm} for the folder that was read, or that it could not be read.

    That there is no daemon, segment or number is a claim about a folder that was looked into.
    """

    def say(model: Model) -> str:
        shm = (model.snapshot.shm if model.snapshot else "") or SHM
        return unread(model) or safe(text.format(shm=shm))

    return say


NO_DAEMON = nothing_in("no daemon publishes in {shm}: start one with kvd serve")


def amount(value: float) -> Line:
    """Bytes, for a cell."""
    return span(format_size(value))


def percent(value: float | None, digits: int = 0) -> str:
    """'38 %', or '-' when unknown."""
    return "-" if value is None else f"{value:.{digits}f} %"


def ratio(value: float | None) -> str:
    """A hit rate of 0..1 as '92.1 %'."""
    return "-" if value is None else f"{100 * value:.1f} %"


def per_second(value: float | None) -> str:
    """A count a second, short: '1.2k/s'."""
    if value is None:
        return "-"
    return f"{count(value)}/s"


def count(value: float) -> str:
    """A number in at most six columns: 999, 12.3k, 4.56M."""
    for limit, scale, unit in ((1e3, 1, ""), (1e6, 1e3, "k"), (1e9, 1e6, "M"), (1e12, 1e9, "G"), (1e15, 1e12, "T")):
        if abs(value) < limit * 0.9995:
            number = value / scale
            if not unit:
                return f"{number:.0f}" if number == int(number) or abs(number) >= 100 else f"{number:.3g}"
            return f"{number:.3g}{unit}"
    return f"{value:.2e}"


def figure(value: float, columns: int = 14) -> str:
    """A published number in at most so many columns: whole ones with commas, others with as many digits as mean something.

    Never with an exponent where there is room without one: 0.00012, not 1.2e-04.
    """
    value = value + 0.0 if value else 0.0  # no minus zero
    if value == int(value):
        text = f"{value:,.0f}"
    else:
        if abs(value) < 1e-8:
            return count(value)
        # Six significant digits, and at least three of a small number.
        places = max(0, min(11, 5 - math.floor(math.log10(abs(value)))))
        text = f"{value:,.{places}f}"
        text = text.rstrip("0").rstrip(".") if "." in text else text
    return text if (len(text) <= columns and text not in ("0", "-0", "")) or not value else count(value)


def grid_of(items: Sequence[tuple[str, str]], width: int) -> list[Line]:
    """Names and values in as many columns as there is room for; no name is cut, and on a narrow screen the value is below it."""
    if not items or width <= 0:
        return []
    label, value = (max(visible_width(one[part]) for one in items) for part in (0, 1))
    value = max(value, 12)
    if label + 2 + value > width:
        lines: list[Line] = []
        for name, shown in items:
            lines += wrap((Span(name, "dim"), Span("  "), Span(shown)), width, hang=2)
        return lines
    columns = max(1, (width + 3) // (label + 2 + value + 3))
    lines = []
    for begin in range(0, len(items), columns):
        line: list[Span] = []
        for name, shown in items[begin : begin + columns]:
            line += [Span("   ")] if line else []
            line += [Span(cell(name, label) + "  ", "dim"), Span(cell(shown, value))]
        lines.append(tuple(line))
    return lines


def load_style(share: float, warn: float = 90.0, bad: float = 100.0) -> str:
    """The style of a percentage; the number itself is always beside it."""
    return "bad" if share > bad else "warn" if share >= warn else ""


def level_mark(level: str, model: Model) -> Span:
    """Glyph and word for a level: never colour alone."""
    glyphs = model.glyphs
    return {
        "crit": Span(f"{glyphs.bad} CRIT", "bad"),
        "warn": Span(f"{glyphs.warn} WARN", "warn"),
        "ok": Span(f"{glyphs.good} OK", "good"),
    }.get(level, Span(f"{glyphs.dot} {level}", "dim"))
