"""Version numbers. Driver versions live in namespaces (module 6.16.6, package release 30.20.1): never compare across them."""

import re

MAX_DIGITS = 20
"""Of the largest 64-bit number."""
_NUMBERS = re.compile(r"\s*v?(\d+(?:\.\d+)*)", re.ASCII)


def version_tuple(text: str) -> tuple[int, ...] | None:
    """'6.16.13-2278356.24.04' -> (6, 16, 13); None where `text` does not begin with a number. What follows '-' is a build."""
    found = _NUMBERS.match(text)
    if not found:
        return None
    parts = found[1].split(".")
    return tuple(int(part) for part in parts) if all(len(part) < 10 for part in parts) else None


def at_least(text: str, minimum: tuple[int, ...]) -> bool | None:
    """Whether version `text` is `minimum` or later; None where it is no version."""
    version = version_tuple(text)
    if version is None:
        return None
    width = max(len(version), len(minimum))
    return version + (0,) * (width - len(version)) >= minimum + (0,) * (width - len(minimum))


def decimal(text: str) -> int | None:
    """A plain or 0x-prefixed integer of a host's file, or None: also for one longer than any number a kernel writes."""
    if len(text) > MAX_DIGITS + 8 or sum(map(str.isalnum, text)) > MAX_DIGITS:
        return None
    try:
        return int(text.strip(), 0)
    except ValueError:
        return None
