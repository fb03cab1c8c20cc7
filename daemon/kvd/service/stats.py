"""The stats segment: names, meanings, and how they are filled.

One table makes everything an operator sees: `kvd stats`, `kvtop`, `kvdoctor` and scrapers read the segment, `Client.stats`
answers from the same rows. A row is a metric and a function that reads its value; publishing is a loop over the rows.
The segment is refreshed within PUBLISH_S of a request, and its heartbeat at least twice a second.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvd.service.histogram import Histogram
from kvd.service.server import Server
from kvd.store.extents import PAGE
from kvd.store.retention import Retention
from kvd.store.store import Store
from kvd.tiers.tier import Tier
from kvd.tiers.tiering import Tiering
from kvtools.segments.files import SHM
from kvtools.segments.stats import Metric, StatsReading, StatsWriter

PUBLISH_S = 0.05
KIND = "kvd"
REASONS = (
    "no_room",
    "busy",
    "too_large",
    "oversize",
    "lease_lost",
    "retention_none",
    "expired",
    "draining",
)
"""Why a put may be refused."""

Row = tuple[Metric, Callable[[], float]]


def rows(store: Store, tiering: Tiering, server: Server, tokens: Callable[[], int]) -> list[Row]:
    """Every metric of the daemon with the function that reads it."""
    table: list[Row] = []

    def counter(name: str, unit: str, help_: str, read: Callable[[], float], **labels: str) -> None:
        table.append((Metric(name, "counter", unit, help_, labels), read))

    def gauge(name: str, unit: str, help_: str, read: Callable[[], float], **labels: str) -> None:
        table.append((Metric(name, "gauge", unit, help_, labels), read))

    counts, leases, arena, index = store.counts, store.leases, store.arena, store.index
    counter("sets_total", "", "Values stored.", lambda: counts.sets)
    counter("gets_total", "", "Keys asked for in order to read them.", lambda: counts.gets)
    counter("hits_total", "", "Of these, found in the arena or in a tier.", lambda: counts.hits)
    counter("misses_total", "", "Of these, not found.", lambda: counts.misses)
    counter("set_bytes_total", "bytes", "Bytes of the values stored.", lambda: counts.set_bytes)
    counter("get_bytes_total", "bytes", "Bytes of the values found.", lambda: counts.get_bytes)
    counter("evictions_total", "", "Values evicted from the arena to make room.", lambda: counts.evictions)
    counter("evictions_unwritten_total", "", "Of these, evicted before a broken tier had taken them.", lambda: counts.evicted_dirty)
    counter("expirations_total", "", "Values whose time to live had passed.", lambda: counts.expirations)
    counter("deletes_total", "", "Values deleted on request.", lambda: counts.deletes)
    counter("promotions_total", "", "Values brought up from a tier.", lambda: counts.promotions)
    counter(
        "corruptions_total",
        "",
        "Values that a tier returned damaged: misses.",
        lambda: sum(t.adapter.counters.corruptions for t in tiering.tiers),
    )
    for reason in REASONS:
        counter("rejections_total", "", "Puts refused.", lambda r=reason: counts.rejections.get(r, 0), reason=reason)  # type: ignore[misc]
    counter("leases_revoked_total", "", "Read leases ended by their deadline.", lambda: leases.revoked)
    counter("bad_frames_total", "", "Frames that were no valid request.", lambda: server.bad_frames)
    counter("refused_peers_total", "", "Connections refused for their uid and gid.", lambda: server.refused_peers)
    gauge("entries", "", "Values in the arena.", lambda: index.entries)
    gauge("arena_bytes_used", "bytes", "Pages lent or holding values.", lambda: arena.used_bytes)
    gauge("arena_bytes_limit", "bytes", "Size of the arena.", lambda: arena.capacity)
    gauge(
        "arena_bytes_largest_free",
        "bytes",
        "The largest value that fits without an eviction.",
        lambda: arena.extents.largest() * PAGE,
    )
    for klass in Retention:
        if klass is not Retention.NONE:
            word = klass.name.lower()
            gauge("entries_by_retention", "", "Values in the arena by class.", lambda k=klass: index.live[k], retention=word)  # type: ignore[misc]
    gauge("leases_active", "", "Read leases open.", lambda: len(leases.reads))
    gauge("tokens_active", "", "Prefixes pinned and not claimed yet.", tokens)
    gauge("quarantine_bytes", "bytes", "Extents whose writer may still be copying.", lambda: leases.quarantine_pages * PAGE)
    gauge("connections", "", "Clients connected.", lambda: len(server.connections))
    gauge("namespaces", "", "Namespaces seen.", lambda: len(index.spaces))
    gauge("draining", "", "1 while no new writes are taken.", lambda: int(store.draining))
    for tier in tiering.tiers:
        table += _tier_rows(tier)
    return table


def _tier_rows(tier: Tier) -> list[Row]:
    adapter, labels = tier.adapter, {"tier": tier.name, "type": tier.adapter.type}
    gauges: dict[str, tuple[str, str, Callable[[], float]]] = {
        "bytes_used": ("bytes", "Bytes the tier holds.", lambda: tier.adapter.usage().bytes_used),
        "bytes_limit": ("bytes", "Bytes it may hold (0: no limit known).", lambda: tier.adapter.usage().bytes_limit),
        "entries": ("", "Values it holds.", lambda: tier.adapter.usage().entries),
        "queue": ("", "Changes waiting for it.", lambda: len(tier.queue)),
        "breaker_open": ("", "1 while it is left alone because it failed or hangs.", lambda: int(tier.broken)),
    }
    totals: dict[str, tuple[str, str, Callable[[], float]]] = {
        "hits": ("", "Values loaded from it.", lambda: adapter.counters.hits),
        "misses": ("", "Loads it could not answer.", lambda: adapter.counters.misses),
        "stores": ("", "Values stored to it.", lambda: adapter.counters.stores),
        "store_bytes": ("bytes", "Bytes of these.", lambda: adapter.counters.store_bytes),
        "store_failures": ("", "Values it did not take.", lambda: adapter.counters.store_failures),
        "load_bytes": ("bytes", "Bytes loaded.", lambda: adapter.counters.load_bytes),
        "evictions": ("", "Values it dropped to make room.", lambda: adapter.counters.evictions),
        "corruptions": ("", "Values found damaged.", lambda: adapter.counters.corruptions),
        "io_errors": ("", "Failed reads and writes.", lambda: adapter.counters.io_errors),
        "breaker_opened": ("", "Times it was left alone.", lambda: tier.breaker.opened_total),
    }
    loads, stores = Histogram(), Histogram()
    tier.load_s.append(loads.observe)
    tier.store_s.append(stores.observe)
    made: list[Row] = [(Metric(f"tier_{n}", "gauge", u, h, labels), read) for n, (u, h, read) in gauges.items()]
    made += [(Metric(f"tier_{n}_total", "counter", u, h, labels), read) for n, (u, h, read) in totals.items()]
    made += loads.rows("tier_load_seconds", "How long loads of a batch took.", labels)
    made += stores.rows("tier_store_seconds", "How long stores of a batch took.", labels)
    return made


class Publisher:
    """Writes the rows into the stats segment."""

    def __init__(self, table: list[Row], instance: str, *, root: Path = SHM) -> None:
        self.table = table
        self.writer = StatsWriter(KIND, instance, [metric for metric, _ in table], root=root)
        self._cells = [(self.writer.index(metric.name, **metric.labels), read) for metric, read in table]
        self.publish()

    def publish(self) -> None:
        """All values as they are now, and the heartbeat."""
        writer = self.writer
        with writer.update():
            for i, read in self._cells:
                writer.set(i, read())
        writer.heartbeat()

    def close(self) -> None:
        self.writer.close()


def as_dict(values: list[tuple[str, Mapping[str, str], float]]) -> dict[str, Any]:
    """The shape of `kvd stats --json`: plain names as they are, one object a tier, other labels as objects by label value."""
    body: dict[str, Any] = {}
    tiers: dict[str, dict[str, Any]] = {}
    for name, labels, value in values:
        if "tier" in labels:
            row = tiers.setdefault(labels["tier"], {"name": labels["tier"], "type": labels.get("type", "")})
            if "le" in labels:
                row.setdefault(name.removeprefix("tier_"), {})[labels["le"]] = value
            else:
                row[name.removeprefix("tier_")] = value
        elif labels:
            body.setdefault(name, {})["/".join(labels.values())] = value
        else:
            body[name] = value
    body["tiers"] = list(tiers.values())
    return body


def of_rows(table: list[Row]) -> dict[str, Any]:
    """`as_dict` of a live table."""
    return as_dict([(metric.name, metric.labels, read()) for metric, read in table])


def of_reading(reading: StatsReading) -> dict[str, Any]:
    """`as_dict` of a segment."""
    return as_dict([(m.name, m.labels, v) for m, v in zip(reading.schema, reading.values, strict=True)])
