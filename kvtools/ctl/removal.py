"""`kvctl delete`: one segment, by name, after the question that its state calls for.

Deleting under a live engine is the severe case: kvcached up to 0.1.5 dies of it, later ones go on with a segment that
nobody lists. So a pool whose owner lives, or for which a likely owner process is found, goes only when its name is typed.

Failure: NotFound, Unreachable (no segment, permission), TimedOut, Refused. Concurrency: the question takes a person's time,
so who owns the segment is checked again at its removal (`owner.remove_pool`); an engine that took the name meanwhile keeps it.
"""

from pathlib import Path

from kvtools.ctl.asking import agree, agree_by_name
from kvtools.ctl.naming import find
from kvtools.ctl.peers import likely_owners
from kvtools.errors import NotFound
from kvtools.output import printable
from kvtools.segments import owner, pool
from kvtools.units import format_size


def delete(name: str, *, root: Path, yes: bool, confirm: str | None) -> pool.PoolReading:
    """Remove pool `name` after the question that its state calls for, and its sidecar when nobody owns it; its last reading."""
    state = find(name, root)
    shown = printable(name)
    holder = ""
    if state.state == "live" and state.owner is not None:
        holder = f"{state.owner.info.engine or 'an engine'}, pid {state.owner.pid}"
    elif state.owner is None and (peers := likely_owners(name)):
        holder = f"pid {peers[0].pid}, {peers[0].found_by}"
    if holder:
        agree_by_name(name, confirm=confirm, refusal=f"segment {shown} is in use ({holder}): deleting it can end that engine")
    elif confirm != name:
        used = f", {format_size(state.reading.used_bytes)} in use by its last word" if state.reading.used_bytes else ""
        agree(f"delete segment {shown} ({state.state}{used})?", yes=yes, refusal=f"segment {shown} is not deleted without a yes")
    try:
        return owner.remove_pool(name, state.holder, root=root)
    except NotFound:
        raise NotFound(f"segment {shown} went away by itself") from None
