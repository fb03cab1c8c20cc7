"""Segments in shared memory, through the toolkit's own readers: no socket, no privilege.

Heartbeats are turned into ages here, so that rules need no clock and a capture stays true.
"""

import math
import time
from pathlib import Path
from typing import Any

from kvdoctor.collect.source import Source
from kvdoctor.facts import SegmentFact
from kvdoctor.parse import shape

KEPT = (
    *("corruptions_total", "gets_total", "hits_total", "entries", "arena_bytes_used", "arena_bytes_limit", "quarantine_bytes"),
    *("leases_revoked_total", "evictions_unwritten_total", "rejections_total", "draining", "connections"),
    *("tier_breaker_open", "tier_io_errors_total", "tier_store_failures_total", "tier_corruptions_total"),
    *(
        "direct_fallback_total",
        "direct_load_bytes_total",
        "direct_save_bytes_total",
        "daemon_up",
        "loads_total",
        "load_failures_total",
        "saves_total",
        "save_failures_total",
    ),
    *("lookups_total", "lookup_failures_total", "hit_tokens_total", "errors_total", "down_total"),
)
"""Values that a rule looks at; the rest stays where it is."""


def scan(root: Path, now_ns: int) -> list[dict[str, Any]]:
    """Every pool, stats segment, leftover and unreadable file of `root`."""
    from kvtools.errors import KvError
    from kvtools.segments.discover import look

    try:
        found = look(root, timeout_s=0.2)
    except KvError as error:
        return [{"name": str(root), "kind": "folder", "health": "broken", "detail": error.message}]
    rows: list[dict[str, Any]] = []
    for state in found.pools:
        health = {"live": "ok", "stale": "stale"}.get(state.state, "unknown")
        rows.append({"name": state.name, "kind": "pool", "health": health, "detail": state.evidence})
    for item in found.stats:
        reading = item.reading
        if reading.superseded:
            continue
        age = max(0.0, (now_ns - reading.heartbeat_ns) / 1e9)
        values = {
            metric.name + "".join(f"{{{name}={label}}}" for name, label in sorted(metric.labels.items())): value
            for metric, value in zip(reading.schema, reading.values, strict=True)
            if metric.name in KEPT and math.isfinite(value)
        }
        health = "stale" if item.state == "stale" else "frozen" if age > FROZEN_S else "ok"
        rows.append(
            {
                "name": item.name,
                "kind": reading.kind,
                "health": health,
                "detail": item.evidence,
                "age_s": round(age, 1),
                "values": values,
            }
        )
    known = {row["name"] for row in rows}
    for left in found.leftovers:
        if left.name not in known:
            rows.append({"name": left.name, "kind": left.kind, "health": "stale", "detail": left.evidence})
    rows += [{"name": bad.name, "kind": "segment", "health": "broken", "detail": bad.error.message} for bad in found.problems]
    return rows


FROZEN_S = 10.0
"""A writer beats once a second; ten seconds of silence under a held lock is a hang."""


def collect_segments(source: Source) -> list[SegmentFact]:
    """Segments of this host, or of a capture."""

    def ask() -> list[dict[str, Any]]:
        place = Path(source.host_path(source.shm))
        return [] if source.foreign and not place.is_dir() else scan(place, time.time_ns())

    answer = source.value("segments", ask)
    found = []
    for row in shape.objects(answer):
        values = shape.mapping(row.get("values"))
        found.append(
            SegmentFact(
                name=str(row.get("name", "")),
                kind=str(row.get("kind", "")),
                health=str(row.get("health", "")),
                detail=str(row.get("detail", "")),
                folder=source.shm,
                age_s=shape.number(row.get("age_s")),
                values={name: number for name, value in values.items() if (number := shape.number(value)) is not None},
            )
        )
    return found
