"""`kvtools config`: the environment variables that the commands read, their values, and where each value came from.

VARIABLES names them all, also those of the daemon and the connector: as data, since the core imports no front end. A test
compares it with what the sources read. A variable that starts like ours and is not in the list does nothing, which is
nearly always a slip of the pen: it is named on stderr with the nearest real one.
"""

import difflib
import os
import re
from collections.abc import Mapping
from typing import NamedTuple

from kvtools.cli import DebugOption, JsonOption, VersionOption, new_app
from kvtools.output import emit, emit_json, note, printable, table

PREFIXES = ("KVD_", "KVTOOLS_", "KVGATE_", "INFERA_KVD_")
SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|KEY")


class Variable(NamedTuple):
    """One variable: its name, who reads it, what it means, and what holds while it is not set."""

    name: str
    reader: str
    help: str
    default: str = "not set"


VARIABLES = (
    Variable("KVD_SOCKET", "kvd, connector, kvgate", "the daemon's socket", "/run/kvd/kvd.sock (root), $XDG_RUNTIME_DIR/kvd.sock"),
    Variable("KVTOOLS_DEBUG", "all commands", "not empty: a traceback with an error"),
    Variable("NO_COLOR", "all commands", "not empty: no colour"),
    Variable("FORCE_COLOR", "all commands", "not empty: colour also without a terminal"),
)

app = new_app("What the environment sets for every command, and where each value came from.", callback=False)


@app.command()
def config(json: JsonOption = False, debug: DebugOption = False, version: VersionOption = False) -> None:
    """What the environment sets for every command, and where each value came from.

    The daemon's own settings, flags and files included, are shown by kvd serve --show-config.
    """
    unread = unknown(os.environ)
    if json:
        rows = [{**v._asdict(), "value": value(v, os.environ), "origin": origin(v, os.environ)} for v in VARIABLES]
        emit_json("kvtools.config/1", {"variables": rows, "unread": [{"name": name, "near": near} for name, near in unread]})
        return
    lines = [(v.name, value(v, os.environ) or "-", origin(v, os.environ), v.reader, v.help) for v in VARIABLES]
    for line in table(("VARIABLE", "VALUE", "FROM", "READ BY", "MEANING"), lines):
        emit(line)
    for name, near in unread:
        note(f"kvtools: warning: {printable(name)} is set, and nothing reads it" + (f"; did you mean {near}?" if near else ""))


def value(variable: Variable, environ: Mapping[str, str]) -> str:
    """What holds: the variable's value (*** for a secret), else its default; empty where it is not set and has none."""
    if variable.name in environ:
        return "***" if SECRET.search(variable.name) else printable(environ[variable.name])
    return "" if variable.default == "not set" else variable.default


def origin(variable: Variable, environ: Mapping[str, str]) -> str:
    """Where the value came from: 'env' or 'default'."""
    return "env" if variable.name in environ else "default"


def unknown(environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """Variables that start like ours and that nothing reads, each with the nearest real name ('' where none is near)."""
    known = [variable.name for variable in VARIABLES]
    strangers = sorted(name for name in environ if name.startswith(PREFIXES) and name not in known)
    return [(name, next(iter(difflib.get_close_matches(name, known, n=1)), "")) for name in strangers]
