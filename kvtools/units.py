"""Sizes and times: one grammar for every flag, one spelling for every screen.

Sizes are integers of bytes in code and JSON and IEC text (GiB) for people. The suffixes K, M, G, T, with or without B or
iB, in any case, are all 1024-based: the tools of this field read them so, and a limit that means 7 % less in one tool
than in the next is a trap. What does not parse is an error, never a guess: no bare suffix, comma, sign, inf, exponent.
"""

import re

from kvtools.errors import UsageError

_SIZE = re.compile(r"([0-9]{1,40}(?:\.[0-9]{1,40})?) ?(?:([kmgt])(?:i?b)?|b)?", re.IGNORECASE | re.ASCII)
_STEPS = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_DURATION = re.compile(r"([0-9]{1,40}(?:\.[0-9]{1,40})?) ?(ms|s|m|h|d)?", re.ASCII)
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

MAX_BYTES = 1 << 50
"""No size in this toolkit reaches 1 PiB: what does is a slip, and the pool segment format refuses it too."""
MAX_SECONDS = 20 * 86400
"""No wait in this toolkit reaches 20 days, and the kernel's own (poll, in milliseconds of 31 bits) end at 24: more would raise."""


def parse_size(text: str) -> int:
    """Bytes meant by `text`: '4G', '1.5 GiB', '512m', '4096'. Raises UsageError, naming the text, for anything else."""
    found = _SIZE.fullmatch(text.strip())
    if not found:
        raise UsageError(f"not a size: {text!r}", hint="write a number and one of B, K, M, G, T (1024-based), such as 4G or 512MiB")
    number, step = found.groups()
    scale = _STEPS[step.lower()] if step else 1
    whole, _, fraction = number.partition(".")
    # Integers throughout: a float would lose bytes above 2^53.
    value = int(whole) * scale + (int(fraction) * scale // 10 ** len(fraction) if fraction else 0)
    if value >= MAX_BYTES:
        raise UsageError(f"size too large: {text!r}", hint="sizes end below 1 PiB (1024T)")
    return value


def format_size(value: float) -> str:
    """IEC text with three or four significant figures: 512 B, 1.50 GiB, 128 MiB. Negative values keep their sign."""
    if value < 0:
        return f"-{format_size(-value)}"
    if value < 1024:
        return f"{int(value)} B"
    number = float(value)
    unit = "KiB"
    for unit in ("KiB", "MiB", "GiB", "TiB", "PiB"):  # noqa: B007 - the last one is used below
        number /= 1024
        if number < 999.5:
            break
    if number == int(number) and number < 1000:
        return f"{int(number)} {unit}"
    if number < 10:
        return f"{number:.2f} {unit}"
    return f"{number:.1f} {unit}" if number < 100 else f"{number:.0f} {unit}"


def parse_percent(text: str) -> float:
    """A percentage in (0, 100]: '50', '12.5', '50%'. Raises UsageError."""
    body = text.strip().removesuffix("%").strip()
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)?", body, re.ASCII) or not 0 < float(body) <= 100:
        raise UsageError(f"not a percentage: {text!r}", hint="write a number above 0 and up to 100, such as 50 or 12.5")
    return float(body)


def parse_duration(text: str) -> float:
    """Seconds meant by '500ms', '2', '2s', '5m', '1h', '1d'. Raises UsageError."""
    found = _DURATION.fullmatch(text.strip())
    if not found:
        raise UsageError(f"not a duration: {text!r}", hint="write a number and one of ms, s, m, h, d, such as 500ms or 30s")
    number, unit = found.groups()
    seconds = float(number) * _SECONDS[unit or "s"]
    if seconds > MAX_SECONDS:
        raise UsageError(f"duration too long: {text!r}", hint="durations end at 20d")
    return seconds


def format_duration(seconds: float) -> str:
    """Short text for people: 250 us, 3.2 ms, 1.5 s, 4m10s, 2h05m, 3d04h."""
    if seconds < 0:
        return f"-{format_duration(-seconds)}"
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def format_rate(bytes_per_second: float) -> str:
    """Bytes a second for people: '1.20 GiB/s'."""
    return f"{format_size(bytes_per_second)}/s"
