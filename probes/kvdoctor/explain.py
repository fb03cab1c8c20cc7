"""`kvdoctor explain`: what a check means, what it reads, what misleads, and where the rule comes from."""

import difflib
import inspect
import textwrap
import tomllib
from collections.abc import Iterable
from pathlib import Path

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


def find(check_id: str) -> Check:
    """A check by id. Raises NotFound with the nearest id."""
    known = registry()
    if check_id in known:
        return known[check_id]
    near = difflib.get_close_matches(check_id, list(known), n=1)
    raise NotFound(f"no check {check_id!r}", hint=f"did you mean {near[0]}?" if near else "kvdoctor explain lists them all")


def rule_text(check: Check) -> str:
    """The rule in words: its function's docstring, so that code and explanation cannot part."""
    return " ".join((inspect.getdoc(check.rule) or "").split())


def explain(check: Check) -> Iterable[str]:
    """One check, for people."""
    note = notes().get(check.id, {})
    yield f"{paint(check.id, 'bold')}  {check.title} ({GROUPS[check.group]}; {NEEDS[check.need]})"
    yield ""
    yield from textwrap.wrap(rule_text(check), 100)
    yield ""
    for key, label in LABELS:
        if text := note.get(key):
            yield from textwrap.wrap(text, 84, initial_indent=f"{label:<16}", subsequent_indent=" " * 16)


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
            yield from (f"  {check.id:<24}{check.need}  {check.title}" for check in mine)
