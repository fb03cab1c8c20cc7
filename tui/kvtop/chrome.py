"""What frames every view: the head line, the tabs, the key hints, and how many rows each may have. Pure."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvtop.alerts import CRITICAL, EMPTY, OK, WARNING
from kvtop.keys import VIEWS, Key, shown, usable
from kvtop.model import Model
from kvtop.snapshot import Snapshot
from kvtop.text import Line, Span, clip_text, fit, safe, span, spread, width_of

SHORT = {"segments": "Segs", "processes": "Procs"}
"""Titles that let all tabs into 80 columns."""


@dataclass(frozen=True, slots=True)
class State:
    """What the frame says about the dashboard itself."""

    view: str
    paused: bool = False
    readonly: bool = False
    replay: str = ""
    """Where a replay stands ('03:10:22  41 %'); empty when live."""
    filter: str = ""
    banner: str = ""
    """What went wrong with reading; empty when all is well."""
    shown: int = 0
    total: int = 0
    recording: str = ""


def frame_rows(height: int) -> tuple[int, int]:
    """(rows above, rows below) the view, for a screen of this height."""
    if height >= 9:
        return 2, 1
    if height >= 6:
        return 1, 1
    return (1, 0) if height >= 3 else (0, 0)


def head(model: Model, state: State, width: int, rows: int) -> list[Line]:
    """The head line and, in two rows, the tabs."""
    if rows <= 0:
        return []
    lines = [_head(model, state, width)]
    if rows > 1:
        lines.append(_tabs(state, width, model))
    return lines


def _head(model: Model, state: State, width: int) -> Line:
    snapshot = model.snapshot
    left: list[Span] = [Span(" kvtop ", "chip"), Span(" ")]
    if snapshot is None:
        left.append(Span("reading", "dim"))
    else:
        left += [health_mark(model), Span("  " + safe(snapshot.host), "bold")]
    words: list[Span] = []
    if state.banner:
        words.append(Span(f"{model.glyphs.warn} {state.banner}", "warn"))
    if state.replay:
        words.append(Span(f"REPLAY {state.replay}", "accent"))
    if state.paused:
        words.append(Span("PAUSED", "warn"))
    if state.recording:
        words.append(Span(state.recording, "accent"))
    if state.readonly:
        words.append(Span("read-only", "dim"))
    if snapshot is not None:
        if not words:
            words.append(Span(census(snapshot, model), "dim"))
        if not state.replay:
            words.append(Span(f"every {model.interval_s:g} s", "dim"))
            words.append(Span(time.strftime("%H:%M:%S", time.localtime(snapshot.time_s)), "bold"))
    # What matters most stands first; on a narrow screen words go from the end of the list, the clock first of all.
    while words and width_of(tuple(left)) + sum(len(word.text) + 2 for word in words) > width:
        if len(words) == 1:
            room = width - width_of(tuple(left)) - 2
            words = (
                [Span(clip_text(words[0].text, room, model.glyphs.ellipsis), words[0].style)] if room > 3 and state.banner else []
            )
            break
        words.pop()
    right: list[Span] = []
    for word in words:
        right += [Span("  "), word]
    return fit(spread(tuple(left), tuple(right), width), width)


def health_mark(model: Model) -> Span:
    """Glyph and word of the health."""
    glyphs = model.glyphs
    mark, style = {
        OK: (glyphs.good, "good"),
        WARNING: (glyphs.warn, "warn"),
        CRITICAL: (glyphs.bad, "bad"),
        EMPTY: (glyphs.off, "dim"),
    }[model.health]
    return Span(f"{mark} {model.health}", style)


def census(snapshot: Snapshot, model: Model) -> str:
    """'3 segments, 1 daemon'."""
    daemons = len(model.daemons)
    return f"{len(snapshot.segments)} segment{'s' * (len(snapshot.segments) != 1)}, {daemons} daemon{'s' * (daemons != 1)}"


def _tabs(state: State, width: int, model: Model) -> Line:
    """The tabs: in full, else in short words, else numbers around the open one, else the open one alone."""
    for title_of in ({view: title for view, title, _ in VIEWS}, {view: SHORT.get(view, title) for view, title, _ in VIEWS}):
        full = _tab_spans(state, title_of)
        if width_of(full) <= width:
            return fit(full, width)
    short = _tab_spans(state, {view: (title if view == state.view else "") for view, title, _ in VIEWS})
    if width_of(short) <= width:
        return fit(short, width)
    number, title = next((n, t) for n, (v, t, _) in enumerate(VIEWS, 1) if v == state.view)
    return fit(span(f" {number} {title}", "key"), width, ellipsis=model.glyphs.ellipsis)


def _tab_spans(state: State, titles: dict[str, str]) -> Line:
    out: list[Span] = [Span(" ")]
    for number, (view, title) in enumerate(titles.items(), 1):
        text = f" {number} {title} " if title else f" {number} "
        out.append(Span(text, "chip" if view == state.view else "dim", f"screen.view('{view}')"))
    return tuple(out)


def foot(keys: Sequence[Key], state: State, width: int, model: Model) -> Line:
    """Key hints for this view, as many as fit; at the right, what the table shows."""
    tail: Line = ()
    if state.filter:
        tail = (Span(f"{state.shown} of {state.total}  ", "dim"), Span(f"/{state.filter} ", "accent"))
    elif state.total:
        tail = span(f"{state.total} rows ", "dim")
    room = width - width_of(tail) - 1
    out: list[Span] = [Span(" ")]
    used = 1
    for key in keys:
        if not key.hint or not usable(key, view=state.view, readonly=state.readonly, replay=bool(state.replay)):
            continue
        name, hint = shown(key.keys[0]), key.hint
        if key.id == "pause" and state.paused:
            hint = "go on"
        size = len(name) + len(hint) + 3
        if used + size > room:
            break
        out += [Span(name, "key", f"screen.{key.action}"), Span(" " + hint + "  ", "dim", f"screen.{key.action}")]
        used += size
    return spread(tuple(out), tail, width)
