"""`kvtools config`: every setting of every command, its value here and now, and where the value came from.

Packages declare their settings (kvtools.config); SOURCES names those lists as strings, resolved when used, since the core
imports no front end. Options that read a variable of their own are found in the Typer apps. A variable that starts like
ours and that nothing reads is nearly always a slip of the pen: it is named on stderr with the nearest real one.

Flags are not part of this: `kvd serve --show-config` shows them too.
"""

import importlib
import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from typer._click.core import Command, Context
from typer.core import TyperGroup

from kvtools.cli import COMMANDS, DebugOption, JsonOption, VersionOption, load, new_app
from kvtools.config import Setting, Value, resolve
from kvtools.errors import UsageError
from kvtools.output import emit, emit_json, note, printable, table
from kvtools.units import format_duration, format_size

PREFIXES = ("KVD_", "KVTOOLS_", "KVTOP_", "KVCTL_", "KVDOCTOR_", "KVGATE_", "INFERA_KVD_")
COMMON = (
    Setting("debug", environment=("KVTOOLS_DEBUG",), help="not empty: a traceback with an error"),
    Setting("no_color", environment=("NO_COLOR",), help="not empty: no colour"),
    Setting("shm", default="/dev/shm", environment=("KVTOOLS_SHM",), help="folder of segments, also for daemons and engines"),  # noqa: S108
    Setting("force_color", environment=("FORCE_COLOR",), help="not empty: colour also without a terminal"),
)
SOURCES = (
    ("kvd serve", "kvd.service.settings:SETTINGS", ""),
    ("vLLM connector", "kvd.connector.settings:SETTINGS", ""),
    ("elastic pool", "kvtools.elastic.settings:SETTINGS", ""),
    ("kvtop", "kvtop.settings:SETTINGS", "kvtop.settings:load"),
)
"""Who reads them, the list of settings, and the function that also reads the configuration file where there is one."""
GATE = (
    Setting("host", environment=("KVGATE_HOST",), help="instead of the host in models.yaml"),
    Setting("port", environment=("KVGATE_PORT",), help="instead of the port in models.yaml"),
)
BESIDE = ("KVTOOLS_COMPLETE", "KVTOOLS_IN_SHELL", "KVTOP_CONFIG", "INFERA_KVD_HIPFILE_ROOTS")
"""Variables that are read and are no settings: what commands tell each other, a file's name, what kvdoctor looks at."""

app = new_app("Every setting of every command, and where its value came from.", callback=False)


class Row(NamedTuple):
    """One setting as shown. `value` is None where the default is decided later; `error` says why a value cannot be meant."""

    reader: str
    setting: str
    value: Any
    origin: str
    variables: tuple[str, ...]
    help: str
    error: str = ""


@app.command()
def config(json: JsonOption = False, debug: DebugOption = False, version: VersionOption = False) -> None:
    """Every setting of every command, its value here and now, and where the value came from.

    Origins are env:NAME, file:PATH and default. Flags come on top: kvd serve --show-config shows them too.
    """
    rows = list(settings(os.environ))
    unread = strangers(os.environ, rows)
    if json:
        emit_json(
            "kvtools.config/1",
            {"settings": [row._asdict() for row in rows], "unread": [{"variable": name, "near": near} for name, near in unread]},
        )
    else:
        lines = [(r.reader, r.setting, shown(r), r.origin, " ".join(r.variables[:1]) or "-", r.help) for r in rows]
        for line in table(("READ BY", "SETTING", "VALUE", "FROM", "VARIABLE", "MEANING"), lines):
            emit(line)
    for name, near in unread:
        note(f"kvtools: warning: {printable(name)} is set, and nothing reads it" + (f"; did you mean {near}?" if near else ""))
    if wrong := next((row for row in rows if row.error), None):
        raise UsageError(f"{wrong.reader}: {wrong.error}")


def settings(environ: Mapping[str, str]) -> Iterator[Row]:
    """Every setting: the common ones, the declared ones, and options with a variable."""
    yield from _rows("all commands", COMMON, environ)
    for reader, target, with_file in SOURCES:
        declared = _named(target)
        try:
            values = _named(with_file)({}, environ) if with_file else {}
        except UsageError as error:
            yield Row(reader, "configuration", None, "file", (), "", error.message)
            values = {}
        yield from _rows(reader, declared, environ, values)
    yield from _rows("kvgate serve", GATE, environ)
    common = {name for setting in COMMON for name in setting.environment}
    for script, target, _ in COMMANDS.values():
        if script:
            yield from (row for row in _options(script, load(target), environ) if not common & set(row.variables))


def _named(target: str) -> Any:
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _rows(
    reader: str,
    declared: "tuple[Setting, ...] | list[Setting]",
    environ: Mapping[str, str],
    values: Mapping[str, Value] | None = None,
) -> Iterator[Row]:
    for setting in declared:
        error = ""
        try:
            found = (values or {}).get(setting.name) or resolve([setting], flags={}, environ=environ)[setting.name]
        except UsageError as problem:
            name = next((name for name in setting.environment if name in environ), "")
            found, error = Value(None, f"env:{name}"), problem.message
        value = "***" if setting.secret and found.value is not None else found.value
        yield Row(reader, setting.name, _plain(value), found.origin, setting.environment, setting.help, error)


def _plain(value: Any) -> Any:
    """The value as JSON has it."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else str(value)


def _options(script: str, command: Command, environ: Mapping[str, str]) -> Iterator[Row]:
    seen = set()
    for path, option in _walk(command, ()):
        names = [option.envvar] if isinstance(option.envvar, str) else list(option.envvar or ())
        for name in names:
            if name not in seen:
                seen.add(name)
                secret = bool(environ.get(name)) and "KEY" in name
                value = "***" if secret else environ.get(name, option.default if _simple(option.default) else None)
                origin = f"env:{name}" if name in environ else "default"
                yield Row(" ".join([script, *path]), option.opts[0].lstrip("-"), value, origin, (name,), option.help or "")


def _simple(value: Any) -> bool:
    return isinstance(value, bool | int | float | str)


def _walk(command: Command, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for option in command.params:
        yield path, option
    if isinstance(command, TyperGroup):
        with Context(command) as context:
            for name in command.list_commands(context):
                below = command.get_command(context, name)
                if below is not None:
                    yield from _walk(below, (*path, name))


def shown(row: Row) -> str:
    """The value for people."""
    if row.error:
        return "?"
    if row.value is None or row.value in ("", [], "{}"):
        return "-"
    if isinstance(row.value, bool):
        return "yes" if row.value else "no"
    if row.setting.endswith("_mode"):
        return f"{row.value:04o}"
    if row.setting.endswith(("_bytes", "_staging")) and isinstance(row.value, int):
        return format_size(row.value)
    if row.setting.endswith(("_s", "_timeout")) and isinstance(row.value, float):
        return format_duration(row.value) if row.value else "0"
    return printable(" ".join(map(str, row.value)) if isinstance(row.value, list) else str(row.value))


def strangers(environ: Mapping[str, str], rows: list[Row]) -> list[tuple[str, str]]:
    """Variables that start like ours and that nothing reads, each with the nearest real name ('' where none is near)."""
    import difflib

    known = [*(name for row in rows for name in row.variables), *BESIDE]
    strange = sorted(name for name in environ if name.startswith(PREFIXES) and name not in known)
    return [(name, next(iter(difflib.get_close_matches(name, known, n=1)), "")) for name in strange]
