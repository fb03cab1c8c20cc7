"""Reading a host: one `Snapshot` a call, from shared memory, /proc, the GPUs and (where asked) engines' own /metrics.

    /dev/shm pools, owner files, stats segments --.
    /proc of their owners                         +--> Source.read() --> Snapshot --> model
    GPUs (kvtop.gpus), engines (kvtop.engines)  --'

Contract: `read` never raises for what a source holds or lacks; what cannot be read becomes a `Problem`, and the next call tries
again. It may block for a moment (a stuck lock is waited for at most `lock_timeout_s` over the whole call), so it is called on a
thread of its own (kvtop.reader) and never by the screen. Needs only read permission, no network, no GPU library, no daemon.

Concurrency: a Source belongs to one thread; it keeps stats segments open and remembers each process between calls.
"""

import os
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from kvtools.errors import KvError, NotFound
from kvtools.output import printable
from kvtools.segments import discover, pool, stats
from kvtools.segments.files import SHM
from kvtools.segments.owner import Owner
from kvtop.procs import Processes
from kvtop.snapshot import (
    DEAD,
    FRESH,
    GONE,
    LIVE,
    SILENT,
    STALE,
    UNKNOWN,
    Engine,
    Gpu,
    LimitNote,
    Problem,
    Segment,
    Series,
    Snapshot,
    Stats,
    finite,
)

SILENT_AFTER_S = 3.0
"""A writer says it is well at least once a second; three missed beats are silence."""

_Part = TypeVar("_Part")
_OWNERS = {"live": LIVE, "stale": DEAD, "unknown": UNKNOWN}


class Source:
    """Reads one host, again and again. `names` keeps only those segments (all when empty)."""

    def __init__(
        self,
        *,
        root: Path = SHM,
        names: Sequence[str] = (),
        clock: Callable[[], float] = time.time,
        mono: Callable[[], float] = time.monotonic,
        gpus: Callable[[], Sequence[Gpu]] | None = None,
        engines: Callable[[], Sequence[Engine]] | None = None,
        processes: Processes | None = None,
        lock_timeout_s: float = 0.2,
    ) -> None:
        self.root = root
        self.names = frozenset(names)
        self._clock = clock
        self._mono = mono
        self._gpus = gpus
        self._engines = engines
        self._processes = processes or Processes()
        self._lock_timeout_s = lock_timeout_s
        self._readers: dict[str, stats.StatsReader] = {}
        self._schemas: dict[str, tuple[object, tuple[Series, ...]]] = {}
        self._seen: set[str] = set()
        self._host = socket.gethostname()

    def read(self) -> Snapshot:
        """The host as it is now."""
        begun = self._mono()
        problems: list[Problem] = []
        segments, owners = self._segments(problems)
        read_stats = self._stats(problems)
        total, free = self._shm(problems)
        processes = self._processes.read(
            [*_held_by(owners), *((s.pid, f"{s.kind} {s.instance}", 0) for s in read_stats if s.state != GONE)]
        )
        return Snapshot(
            time_s=self._clock(),
            mono_s=begun,
            host=self._host,
            segments=tuple(segments),
            stats=tuple(read_stats),
            gpus=tuple(self._optional("gpu", self._gpus, problems)),
            processes=tuple(processes),
            engines=tuple(self._optional("engines", self._engines, problems)),
            shm_total_bytes=total,
            shm_free_bytes=free,
            problems=tuple(problems),
            took_s=self._mono() - begun,
            shm=str(self.root),
        )

    def close(self) -> None:
        """Close what is held open."""
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()

    # --- parts -------------------------------------------------------------------------------------------------------

    def _segments(self, problems: list[Problem]) -> tuple[list[Segment], list[Owner]]:
        try:
            listing = pool.list_pools(self.root, timeout_s=self._lock_timeout_s)
        except KvError as error:
            problems.append(Problem(source=str(self.root), message=error.message))
            return [], []
        problems.extend(_problem(p.name, p.error) for p in listing.unreadable if self._wanted(p.name))
        segments, owners = [], []
        for reading in listing.pools:
            if self._wanted(reading.name):
                state = discover.judge(reading, root=self.root)
                segments.append(_segment(state))
                if state.owner is not None:
                    owners.append(state.owner)
        told = {reading.name for reading in listing.pools} | {p.name for p in listing.unreadable}
        for name in sorted(self.names - told):
            problems.append(Problem(source=name, message="no segment of this name"))
        problems += self._damaged({name for name in self._seen - told if name not in self.names})
        self._seen = {reading.name for reading in listing.pools} | (self._seen & {p.source for p in problems})
        return segments, owners

    def _damaged(self, names: set[str]) -> list[Problem]:
        """Of segments that were read before, those that are still there and no segment any more (truncated, say)."""
        found = []
        for name in sorted(names):
            try:
                pool.read_pool(name, root=self.root, timeout_s=0.0)
            except NotFound:
                continue
            except KvError as error:
                found.append(_problem(name, error))
        return found

    def _wanted(self, name: str) -> bool:
        return not self.names or name in self.names

    def _stats(self, problems: list[Problem]) -> list[Stats]:
        try:
            paths = stats.find_stats(self.root)
        except KvError:
            return []  # _segments has said so
        found = {path.name: path for path in paths}
        for name in self._readers.keys() - found.keys():
            self._readers.pop(name).close()
            self._schemas.pop(name, None)
        out = []
        for name, path in found.items():
            reader = self._readers.get(name)
            if reader is None:
                reader = self._readers[name] = stats.StatsReader(path)
            try:
                out.append(self._one(name, reader.read()))
            except NotFound:
                continue  # gone since the folder was read
            except (KvError, OSError) as error:
                reader.close()
                problems.append(Problem(source=name, message=error.message if isinstance(error, KvError) else str(error)))
        return out

    def _one(self, name: str, reading: stats.StatsReading) -> Stats:
        known = self._schemas.get(name)
        if known is None or known[0] is not reading.schema:
            known = self._schemas[name] = (reading.schema, tuple(_series(metric) for metric in reading.schema))
        heartbeat_s = reading.heartbeat_ns / 1e9
        if not reading.alive:
            state = GONE
        elif self._clock() - heartbeat_s > SILENT_AFTER_S:
            state = SILENT
        else:
            state = STALE if reading.stale else FRESH
        return Stats(
            kind=reading.kind,
            instance=reading.instance,
            schema=known[1],
            values=finite(reading.values),
            pid=reading.pid,
            created_s=reading.created_ns / 1e9,
            heartbeat_s=heartbeat_s,
            state=state,
        )

    def _shm(self, problems: list[Problem]) -> tuple[int, int]:
        try:
            status = os.statvfs(self.root)
        except OSError as error:
            if not any(problem.source == str(self.root) for problem in problems):
                problems.append(Problem(source=str(self.root), message=error.strerror or str(error)))
            return 0, 0
        return status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize

    def _optional(self, name: str, read: Callable[[], Sequence[_Part]] | None, problems: list[Problem]) -> Sequence[_Part]:
        if read is None:
            return ()
        try:
            return read()
        except Exception as error:  # noqa: BLE001 - a vendor's library raises what it likes; the tick goes on without it
            problems.append(Problem(source=name, message=f"{type(error).__name__}: {error}"))
            return ()


def _problem(name: str, error: KvError) -> Problem:
    """What is wrong with a file, without its name at the beginning: that stands beside it."""
    return Problem(source=name, message=error.message.removeprefix(f"{printable(name)} "))


def _segment(state: discover.PoolState) -> Segment:
    reading, owner = state.reading, state.owner
    if owner is None:
        return Segment(
            name=reading.name,
            limit_bytes=reading.limit_bytes,
            used_bytes=reading.used_bytes,
            prealloc_bytes=reading.prealloc_bytes,
            story=state.evidence,
        )
    info = owner.info
    return Segment(
        name=reading.name,
        limit_bytes=reading.limit_bytes,
        used_bytes=reading.used_bytes,
        prealloc_bytes=reading.prealloc_bytes,
        owner=_OWNERS[state.state],
        pid=owner.pid,
        engine=info.engine,
        model=info.model,
        devices=info.devices,
        ranks=_ranks(owner),
        capacity_bytes=info.start_capacity_bytes,
        page_bytes=info.page_bytes,
        limits=tuple(
            LimitNote(limit_bytes=entry.limit_bytes, by=entry.by, at_s=entry.at_ns / 1e9, state=entry.state, reason=entry.reason)
            for entry in owner.limits
        ),
        story=owner.error or owner.story,
    )


def _ranks(owner: Owner) -> str:
    info = owner.info
    parts = [f"tp{info.tp_rank}/{info.tp_size}"] if info.tp_size > 1 else []
    if info.pp_size > 1:
        parts.append(f"pp{info.pp_rank}/{info.pp_size}")
    if info.dp_rank:
        parts.append(f"dp{info.dp_rank}")
    return " ".join(parts)


def _series(metric: stats.Metric) -> Series:
    return Series(name=metric.name, kind=metric.type, unit=metric.unit, help=metric.help, labels=metric.identity[1])


def _held_by(owners: Iterable[Owner]) -> list[tuple[int, str, int]]:
    """(pid, what it holds, pid namespace) for owners that live."""
    return [(owner.pid, owner.name, owner.pid_namespace) for owner in owners if owner.alive and owner.pid]
