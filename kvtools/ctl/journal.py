"""kvctl's own memory of the limits it wrote, for segments whose engines keep none (kvcached's have no owner file).

One JSON line a change in `$XDG_STATE_HOME/kvtools/limits.jsonl` (mode 0600), newest last, halved when it passes 256 KiB. A
line belongs to a segment by folder, name, inode and boot, so a new segment of an old name starts with a clean page.

It answers one question honestly: what was the limit before kvctl first changed it? Where the chain of changes is broken
(somebody else wrote in between, or the engine began anew over the same file) the page starts at the break. It is a courtesy:
when it cannot be written or read, nothing else fails. Concurrency: appends are single writes of one line.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtools.segments.pool import LimitChange, PoolReading

_MAX_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class Change:
    """One limit that kvctl wrote: before, after, by whom, when (Unix nanoseconds)."""

    before_bytes: int
    after_bytes: int
    by: str
    at_ns: int


def path() -> Path:
    """Where the journal lies for this user."""
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "kvtools" / "limits.jsonl"


def note(change: LimitChange, *, by: str, at_ns: int, root: Path, file: Path | None = None) -> None:
    """Remember `change`. Errors are swallowed: the limit is written, and that is what was asked."""
    if change.before.limit_bytes == change.after.limit_bytes:
        return
    line = {
        "segment": _identity(change.after, root), "before": change.before.limit_bytes, "after": change.after.limit_bytes,
        "by": by, "at_ns": at_ns,
    }  # fmt: skip
    try:
        file = file or path()
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.write(fd, json.dumps(line, separators=(",", ":")).encode() + b"\n")
            full = os.fstat(fd).st_size > _MAX_BYTES
        finally:
            os.close(fd)
        if full:
            _halve(file)
    except (OSError, RuntimeError):  # RuntimeError: no home directory can be found
        return


def history(reading: PoolReading, *, root: Path, file: Path | None = None) -> list[Change]:
    """The unbroken chain of changes that leads to the limit `reading` shows, oldest first; empty when it is not known."""
    identity = _identity(reading, root)
    chain: list[Change] = []
    for line in _lines(file):
        try:
            if line["segment"] != identity:
                continue
            change = Change(int(line["before"]), int(line["after"]), str(line["by"]), int(line["at_ns"]))
        except (KeyError, TypeError, ValueError):
            continue
        if chain and chain[-1].after_bytes != change.before_bytes:
            chain = []
        chain.append(change)
    return chain if chain and chain[-1].after_bytes == reading.limit_bytes else []


def _lines(file: Path | None) -> list[dict[str, Any]]:
    try:
        texts = (file or path()).read_text(errors="replace").splitlines()
    except (OSError, RuntimeError):
        return []
    found = []
    for text in texts:
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict):
            found.append(line)
    return found


def _identity(reading: PoolReading, root: Path) -> list[Any]:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return [os.path.realpath(root), reading.name, reading.inode, boot]


def _halve(file: Path) -> None:
    lines = file.read_bytes().splitlines(keepends=True)
    fresh = file.with_name(f"{file.name}.{os.getpid()}")
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, b"".join(lines[len(lines) // 2 :]))
    finally:
        os.close(fd)
    fresh.replace(file)
