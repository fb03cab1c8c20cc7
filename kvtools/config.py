"""Settings: flag > environment > file > default, and for each value where it came from.

A command declares its settings as a list of `Setting`; `resolve` gives a `Resolved`, which `--show-config` prints.
Secrets take `env:NAME` or `file:PATH` (mode 0600); a literal works with a warning and is shown as ***.
"""

import importlib
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtools.errors import UsageError

YAML_SLIPS = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
"""What PyYAML raises besides its own errors: for a tag whose text does not fit it (`!!timestamp x`), and for endless nesting."""


@dataclass(frozen=True)
class Setting:
    """One setting: its name (as in the file and, with dashes, as a flag), its environment names, and how text becomes a value."""

    name: str
    parse: Callable[[str], Any] = str
    default: Any = None
    environment: tuple[str, ...] = ()
    secret: bool = False
    help: str = ""


@dataclass(frozen=True)
class Value:
    """A value and its origin: 'flag', 'env:NAME', 'file:PATH' or 'default'."""

    value: Any
    origin: str
    secret: bool = False

    @property
    def shown(self) -> str:
        return "***" if self.secret and self.value is not None else str(self.value)


Resolved = dict[str, Value]


def resolve(
    settings: Sequence[Setting],
    *,
    flags: Mapping[str, Any],
    file: Mapping[str, Any] | None = None,
    file_name: str = "",
    environ: Mapping[str, str] | None = None,
) -> Resolved:
    """Each setting's value and origin. Unknown file keys and unparsable text raise UsageError, naming key and origin."""
    environ = os.environ if environ is None else environ
    file = file or {}
    known = {s.name for s in settings}
    if unknown := sorted(set(file) - known):
        raise UsageError(f"unknown key {unknown[0]!r} in {file_name}", hint="known keys: " + ", ".join(sorted(known)))
    result: Resolved = {}
    for setting in settings:
        origin, raw = "default", None
        named = next((n for n in setting.environment if n in environ), None)
        if flags.get(setting.name) is not None:
            origin, raw = "flag", flags[setting.name]
        elif named:
            origin, raw = f"env:{named}", environ[named]
        elif setting.name in file:
            origin, raw = f"file:{file_name}", file[setting.name]
        if raw is None:
            result[setting.name] = Value(setting.default, origin, setting.secret)
            continue
        try:
            value = setting.parse(raw) if isinstance(raw, str) else raw
        except UsageError as error:
            raise UsageError(f"{setting.name} ({origin}): {error.message}", hint=error.hint) from None
        result[setting.name] = Value(read_secret(value) if setting.secret else value, origin, setting.secret)
    return result


def is_literal(text: str) -> bool:
    """Whether a secret is written out, and not named: what is shown of it is *** then, and whoever wrote it is warned."""
    return not text.startswith(("env:", "file:"))


def read_secret(text: str, environ: Mapping[str, str] | None = None) -> str:
    """The secret meant by 'env:NAME', 'file:PATH' (must be 0600 or tighter) or the text itself. Raises UsageError.

    What is empty is no secret: a variable or a file that somebody forgot to fill must not mean "no password".
    """
    environ = os.environ if environ is None else environ
    if text.startswith("env:"):
        name = text[4:]
        if name not in environ:
            raise UsageError(f"secret: environment variable {name} is not set")
        if not environ[name]:
            raise UsageError(f"secret: environment variable {name} is empty")
        return environ[name]
    if text.startswith("file:"):
        return _secret_file(Path(text[5:]))
    return text


def _secret_file(path: Path) -> str:
    """The secret in a file, or what a pipe gives (a shell's <(...)). Raises UsageError."""
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISFIFO(mode):
            raise UsageError(f"secret file {path} is no file", hint="name a file that holds the secret and nothing else")
        if stat.S_IMODE(mode) & 0o077:
            raise UsageError(f"secret file {path} is readable by others", hint=f"chmod 600 {path}")
        secret = path.read_text().strip()
    except OSError as error:
        raise UsageError(f"secret file {path}: {error.strerror}") from None
    except ValueError:
        raise UsageError(f"secret file {path} is no text", hint="a key is written out: openssl rand -hex 32") from None
    if not secret:
        raise UsageError(f"secret file {path} is empty")
    return secret


def load_object(module: str, attribute: str) -> Any:
    """What a configuration names as its own code. Raises UsageError, whatever the module does when it is imported."""
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise UsageError(f"cannot import {module}: {error}", hint="is it on PYTHONPATH?") from error
    except (Exception, SystemExit) as error:  # an edge: a name that no module can have, and whatever a user's module raises
        said = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise UsageError(f"cannot import {module!r}: {said}", hint="named as in an import: package.module") from error
    try:
        return getattr(found, attribute)
    except AttributeError:
        raise UsageError(f"{module} has no {attribute or 'attribute without a name'}") from None
