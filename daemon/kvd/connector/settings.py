"""Every setting of the connector: `kv_connector_extra_config` > environment > default.

The environment reaches all of the engine's processes, so it is the usual way. The names that an older connector used
(INFERA_KVD_*) are understood, and said aloud once.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvtools.config import Resolved, Setting, resolve
from kvtools.errors import UsageError
from kvtools.units import parse_duration


def _chunk_tokens(text: str) -> int | None:
    if text.strip().lower() == "auto":
        return None
    return _positive(text)


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise UsageError(f"not a positive whole number: {text!r}")
    return value


def _switch(text: str) -> bool:
    word = text.strip().lower()
    if word not in {"1", "0", "on", "off", "true", "false", "yes", "no"}:
        raise UsageError(f"neither on nor off: {text!r}", hint="write 1 or 0")
    return word in {"1", "on", "true", "yes"}


SETTINGS = [
    Setting("socket", str, None, ("KVD_SOCKET", "INFERA_KVD_SOCKET"), help="the daemon's socket (default: where kvd serve has it)"),
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
    Setting("lookup_timeout_s", parse_duration, 1.0, ("KVD_LOOKUP_TIMEOUT",), help="longest that a look-up holds up the engine"),
    Setting("save_timeout_s", parse_duration, 1.0, ("KVD_SAVE_TIMEOUT",), help="longest that one save may hold up a step"),
    Setting("load_timeout_s", parse_duration, 30.0, ("KVD_LOAD_TIMEOUT",), help="after this a load has failed; it is recomputed"),
    Setting(
        "pin_s",
        parse_duration,
        0.0,
        ("KVD_PIN",),
        help="how long a look-up pins what it found while the request waits for room; 0: the load pins, and a look-up stays short",
    ),
    Setting("stats", _switch, True, ("KVD_STATS",), help="publish live numbers in shared memory, for kvtop and kvdoctor"),
    Setting("load_threads", _positive, 2, ("KVD_LOAD_THREADS",), help="requests loaded at the same time, per worker"),
]


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
    stats: bool
    load_threads: int
    origins: tuple[tuple[str, str], ...] = ()

    @property
    def notices(self) -> list[str]:
        """One line for each setting that came by an older name."""
        return [
            f"{origin.removeprefix('env:')} is accepted; its name here is {_name_of(name)}"
            for name, origin in self.origins
            if origin.startswith("env:INFERA_")
        ]


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
    )


def _as_text(extra: Mapping[str, Any]) -> dict[str, Any]:
    """JSON numbers and booleans as the text the parsers read."""
    return {key: str(value) if not isinstance(value, bool) else str(int(value)) for key, value in extra.items()}


def _first(extra: Mapping[str, Any] | None, environ: Mapping[str, str] | None) -> dict[str, str]:
    """The environment without what `extra` sets: what is written for one engine wins over what all of them inherit."""
    hidden = {name for setting in SETTINGS if setting.name in (extra or {}) for name in setting.environment}
    return {name: value for name, value in (os.environ if environ is None else environ).items() if name not in hidden}
