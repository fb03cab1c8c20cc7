"""`kvctl watch`: the table again and again, and the loop that other commands repeat themselves with.

On a terminal the table is redrawn in place (cursor home, erase to the end: no flicker, no subprocess), cut to the window's
height with a line that says so. Elsewhere each round is a time stamp and the table, or with --json one object a line. A
segment that cannot be read for one round is shown as such and the watch goes on.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from kvtools.ctl import tables
from kvtools.errors import KvError, UsageError
from kvtools.output import emit, emit_json, paint, printable, terminal_width
from kvtools.segments import pool
from kvtools.segments.owner import PoolState, judge
from kvtools.units import format_size


def check_interval(interval_s: float) -> float:
    """`interval_s`; UsageError below 50 ms or above a day: the first only burns CPU, the second is a slip."""
    if not 0.05 <= interval_s <= 86400:
        raise UsageError(f"interval out of range: {interval_s:g} s", hint="from 50ms to 1d")
    return interval_s


def repeat(
    act: Callable[[], None], *, interval_s: float, count: int | None = None, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Call `act` every `interval_s` seconds, `count` times or until interrupted; a slow round is not made up for."""
    done = 0
    while True:
        began = time.monotonic()
        act()
        done += 1
        if count is not None and done >= count:
            return
        sleep(max(interval_s - (time.monotonic() - began), 0.01))


class Watch:
    """The rounds of one `kvctl watch`. Remembers the last use of each segment, to show how it changes."""

    def __init__(self, names: Sequence[str], *, root: Path, as_json: bool, interval_s: float) -> None:
        self._names = names
        self._root = root
        self._json = as_json
        self._interval_s = interval_s
        self._used: dict[str, int] = {}
        self._in_place = sys.stdout.isatty() and not as_json

    def round(self) -> None:
        """Read and print once."""
        states, problems = self._look()
        if self._json:
            segments = [tables.segment(state) for state in states]
            emit_json("kvctl.watch/1", {"at_ns": time.time_ns(), "segments": segments, "problems": problems}, indent=None)
        else:
            lines = self._lines(states, problems)
            if self._in_place:
                sys.stdout.write("\033[H" + "".join(f"{line}\033[K\n" for line in self._cut(lines)) + "\033[J")
            else:
                emit("\n".join([*lines, ""]))
        sys.stdout.flush()
        self._used = {state.name: state.reading.used_bytes for state in states}

    def __enter__(self) -> Self:
        if self._in_place:
            sys.stdout.write("\033[?1049h\033[?25l\033[?7l\033[2J")
        return self

    def __exit__(self, *_: object) -> None:
        if self._in_place:
            sys.stdout.write("\033[?7h\033[?25h\033[?1049l")
            sys.stdout.flush()

    def _look(self) -> tuple[list[PoolState], list[dict[str, str]]]:
        if not self._names:
            listing = pool.list_pools(self._root, timeout_s=min(self._interval_s, 1.0))
            problems = [{"ipc": p.name, "error": p.error.message} for p in listing.unreadable]
            return [judge(reading, root=self._root) for reading in listing.pools], problems
        states, problems = [], []
        for name in self._names:
            try:
                states.append(judge(pool.read_pool(name, root=self._root, timeout_s=min(self._interval_s, 1.0)), root=self._root))
            except KvError as error:
                problems.append({"ipc": name, "error": error.message})
        return states, problems

    def _lines(self, states: list[PoolState], problems: list[dict[str, str]]) -> list[str]:
        lines = [f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {len(states)} segment{'s' * (len(states) != 1)} in {self._root}"]
        lines += self._table(states) if states else ["none"]
        return lines + [paint(printable(f"{p['ipc']}: {p['error']}"), "bad") for p in problems]

    def _table(self, states: list[PoolState]) -> list[str]:
        width = terminal_width() if self._in_place else None
        return tables.render(states, {"Change": [self._change(state) for state in states]}, width=width)

    def _change(self, state: PoolState) -> str:
        before = self._used.get(state.name)
        if before is None or before == state.reading.used_bytes:
            return ""
        change = state.reading.used_bytes - before
        return paint(f"{'+' if change > 0 else ''}{format_size(change)}", "accent")

    def _cut(self, lines: list[str]) -> list[str]:
        try:
            height = os.get_terminal_size(sys.stdout.fileno()).lines
        except OSError:
            height = 24
        if len(lines) < height or height < 3:
            return lines[: max(height - 1, 1)]
        return [*lines[: height - 2], f"... {len(lines) - height + 2} more: make the window higher, or name segments"]
