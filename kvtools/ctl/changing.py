"""One limit from the question to the last line: what limit, limit-percent and restore have in common.

Order: decide, say the notes (stderr), show a dry run or ask, write, remember, wait, report (stdout). The write is conditional
on the limit that was decided upon, so that two operators who type at the same moment do not silently undo each other: the
second gets an error and sees the new state.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvtools.ctl import journal, limits, tables
from kvtools.ctl.asking import agree
from kvtools.ctl.limits import Decision, Outcome
from kvtools.ctl.peers import likely_owners
from kvtools.errors import KvError
from kvtools.output import emit, emit_json, note, printable
from kvtools.segments.owner import LimitEntry, PoolState
from kvtools.segments.pool import Changed, LimitChange
from kvtools.units import format_size


def change_limit(
    state: PoolState, wanted: int, *, root: Path, command: str, wait_s: float | None, dry_run: bool, yes: bool, as_json: bool
) -> None:
    """Set the limit of `state`'s pool to `wanted` bytes, as far as it goes, and report. Raises KvErrors."""
    peers = likely_owners(state.name) if state.owner is None else []
    first = limits.first_limit(state, root=root) if state.owner is None else None
    decision = limits.decide(state, wanted, takes_limits=not any(peer.prealloc_off for peer in peers), first_bytes=first)
    for text in decision.notes:
        note(f"note: {text}")
    if dry_run:
        for reason in decision.unsafe:
            note(f"note: needs a yes: {reason}")
        _report(decision, None, Outcome("dry-run"), as_json)
        return
    for reason in decision.unsafe:
        question = f"{printable(state.name)}: {reason}. Set {format_size(decision.limit_bytes)}?"
        agree(question, yes=yes, refusal=f"segment {printable(state.name)}: {reason}")
    who = limits.acting(command)
    try:
        change = limits.write(decision, by=who, expected=state.reading.limit_bytes, root=root)
    except Changed as error:
        raise KvError(f"{error.message}: nothing was written", hint="somebody changed it at the same moment: look again") from None
    if state.owner is None or state.owner.error:
        journal.note(change, by=who, at_ns=time.time_ns(), root=root)
    # Where the change could not be noted in the owner file (locked, not ours to write), an answer from before is no answer.
    changed = change.before.limit_bytes != change.after.limit_bytes
    old = state.owner.limits if state.owner is not None and changed else ()
    if wait_s is None:
        _report(decision, change, _so_far(decision, old, root), as_json)
        return
    try:
        result = limits.wait(state.name, decision.limit_bytes, timeout_s=wait_s, old=old, root=root)
    except KvError:
        _report(decision, change, _so_far(decision, old, root), as_json)
        raise
    _report(decision, change, result, as_json)


def _so_far(decision: Decision, old: Sequence[LimitEntry], root: Path) -> Outcome:
    """How far the limit has got by now; "unknown" where that cannot be told."""
    try:
        return limits.outcome(decision.name, decision.limit_bytes, old=old, root=root)
    except KvError as error:
        return Outcome("unknown", error.message)


def _report(decision: Decision, change: LimitChange | None, outcome: Outcome, as_json: bool) -> None:
    before = change.before if change else decision.state.reading
    if as_json:
        body: dict[str, Any] = {
            "ipc": decision.name,
            "limit_bytes": decision.limit_bytes,
            "requested_bytes": decision.requested_bytes,
            "before": tables.words(before),
            "after": tables.words(change.after) if change else None,
            "status": outcome.status,
            "reason": outcome.reason or None,
            "effective_bytes": outcome.effective_bytes,
            "notes": decision.notes,
            "unsafe": decision.unsafe,
        }
        emit_json("kvctl.limit/1", body)
        return
    limit = format_size(decision.limit_bytes)
    same = before.limit_bytes == decision.limit_bytes
    text = f"{printable(decision.name)}: limit " + (
        f"{limit}, unchanged" if same else f"{format_size(before.limit_bytes)} -> {limit}"
    )
    why = f": {outcome.reason}" if outcome.reason else ""
    emit(f"{text} ({outcome.status}{why})")
