"""`kvctl prune`: remove what dead processes left in shared memory, with the evidence that they are dead.

It takes what is *proven* stale, by a life lock that is free at the moment of removal, and never a segment that does not say
who owns it. What is found is shown first, then asked about, then removed one by one; one that cannot be removed stops nothing.

Failure: Refused (no yes), KvError (some could not be removed). Concurrency: an engine that starts during a prune keeps its
files or makes new ones, see `owner.remove_stale`; a pool goes only while its sidecar's lock is held by the prune.
"""

from dataclasses import dataclass
from pathlib import Path

from kvtools.ctl.asking import agree
from kvtools.errors import KvError, NotFound, Unreachable
from kvtools.output import emit, emit_json, note, printable, table
from kvtools.segments import owner, pool, stats
from kvtools.segments.discover import Leftover, look
from kvtools.segments.files import SIDECAR_SUFFIX


@dataclass(frozen=True, slots=True)
class Removed:
    """One file that was removed, or why it was not."""

    name: str
    kind: str
    evidence: str
    error: str = ""


def prune(leftovers: list[Leftover], *, root: Path) -> list[Removed]:
    """Remove each of `leftovers` that is still unowned now. One that cannot be removed is reported, and stops nothing."""
    done = []
    for left in leftovers:
        try:
            gone = _remove(left, root)
        except KvError as error:
            done.append(Removed(left.name, left.kind, left.evidence, error.message))
            continue
        done.append(Removed(left.name, left.kind, left.evidence, "" if gone else "it is owned again"))
    return done


def _remove(left: Leftover, root: Path) -> bool:
    try:
        if left.kind == "pool":
            return _remove_pool(left.name, root)
        if left.kind == "sidecar":
            return owner.remove_stale(left.name.removesuffix(SIDECAR_SUFFIX), root=root)
        return stats.remove_unlocked(root / left.name)
    except NotFound:
        return True  # somebody else was faster


def _remove_pool(name: str, root: Path) -> bool:
    """Pool and sidecar together, under the sidecar's life lock, so an engine that starts now finds neither or keeps both."""
    return owner.remove_stale(name, root=root, before=lambda: pool.remove(name, root=root))


def leftovers(root: Path) -> list[Leftover]:
    """What `prune` may take in `root`, by name. Raises Unreachable when the folder cannot be read."""
    try:
        return sorted(look(root).leftovers, key=lambda left: left.name)
    except OSError as error:
        raise Unreachable(f"cannot read {root}: {error.strerror}") from None


def run_prune(root: Path, *, dry_run: bool, yes: bool, as_json: bool) -> None:
    """Show what is stale and why, ask, remove, report. Raises Refused (no yes), KvError when some of it could not be removed."""
    found = leftovers(root)
    if as_json and (dry_run or not found):
        _emit_pruned([Removed(left.name, left.kind, left.evidence, "dry run") for left in found])
        return
    if not found:
        note(f"nothing stale in {root}")
        return
    if not as_json:
        for line in table(("Name", "Kind", "Evidence"), [(printable(left.name), left.kind, left.evidence) for left in found]):
            emit(line)
    if dry_run:
        return
    many = f"{len(found)} stale file{'s' * (len(found) != 1)}"
    agree(f"remove {many}?", yes=yes, refusal=f"{many} not removed without a yes")
    done = prune(found, root=root)
    if as_json:
        _emit_pruned(done)
    else:
        emit(f"removed {sum(not one.error for one in done)} of {len(done)}")
    if failed := [one for one in done if one.error]:
        raise KvError(
            f"not removed: {printable(failed[0].name)}: {failed[0].error}" + (f", and {len(failed) - 1} more" if failed[1:] else "")
        )


def _emit_pruned(done: list[Removed]) -> None:
    body = [
        {"name": one.name, "kind": one.kind, "evidence": one.evidence, "removed": not one.error, "error": one.error or None}
        for one in done
    ]
    emit_json("kvctl.prune/1", {"files": body})
