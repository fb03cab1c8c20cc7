"""Why an engine finds nothing of what another one stored: the facts of the last engine of the same model, compared.

Engines whose facts differ have different namespaces and share nothing, silently and rightly. Each leaves its facts in the
daemon under its model's name, and the next one says what differs: a hash seed set on one side only costs every hit, and
nothing else would tell. Facts are small, hold no secrets and no prompt, and are compared, never trusted.
"""

import hashlib
import json
import logging
import threading
from collections.abc import Mapping
from typing import Any

from kvd.connector.fingerprint import differences
from kvd.connector.link import Down, Link, wait_up
from kvd.errors import KvdError

logger = logging.getLogger("vllm.kvd")

CONNECT_S = 30.0
NAMESPACE = "kvd.connector.facts"
HINTS = {
    "hash_seed": "set PYTHONHASHSEED to the same value for all engines, or for none",
    "hash_algorithm": "give all engines one --prefix-caching-hash-algo",
    "chunk_tokens": "give all engines one KVD_CHUNK_TOKENS, or leave it at auto",
    "tenant": "KVD_TENANT keeps them apart on purpose",
}


def compare(link: Link, facts: Mapping[str, str]) -> list[str]:
    """What differs from the last engine of this model, as 'name: mine / theirs' lines; leaves `facts` for the next one."""
    key = hashlib.sha256(json.dumps([facts.get("weights"), facts.get("model")]).encode()).digest()
    mine = json.dumps(dict(facts), sort_keys=True).encode()

    def exchange(client: Any) -> bytes | None:
        found: bytes | None = client.get(key, namespace=NAMESPACE)
        if found != mine:
            client.put(key, mine, namespace=NAMESPACE)
        return found

    try:
        found = link.call(exchange)
    except (Down, KvdError) as error:
        logger.debug("kvd: facts were not compared: %s", error)
        return []
    try:
        theirs = json.loads(found) if found else facts
    except ValueError:
        return []
    if not isinstance(theirs, dict) and theirs is not facts:
        return []
    return differences(facts, {str(name): str(value) for name, value in theirs.items()})


def compare_soon(link: Link, facts: Mapping[str, str]) -> threading.Thread:
    """Compare on a thread of its own and say what differs: the last facts may have to come from a slow tier."""

    def work() -> None:
        if wait_up(link, CONNECT_S):
            say(compare(link, facts))

    thread = threading.Thread(target=work, name="kvd-facts", daemon=True)
    thread.start()
    return thread


def say(lines: list[str]) -> None:
    """The differences in the log, with what to do about those that are seldom meant."""
    if lines:
        hints = [hint for name, hint in HINTS.items() if any(line.startswith(f"{name}:") for line in lines)]
        logger.warning(
            "kvd: the last engine of this model stored under other settings; this one shares nothing with it (here / there): %s%s",
            "; ".join(lines),
            f". To share: {'; '.join(hints)}" if hints else "",
        )
