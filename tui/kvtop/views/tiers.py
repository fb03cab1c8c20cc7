"""Tiers: every tier of every daemon, the arena first; below, one tier in full with its latencies."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvtools.output import visible_width
from kvtools.units import format_duration, format_rate, format_size
from kvtop.columns import Column, Order, Row, rows_of
from kvtop.daemon import Daemon, Tier, histograms, quantiles
from kvtop.model import Model
from kvtop.query import Value
from kvtop.text import Line, Span, bar, cell, clip_text, fit, graph, pairs, safe, span, spark, width_of, wrap
from kvtop.views.base import (
    NO_DAEMON,
    Detail,
    View,
    amount,
    count,
    figure,
    grid_of,
    load_style,
    per_second,
    percent,
    ratio,
)


@dataclass(frozen=True, slots=True)
class Level:
    """One place where values live: the arena, or a tier below it. The same columns for both."""

    daemon: Daemon
    name: str
    type: str
    used_bytes: float
    limit_bytes: float
    entries: float
    hits: float
    misses: float
    hit_key: str
    miss_key: str
    load_key: str
    store_key: str
    evict_key: str
    evictions: float
    corruptions: float
    broken: bool
    tier: Tier | None

    @property
    def key(self) -> str:
        return f"{self.daemon.name}/{self.name}"

    @property
    def known(self) -> bool:
        """Whether anybody can say what it holds."""
        return self.tier is None or self.tier.usage_known

    @property
    def share(self) -> float | None:
        return 100.0 * self.used_bytes / self.limit_bytes if self.limit_bytes > 0 and self.known else None

    @property
    def ratio(self) -> float | None:
        total = self.hits + self.misses
        return self.hits / total if total > 0 else None


def levels(model: Model) -> list[Level]:
    """The arena of each daemon and its tiers, in order."""
    out = []
    for daemon in model.daemons:
        out.append(_arena(daemon))
        out += [_tier(daemon, tier) for tier in daemon.tiers]
    return out


def _arena(daemon: Daemon) -> Level:
    return Level(
        daemon, "arena", "ram", daemon.get("arena_bytes_used"), daemon.get("arena_bytes_limit"), daemon.get("entries"),
        daemon.get("hits_total"), daemon.get("misses_total"), daemon.key("hits_total"), daemon.key("misses_total"),
        daemon.key("get_bytes_total"), daemon.key("set_bytes_total"), daemon.key("evictions_total"),
        daemon.get("evictions_total"), daemon.get("corruptions_total"), False, None,
    )  # fmt: skip


def _tier(daemon: Daemon, tier: Tier) -> Level:
    def key(name: str) -> str:
        return tier.keys.get(name, "")

    return Level(
        daemon, tier.name, tier.type, tier.used_bytes, tier.limit_bytes, tier.get("tier_entries"),
        tier.get("tier_hits_total"), tier.get("tier_misses_total"), key("tier_hits_total"), key("tier_misses_total"),
        key("tier_load_bytes_total"), key("tier_store_bytes_total"), key("tier_evictions_total"),
        tier.get("tier_evictions_total"), tier.get("tier_corruptions_total"), tier.broken, tier,
    )  # fmt: skip


def _name(level: Level, width: int, model: Model) -> Line:
    """Its name; with several daemons also the beginning of its daemon's, since that column goes first on narrow screens."""
    if len(model.daemons) < 2:
        return span(safe(level.name))
    mark = f"@{level.daemon.stats.instance[:4]}"
    return (Span(clip_text(safe(level.name), max(1, width - len(mark)), model.glyphs.ellipsis)), Span(mark, "dim"))


def _state(level: Level, width: int, model: Model) -> Line:
    glyphs = model.glyphs
    if level.broken:
        return span(f"{glyphs.bad} open", "bad")
    if level.daemon.stats.state != "fresh":
        return span(f"{glyphs.warn} {level.daemon.stats.state}", "warn")
    return span(f"{glyphs.good} ok", "good")


def _bar(level: Level, width: int, model: Model) -> Line:
    if not level.known:
        return span("nobody can say", "dim")
    if level.limit_bytes <= 0:
        return span("no capacity given", "dim")
    return bar(width, [(level.used_bytes, "used")], level.limit_bytes, model.glyphs)


def _used(level: Level, width: int, model: Model) -> Line:
    return amount(level.used_bytes) if level.known else span("?", "dim")


def _entries(level: Level, width: int, model: Model) -> Line:
    return span(count(level.entries)) if level.known else span("?", "dim")


def _size(name: str) -> object:
    def look(level: Level, width: int, model: Model) -> Line:
        value = getattr(level, name)
        return amount(value) if value or name == "used_bytes" else span("-", "dim")

    return look


def _throughput(name: str) -> object:
    def look(level: Level, width: int, model: Model) -> Line:
        rate = model.history.rate(getattr(level, name))
        return span("-", "dim") if rate is None else span(format_rate(rate), "" if rate else "dim")

    return look


def _hit(level: Level, width: int, model: Model) -> Line:
    now = model.history.ratio(level.hit_key, level.miss_key)
    return span(ratio(now), "bold") if now is not None else span(ratio(level.ratio), "dim")


def _trend(level: Level, width: int, model: Model) -> Line:
    return span(spark(model.history.ratios(level.hit_key, level.miss_key, width), width, model.glyphs, top=1.0), "accent")


def _percent(level: Level, width: int, model: Model) -> Line:
    return span(percent(level.share), load_style(level.share or 0.0, 101, 101))


def _evicted(level: Level, width: int, model: Model) -> Line:
    return span(per_second(model.history.rate(level.evict_key)))


def _corrupt(level: Level, width: int, model: Model) -> Line:
    return span(count(level.corruptions), "bad" if level.corruptions else "dim")


def _word(name: str) -> object:
    def value(level: Level) -> Value:
        return str(getattr(level, name))

    return value


COLUMNS: tuple[Column, ...] = (
    Column("name", "TIER", 12, lambda v: v.name, _name, most=20, rank=0, rising=True),
    Column("type", "TYPE", 8, lambda v: v.type, most=16, rank=5, rising=True),
    Column("state", "BREAKER", 9, lambda v: "open" if v.broken else "ok", _state, rank=2, rising=True),
    Column("used", "USED", 9, lambda v: v.used_bytes if v.known else None, _used, rank=1, right=True),
    Column("limit", "CAPACITY", 9, lambda v: v.limit_bytes or None, _size("limit_bytes"), rank=3, right=True),  # type: ignore[arg-type]
    Column("share", "FULL", 6, lambda v: v.share, _percent, rank=4, right=True),
    Column("bar", "USAGE", 10, lambda v: v.share, _bar, most=36, rank=6),
    Column("entries", "ENTRIES", 8, lambda v: v.entries if v.known else None, _entries, rank=5, right=True),
    Column("hit", "HITS", 7, lambda v: v.ratio, _hit, rank=1, right=True),
    Column("trend", "HIT RATE", 10, lambda v: v.ratio, _trend, most=24, rank=7),
    Column("load", "LOAD/S", 11, lambda v: v.hits, _throughput("load_key"), rank=3, right=True),  # type: ignore[arg-type]
    Column("store", "STORE/S", 11, lambda v: v.used_bytes, _throughput("store_key"), rank=3, right=True),  # type: ignore[arg-type]
    Column("evicted", "EVICT/S", 8, lambda v: v.evictions, _evicted, rank=6, right=True),
    Column("corrupt", "CORRUPT", 7, lambda v: v.corruptions, _corrupt, rank=5, right=True),
    Column("daemon", "DAEMON", 16, lambda v: v.daemon.name, rank=8, rising=True),
)


def above(model: Model, width: int, height: int) -> list[Line]:
    """GPU-direct, where anybody publishes numbers about it: what went direct, and what did not, with the reasons."""
    if model.snapshot is None or height <= 0:
        return []
    words: list[tuple[str, Line]] = []
    reasons: list[tuple[float, str]] = []
    for stats in model.snapshot.stats:
        for series, value in zip(stats.schema, stats.values, strict=False):
            if series.kind == "bucket" or not series.name.startswith("direct_"):
                continue
            if series.name == "direct_fallback_total":
                reasons.append((value, dict(series.labels).get("reason", "no reason given")))
            elif value:
                shown = format_size(value) if "bytes" in series.name else count(value)
                words.append((series.name.removeprefix("direct_").removesuffix("_total").replace("_", " "), span(shown)))
    if not words and not reasons:
        return []
    total = sum(value for value, _ in reasons)
    told = ", ".join(f"{safe(reason)} {count(value)}" for value, reason in sorted(reasons, reverse=True) if value)
    fallback = span(f"{model.glyphs.warn} {count(total)} ({told})", "warn") if total else span(f"{model.glyphs.good} none", "good")
    return [fit((Span("GPU-direct  ", "title"), *pairs([*words, ("fallback", fallback)])), width), ()][:height]


def rows(model: Model) -> Sequence[Row]:
    """A row a level."""
    return rows_of(levels(model), lambda level: level.key, COLUMNS)


def detail(model: Model, row: Row, width: int, height: int) -> Detail:
    """One level: latencies, throughput over time, and every value that carries the tier's name."""
    level: Level = row.item
    lines = [*wrap(_sums(level, model), width), *latencies(level, model, width)]
    left = height - len(lines)
    if left >= 4:
        load, store = model.history.points(level.load_key, width), model.history.points(level.store_key, width)
        values = [a + b for a, b in zip(load, store, strict=False)]
        lines += wrap(span(f"bytes a second, loads and stores, up to {format_rate(max(values, default=0.0))}", "dim"), width)
        lines += graph(values, width, min(8, max(3, left - 8)), model.glyphs)
    return Detail(f"{safe(level.name)} of {level.daemon.name}", level.type, lines + _values(level, width))


def _sums(level: Level, model: Model) -> Line:
    return pairs([
        ("used", _used(level, 9, model)), ("of", span(format_size(level.limit_bytes) if level.limit_bytes else "?")),
        ("hits", span(count(level.hits))), ("misses", span(count(level.misses))), ("rate", span(ratio(level.ratio), "bold")),
        ("evictions", span(count(level.evictions))), ("corrupt", _corrupt(level, 7, model)),
    ])  # fmt: skip


_QUANTILES = (0.5, 0.9, 0.99)


def latencies(level: Level, model: Model, width: int) -> list[Line]:
    """p50, p90, p99 of every histogram that belongs to this level (a tier's carry its label). Where a name and its numbers do
    not fit in one line, the numbers stand below."""
    found: list[tuple[str, Line]] = []
    for name, sets in histograms(level.daemon.stats).items():
        for labels in sets:
            if labels.get("tier", "arena") != level.name:
                continue
            values = quantiles(level.daemon.stats, name, _QUANTILES, labels)
            rest = ",".join(f"{k}={v}" for k, v in labels.items() if k not in ("tier", "type"))
            shown = name.removesuffix("_bucket")  # as Prometheus calls the whole
            title = safe(f"{shown}{{{rest}}}" if rest else shown)
            if values is None:
                found.append((title, span("nothing yet", "dim")))
                continue
            # Each number in columns of its own, so that they stand below each other whatever they are.
            words = [
                (f"p{round(100 * q)}", span(format_duration(value).ljust(7))) for q, value in zip(_QUANTILES, values, strict=True)
            ]
            found.append((title, pairs(words, gap=" ")))
    label = max((visible_width(title) for title, _ in found), default=0)
    numbers = max((width_of(line) for _, line in found), default=0)
    if label + 2 + numbers <= width:
        return [(Span(cell(title, label) + "  ", "dim"), *line) for title, line in found]
    out: list[Line] = []
    for title, line in found:
        out += [*wrap(span(title, "dim"), width), *wrap((Span("  "), *line), width, hang=2)]
    return out


def _values(level: Level, width: int) -> list[Line]:
    """Everything else that is published under this tier's name, so that nothing is hidden."""
    if level.tier is None:
        source = {k: v for k, v in level.daemon.values.items() if not k.startswith("tier_")}
    else:
        source = dict(level.tier.values)
    names = sorted(source)
    return grid_of(
        [
            (safe(name.removeprefix("tier_")), format_size(source[name]) if "bytes" in name else figure(source[name]))
            for name in names
        ],
        width,
    )


VIEW = View(
    "tiers", "Tiers", COLUMNS, rows, Order("name", rising=True), NO_DAEMON,
    above=above, detail=detail, pane=16,
)  # fmt: skip
