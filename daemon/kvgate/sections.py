"""Strict reading of YAML: every key is asked for once, with its type; what nobody asked for is an error.

`load_yaml` reads a file (1 MiB at most, no duplicate keys, no tags). A `Section` wraps one mapping and knows its path in
the file ("models.llama.endpoint"), so that every message says where: `models.yaml: models.llama.endpoint.prot: unknown
key (did you mean 'port'?)`. Keys that were asked for are the known ones; `finish` refuses the rest.
"""

import difflib
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml

from kvgate.errors import ConfigError
from kvtools.config import YAML_SLIPS
from kvtools.errors import UsageError, hint_for
from kvtools.output import printable
from kvtools.units import parse_duration, parse_size

T = TypeVar("T")
D = TypeVar("D")
MAX_FILE_BYTES = 1 << 20
SECRETS = frozenset({"api_key", "engine_env", "kvcached_env"})
"""Keys whose values are not shown: environments carry tokens."""


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key written twice: YAML would silently keep the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable):
                if key in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is written twice", key_node.start_mark)
                seen.add(key)
        return super().construct_mapping(node, deep)


def load_yaml(path: Path) -> Any:
    """What `path` holds. Raises ConfigError with file, line and column."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        hint = hint_for(error, "--config names a file of YAML; kvgate(1) shows one")
        raise ConfigError(f"cannot read {path}: {error.strerror}", hint=hint) from None
    if len(text) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} is larger than 1 MiB", hint="this is not a kvgate configuration")
    try:
        return yaml.load(text, _Loader)  # noqa: S506 - a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        hint = "YAML indents with blanks, never with tabs" if "\\t" in (error.problem or "") else ""
        raise ConfigError(f"{path}{where}: {error.problem or 'not YAML'}", hint=hint) from None
    except (yaml.YAMLError, *YAML_SLIPS) as error:
        reason = str(error).splitlines()[0] if str(error) else "nested too deeply"
        raise ConfigError(f"{path}: not YAML: {reason}") from None


class Read(NamedTuple):
    """One setting: its path in the file, its value, and whether the file gave it."""

    path: str
    value: Any
    given: bool


class _Missing:
    """Told apart from every value a key may have."""


_MISSING = _Missing()


class Section:
    """One mapping of the file. `path` is where it lies, "" at the top."""

    def __init__(self, value: Any, file: str, path: str = "", report: "list[Read] | None" = None) -> None:
        self.file, self.path = file, path
        self.report: list[Read] = [] if report is None else report
        """What was read so far, by this section and all below it; for --show-config."""
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self.error("", f"expected a mapping, found {_kind(value)}")
        for key in value:
            if not isinstance(key, str):
                raise self.error("", f"key {key!r} is {_kind(key)}, not text", hint=f'write it in quotes: "{key}"')
        self.values: dict[str, Any] = dict(value)
        self._known: dict[str, None] = {}

    def error(self, key: str, message: str, *, hint: str = "") -> ConfigError:
        where = printable(".".join(part for part in (self.path, key) if part))
        return ConfigError(f"{self.file}: {where}: {message}" if where else f"{self.file}: {message}", hint=hint)

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def take(self, key: str, parse: Callable[[Any], T], default: D, *aliases: str) -> T | D:
        """The value of `key` (or of one of its aliases; both at once is an error) as `parse` reads it, or `default`."""
        for name in (key, *aliases):
            self._known[name] = None
        given = [name for name in (key, *aliases) if name in self.values]
        if len(given) > 1:
            raise self.error(given[1], f"is another name of {given[0]!r}: give one of them")
        where = f"{self.path}.{key}" if self.path else key
        if not given or self.values[given[0]] is None:
            if not isinstance(default, _Missing):
                self.report.append(Read(where, default, False))
            return default
        try:
            value = parse(self.values[given[0]])
            self.report.append(Read(where, "***" if key in SECRETS else value, True))
            return value
        except UsageError as error:
            raise self.error(given[0], error.message, hint=error.hint) from None

    def need(self, key: str, parse: Callable[[Any], T], *aliases: str) -> T:
        """As `take`, but absence is an error."""
        value = self.take(key, parse, _MISSING, *aliases)
        if isinstance(value, _Missing):
            near = difflib.get_close_matches(key, self.rest(), n=1)
            raise self.error("", f"needs {key!r}", hint=f"it has {near[0]!r}: did you mean that?" if near else "")
        return value

    def sub(self, key: str) -> "Section":
        """The mapping under `key`; an empty one when absent."""
        self._known[key] = None
        return Section(self.values.get(key), self.file, f"{self.path}.{key}" if self.path else key, self.report)

    def rest(self) -> list[str]:
        """Keys nobody has asked for yet."""
        return [key for key in self.values if key not in self._known]

    def finish(self) -> None:
        """Refuse what nobody asked for."""
        for key in self.rest():
            raise self.error(key, "unknown key", hint=did_you_mean(key, self._known))


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint line: the nearest known word, or all of them."""
    names = sorted(known)
    near = difflib.get_close_matches(word, names, n=1)
    return f"did you mean {near[0]!r}?" if near else "known here: " + ", ".join(names)


def _kind(value: Any) -> str:
    names = {dict: "a mapping", list: "a list", str: "text", bool: "true/false", int: "a number", float: "a number"}
    return names.get(type(value), "nothing" if value is None else type(value).__name__)


def text(value: Any) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"expected text, found {_kind(value)}")
    if not value.strip():
        raise ConfigError("expected text, found none", hint="leave the key out to have its default")
    if not value.isprintable():
        raise ConfigError(f"expected text on one line, found {printable(value)!r}")
    return value


def yes_no(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"expected true or false, found {_kind(value)}")
    return value


def whole(low: int, high: int) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise ConfigError(f"expected a whole number from {low} to {high}, found {value!r}")
        return value

    return parse


def seconds(value: Any) -> float:
    """A number of seconds, or text such as '500ms' or '5m'."""
    if isinstance(value, str):
        return parse_duration(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
        raise ConfigError(f"expected seconds, found {value!r}")
    return float(value)


def size(value: Any) -> int:
    """Bytes, or text such as '16GiB'."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return parse_size(str(value))
    if isinstance(value, str):
        return parse_size(value)
    raise ConfigError(f"expected a size, found {_kind(value)}", hint="write bytes, or text such as 16GiB")


def texts(value: Any) -> tuple[str, ...]:
    """A list of texts; one text alone is a list of one."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        raise ConfigError(f"expected a list, found {_kind(value)}")
    return tuple(text(item) for item in value)
