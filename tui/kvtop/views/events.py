"""Events: the log of what happened while kvtop watched, newest first."""

import time
from collections.abc import Sequence

from kvtools.units import format_duration
from kvtop.columns import Column, Order, Row, rows_of
from kvtop.events import Event
from kvtop.model import Model
from kvtop.text import Line, Span, safe, span
from kvtop.views.base import Detail, View, level_mark


def _when(event: Event, width: int, model: Model) -> Line:
    form = "%H:%M" if width < 8 else "%H:%M:%S" if width < 19 else "%Y-%m-%d %H:%M:%S"
    return span(time.strftime(form, time.localtime(event.time_s)), "dim")


def _level(event: Event, width: int, model: Model) -> Line:
    mark = level_mark(event.level, model)
    return (Span(mark.text[:1], mark.style) if width < 6 else mark,)


def _ago(event: Event, width: int, model: Model) -> Line:
    return span(format_duration(max(0.0, model.now_s - event.time_s)), "dim")


COLUMNS: tuple[Column, ...] = (
    Column("time", "TIME", 5, lambda e: float(e.number), _when, most=19, rank=3),
    Column("ago", "AGO", 8, lambda e: float(e.number), _ago, rank=6, right=True),
    Column("level", "LEVEL", 1, lambda e: e.level, _level, most=7, rank=2, rising=True),
    Column("subject", "WHAT", 12, lambda e: e.subject, lambda e, w, m: span(safe(e.subject), "bold"), most=36, rank=0, rising=True),
    Column("text", "HAPPENED", 16, lambda e: e.text, lambda e, w, m: span(safe(e.text)), most=200, rank=0, rising=True),
)  # fmt: skip


def rows(model: Model) -> Sequence[Row]:
    """A row an event."""
    return rows_of(list(model.log), lambda e: f"{e.number:09d}", COLUMNS)


def detail(model: Model, row: Row, width: int, height: int) -> Detail:
    """One event, its text in full."""
    event: Event = row.item
    text = safe(event.text)
    lines: list[Line] = [(*_level(event, 8, model), *span("  "), *_when(event, 19, model))]
    lines += [span(text[i : i + width]) for i in range(0, len(text), width)]
    return Detail(safe(event.subject), "", lines)


VIEW = View("events", "Events", COLUMNS, rows, Order("time"), lambda _: "nothing has happened since kvtop started", detail=detail)
