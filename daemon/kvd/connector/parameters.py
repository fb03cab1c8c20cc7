"""What a request may ask for in its `kv_transfer_params`: how long its chunks are kept, and whose they are.

A word or number that cannot be read costs a line in the log and the default, never the request. A tenant's name is the
exception: the default would be the namespace of everybody, so whatever is given there is taken as a name.
"""

import logging
from collections.abc import Mapping
from typing import Any

from kvd.store.retention import Retention

logger = logging.getLogger("vllm.kvd.parameters")

KNOWN = ("kvd_retention", "kvd_ttl_seconds", "kvd_namespace", "infera_retention", "infera_ttl_seconds")
LONGEST_WORD = 80
"""Characters of a request's own words that a line in the log repeats."""


def retention(parameters: Mapping[str, Any]) -> str:
    """The class of retention, by name."""
    word = _given(parameters, "kvd_retention", "infera_retention")
    if word is None:
        return "long"
    try:
        return Retention.of(str(word)).name.lower()
    except ValueError:
        logger.warning("kvd: kvd_retention %s is none of none, ephemeral, short, long; stored as long", _shown(word))
        return "long"


def ttl(parameters: Mapping[str, Any]) -> float | None:
    """Seconds until the chunks expire; None: they do not."""
    value = _given(parameters, "kvd_ttl_seconds", "infera_ttl_seconds")
    if value is None:
        return None
    try:
        seconds = -1.0 if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        seconds = -1.0
    if not 0 < seconds < 10 * 365 * 86400:
        logger.warning("kvd: kvd_ttl_seconds %s is not a number of seconds; stored without an expiry", _shown(value))
        return None
    return seconds


def tenant(parameters: Mapping[str, Any]) -> str:
    """Whose namespace is meant; '' is everybody's, for what is not given or empty. A tenant 0 is a tenant like any other."""
    value = parameters.get("kvd_namespace")
    if value is None or isinstance(value, str):
        return value or ""
    logger.warning("kvd: kvd_namespace %s is not a text; taken as %s", _shown(value), _shown(str(value)))
    return str(value)


def strangers(parameters: Mapping[str, Any]) -> list[str]:
    """Fields that look like ours and mean nothing here: misspelled, they would be taken for obeyed."""
    return sorted(name for name in map(str, parameters) if name.startswith(("kvd_", "infera_")) and name not in KNOWN)


def say_strangers(parameters: Mapping[str, Any]) -> None:
    """One line in the log for all of them."""
    if found := strangers(parameters):
        logger.warning("kvd: %s in kv_transfer_params means nothing; known are %s", _shown(", ".join(found)), ", ".join(KNOWN[:3]))


def _given(parameters: Mapping[str, Any], *names: str) -> Any:
    """The first of these that is there. An older name counts where ours is not given."""
    return next((parameters[name] for name in names if parameters.get(name) is not None), None)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST_WORD else f"{text[:LONGEST_WORD]}..."
