"""Everything that lies in shared memory, in one call: for kvctl, kvtop and kvdoctor.

`look` reads pools with their owners, stats segments, and what dead processes left behind with the evidence that it is dead.
Contract: it never raises for what one file holds; what could not be read is listed as a problem. Stale means *proven* stale
by a free life lock: a kvcached segment has no sidecar, its state is "unknown", and nothing may remove it on a guess.

Data flow: files -> PoolState / StatsState / Leftover. Failure: only an unreadable folder raises (Unreachable). Concurrency:
no state; the picture is of one moment per file, not of one moment for all.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from kvtools.errors import KvError, NotFound
from kvtools.segments import pool, stats
from kvtools.segments.files import LOCK_TIMEOUT_S, SHM, SIDECAR_SUFFIX, STATS_PREFIX, held_for_life
from kvtools.segments.owner import PoolState, State, judge, read_owner

__all__ = ["Found", "Leftover", "PoolState", "Problem", "State", "StatsState", "judge", "look"]


@dataclass(frozen=True, slots=True)
class StatsState:
    """A sound stats segment: `state` is "live" or "stale"."""

    reading: stats.StatsReading
    state: State
    evidence: str

    @property
    def name(self) -> str:
        return self.reading.name


@dataclass(frozen=True, slots=True)
class Leftover:
    """A file that a dead process left: `kind` is pool, sidecar, stats or temporary. `prune` may remove it."""

    name: str
    kind: Literal["pool", "sidecar", "stats", "temporary"]
    evidence: str


@dataclass(frozen=True, slots=True)
class Problem:
    """A file that should be readable and is not."""

    name: str
    error: KvError


@dataclass(frozen=True, slots=True)
class Found:
    """What lies in one shared-memory folder. Lists are sorted by name."""

    root: Path
    pools: list[PoolState] = field(default_factory=list)
    stats: list[StatsState] = field(default_factory=list)
    leftovers: list[Leftover] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def pool(self, name: str) -> PoolState | None:
        return next((p for p in self.pools if p.name == name), None)


def look(root: Path = SHM, *, timeout_s: float = LOCK_TIMEOUT_S) -> Found:
    """Read all of `root`. `timeout_s` bounds the waiting for locks over the whole call."""
    found = Found(root)
    listing = pool.list_pools(root, timeout_s=timeout_s)
    found.problems.extend(Problem(p.name, p.error) for p in listing.unreadable)
    for reading in listing.pools:
        state = judge(reading, root=root)
        found.pools.append(state)
        if state.state == "stale":
            found.leftovers.append(Leftover(reading.name, "pool", state.evidence))
    _look_at_stats(root, found)
    _look_for_orphans(root, found)
    return found


def _look_at_stats(root: Path, found: Found) -> None:
    for path in stats.find_stats(root):
        try:
            reading = stats.read_stats(path)
        except NotFound:
            continue  # gone since the folder was read
        except KvError as error:
            found.problems.append(Problem(path.name, error))
            continue
        if reading.alive:
            found.stats.append(StatsState(reading, "live", "its writer holds the lock"))
        else:
            evidence = f"nobody holds its lock; recorded writer: {reading.story}"
            found.stats.append(StatsState(reading, "stale", evidence))
            found.leftovers.append(Leftover(path.name, "stats", evidence))


def _look_for_orphans(root: Path, found: Found) -> None:
    """Sidecars without a pool, and the hidden files of stats writers that died while making them."""
    # What only looks like a segment protects no owner file: nobody else could ever remove it.
    pools = {p.name for p in found.pools} | {p.name for p in found.problems if not isinstance(p.error, pool.NotAPool)}
    for name in sorted(path.name for path in root.iterdir()):
        if name.startswith(f".{STATS_PREFIX}"):
            if _unlocked(root / name):
                found.leftovers.append(Leftover(name, "temporary", "nobody holds its lock"))
        elif name.endswith(SIDECAR_SUFFIX) and not name.startswith(".") and name.removesuffix(SIDECAR_SUFFIX) not in pools:
            try:
                owner = read_owner(name.removesuffix(SIDECAR_SUFFIX), root=root)
            except KvError as error:
                found.problems.append(Problem(name, error))
                continue
            if owner is not None and not owner.alive and (not owner.error or _is_empty(root / name)):
                # An empty one is of an engine that was killed between making the file and writing itself in.
                who = "it is empty" if owner.error else owner.story
                found.leftovers.append(Leftover(name, "sidecar", f"its pool is gone and nobody holds its lock ({who})"))


def _is_empty(path: Path) -> bool:
    try:
        return path.stat(follow_symlinks=False).st_size == 0
    except OSError:
        return False


def _unlocked(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return not held_for_life(fd)
    finally:
        os.close(fd)
