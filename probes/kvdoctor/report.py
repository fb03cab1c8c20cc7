"""A report for people: two verdicts, root causes with what follows from them, one line a group where all is well.

Every state is a word or a mark besides its colour. Text and JSON are made from the same records. The text may change; the
JSON (schema kvdoctor.report/1) only grows.
"""

import sys
from collections.abc import Iterable
from typing import TextIO

from kvdoctor.results import WORST, Report, Result, Status, worst
from kvdoctor.rules.base import GROUPS
from kvtools.output import emit, paint, printable

MARKS = {"pass": "ok", "info": "i", "warn": "!", "fail": "x", "unknown": "?", "skip": "-"}
COLORS = {"pass": "good", "info": "dim", "warn": "warn", "fail": "bad", "unknown": "warn", "skip": "dim"}
VERDICTS = {
    "ready": ("READY", "good"),
    "ready-with-warnings": ("READY, with warnings", "warn"),
    "not-ready": ("NOT READY", "bad"),
    "undetermined": ("UNDETERMINED", "warn"),
    "no-gpu": ("no AMD/NVIDIA GPU: GPU-direct checks skipped", "dim"),
}
POSIX = {"usable": ("ready", "good"), "degraded": ("degraded", "warn"), "unusable": ("UNUSABLE", "bad")}
WIDTH = 14


def mark(status: str) -> str:
    return paint(f"{'[' + MARKS[status] + ']':<4}", COLORS[status])


def show(report: Report, *, verbose: bool = False) -> None:
    """The whole report on stdout."""
    for line in lines(report, verbose=verbose):
        emit(line)


def lines(report: Report, *, verbose: bool = False) -> Iterable[str]:
    """Its lines. `verbose` adds every check, with evidence."""
    yield header(report)
    for place in report.host.get("paths", []):
        yield paint(f"path {printable(place['path'])} (from {place['from']})", "dim")
    yield ""
    text, style = VERDICTS[report.verdict]
    tier, tier_style = POSIX[report.posix]
    yield f"GPU-direct: {paint(text, style)}        POSIX tier: {paint(tier, tier_style)}"
    if report.selected:
        yield paint("(of the checks selected)", "dim")
    yield ""
    yield from _detailed(report) if verbose else _grouped(report)
    yield ""
    yield closing(report)


def header(report: Report) -> str:
    from kvtools import __version__

    host = report.host
    driver = host.get("driver", {})
    parts = [f"kvdoctor {__version__}"]
    if host.get("name"):
        parts.append(f"host {printable(str(host['name']))}")
    if host.get("kernel"):
        parts.append(f"kernel {printable(str(host['kernel']))}")
    for name in ("amdgpu", "nvidia"):
        if driver.get(name):
            parts.append(f"{name} {printable(str(driver[name]))} (loaded)")
    count = len(host.get("paths", []))
    parts.append(f"{count} KV path{'s' * (count != 1)}")
    if host.get("partial"):
        parts.append("partial capture")
    parts.append(f"{report.seconds:.2f} s")
    return "  ".join(parts)


def _grouped(report: Report) -> Iterable[str]:
    """Root causes first, each with its followers; then one line a group in which nothing is wrong."""
    told: set[str] = set()
    for check_id in report.roots:
        if check_id == "gpu.present":
            continue
        for item in report.by_id(check_id):
            if item.bad and not item.caused_by:
                yield from _cause(report, item)
        told.add(check_id)
    for key, name in GROUPS.items():
        mine = [item for item in report.results if item.group == key]
        bad = any(item.bad and item.id != "gpu.present" for item in mine)
        good = [item for item in mine if item.status == "pass"]
        if key == "proof":
            # Measured on request: the figures are what was asked for.
            yield from (f"{mark('pass')} {name:<{WIDTH}}{printable(f'{item.scope}: {item.observed}')}" for item in good)
        elif not bad and good:
            yield f"{mark('pass')} {name:<{WIDTH}}{_summary(good)}"


def _cause(report: Report, item: Result) -> Iterable[str]:
    name = GROUPS.get(item.group, item.group)
    where = "" if item.scope == "host" or item.scope in item.observed else f"{item.scope}: "
    yield f"{mark(item.status)} {name:<{WIDTH}}{printable(where + item.observed)}  {paint(item.id, 'dim')}"
    pad = " " * (WIDTH + 5)
    if item.expected and item.status == "fail":
        yield f"{pad}expected {item.expected}"
    if item.why:
        yield from _wrapped(item.why, pad)
    if item.fix:
        yield from _wrapped(f"-> {item.fix}", pad)
    followers = [other for other in report.results if other.caused_by == item.id]
    if followers:
        names = ", ".join(dict.fromkeys(f"{other.id} ({other.status})" for other in followers))
        yield from _wrapped(f"follows from it: {names}", pad)


def _wrapped(text: str, pad: str, width: int = 118) -> Iterable[str]:
    import textwrap

    return textwrap.wrap(
        printable(text), width, initial_indent=pad, subsequent_indent=pad + ("   " if text.startswith("->") else "")
    )


def _summary(good: list[Result]) -> str:
    """What a group's passing checks saw, short enough for one line."""
    words: list[str] = []
    good = list({item.id: item for item in reversed(good)}.values())[::-1]
    for item in good:
        word = (
            f"{item.title.lower() if not item.title[:2].isupper() else item.title}: {item.observed}"
            if len(item.observed) < 24
            else item.title
        )
        if len(", ".join([*words, word])) > 96:
            words.append(f"and {len(good) - len(words)} more")
            break
        words.append(word)
    return printable(", ".join(words))


def _detailed(report: Report) -> Iterable[str]:
    for key, name in GROUPS.items():
        mine = [item for item in report.results if item.group == key]
        if not mine:
            continue
        yield paint(name, "bold")
        for item in mine:
            where = "" if item.scope == "host" or item.observed.startswith(item.scope) else f" {printable(item.scope)}"
            yield f"  {mark(item.status)} {item.id:<22}{where} {printable(item.observed)}".rstrip()
            if item.bad:
                pad = " " * 8
                for label, text in (
                    ("expected", item.expected),
                    ("why", item.why),
                    ("fix", item.fix),
                    ("follows from", item.caused_by),
                ):
                    if text:
                        yield from _wrapped(f"{label}: {text}", pad)
                for evidence in item.evidence:
                    yield from _wrapped(f"read {evidence.source}" + (f": {evidence.excerpt}" if evidence.excerpt else ""), pad)


def closing(report: Report) -> str:
    """One sentence with the counts and the next step."""
    counts = {status: sum(item.status == status and item.id != "gpu.present" for item in report.results) for status in WORST}
    names: tuple[tuple[Status, str], ...] = (("fail", "failure"), ("warn", "warning"), ("unknown", "unknown"))
    told = [
        f"{counts[status]} {name}{'s' * (counts[status] != 1 and status != 'unknown')}" for status, name in names if counts[status]
    ]
    if not told:
        return "Nothing stands in the way." if report.verdict == "ready" else "Nothing is wrong with what was judged."
    step = f" Next step: {_first_sentence(report.next_step)}" if report.next_step else ""
    return f"{', '.join(told)}.{step}"


def _first_sentence(text: str) -> str:
    head, stop, _ = text.partition(". ")
    return printable(head + stop.strip() if stop else head)


def progress(stream: TextIO | None = None) -> "Progress":
    """What is being looked at, on one line of a terminal; silent elsewhere."""
    return Progress(stream or sys.stderr)


class Progress:
    """Draws 'looking at kernel ...' and wipes it at the end."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._on = stream.isatty()

    def __call__(self, what: str) -> None:
        if self._on:
            self._stream.write(f"\r\033[Klooking at {what} ...")
            self._stream.flush()

    def done(self) -> None:
        if self._on:
            self._stream.write("\r\033[K")
            self._stream.flush()


def group_status(report: Report, group: str) -> str:
    return worst([item for item in report.results if item.group == group])
