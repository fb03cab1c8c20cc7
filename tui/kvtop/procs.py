"""The processes behind segments: CPU, memory, command, read from /proc.

psutil would serve, but costs several files and about 150 us a process and tick; the one line of /proc/PID/stat has all that
changes, and the rest (command, user) is read once a process. A process is remembered by pid *and* start time, so a reused pid
is a new process. A pid from another pid namespace means nothing here and is left out.

Failure cases: a process may vanish between any two reads; it is then simply not in the answer.
Concurrency: belongs to the thread that reads snapshots.
"""

import os
import pwd
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from kvtools.segments.files import pid_namespace
from kvtop.snapshot import Process

_STATES = {"R": "running", "S": "sleeping", "D": "disk wait", "Z": "zombie", "T": "stopped", "t": "traced", "I": "idle"}


@dataclass(slots=True)
class _Known:
    start: int
    command: str
    user: str
    ticks: int
    at_s: float


class Processes:
    """Remembers each process between calls, for CPU shares and for what never changes."""

    def __init__(self, *, proc: Path = Path("/proc"), mono: Callable[[], float] = time.monotonic) -> None:
        self._proc = proc
        self._mono = mono
        self._known: dict[int, _Known] = {}
        self._tick = os.sysconf("SC_CLK_TCK")
        self._page = os.sysconf("SC_PAGE_SIZE")
        self._namespace = pid_namespace()
        self._boot_s = 0.0

    def read(self, holders: Iterable[tuple[int, str, int]]) -> list[Process]:
        """One Process a pid of `holders` ((pid, what it holds, its pid namespace or 0)), by pid."""
        held: dict[int, list[str]] = {}
        for pid, what, namespace in holders:
            if pid > 0 and (not namespace or namespace == self._namespace):
                held.setdefault(pid, []).append(what)
        for pid in self._known.keys() - held.keys():
            del self._known[pid]
        out = []
        for pid in sorted(held):
            process = self._one(pid, tuple(held[pid]))
            if process is not None:
                out.append(process)
        return out

    def _one(self, pid: int, holds: tuple[str, ...]) -> Process | None:
        try:
            line = (self._proc / str(pid) / "stat").read_bytes()
            # The command name in parentheses may hold blanks and parentheses: count from the last one.
            fields = line.rpartition(b")")[2].split()
            state, ticks, threads = fields[0].decode(), int(fields[11]) + int(fields[12]), int(fields[17])
            start, rss = int(fields[19]), int(fields[21]) * self._page
        except (OSError, IndexError, ValueError):
            return None
        now = self._mono()
        known = self._known.get(pid)
        share = -1.0
        if known is None or known.start != start:
            known = self._known[pid] = _Known(start, self._command(pid), self._user(pid), ticks, now)
        elif now > known.at_s:
            share = 100.0 * (ticks - known.ticks) / self._tick / (now - known.at_s)
            known.ticks, known.at_s = ticks, now
        return Process(
            pid=pid,
            role=_role(holds),
            command=known.command,
            user=known.user,
            state=_STATES.get(state, state),
            cpu_percent=share,
            rss_bytes=rss,
            threads=threads,
            started_s=self._boot() + start / self._tick,
            holds=holds,
        )

    def _command(self, pid: int) -> str:
        try:
            words = (self._proc / str(pid) / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        except OSError:
            return ""
        return b" ".join(words).decode(errors="replace")[:500]

    def _user(self, pid: int) -> str:
        try:
            uid = (self._proc / str(pid)).stat().st_uid
        except OSError:
            return ""
        try:
            return pwd.getpwuid(uid).pw_name
        except KeyError:
            return str(uid)

    def _boot(self) -> float:
        if not self._boot_s:
            try:
                text = (self._proc / "stat").read_text()
                self._boot_s = float(next(line.split()[1] for line in text.splitlines() if line.startswith("btime")))
            except (OSError, StopIteration, ValueError):
                self._boot_s = -1.0
        return max(self._boot_s, 0.0)


def _role(holds: tuple[str, ...]) -> str:
    kinds = {what.partition(" ")[0] for what in holds if " " in what}
    for kind in ("kvd", "gate", "connector"):
        if kind in kinds:
            return kind
    return "engine"
