"""Doctor: this host's readiness as kvdoctor judges it, worst first; below, one check with what to do."""

import textwrap
import time
from collections.abc import Sequence

from kvtop.columns import Column, Order, Row, rows_of
from kvtop.doctor import Check, Diagnosis
from kvtop.model import Model
from kvtop.text import Line, Span, fit, pairs, safe, span
from kvtop.views.base import Detail, View

_ORDER = {"fail": 0, "warn": 1, "unknown": 2, "pass": 3, "info": 4, "skip": 5}
_STYLES = {"fail": "bad", "warn": "warn", "unknown": "warn", "pass": "good", "info": "", "skip": "dim"}


def _mark(status: str, model: Model) -> Span:
    glyphs = model.glyphs
    glyph = {"fail": glyphs.bad, "warn": glyphs.warn, "unknown": glyphs.unknown, "pass": glyphs.good}.get(status, glyphs.dot)
    return Span(f"{glyph} {status}", _STYLES.get(status, ""))


def _status(check: Check, width: int, model: Model) -> Line:
    return (_mark(check.status, model),)


def _observed(check: Check, width: int, model: Model) -> Line:
    return span(safe(check.observed))


def _title(check: Check, width: int, model: Model) -> Line:
    return span(safe(check.title or check.id), "bold")


COLUMNS: tuple[Column, ...] = (
    Column("status", "STATUS", 9, lambda c: _ORDER.get(c.status, 9), _status, rank=0, rising=True),
    Column("title", "CHECK", 16, lambda c: c.title or c.id, _title, most=44, rank=1, rising=True),
    Column("observed", "OBSERVED", 16, lambda c: c.observed, _observed, most=120, rank=2, rising=True),
    Column("group", "GROUP", 9, lambda c: c.group, rank=5, rising=True),
    Column("scope", "OF", 8, lambda c: c.scope, most=24, rank=6, rising=True),
    Column("id", "ID", 14, lambda c: c.id, most=28, rank=7, rising=True),
)


def rows(model: Model) -> Sequence[Row]:
    """A row a check."""
    found: Diagnosis | None = model.doctor
    return rows_of(found.checks if found else (), lambda c: f"{c.id}/{c.scope}", COLUMNS)


def above(model: Model, width: int, height: int) -> list[Line]:
    """The two verdicts and the next step."""
    found: Diagnosis | None = model.doctor
    if height <= 0:
        return []
    if found is None:
        return [fit(span("looking at this host", "dim"), width)]
    if found.problem:
        return [fit(span(f"{model.glyphs.warn} the doctor could not look: {safe(found.problem)}", "warn"), width)]
    when = time.strftime("%H:%M:%S", time.localtime(found.at_s))
    lines = [
        pairs([
            ("GPU-direct", _verdict(found.direct, model)), ("POSIX tier", _verdict(found.posix, model)),
            ("looked at", span(f"{when}, took {found.took_s:.1f} s", "dim")),
        ]),
    ]  # fmt: skip
    if found.next_step:
        lines.append(span(f"next: {safe(found.next_step)}"))
    return [fit(line, width) for line in [*lines, ()]][:height]


def _verdict(word: str, model: Model) -> Line:
    glyphs = model.glyphs
    if word.startswith("ready") or word == "usable":
        return span(f"{glyphs.good} {word}", "good" if "warn" not in word else "warn")
    if word in ("undetermined", "no-gpu", "unknown"):
        return span(f"{glyphs.unknown} {word}", "dim")
    return span(f"{glyphs.bad} {word}", "bad")


def detail(model: Model, row: Row, width: int, height: int) -> Detail:
    """One check in full."""
    check: Check = row.item
    lines: list[Line] = [(_mark(check.status, model), Span(f"  {safe(check.id)}", "dim"), Span(f"  of {safe(check.scope)}", "dim"))]
    for label, text in (
        ("observed", check.observed),
        ("expected", check.expected),
        ("why", check.why),
        ("fix", check.fix),
    ):
        for number, part in enumerate(textwrap.wrap(safe(text), max(8, width - 10))):
            lines.append((Span(f"{label if number == 0 else '':10}", "dim"), Span(part)))
    return Detail(safe(check.title or check.id), check.group, lines)


VIEW = View(
    "doctor", "Doctor", COLUMNS, rows, Order("status", rising=True), lambda _: "the doctor has not looked yet",
    above=above, detail=detail, pane=10,
)  # fmt: skip
