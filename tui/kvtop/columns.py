"""Tables as data: columns that know their width and worth, rows with a key, and the arithmetic that fits them on a screen.

A `Column` says what a cell is worth (sorting, filtering) and how it looks in a given width. `fit_columns` decides which columns a
screen has room for: the least important go first, what is left over is given to those that can use it, and widths never depend
on the data, so nothing jumps from tick to tick. `arrange` filters and sorts rows, stable and with the key as tie-break.
Pure: the property test runs these over every terminal size.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtop.query import Filter, Value
from kvtop.text import Glyphs, Line, Span, cell, fit, safe

GAP = 2
"""Blank columns between two columns."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table over items of some type."""

    id: str
    title: str
    width: int
    """The least it needs."""
    value: Callable[[Any], Value]
    """What it sorts and filters by; a number unless it is a word."""
    look: Callable[[Any, int, Any], Line] | None = None
    """(item, width, model) -> the cell, at most `width` columns. Without it: the value as text."""
    most: int = 0
    """How far it may grow; 0 is not at all."""
    rank: int = 5
    """Which columns go first on a narrow screen: 9 before 8; 0 never goes."""
    right: bool = False
    rising: bool = False
    """Sorted first from small to large (words), else from large to small (amounts)."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row: `key` stays the same from tick to tick, so the cursor can stay on the thing."""

    key: str
    item: Any
    values: Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class Order:
    """How a table is sorted."""

    column: str
    rising: bool = False


def fit_columns(columns: Sequence[Column], width: int) -> list[tuple[Column, int]]:
    """The columns that fit `width`, in order, with their widths. Their sum and gaps never exceed `width`."""
    kept = list(columns)
    while len(kept) > 1 and sum(c.width for c in kept) + GAP * (len(kept) - 1) > width:
        worst = max(range(len(kept)), key=lambda i: (kept[i].rank, i))
        if kept[worst].rank == 0 and all(c.rank == 0 for c in kept):
            worst = len(kept) - 1
        kept.pop(worst)
    if not kept or width <= 0:
        return []
    widths = [min(c.width, width) for c in kept]
    spare = width - sum(widths) - GAP * (len(kept) - 1)
    while spare > 0:
        hungry = [i for i, c in enumerate(kept) if widths[i] < c.most]
        if not hungry:
            break
        each = max(1, spare // len(hungry))
        for i in hungry:
            more = min(each, kept[i].most - widths[i], spare)
            widths[i] += more
            spare -= more
    return list(zip(kept, widths, strict=True))


def names_of(columns: Sequence[Column]) -> dict[str, str]:
    """What a column may be called in a filter or for sorting, with its id: the id, or the heading with `_` for blanks."""
    ids = {column.id: column.id for column in columns}
    return ids | {name: c.id for c in columns if (name := c.title.strip().lower().replace(" ", "_")) not in ids}


def rows_of(items: Sequence[Any], key: Callable[[Any], str], columns: Sequence[Column]) -> list[Row]:
    """Rows for `items`."""
    return [Row(key(item), item, {column.id: column.value(item) for column in columns}) for item in items]


def arrange(rows: Sequence[Row], chosen: Filter, order: Order) -> list[Row]:
    """The rows that match, sorted; equal ones by key. Unknown values (None) come last either way."""
    shown = sorted((row for row in rows if chosen.matches(row.values)), key=lambda row: row.key)
    known = [row for row in shown if row.values.get(order.column) is not None]
    rest = [row for row in shown if row.values.get(order.column) is None]
    known.sort(key=lambda row: _worth(row.values[order.column]), reverse=not order.rising)
    return known + rest


def _worth(value: Value) -> tuple[int, float, str]:
    if isinstance(value, str):
        return (1, 0.0, value.lower())
    return (0, float(value or 0), "")


def header(fitted: Sequence[tuple[Column, int]], order: Order, glyphs: Glyphs) -> Line:
    """The title line; the sorted column carries an arrow, each title sorts when clicked."""
    out: list[Span] = []
    for index, (column, width) in enumerate(fitted):
        if index:
            out.append(Span(" " * GAP))
        title = column.title
        style = "head"
        if column.id == order.column:
            arrow = glyphs.up if order.rising else glyphs.down
            title = title[: max(0, width - 1)] + arrow
            style = "key"
        out.append(Span(cell(title, width, right=column.right, ellipsis=""), style, f"screen.sort('{column.id}')"))
    return tuple(out)


def paint_row(row: Row, fitted: Sequence[tuple[Column, int]], model: Any, glyphs: Glyphs) -> Line:
    """One row in exactly the fitted widths."""
    out: list[Span] = []
    for index, (column, width) in enumerate(fitted):
        if index:
            out.append(Span(" " * GAP))
        if column.look is None:
            value = row.values.get(column.id)
            text = "-" if value is None else safe(str(value))
            out.append(Span(cell(text, width, right=column.right, ellipsis=glyphs.ellipsis)))
        else:
            out.extend(fit(column.look(row.item, width, model), width, right=column.right, ellipsis=glyphs.ellipsis))
    return tuple(out)
