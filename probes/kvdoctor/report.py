"""A report for people: two verdicts, root causes with what follows from them, one line a group where all is well.

Every state is a word or a mark besides its colour. Text and JSON are made from the same records. The text may change; the
JSON (schema kvdoctor.report/1) only grows.
"""

import os
import shutil
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
POSIX = {
    "usable": ("usable", "good"),
    "degraded": ("degraded", "warn"),
    "unusable": ("UNUSABLE", "bad"),
    "undetermined": ("undetermined", "warn"),
    "not-judged": ("not judged", "dim"),
}
WIDTH = 14
NARROW = 72
"""Columns below which a group's name gets no column of its own."""


def mark(status: str) -> str:
    return paint(f"{'[' + MARKS[status] + ']':<4}", COLORS[status])


def width() -> int:
    """Columns to write into: the terminal's, COLUMNS where that is set, else 118."""
    if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal():
        return max(20, shutil.get_terminal_size((118, 24)).columns)
    return 118


def show(report: Report, *, verbose: bool = False) -> None:
    """The whole report on stdout."""
    for line in lines(report, verbose=verbose):
        emit(line)


def lines(report: Report, *, verbose: bool = False) -> Iterable[str]:
    """Its lines. `verbose` adds every check, with evidence."""
    yield from header(report)
    for place in report.host.get("paths", []):
        yield from (paint(line, "dim") for line in wrapped(f"path {place['path']} (from {place['from']})", "", hang="  "))
    yield ""
    yield from _verdicts(report)
    if report.selected:
        yield paint("(of the checks selected)", "dim")
    yield ""
    yield from _detailed(report) if verbose else _grouped(report)
    yield ""
    yield from wrapped(closing(report), "")


def _verdicts(report: Report) -> Iterable[str]:
    text, style = VERDICTS[report.verdict]
    judged = any(item.need == "P" and item.status != "skip" for item in report.results)
    tier, tier_style = POSIX[report.posix if judged else "not-judged"]
    plain = f"GPU-direct: {text}        POSIX tier: {tier}"
    if len(plain) <= width():
        yield f"GPU-direct: {paint(text, style)}        POSIX tier: {paint(tier, tier_style)}"
        return
    for name, words, colour in (("GPU-direct", text, style), ("POSIX tier", tier, tier_style)):
        head, *rest = wrapped(words, "", room=width() - len(name) - 2) or [""]
        yield f"{name}: {paint(head, colour)}"
        yield from (" " * (len(name) + 2) + paint(line, colour) for line in rest)


def header(report: Report) -> Iterable[str]:
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
    line = ""
    for part in parts:
        if line and len(line) + 2 + len(part) > width():
            yield from wrapped(line, "")
            line = part
        else:
            line = f"{line}  {part}" if line else part
    yield line


def no_gpu(item: Result) -> bool:
    """Whether this is the result that says that there is no GPU: the verdict says it already."""
    return item.id == "gpu.present" and item.status == "fail"


def _grouped(report: Report) -> Iterable[str]:
    """Root causes first, each with its followers; then one line a group in which nothing is wrong."""
    causes = {root: [item for item in report.by_id(root) if item.bad and not item.caused_by] for root in report.roots}
    said: dict[tuple[str, str, str], list[str]] = {}
    for check_id, found in causes.items():
        for item in found:
            said.setdefault((item.status, item.scope, item.observed), []).append(check_id)
    for check_id, found in causes.items():
        # The same words from many checks ("no KV path to judge") are one line; that there is no GPU stands in the verdict.
        mine = [item for item in found if said[item.status, item.scope, item.observed][0] == check_id and not no_gpu(item)]
        # Twenty stale segments, or eight GPUs with one fault, are one story.
        shown = mine if len(mine) <= 3 else mine[:2]
        for item in shown:
            yield from _cause(report, item)
            if more := [other for other in said[item.status, item.scope, item.observed] if other != check_id]:
                yield from wrapped(f"and so {', '.join(dict.fromkeys(more))}", _pad())
        if len(mine) > len(shown):
            yield from wrapped(f"and {len(mine) - len(shown)} more like it ({check_id}): --verbose shows them", _pad())
    for key, name in GROUPS.items():
        mine = [item for item in report.results if item.group == key]
        bad = any(item.bad and not no_gpu(item) for item in mine)
        good = [item for item in mine if item.status == "pass"]
        if key == "proof":
            # Measured on request: the figures are what was asked for.
            for item in good:
                yield from _row("pass", name, f"{item.scope}: {item.observed}")
        elif not bad and good:
            yield from _row("pass", name, _summary(key, good))


def _pad() -> str:
    """How far the text of a row is set in: beside its group's name, and below it on a narrow terminal."""
    return " " * (WIDTH + 5) if width() >= NARROW else " " * 5


def _row(status: str, name: str, text: str) -> Iterable[str]:
    """A group's line: '[ok] Limits        shm 23.5 GiB; ...', wrapped under itself."""
    pad = _pad()
    if width() < NARROW:
        head, *rest = wrapped(f"{name}: {text}", "", room=width() - 5) or [""]
        yield f"{mark(status)} {head}"
    else:
        head, *rest = wrapped(text, "", room=width() - len(pad)) or [""]
        yield f"{mark(status)} {name:<{WIDTH}}{head}"
    yield from (f"{pad}{line}" for line in rest)


def _cause(report: Report, item: Result) -> Iterable[str]:
    name = GROUPS.get(item.group, item.group)
    where = "" if item.scope == "host" or item.scope in item.observed else f"{item.scope}: "
    pad = _pad()
    yield from _row(item.status, name, f"{where}{item.observed}  ({item.id})")
    if item.expected and item.status == "fail":
        yield from wrapped(f"expected {item.expected}", pad)
    if item.why:
        yield from wrapped(item.why, pad)
    if item.fix:
        yield from wrapped(f"-> {item.fix}", pad)
    followers = [other for other in report.results if other.caused_by == item.id]
    if followers:
        names = ", ".join(dict.fromkeys(f"{other.id} ({other.status})" for other in followers))
        yield from wrapped(f"follows from it: {names}", pad)


def wrapped(text: str, pad: str, *, hang: str = "", room: int = 0) -> list[str]:
    """`text` in lines of `room` columns (the terminal's), set in by `pad`, all but the first by `hang` more."""
    import textwrap

    hang = hang or ("   " if text.startswith("->") else "")
    room = max(8 + len(pad) + len(hang), room or width())
    return textwrap.wrap(printable(text), room, initial_indent=pad, subsequent_indent=pad + hang, break_on_hyphens=False)


HIGHLIGHTS: dict[str, tuple[tuple[str, str], ...]] = {
    "gpu": (("gpu.present", "{}"), ("gpu.largebar", "{}"), ("gpu.pcie_link", "link {}")),
    "driver": (("gpu.driver.version", "amdgpu {}"), ("gpu.driver.loaded", "{}")),
    "ais": (("ais.registered", "{}"), ("ais.param", "{}")),
    "kernel": (("kernel.p2pdma", "P2PDMA {}"), ("p2p.topology", "{}"), ("kernel.iommu", "IOMMU {}")),
    "rocm": (("rocm.version", "ROCm {}"), ("rocm.hip_ais", "file calls in {}")),
    "nv": (("nv.gdscheck", "{}"), ("nv.p2pmem", "{} registered"), ("nv.driver_open", "{}")),
    "storage": (("storage.fs", "{}"), ("storage.backing", "{}"), ("storage.odirect", "direct I/O: {}"), ("storage.space", "{}")),
    "limits": (("limits.shm", "shm {}"), ("limits.memlock", "locked memory {}"), ("limits.nofile", "open files {}")),
    "cfg": (("cfg.hashseed", "{}"), ("cfg.hipfile_env", "hipFile's switches: {}"), ("cfg.chunk", "chunks {}")),
    "kvd": (("kvd.health", "{}"), ("kvd.segments", "{}")),
}
"""What the one line of a healthy group shows: the observations of these checks, in these words."""


def _summary(group: str, good: list[Result]) -> str:
    """A healthy group in one line: what its telling checks saw, and how many passed."""
    told: list[str] = []
    for check_id, words in HIGHLIGHTS.get(group, ()):
        seen = [item for item in good if item.id == check_id]
        if not seen:
            continue
        # Several paths or GPUs: all the same is said once, else how many there are.
        values = list(dict.fromkeys(item.observed for item in seen))
        text = words.format(values[0]) + (f" (and {len(values) - 1} more)" if len(values) > 1 else "")
        if len("; ".join([*told, text])) <= 92:
            told.append(text)
    count = len(good)
    return printable("; ".join([*told]) or f"{count} check{'s' * (count != 1)} passed")


def _detailed(report: Report) -> Iterable[str]:
    for key, name in GROUPS.items():
        mine = [item for item in report.results if item.group == key]
        if not mine:
            continue
        yield paint(name, "bold")
        for item in mine:
            where = "" if item.scope == "host" or item.observed.startswith(item.scope) else f"{item.scope} "
            head, *rest = wrapped(f"{item.id:<22} {where}{item.observed}".rstrip(), "", hang="    ", room=width() - 7) or [""]
            yield f"  {mark(item.status)} {head}"
            yield from (f"{' ' * 7}{line}" for line in rest)
            if item.bad:
                pad = " " * 8
                for label, text in (
                    ("expected", item.expected),
                    ("why", item.why),
                    ("fix", item.fix),
                    ("follows from", item.caused_by),
                ):
                    if text:
                        yield from wrapped(f"{label}: {text}", pad)
                for evidence in item.evidence:
                    yield from wrapped(f"read {evidence.source}" + (f": {evidence.excerpt}" if evidence.excerpt else ""), pad)


def closing(report: Report) -> str:
    """One sentence with the counts and the next step."""
    counts = {status: sum(item.status == status and not no_gpu(item) for item in report.results) for status in WORST}
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
            room = max(20, shutil.get_terminal_size((80, 24)).columns) - 1  # a line that wraps could not be wiped
            self._stream.write(f"\r\033[K{f'looking at {printable(what)} ...'[:room]}")
            self._stream.flush()

    def done(self) -> None:
        if self._on:
            self._stream.write("\r\033[K")
            self._stream.flush()


def group_status(report: Report, group: str) -> str:
    return worst([item for item in report.results if item.group == group])
