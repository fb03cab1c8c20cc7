"""Segments: who holds KV memory, how much of its limit, and since when. The table of the overview and of view 2."""

import math
import time
from collections.abc import Sequence

from kvtools.units import format_duration, format_rate, format_size
from kvtop.columns import Column, Order, Row, rows_of
from kvtop.model import Model
from kvtop.query import Value
from kvtop.snapshot import DEAD, LIVE, Segment
from kvtop.text import Line, Span, bar, graph, pairs, safe, span, spark, wrap
from kvtop.views.base import Detail, View, amount, load_style, nothing, nothing_in, percent

_WORDS = {LIVE: "live", DEAD: "stale", "unknown": "unknown"}


def state_cell(segment: Segment, width: int, model: Model) -> Line:
    """Liveness as glyph and word."""
    glyphs = model.glyphs
    mark, style = {LIVE: (glyphs.good, "good"), DEAD: (glyphs.bad, "bad")}.get(segment.owner, (glyphs.unknown, "dim"))
    return span(mark if width < 4 else f"{mark} {_WORDS[segment.owner]}", style)


def name_cell(segment: Segment, width: int, model: Model) -> Line:
    """The name, tagged ones marked."""
    if segment.name in model.tags:
        return (Span(model.glyphs.tag + " ", "key"), Span(safe(segment.name), "bold"))
    return span(safe(segment.name), "bold")


def usage_bar(segment: Segment, width: int, model: Model) -> Line:
    """used | prealloc | free of the limit."""
    style = "bad" if segment.free_bytes < 0 else "used"
    return bar(width, [(segment.used_bytes, style), (segment.prealloc_bytes, "prealloc")], segment.limit_bytes, model.glyphs)


def _share(segment: Segment, width: int, model: Model) -> Line:
    if math.isinf(segment.share):  # no percentage of a limit of 0
        return span(f"{model.glyphs.over}over", "bad")
    mark = model.glyphs.over if segment.share > 100 else ""
    return span(f"{mark}{percent(segment.share)}", load_style(segment.share, 95))


def _free(segment: Segment, width: int, model: Model) -> Line:
    return span(format_size(segment.free_bytes), "bad" if segment.free_bytes < 0 else "")


def _trend(segment: Segment, width: int, model: Model) -> Line:
    values = model.history.points(f"segment/{segment.name}/used", width)
    return span(spark(values, width, model.glyphs, top=max(segment.limit_bytes, *values, 1.0)), "used")


def _slope(segment: Segment, width: int, model: Model) -> Line:
    slope = model.history.slope(f"segment/{segment.name}/used")
    if not slope or abs(slope) < 1:
        return span(model.glyphs.same if slope is not None else "-", "dim")
    return span(("+" if slope > 0 else "") + format_rate(slope))


def _limit(segment: Segment, width: int, model: Model) -> Line:
    pending = bool(segment.limits) and segment.limits[-1].state in ("pending", "deferred")
    return (Span(format_size(segment.limit_bytes)), Span("*" if pending else " ", "warn"))


def _devices(segment: Segment) -> Value:
    return " ".join(segment.devices) or None


def _used(segment: Segment, width: int, model: Model) -> Line:
    return amount(segment.used_bytes)


def _prealloc(segment: Segment, width: int, model: Model) -> Line:
    return amount(segment.prealloc_bytes)


COLUMNS: tuple[Column, ...] = (
    Column("name", "SEGMENT", 12, lambda s: s.name, name_cell, most=34, rank=0, rising=True),
    Column("state", "OWNER", 9, lambda s: s.owner, state_cell, rank=3, rising=True),
    Column("used", "USED", 9, lambda s: s.used_bytes, _used, rank=1, right=True),
    Column("prealloc", "PREALLOC", 9, lambda s: s.prealloc_bytes, _prealloc, rank=4, right=True),
    Column("limit", "LIMIT ", 10, lambda s: s.limit_bytes, _limit, rank=2, right=True),
    Column("share", "HELD", 6, lambda s: s.share, _share, rank=1, right=True),
    Column("bar", "USAGE", 10, lambda s: s.share, usage_bar, most=48, rank=3),
    Column("trend", "TREND", 12, lambda s: s.used_bytes, _trend, most=40, rank=6),
    Column("free", "FREE", 9, lambda s: s.free_bytes, _free, rank=7, right=True),
    Column("change", "CHANGE/S", 12, lambda s: s.used_bytes, _slope, rank=7, right=True),
    Column("pid", "PID", 8, lambda s: s.pid or None, rank=6, right=True),
    Column("engine", "ENGINE", 9, lambda s: s.engine or None, rank=7, rising=True),
    Column("model", "MODEL", 14, lambda s: s.model or None, most=32, rank=8, rising=True),
    Column("gpu", "DEVICE", 10, _devices, most=24, rank=9, rising=True),
    Column("ranks", "RANK", 8, lambda s: s.ranks or None, rank=9, rising=True),
)


def rows(model: Model) -> list[Row]:
    """A row a segment."""
    return rows_of(model.snapshot.segments if model.snapshot else (), lambda s: s.name, COLUMNS)


def detail(model: Model, row: Row, width: int, height: int) -> Detail:
    """Everything about one segment: the numbers first, then the graph, then its limits."""
    segment: Segment = row.item
    lines = _numbers(segment, width, model)
    limits = _limits(segment, model)
    graph_rows = min(16, height - len(lines) - 1 - min(len(limits), 4))
    if graph_rows >= 2:
        key = f"segment/{segment.name}/used"
        values = model.history.points(key, width)
        lines.append(span(f"used, last {format_duration(model.history.covered_s(key, width))}", "dim"))
        lines += graph(values, width, graph_rows, model.glyphs, top=max(segment.limit_bytes, *values, 1.0))
    return Detail(safe(segment.name), segment.owner, lines + limits)


def _numbers(segment: Segment, width: int, model: Model) -> list[Line]:
    overview = pairs(
        [
            ("used", span(format_size(segment.used_bytes), "bold")),
            ("prealloc", span(format_size(segment.prealloc_bytes))),
            ("limit", _limit(segment, width, model)),
            ("held", _share(segment, width, model)),
            ("over by", span(format_size(-segment.free_bytes), "bad"))
            if segment.free_bytes < 0
            else ("free", span(format_size(segment.free_bytes))),
        ]
    )
    about: list[tuple[str, Line]] = [
        ("owner", (*state_cell(segment, 9, model), Span(f"  {segment.story}" if segment.story else "", "dim")))
    ]
    for label, value in (
        ("engine", segment.engine),
        ("model", segment.model),
        ("rank", segment.ranks),
        ("on", " ".join(segment.devices)),
    ):
        if value:
            about.append((label, span(safe(value))))
    sizes: list[tuple[str, Line]] = []
    if segment.capacity_bytes:
        sizes.append(("started with", span(format_size(segment.capacity_bytes))))
    if segment.page_bytes:
        sizes.append(("page", span(format_size(segment.page_bytes))))
    lines = [usage_bar(segment, width, model), *wrap(overview, width), *wrap(pairs(about), width)]
    return [*lines, *wrap(pairs(sizes), width)] if sizes else lines


def _limits(segment: Segment, model: Model) -> list[Line]:
    """The limits it was given, newest first."""
    if not segment.limits:
        return [span("no record of limits: this segment has no owner file", "dim")] if segment.owner == "unknown" else []
    out = [span("limits, newest first", "dim")]
    for note in reversed(segment.limits):
        when = time.strftime("%H:%M:%S", time.localtime(note.at_s))
        ago = format_duration(max(0.0, model.now_s - note.at_s))
        style = {"applied": "good", "pending": "warn", "deferred": "warn"}.get(note.state, "")
        why = f": {note.reason}" if note.reason else ""
        out.append(
            (Span(f"{when}  "), Span(format_size(note.limit_bytes).rjust(9), "bold"), Span("  "), Span(note.state, style),
             Span(f"{safe(why)}  by {safe(note.by)}, {ago} ago", "dim"))
        )  # fmt: skip
    return out


def segment_view(view_id: str, title: str, above: object = nothing, pane: int = 0, *, spare: bool = False) -> View:
    """The segments table as a view; the overview and view 2 differ in what is around it."""
    return View(
        view_id, title, COLUMNS, rows, Order("used"),
        nothing_in("no segments in {shm}: an engine with the elastic pool makes one when it starts"),
        above=above, detail=detail, pane=pane, spare=spare,  # type: ignore[arg-type]
    )  # fmt: skip


VIEW = segment_view("segments", "Segments", pane=14)


def totals(segments: Sequence[Segment]) -> tuple[int, int, int]:
    """(used, prealloc, limit) summed over the segments that may still be alive."""
    counted = [s for s in segments if s.owner != DEAD]
    return sum(s.used_bytes for s in counted), sum(s.prealloc_bytes for s in counted), sum(s.limit_bytes for s in counted)
