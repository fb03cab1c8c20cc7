"""Every setting of the connector: `kv_connector_extra_config` > environment > default.

The environment reaches all of the engine's processes, so it is the usual way. The names that an older connector used
(INFERA_KVD_*) are understood, and said aloud once.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvd.connector.direct_io import BACKENDS
from kvtools.config import Resolved, Setting, resolve
from kvtools.errors import UsageError
from kvtools.units import format_duration, parse_duration, parse_size

MOST_TOKENS = 1 << 24
"""Tokens of a chunk: more than any prompt has."""
MOST_THREADS = 256
LEAST_S = 0.001


def _chunk_tokens(text: str) -> int | None:
    if text.strip().lower() == "auto":
        return None
    return _positive(text, MOST_TOKENS, "auto, or a number of tokens")


def _threads(text: str) -> int:
    return _positive(text, MOST_THREADS, "a number of threads")


def _positive(text: str, most: int, what: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if not 1 <= value <= most:
        raise UsageError(f"not a whole number from 1 to {most}: {text!r}", hint=f"write {what}")
    return value


def _patience(text: str) -> float:
    """A time that something may take. With none at all it would always fail."""
    seconds = parse_duration(text)
    if seconds < LEAST_S:
        raise UsageError(f"not a time from {format_duration(LEAST_S)} up: {text!r}", hint="write a time, such as 500ms or 30s")
    return seconds


def _word(text: str) -> str | None:
    """A text; an empty one is none at all, as an unset variable would be."""
    return text or None


def _switch(text: str) -> bool:
    word = text.strip().lower()
    if word not in {"1", "0", "on", "off", "true", "false", "yes", "no"}:
        raise UsageError(f"neither on nor off: {text!r}", hint="write 1 or 0")
    return word in {"1", "on", "true", "yes"}


def _ais(text: str) -> str:
    word = text.strip().lower()
    # What an older connector took for "force it" never was that: it fell back all the same.
    meaning = {"1": "auto", "on": "auto", "true": "auto", "yes": "auto", "0": "off", "false": "off", "no": "off"}.get(word, word)
    if meaning not in {"off", "auto", "require"}:
        raise UsageError(f"not off, auto or require: {text!r}")
    return meaning


def _roots(text: str) -> tuple[Path, ...]:
    """Folders, separated by commas; `long=/path` as an older connector wrote them."""
    found = []
    for word in filter(None, (part.strip() for part in text.split(","))):
        kind, equals, path = word.partition("=")
        if equals and kind not in {"long", "short"}:
            raise UsageError(f"neither a folder nor long=FOLDER: {word!r}")
        found.append(Path(path if equals else word))
        if not found[-1].is_absolute():
            raise UsageError(f"not an absolute path: {word!r}")
    return tuple(found)


def _reset(text: str) -> str:
    word = text.strip().lower()
    if word not in {"private", "clear", "keep"}:
        raise UsageError(f"neither private, clear nor keep: {text!r}")
    return word


def _backend(text: str) -> str:
    if text not in (*BACKENDS, "auto"):
        raise UsageError(f"not auto, {', '.join(BACKENDS)}: {text!r}")
    return "" if text == "auto" else text


SETTINGS = [
    Setting(
        "socket", _word, None, ("KVD_SOCKET", "INFERA_KVD_SOCKET"), help="the daemon's socket (default: where kvd serve has it)"
    ),
    Setting(
        "chunk_tokens",
        _chunk_tokens,
        None,
        ("KVD_CHUNK_TOKENS", "INFERA_KVD_CHUNK_TOKENS"),
        help="tokens stored as one value: auto (256), or a number, rounded to whole blocks; equal on all engines",
    ),
    Setting("save", _switch, True, ("KVD_SAVE",), help="store what this engine computes (kv_role kv_consumer turns it off)"),
    Setting("load", _switch, True, ("KVD_LOAD",), help="load what is stored (kv_role kv_producer turns it off)"),
    Setting("tenant", str, "", ("KVD_TENANT",), help="mixed into every namespace: engines with different words share nothing"),
    Setting("lookup_timeout_s", _patience, 1.0, ("KVD_LOOKUP_TIMEOUT",), help="longest that a look-up holds up the engine"),
    Setting("save_timeout_s", _patience, 1.0, ("KVD_SAVE_TIMEOUT",), help="longest that one save may hold up a step"),
    Setting("load_timeout_s", _patience, 30.0, ("KVD_LOAD_TIMEOUT",), help="after this a load has failed; it is recomputed"),
    Setting(
        "pin_s",
        parse_duration,
        0.0,
        ("KVD_PIN",),
        help="how long a look-up pins what it found while the request waits for room; 0: the load pins, and a look-up stays short",
    ),
    Setting(
        "reset",
        _reset,
        "private",
        ("KVD_RESET",),
        help="when vLLM resets its caches, as also before it sleeps: private: the engine finds nothing stored before, and shares "
        "nothing until it restarts, since its weights may have changed; keep: nothing happens (they never do); clear: what is "
        "stored for the model is deleted, for all engines (they change together)",
    ),
    Setting(
        "ais",
        _ais,
        "off",
        ("KVD_AIS", "INFERA_KVD_AIS", "INFERA_KVD_GPU_DIRECT"),
        help="GPU-direct: off; auto, where it works; require, or do not start",
    ),
    Setting(
        "direct_roots",
        _roots,
        None,
        ("KVD_DIRECT_ROOTS", "INFERA_KVD_HIPFILE_ROOTS"),
        help="where this process sees the folders of the daemon's disk tier, by commas (default: where the daemon does)",
    ),
    Setting(
        "direct_checksum",
        _switch,
        False,
        ("KVD_DIRECT_CHECKSUM",),
        help="compute and compare checksums of what moves past the daemon: a pass of the CPU over every byte",
    ),
    Setting(
        "direct_staging",
        parse_size,
        512 << 20,
        ("KVD_DIRECT_STAGING",),
        help="memory for staging buffers of GPU-direct, at least two chunks",
    ),
    Setting(
        "direct_backend",
        _backend,
        "",
        ("KVD_DIRECT_BACKEND",),
        help="what moves the bytes: hipfile, cufile, posix, or auto, which chooses by where the engine's memory is",
    ),
    Setting(
        "direct_library",
        _word,
        None,
        ("KVD_DIRECT_LIBRARY",),
        help="the hipFile or cuFile library, where it is not found by its name",
    ),
    Setting("stats", _switch, True, ("KVD_STATS",), help="publish live numbers in shared memory, for kvtop and kvdoctor"),
    Setting("load_threads", _threads, 2, ("KVD_LOAD_THREADS",), help="requests loaded at the same time, per worker"),
]


DAEMONS = frozenset({"INFERA_KVD_SOCKET", "INFERA_KVD_ARENA_HUGETLB"})
"""Older names that the daemon understands."""
INSTEAD = {
    "INFERA_KVD_IO_MODE": "the disk tier finds out by itself what its directory can do",
    "INFERA_KVD_LONG_FSYNC": "kvd serve --durability fsync",
    "INFERA_KVD_CHUNK_TARGET_MIB": "KVD_CHUNK_TOKENS",
    "INFERA_KVD_ARENA_PREFAULT": "the daemon faults pages in before it lends them",
    "INFERA_KVD_STORAGE_SELFCHECK": "kvdoctor --path DIR --prove",
    "INFERA_KVD_SELFCHECK_GB": "kvdoctor --path DIR --prove",
}
"""What an older connector had a variable for, and how it is done here."""


@dataclass(frozen=True)
class Settings:
    """The settings' values; `origins` says where each came from."""

    socket: str | None
    chunk_tokens: int | None
    save: bool
    load: bool
    tenant: str
    lookup_timeout_s: float
    save_timeout_s: float
    load_timeout_s: float
    pin_s: float
    reset: str
    ais: str
    direct_roots: tuple[Path, ...] | None
    direct_checksum: bool
    direct_staging: int
    direct_backend: str
    direct_library: str | None
    stats: bool
    load_threads: int
    origins: tuple[tuple[str, str], ...] = ()
    strangers: tuple[tuple[str, str], ...] = ()
    """INFERA_KVD_* variables that are set and mean nothing here, each with what to do instead, where there is anything."""

    @property
    def notices(self) -> list[str]:
        """One line for each setting that came by an older name."""
        return [
            f"{origin.removeprefix('env:')} is accepted; its name here is {_name_of(name)}{_MEANINGS.get(name, '')}"
            for name, origin in self.origins
            if origin.startswith("env:INFERA_")
        ] + [f"{name} has no meaning here{': ' + why if why else ''}" for name, why in self.strangers]


_MEANINGS = {"ais": ", and it means auto: where GPU-direct does not work it is said, and everything goes through the daemon"}


def _name_of(name: str) -> str:
    return next(setting.environment[0] for setting in SETTINGS if setting.name == name)


def read_settings(extra: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None) -> Settings:
    """The settings in force. `extra`: kv_connector_extra_config. Raises UsageError, naming the setting and its origin."""
    values: Resolved = resolve(
        SETTINGS, flags={}, file=_as_text(extra or {}), file_name="kv_connector_extra_config", environ=_first(extra, environ)
    )
    return Settings(
        **{name: value.value for name, value in values.items()},
        origins=tuple((name, value.origin) for name, value in values.items()),
        strangers=_strangers(os.environ if environ is None else environ),
    )


def _strangers(environ: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    known = {name for setting in SETTINGS for name in setting.environment} | DAEMONS
    return tuple((name, INSTEAD.get(name, "")) for name in sorted(environ) if name.startswith("INFERA_KVD_") and name not in known)


def _as_text(extra: Mapping[str, Any]) -> dict[str, Any]:
    """JSON numbers and booleans as the text the parsers read, under the settings' names: a variable's name is understood too."""
    named = {name: setting.name for setting in SETTINGS for name in setting.environment}
    return {
        named.get(key.upper(), key): str(value) if not isinstance(value, bool) else str(int(value)) for key, value in extra.items()
    }


def _first(extra: Mapping[str, Any] | None, environ: Mapping[str, str] | None) -> dict[str, str]:
    """The environment without what `extra` sets: what is written for one engine wins over what all of them inherit."""
    written = _as_text(extra or {})
    hidden = {name for setting in SETTINGS if setting.name in written for name in setting.environment}
    return {name: value for name, value in (os.environ if environ is None else environ).items() if name not in hidden}
