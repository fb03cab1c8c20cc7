"""One look-up of a prefix: which of its chunks all ranks and all groups hold, and where a hit may end.

Chunks from the first one on are asked for in one round trip. Where their run ends early there may be a tail chunk, the end of a
shorter prompt that began like this one: a second round trip asks for all tails that it could have, a third makes sure of the
longest. No state, any thread.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from kvd.connector.keys import Keys, Span
from kvd.connector.link import Link


def look_up(
    link: Link,
    keys: Keys,
    spans: list[Span],
    between: tuple[int, int],
    *,
    namespaces: Sequence[bytes],
    pin_s: float,
    ask_s: float,
    skip: Callable[[Span], bool],
) -> tuple[list[Span], bytes | None, bytes]:
    """The leading spans that are there, the token that pins them, and their sources. Raises Down, KvdError.

    `between`: the tokens of interest; `ask_s`: how long tiers that must do I/O to tell are asked; `skip`: tails not to offer.
    """
    computed, end = between
    names = [keys.of(span) for span in spans]
    look = functools.partial(_prefix, link, namespaces=list(namespaces), ask_s=ask_s)
    result = look(names, pin_s=pin_s)
    length, sources = result.length, result.sources
    if pin_s and 0 < length < len(spans):
        # What is pinned must fit the arena at once; more may be there than that.
        more = look(names[length:])
        length, sources = length + more.length, sources + more.sources
    found = spans[:length]
    if length == len(spans):
        return found, result.token, sources
    start = spans[length].start
    tails = keys.tails(start, min(start + keys.chunk, end), max(start, computed))
    tails = [tail for tail in tails if tail != spans[length] and not skip(tail)]
    if tails:
        tail_keys = [keys.of(tail) for tail in tails]
        there = link.call(lambda client: client.exists(tail_keys, namespace=namespaces[0], ask_s=ask_s))
        for tail, key, one in zip(tails, tail_keys, there, strict=True):
            more = look([key]) if one else None
            if more is not None and more.length:
                return [*found, tail], result.token, sources + (more.sources or b"\0")
    return found, result.token, sources


def _prefix(link: Link, keys: list[bytes], **how: Any) -> Any:
    return link.call(lambda client: client.prefix(keys, where=True, **how))
