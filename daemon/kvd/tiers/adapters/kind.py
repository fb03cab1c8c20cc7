"""What may stand in an `--l2-adapter` object: one table of fields for each type, read with errors that say what to do.

A `Kind` is a type of adapter: its fields and how one is made of them. Each adapter's module holds its own; the registry
finds it by the type's name. A field takes what JSON has (a number, a word, true) or the same as text ("64", "10GiB",
"true"), since configurations of other tools write it so. Whatever cannot be meant is an AdapterConfigError that names the
adapter, the field and the nearest word that would have been right. Reading a specification has no side effects but one:
secrets of the form file:PATH are read.
"""

import difflib
import importlib
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvd.tiers.adapters.base import Adapter, AdapterConfigError, Capabilities
from kvtools.config import is_literal, read_secret
from kvtools.errors import UsageError
from kvtools.units import parse_duration, parse_size

log = logging.getLogger("kvd.tiers")

Parse = Callable[[Any], Any]
"""Turns a JSON value into what the adapter takes. Raises UsageError for what it cannot be."""


@dataclass(frozen=True)
class Field:
    """One key of an object. `required` ones have no default; `secret` ones take env:NAME and file:PATH."""

    name: str
    parse: Parse
    default: Any = None
    required: bool = False
    secret: bool = False
    help: str = ""
    many: bool = False
    """A list of such values, or one of them."""


@dataclass(frozen=True)
class Eviction:
    """When an adapter makes room by itself: above `watermark` of its limit, it drops `ratio` of what it holds.

    Without an `eviction` object the watermark is 1 and just what is needed is dropped. `policy` noop: never, it is full.
    """

    policy: str = "LRU"
    watermark: float = 1.0
    ratio: float = 0.0

    @property
    def scan_resistant(self) -> bool:
        """Whether what is read once must not drive out what is read often (S3FIFO)."""
        return self.policy == "S3FIFO"

    def excess(self, used: int, coming: int, limit: int) -> int:
        """Bytes to drop before `coming` more are stored; 0 where nothing must go."""
        if self.policy == "noop" or not limit or used + coming <= limit * self.watermark:
            return 0
        return max(int(used * self.ratio), used + coming - limit)


@dataclass(frozen=True)
class Kind:
    """One type of adapter. `make(name, values)` gets every field; `library` is the module it needs, `extra` brings it."""

    type: str
    about: str
    adapter: str
    """The class, as 'module:Class': its capabilities are the table's row."""
    make: Callable[[str, dict[str, Any]], Adapter]
    fields: tuple[Field, ...] = ()
    library: str = ""
    extra: str = ""

    @property
    def capabilities(self) -> Capabilities:
        """What adapters of this type can do."""
        module, _, name = self.adapter.partition(":")
        return Capabilities(**vars(getattr(importlib.import_module(module), name).capabilities))

    @property
    def policies(self) -> tuple[str, ...]:
        """What `eviction_policy` may be for adapters of this type, which can evict."""
        module, _, name = self.adapter.partition(":")
        return tuple(getattr(importlib.import_module(module), name).policies)

    def check_library(self, name: str) -> None:
        """AdapterConfigError, naming what to install, where the library is not there."""
        if self.library and find_spec(self.library) is None:
            raise AdapterConfigError(
                f"adapter {name} ({self.type}) needs the Python package {self.library}, which is not installed",
                hint=f"pip install 'kvtools[{self.extra}]'",
            )


COMMON = ("type", "name", "eviction", "serde", "serde_buffer_bytes", "prefetch_max_bytes")


def read_fields(kind: Kind, name: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Every field's value. Raises AdapterConfigError for unknown, missing and impossible ones."""
    return read_values(f"adapter {name} ({kind.type})", kind.fields, body, COMMON)


def read_values(where: str, fields: Sequence[Field], body: Mapping[str, Any], common: Sequence[str]) -> dict[str, Any]:
    """The value of each of `fields` in an object that may also have `common` ones; errors begin with `where`."""
    known = {one.name: one for one in fields}
    for word in body:
        if word not in known and word not in common:
            raise AdapterConfigError(f"{where}: unknown field {word!r}", hint=nearest(word, [*known, *common]))
    values: dict[str, Any] = {}
    for one in fields:
        if body.get(one.name) is None:
            if one.required:
                raise AdapterConfigError(f"{where}: field {one.name!r} is missing", hint=one.help)
            values[one.name] = one.default
            continue
        try:
            value = body[one.name]
            if one.many:
                values[one.name] = [_read(where, one, part) for part in (value if isinstance(value, list) else [value])]
            else:
                values[one.name] = _read(where, one, value)
        except UsageError as error:
            raise AdapterConfigError(f"{where}: field {one.name!r}: {error.message}", hint=error.hint or one.help) from None
    return values


def _read(where: str, field: Field, value: Any) -> Any:
    """One value of a field. Raises UsageError."""
    if field.secret:
        if not isinstance(value, str):
            raise UsageError("not a text")
        if is_literal(value):
            log.warning("%s: %s is written out in the configuration; env:NAME or file:PATH is safer", where, field.name)
        value = read_secret(value)
    return field.parse(value)


def read_eviction(kind: Kind, name: str, body: Any) -> Eviction:
    """The `eviction` object. Raises AdapterConfigError where the type cannot evict or a value is out of range."""
    where = f"adapter {name} ({kind.type}): field 'eviction'"
    if not kind.capabilities.evict:
        raise AdapterConfigError(f"{where}: this type cannot evict", hint="leave the eviction object out")
    if not isinstance(body, Mapping):
        raise AdapterConfigError(f"{where} is not an object", hint='such as {"eviction_policy": "LRU"}')
    known = [one.name for one in EVICTION]
    if strange := next((word for word in body if word not in known), None):
        raise AdapterConfigError(f"{where}: unknown field {strange!r}", hint=nearest(strange, known))
    values = read_fields(Kind(f"{kind.type}, eviction", "", "", kind.make, EVICTION), name, body)
    if values["eviction_policy"] not in kind.policies:
        raise AdapterConfigError(
            f"{where}: 'eviction_policy': {kind.type} keeps no index to do {values['eviction_policy']} with",
            hint=f"one of {', '.join(kind.policies)}",
        )
    return Eviction(values["eviction_policy"], values["trigger_watermark"], values["eviction_ratio"])


def nearest(word: str, known: list[str]) -> str:
    """ "did you mean" where something is near, else all that is known."""
    near = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {near[0]!r}?" if near else "known: " + ", ".join(sorted(known))


# ---- what values may be ------------------------------------------------------------------------------------------------


def text(value: Any) -> str:
    """A text that is not empty, and that UTF-8 can write (JSON can also hold halves of characters)."""
    if not isinstance(value, str) or not value or "\0" in value or not _encodes(value, "utf-8", "strict"):
        raise UsageError(f"not a text: {value!r}")
    return value


def _encodes(value: str, encoding: str, errors: str) -> bool:
    try:
        value.encode(encoding, errors)
    except UnicodeEncodeError:
        return False
    return True


def path(value: Any) -> Path:
    """A path; relative ones are taken from where the daemon was started. Its name may be bytes that are no UTF-8."""
    encoding = sys.getfilesystemencoding(), sys.getfilesystemencodeerrors()
    if not isinstance(value, str) or not value or "\0" in value or not _encodes(value, *encoding):
        raise UsageError(f"not a path: {value!r}")
    try:
        return Path(value).expanduser().absolute()
    except RuntimeError as error:  # ~somebody who is not there
        raise UsageError(f"not a path: {value!r}: {error}") from None


def size(least: int = 1) -> Parse:
    """Bytes: a whole number, or text such as 10GiB; at least so many."""

    def parse(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise UsageError(f"not a size: {value!r}", hint="a number of bytes, or text such as '10GiB'")
        made = parse_size(str(value))
        if made < least:
            raise UsageError(f"{value} is too small", hint=f"the least is {least} bytes")
        return made

    return parse


def number(least: float, most: float) -> Parse:
    """A number in this range, ends included."""

    def parse(value: Any) -> float:
        try:
            made = float("nan") if isinstance(value, bool | None) else float(value)
        except (TypeError, ValueError):
            made = float("nan")
        if not least <= made <= most:
            raise UsageError(f"not a number from {least:.15g} to {most:.15g}: {value!r}")
        return made

    return parse


def whole(least: int, most: int) -> Parse:
    """A whole number in this range."""

    def parse(value: Any) -> int:
        made = number(least, most)(value)
        if made != int(made):
            raise UsageError(f"not a whole number: {value!r}")
        return int(made)

    return parse


def gib(least: float = 0.0) -> Parse:
    """A number of GiB, as bytes: how other tools give capacities."""
    return lambda value: int(number(least, float(1 << 20))(value) * (1 << 30))


def switch(value: Any) -> bool:
    """true or false, also as text."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise UsageError(f"not true or false: {value!r}")


def word(*words: str) -> Parse:
    """One of these, in any case."""

    def parse(value: Any) -> str:
        found = next((one for one in words if isinstance(value, str) and one.lower() == value.lower()), None)
        if found is None:
            raise UsageError(f"not one of {', '.join(words)}: {value!r}", hint=nearest(str(value), list(words)))
        return found

    return parse


def seconds(least: float, most: float) -> Parse:
    """A time: a number of seconds, or text such as 500ms."""

    def parse(value: Any) -> float:
        return float(number(least, most)(parse_duration(value) if isinstance(value, str) else value))

    return parse


def mapping(value: Any) -> dict[str, Any]:
    """An object."""
    if not isinstance(value, Mapping):
        raise UsageError(f"not an object: {value!r}")
    return dict(value)


EVICTION = (
    Field("eviction_policy", word("LRU", "S3FIFO", "noop"), required=True, help="LRU, S3FIFO, or noop: what is full refuses"),
    Field("trigger_watermark", number(0.0, 1.0), 0.8, help="share of max_bytes above which room is made"),
    Field("eviction_ratio", number(0.0, 1.0), 0.2, help="share of the bytes held that is dropped then"),
)
PREFETCH_FIELDS = (Field("prefetch_max_bytes", size(1), 256 << 20, help="bytes that are loaded from it at once"),)
SERDE_FIELDS = (Field("serde_buffer_bytes", size(1 << 20), 64 << 20, help="memory for the work of `serde`, half each way"),)
MAX_BYTES = Field("max_bytes", size(4096), 32 << 30, help="bytes of storage it may take, such as 100GiB")

__all__ = [
    "MAX_BYTES",
    "PREFETCH_FIELDS",
    "SERDE_FIELDS",
    "Eviction",
    "Field",
    "Kind",
    "gib",
    "mapping",
    "nearest",
    "number",
    "path",
    "read_eviction",
    "read_fields",
    "read_values",
    "seconds",
    "size",
    "switch",
    "text",
    "whole",
    "word",
]
