"""`kvdoctor explain`: what a check means, what it reads, what misleads, and where the rule comes from."""

import difflib
import inspect
import textwrap
import tomllib
from collections.abc import Iterable
from pathlib import Path

from kvdoctor.report import width, wrapped
from kvdoctor.rules.base import GROUPS, Check, registry
from kvtools.errors import NotFound
from kvtools.output import paint

NEEDS = {"R": "required for GPU-direct", "P": "required for the POSIX tier", "i": "informs"}
LABELS = (
    ("reads", "reads"),
    ("good", "pass"),
    ("doubt", "warn or unknown"),
    ("bad", "fail"),
    ("traps", "what misleads"),
    ("sources", "sources"),
)


def notes() -> dict[str, dict[str, str]]:
    """explain.toml: check id -> {reads, good, doubt, bad, traps, sources}."""
    with Path(__file__).with_name("explain.toml").open("rb") as file:
        return tomllib.load(file)


def find(word: str) -> Check | list[Check]:
    """A check by id, or the checks of a group as --only takes it. Raises NotFound with the nearest."""
    known = registry()
    if word in known:
        return known[word]
    prefix = word.rstrip(".*") + "."
    if mine := [check for check in known.values() if check.id.startswith(prefix) or check.group == word]:
        return mine
    groups = {check.partition(".")[0] for check in known}
    near = difflib.get_close_matches(word, [*known, *groups], n=1)
    raise NotFound(f"no check or group {word!r}", hint=f"did you mean {near[0]}?" if near else "kvdoctor explain lists them all")


def rule_text(check: Check) -> str:
    """The rule in words: its function's docstring, so that code and explanation cannot part."""
    return " ".join((inspect.getdoc(check.rule) or "").split())


def _headed(word: str, text: str) -> Iterable[str]:
    """A line that begins with a word in bold, wrapped."""
    head, *rest = wrapped(f"{word}  {text}", "", hang="    ")
    yield paint(word, "bold") + head.removeprefix(word) if head.startswith(word) else head
    yield from rest


def explain(check: Check) -> Iterable[str]:
    """One check, for people."""
    note = notes().get(check.id, {})
    yield from _headed(check.id, f"{check.title} ({GROUPS[check.group]}; {NEEDS[check.need]})")
    yield ""
    yield from textwrap.wrap(rule_text(check), width())
    yield ""
    for key, label in LABELS:
        if text := note.get(key):
            yield from textwrap.wrap(text, width(), initial_indent=f"{label:<16}", subsequent_indent=" " * 16)


def group(word: str, mine: list[Check]) -> Iterable[str]:
    """The checks of a group, each with its rule."""
    yield from _headed(word, f"{len(mine)} check{'s' * (len(mine) != 1)}; kvdoctor explain ID says more about each")
    for check in mine:
        yield ""
        yield from _headed(check.id, f"{check.title} ({NEEDS[check.need]})")
        yield from textwrap.wrap(rule_text(check), width() - 4, initial_indent="    ", subsequent_indent="    ")


def document(check: Check) -> dict[str, object]:
    """One check as JSON."""
    return {
        "id": check.id,
        "title": check.title,
        "group": check.group,
        "need": check.need,
        "rule": rule_text(check),
        **notes().get(check.id, {}),
    }


def listing() -> Iterable[str]:
    """Every check, a line each, by group."""
    for key, name in GROUPS.items():
        mine = [check for check in registry().values() if check.group == key]
        if mine:
            yield paint(name, "bold")
            for check in mine:
                yield from wrapped(f"  {check.id:<24}{check.need}  {check.title}", "", hang=" " * 29)
