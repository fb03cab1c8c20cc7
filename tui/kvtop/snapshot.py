"""What one tick saw: immutable types, nothing but data.

A `Snapshot` is made by a reader (`kvtop.source`, or `kvtop.record` in a replay) on its own thread and never changes after, so the
screen, the history and a recorder may all hold it without a lock. Every part may be missing: a host without a GPU, daemon,
engine or readable segment gives empty tuples and `problems`, never an exception.

The types are msgspec structs because recordings hold them: fields are only ever *added*, each with a default, and unknown
ones are skipped, so any version reads any other's recording (kvtop/record.py; tests/cases/kvtop holds a file of each version).
Bytes are integers, times are unix seconds (`_s`).
"""

import math
from collections.abc import Sequence

import msgspec

LIVE, DEAD, UNKNOWN = "live", "stale", "unknown"
"""A segment's owner (kvctl's words): holds its lock, is gone (stale), or nothing is known (kvcached's have no sidecar)."""

FRESH, STALE, SILENT, GONE = "fresh", "stale", "silent", "gone"
"""A stats segment: fresh; stale (no stable reading in 8 tries); silent (heartbeat old); gone (its writer let go of the lock)."""


class LimitNote(msgspec.Struct, frozen=True, kw_only=True):
    """One limit a segment was given, from its owner sidecar."""

    limit_bytes: int
    by: str = ""
    at_s: float = 0.0
    state: str = ""
    """pending, deferred or applied."""
    reason: str = ""


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """One pool segment: what an engine holds, and may hold."""

    name: str
    limit_bytes: int
    used_bytes: int
    prealloc_bytes: int
    owner: str = UNKNOWN
    pid: int = 0
    engine: str = ""
    model: str = ""
    devices: tuple[str, ...] = ()
    ranks: str = ""
    capacity_bytes: int = 0
    """What the engine started with; 0 where nobody recorded it."""
    page_bytes: int = 0
    limits: tuple[LimitNote, ...] = ()
    """Limits it was given, oldest first; empty where nobody records them."""
    story: str = ""
    """What is known of its owner, in words: 'pid 812 runs'."""

    @property
    def held_bytes(self) -> int:
        """Physical memory: pages in use and pages kept ready."""
        return self.used_bytes + self.prealloc_bytes

    @property
    def free_bytes(self) -> int:
        """What the limit still allows; negative when a lowered limit is not yet obeyed."""
        return self.limit_bytes - self.held_bytes

    @property
    def share(self) -> float:
        """held / limit, in percent; above 100 when over. Anything held with a limit of 0 is infinitely over."""
        if self.limit_bytes <= 0:
            return math.inf if self.held_bytes else 0.0
        return 100.0 * self.held_bytes / self.limit_bytes


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """One value's description, from a stats segment's schema."""

    name: str
    kind: str = "gauge"
    """counter, gauge or bucket."""
    unit: str = ""
    help: str = ""
    labels: tuple[tuple[str, str], ...] = ()

    @property
    def key(self) -> str:
        """name{label=value,...}: the same spelling in history, alerts, the metrics view and JSON."""
        if not self.labels:
            return self.name
        return f"{self.name}{{{','.join(f'{k}={v}' for k, v in self.labels)}}}"


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """One stats segment. `schema` is the same object from tick to tick while the segment's file is."""

    kind: str
    instance: str
    schema: tuple[Series, ...] = ()
    values: tuple[float, ...] = ()
    pid: int = 0
    created_s: float = 0.0
    heartbeat_s: float = 0.0
    state: str = FRESH

    @property
    def name(self) -> str:
        """kind.instance, unique on a host."""
        return f"{self.kind}.{self.instance}"


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU; `source` says who was asked (nvml, amdsmi, sysfs). -1 is unknown."""

    index: int
    name: str = ""
    uuid: str = ""
    total_bytes: int = -1
    used_bytes: int = -1
    busy_percent: float = -1.0
    temperature_c: float = -1.0
    power_w: float = -1.0
    source: str = ""


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """A process that owns a segment or writes stats."""

    pid: int
    role: str = ""
    command: str = ""
    user: str = ""
    state: str = ""
    cpu_percent: float = -1.0
    rss_bytes: int = 0
    threads: int = 0
    started_s: float = 0.0
    holds: tuple[str, ...] = ()
    """Names of its segments and stats segments."""


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine's own /metrics says (only where --metrics names its address)."""

    url: str
    model: str = ""
    running: float = 0.0
    waiting: float = 0.0
    cache_used: float = -1.0
    """0..1 of the engine's KV cache."""
    prefix_queries: float = 0.0
    prefix_hits: float = 0.0
    generated: float = 0.0
    problem: str = ""


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """A source that could not be read, in one line."""

    source: str
    message: str


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One tick. `time_s` is the wall clock, `mono_s` a clock that never steps (rates use that one)."""

    time_s: float
    mono_s: float
    host: str = ""
    segments: tuple[Segment, ...] = ()
    stats: tuple[Stats, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    processes: tuple[Process, ...] = ()
    engines: tuple[Engine, ...] = ()
    shm_total_bytes: int = 0
    shm_free_bytes: int = 0
    problems: tuple[Problem, ...] = ()
    took_s: float = 0.0
    """How long reading it took."""
    shm: str = ""
    """The folder that was read; empty in recordings of a time that did not say."""


def finite(values: Sequence[float]) -> tuple[float, ...]:
    """`values` with 0 for what is no number: a writer's 0/0 must not reach arithmetic, or JSON, which has no NaN."""
    if all(map(math.isfinite, values)):
        return tuple(values)
    return tuple(value if math.isfinite(value) else 0.0 for value in values)
