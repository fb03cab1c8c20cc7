"""The stats segment: names, meanings, and how they are filled.

One table makes everything an operator sees: `kvd stats`, `kvtop`, `kvdoctor` and scrapers read the segment, `Client.stats`
answers from the same rows. A row is a metric and a function that reads its value; publishing is a loop over the rows.
The segment is refreshed within PUBLISH_S of a request, and its heartbeat at least twice a second.

Three groupings beside the daemon's own figures: by tier, by retention class, by namespace. Tiers and classes are fixed;
namespaces come and go, so their rows are made anew, at most every RESHAPE_S, when another namespace has an account. How many
have one is bounded (`store.accounts`); the label is the first 12 hex digits, as `kvd keys` prints them.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kvd.service.direct import DirectDesk
from kvd.service.histogram import Changing, Histogram, Row
from kvd.service.operations import Operations
from kvd.service.server import Server
from kvd.store.accounts import Account
from kvd.store.extents import PAGE
from kvd.store.index import Index
from kvd.store.retention import Retention
from kvd.store.reuse import SCALES
from kvd.store.store import Store
from kvd.tiers.tier import Tier
from kvd.tiers.tiering import Tiering
from kvd.wire import protocol as p
from kvtools import __version__
from kvtools.errors import Unreachable
from kvtools.segments.files import SHM
from kvtools.segments.stats import OTHER, Metric, StatsReading, StatsWriter

log = logging.getLogger("kvd.stats")

PUBLISH_S = 0.05
RESHAPE_S = 2.0
LABEL_DIGITS = 12
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
    "full",
    "io_error",
    "evicted",
)
"""Why a put may be refused."""


class Table:
    """Every metric of the daemon with the function that reads it. `version` changes when there are other rows."""

    def __init__(self, store: Store, tiering: Tiering, server: Server, operations: Operations) -> None:
        self._store, self._index = store, store.index
        self._fixed = [
            *_store_rows(store, tiering, lambda: len(operations.tokens)),
            *_retention_rows(store),
            *_service_rows(server, operations, store),
        ]
        for tier in tiering.tiers:
            self._fixed += _tier_rows(tier)
            if tier.adapter.capabilities.direct_extents:
                self._fixed += _direct_rows(tier)
            if "keys_unknown" in tier.adapter.counters.extra:
                self._fixed += _serde_rows(tier)
        self._fixed += _desk_rows(operations.direct)
        self._fixed += _size_rows(store)

    @property
    def version(self) -> object:
        return self._index.accounts.version, self._index.reuse.largest

    def rows(self) -> list[Row]:
        """All of them as they are now."""
        return [*self._fixed, *_namespace_rows(self._index), *_namespace_size_rows(self._store)]


def _makers(table: list[Row]) -> tuple[Callable[..., None], Callable[..., None]]:
    """`counter` and `gauge`: each adds a row to `table`."""

    def counter(name: str, unit: str, help_: str, read: Callable[[], float], **labels: str) -> None:
        table.append(Row(Metric(name, "counter", unit, help_, labels), read))

    def gauge(name: str, unit: str, help_: str, read: Callable[[], float], **labels: str) -> None:
        table.append(Row(Metric(name, "gauge", unit, help_, labels), read))

    return counter, gauge


def _store_rows(store: Store, tiering: Tiering, tokens: Callable[[], int]) -> list[Row]:
    table: list[Row] = []
    counter, gauge = _makers(table)
    counts, leases, arena, index = store.counts, store.leases, store.arena, store.index
    counter("sets_total", "", "Values stored.", lambda: counts.sets)
    counter("gets_total", "", "Keys asked for in order to read them.", lambda: counts.gets)
    counter("hits_total", "", "Of these, found in the arena or in a tier.", lambda: counts.hits)
    counter("misses_total", "", "Of these, not found.", lambda: counts.misses)
    counter("set_bytes_total", "bytes", "Bytes of the values stored.", lambda: counts.set_bytes)
    counter("get_bytes_total", "bytes", "Bytes of the values found.", lambda: counts.get_bytes)
    counter("evictions_total", "", "Values evicted from the arena to make room.", lambda: counts.evictions)
    counter("evictions_unwritten_total", "", "Of these, evicted before a broken tier had taken them.", lambda: counts.evicted_dirty)
    counter("evictions_ahead_total", "", "Of these, because the arena was above its watermark.", lambda: counts.evictions_ahead)
    counter("released_total", "", "Values that left the arena because tiers hold them (skip_l1).", lambda: counts.released)
    counter("expirations_total", "", "Values whose time to live had passed.", lambda: counts.expirations)
    counter("deletes_total", "", "Values deleted on request.", lambda: counts.deletes)
    counter("moves_total", "", "Values moved inside the arena to bring free pages together.", lambda: counts.moves)
    counter("move_bytes_total", "bytes", "Bytes of these.", lambda: counts.move_bytes)
    counter("promotions_total", "", "Values brought up from a tier.", lambda: counts.promotions)
    counter("policy_errors_total", "", "Answers that a policy failed to give.", lambda: tiering.policies.errors)
    counter("tick_errors_total", "", "Times that periodic work has failed.", lambda: counts.tick_errors)
    counter(
        "corruptions_total",
        "",
        "Values that a tier returned damaged: misses.",
        lambda: sum(t.adapter.counters.corruptions for t in tiering.tiers),
    )
    counter("leases_revoked_total", "", "Read leases ended by their deadline.", lambda: leases.revoked)
    gauge("entries", "", "Values in the arena.", lambda: index.entries)
    gauge("arena_bytes_used", "bytes", "Pages lent or holding values.", lambda: arena.used_bytes)
    gauge("arena_bytes_limit", "bytes", "Size of the arena.", lambda: arena.capacity)
    gauge("arena_bytes_ready", "bytes", "Of these, faulted in so far.", lambda: arena.ready_bytes)
    gauge("arena_huge_pages", "", "1 while the arena has the huge pages that were asked for.", lambda: int(arena.huge))
    gauge("arena_locked", "", "1 while it is locked in memory, as was asked for.", lambda: int(arena.locked))
    gauge(
        "arena_numa", "", "1 while its pages come from the NUMA node that was asked for.", lambda: int(arena.numa_node is not None)
    )
    gauge(
        "arena_bytes_largest_free",
        "bytes",
        "The largest value that fits without an eviction or a move.",
        lambda: arena.extents.largest() * PAGE,
    )
    gauge("leases_active", "", "Read leases open.", lambda: len(leases.reads))
    gauge("tokens_active", "", "Prefixes pinned and not claimed yet.", tokens)
    gauge("quarantine_bytes", "bytes", "Extents whose writer may still be copying.", lambda: leases.quarantine_pages * PAGE)
    gauge("namespaces", "", "Namespaces seen.", lambda: len(index.spaces))
    gauge("draining", "", "1 while no new writes are taken.", lambda: int(store.draining))
    return table


def _retention_rows(store: Store) -> list[Row]:
    table: list[Row] = []
    counter, gauge = _makers(table)
    index, counts = store.index, store.counts
    for klass in Retention:
        if klass is Retention.NONE:
            continue
        word = {"retention": klass.name.lower()}
        gauge("entries_by_retention", "", "Values in the arena by class.", lambda k=klass: index.live[k], **word)
        gauge("bytes_by_retention", "bytes", "Bytes of these.", lambda k=klass: index.live_bytes[k], **word)
        counter("sets_by_retention_total", "", "Values stored by class.", lambda k=klass: counts.sets_by[k], **word)
        counter("evictions_by_retention_total", "", "Values evicted by class.", lambda k=klass: counts.evictions_by[k], **word)
    return table


def _service_rows(server: Server, operations: Operations, store: Store) -> list[Row]:
    table: list[Row] = []
    counter, gauge = _makers(table)
    for reason in REASONS:
        counter("rejections_total", "", "Puts refused.", lambda r=reason: store.counts.rejections.get(r, 0), reason=reason)
    for code in p.CODES:
        counter("failures_total", "", "Requests answered with an error.", lambda c=code: server.failures.get(c, 0), code=code)
    counter("bad_frames_total", "", "Frames that were no valid request.", lambda: server.bad_frames)
    counter("refused_peers_total", "", "Connections refused for their uid and gid.", lambda: server.refused_peers)
    gauge("connections", "", "Clients connected.", lambda: len(server.connections))
    started = int(time.time())
    gauge("start_time_seconds", "seconds", "When the daemon started, in unix time.", lambda: started)
    gauge("build_info", "", "1, with the version as a label.", lambda: 1, version=__version__)
    for word, seconds in operations.seconds.items():
        table += seconds.rows("operation_seconds", "Time from a request's arrival to its answer.", {"op": word})
    return table


class _Held:
    """What one namespace's rows change with: its figures, and what it holds."""

    def __init__(self, index: Index, account: Account) -> None:
        self.index, self.account = index, account

    def entries(self) -> int:
        space = self.index.spaces.get(self.account.name)
        return len(space.slots) if space is not None else 0

    def bytes(self) -> int:
        space = self.index.spaces.get(self.account.name)
        return space.bytes if space is not None else 0

    @property
    def changes(self) -> object:
        return self.account.changes, self.entries(), self.bytes()


class _Others(_Held):
    """The same of all namespaces that have no account of their own, together."""

    def _shown(self) -> list[_Held]:
        return [_Held(self.index, account) for account in self.index.accounts.own.values()]

    def entries(self) -> int:
        return self.index.entries - sum(held.entries() for held in self._shown())

    def bytes(self) -> int:
        return sum(self.index.live_bytes) - sum(held.bytes() for held in self._shown())


def _namespace_rows(index: Index) -> list[Row]:
    accounts = index.accounts
    table: list[Row] = []
    taken = {OTHER}
    for account in [*accounts.own.values(), accounts.other]:
        held = _Held(index, account) if account is not accounts.other else _Others(index, account)
        short = account.name.hex()[:LABEL_DIGITS]
        label = OTHER if account is accounts.other else short if short not in taken else account.name.hex()
        taken.add(label)
        for name, kind, unit, help_, read in _figures(held, account):
            table.append(Row(Metric(f"namespace_{name}", kind, unit, help_, {"namespace": label}), read, held))
    return table


def _size_rows(store: Store) -> list[Row]:
    """What `kvd size` shows: how much would be found with more RAM, or less."""
    table: list[Row] = []
    counter, gauge = _makers(table)
    reuse = store.index.reuse
    gauge("size_sampled_keys", "", "Keys whose uses are watched, to tell what another size would do.", lambda: reuse.watched)
    gauge("size_sample_per_million", "", "Keys in a million that are watched.", lambda: round(1e6 * reuse.rate))
    counter("size_uses_total", "", "Uses of these.", lambda: reuse.uses_total)
    return table + [_size_row("all", None, store, scale) for scale in SCALES]


def _namespace_size_rows(store: Store) -> list[Row]:
    largest = store.index.reuse.largest
    return [_size_row(account.name.hex()[:LABEL_DIGITS], account, store, scale) for account in largest for scale in SCALES]


def _size_row(namespace: str, account: Account | None, store: Store, scale: float) -> Row:
    help_ = "Share of the bytes used that an LRU arena of so many times the size would have had; -1: not known yet."
    metric = Metric("size_hit_share", "gauge", "", help_, {"namespace": namespace, "arena": f"{scale:g}"}, float=True)
    reuse, capacity = store.index.reuse, scale * store.arena.capacity

    def read() -> float:
        share = reuse.share(capacity, account)
        return -1.0 if share is None else share

    return Row(metric, read, reuse)


def _figures(held: _Held, account: Account) -> Sequence[tuple[str, str, str, str, Callable[[], float]]]:
    return (
        ("entries", "gauge", "", "Values in the arena by namespace.", held.entries),
        ("bytes", "gauge", "bytes", "Bytes of these.", held.bytes),
        ("hits_total", "counter", "", "Keys read and found, by namespace.", lambda: account.hits),
        ("misses_total", "counter", "", "Keys read and not found, by namespace.", lambda: account.misses),
        ("get_bytes_total", "counter", "bytes", "Bytes of the values found, by namespace.", lambda: account.get_bytes),
        ("sets_total", "counter", "", "Values stored, by namespace.", lambda: account.sets),
        ("set_bytes_total", "counter", "bytes", "Bytes of the values stored, by namespace.", lambda: account.set_bytes),
        ("evictions_total", "counter", "", "Values evicted from the arena, by namespace.", lambda: account.evictions),
    )


def _desk_rows(desk: DirectDesk) -> list[Row]:
    table: list[Row] = []
    counter, gauge = _makers(table)
    gauge("direct_leases_active", "", "Read leases on extents of files (GPU-direct).", lambda: len(desk.leases))
    gauge("direct_loans_active", "", "Extents of files lent for writing (GPU-direct).", lambda: len(desk.loans))
    gauge("direct_loans_quarantined", "", "Of these, such whose borrower may still be writing.", lambda: desk.quarantine)
    counter("direct_leases_revoked_total", "", "Read leases on extents ended by their deadline.", lambda: desk.revoked)
    return table


def _direct_rows(tier: Tier) -> list[Row]:
    """What only a tier with files of regions counts: work that went past the daemon (it is in the other counters too), losses."""
    table: list[Row] = []
    counter, _ = _makers(table)
    labels = {"tier": tier.name, "type": tier.adapter.type}
    totals = {
        "direct_stores": ("", "Values that engines wrote to it past the daemon."),
        "direct_store_bytes": ("bytes", "Bytes of these."),
        "direct_loads": ("", "Values that engines read from it past the daemon."),
        "direct_load_bytes": ("bytes", "Bytes of these."),
        "direct_given_back": ("", "Extents lent for writing and given back without a value."),
        "unchecked": ("", "Values stored without a checksum."),
        "given_up": ("", "Values a start gave up, because what says which of them are deleted was lost."),
    }
    for name, (unit, text) in totals.items():
        counter(f"tier_{name}_total", unit, text, partial(_extra, tier, name), **labels)
    return table


def _serde_rows(tier: Tier) -> list[Row]:
    """What only a tier counts that encodes its values."""
    table: list[Row] = []
    counter, _ = _makers(table)
    text = "Loads of values that are encrypted with a key that is not configured."
    counter("tier_keys_unknown_total", "", text, partial(_extra, tier, "keys_unknown"), tier=tier.name, type=tier.adapter.type)
    return table


def _extra(tier: Tier, name: str) -> float:
    return tier.adapter.counters.extra.get(name, 0)


def _tier_rows(tier: Tier) -> list[Row]:
    adapter, labels = tier.adapter, {"tier": tier.name, "type": tier.adapter.type}
    gauges: dict[str, tuple[str, str, Callable[[], float]]] = {
        "bytes_used": ("bytes", "Bytes the tier holds.", lambda: tier.adapter.usage().bytes_used),
        "bytes_limit": ("bytes", "Bytes it may hold (0: no limit known).", lambda: tier.adapter.usage().bytes_limit),
        "entries": ("", "Values it holds.", lambda: tier.adapter.usage().entries),
        "usage_known": ("", "0 where nobody can say what the tier holds.", lambda: int(tier.adapter.usage().known)),
        "queue": ("", "Changes waiting for it, deletes among them.", lambda: len(tier.queue)),
        "waiting": ("", "Values of the arena on their way to it.", lambda: tier.waiting),
        "untaken": ("", "Values of the arena that it has refused and that were not stored since.", lambda: len(tier.untaken)),
        "breaker_open": ("", "1 while it is left alone because it failed or hangs.", lambda: int(tier.broken)),
        "parts_down": ("", "Of its directories, where it has several: those that do not work.", lambda: adapter.parts_down),
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
        "copies": ("", "Values it was given because a later tier had them.", lambda: tier.copied),
        "breaker_opened": ("", "Times it was left alone.", lambda: tier.breaker.opened_total),
    }
    loads, stores = Histogram(), Histogram()
    tier.load_s.append(loads.observe)
    tier.store_s.append(stores.observe)
    made = [Row(Metric(f"tier_{n}", "gauge", u, h, labels), read) for n, (u, h, read) in gauges.items()]
    made += [Row(Metric(f"tier_{n}_total", "counter", u, h, labels), read) for n, (u, h, read) in totals.items()]
    part = "Share of the bytes it may hold; -1 where no limit is known."
    made.append(Row(Metric("tier_usage_fraction", "gauge", "", part, labels, float=True), lambda: adapter.usage().fraction))
    made += loads.rows("tier_load_seconds", "How long loads of a batch took.", labels)
    made += stores.rows("tier_store_seconds", "How long stores of a batch took.", labels)
    return made


class Publisher:
    """Writes the rows into the stats segment."""

    def __init__(self, table: Table, instance: str, *, root: Path = SHM) -> None:
        self.table = table
        self.rows = table.rows()
        self._version = table.version
        self._reshaped = time.monotonic()
        self.writer = StatsWriter(KIND, instance, [row.metric for row in self.rows], root=root)
        self._cells = self._group()
        self.publish()

    def _group(self) -> list[tuple[Changing | None, list[tuple[int, Callable[[], float]]]]]:
        """Cells of the segment, those that change together in one group."""
        groups: list[tuple[Changing | None, list[tuple[int, Callable[[], float]]]]] = []
        for row in self.rows:
            if not groups or groups[-1][0] is not row.of:
                groups.append((row.of, []))
            groups[-1][1].append((self.writer.index_of(row.metric), row.read))
        self._seen: list[object] = [None] * len(groups)
        return groups

    def publish(self) -> None:
        """All values as they are now, and the heartbeat."""
        if self._version != self.table.version and time.monotonic() - self._reshaped > RESHAPE_S:
            self.reshape()
        writer, seen = self.writer, self._seen
        with writer.update():
            for number, (of, cells) in enumerate(self._cells):
                if of is not None:
                    if (changes := of.changes) == seen[number]:
                        continue
                    seen[number] = changes
                for i, read in cells:
                    writer.set(i, read())
        writer.heartbeat()

    def reshape(self) -> None:
        """Other namespaces have accounts now: the segment gets their rows. Without room in shared memory it stays as it is."""
        self._reshaped = time.monotonic()
        version, rows = self.table.version, self.table.rows()
        try:
            self.writer.reshape([row.metric for row in rows])
        except Unreachable as error:
            log.warning("the stats segment keeps its rows: %s", error.message)
            return
        self._version, self.rows = version, rows
        self._cells = self._group()

    def close(self) -> None:
        self.writer.close()


def as_dict(values: list[tuple[str, Mapping[str, str], float]]) -> dict[str, Any]:
    """The shape of `kvd stats --json`: plain names as they are, one object a tier, other labels as objects by label value.

    A histogram's buckets are an object by bound, in that of its label.
    """
    body: dict[str, Any] = {}
    tiers: dict[str, dict[str, Any]] = {}
    for name, labels, value in values:
        if "tier" in labels:
            row = tiers.setdefault(labels["tier"], {"name": labels["tier"], "type": labels.get("type", "")})
            if "le" in labels:
                row.setdefault(name.removeprefix("tier_"), {})[labels["le"]] = value
            else:
                row[name.removeprefix("tier_")] = value
        elif "le" in labels:
            label = "/".join(word for kind, word in labels.items() if kind != "le")
            body.setdefault(name, {}).setdefault(label, {})[labels["le"]] = value
        elif labels:
            body.setdefault(name, {})["/".join(labels.values())] = value
        else:
            body[name] = value
    body["tiers"] = list(tiers.values())
    return body


def of_rows(table: list[Row]) -> dict[str, Any]:
    """`as_dict` of a live table."""
    return as_dict([(row.metric.name, row.metric.labels, row.read()) for row in table])


def of_reading(reading: StatsReading) -> dict[str, Any]:
    """`as_dict` of a segment."""
    return as_dict([(m.name, m.labels, v) for m, v in zip(reading.schema, reading.values, strict=True)])
