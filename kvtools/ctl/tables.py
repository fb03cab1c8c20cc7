"""What list and show print: one JSON body and one table from the same facts.

JSON keys are an API: `ipc`, `limit_bytes`, `used_bytes` come first and mean what kvcached's own tool means by them; more keys
follow. What is not known is null, never a guess. Tables are for people: sizes in IEC units, a word beside every colour.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvtools.output import paint, printable, table, visible_width
from kvtools.segments.owner import LimitEntry, PoolState
from kvtools.segments.pool import PoolReading
from kvtools.units import format_size

HEADER = ("IPC", "Limit", "Used", "%", "Prealloc", "Free", "State")
RIGHT = (1, 2, 3, 4, 5)
_STATE_STYLE = {"live": "good", "stale": "bad", "unknown": "dim"}


def words(reading: PoolReading) -> dict[str, Any]:
    """The numbers of one reading as JSON."""
    return {
        "ipc": reading.name,
        "limit_bytes": reading.limit_bytes,
        "used_bytes": reading.used_bytes,
        "prealloc_bytes": reading.prealloc_bytes,
        "mapped_bytes": reading.mapped_bytes,
        "free_bytes": reading.free_bytes,
        "used_percent": round(reading.used_fraction * 100, 2),
        "mtime_ns": reading.mtime_ns,
    }


def segment(state: PoolState) -> dict[str, Any]:
    """One segment as JSON, for list and watch."""
    owner = state.owner
    said = owner is not None and not owner.error
    return {
        **words(state.reading),
        "state": state.state,
        "owner_pid": owner.pid if owner and said else None,
        "engine": owner.info.engine if owner and said else None,
        "model": owner.info.model if owner and said else None,
        "devices": list(owner.info.devices) if owner and said else None,
        "start_capacity_bytes": (owner.info.start_capacity_bytes or None) if owner and said else None,
        "page_bytes": (owner.info.page_bytes or None) if owner and said else None,
    }


def details(state: PoolState, root: Path) -> dict[str, Any]:
    """One segment as JSON, for show: everything its files say."""
    owner = state.owner
    body = segment(state)
    body["evidence"] = state.evidence
    body["overage_bytes"] = state.reading.overage_bytes
    body["file"] = {
        "path": str(root / state.name),
        "mode": f"{state.reading.mode:04o}",
        "uid": state.reading.uid,
        "inode": state.reading.inode,
    }
    body["owner"] = None
    if owner is not None:
        info = owner.info
        body["owner"] = {
            "alive": owner.alive, "pid": owner.pid, "pid_start": owner.pid_start, "pid_namespace": owner.pid_namespace,
            "since_ns": owner.since_ns, "engine": info.engine, "version": info.version, "model": info.model,
            "tp_rank": info.tp_rank, "tp_size": info.tp_size, "pp_rank": info.pp_rank, "pp_size": info.pp_size,
            "dp_rank": info.dp_rank, "error": owner.error or None,
        }  # fmt: skip
    body["limits"] = [entry(one) for one in owner.limits] if owner is not None else []
    return body


def entry(one: LimitEntry) -> dict[str, Any]:
    """One line of a pool's history as JSON."""
    return {
        "limit_bytes": one.limit_bytes, "by": one.by, "at_ns": one.at_ns, "state": one.state,
        "effective_bytes": one.effective_bytes, "reason": one.reason or None,
    }  # fmt: skip


def row(state: PoolState) -> tuple[str, ...]:
    """Cells for one segment, coloured where stdout takes colour."""
    reading = state.reading
    return (
        printable(state.name),
        format_size(reading.limit_bytes),
        format_size(reading.used_bytes),
        percent(reading),
        format_size(reading.prealloc_bytes),
        format_size(reading.free_bytes),
        paint(state.state, _STATE_STYLE[state.state]),
    )


def percent(reading: PoolReading) -> str:
    """Used of the limit: green below 50, yellow below 80, red from there; '-' where a limit of 0 makes it meaningless."""
    if not reading.limit_bytes:
        return "-"
    value = reading.used_fraction * 100
    return paint(f"{value:.1f} %", "good" if value < 50 else "warn" if value < 80 else "bad")


def owned_by(state: PoolState) -> str:
    """Who owns the segment, for people: 'vllm pid 812', '-' where nothing says it."""
    if state.owner is None or not state.owner.pid:
        return "-"
    return printable(f"{state.owner.info.engine or 'pid'} {state.owner.pid}")


LONG_NAME = 32
"""A name up to here keeps its line: kvcached's own defaults are shorter."""


def render(states: Sequence[PoolState], extra: Mapping[str, Sequence[str]] | None = None, *, width: int | None = None) -> list[str]:
    """The table of `kvctl list`: a column of owners where any is known, then those of `extra` (heading to cells).

    Where it is wider than `width` columns (of a terminal; None elsewhere), long names get lines of their own above their
    numbers: one of 255 characters would push everybody's numbers off the screen.
    """
    columns = dict(extra or {})
    if any(state.owner is not None and state.owner.pid for state in states):
        columns = {"Owner": [owned_by(state) for state in states], **columns}
    lines = [(*row(state), *(cells[i] for cells in columns.values())) for i, state in enumerate(states)]
    whole = table((*HEADER, *columns), lines, right=RIGHT)
    if width is None or all(visible_width(line) <= width for line in whole):
        return whole
    others = max(map(visible_width, table((*HEADER[1:], *columns), [line[1:] for line in lines])))
    room = max(width - others - 2, LONG_NAME)
    alone = [line[0] if visible_width(line[0]) > room else "" for line in lines]
    kept = [("", *line[1:]) if name else line for name, line in zip(alone, lines, strict=True)]
    heading, *rest = table((*HEADER, *columns), kept, right=RIGHT)
    return [heading, *(text for name, line in zip(alone, rest, strict=True) for text in (name, line) if text)]
