"""What a capture holds, against what it was written with: evidence that went missing must never read as "the host has none".

A capture is a directory with `case.json` and at least one file below `root/` or `cmd/`. `kvdoctor capture` adds `index.json`,
a list of everything it wrote ({"root": {PATH: kind or bytes}, "cmd": {NAME: bytes}}). What is listed and gone, is of another
kind, or is shorter than it was, is *lost*: reading it is an error, not an absence. Hand-made captures have no such list,
and what they lack proves nothing either way.
"""

import json
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvdoctor.collect.source import MAX_READ, open_regular
from kvdoctor.parse import shape
from kvtools.errors import NotFound, UsageError

INDEX = "index.json"
MAX_INDEX = 64 << 20
INDEX_SCHEMA = "kvdoctor.capture/1"
HINT = "kvdoctor capture DIR writes one"
CASE_KEYS = frozenset({"case", "context", "kv_path", "kv_paths", "env", "captured"})


@dataclass
class Holdings:
    """`listed` is how many entries the capture's own list has, None without one; `lost` what is gone of them."""

    listed: int | None = None
    lost: set[str] = field(default_factory=set)


def open_capture(folder: str | Path) -> tuple[Path, dict[str, Any], Holdings]:
    """A capture's directory, case and holdings. Raises NotFound where there is nothing, UsageError for what is no capture."""
    home = Path(folder)
    if not os.path.lexists(home):
        raise NotFound(f"no such capture: {home}", hint=HINT)
    if not home.is_dir():
        raise UsageError(f"not a capture: {home} is not a directory", hint=HINT)
    case = read_case(home)
    for part in ("root", "cmd"):
        if (home / part).is_symlink():
            raise UsageError(f"not a capture: {home / part} is a link out of it", hint=HINT)
    if not any(_holds_a_file(home / part) or _shut(home / part) for part in ("root", "cmd")):
        raise UsageError(f"not a capture: {home} holds nothing of a host (root/ and cmd/ are empty or missing)", hint=HINT)
    return home, case, read_holdings(home, ours=is_ours(case))


def _shut(folder: Path) -> bool:
    return os.path.isdir(folder) and not os.access(folder, os.R_OK | os.X_OK)  # noqa: PTH112 - False where its parent is shut, too


def _holds_a_file(folder: Path) -> bool:
    return any(files for _, _, files in os.walk(folder))


def read_case(home: Path) -> dict[str, Any]:
    """A capture's case.json. Raises UsageError where there is none or it is no JSON object that speaks of a host."""
    place = home / "case.json"
    try:
        with open_regular(place) as file:
            case = json.loads(file.read(MAX_READ))
    except FileNotFoundError:
        raise UsageError(f"not a capture: {home} holds no case.json", hint=HINT) from None
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else "not text" if isinstance(error, UnicodeDecodeError) else error
        raise UsageError(f"{place}: {why}", hint="it must be a JSON object {case, context, kv_path, env}") from None
    if not isinstance(case, dict):
        raise UsageError(f"{place} is not a JSON object", hint="it must hold case, context, kv_path and env")
    if not CASE_KEYS & case.keys():
        raise UsageError(f"not a capture: {place} says nothing of a host", hint="it must hold case, context, kv_path and env")
    return case


def is_ours(case: dict[str, Any]) -> bool:
    """Whether `kvdoctor capture` wrote it: then it had a list. A case made by hand says neither of these."""
    return bool(shape.mapping(case.get("captured"))) or "complete" in case


def read_holdings(home: Path, *, ours: bool) -> Holdings:
    """The capture's list held against what is there. A list of one of our captures that cannot be read is itself lost."""
    none = Holdings(lost={INDEX} if ours else _unreadable(home))
    try:
        with open_regular(home / INDEX, follow=False) as file:
            index = shape.mapping(json.loads(file.read(MAX_INDEX)))
    except (OSError, ValueError, RecursionError):
        return none
    root, commands = shape.mapping(index.get("root")), shape.mapping(index.get("cmd"))
    if index.get("schema") != INDEX_SCHEMA or not (root or commands):
        return none
    found = Holdings(listed=len(root) + len(commands))
    found.lost |= {path for path, kind in root.items() if not _as_listed(f"{home}/root{path}", kind)}
    found.lost |= {f"cmd/{name}" for name, size in commands.items() if not _as_listed(f"{home}/cmd/{name}", size)}
    return found


def _unreadable(home: Path) -> set[str]:
    """What of a capture made by hand is there and lets nobody in: a list could not tell more."""
    found: set[str] = set()
    for part in ("root", "cmd"):
        top = f"{home}/{part}"
        if _shut(Path(top)):
            found.add(part)
        for folder, folders, files in os.walk(top):
            for name in folders + files:
                place = f"{folder}/{name}"
                if not os.path.islink(place) and not os.access(place, os.R_OK | (os.X_OK if name in folders else 0)):  # noqa: PTH114
                    found.add(place.removeprefix(f"{home}/root") if part == "root" else place.removeprefix(f"{home}/"))
    return found


def _as_listed(path: str, kind: Any) -> bool:
    """Whether `path` is there as a link, a folder that opens, or a readable file of at least `kind` bytes."""
    try:
        status = os.lstat(path)
    except (OSError, ValueError):
        return False
    if kind == "link":
        return stat.S_ISLNK(status.st_mode)
    if kind == "folder":
        return stat.S_ISDIR(status.st_mode) and os.access(path, os.R_OK | os.X_OK)
    size = shape.whole(kind)
    return stat.S_ISREG(status.st_mode) and status.st_size >= (size or 0) and os.access(path, os.R_OK)
