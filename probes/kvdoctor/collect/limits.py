"""Room in /dev/shm, locked memory, open files, and the memory limit of the daemon's control group."""

import os
import re
from typing import Any

from kvdoctor.collect.source import NOT_UNDERSTOOD, Source
from kvdoctor.facts import Limits
from kvdoctor.parse import shape
from kvdoctor.parse.mounts import mount_of, mount_size, parse_df_shm, parse_mountinfo
from kvdoctor.parse.versions import decimal

SHM = "/dev/shm"  # noqa: S108 - the folder that is judged
NO_LIMIT = 1 << 62


def collect_limits(source: Source, *, capabilities: list[str], daemon_group: str, arena: int | None) -> Limits:
    """Limits of this process, or of a capture's. `daemon_group` is a running kvd's control group, '' for our own."""
    found = Limits(cap_ipc_lock="IPC_LOCK" in capabilities, arena=arena)
    _shm(source, found)
    limits = {} if source.foreign else shape.mapping(source.value("ulimit", _rlimits))
    found.memlock = _soft(limits.get("memlock"))
    found.nofile = _soft(limits.get("nofile"))
    _memory(source, found, daemon_group)
    return found


def _soft(pair: Any) -> int | None:
    value = pair[0] if isinstance(pair, list) and pair else pair
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return -1 if value < 0 or value >= NO_LIMIT else value


def _rlimits() -> dict[str, list[int]]:
    import resource

    return {
        "memlock": list(resource.getrlimit(resource.RLIMIT_MEMLOCK)),
        "nofile": list(resource.getrlimit(resource.RLIMIT_NOFILE)),
    }


def _shm(source: Source, found: Limits) -> None:
    def ask() -> dict[str, int] | None:
        place = source.host_path(SHM)
        if source.foreign and not os.path.ismount(place):
            return None  # a folder on that root's disk: the host mounts one over it when it boots
        space = os.statvfs(place)
        return {"total": space.f_blocks * space.f_frsize, "free": space.f_bavail * space.f_frsize}

    answer = source.value("shm", ask)
    told = shape.mapping(answer)
    if (total := shape.whole(told.get("total"))) is not None:
        found.shm, found.shm_free, found.shm_source = total, shape.whole(told.get("free")), f"statvfs {SHM}"
        return
    # A hand-made capture may hold several answers; the smallest is the one that can hurt.
    known: list[tuple[int, str]] = []
    for name in ("df-h.out", "df-shm.out", "df.out"):
        size = parse_df_shm(source.captured(name) or "")
        if size is not None:
            known.append((size, name))
    # Below another root the table may be this process's own: its /dev/shm is not the one asked about.
    mount = None if source.foreign else mount_of(SHM, parse_mountinfo(source.mount_table()))
    if mount and mount.point == SHM and (size := mount_size(mount.super_options)) is not None:
        known.append((size, "mountinfo size="))
    if known:
        found.shm, found.shm_source = min(known)


def _memory(source: Source, found: Limits, group: str) -> None:
    """The tightest memory.max from a control group up to the root (version 2), or the version 1 limit."""
    if not group and source.foreign:
        return  # our own group is not that host's
    if not group:
        text = source.read("/proc/self/cgroup", 8192) or ""
        unified = re.search(r"^0::(/.*)$", text, re.MULTILINE)
        legacy = re.search(r"^\d+:(?:\w+,)*memory(?:,\w+)*:(/.*)$", text, re.MULTILINE)
        if legacy:
            for folder in (f"/sys/fs/cgroup/memory{legacy[1]}", "/sys/fs/cgroup/memory"):
                if (value := source.number(f"{folder}/memory.limit_in_bytes")) is not None:
                    found.memory_max, found.memory_group = (-1 if value >= 1 << 60 else value), folder
                    return
        group = unified[1] if unified else ""
    if not group:
        return
    parts = [part for part in group.split("/") if part and part != ".."]
    tightest: int | None = None
    for depth in range(len(parts), -1, -1):
        folder = "/".join(["/sys/fs/cgroup", *parts[:depth]])
        limit = source.word(f"{folder}/memory.max")
        if limit is None:
            continue
        value = NO_LIMIT if limit == "max" else decimal(limit)
        if value is None:
            source.denied[f"{folder}/memory.max"] = NOT_UNDERSTOOD
            continue
        if tightest is None or value < tightest:
            tightest, found.memory_group = value, folder
    if tightest is None and source.is_folder("/sys/fs/cgroup"):
        tightest, found.memory_group = NO_LIMIT, "/sys/fs/cgroup"
    if tightest is not None:
        found.memory_max = -1 if tightest >= NO_LIMIT else tightest
