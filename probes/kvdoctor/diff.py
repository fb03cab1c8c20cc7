"""What differs between two captures: verdicts of checks first, then the facts behind them.

Where only one of the two is redacted, redaction itself is no difference: the other is redacted first, in a directory of its
own that is gone afterwards, and both are compared with their stand-ins blanked, because which name became
server1 depends on what was seen first.
"""

import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvdoctor import api
from kvdoctor.facts import Facts
from kvdoctor.redact import Redactor
from kvdoctor.results import Report, Result

if TYPE_CHECKING:
    from kvdoctor.capture import Recording

VOLATILE = (
    *("seconds", "tools", "case", "pid", "hostname", "free", "shm_free", "free_files", "age_s", "values", "origin", "redacted"),
    *("lost", "captured", "context"),
)
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


Blank = Callable[[str], str]
_STAND_IN = re.compile(
    r"\b(host|user|server|volume|segment|group|label|distribution)\d+\b|\b192\.0\.2\.\d{1,3}\b|\b192[-_]0[-_]2[-_]\d{1,3}\b|2001:db8::[0-9a-f]+"
    r"|02:00:00:00:[0-9a-f]{2}:[0-9a-f]{2}|00000000-0000-4000-8000-\d{12}|iqn\.2000-01\.example:\d+|(?<![0-9A-Za-z])0{12,}\d+"
)


def plain(text: str) -> str:
    """As it is: both captures are redacted, or neither."""
    return text


def blank_with(redactor: Redactor) -> Blank:
    """What redaction replaces becomes one word on either side, whichever stand-in (or name) stood there."""

    return lambda text: _STAND_IN.sub("*", redactor.path(text) if text.startswith("/") else redactor.free(text))


def compare_reports(before: Report, after: Report, blank: Blank = plain) -> list[CheckChange]:
    """Checks whose status or observation differs, in the order of the report."""
    left, right = _keyed(before, blank), _keyed(after, blank)
    changes = []
    for key in [*left, *(key for key in right if key not in left)]:
        one, other = left.get(key), right.get(key)
        same = one and other and one.status == other.status
        if one and other and same and (blank(one.observed) == blank(other.observed) or one.status in ("pass", "skip")):
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


def _keyed(report: Report, blank: Blank) -> dict[tuple[str, str], Result]:
    return {(item.id, blank(item.scope)): item for item in report.results}


def compare_facts(before: Facts, after: Facts, blank: Blank = plain) -> list[FactChange]:
    """Facts that differ, leaves only, without those that differ between any two looks."""
    left, right = ({blank(path): value for path, value in flatten(one.to_json()).items()} for one in (before, after))
    return [
        FactChange(path, left.get(path), right.get(path))
        for path in sorted(left.keys() | right.keys())
        if not _alike(left.get(path), right.get(path), blank)
    ]


def _alike(one: Any, other: Any, blank: Blank) -> bool:
    return bool(one == other or (blank is not plain and blank(str(one)) == blank(str(other))))


def two_captures(before: Path, after: Path) -> tuple[Facts, Facts, Blank]:
    """Facts of both, as comparable as they can be made, and how their words are compared. Raises what `collect_capture` does."""
    from kvdoctor.capture import Recording

    recordings = [Recording(), Recording()]
    one, other = (api.collect_capture(home, recorder=taken) for home, taken in zip((before, after), recordings, strict=True))
    if one.redacted == other.redacted:
        return one, other, plain if not one.redacted else blank_with(Redactor())
    if one.redacted:
        return one, _redacted(other, recordings[1]), blank_with(Redactor())
    return _redacted(one, recordings[0]), other, blank_with(Redactor())


def _redacted(facts: Facts, recording: "Recording") -> Facts:
    """Facts of a capture as they would be, had it been redacted when it was written."""
    from kvdoctor.capture import entries

    with tempfile.TemporaryDirectory(prefix="kvdoctor-diff-") as scratch:
        home = Path(scratch)
        for path, kind, data in entries(recording, facts, redact=True):
            place = home / path
            place.parent.mkdir(parents=True, exist_ok=True)
            if kind == "folder":
                place.mkdir(exist_ok=True)
            elif kind == "link":
                place.symlink_to(os.fsdecode(data))
            else:
                place.write_bytes(data)
        found = api.collect_capture(home)
    found.lost = facts.lost
    return found


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
