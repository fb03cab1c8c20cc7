"""What frames every view: the head line, the tabs, the key hints, and how many rows each may have. Pure."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvtools.output import visible_width
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
    """What is being recorded ('REC 12 MiB'); empty when nothing is."""
    unrecorded: str = ""
    """Why a recording has stopped; empty when it has not."""
    damaged: str = ""
    """That the recording shown is damaged ('damaged in 2 places'); empty when it is whole."""


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
    """Chip, health and host at the left; at the right what matters, then what is good to know as far as there is room.

    On a narrow screen the clock goes first, then the other words from the end; then what matters is said in short, and the host's
    name is cut. What is wrong stays to the last column.
    """
    snapshot = model.snapshot
    left: list[Span] = [Span(" kvtop ", "chip"), Span(" ")]
    left.append(Span("reading", "dim") if snapshot is None else health_mark(model))
    host = safe(snapshot.host) if snapshot is not None else ""
    room = width - width_of(tuple(left))
    full, brief = _loud(model, state)
    said = full if _taken(full) + 2 + min(visible_width(host), 12) <= room else brief
    while len(said) > 1 and _taken(said) > room:
        said = said[:-1]
    space = room - _taken(said) - 2
    if host and (space >= 6 or space >= visible_width(host)):
        left.append(Span("  " + clip_text(host, space, model.glyphs.ellipsis), "bold"))
    rest = _quiet(model, state, alone=not said)
    while rest and _taken([*said, *rest]) + width_of(tuple(left)) > width:
        rest.pop()
    right = [part for word in (*said, *rest) for part in (Span("  "), word)]
    if width_of(tuple(left)) + width_of(tuple(right)) >= width:
        return fit((*left, *right), width, ellipsis=model.glyphs.ellipsis)
    return spread(tuple(left), tuple(right), width)


def _taken(words: Sequence[Span]) -> int:
    """Columns that words take, each with the gap before it."""
    return sum(visible_width(word.text) + 2 for word in words)


def _loud(model: Model, state: State) -> tuple[list[Span], list[Span]]:
    """What nobody may miss, most important first: in full, and in short."""
    warn = model.glyphs.warn
    words = [
        (f"{warn} {state.banner}" if state.banner else "", f"{warn} {clip_text(state.banner, 16, model.glyphs.ellipsis)}", "warn"),
        (f"{warn} not recorded: {state.unrecorded}" if state.unrecorded else "", f"{warn} NO REC", "warn"),
        (f"{warn} {state.damaged}" if state.damaged else "", f"{warn} DAMAGED", "warn"),
        (f"REPLAY {state.replay}" if state.replay else "", f"REPLAY{state.replay.rpartition('  ')[2]:>6}", "accent"),
        ("PAUSED" if state.paused else "", "PAUSED", "warn"),
    ]
    said = [(safe(full), safe(brief), style) for full, brief, style in words if full]
    return [Span(full, style) for full, _, style in said], [Span(brief, style) for _, brief, style in said]


def _quiet(model: Model, state: State, *, alone: bool) -> list[Span]:
    """What is good to know, most important first."""
    words: list[Span] = []
    if state.recording:
        words.append(Span(state.recording, "accent"))
    if state.readonly:
        words.append(Span("read-only", "dim"))
    if model.snapshot is not None:
        if alone and not words:
            words.append(Span(census(model.snapshot, model), "dim"))
        if not state.replay:
            words.append(Span(f"every {model.interval_s:g} s", "dim"))
            words.append(Span(time.strftime("%H:%M:%S", time.localtime(model.snapshot.time_s)), "bold"))
    return words


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
