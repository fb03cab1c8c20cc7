"""The headless twins: `--once` prints what the screen would show, `--json` the same as data (schema kvtop/1), `--check` judges.

Text is the overview's own lines at the width of the terminal (or of COLUMNS), however narrow, with every segment and nothing
cut for height. Colour only where stdout takes it. JSON: keys are an API, bytes are integers; it grows and never changes meaning.
Never imports Textual.
"""

import json
import math
import os
import shutil
import sys
import time
from pathlib import Path
from typing import TextIO

import msgspec

from kvtools.exits import Exit
from kvtools.output import emit_json, wants_color
from kvtop.alerts import CRITICAL, WARNING
from kvtop.chrome import census, health_mark
from kvtop.columns import Order, arrange, fit_columns, header, paint_row
from kvtop.daemon import Daemon, Tier, histograms, quantiles
from kvtop.model import Model
from kvtop.palette import ANSI
from kvtop.query import Filter
from kvtop.replay import Player
from kvtop.snapshot import Segment, Stats
from kvtop.text import Glyphs, Line, Span, fit, plain, safe, span, spread, width_of
from kvtop.views.base import WHOLE_PAGE, View, level_mark

SCHEMA = "kvtop/1"


def terminal_width() -> int:
    """Columns to write for: COLUMNS, else the terminal's, else 80."""
    return max(1, shutil.get_terminal_size((80, 24)).columns)


def paint(line: Line, stream: TextIO, glyphs: Glyphs) -> str:
    """A line as text for `stream`, with colour where it takes colour; trailing blanks go."""
    if not wants_color(stream):
        return glyphs.spell(plain(line)).rstrip()
    out = []
    for part in line:
        code, text = ANSI.get(part.style, ""), glyphs.spell(part.text)
        out.append(f"\033[{code}m{text}\033[0m" if code and text.strip() else text)
    return "".join(out).rstrip()


def once_lines(model: Model, view: View, width: int, chosen: Filter, order: Order) -> list[Line]:
    """One page of `view`, as many lines as it needs."""
    snapshot = model.snapshot
    if snapshot is None:
        return []
    left = (Span("kvtop  ", "bold"), health_mark(model), Span(f"  {safe(snapshot.host)}", "bold"))
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(snapshot.time_s))
    words = (f"{census(snapshot, model)}  {when}", when, when[11:])
    room = width - width_of(left) - 1
    lines = [spread(left, span(next((text for text in words if len(text) <= room), words[-1]), "dim"), width)]
    lines += view.above(model, width, WHOLE_PAGE)
    rows = arrange(view.rows(model), chosen, order)
    if not rows:
        empty = f"nothing matches {chosen.text}" if chosen.text else view.empty(model)
        return [*lines, fit((Span(empty, "dim"),), width)]
    fitted = fit_columns(view.columns, width)
    lines.append(header(fitted, order, model.glyphs))
    return lines + [paint_row(row, fitted, model, model.glyphs) for row in rows]


def print_once(model: Model, view: View, chosen: Filter, order: Order, width: int) -> None:
    """`kvtop --once`."""
    for line in once_lines(model, view, width, chosen, order):
        sys.stdout.write(paint(fit(line, width), sys.stdout, model.glyphs) + "\n")


def print_check(model: Model) -> Exit:
    """`kvtop --once --check`: one line an alert, and the status: 0 when there is none, else 1."""
    sys.stdout.write(paint((Span("health "), health_mark(model)), sys.stdout, model.glyphs) + "\n")
    for alert in model.alerts:
        line = (level_mark(alert.level, model), Span(f"  {safe(alert.subject)}  ", "bold"), Span(safe(alert.text)))
        sys.stdout.write(paint(line, sys.stdout, model.glyphs) + "\n")
    return check_status(model)


def check_status(model: Model) -> Exit:
    """The exit status that goes with the health."""
    return Exit.FAILED if model.health in (CRITICAL, WARNING) else Exit.OK


def print_json(model: Model, player: Player | None = None) -> None:
    """`kvtop --json`."""
    emit_json(SCHEMA, document(model) | ({"recording": _recording(player)} if player is not None else {}))


def _recording(player: Player) -> dict[str, object]:
    first_s, last_s = player.span
    return {
        "file": str(player.path),
        "readings": player.length,
        "first_s": first_s,
        "last_s": last_s,
        "damage": [
            {
                "file": str(one.path),
                "offset": one.offset,
                "lost_readings": one.lost,
                "after_s": one.after_s or None,
                "until_s": one.until_s or None,
            }
            for one in player.damage
        ],
    }


def document(model: Model) -> dict[str, object]:
    """The body of kvtop/1."""
    snapshot = model.snapshot
    if snapshot is None:
        return {"health": model.health, "segments": []}
    return {
        "time_s": snapshot.time_s,
        "host": snapshot.host,
        "health": model.health,
        "alerts": [{"level": a.level, "subject": a.subject, "text": a.text} for a in model.alerts],
        "segments": [_segment(segment) for segment in snapshot.segments],
        "daemons": [_daemon(model, daemon) for daemon in model.daemons],
        "gpus": [_known(msgspec.to_builtins(gpu)) for gpu in snapshot.gpus],
        "processes": [_known(msgspec.to_builtins(process)) for process in snapshot.processes],
        "engines": [_known(msgspec.to_builtins(engine)) for engine in snapshot.engines],
        "shm": {"total_bytes": snapshot.shm_total_bytes, "free_bytes": snapshot.shm_free_bytes},
        "stats": [_stats(model, stats) for stats in snapshot.stats],
        "problems": [{"source": p.source, "message": p.message} for p in snapshot.problems],
        "read_s": round(snapshot.took_s, 6),
    }


def _known(fields: dict[str, object]) -> dict[str, object]:
    """-1 stands for unknown inside; in JSON that is null."""
    return {key: None if isinstance(value, (int, float)) and value == -1 else value for key, value in fields.items()}


def _segment(segment: Segment) -> dict[str, object]:
    return {
        "ipc": segment.name,
        "limit_bytes": segment.limit_bytes,
        "used_bytes": segment.used_bytes,
        "prealloc_bytes": segment.prealloc_bytes,
        "free_bytes": segment.free_bytes,
        "held_percent": round(segment.share, 2) if math.isfinite(segment.share) else None,
        "state": segment.owner,
        "pid": segment.pid or None,
        "engine": segment.engine or None,
        "model": segment.model or None,
        "devices": list(segment.devices),
        "ranks": segment.ranks or None,
        "start_capacity_bytes": segment.capacity_bytes or None,
        "page_bytes": segment.page_bytes or None,
        "limits": [msgspec.to_builtins(note) for note in segment.limits],
    }


def _daemon(model: Model, daemon: Daemon) -> dict[str, object]:
    now = model.history.ratio(daemon.key("hits_total"), daemon.key("misses_total"))
    return {
        "name": daemon.name,
        "pid": daemon.stats.pid,
        "state": daemon.stats.state,
        "hit_rate": _rounded(daemon.hit_ratio),
        "hit_rate_now": _rounded(now),
        **{name: _number(value) for name, value in daemon.values.items()},
        "tiers": [_tier(tier) for tier in daemon.tiers],
    }


def _tier(tier: Tier) -> dict[str, object]:
    return {"name": tier.name, "type": tier.type, **{name.removeprefix("tier_"): _number(v) for name, v in tier.values.items()}}


def _stats(model: Model, stats: Stats) -> dict[str, object]:
    values = {s.key: _number(v) for s, v in zip(stats.schema, stats.values, strict=False) if s.kind != "bucket"}
    latency: dict[str, object] = {}
    for name, sets in histograms(stats).items():
        for labels in sets:
            found = quantiles(stats, name, (0.5, 0.9, 0.99), labels)
            text = ",".join(f"{k}={v}" for k, v in labels.items())
            latency[f"{name}{{{text}}}" if text else name] = (
                None if found is None else dict(zip(("p50", "p90", "p99"), found, strict=True))
            )
    return {
        "kind": stats.kind,
        "instance": stats.instance,
        "pid": stats.pid,
        "state": stats.state,
        "heartbeat_s": stats.heartbeat_s,
        "values": values,
        "rates": {
            series.key: round(rate, 6)
            for series in stats.schema
            if series.kind == "counter" and (rate := model.history.rate(f"{stats.name}/{series.key}")) is not None
        },
        "quantiles": latency,
    }


def _number(value: float) -> int | float:
    return int(value) if float(value).is_integer() else value


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def write_screen(folder: Path, model: Model, svg: str, text: str, time_s: float) -> list[Path]:
    """Write a screen as SVG and text and the snapshot as JSON, named after the time. Raises OSError; never overwrites."""
    stem = time.strftime("kvtop-%Y%m%d-%H%M%S", time.localtime(time_s))
    body = json.dumps({"schema": SCHEMA, **document(model)}, indent=1, ensure_ascii=False) + "\n"
    paths = []
    for suffix, content in ((".svg", svg), (".txt", text), (".json", body)):
        path = folder / (stem + suffix)
        number = 0
        while True:
            try:
                fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
                break
            except FileExistsError:
                number += 1
                path = folder / f"{stem}-{number}{suffix}"
        try:
            with os.fdopen(fd, "w", encoding="utf-8", errors="backslashreplace") as file:  # names may be no UTF-8
                file.write(content)
        except OSError:
            path.unlink(missing_ok=True)  # half a file, or an empty one, is nothing to keep
            raise
        paths.append(path)
    return paths
