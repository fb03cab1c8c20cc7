"""From `--l2-adapter` objects to adapters: every type there is, in one place.

TYPES says in which module a type's `Kind` stands; the module is imported when the type is named, so a daemon loads no
library of a tier that it does not have. All objects are read before the first adapter is opened: a mistake in the last one
ends the start before the first has touched its disk.
"""

import importlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvd.tiers.adapters.base import Adapter, AdapterConfigError, Capabilities, Durability
from kvd.tiers.adapters.kind import (
    MAX_BYTES,
    PREFETCH_FIELDS,
    SERDE_FIELDS,
    Field,
    Kind,
    mapping,
    nearest,
    path,
    read_eviction,
    read_fields,
    read_values,
    size,
    text,
    word,
)
from kvtools.config import is_literal, load_object
from kvtools.errors import KvError, UsageError
from kvtools.units import format_size

if TYPE_CHECKING:
    from kvd.tiers.serde.chain import Chain

NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.")


ARENA = "arena"
"""What `kvd keys` and `kvd why` call the RAM: no tier may have that name."""
TRIALS = ("mock", "fault_inject", "plugin")
"""Types of which two that are told the same may well be two."""
EXAMPLE = 'such as {"type": "fs", "base_path": "/srv/kv"}'
SECRET = re.compile(r"password|secret|token|access_key|credential|^(old_)?keys?$", re.IGNORECASE)


class Spec(dict[str, Any]):
    """One adapter's object as given. As text, secrets that are written out are ***."""

    def __str__(self) -> str:
        return json.dumps(_redacted(self), default=str)  # TOML has dates, too

    __repr__ = __str__


def _redacted(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _hidden(one) if SECRET.search(name) else _redacted(one) for name, one in value.items()}
    return [_redacted(one) for one in value] if isinstance(value, list) else value


def _hidden(value: Any) -> Any:
    """The value of a secret field as it may be shown: where it comes from, or ***."""
    if isinstance(value, list):
        return [_hidden(one) for one in value]
    return _redacted(value) if not isinstance(value, str) or not is_literal(value) else "***"


def parse_spec(given: str, option: str = "--l2-adapter") -> Spec:
    """One `--l2-adapter` (or what else the option is called): JSON, or @FILE that holds it. Raises UsageError."""
    what = option
    if given.startswith("@"):
        what = f"{option} {given}"
        try:
            given = Path(given[1:]).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{what}: {getattr(error, 'strerror', None) or 'not a text file'}") from None
    body = _json(given, f"{what} is no JSON", hint=EXAMPLE)
    if not isinstance(body, dict):
        raise UsageError(f"{what} is not a JSON object", hint=EXAMPLE)
    return Spec(body)


def _json(given: str, what: str, *, hint: str = "") -> Any:
    """What this JSON says. Raises UsageError beginning with `what`."""
    try:
        return json.loads(given, object_pairs_hook=_no_twins)
    except json.JSONDecodeError as error:
        raise UsageError(f"{what}: {error.msg} at character {error.pos + 1}", hint=hint) from None
    except ValueError as error:  # a number of thousands of digits, a field given twice
        raise UsageError(f"{what}: {error}", hint=hint) from None
    except RecursionError:
        raise UsageError(f"{what}: too many brackets inside each other", hint=hint) from None


def parse_specs(given: str) -> list[Spec]:
    """The environment's form: one object, or an array of them."""
    if given.lstrip().startswith("["):
        bodies = _json(given, "no JSON")
        if not all(isinstance(body, dict) for body in bodies):
            raise UsageError("not an array of objects")
        return [Spec(body) for body in bodies]
    return [parse_spec(given)] if given.strip() else []


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    body: dict[str, Any] = {}
    for name, value in pairs:
        if name in body:
            raise ValueError(f"field {name!r} is given twice")
        body[name] = value
    return body


def build(specs: Sequence[Mapping[str, Any]], *, taken: Sequence[str] = ()) -> list[Adapter]:
    """Adapters, not open yet, in this order. Raises AdapterConfigError naming the adapter, the field and what to do.

    One without a `name` gets its type's, with a number where that is `taken` already.
    """
    names = {ARENA, *taken}
    before: dict[str, str] = {}
    adapters = []
    for number, spec in enumerate(specs, 1):
        where = f"--l2-adapter {number}"
        kind = kind_of(spec, where)
        name = spec.get("name")
        if name is None:
            numbered = (f"{kind.type}{i}" for i in range(2, len(specs) + len(taken) + 3))
            name = kind.type if kind.type not in names else next(one for one in numbered if one not in names)
        if not isinstance(name, str) or not 0 < len(name) <= 64 or not NAME_CHARACTERS.issuperset(name):
            raise AdapterConfigError(f"{where}: not a name: {name!r}", hint="1 to 64 letters, digits, dots, dashes, underscores")
        if name == ARENA:
            raise AdapterConfigError(f"{where}: the name {name!r} is that of the RAM", hint="give the adapter a name of its own")
        if name in names:
            raise AdapterConfigError(f"{where}: the name {name!r} is taken", hint="give each adapter a name of its own")
        names.add(name)
        same = json.dumps({word: value for word, value in spec.items() if word != "name"}, sort_keys=True, default=str)
        if (other := before.setdefault(same, name)) != name and kind.type not in TRIALS:
            raise AdapterConfigError(
                f"{where}: adapter {name} is {other} once more: every value would be stored there twice",
                hint="leave one of them out, or give each a place of its own",
            )
        adapters.append(make(kind, name, spec))
    return adapters


def make(kind: Kind, name: str, spec: Mapping[str, Any]) -> Adapter:
    """One adapter of this kind. Raises AdapterConfigError."""
    values = read_fields(kind, name, spec)
    if spec.get("eviction") is not None:
        values["eviction"] = read_eviction(kind, name, spec["eviction"])
    kind.check_library(name)
    chain, buffer_bytes = _serde(kind, name, spec)
    given = {one.name: spec[one.name] for one in PREFETCH_FIELDS if one.name in spec}
    limits = read_values(f"adapter {name} ({kind.type})", PREFETCH_FIELDS, given, ())
    adapter = kind.make(name, values)
    if chain is not None:
        from kvd.tiers.serde.adapter import SerdeAdapter

        adapter = SerdeAdapter(adapter, chain, buffer_bytes)
    adapter.prefetch_max_bytes = limits["prefetch_max_bytes"]
    return adapter


def _serde(kind: Kind, name: str, spec: Mapping[str, Any]) -> "tuple[Chain | None, int]":
    """The chain of an adapter's `serde`, if it has one, and the budget of its buffers. Raises AdapterConfigError."""
    (field,) = SERDE_FIELDS
    given = {field.name: spec[field.name]} if field.name in spec else {}
    if spec.get("serde") is None:
        if given:
            raise AdapterConfigError(f"adapter {name} ({kind.type}): {field.name} without serde", hint="leave it out")
        return None, 0
    from kvd.tiers.serde.chain import read_chain

    return read_chain(f"{name} ({kind.type})", spec["serde"]), read_values(
        f"adapter {name} ({kind.type})", SERDE_FIELDS, given, ()
    )[field.name]


def kind_of(spec: Mapping[str, Any], where: str) -> Kind:
    """The kind that `spec` names. Raises AdapterConfigError."""
    given = spec.get("type")
    if given is None:
        raise AdapterConfigError(f"{where}: field 'type' is missing", hint="one of " + ", ".join(TYPES))
    if not isinstance(given, str) or given not in TYPES:
        raise AdapterConfigError(f"{where}: unknown type {given!r}", hint=nearest(str(given), list(TYPES)))
    return kind(given)


def kind(name: str) -> Kind:
    """The kind of this type."""
    module = TYPES[name]
    found = KINDS[name] if module == __name__ else importlib.import_module(module).KIND
    assert isinstance(found, Kind)
    return found


# ---- types without a module of their own here --------------------------------------------------------------------------


def _disk(name: str, values: dict[str, Any]) -> Adapter:
    from kvd.tiers.adapters.disk import DiskAdapter

    if "eviction" in values:
        raise AdapterConfigError(
            f"adapter {name} (disk): field 'eviction': it always evicts by region within max_bytes", hint="leave the object out"
        )
    return DiskAdapter(
        name,
        values["path"],
        values["max_bytes"],
        region_bytes=values["region_bytes"],
        durability=Durability[values["durability"].upper()],
        alone=True,
    )


def _plugin(name: str, values: dict[str, Any]) -> Adapter:
    """An Adapter of the user's: the class is called with the name and the parameters as keywords."""
    module, class_name = values["module_path"], values["class_name"]
    try:
        found = load_object(module, class_name)
    except UsageError as error:
        raise AdapterConfigError(f"adapter {name} (plugin): {error.message}", hint=error.hint) from None
    if not isinstance(found, type) or not issubclass(found, Adapter):
        raise AdapterConfigError(f"adapter {name} (plugin): {class_name} is no kvd.tiers.adapters.base.Adapter")
    try:
        return found(name, **values["adapter_params"])
    except KvError:
        raise
    except TypeError as error:
        raise AdapterConfigError(f"adapter {name} (plugin): {class_name} does not take adapter_params: {error}") from None
    except (Exception, SystemExit) as error:  # an edge: whatever the user's class raises ends the start with a line
        raise AdapterConfigError(
            f"adapter {name} (plugin): {class_name} cannot be made: {type(error).__name__}: {' '.join(str(error).split())}"
        ) from error


KINDS = {
    "disk": Kind(
        "disk",
        "our crash-safe region store on a local disk",
        "kvd.tiers.adapters.disk:DiskAdapter",
        _disk,
        (
            Field("path", path, required=True, help="directory of its own"),
            MAX_BYTES,
            Field("region_bytes", size(4096), help="bytes of one region file; chosen from max_bytes unless given"),
            Field("durability", word("none", "group", "fsync"), "none", help="what a stored value survives"),
        ),
    ),
    "plugin": Kind(
        "plugin",
        "a class of yours",
        "kvd.tiers.adapters.base:Adapter",
        _plugin,
        (
            Field("module_path", text, required=True, help="the module to import, such as mine.adapters"),
            Field("class_name", text, required=True, help="the Adapter in it"),
            Field("adapter_params", mapping, {}, help="what its constructor takes besides the name"),
        ),
    ),
}
TYPES: dict[str, str] = {
    "disk": __name__,
    "fs": "kvd.tiers.adapters.fs",
    "raw_block": "kvd.tiers.adapters.raw_block",
    "dax": "kvd.tiers.adapters.dax",
    "nixl_store": "kvd.tiers.adapters.nixl_store",
    "nixl_store_dynamic": "kvd.tiers.adapters.nixl_dynamic",
    "s3": "kvd.tiers.adapters.s3",
    "hfbucket": "kvd.tiers.adapters.hfbucket",
    "mooncake_store": "kvd.tiers.adapters.mooncake",
    "resp": "kvd.tiers.adapters.resp",
    "lmcache": "kvd.tiers.adapters.lmcache",
    "mock": "kvd.tiers.adapters.mock",
    "fault_inject": "kvd.tiers.adapters.fault_inject",
    "plugin": __name__,
}
"""Every type, and the module that holds its Kind, in the order of the documentation."""


# ---- documentation -----------------------------------------------------------------------------------------------------

CAN = {
    "evict": "makes room by itself",
    "enumerate": "can list",
    "durable": "survives a restart",
    "exact_usage": "usage is exact",
    "local_index": "look-ups need no I/O",
    "direct_extents": "GPU-direct",
}


def capability_table() -> str:
    """Markdown: what each type can do. A plugin says so itself, and faults change nothing about it."""
    rows = ["| type | on | needs | " + " | ".join(CAN.values()) + " |", "|---" * (3 + len(CAN)) + "|"]
    for name in TYPES:
        one = kind(name)
        needs = f"`kvtools[{one.extra}]`" if one.extra else "-"
        marks = ["its own" if name in ("plugin", "fault_inject") else _mark(one.capabilities, word) for word in CAN]
        if marks[0] == "yes" and name != "disk":  # which goes by regions, and takes no eviction object
            marks[0] = ", ".join(policy for policy in one.policies if policy != "noop")
        rows.append(f"| `{name}` | {one.about} | {needs} | " + " | ".join(marks) + " |")
    return "\n".join(rows)


def field_tables() -> str:
    """Markdown: the fields of each type."""
    parts = []
    for name in TYPES:
        rows = [f"### `{name}`", "", "| field | default | meaning |", "|---|---|---|"]
        for one in kind(name).fields:
            default = "required" if one.required else "-" if one.default is None else f"`{json.dumps(_plain(one.default))}`"
            rows.append(f"| `{one.name}` | {default} | {one.help} |")
        parts.append("\n".join(rows))
    return "\n\n".join(parts)


def _plain(value: Any) -> Any:
    """As one would write it: large numbers are sizes."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1 << 20:
        return format_size(value)
    return str(value) if isinstance(value, Path) else value


def _mark(can: Capabilities, word: str) -> str:
    return "yes" if getattr(can, word) else "-"
