"""What a request may ask for in its `kv_transfer_params`: how long its chunks are kept, and whose they are.

A word or number that cannot be read costs a line in the log and the default, never the request. A tenant's name is the
exception: the default would be the namespace of everybody, so whatever is given there is taken as a name.

A client that errs once errs in every request: a line of one kind is followed by silence, and the next one says how many
there were in between.
"""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from kvd.connector.seldom import Seldom
from kvd.store.retention import Retention

logger = logging.getLogger("vllm.kvd.parameters")

KNOWN = ("kvd_retention", "kvd_ttl_seconds", "kvd_namespace", "infera_retention", "infera_ttl_seconds")
LONGEST_WORD = 80
"""Characters of a request's own words that a line in the log repeats."""
LONGEST_TTL_S = 10 * 365 * 86400.0


class SlipLog:
    """The lines about what requests ask for and cannot mean; any thread."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._lines = Seldom(logger, monotonic)

    def note(self, parameters: Mapping[str, Any]) -> None:
        """What this request's parameters have that cannot be meant."""
        for field, text in slips(parameters).items():
            self._lines.warning(field, text)


def retention(parameters: Mapping[str, Any]) -> str:
    """The class of retention, by name."""
    return _retention(parameters)[0]


def ttl(parameters: Mapping[str, Any]) -> float | None:
    """Seconds until the chunks expire; None: they do not."""
    return _ttl(parameters)[0]


def tenant(parameters: Mapping[str, Any]) -> str:
    """Whose namespace is meant; '' is everybody's, for what is not given or empty. A tenant 0 is a tenant like any other."""
    return _tenant(parameters)[0]


def slips(parameters: Mapping[str, Any]) -> dict[str, str]:
    """What is there and cannot be meant: the field, and in words what is taken instead. '' as a field: such as there are not."""
    found = {
        "kvd_retention": _retention(parameters)[1],
        "kvd_ttl_seconds": _ttl(parameters)[1],
        "kvd_namespace": _tenant(parameters)[1],
        "": _strangers(parameters),
    }
    return {field: text for field, text in found.items() if text}


def _retention(parameters: Mapping[str, Any]) -> tuple[str, str]:
    word = _given(parameters, "kvd_retention", "infera_retention")
    if word is None:
        return "long", ""
    try:
        return Retention.of(str(word)).name.lower(), ""
    except ValueError:
        return "long", f"kvd_retention {_shown(word)} is none of none, ephemeral, short, long; stored as long"


def _ttl(parameters: Mapping[str, Any]) -> tuple[float | None, str]:
    value = _given(parameters, "kvd_ttl_seconds", "infera_ttl_seconds")
    if value is None:
        return None, ""
    try:
        seconds = -1.0 if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        seconds = -1.0
    if not 0 < seconds < LONGEST_TTL_S:
        return (
            None,
            f"kvd_ttl_seconds {_shown(value)} is no number of seconds above 0 and below ten years; stored without an expiry",
        )
    return seconds, ""


def _tenant(parameters: Mapping[str, Any]) -> tuple[str, str]:
    value = parameters.get("kvd_namespace")
    if value is None or isinstance(value, str):
        return value or "", ""
    return str(value), f"kvd_namespace {_shown(value)} is not a text; taken as {_shown(str(value))}"


def _strangers(parameters: Mapping[str, Any]) -> str:
    """Fields that look like ours and mean nothing here: misspelled, they would be taken for obeyed."""
    found = sorted(name for name in map(str, parameters) if name.startswith(("kvd_", "infera_")) and name not in KNOWN)
    return f"{_shown(', '.join(found))} in kv_transfer_params means nothing; known are {', '.join(KNOWN[:3])}" if found else ""


def _given(parameters: Mapping[str, Any], *names: str) -> Any:
    """The first of these that is there. An older name counts where ours is not given."""
    return next((parameters[name] for name in names if parameters.get(name) is not None), None)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST_WORD else f"{text[:LONGEST_WORD]}..."
