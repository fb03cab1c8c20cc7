"""Writing a stats segment: the one way such a file is made.

Data flow: the writer maps its file and stores each value as one aligned 8-byte word, so a number is never half written. A
group of values that belong together goes inside `update()`, which makes the header's sequence odd meanwhile.

Failure cases. Killed at any instant, the writer leaves a file whose life lock is free: readers say `alive=False`, the next
writer of that name or `kvctl prune` removes it. Killed inside an update it also leaves the sequence odd. No room in shared
memory is Unreachable when the file is made (its pages are allocated then, so a later store cannot fault). A second writer of
one name is Refused while the first lives.

Concurrency: `update()` excludes other updates; a single `set` is safe from any thread; `add` from several threads at once
only inside `update()`. No memory barrier can be issued from Python: on processors that reorder stores (not x86-64)
consistency inside an update rests on the interpreter's own atomics.
"""

import contextlib
import json
import mmap
import os
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from kvtools.errors import NotFound, Refused, Unreachable, UsageError
from kvtools.segments.files import (
    SHM,
    explain,
    lock_for_life,
    open_file,
    pid_namespace,
    process_start,
    still_named,
)
from kvtools.segments.stats_format import (
    FLAGS_OFFSET,
    FLAGS_WORD,
    HEADER,
    HEADER_BYTES,
    HEARTBEAT_WORD,
    MAGIC,
    MASK,
    MAX_FILE_BYTES,
    MAX_VALUES,
    SEQUENCE_WORD,
    SUPERSEDED,
    Labels,
    Metric,
    fold,
    stats_name,
    to_json,
)
from kvtools.segments.stats_reader import read_stats

NAME_S = 1.0
"""How often a heartbeat looks whether the file still has its name."""


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
        self._looked = time.monotonic()
        """When the name was last seen to."""
        self._adopt(metrics, {})
        try:
            self._claim(patience_s)
        except BaseException:
            self._discard()
            raise

    # A file is complete, allocated and locked under a hidden temporary name before anybody can see it under its own.
    def _adopt(self, metrics: Sequence[Metric], carried: Mapping[tuple[str, Labels], int | float]) -> None:
        entries, self._index = fold(metrics)
        schema = json.dumps([to_json(m) for m in entries], separators=(",", ":"), ensure_ascii=False).encode()
        start = HEADER_BYTES + (len(schema) + 7 & ~7)
        size = start + 8 * len(entries)
        if size > MAX_FILE_BYTES or len(entries) > MAX_VALUES:
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

    def index_of(self, metric: Metric) -> int:
        """`index` of a metric at hand."""
        return self._index[metric.identity]

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
            self._words[i] = (self._words[i] + int(n)) & MASK

    def value(self, i: int) -> int | float:
        """Value `i` as it stands."""
        return float(self._doubles[i]) if self._float[i] else self._words[i]

    def update(self) -> "_Update":
        """`with writer.update():` makes what is stored inside one consistent state for readers. May be nested."""
        return self._update

    def _begin(self) -> None:
        self._lock.acquire()
        if self._depth == 0:
            self._header[SEQUENCE_WORD] = (self._header[SEQUENCE_WORD] + 1) & MASK
        self._depth += 1

    def _end(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._header[SEQUENCE_WORD] = (self._header[SEQUENCE_WORD] + 1) & MASK
        self._lock.release()

    def heartbeat(self) -> None:
        """Say that this writer is well. Call it at least once a second from the loop whose life it stands for.

        A file that somebody removed is made anew within NAME_S, as soon as there is room for it.
        """
        self._header[HEARTBEAT_WORD] = self._clock()
        if (now := time.monotonic()) - self._looked >= NAME_S:
            self._looked = now
            self._keep_name()

    def _keep_name(self) -> None:
        if os.path.lexists(self.path):
            return
        with self._lock, contextlib.suppress(Unreachable):
            if self._fd >= 0 and not self._depth:
                self.reshape(self.schema)

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
                old_header[FLAGS_WORD] |= SUPERSEDED << 32
                (self._root / self._temporary).rename(self.path)
            except BaseException as error:
                old_header[FLAGS_WORD] &= ~(SUPERSEDED << 32) & MASK
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
            self._header[FLAGS_WORD] |= SUPERSEDED << 32
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


def _make(root: Path, name: str, size: int) -> tuple[int, str]:
    """A new hidden file of `size` bytes, allocated, locked for life, mode 0644 whatever the umask; its descriptor and name."""
    number = 0
    while True:
        temporary = f".{name}.{os.getpid()}.{number}"
        number += 1
        try:
            fd = os.open(root / temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            continue
        except FileNotFoundError:
            hint = "shared memory must be mounted there; KVTOOLS_SHM names another folder"
            raise Unreachable(f"no room for stats segment {name}: there is no {root}", hint=hint) from None
        except OSError as error:
            raise explain(error, name, what="stats segment", root=root) from None
        # Until it is locked, a writer that sweeps up takes it for a killed one's.
        if lock_for_life(fd) and still_named(fd, root / temporary):
            break
        os.close(fd)
    try:
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
        flags = struct.unpack_from("<I", head, FLAGS_OFFSET)[0] | SUPERSEDED
        os.pwrite(fd, struct.pack("<I", flags), FLAGS_OFFSET)
