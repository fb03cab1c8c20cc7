"""What a request may ask for in its `kv_transfer_params`: how long its chunks are kept, and whose they are.

A word or number that cannot be read costs a line in the log and the default, never the request.
"""

import logging
from collections.abc import Mapping
from typing import Any

from kvd.store.retention import Retention

logger = logging.getLogger("vllm.kvd.parameters")


def retention(parameters: Mapping[str, Any]) -> str:
    """The class of retention, by name."""
    word = str(parameters.get("kvd_retention") or parameters.get("infera_retention") or "long")
    try:
        return Retention.of(word).name.lower()
    except ValueError as error:
        logger.warning("kvd: %s; stored as long", error)
        return "long"


def ttl(parameters: Mapping[str, Any]) -> float | None:
    """Seconds until the chunks expire; None: they do not."""
    value = parameters.get("kvd_ttl_seconds", parameters.get("infera_ttl_seconds"))
    if value is None:
        return None
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = -1.0
    if not 0 < seconds < 10 * 365 * 86400:
        logger.warning("kvd: kvd_ttl_seconds %r is not a number of seconds; stored without an expiry", value)
        return None
    return seconds
