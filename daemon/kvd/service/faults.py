"""What no request may ask for: numbers that fit no column, names of the wrong length, batches without a bound.

The decoder has checked types; this checks sizes, before a request touches anything. A namespace that is a byte short beside
a key that is a byte long would be the identity of another namespace's value, so every namespace's length is checked, also
where nothing is written.
"""

from collections.abc import Callable
from typing import Any

from kvd.store.identity import KEY_BYTES, NAMESPACE_BYTES
from kvd.store.retention import LATEST
from kvd.wire import protocol as p

MAX_LOOKUPS = 1 << 20
"""Keys times namespaces of one `Prefix`: about a tenth of a second's work."""
MAX_EXTENTS = 1024
"""Extents of files in one request: each costs the disk a page."""
MAX_WHY = 1 << 15
"""Keys times namespaces of one `Why`: its answer must fit a frame."""
MAX_WHY_TEXT = 200
_NAMES = f"a namespace is {NAMESPACE_BYTES} bytes, a key {KEY_BYTES}"
_KEY_LENGTHS = {KEY_BYTES}
_BATCH = f"at most {p.MAX_BATCH} keys in one request"


def fault(m: p.Request) -> str:
    """Why this request cannot be meant, or ''."""
    check = _CHECKS.get(type(m))
    return check(m) if check is not None else ""


def _keys(m: Any) -> str:
    if len(m.namespace) != NAMESPACE_BYTES:
        return _NAMES
    return _BATCH if len(m.keys) > p.MAX_BATCH else ""


def _written(m: p.Commit | p.PutInline | p.DirectReserve) -> str:
    if why := _keys(m):
        return why
    if m.keys and set(map(len, m.keys)) != _KEY_LENGTHS:
        return _NAMES
    if not 0 <= m.expires_ns <= LATEST:
        return f"an expiry is 0 to {LATEST} ns"
    return "" if 0 <= m.retention <= 3 else f"unknown retention {m.retention}"


def _commit(m: p.Commit) -> str:
    if why := _written(m):
        return why
    if not len(m.keys) == len(m.serials) == len(m.lengths):
        return "keys, serials and lengths differ in number"
    if len(m.ahead) > p.MAX_BATCH or min(m.lengths, default=0) < 0 or min(m.ahead, default=0) < 0:
        return "a length is negative, or there are too many"
    return ""


def _put_inline(m: p.PutInline) -> str:
    if why := _written(m):
        return why
    if len(m.keys) != len(m.values):
        return "keys and values differ in number"
    return "" if all(len(v) <= p.INLINE_BYTES for v in m.values) else f"values over {p.INLINE_BYTES} bytes do not travel in a frame"


def _reserve(m: p.Reserve) -> str:
    return "a size is negative, or there are too many" if len(m.sizes) > p.MAX_BATCH or any(s < 0 for s in m.sizes) else ""


def _prefix(m: p.Prefix) -> str:
    if not m.namespaces or any(len(namespace) != NAMESPACE_BYTES for namespace in m.namespaces):
        return f"prefix wants at least one namespace, and {_NAMES}"
    if len(m.keys) > p.MAX_BATCH or len(m.keys) * len(m.namespaces) > MAX_LOOKUPS:
        return f"{_BATCH}, and at most {MAX_LOOKUPS} look-ups over all namespaces"
    return ""


def _direct_reserve(m: p.DirectReserve) -> str:
    if why := _direct_keys(m) or _written(m):
        return why
    return (
        "keys and lengths differ in number, or one is negative"
        if len(m.keys) != len(m.lengths) or min(m.lengths, default=0) < 0
        else ""
    )


def _direct_keys(m: Any) -> str:
    if len(m.keys) > MAX_EXTENTS:
        return f"at most {MAX_EXTENTS} extents in one request"
    return _NAMES if len(m.namespace) != NAMESPACE_BYTES or any(len(key) != KEY_BYTES for key in m.keys) else ""


def _direct_commit(m: p.DirectCommit) -> str:
    if len(m.serials) > MAX_EXTENTS or (m.checksums and len(m.checksums) != len(m.serials)):
        return f"at most {MAX_EXTENTS} extents in one request, and a checksum for each or none"
    return "" if all(len(one) in (0, 16) for one in m.checksums) else "a checksum is 16 bytes, or empty"


def _optional(m: p.Clear | p.Keys | p.Flush) -> str:
    return "" if not m.namespace or len(m.namespace) == NAMESPACE_BYTES else _NAMES


def _flush(m: p.Flush) -> str:
    return _optional(m) or (_BATCH if len(m.keys) > p.MAX_BATCH else "")


def _why(m: p.Why) -> str:
    if not m.namespaces or any(len(namespace) != NAMESPACE_BYTES for namespace in (*m.namespaces, *m.others)):
        return f"why wants at least one namespace, and {_NAMES}"
    if any(len(key) != KEY_BYTES for key in m.keys):
        return _NAMES
    spaces = len(m.namespaces) + len(m.others)
    return "" if len(m.keys) * spaces <= MAX_WHY else f"at most {MAX_WHY} keys times namespaces in one request"


def _note(m: p.Note) -> str:
    return _keys(m) or ("" if len(m.why) <= MAX_WHY_TEXT else f"a reason has at most {MAX_WHY_TEXT} characters")


_CHECKS: dict[type[p.Request], Callable[[Any], str]] = {
    p.Exists: _keys,
    p.Lease: _keys,
    p.Prefetch: _keys,
    p.Delete: _keys,
    p.Where: _keys,
    p.Claim: lambda m: "" if len(m.namespace) == NAMESPACE_BYTES else _NAMES,
    p.Unpin: lambda m: "" if len(m.namespace) == NAMESPACE_BYTES else _NAMES,
    p.Commit: _commit,
    p.PutInline: _put_inline,
    p.Reserve: _reserve,
    p.Prefix: _prefix,
    p.Clear: _optional,
    p.Keys: _optional,
    p.Flush: _flush,
    p.DirectReserve: _direct_reserve,
    p.DirectCommit: _direct_commit,
    p.DirectHold: _direct_keys,
    p.Why: _why,
    p.Note: _note,
}
