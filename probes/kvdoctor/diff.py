"""What differs between two captures: verdicts of checks first, then the facts behind them."""

from dataclasses import dataclass
from typing import Any

from kvdoctor.facts import Facts
from kvdoctor.results import Report, Result

VOLATILE = ("seconds", "tools", "case", "pid", "hostname", "free", "shm_free", "free_files", "age_s", "values", "origin")
"""Facts that differ between any two looks at the same host."""


@dataclass
class CheckChange:
    """A check whose answer differs: status and words on both sides ("absent" where a side has no such scope)."""

    id: str
    scope: str
    before: str
    after: str
    before_observed: str = ""
    after_observed: str = ""


@dataclass
class FactChange:
    """A fact that differs, by its dotted path."""

    path: str
    before: Any
    after: Any


def compare_reports(before: Report, after: Report) -> list[CheckChange]:
    """Checks whose status or observation differs, in the order of the report."""
    left, right = _keyed(before), _keyed(after)
    changes = []
    for key in [*left, *(key for key in right if key not in left)]:
        one, other = left.get(key), right.get(key)
        if one and other and one.status == other.status and (one.observed == other.observed or one.status in ("pass", "skip")):
            continue
        changes.append(
            CheckChange(
                id=key[0],
                scope=key[1],
                before=one.status if one else "absent",
                after=other.status if other else "absent",
                before_observed=one.observed if one else "",
                after_observed=other.observed if other else "",
            )
        )
    return changes


def _keyed(report: Report) -> dict[tuple[str, str], Result]:
    return {(item.id, item.scope): item for item in report.results}


def compare_facts(before: Facts, after: Facts) -> list[FactChange]:
    """Facts that differ, leaves only, without those that differ between any two looks."""
    left, right = flatten(before.to_json()), flatten(after.to_json())
    return [
        FactChange(path, left.get(path), right.get(path))
        for path in sorted(left.keys() | right.keys())
        if left.get(path) != right.get(path)
    ]


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """A JSON document as dotted path -> leaf; list items are named by what identifies them, else by position."""
    if isinstance(value, dict):
        found: dict[str, Any] = {}
        for name, item in value.items():
            if name not in VOLATILE:
                found.update(flatten(item, f"{prefix}.{name}" if prefix else str(name)))
        return found
    if isinstance(value, list) and value and isinstance(value[0], dict):
        found = {}
        for i, item in enumerate(value):
            name = next(
                (str(item[key]) for key in ("bdf", "path", "name", "node", "mountpoint") if item.get(key) not in (None, "")), str(i)
            )
            found.update(flatten(item, f"{prefix}[{name}]"))
        return found
    return {prefix: value}
