"""kvtop's settings: flag > environment > file > default (kvtools.config), with where each came from.

The file is $KVTOP_CONFIG, else $XDG_CONFIG_HOME/kvtools/kvtop.yaml, else ~/.config/kvtools/kvtop.yaml; no file is fine:

    refresh: 2s
    theme: safe
    readonly: true
    alerts: ["segment.share>=90", "hit_rate<0.5:crit"]
    keys: {limit: L}
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvtools.config import YAML_SLIPS, Resolved, Setting, resolve
from kvtools.errors import UsageError
from kvtools.units import parse_duration
from kvtop.keys import VIEWS
from kvtop.palette import PALETTES

MIN_REFRESH_S, MAX_REFRESH_S = 0.1, 3600.0
_VIEWS = [name for name, _, _ in VIEWS]


def refresh_of(text: str) -> float:
    """Seconds between readings. Raises UsageError outside 0.1 to 3600."""
    seconds = parse_duration(text)
    if not MIN_REFRESH_S <= seconds <= MAX_REFRESH_S:
        raise UsageError(f"refresh interval out of range: {text}", hint=f"from {MIN_REFRESH_S:g} s to {MAX_REFRESH_S:g} s")
    return seconds


def _one_of(what: str, known: list[str]) -> Any:
    def parse(text: str) -> str:
        if text not in known:
            import difflib

            near = difflib.get_close_matches(text, known, n=1)
            raise UsageError(
                f"no {what} named {text!r}", hint=f"did you mean {near[0]}?" if near else f"{what}s: " + ", ".join(known)
            )
        return text

    return parse


def _flag(text: str) -> bool:
    word = text.strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off", ""):
        return False
    raise UsageError(f"not yes or no: {text!r}", hint="write 1 or 0")


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(";") if part.strip()]


SETTINGS: tuple[Setting, ...] = (
    Setting("refresh", refresh_of, 1.0, ("KVTOP_REFRESH",), help="seconds between readings"),
    Setting("theme", _one_of("theme", list(PALETTES)), None, ("KVTOP_THEME",), help="colours"),
    Setting("view", _one_of("view", _VIEWS), "overview", ("KVTOP_VIEW",), help="view to open"),
    Setting("ascii", _flag, False, ("KVTOP_ASCII",), help="only ASCII characters"),
    Setting("readonly", _flag, False, ("KVTOP_READONLY",), help="no key that changes anything"),
    Setting("alerts", _listed, [], ("KVTOP_ALERTS",), help="alert rules, separated by ';' in the environment"),
    Setting("metrics", _listed, [], ("KVTOP_METRICS",), help="addresses of engines' /metrics"),
    Setting("keys", _listed, {}, (), help="keys by action, in the file only"),
)


def config_path(environ: Mapping[str, str]) -> Path:
    """Where the file is looked for."""
    if named := environ.get("KVTOP_CONFIG"):
        return Path(named)
    base = environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(base) / "kvtools" / "kvtop.yaml"


def load(flags: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> Resolved:
    """Every setting with its origin. Raises UsageError for what cannot be meant, naming key and place."""
    environ = os.environ if environ is None else environ
    path = config_path(environ)
    body = _read(path, must_exist="KVTOP_CONFIG" in environ)
    return resolve(SETTINGS, flags=flags, file=body, file_name=str(path), environ=environ)


MAX_BYTES = 1 << 20


def _read(path: Path, *, must_exist: bool) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        text = data.decode()
    except FileNotFoundError:
        if must_exist:
            raise UsageError(f"configuration {path} does not exist", hint="it was named by KVTOP_CONFIG") from None
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"configuration {path}: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > MAX_BYTES:
        raise UsageError(f"configuration {path} is larger than 1 MiB", hint="this is not a configuration of kvtop")
    import yaml

    try:
        body = yaml.safe_load(text) or {}
    except (yaml.YAMLError, *YAML_SLIPS) as error:
        raise UsageError(
            f"configuration {path}: {(str(error) or 'nested too deeply').splitlines()[0]}", hint="it must be YAML"
        ) from None
    if not isinstance(body, dict):
        raise UsageError(f"configuration {path}: not a list of settings", hint="write lines such as 'refresh: 2s'")
    return {str(key): _checked(str(key), value, path) for key, value in body.items()}


def _checked(key: str, value: Any, path: Path) -> Any:
    """A value of the kind its setting has; numbers and words become text, which the setting parses."""
    if key in ("alerts", "metrics"):
        if not isinstance(value, list):
            raise UsageError(f"{key} (file:{path}): not a list")
        return [str(item) for item in value]
    if key == "keys":
        if not isinstance(value, dict):
            raise UsageError(f"{key} (file:{path}): not a mapping of action to key")
        return {str(action): str(name) for action, name in value.items()}
    if key in ("ascii", "readonly"):
        return value if isinstance(value, bool) else str(value)
    return str(value)
