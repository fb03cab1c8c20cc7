"""What a NAME on the command line means, and what may be typed there.

Completion lists the folder and opens nothing, so that a stuck segment cannot hang a shell. A name that is not there is
NotFound with the nearest one that is: the usual cause is a typo or another engine's default name.
"""

import difflib
from pathlib import Path

from kvtools.errors import KvError, NotFound
from kvtools.output import printable
from kvtools.segments import pool
from kvtools.segments.owner import PoolState, judge


def find(name: str, root: Path) -> PoolState:
    """The pool segment `name` with its owner. Raises NotFound with a suggestion, Unreachable, TimedOut, UsageError."""
    try:
        return judge(pool.read_pool(name, root=root), root=root)
    except NotFound:
        raise not_there(name, root) from None


def not_there(name: str, root: Path) -> NotFound:
    """The error for a segment that does not exist: names the nearest one, else what there is."""
    try:
        names = pool.candidates(root)
    except KvError:
        names = []
    folded = {known.casefold(): known for known in names}
    near = difflib.get_close_matches(name.casefold(), folded, n=1)
    if near:
        hint = f"did you mean {printable(folded[near[0]])}?"
    elif names:
        shown = ", ".join(printable(known) for known in names[:5]) + (", ..." if len(names) > 5 else "")
        hint = f"segments in {root}: {shown}"
    else:
        hint = f"there is no segment in {root}; engines make theirs when they load a model"
    return NotFound(f"no segment named {printable(name)}", hint=hint)


def names_starting(root: Path, incomplete: str) -> list[str]:
    """Names that begin with `incomplete`; empty rather than an error."""
    try:
        names = pool.candidates(root)
    except KvError:
        return []
    return [name for name in names if name.startswith(incomplete)]
