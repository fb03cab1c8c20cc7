"""Processes: who owns segments and writes stats, and what that costs the host."""

from collections.abc import Sequence

from kvtools.units import format_duration
from kvtop.columns import Column, Order, Row, rows_of
from kvtop.model import Model
from kvtop.snapshot import Process
from kvtop.text import Line, graph, pairs, safe, span, spark, wrap
from kvtop.views.base import Detail, View, amount, nothing_in, percent


def _cpu(process: Process, width: int, model: Model) -> Line:
    if process.cpu_percent < 0:
        return span("-", "dim")
    return span(percent(process.cpu_percent, 1), "bold" if process.cpu_percent >= 100 else "")


def _trend(process: Process, width: int, model: Model) -> Line:
    values = model.history.points(f"process/{process.pid}/cpu", width)
    return span(spark(values, width, model.glyphs, top=max(100.0, *values, 0.0)), "accent")


def _age(process: Process, width: int, model: Model) -> Line:
    return span(format_duration(max(0.0, model.now_s - process.started_s))) if process.started_s else span("-", "dim")


def _state(process: Process, width: int, model: Model) -> Line:
    bad = process.state in ("zombie", "stopped", "disk wait")
    return span((f"{model.glyphs.warn} " if bad else "") + process.state, "warn" if bad else "")


def _holds(process: Process, width: int, model: Model) -> Line:
    return span(safe(", ".join(process.holds)))


def _command(process: Process, width: int, model: Model) -> Line:
    return span(safe(process.command), "dim")


def _memory(process: Process, width: int, model: Model) -> Line:
    return amount(process.rss_bytes)


COLUMNS: tuple[Column, ...] = (
    Column("pid", "PID", 8, lambda p: p.pid, rank=0, right=True, rising=True),
    Column("role", "ROLE", 10, lambda p: p.role, rank=2, rising=True),
    Column("cpu", "CPU", 8, lambda p: p.cpu_percent if p.cpu_percent >= 0 else None, _cpu, rank=1, right=True),
    Column("trend", "CPU TREND", 12, lambda p: p.cpu_percent, _trend, most=24, rank=6),
    Column("rss", "MEMORY", 9, lambda p: p.rss_bytes, _memory, rank=1, right=True),
    Column("threads", "THR", 4, lambda p: p.threads, rank=5, right=True),
    Column("state", "STATE", 11, lambda p: p.state, _state, rank=4, rising=True),
    Column("age", "AGE", 8, lambda p: p.started_s or None, _age, rank=5, right=True, rising=True),
    Column("user", "USER", 10, lambda p: p.user, rank=6, rising=True),
    Column("holds", "HOLDS", 12, lambda p: ", ".join(p.holds), _holds, most=32, rank=0, rising=True),
    Column("command", "COMMAND", 14, lambda p: p.command, _command, most=200, rank=3, rising=True),
)


def rows(model: Model) -> Sequence[Row]:
    """A row a process."""
    return rows_of(model.snapshot.processes if model.snapshot else (), lambda p: str(p.pid), COLUMNS)


def detail(model: Model, row: Row, width: int, height: int) -> Detail:
    """One process: its command in full, what it holds, its CPU over time."""
    process: Process = row.item
    lines = [line for told in (
        pairs([("cpu", _cpu(process, 8, model)), ("memory", amount(process.rss_bytes)), ("threads", span(str(process.threads))),
               ("state", _state(process, 11, model)), ("user", span(safe(process.user))), ("up", _age(process, 8, model))]),
        pairs([("holds", span(safe(", ".join(process.holds)) or "nothing"))]),
    ) for line in wrap(told, width)]  # fmt: skip
    command = safe(process.command)
    lines += [span(command[i : i + width], "dim") for i in range(0, len(command), max(1, width))]
    values = model.history.points(f"process/{process.pid}/cpu", width)
    room = height - 1 - len(lines)
    if room >= 2:
        top = max(100.0, *values, 0.0)
        lines.append(span(f"CPU, full height is {top:.0f} % (100 % is one core)", "dim"))
        lines += graph(values, width, min(8, room), model.glyphs, top=top)
    return Detail(f"pid {process.pid}", process.role, lines)


VIEW = View(
    "processes", "Processes", COLUMNS, rows, Order("cpu"),
    nothing_in("no process of this pid namespace owns a segment or publishes numbers in {shm}"), detail=detail, pane=12,
)  # fmt: skip
