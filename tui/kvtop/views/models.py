"""Models and namespaces: what each holds, how it is used, whether it hits. Put together from every source that names one.

A model is named by its segments' owner files, by kvgate's numbers (label `model`), and by engines' own /metrics; a namespace by
any published value with the label `namespace`. A name that several sources know is one row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtools.units import format_size
from kvtop.columns import Column, Order, Row, rows_of
from kvtop.daemon import state_word
from kvtop.model import Model
from kvtop.snapshot import Snapshot, Stats
from kvtop.text import Line, bar, pairs, safe, span
from kvtop.views.base import Detail, View, amount, count, figure, grid_of, nothing_in, per_second, ratio

_LABELS = ("model", "namespace")


@dataclass(slots=True)
class Use:
    """What is known of one model or namespace."""

    name: str
    kind: str
    segments: list[str] = field(default_factory=list)
    used_bytes: int = 0
    held_bytes: int = 0
    limit_bytes: int = 0
    running: float | None = None
    waiting: float | None = None
    state: str = ""
    values: dict[str, float] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    hit_keys: tuple[str, str] = ("", "")
    hit_ratio: float | None = None

    @property
    def requests_key(self) -> str:
        return self.keys.get("requests_total", "")


def uses(model: Model) -> list[Use]:
    """Every model and namespace that some source names."""
    snapshot = model.snapshot
    if snapshot is None:
        return []
    found: dict[tuple[str, str], Use] = {}

    def use(kind: str, name: str) -> Use:
        return found.setdefault((kind, name), Use(name, kind))

    for segment in snapshot.segments:
        one = use("model", segment.model or "(not said)")
        one.segments.append(segment.name)
        one.used_bytes += segment.used_bytes
        one.held_bytes += segment.held_bytes
        one.limit_bytes += segment.limit_bytes
    for stats in snapshot.stats:
        _published(stats, use)
    _engines(snapshot, use)
    for one in found.values():
        hits, misses = one.values.get("hits_total"), one.values.get("misses_total")
        if hits is not None and misses is not None and hits + misses > 0:
            one.hit_ratio = hits / (hits + misses)
            one.hit_keys = one.keys["hits_total"], one.keys["misses_total"]
    return list(found.values())


def _published(stats: Stats, use: object) -> None:
    for series, value in zip(stats.schema, stats.values, strict=False):
        labels = dict(series.labels)
        kind = next((label for label in _LABELS if label in labels), "")
        if not kind or series.kind == "bucket":
            continue
        one: Use = use(kind, labels[kind])  # type: ignore[operator]
        name = series.name.removeprefix(f"{kind}_")  # kvd's figures of a namespace are namespace_hits_total and so on
        one.values[name] = one.values.get(name, 0.0) + value
        one.keys.setdefault(name, f"{stats.name}/{series.key}")
        if name == "bytes":
            one.held_bytes += int(value)
        if series.name == "state":
            one.state = state_word(series.help, value)
        elif series.name == "requests_running":
            one.running = value
        elif series.name == "requests_queued":
            one.waiting = value


def _engines(snapshot: Snapshot, use: object) -> None:
    for engine in snapshot.engines:
        if engine.problem or not engine.model:
            continue
        one: Use = use("model", engine.model)  # type: ignore[operator]
        one.running, one.waiting = engine.running, engine.waiting
        one.hit_keys = f"engine/{engine.url}/prefix_hits", f"engine/{engine.url}/prefix_queries"
        if engine.prefix_queries > 0:
            one.hit_ratio = engine.prefix_hits / engine.prefix_queries


def _name(use: Use, width: int, model: Model) -> Line:
    return span(safe(use.name), "bold")


def _segments(use: Use, width: int, model: Model) -> Line:
    return span(str(len(use.segments) or "-"))


def _held(use: Use, width: int, model: Model) -> Line:
    return amount(use.held_bytes) if use.segments or use.held_bytes else span("-", "dim")


def _limit(use: Use, width: int, model: Model) -> Line:
    return amount(use.limit_bytes) if use.segments else span("-", "dim")


def _bar(use: Use, width: int, model: Model) -> Line:
    if not use.segments:
        return ()
    prealloc = use.held_bytes - use.used_bytes
    return bar(width, [(use.used_bytes, "used"), (prealloc, "prealloc")], use.limit_bytes, model.glyphs)


def _number(name: str) -> object:
    def look(use: Use, width: int, model: Model) -> Line:
        value = getattr(use, name)
        return span("-", "dim") if value is None else span(count(value), "" if value else "dim")

    return look


def _requests(use: Use, width: int, model: Model) -> Line:
    rate = model.history.rate(use.requests_key)
    return span(per_second(rate), "" if rate else "dim")


def _hits(use: Use, width: int, model: Model) -> Line:
    return span(ratio(use.hit_ratio), "" if use.hit_ratio is not None else "dim")


COLUMNS: tuple[Column, ...] = (
    Column("name", "MODEL OR NAMESPACE", 18, lambda u: u.name, _name, most=48, rank=0, rising=True),
    Column("kind", "KIND", 9, lambda u: u.kind, rank=5, rising=True),
    Column("state", "STATE", 10, lambda u: u.state or None, rank=4, rising=True),
    Column("segments", "SEGMENTS", 8, lambda u: len(u.segments), _segments, rank=4, right=True),
    Column("held", "HELD", 9, lambda u: u.held_bytes, _held, rank=1, right=True),
    Column("limit", "LIMIT", 9, lambda u: u.limit_bytes, _limit, rank=2, right=True),
    Column("bar", "USAGE", 10, lambda u: u.held_bytes, _bar, most=36, rank=5),
    Column("running", "RUNNING", 7, lambda u: u.running, _number("running"), rank=3, right=True),  # type: ignore[arg-type]
    Column("waiting", "WAITING", 7, lambda u: u.waiting, _number("waiting"), rank=3, right=True),  # type: ignore[arg-type]
    Column("requests", "REQ/S", 8, lambda u: u.values.get("requests_total"), _requests, rank=3, right=True),
    Column("hits", "HITS", 7, lambda u: u.hit_ratio, _hits, rank=2, right=True),
)  # fmt: skip


def rows(model: Model) -> Sequence[Row]:
    """A row a model or namespace."""
    return rows_of(uses(model), lambda use: f"{use.kind}/{use.name}", COLUMNS)


def detail(model: Model, row: Row, width: int, height: int) -> Detail:
    """One model: its segments, and every value published under its name."""
    use: Use = row.item
    lines: list[Line] = []
    if use.segments:
        lines.append(pairs([("segments", span(safe(", ".join(use.segments))))]))
        lines.append(_bar(use, width, model))
    values = sorted(use.values.items())
    lines += grid_of([(safe(name), format_size(value) if "bytes" in name else figure(value)) for name, value in values], width)
    return Detail(safe(use.name), use.kind, lines)


VIEW = View(
    "models", "Models", COLUMNS, rows, Order("held"), nothing_in("no segment, gate or engine names a model"), detail=detail, pane=10
)
