"""JSON values that may be anything, as what is wanted or as nothing: a capture is somebody else's file. Pure, never raises."""

import math
from typing import Any

WHOLE_MAX = 1 << 62
"""Above every size, count and identifier of a host; larger numbers are no facts and would overflow arithmetic."""


def mapping(value: Any) -> dict[str, Any]:
    """The items of an object, {} for anything else."""
    return {str(key): item for key, item in value.items()} if isinstance(value, dict) else {}


def listing(value: Any) -> list[Any]:
    """The items of a list, [] for anything else."""
    return list(value) if isinstance(value, list) else []


def objects(value: Any) -> list[dict[str, Any]]:
    """The objects of a list."""
    return [mapping(item) for item in listing(value) if isinstance(item, dict)]


def texts(value: Any) -> list[str]:
    """The items of a list as text."""
    return [str(item) for item in listing(value)]


def whole(value: Any) -> int | None:
    """An integer of sensible size, or None. True and False are none."""
    if not isinstance(value, int) or isinstance(value, bool) or not -WHOLE_MAX <= value <= WHOLE_MAX:
        return None
    return value


def number(value: Any) -> float | None:
    """A finite number, or None."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None
