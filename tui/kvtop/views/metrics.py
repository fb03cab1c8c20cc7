"""Metrics: every value of every stats segment, by name, so that nothing a writer publishes is hidden from the screen."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvtools.units import format_duration, format_rate, format_size
from kvtop.columns import Column, Order, Row, rows_of
from kvtop.model import Model
from kvtop.snapshot import Series
from kvtop.text import Line, graph, pairs, safe, span, spark, wrap
from kvtop.views.base import Detail, View, count, figure, nothing_in


@dataclass(frozen=True, slots=True)
class Value:
    """One published value."""

    writer: str
    series: Series
    value: float

    @property
    def key(self) -> str:
        return f"{self.writer}/{self.series.key}"


def shown(series: Series, value: float, *, rate: bool = False) -> str:
    """A value in the unit its writer gave."""
    if series.unit == "bytes" or (not series.unit and "bytes" in series.name):
        return format_rate(value) if rate else format_size(value)
    if series.unit == "seconds" and not rate:
        return format_duration(value)
    return f"{count(value)}/s" if rate else figure(value)


def _value(item: Value, width: int, model: Model) -> Line:
    return span(shown(item.series, item.value))


def _rate(item: Value, width: int, model: Model) -> Line:
    if item.series.kind != "counter":
        return ()
    rate = model.history.rate(item.key)
    return span("-", "dim") if rate is None else span(shown(item.series, rate, rate=True), "" if rate else "dim")


def _trend(item: Value, width: int, model: Model) -> Line:
    return span(spark(model.history.points(item.key, width), width, model.glyphs), "accent")


COLUMNS: tuple[Column, ...] = (
    Column("name", "NAME", 20, lambda v: v.series.key, lambda v, w, m: span(safe(v.series.key)), most=64, rank=0, rising=True),
    Column("value", "VALUE", 12, lambda v: v.value, _value, most=16, rank=1, right=True),
    Column("rate", "RATE", 11, lambda v: v.value, _rate, rank=3, right=True),
    Column("trend", "TREND", 12, lambda v: v.value, _trend, most=30, rank=5),
    Column("kind", "TYPE", 8, lambda v: v.series.kind, rank=6, rising=True),
    Column("writer", "WRITER", 12, lambda v: v.writer, most=28, rank=4, rising=True),
    Column(
        "help", "WHAT", 16, lambda v: v.series.help, lambda v, w, m: span(safe(v.series.help), "dim"), most=80, rank=8, rising=True
    ),
)


def rows(model: Model) -> Sequence[Row]:
    """A row a value; the buckets of histograms too."""
    if model.snapshot is None:
        return ()
    items = [
        Value(stats.name, series, value)
        for stats in model.snapshot.stats
        for series, value in zip(stats.schema, stats.values, strict=False)
    ]
    return rows_of(items, lambda item: item.key, COLUMNS)


def detail(model: Model, row: Row, width: int, height: int) -> Detail:
    """One value: what it means, and its course."""
    item: Value = row.item
    values = model.history.points(item.key, width)
    what = "per second" if item.series.kind == "counter" else "value"
    top = shown(item.series, max(values, default=0.0), rate=item.series.kind == "counter")
    words: list[tuple[str, Line]] = [
        ("value", span(shown(item.series, item.value), "bold")),
        ("type", span(item.series.kind)),
        ("by", span(safe(item.writer))),
    ]
    about = (
        pairs(words), span(safe(item.series.help or "no description"), "dim"), span(f"{what}, up to {top}", "dim")
    )  # fmt: skip
    lines = [line for told in about for line in wrap(told, width)]
    lines += graph(values, width, min(12, height - len(lines)), model.glyphs)
    return Detail(safe(item.series.key), "", lines)


VIEW = View(
    "metrics", "Metrics", COLUMNS, rows, Order("name", rising=True), nothing_in("nobody publishes numbers in {shm}"),
    detail=detail, pane=10,
)  # fmt: skip
