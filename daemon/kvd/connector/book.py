"""The engines that have stored something, as each left its view in the daemon: who stored under what.

Engines whose facts differ have different namespaces and share nothing, silently and rightly. So each leaves its view, and
the next one of the same model says what differs (a hash seed set on one side only costs every hit, and nothing else would
tell); `kvd why` looks in all of them. Views are small, are compared and never trusted, and may be evicted like anything.
"""

import hashlib
import logging
import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from kvd.connector.link import Down, Link, wait_up
from kvd.connector.view import NotAView, View
from kvd.errors import KvdError
from kvd.wire import protocol as p

logger = logging.getLogger("vllm.kvd")

CONNECT_S = 30.0
NAMESPACE = "kvd.connector.engines"
KEPT_S = 30 * 86400.0
MOST = 64
"""Views looked at, the newest ones."""
HINTS = {
    "hash_seed": "set PYTHONHASHSEED to the same value for all engines, or for none",
    "hash_algorithm": "give all engines one --prefix-caching-hash-algo",
    "chunk_tokens": "give all engines one KVD_CHUNK_TOKENS, or leave it at auto and KVD_AIS alike: with GPU-direct auto is larger",
    "tenant": "KVD_TENANT keeps them apart on purpose, or one of them reset its caches (KVD_RESET)",
}


def enter(client: Any, view: View) -> None:
    """Leave this engine's view; one that is there already is renewed. Raises KvdError."""
    same = replace(view, at=0.0, name="", more={}).as_json()
    key = hashlib.sha256(same.encode()).digest()
    client.put(key, view.as_json().encode(), namespace=NAMESPACE, ttl_s=KEPT_S)


def views(client: Any) -> list[View]:
    """The views that engines left, newest first. Raises KvdError."""
    from kvd.store.identity import namespace_of

    space = namespace_of(NAMESPACE)
    page = client.connect().call(p.Keys(0, space, b"", 1000), p.KeyPage)
    keys = list(dict.fromkeys(identity[32:] for identity, *_ in page.rows))
    found = []
    for text in client.get_many(keys, namespace=NAMESPACE) if keys else ():
        try:
            if text is not None:
                found.append(View.of_json(text))
        except NotAView as error:
            logger.debug("kvd: an engine's view cannot be read: %s", error)
    return sorted(found, key=lambda view: -view.at)[:MOST]


def same_model(view: View, others: Iterable[View]) -> list[View]:
    """Those of the same model and weights."""
    mine = (view.facts.get("weights"), view.facts.get("model"))
    return [other for other in others if (other.facts.get("weights"), other.facts.get("model")) == mine]


def compare(link: Link, view: View) -> list[str]:
    """What differs from the last engine of this model, as 'name: mine / theirs' lines; leaves `view` for the next one."""

    def exchange(client: Any) -> list[View]:
        found = views(client)
        enter(client, replace(view, at=time.time()))
        return found

    try:
        others = same_model(view, link.call(exchange))
    except (Down, KvdError) as error:
        logger.debug("kvd: facts were not compared: %s", error)
        return []
    return view.differs(others[0]) if others else []


def compare_soon(link: Link, view: View) -> threading.Thread:
    """Compare on a thread of its own and say what differs: the other views may have to come from a slow tier."""

    def work() -> None:
        link.look()  # the daemon may be another one than the last time
        if wait_up(link, CONNECT_S):
            say(compare(link, view))

    thread = threading.Thread(target=work, name="kvd-facts", daemon=True)
    thread.start()
    return thread


def hints(lines: Iterable[str]) -> list[str]:
    """What to do about differences that are seldom meant."""
    names = {line.partition(":")[0] for line in lines}
    return [hint for name, hint in HINTS.items() if name in names]


def say(lines: list[str]) -> None:
    """The differences in the log."""
    if lines:
        advice = hints(lines)
        logger.warning(
            "kvd: the last engine of this model stored under other settings; this one shares nothing with it (here / there): %s%s",
            "; ".join(lines),
            f". To share: {'; '.join(advice)}" if advice else "",
        )
