"""The format of a stats segment (FORMAT.md, "Stats segment"): constants, the schema's entries, one reading.

What writer and reader share, and nothing else: no file is opened here.
"""

import functools
import os
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from kvtools.errors import UsageError
from kvtools.segments.files import STATS_PREFIX, process_story

# In shared memory, read by any version of any reader: do not change.
MAGIC = b"KVTSTAT1"
HEADER = struct.Struct("<8sIIIIQQQQQQ")
HEADER_BYTES = 128
SUPERSEDED = 1
COUNT_OFFSET, FLAGS_OFFSET, HEARTBEAT_OFFSET, SEQUENCE_OFFSET = 16, 20, 56, 64
FLAGS_WORD, HEARTBEAT_WORD, SEQUENCE_WORD = COUNT_OFFSET // 8, HEARTBEAT_OFFSET // 8, SEQUENCE_OFFSET // 8

MAX_LABEL_SETS = 64
"""Label sets a metric may have; the rest are counted together under the label value OTHER."""

OTHER = "other"
READ_ATTEMPTS = 8
TYPES = ("counter", "gauge", "bucket")

# Bounds on what a reader accepts from a file that anybody may have written.
MAX_FILE_BYTES = 16 << 20
MAX_VALUES = 1 << 16

MASK = (1 << 64) - 1
_KIND = re.compile(r"[a-z][a-z0-9_-]{0,31}")
_INSTANCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_NO_LABELS: Mapping[str, str] = MappingProxyType({})

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Metric:
    """One value's description. `unit` is a word such as "bytes", "seconds" or "" ; `float` makes it an IEEE double.

    Counters only grow; gauges are never negative unless `float`; buckets are cumulative and carry the label `le`.
    """

    name: str
    type: str
    unit: str
    help: str
    labels: Mapping[str, str] = field(default_factory=dict)
    float: bool = False

    @functools.cached_property
    def identity(self) -> tuple[str, Labels]:
        return self.name, tuple(sorted(self.labels.items()))


@dataclass(frozen=True)
class StatsReading:
    """One look at a stats segment: who writes it, whether that writer lives, the schema and its values in order."""

    name: str
    kind: str
    instance: str
    pid: int
    pid_start: int
    pid_namespace: int
    created_ns: int
    heartbeat_ns: int
    superseded: bool
    alive: bool
    """A writer holds the life lock. The pid is information only: it may mean another process by now."""
    stale: bool
    """No consistent state in 8 attempts: the values may mix two moments (a writer died inside an update, or never pauses)."""
    schema: Sequence[Metric]
    values: Sequence[int | float]
    index: Mapping[tuple[str, Labels], int] = field(repr=False, default_factory=dict)

    def get(self, name: str, default: float | None = None, **labels: str) -> int | float | None:
        """The value of `name` with exactly these labels, `default` when there is none."""
        i = self.index.get((name, tuple(sorted(labels.items()))))
        return default if i is None else self.values[i]

    def all(self, name: str) -> list[tuple[Mapping[str, str], int | float]]:
        """Every (labels, value) of `name`, in schema order."""
        return [(m.labels, v) for m, v in zip(self.schema, self.values, strict=True) if m.name == name]

    @property
    def story(self) -> str:
        """The recorded writer, for people: 'pid 812 is gone'."""
        return process_story(self.pid, self.pid_start, self.pid_namespace)


def stats_name(kind: str, instance: str) -> str:
    """The file name of a stats segment. Raises UsageError for a kind or instance that cannot be part of it."""
    if not _KIND.fullmatch(kind) or not _INSTANCE.fullmatch(instance):
        raise UsageError(f"not a stats segment's kind and instance: {kind!r}, {instance!r}", hint="letters, digits, - and _")
    return f"{STATS_PREFIX}{kind}.{instance}"


def instance_of_path(path: str | os.PathLike[str]) -> str:
    """A daemon's instance: the first 12 hex digits of SHA-256 of the real path of its socket or configuration."""
    import hashlib  # here, because it costs every reader's start 3 ms and only daemons need it

    return hashlib.sha256(os.fsencode(os.path.realpath(path))).hexdigest()[:12]


def instance_of_pool(name: str) -> str:
    """A pool's instance: its name, or where that cannot be part of a file name the first 12 hex digits of its SHA-256."""
    if _INSTANCE.fullmatch(name):
        return name
    import hashlib

    return hashlib.sha256(os.fsencode(name)).hexdigest()[:12]


def to_json(metric: Metric) -> dict[str, object]:
    if metric.type not in TYPES:
        raise UsageError(f"metric {metric.name}: unknown type {metric.type!r}", hint="one of " + ", ".join(TYPES))
    return {
        "name": metric.name, "type": metric.type, "unit": metric.unit, "help": metric.help,
        "labels": dict(metric.labels), "float": metric.float,
    }  # fmt: skip


def from_json(entry: Mapping[str, object]) -> Metric:
    """A schema entry as read: keys this version does not know are passed over."""
    labels = entry.get("labels") or _NO_LABELS
    if not isinstance(labels, Mapping):
        raise TypeError("labels")
    return Metric(
        str(entry["name"]), str(entry.get("type", "gauge")), str(entry.get("unit", "")), str(entry.get("help", "")),
        {str(k): str(v) for k, v in labels.items()}, bool(entry.get("float")),
    )  # fmt: skip


def fold(metrics: Sequence[Metric]) -> tuple[list[Metric], dict[tuple[str, Labels], int]]:
    """The entries to write and where each identity lies: label sets over the cap share one entry named `other`.

    A bucket's `le` is the shape of its histogram, not a label to count, and stays.
    """
    entries: list[Metric] = []
    index: dict[tuple[str, Labels], int] = {}
    sets: dict[str, set[Labels]] = {}
    for metric in metrics:
        identity = metric.identity
        if identity in index:
            raise UsageError(f"metric {metric.name} twice with labels {dict(metric.labels)}")
        counted = identity[1] if metric.type != "bucket" else tuple([item for item in identity[1] if item[0] != "le"])
        seen = sets.setdefault(metric.name, set())
        rest = bool(counted) and all(value == OTHER for _, value in counted)
        if counted not in seen and len(seen) >= MAX_LABEL_SETS and not rest:
            labels = {k: v if metric.type == "bucket" and k == "le" else OTHER for k, v in metric.labels.items()}
            shared = Metric(metric.name, metric.type, metric.unit, metric.help, labels, metric.float)
            if shared.identity not in index:
                index[shared.identity] = len(entries)
                entries.append(shared)
            index[identity] = index[shared.identity]
            continue
        if not rest:
            seen.add(counted)
        index[identity] = len(entries)
        entries.append(metric)
    return entries, index
