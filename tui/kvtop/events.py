"""What changed between two ticks, in words: the log behind view 6.

`changes(before, after)` compares two snapshots; the model keeps the last `KEPT` events. An event is something an operator would
want to have been told: a limit changed, an engine died, a breaker opened, corruption was found. Pure.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from kvtools.units import format_size
from kvtop.connectors import values_of
from kvtop.daemon import daemon_of, state_word
from kvtop.snapshot import DEAD, FRESH, GONE, LIVE, SILENT, Segment, Snapshot, Stats

KEPT = 1000
INFO, WARN, CRIT = "info", "warn", "crit"
REMOVED = "removed"
_NO_FILES = ("gpu", "engines", "recording")
"""Sources of problems that are no file in shared memory."""


@dataclass(frozen=True, slots=True)
class Event:
    """One line of the log."""

    number: int
    time_s: float
    level: str
    subject: str
    text: str


def changes(before: Snapshot, after: Snapshot) -> Iterator[tuple[str, str, str]]:
    """(level, subject, text) for all that happened from one snapshot to the next."""
    yield from _segments(before, after)
    yield from _writers(before, after)
    yield from _sources(before, after)


def limit_text(before_bytes: int, after_bytes: int) -> str:
    """How a changed limit is told."""
    return f"limit {format_size(before_bytes)} -> {format_size(after_bytes)}"


def _segments(before: Snapshot, after: Snapshot) -> Iterator[tuple[str, str, str]]:
    old = {segment.name: segment for segment in before.segments}
    new = {segment.name: segment for segment in after.segments}
    for name, segment in new.items():
        if name not in old:
            yield INFO, name, f"appeared, limit {format_size(segment.limit_bytes)}"
        else:
            yield from _segment(old[name], segment)
    damaged = {problem.source for problem in after.problems}  # still there, and told as what is wrong with it
    for name in sorted(old.keys() - new.keys() - damaged):
        yield (INFO if old[name].owner == DEAD else WARN), name, REMOVED


def _segment(old: Segment, new: Segment) -> Iterator[tuple[str, str, str]]:
    if old.limit_bytes != new.limit_bytes:
        note = new.limits[-1] if new.limits != old.limits and new.limits else None
        who = f" by {note.by}" if note and note.by and note.limit_bytes == new.limit_bytes else ""
        yield INFO, new.name, limit_text(old.limit_bytes, new.limit_bytes) + who
    if old.owner == LIVE and new.owner == DEAD:
        yield WARN, new.name, f"its engine died (pid {old.pid})" if old.pid else "its engine died"
    elif old.owner != LIVE and new.owner == LIVE:
        yield INFO, new.name, f"taken over by pid {new.pid}" if new.pid else "has an owner now"
    if old.limit_bytes and old.free_bytes >= 0 > new.free_bytes:
        yield WARN, new.name, f"over its limit by {format_size(-new.free_bytes)}"
    elif old.free_bytes < 0 <= new.free_bytes:
        yield INFO, new.name, "back under its limit"


def _writers(before: Snapshot, after: Snapshot) -> Iterator[tuple[str, str, str]]:
    old = {stats.name: stats for stats in before.stats}
    new = {stats.name: stats for stats in after.stats}
    for name, stats in new.items():
        if name not in old:
            yield INFO, name, f"started (pid {stats.pid})"
            continue
        was = old[name]
        if was.pid != stats.pid or was.created_s != stats.created_s:
            yield WARN, name, f"restarted (pid {was.pid} -> {stats.pid})"
        yield from _state(was, stats)
        if stats.kind == "kvd":
            yield from _daemon(was, stats)
        elif stats.kind == "connector":
            yield from _connector(was, stats)
        elif stats.kind == "gate":
            yield from _gate(was, stats)
    for name in old.keys() - new.keys():
        yield (INFO if old[name].state == GONE else WARN), name, "gone"


def _state(was: Stats, now: Stats) -> Iterator[tuple[str, str, str]]:
    if was.state == now.state:
        return
    if now.state == SILENT:
        yield CRIT if now.kind == "kvd" else WARN, now.name, "silent: no heartbeat"
    elif now.state == GONE:
        yield CRIT if now.kind == "kvd" else WARN, now.name, f"its writer ended (pid {now.pid})"
    elif now.state == FRESH and was.state in (SILENT, GONE):
        yield INFO, now.name, "answers again"


def _daemon(was: Stats, now: Stats) -> Iterator[tuple[str, str, str]]:
    old, new = daemon_of(was), daemon_of(now)
    if was.pid == now.pid:
        found = new.get("corruptions_total") - old.get("corruptions_total")
        if found > 0:
            yield CRIT, new.name, f"{found:,.0f} corrupt values found (each was a miss)"
    tiers = {tier.name: tier for tier in old.tiers}
    for tier in new.tiers:
        before = tiers.get(tier.name)
        if before is None:
            continue
        if tier.broken and not before.broken:
            yield WARN, f"{new.name} tier {tier.name}", "degraded: circuit breaker opened"
        elif before.broken and not tier.broken:
            yield INFO, f"{new.name} tier {tier.name}", "works again: circuit breaker closed"
        found = tier.get("tier_corruptions_total") - before.get("tier_corruptions_total")
        if found > 0 and was.pid == now.pid:
            yield CRIT, f"{new.name} tier {tier.name}", f"{found:,.0f} corrupt values found on it"


_CONNECTOR_FAULTS = (
    ("load_failures_total", "loads failed and were recomputed"),
    ("errors_total", "errors inside the connector"),
)


def _connector(was: Stats, now: Stats) -> Iterator[tuple[str, str, str]]:
    old, new = values_of(was), values_of(now)
    if old.get("daemon_up") and new.get("daemon_up") == 0:
        yield WARN, now.name, "lost its daemon: the engine serves on, cold"
    elif old.get("daemon_up") == 0 and new.get("daemon_up"):
        yield INFO, now.name, "has its daemon again"
    for name, text in _CONNECTOR_FAULTS:
        grown = new.get(name, 0.0) - old.get(name, 0.0)
        if grown > 0 and was.pid == now.pid:
            yield WARN, now.name, f"{grown:,.0f} {text}"


def _gate(was: Stats, now: Stats) -> Iterator[tuple[str, str, str]]:
    """A model behind kvgate that went to sleep, woke or failed."""
    before, after = _states(was), _states(now)
    for name, word in after.items():
        if name in before and before[name] != word:
            yield (WARN if word == "failed" else INFO), f"model {name}", f"{before[name]} -> {word}"


def _states(stats: Stats) -> dict[str, str]:
    states = [
        (dict(series.labels), series.help, value)
        for series, value in zip(stats.schema, stats.values, strict=False)
        if series.name == "state"
    ]
    return {labels["model"]: state_word(text, value) for labels, text, value in states if "model" in labels}


def _sources(before: Snapshot, after: Snapshot) -> Iterator[tuple[str, str, str]]:
    old = {problem.source: problem.message for problem in before.problems}
    new = {problem.source: problem.message for problem in after.problems}
    for source, message in new.items():
        if source not in old:
            yield WARN, source, message
    there = {one.name for one in after.segments} | {f"kvtools.{one.name}" for one in after.stats}
    for source in old.keys() - new.keys():
        yield INFO, source, "readable again" if source in there or "/" in source or source in _NO_FILES else REMOVED
