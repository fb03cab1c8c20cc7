"""Stats segments: a process's live numbers, readable by anyone, in a file that describes itself.

Format (FORMAT.md, "Stats segment"): `/dev/shm/kvtools.<kind>.<instance>`, a 128-byte header, a JSON schema, then one 8-byte
value for each schema entry. Because the schema travels with the values, any version of a reader reads any version of a
writer. `StatsWriter` is the one way such a file is made, `read_stats` and `StatsReader` are the ways it is read.

Data flow: the writer maps its file and stores each value as one aligned 8-byte word, so a number is never half written. A
group of values that belong together goes inside `update()`, which makes the header's sequence odd meanwhile; a reader that
meets an odd or changed sequence tries again, at most 8 times, then takes what it sees and says `stale`.

Failure cases. Killed at any instant, the writer leaves a file whose life lock is free: readers say `alive=False`, the next
writer of that name or `kvctl prune` removes it. Killed inside an update it also leaves the sequence odd: `stale`. No room in
shared memory is Unreachable when the file is made (its pages are allocated then, so a later store cannot fault). A second
writer of one name is Refused while the first lives. Readers never map a file: its owner could truncate it under them.

Concurrency: `update()` excludes other updates; a single `set` is safe from any thread; `add` from several threads at once
only inside `update()`. A `StatsReader` belongs to one thread at a time. No memory barrier can be issued from Python: on
processors that reorder stores (not x86-64) consistency inside an update rests on the interpreter's own atomics.
"""

import json
import mmap
import os
import re
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

from kvtools.errors import NotFound, Refused, Unreachable, UsageError
from kvtools.output import printable
from kvtools.segments.files import (
    SHM,
    STATS_PREFIX,
    explain,
    held_for_life,
    lock_for_life,
    open_file,
    pid_namespace,
    process_start,
    process_story,
    still_named,
)

# In shared memory, read by any version of any reader: do not change.
MAGIC = b"KVTSTAT1"
HEADER = struct.Struct("<8sIIIIQQQQQQ")
HEADER_BYTES = 128
SUPERSEDED = 1
_COUNT_OFFSET, _FLAGS_OFFSET, _HEARTBEAT_OFFSET, _SEQUENCE_OFFSET = 16, 20, 56, 64
_FLAGS_WORD, _HEARTBEAT_WORD, _SEQUENCE_WORD = _COUNT_OFFSET // 8, _HEARTBEAT_OFFSET // 8, _SEQUENCE_OFFSET // 8

MAX_LABEL_SETS = 64
"""Label sets a metric may have; the rest are counted together under the label value OTHER."""

OTHER = "other"
READ_ATTEMPTS = 8
TYPES = ("counter", "gauge", "bucket")

# Bounds on what a reader accepts from a file that anybody may have written.
_MAX_FILE = 16 << 20
_MAX_VALUES = 1 << 16

_MASK = (1 << 64) - 1
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

    @property
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


def find_stats(root: Path = SHM, kind: str | None = None) -> list[Path]:
    """Paths of all stats segments in `root` (of one kind), sorted; contents unseen."""
    prefix = STATS_PREFIX + (f"{kind}." if kind else "")
    try:
        names = sorted(path.name for path in root.iterdir())
    except OSError as error:
        raise Unreachable(f"cannot read {root}: {error.strerror}", hint="shared memory must be mounted there") from None
    return [root / name for name in names if name.startswith(prefix) and name.count(".") >= 2]


# --- writing ---------------------------------------------------------------------------------------------------------


class StatsWriter:
    """The one writer of `kvtools.<kind>.<instance>`, from construction to `close` (or to the process's death).

    Raises Refused when a live writer has the name, Unreachable when the file cannot be made.
    """

    def __init__(
        self,
        kind: str,
        instance: str,
        metrics: Sequence[Metric],
        *,
        root: Path = SHM,
        clock: Callable[[], int] = time.time_ns,
        patience_s: float = 0.25,
    ) -> None:
        if sys.byteorder != "little":
            raise Unreachable("stats segments are little-endian; this machine is not")
        self.name = stats_name(kind, instance)
        self.path = root / self.name
        self._root = root
        self._clock = clock
        self._lock = threading.RLock()
        self._depth = 0
        self._update = _Update(self._begin, self._end)
        self._created = clock()
        self._adopt(metrics, {})
        try:
            self._claim(patience_s)
        except BaseException:
            self._discard()
            raise

    # A file is complete, allocated and locked under a hidden temporary name before anybody can see it under its own.
    def _adopt(self, metrics: Sequence[Metric], carried: Mapping[tuple[str, Labels], int | float]) -> None:
        entries, self._index = _fold(metrics)
        schema = json.dumps([_entry(m) for m in entries], separators=(",", ":"), ensure_ascii=False).encode()
        start = HEADER_BYTES + (len(schema) + 7 & ~7)
        size = start + 8 * len(entries)
        if size > _MAX_FILE or len(entries) > _MAX_VALUES:
            raise UsageError(f"too many metrics for one stats segment: {len(entries)}")
        self._fd, self._temporary = _make(self._root, self.name, size)
        memory = mmap.mmap(self._fd, size)
        pid = os.getpid()
        memory[:HEADER_BYTES] = HEADER.pack(
            MAGIC, HEADER_BYTES, len(schema), len(entries), 0, pid, process_start(pid), pid_namespace(),
            self._created, self._clock(), 0,
        ).ljust(HEADER_BYTES, b"\0")  # fmt: skip
        memory[HEADER_BYTES : HEADER_BYTES + len(schema)] = schema
        # The views keep the mapping alive; a replaced one is unmapped when the last thread inside a `set` lets go of it.
        self._header = memoryview(memory)[:HEADER_BYTES].cast("Q")
        self._words = memoryview(memory)[start:].cast("Q") if entries else memoryview(bytearray()).cast("Q")
        self._doubles = memoryview(memory)[start:].cast("d") if entries else memoryview(bytearray()).cast("d")
        self._float = [m.float for m in entries]
        self.schema: Sequence[Metric] = entries
        for identity, i in self._index.items():
            if identity in carried:
                self.set(i, carried[identity])

    def _claim(self, patience_s: float) -> None:
        """Give the finished file its name: nobody has it, or a dead writer's file has it."""
        deadline = time.monotonic() + patience_s
        while True:
            try:
                os.link(self._root / self._temporary, self.path)
                (self._root / self._temporary).unlink()
                break
            except FileExistsError:
                pass
            except OSError as error:
                raise explain(error, self.name, what="stats segment", root=self._root) from None
            if self._replace_dead():
                break
            if time.monotonic() > deadline:
                raise self._held()
            time.sleep(0.005)  # a prune holds the lock for an instant
        self._temporary = ""
        _sweep(self._root, self.name)

    def _replace_dead(self) -> bool:
        try:
            old = open_file(self.name, os.O_RDWR, root=self._root, what="stats segment")
        except NotFound:
            return False
        try:
            # While this lock is held no other writer can take the same dead file.
            if not lock_for_life(old) or not still_named(old, self.path):
                return False
            _supersede(old)
            (self._root / self._temporary).rename(self.path)
            return True
        except OSError as error:
            raise explain(error, self.name, what="stats segment", root=self._root) from None
        finally:
            os.close(old)

    def _held(self) -> Refused:
        try:
            pid = read_stats(self.name, self._root).pid
        except (NotFound, Unreachable):
            pid = 0
        who = f"process {pid}" if pid else "another process"
        return Refused(f"stats segment {self.name} is being written by {who}", hint="only one process may serve this instance")

    def _discard(self) -> None:
        if self._temporary:
            (self._root / self._temporary).unlink(missing_ok=True)
        os.close(self._fd)
        self._fd = -1

    def index(self, name: str, **labels: str) -> int:
        """Where the value of `name` with these labels lies; a label set over the cap shares its metric's `other`. KeyError."""
        return self._index[name, tuple(sorted(labels.items()))]

    def set(self, i: int, value: float) -> None:
        """Store value `i`: one aligned 8-byte store. An integer metric takes 0 <= value < 2**64 (else ValueError)."""
        if self._float[i]:
            self._doubles[i] = value
        else:
            self._words[i] = int(value)

    def add(self, i: int, n: float = 1) -> None:
        """Add `n` to value `i`; integer counters wrap at 2**64."""
        if self._float[i]:
            self._doubles[i] += n
        else:
            self._words[i] = (self._words[i] + int(n)) & _MASK

    def value(self, i: int) -> int | float:
        """Value `i` as it stands."""
        return float(self._doubles[i]) if self._float[i] else self._words[i]

    def update(self) -> "_Update":
        """`with writer.update():` makes what is stored inside one consistent state for readers. May be nested."""
        return self._update

    def _begin(self) -> None:
        self._lock.acquire()
        if self._depth == 0:
            self._header[_SEQUENCE_WORD] = (self._header[_SEQUENCE_WORD] + 1) & _MASK
        self._depth += 1

    def _end(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._header[_SEQUENCE_WORD] = (self._header[_SEQUENCE_WORD] + 1) & _MASK
        self._lock.release()

    def heartbeat(self) -> None:
        """Say that this writer is well. Call it at least once a second from the loop whose life it stands for."""
        self._header[_HEARTBEAT_WORD] = self._clock()

    def reshape(self, metrics: Sequence[Metric]) -> None:
        """Replace the schema: a new file takes the name, values carried over by name and labels. Indices are new.

        An index stays valid across a reshape only when the new list begins with the old one. Raises Unreachable when there
        is no room for the new file; the old one then goes on as it was.
        """
        with self._lock:
            if self._depth:
                raise RuntimeError("reshape inside update()")
            old_fd, old_header = self._fd, self._header
            carried = {identity: self.value(i) for identity, i in self._index.items()}
            saved = (self._fd, self._temporary, self._header, self._words, self._doubles, self._float, self.schema, self._index)
            try:
                self._adopt(metrics, carried)
                old_header[_FLAGS_WORD] |= SUPERSEDED << 32
                (self._root / self._temporary).rename(self.path)
            except BaseException as error:
                old_header[_FLAGS_WORD] &= ~(SUPERSEDED << 32) & _MASK
                if self._fd != old_fd:
                    self._discard()
                (self._fd, self._temporary, self._header, self._words, self._doubles, self._float, self.schema, self._index) = saved
                if isinstance(error, OSError):
                    raise explain(error, self.name, what="stats segment", root=self._root) from None
                raise
            self._temporary = ""
            os.close(old_fd)

    def ensure(self, metrics: Sequence[Metric]) -> None:
        """Add those of `metrics` that the schema lacks, by one reshape if any is missing. Existing indices stay valid."""
        with self._lock:
            missing = [m for m in metrics if m.identity not in self._index]
            if missing:
                self.reshape([*self.schema, *missing])

    def close(self) -> None:
        """Say superseded to readers that hold the file open, unlink it and drop the lock. A second call does nothing."""
        with self._lock:
            if self._fd < 0:
                return
            self._header[_FLAGS_WORD] |= SUPERSEDED << 32
            if still_named(self._fd, self.path):
                self.path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1


class _Update:
    """The odd-sequence bracket of one writer; one object for its whole life, so that entering it costs no allocation."""

    __slots__ = ("_begin", "_end")

    def __init__(self, begin: Callable[[], None], end: Callable[[], None]) -> None:
        self._begin = begin
        self._end = end

    def __enter__(self) -> None:
        self._begin()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end()


def _entry(metric: Metric) -> dict[str, object]:
    if metric.type not in TYPES:
        raise UsageError(f"metric {metric.name}: unknown type {metric.type!r}", hint="one of " + ", ".join(TYPES))
    return {
        "name": metric.name, "type": metric.type, "unit": metric.unit, "help": metric.help,
        "labels": dict(metric.labels), "float": metric.float,
    }  # fmt: skip


def _fold(metrics: Sequence[Metric]) -> tuple[list[Metric], dict[tuple[str, Labels], int]]:
    """The entries to write and where each identity lies: label sets over the cap share one entry named `other`.

    A bucket's `le` is the shape of its histogram, not a label to count, and stays.
    """
    entries: list[Metric] = []
    index: dict[tuple[str, Labels], int] = {}
    sets: dict[str, set[Labels]] = {}
    for metric in metrics:
        if metric.identity in index:
            raise UsageError(f"metric {metric.name} twice with labels {dict(metric.labels)}")
        counted = tuple(item for item in metric.identity[1] if not (metric.type == "bucket" and item[0] == "le"))
        seen = sets.setdefault(metric.name, set())
        rest = all(value == OTHER for _, value in counted) and bool(counted)
        if counted not in seen and len(seen) >= MAX_LABEL_SETS and not rest:
            labels = {k: v if metric.type == "bucket" and k == "le" else OTHER for k, v in metric.labels.items()}
            shared = Metric(metric.name, metric.type, metric.unit, metric.help, labels, metric.float)
            if shared.identity not in index:
                index[shared.identity] = len(entries)
                entries.append(shared)
            index[metric.identity] = index[shared.identity]
            continue
        if not rest:
            seen.add(counted)
        index[metric.identity] = len(entries)
        entries.append(metric)
    return entries, index


def _make(root: Path, name: str, size: int) -> tuple[int, str]:
    """A new hidden file of `size` bytes, allocated, locked for life, mode 0644 whatever the umask; its descriptor and name."""
    number = 0
    while True:
        temporary = f".{name}.{os.getpid()}.{number}"
        try:
            fd = os.open(root / temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            break
        except FileExistsError:
            number += 1
        except OSError as error:
            raise explain(error, name, what="stats segment", root=root) from None
    try:
        lock_for_life(fd)  # cannot fail: nobody else has opened a file this new
        os.posix_fallocate(fd, 0, size)
        os.fchmod(fd, 0o644)
    except BaseException as error:
        (root / temporary).unlink(missing_ok=True)
        os.close(fd)
        if isinstance(error, OSError):
            raise explain(error, name, what="stats segment", root=root) from None
        raise
    return fd, temporary


def _sweep(root: Path, name: str) -> None:
    """Remove the temporary files that killed writers of this name left: those whose life lock is free."""
    for entry in list(root.glob(f".{name}.*")):
        remove_unlocked(entry)


def remove_unlocked(path: Path) -> bool:
    """Unlink the stats segment (or temporary) at `path` unless a writer lives; True when it was removed. Raises Unreachable."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        if not lock_for_life(fd) or not still_named(fd, path):
            return False
        _supersede(fd)
        path.unlink()
        return True
    except OSError as error:
        raise explain(error, path.name, what="stats segment", root=path.parent) from None
    finally:
        os.close(fd)


def _supersede(fd: int) -> None:
    """Tell readers that hold this dead writer's file open to look at the name again."""
    head = os.pread(fd, HEADER_BYTES, 0)
    if len(head) == HEADER_BYTES and head.startswith(MAGIC):
        flags = struct.unpack_from("<I", head, _FLAGS_OFFSET)[0] | SUPERSEDED
        os.pwrite(fd, struct.pack("<I", flags), _FLAGS_OFFSET)


# --- reading ---------------------------------------------------------------------------------------------------------


class StatsReader:
    """Keeps one stats segment open for cheap repeated reads; follows it when its writer reshapes or restarts.

    The schema is parsed once a file. The file stays open, not mapped: read(2) of a few KiB costs microseconds, and a mapping
    of a file that its owner truncates would kill this process with SIGBUS.
    """

    def __init__(self, name: str | Path, root: Path = SHM) -> None:
        self.path = name if isinstance(name, Path) else root / name
        self._fd = -1
        self._schema: list[Metric] = []
        self._index: dict[tuple[str, Labels], int] = {}
        self._floats: list[int] = []
        self._unpack = struct.Struct("")
        self._start = 0
        self._size = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; the next `read` opens it again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def read(self) -> StatsReading:
        """The numbers as they are now. Raises NotFound when no such segment exists (any more), Unreachable when it is unsound."""
        for _ in range(READ_ATTEMPTS):
            if self._fd < 0:
                self._open()
            alive = held_for_life(self._fd)
            reading = self._read(alive)
            # A superseded file will have a successor under its name in a moment; a dead one may have one already.
            if not (alive and reading.superseded) and (alive or still_named(self._fd, self.path)):
                return reading
            self.close()
            time.sleep(0.0005)
        if self._fd < 0:
            self._open()
        return self._read(held_for_life(self._fd))

    def _open(self) -> None:
        self._fd = open_file(self.path.name, os.O_RDONLY, root=self.path.parent, what="stats segment")
        try:
            self._learn()
        except BaseException:
            self.close()
            raise

    def _learn(self) -> None:
        size = os.fstat(self._fd).st_size
        data = os.pread(self._fd, min(size, _MAX_FILE + 1), 0)
        if len(data) < HEADER_BYTES or not data.startswith(MAGIC) or len(data) > _MAX_FILE:
            raise self._unsound("no header")
        _, header, schema_bytes, count, *_ = HEADER.unpack_from(data)
        start = header + (schema_bytes + 7 & ~7)
        if header < HEADER_BYTES or count > _MAX_VALUES or start + 8 * count > len(data):
            raise self._unsound("shorter than its header says")
        try:
            entries = json.loads(data[header : header + schema_bytes])
            self._schema = [_metric(entry) for entry in entries]
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            raise self._unsound(f"its schema does not parse ({type(error).__name__})") from None
        if len(self._schema) != count:
            raise self._unsound(f"{len(self._schema)} names for {count} values")
        self._index = {m.identity: i for i, m in enumerate(self._schema)}
        self._floats = [i for i, m in enumerate(self._schema) if m.float]
        self._unpack = struct.Struct(f"<{count}Q")
        self._start, self._size = start, start + 8 * count

    def _read(self, alive: bool) -> StatsReading:
        stale = True
        data = b""
        for attempt in range(READ_ATTEMPTS):
            data = os.pread(self._fd, self._size, 0)
            if len(data) < self._size:
                raise self._unsound("it was cut")
            sequence = HEADER.unpack_from(data)[-1]
            again = int.from_bytes(os.pread(self._fd, 8, _SEQUENCE_OFFSET), "little")
            if sequence % 2 == 0 and sequence == again:
                stale = False
                break
            if not alive:
                break  # nobody will ever finish that update
            if attempt:
                time.sleep(0.0002)
        _, _, _, _, flags, pid, start, namespace, created, heartbeat, _ = HEADER.unpack_from(data)
        values: list[int | float] = list(self._unpack.unpack_from(data, self._start))
        for i in self._floats:
            values[i] = struct.unpack_from("<d", data, self._start + 8 * i)[0]
        kind, _, instance = self.path.name.removeprefix(STATS_PREFIX).partition(".")
        return StatsReading(
            self.path.name, kind, instance, pid, start, namespace, created, heartbeat,
            bool(flags & SUPERSEDED), alive, stale, self._schema, values, self._index,
        )  # fmt: skip

    def _unsound(self, why: str) -> Unreachable:
        return Unreachable(f"{printable(self.path.name)} is not a sound stats segment: {why}")


def read_stats(name: str | Path, root: Path = SHM) -> StatsReading:
    """One reading of the stats segment `name` (a name in `root`, or a path). Raises NotFound, Unreachable."""
    with StatsReader(name, root) as reader:
        return reader.read()


def _metric(entry: Mapping[str, object]) -> Metric:
    """A schema entry as read: keys this version does not know are passed over."""
    labels = entry.get("labels") or _NO_LABELS
    if not isinstance(labels, Mapping):
        raise TypeError("labels")
    return Metric(
        str(entry["name"]), str(entry.get("type", "gauge")), str(entry.get("unit", "")), str(entry.get("help", "")),
        {str(k): str(v) for k, v in labels.items()}, bool(entry.get("float")),
    )  # fmt: skip
