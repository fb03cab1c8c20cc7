"""The overview: what is wrong, memory, the daemon, and the segments, on one page of any size.

Wide screens get boxes side by side, narrow ones a box under the other, tiny ones a line each. `above` fits the rows it is
given by dropping from the bottom: alerts stay longest, then the daemons' numbers, then memory.
"""

from kvtools.units import format_rate, format_size
from kvtop.connectors import KIND, connectors_of
from kvtop.daemon import Daemon, Tier
from kvtop.model import Model
from kvtop.snapshot import FRESH, GONE, Engine, Gpu, Snapshot
from kvtop.text import Line, Span, bar, beside, box, fit, pairs, safe, span, spark, width_of
from kvtop.views.base import NO_DAEMON, WHOLE_PAGE, count, level_mark, load_style, per_second, percent, ratio, unread
from kvtop.views.segments import segment_view, totals

_WIDE = 100
_LABEL = 8
_NUMBERS = 21
"""Columns of '1023 MiB / 1023 MiB'."""


def above(model: Model, width: int, height: int) -> list[Line]:
    """At most `height` rows about the host."""
    snapshot = model.snapshot
    if snapshot is None or height <= 0 or width <= 0:
        return []
    alerts = _alerts(model, width, len(model.alerts) if height >= WHOLE_PAGE else 3 if height > 12 else 1)
    room = height - len(alerts)
    if room < 4 or width < 30:
        return (alerts + _brief(model, snapshot, width))[:height]
    columns = 2 if width >= _WIDE else 1
    widths = [(width - columns + 1) // columns] * columns
    widths[-1] = width - sum(widths[:-1]) - (columns - 1)
    memory, daemons = _memory(model, snapshot, widths[0] - 4), _daemons(model, widths[-1])
    if columns == 2:
        title, lines, note = _join(daemons, widths[-1] - 4)
        tall = min(room, max(len(memory), len(lines)) + 2)
        if len(daemons) > 1:
            # Many daemons leave room for the pane; one alone is shown whole.
            tall = max(min(tall, 2 * height // 3), min(room, max(len(memory), *(len(each) for _, each, _ in daemons)) + 2))
        left = box("memory", memory, widths[0], model.glyphs, height=tall)
        return alerts + beside([left, box(title, lines, widths[1], model.glyphs, note=note, height=tall)], widths)
    return (alerts + _stacked(model, memory, daemons, width, room))[:height]


def _stacked(model: Model, memory: list[Line], daemons: list[tuple[str, list[Line], str]], width: int, room: int) -> list[Line]:
    out: list[Line] = []
    for title, lines, note in [_join(daemons, width - 4), ("memory", memory, "")]:
        left = room - len(out)
        if left >= 4:
            out += box(title, lines[: left - 2], width, model.glyphs, note=note)
    return out


def _alerts(model: Model, width: int, most: int) -> list[Line]:
    out = []
    for alert in model.alerts[:most]:
        out.append(
            fit(
                (level_mark(alert.level, model), Span("  "), Span(safe(alert.subject), "bold"), Span("  " + safe(alert.text))),
                width,
            )
        )
    rest = len(model.alerts) - most
    if rest > 0 and out:
        more = f"  +{rest} more (a lists all)" if width >= 76 else f"  +{rest}: a"
        out[-1] = (*fit(out[-1], max(0, width - len(more))), Span(more[:width], "dim", "screen.alerts"))
    return out


def _brief(model: Model, snapshot: Snapshot, width: int) -> list[Line]:
    """One line a thing, for very small screens."""
    used, prealloc, limit = totals(snapshot.segments)
    lines = []
    for daemon in model.daemons:
        if daemon.stats.state == GONE:
            continue  # an alert says so
        lines.append(
            pairs([
                ("arena", span(percent(_share(daemon.get("arena_bytes_used"), daemon.get("arena_bytes_limit"))))),
                ("hits", span(ratio(daemon.hit_ratio))),
                ("get", span(_rate(model, daemon, "get_bytes_total"))),
            ], gap="  ")
        )  # fmt: skip
    if snapshot.segments:
        lines.append(pairs([("held", span(format_size(used + prealloc))), ("of", span(format_size(limit)))], gap=" "))
    return [fit(line, width) for line in lines]


# --- memory ------------------------------------------------------------------------------------------------------------


def _memory(model: Model, snapshot: Snapshot, width: int) -> list[Line]:
    lines = [_gpu(model, gpu, width) for gpu in snapshot.gpus]
    used, prealloc, limit = totals(snapshot.segments)
    live = len(snapshot.segments)
    text = f"{format_size(used + prealloc)} / {format_size(limit)}"
    lines.append(
        _meter(
            "pools",
            [(used, "used"), (prealloc, "prealloc")],
            limit,
            text,
            width,
            model,
            empty="" if live else "not known" if unread(model) else "no segments",
        )
    )
    memory = sum(gpu.total_bytes for gpu in snapshot.gpus if gpu.total_bytes > 0)
    if memory and limit > memory:
        lines.append(span(f"{'':{_LABEL}}limits add up to {format_size(limit)} on {format_size(memory)} of GPU memory", "dim"))
    if snapshot.shm_total_bytes:
        taken = snapshot.shm_total_bytes - snapshot.shm_free_bytes
        text = f"{format_size(taken)} / {format_size(snapshot.shm_total_bytes)}"
        lines.append(_meter("shm", [(taken, "used")], snapshot.shm_total_bytes, text, width, model))
    lines += [_engine(model, engine) for engine in snapshot.engines]
    lines += _connectors(model, snapshot, width)
    others = [stats for stats in snapshot.stats if stats.kind not in ("kvd", KIND)]
    if others:
        kinds = sorted({stats.kind for stats in others})
        words: list[tuple[str, Line]] = []
        for kind in kinds:
            fresh = sum(1 for stats in others if stats.kind == kind and stats.state == FRESH)
            total = sum(1 for stats in others if stats.kind == kind)
            words.append((kind, span(f"{fresh} of {total} up", "" if fresh == total else "warn")))
        lines.append((Span(f"{'writers':{_LABEL}}", "dim"), *pairs(words)))
    return lines


def _connectors(model: Model, snapshot: Snapshot, width: int) -> list[Line]:
    """What engines load and save through their connectors, and whether they have their daemon."""
    found = connectors_of(snapshot)
    if not found.all:
        return []
    up, all_ = len(found.fresh), len(found.all)
    words: list[tuple[str, Line]] = [("", span(f"{up} of {all_} up", "" if up == all_ else "warn"))]
    if found.away:
        words.append(("", span(f"{model.glyphs.warn} {len(found.away)} without its daemon", "warn")))
    tokens = found.rate(model.history, "hit_tokens_total")
    words.append(("hit", span("-" if tokens is None else f"{count(tokens)} tok/s")))
    for label, name in (("load", "load_bytes_total"), ("save", "save_bytes_total")):
        rate = found.rate(model.history, name)
        words.append((label, span("-" if rate is None else format_rate(rate))))
    if past := found.total("direct_load_bytes_total") + found.total("direct_save_bytes_total"):
        moved = found.total("load_bytes_total") + found.total("save_bytes_total")
        words.append(("direct", span(percent(100 * past / max(past, moved)))))
    if failed := found.total("load_failures_total") + found.total("save_failures_total"):
        words.append(("failed", span(count(failed), "warn")))
    while len(words) > 1 and _LABEL + sum(len(label) + width_of(line) + 3 for label, line in words) > width:
        words.pop(-1 if not failed else -2)
    return [(Span(f"{'engines':{_LABEL}}", "dim"), *pairs(words))]


def _gpu(model: Model, gpu: Gpu, width: int) -> Line:
    label = f"gpu{gpu.index}"
    if gpu.total_bytes <= 0 or gpu.used_bytes < 0:
        return (Span(f"{label:{_LABEL}}", "dim"), Span(safe(gpu.name) or "no numbers"))
    text = f"{format_size(gpu.used_bytes)} / {format_size(gpu.total_bytes)}"
    if gpu.busy_percent >= 0 and width > 60:
        text += f"  busy {gpu.busy_percent:3.0f} %"
    if gpu.temperature_c >= 0 and width > 70:
        text += f"  {gpu.temperature_c:3.0f} C"
    if gpu.power_w >= 0 and width > 78:
        text += f"  {gpu.power_w:4.0f} W"
    return _meter(label, [(gpu.used_bytes, "used")], gpu.total_bytes, text, width, model)


def _engine(model: Model, engine: Engine) -> Line:
    words: list[tuple[str, Line]] = [("running", span(count(engine.running))), ("waiting", span(count(engine.waiting)))]
    if engine.cache_used >= 0:
        words.append(("cache", span(percent(100 * engine.cache_used))))
    name = engine.model or engine.url
    return (
        Span(f"{'engine':{_LABEL}}", "dim"),
        Span(safe(name) + "  ", "bold"),
        *(pairs(words) if not engine.problem else span(engine.problem, "warn")),
    )


def _meter(label: str, parts: list[tuple[float, str]], total: float, text: str, width: int, model: Model, empty: str = "") -> Line:
    """'label  ████░░░  12 / 32 GiB   38 %'."""
    head = Span(f"{label[: _LABEL - 1]:{_LABEL}}", "dim")
    if empty:
        return (head, Span(empty, "dim"))
    share = _share(sum(amount for amount, _ in parts), total)
    # Numbers in columns of their own, so that bars end at the same place whatever the numbers are.
    text = f"{text:>{_NUMBERS}}"
    tail = f"  {text}  {percent(share):>6}"
    columns = width - _LABEL - len(tail)
    if columns < 4:
        text = text.strip()
        return (head, Span(f"{text}  {percent(share)}", load_style(share or 0.0)))
    return (
        head,
        *bar(columns, parts, total, model.glyphs),
        Span(f"  {text}"),
        Span(f"  {percent(share):>6}", load_style(share or 0.0, 101, 101)),
    )


# --- daemons -----------------------------------------------------------------------------------------------------------


def _daemons(model: Model, width: int) -> list[tuple[str, list[Line], str]]:
    if not model.daemons:
        return [("kvd", [span(NO_DAEMON(model), "dim")], "")]
    return [(daemon.name, _daemon(model, daemon, width - 4), _note(model, daemon)) for daemon in model.daemons]


def _join(daemons: list[tuple[str, list[Line], str]], width: int) -> tuple[str, list[Line], str]:
    """Several daemons in one box: for each its name, arena and hits, and one line a tier; those that are gone share a line."""
    if len(daemons) == 1:
        return daemons[0]
    lines: list[Line] = []
    gone = [title for title, _, note in daemons if note == GONE]
    for title, body, note in daemons:
        if note != GONE:
            lines += [(Span(title, "title"), Span("  " + note, "dim")), *body[:2], *body[4:]]
    if gone:
        lines.append((Span(f"{GONE:{_LABEL}}", "dim"), Span(safe(", ".join(gone)))))
    return f"{len(daemons)} daemons", lines, ""


def _note(model: Model, daemon: Daemon) -> str:
    if daemon.stats.state != FRESH:
        return daemon.stats.state
    return f"pid {daemon.stats.pid}"


def _daemon(model: Model, daemon: Daemon, width: int) -> list[Line]:
    used, limit = daemon.get("arena_bytes_used"), daemon.get("arena_bytes_limit")
    lines = [_meter("arena", [(used, "used")], limit, f"{format_size(used)} / {format_size(limit)}", width, model)]
    lines.append(_hits(model, daemon, width))
    lines.append(
        (Span(f"{'traffic':{_LABEL}}", "dim"), *pairs([
            ("get", span(_rate(model, daemon, "get_bytes_total"))),
            ("put", span(_rate(model, daemon, "set_bytes_total"))),
            ("evicted", span(per_second(model.history.rate(daemon.key("evictions_total"))))),
        ]))
    )  # fmt: skip
    quarantine, rejected, corrupt = daemon.get("quarantine_bytes"), daemon.rejections, daemon.get("corruptions_total")
    counts: list[tuple[str, Line]] = [
        ("entries", span(f"{daemon.get('entries'):,.0f}")),
        ("leases", span(f"{daemon.get('leases_active'):,.0f}")),
    ]
    if quarantine:
        counts.append(("quarantine", span(format_size(quarantine), "warn")))
    if rejected:
        counts.append(("rejected", span(f"{rejected:,.0f}", "warn")))
    counts.append(("corrupt", span(f"{corrupt:,.0f}", "bad" if corrupt else "")))
    lines.append((Span(f"{'holds':{_LABEL}}", "dim"), *pairs(counts)))
    lines += [_tier(model, tier, width) for tier in daemon.tiers]
    return lines


def _hits(model: Model, daemon: Daemon, width: int) -> Line:
    now = model.history.ratio(daemon.key("hits_total"), daemon.key("misses_total"))
    words = pairs([("now", span(ratio(now), "bold")), ("ever", span(ratio(daemon.hit_ratio)))], gap="  ")
    head = (Span(f"{'hits':{_LABEL}}", "dim"), *words)
    room = width - _LABEL - sum(len(part.text) for part in words) - 2
    if room < 8:
        return head
    values = model.history.ratios(daemon.key("hits_total"), daemon.key("misses_total"), room)
    return (*head, Span("  "), Span(spark(values, room, model.glyphs, top=1.0), "accent"))


def _tier(model: Model, tier: Tier, width: int) -> Line:
    hits, misses = tier.get("tier_hits_total"), tier.get("tier_misses_total")
    used = format_size(tier.used_bytes) if tier.usage_known else "?"
    text = used + (f" / {format_size(tier.limit_bytes)}" if tier.limit_bytes else "")
    hit = f"hit {ratio(hits / (hits + misses)):>7}" if hits + misses and width > 60 else ""
    if tier.broken:
        return (
            Span(f"{safe(tier.name)[: _LABEL - 1]:{_LABEL}}", "dim"),
            Span(f"{model.glyphs.bad} breaker open  ", "bad"),
            Span(text),
        )
    if not tier.limit_bytes:
        return (Span(f"{safe(tier.name)[: _LABEL - 1]:{_LABEL}}", "dim"), Span(f"{text}  {hit}".rstrip()))
    if hit:
        text = f"{hit}  {text:>{_NUMBERS}}"
    return _meter(safe(tier.name), [(tier.used_bytes, "used")], tier.limit_bytes, text, width, model)


def _rate(model: Model, daemon: Daemon, name: str) -> str:
    rate = model.history.rate(daemon.key(name))
    return "-" if rate is None else format_rate(rate)


def _share(part: float, whole: float) -> float | None:
    return 100.0 * part / whole if whole > 0 else None


VIEW = segment_view("overview", "Overview", above=above, pane=10, spare=True)
