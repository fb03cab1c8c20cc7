"""Every setting of the elastic pool, from the environment: it reaches all processes of an engine.

KVTOOLS_SEGMENT alone turns the pool on. kvcached's variables are understood, each with a notice, where ours are not set:
a launch script for the one works with the other. With kvcached itself installed its variables are its own (see `claim`).
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from kvtools.config import Setting, resolve
from kvtools.errors import Refused, UsageError
from kvtools.segments.files import check_name
from kvtools.segments.owner import sidecar_name
from kvtools.segments.pool import is_pool_name
from kvtools.units import parse_duration, parse_size

_ON = {"1", "on", "true", "yes"}
_OFF = {"0", "off", "false", "no"}


def _switch(text: str) -> bool:
    word = text.strip().lower()
    if word not in _ON | _OFF:
        raise UsageError(f"neither on nor off: {text!r}", hint="write 1 or 0")
    return word in _ON


def _count(text: str) -> int:
    if not text.strip().isascii() or not text.strip().isdigit():
        raise UsageError(f"not a whole number: {text!r}")
    return int(text)


def _size(text: str) -> int:
    size = parse_size(text)
    if size < 1:
        raise UsageError("must be above 0")
    return size


def _name(text: str) -> str:
    sidecar_name(text)  # has to fit too
    if not is_pool_name(check_name(text)):
        raise UsageError(f"not a pool's name: {text!r}", hint="names kvtools.* and *.kvtools mean other files")
    return text


SETTINGS = [
    Setting("segment", _name, None, ("KVTOOLS_SEGMENT",), help="the pool's segment in /dev/shm; without it the pool is off"),
    Setting("limit", _size, None, ("KVTOOLS_LIMIT",), help="the limit to start with (default: all that the engine reserves)"),
    Setting("page_size", _size, 2 << 20, ("KVTOOLS_PAGE_SIZE",), help="bytes of one layer that appear and vanish together"),
    Setting("min_reserved_pages", _count, 5, ("KVTOOLS_MIN_RESERVED_PAGES",), help="pages mapped ahead of need"),
    Setting("max_reserved_pages", _count, 10, ("KVTOOLS_MAX_RESERVED_PAGES",), help="freed pages that stay mapped"),
    Setting("prealloc", _switch, True, ("KVTOOLS_PREALLOC",), help="map pages ahead at all"),
    Setting("min_free", parse_size, 0, ("KVTOOLS_MIN_FREE",), help="memory of the device that no page is taken from"),
    Setting(
        "idle_release_s",
        parse_duration,
        0.0,
        ("KVTOOLS_IDLE_RELEASE",),
        help="give cached prefixes and the reserve back after so long without a request; 0: keep them",
    ),
]


@dataclass(frozen=True)
class Settings:
    """The settings' values; `notices` has one line for each variable that was understood in kvcached's spelling."""

    segment: str | None
    limit: int | None = None
    page_size: int = 2 << 20
    min_reserved_pages: int = 5
    max_reserved_pages: int = 10
    prealloc: bool = True
    min_free: int = 0
    idle_release_s: float = 0.0
    notices: tuple[str, ...] = ()


def read_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """The settings in force. Raises UsageError, naming the variable."""
    environ = os.environ if environ is None else environ
    translated, notices = translate(environ)
    values = resolve(SETTINGS, flags={}, environ=translated)
    found = Settings(**{name: value.value for name, value in values.items()}, notices=tuple(notices))
    if found.max_reserved_pages < found.min_reserved_pages:
        low, high = found.min_reserved_pages, found.max_reserved_pages
        raise UsageError(f"KVTOOLS_MAX_RESERVED_PAGES ({high}) is below KVTOOLS_MIN_RESERVED_PAGES ({low})")
    return found


_THEIRS = {
    "KVCACHED_MIN_RESERVED_PAGES": "KVTOOLS_MIN_RESERVED_PAGES",
    "KVCACHED_MAX_RESERVED_PAGES": "KVTOOLS_MAX_RESERVED_PAGES",
    "KVCACHED_PAGE_PREALLOC_ENABLED": "KVTOOLS_PREALLOC",
    "KVCACHED_PAGE_SIZE_MB": "KVTOOLS_PAGE_SIZE",
}


def translate(environ: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """`environ` with our names for what is set in kvcached's, and a notice each. Ours win; nothing is taken unless they are on."""
    result = dict(environ)
    asked = environ.get("ENABLE_KVCACHED", "").lower() in _ON
    if not asked:
        return result, []
    notices = []
    if "KVTOOLS_SEGMENT" not in environ:
        from kvtools.ctl.peers import sanitised

        given = environ.get("KVCACHED_IPC_NAME", "")
        result["KVTOOLS_SEGMENT"] = sanitised(given) if given else f"kvcached_vLLM_{os.getpgrp()}"
        source = "KVCACHED_IPC_NAME" if given else "its default"
        notices.append(f"ENABLE_KVCACHED is understood: the elastic pool is on, segment {result['KVTOOLS_SEGMENT']} ({source})")
    for theirs, ours in _THEIRS.items():
        if theirs in environ and ours not in environ:
            result[ours] = environ[theirs] + ("M" if theirs.endswith("_MB") else "")
            notices.append(f"{theirs} is understood; its name here is {ours}")
    return result, notices


def claim(environ: Mapping[str, str], *, kvcached_installed: bool) -> str:
    """Why the pool stays off although kvcached's variables ask for one; empty where nothing speaks against it.

    Raises Refused when both kvcached and this pool are asked for: two of them would patch one engine.
    """
    if not kvcached_installed or environ.get("ENABLE_KVCACHED", "").lower() not in _ON:
        return ""
    if environ.get("KVTOOLS_SEGMENT"):
        raise Refused(
            "kvcached is installed here and ENABLE_KVCACHED is set: it and KVTOOLS_SEGMENT would both replace the KV cache",
            hint="unset ENABLE_KVCACHED, or uninstall kvcached (pip uninstall kvcached); or unset KVTOOLS_SEGMENT to stay with it",
        )
    return (
        "kvcached is installed here, so ENABLE_KVCACHED is its own and kvtools' elastic pool stays off; "
        "to use the latter: pip uninstall kvcached, or unset ENABLE_KVCACHED and set KVTOOLS_SEGMENT"
    )
