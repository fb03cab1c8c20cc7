"""What is wrong right now, as a list, and the one health word over it.

Two kinds of alert, one list. *Facts* need no threshold: a dead owner, a silent daemon, an open breaker, corrupt values, a
source that cannot be read. *Rules* compare a measure with a number and may be set, changed or
switched off (`--alert`, configuration):

    segment.share>=95          the measures below, or any published name (leases_active, tier_bytes_used, ...)
    hit_rate<0.5:crit          warn unless it says crit
    rate(rejections_total)>0   per second, for counters
    segment.share=off          no rule for this measure

The health word is OK, WARN or CRIT, or EMPTY where there is nothing to watch. `--once --check` turns it into an exit status. Pure.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvtools.errors import UsageError
from kvtools.units import format_size
from kvtop.connectors import connectors_of, values_of
from kvtop.daemon import Daemon
from kvtop.history import History
from kvtop.query import TESTS, number_of
from kvtop.snapshot import DEAD, GONE, SILENT, STALE, Snapshot

WARN, CRIT = "warn", "crit"
OK, WARNING, CRITICAL, EMPTY = "OK", "WARN", "CRIT", "EMPTY"

FRESH = 300
"""Readings for which corruption that was found is news (five minutes); after that it is a number to ask about."""

_RULE = re.compile(r"(rate\()?([a-z_][a-z0-9_.]*)\)?\s*(>=|<=|!=|=|>|<)\s*([^:]+)(?::(warn|crit))?", re.IGNORECASE)

MEASURES: dict[str, str] = {
    "segment.share": "percent of its limit that a segment holds (used and preallocated)",
    "segment.free": "bytes a segment may still take",
    "arena.share": "percent of the arena in use",
    "hit_rate": "0 to 1, over the last 30 readings",
    "tier.share": "percent of a tier's capacity in use",
    "gpu.share": "percent of a GPU's memory in use",
    "gpu.temperature": "degrees Celsius",
    "shm.free_percent": "percent of /dev/shm that is free",
    "quarantine.share": "percent of the arena waiting for lost writers",
}
"""Measures that rules may name, besides every published value."""


@dataclass(frozen=True, slots=True)
class Rule:
    """measure, test, number -> level."""

    measure: str
    test: str
    number: float
    level: str = WARN
    rate: bool = False

    def __str__(self) -> str:
        name = f"rate({self.measure})" if self.rate else self.measure
        return f"{name}{self.test}{self.number:g}:{self.level}"


@dataclass(frozen=True, slots=True)
class Alert:
    """One thing that is wrong, with what."""

    level: str
    subject: str
    text: str


DEFAULTS: tuple[Rule, ...] = (
    Rule("segment.share", ">=", 95.0),
    Rule("shm.free_percent", "<", 5.0),
    Rule("quarantine.share", ">", 25.0),
    Rule("rejections_total", ">", 0.0, WARN, rate=True),
    Rule("direct_fallback_total", ">", 0.0, WARN, rate=True),
    Rule("load_failures_total", ">", 0.0, WARN, rate=True),
)


def parse_rule(text: str) -> Rule | str:
    """A rule, or the name of a measure to switch off ('segment.share=off'). Raises UsageError."""
    name, equals, word = text.partition("=")
    if equals and word.strip().lower() == "off":
        return name.strip()
    found = _RULE.fullmatch(text.strip())
    if not found or bool(found.group(1)) != (")" in text):
        raise UsageError(
            f"not an alert: {text!r}",
            hint="write MEASURE>NUMBER, such as segment.share>=90, hit_rate<0.5:crit or rate(rejections_total)>0",
        )
    rate, measure, test, number, level = found.groups()
    value = number_of(number)
    if value is None:
        raise UsageError(
            f"alert {text!r}: not a number: {number.strip()!r}", hint="write a number or a size, such as 90, 0.5 or 4G"
        )
    return Rule(measure, test, value, (level or WARN).lower(), bool(rate))


def rules_from(texts: Sequence[str]) -> tuple[Rule, ...]:
    """The defaults, changed by `texts`: a rule for a measure replaces the default for it."""
    made = [parse_rule(text) for text in texts]
    named = {rule if isinstance(rule, str) else rule.measure for rule in made}
    return tuple(rule for rule in DEFAULTS if rule.measure not in named) + tuple(rule for rule in made if isinstance(rule, Rule))


def alerts_of(snapshot: Snapshot, daemons: Sequence[Daemon], history: History, rules: Sequence[Rule]) -> list[Alert]:
    """Everything that is wrong, worst first."""
    found = [*_facts(snapshot, daemons, history), *_broken_rules(snapshot, daemons, history, rules)]
    return sorted(found, key=lambda alert: alert.level != CRIT)


def health_of(snapshot: Snapshot, alerts: Sequence[Alert]) -> str:
    """The one word."""
    if any(alert.level == CRIT for alert in alerts):
        return CRITICAL
    if alerts:
        return WARNING
    return OK if snapshot.segments or snapshot.stats else EMPTY


def _facts(snapshot: Snapshot, daemons: Sequence[Daemon], history: History) -> Iterator[Alert]:
    for segment in snapshot.segments:
        if segment.owner == DEAD:
            yield Alert(
                WARN, segment.name, f"its engine is gone, {format_size(segment.held_bytes)} in its numbers are stale (kvctl prune)"
            )
    for stats in snapshot.stats:
        if stats.state == SILENT:
            late = max(0.0, snapshot.time_s - stats.heartbeat_s)
            yield Alert(
                CRIT if stats.kind == "kvd" else WARN, stats.name, f"silent for {late:.0f} s: the process is stopped or stuck"
            )
        elif stats.state == GONE:
            yield Alert(CRIT if stats.kind == "kvd" else WARN, stats.name, "its writer is gone")
        elif stats.state == STALE:
            yield Alert(WARN, stats.name, "no stable reading: its writer is busy or died inside an update")
    for stats in connectors_of(snapshot).fresh:
        values = values_of(stats)
        if values.get("daemon_up") == 0:
            yield Alert(WARN, stats.name, "its daemon is not there: the engine serves on, cold")
        if broken := values.get("errors_total"):
            yield Alert(
                WARN,
                stats.name,
                f"{broken:,.0f} error{'s' * (broken != 1)} inside the connector, each with a traceback in the engine's log",
            )
    for daemon in daemons:
        if daemon.stats.state == GONE:
            continue
        yield from _corruption(daemon, history)
        for tier in daemon.tiers:
            if tier.broken:
                yield Alert(WARN, f"{daemon.name} tier {tier.name}", "circuit breaker open: the tier fails and is left out")
    for problem in snapshot.problems:
        yield Alert(WARN, problem.source, problem.message)
    for engine in snapshot.engines:
        if engine.problem:
            yield Alert(WARN, engine.url, engine.problem)


def _corruption(daemon: Daemon, history: History) -> Iterator[Alert]:
    total = daemon.get("corruptions_total")
    if total <= 0:
        return
    fresh = any(rate > 0 for rate in history.points(daemon.key("corruptions_total"), FRESH))
    text = f"{total:,.0f} corrupt values found" + (", some just now" if fresh else " since it started") + " (each was a miss)"
    yield Alert(CRIT if fresh else WARN, daemon.name, text)


def _broken_rules(snapshot: Snapshot, daemons: Sequence[Daemon], history: History, rules: Sequence[Rule]) -> Iterator[Alert]:
    for rule in rules:
        if rule not in DEFAULTS and rule.measure not in MEASURES and snapshot.stats and not _known(rule.measure, snapshot):
            # A typo in what watches over a host must not be silence.
            yield Alert(WARN, "alert", f"{rule.measure} is no measure, and nobody publishes it: this rule never fires")
        for subject, value in _measure(rule, snapshot, daemons, history):
            if TESTS[rule.test](value, rule.number):
                yield Alert(rule.level, subject, _sentence(rule, value))


def _sentence(rule: Rule, value: float) -> str:
    if rule.measure == "segment.share":
        over = " (over its limit: the engine has not given back yet)" if value > 100 else ""
        return f"holds {f'{value:.0f} % of its limit' if math.isfinite(value) else 'memory with a limit of 0'}{over}"
    if rule.measure == "shm.free_percent":
        return f"only {value:.1f} % free"
    name = f"{rule.measure} per second" if rule.rate else rule.measure
    return f"{name} is {value:.4g} ({rule.test}{rule.number:.4g})"


def _measure(rule: Rule, snapshot: Snapshot, daemons: Sequence[Daemon], history: History) -> Iterator[tuple[str, float]]:
    match rule.measure:
        case "segment.share":
            # The fullest first: small screens have room for one.
            held = sorted((s for s in snapshot.segments if s.owner != DEAD), key=lambda s: -s.share)
            yield from ((s.name, s.share) for s in held)
        case "segment.free":
            yield from ((s.name, float(s.free_bytes)) for s in snapshot.segments if s.owner != DEAD)
        case "arena.share":
            yield from (
                (d.name, share)
                for d in daemons
                if (share := _share(d.get("arena_bytes_used"), d.get("arena_bytes_limit"))) is not None
            )
        case "quarantine.share":
            yield from (
                (d.name, share)
                for d in daemons
                if (share := _share(d.get("quarantine_bytes"), d.get("arena_bytes_limit"))) is not None
            )
        case "hit_rate":
            for daemon in daemons:
                ratio = history.ratio(daemon.key("hits_total"), daemon.key("misses_total"))
                ratio = daemon.hit_ratio if ratio is None else ratio
                if ratio is not None:
                    yield daemon.name, ratio
        case "tier.share":
            for daemon in daemons:
                for tier in daemon.tiers:
                    if (share := _share(tier.used_bytes, tier.limit_bytes)) is not None:
                        yield f"{daemon.name} tier {tier.name}", share
        case "gpu.share":
            yield from (
                (f"gpu{g.index}", 100.0 * g.used_bytes / g.total_bytes) for g in snapshot.gpus if g.total_bytes > 0 <= g.used_bytes
            )
        case "gpu.temperature":
            yield from ((f"gpu{g.index}", g.temperature_c) for g in snapshot.gpus if g.temperature_c >= 0)
        case "shm.free_percent":
            if (share := _share(snapshot.shm_free_bytes, snapshot.shm_total_bytes)) is not None:
                yield "shared memory", share
        case name:
            yield from _published(name, rule.rate, snapshot, history)


def _known(name: str, snapshot: Snapshot) -> bool:
    return any(metric.name == name for stats in snapshot.stats for metric in stats.schema)


def _published(name: str, rate: bool, snapshot: Snapshot, history: History) -> Iterator[tuple[str, float]]:
    for stats in snapshot.stats:
        for series, value in zip(stats.schema, stats.values, strict=False):
            if series.name != name or series.kind == "bucket":
                continue
            label = ",".join(v for _, v in series.labels)
            if rate:
                value = history.rate(f"{stats.name}/{series.key}") or 0.0
            yield f"{stats.name} {label}".rstrip(), value


def _share(part: float, whole: float) -> float | None:
    return 100.0 * part / whole if whole > 0 else None
