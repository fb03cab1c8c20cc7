"""Blocks of documents that are written by the project: README's commands and numbers, the tables of ADAPTERS.md.

    python -m tests.support.generated            say which blocks are out of date (exit status 1)
    python -m tests.support.generated --write    rewrite them

A block stands between `<!-- begin NAME -->` and `<!-- end NAME -->`.
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvtools.cli import COMMANDS
from kvtools.config import Setting
from kvtools.units import format_duration, format_size
from tests.support.typer_tree import Node, walk

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
ADAPTERS = ROOT / "daemon" / "ADAPTERS.md"
CONNECTOR = ROOT / "daemon" / "CONNECTOR.md"


def commands() -> str:
    """Each command with its first line of help."""
    rows = ["| command | what it does |", "|---|---|"]
    for script in [*(script for script, _, _ in COMMANDS.values() if script), "kvtools"]:
        for node in walk(script):
            if node.words or script in {"kvtop", "kvdoctor"}:
                rows.append(f"| `{' '.join([script, *node.words])}` | {_first_line(node)} |")
    return "\n".join(rows)


def _first_line(node: Node) -> str:
    text = (node.command.help or "").strip().split("\n\n")[0].replace("\n", " ")
    return re.sub(r"\s+", " ", text).split(". ")[0].rstrip(".").replace("|", r"\|")


def numbers() -> str:
    """The measured budgets, from tests/bench/results.json."""
    from tests.bench.report import readme_table

    return readme_table()


def capabilities() -> str:
    """What each type of tier can do."""
    from kvd.tiers.adapters import registry

    return registry.capability_table()


def fields() -> str:
    """What may stand in the object of each type of tier."""
    from kvd.tiers.adapters import registry

    return registry.field_tables()


def stages() -> str:
    """What may stand in a `serde` chain."""
    from kvd.tiers.serde.chain import stage_tables

    return stage_tables()


def keys() -> str:
    """kvtop's keys, from the table that binds them."""
    from kvtop.keys import readme_table

    return readme_table().strip("\n")


def variables() -> str:
    """Every variable of the daemon and the connector, from the settings that read them."""
    from kvd.connector.settings import SETTINGS as CONNECTORS
    from kvd.service.settings import SETTINGS as DAEMONS

    rows = ["| variable | also | read by | default | meaning |", "|---|---|---|---|---|"]
    named: dict[str, tuple[list[str], list[str], str, str]] = {}
    for reader, settings in (("daemon", DAEMONS), ("connector", CONNECTORS)):
        for setting in settings:
            first, *others = setting.environment
            text = setting.help[:1].upper() + setting.help[1:].rstrip(".")
            row = named.setdefault(first, ([], [], _shown(setting), text))
            row[0].extend(name for name in others if name not in row[0])
            row[1].append(reader)
    for name, (others, readers, default, text) in sorted(named.items()):
        also = ", ".join(f"`{other}`" for other in others) or "-"
        rows.append(f"| `{name}` | {also} | {', '.join(readers)} | {default} | {text.replace('|', chr(92) + '|')} |")
    return "\n".join(rows)


def _shown(setting: Setting) -> str:
    """The default as one would write it."""
    default: Any = setting.default
    ways = {"parse_size": format_size, "parse_duration": format_duration, "_patience": format_duration, "_mode": "{:04o}".format}
    if setting.name == "chunk_tokens":
        return "`auto`"
    if default is None or default == "" or default == []:
        return "-"
    if isinstance(default, bool):
        return "on" if default else "off"
    return f"`{ways.get(setting.parse.__name__, str)(default)}`"


def counters() -> str:
    """The connector's counters, from the table that they are registered by."""
    from kvd.connector.metrics import COUNTERS, REASONED

    rows = [f"| `vllm:kvd_{name}` | {text} |" for name, text in COUNTERS.items()]
    rows += [f"| `vllm:kvd_{name}{{reason}}` | {text} |" for name, text in REASONED.items()]
    return "\n".join(["| metric | counts |", "|---|---|", *rows])


BLOCKS: dict[str, Callable[[], str]] = {"commands": commands, "keys": keys, "numbers": numbers}
ADAPTER_BLOCKS: dict[str, Callable[[], str]] = {"capabilities": capabilities, "fields": fields, "stages": stages}
CONNECTOR_BLOCKS: dict[str, Callable[[], str]] = {"variables": variables, "counters": counters}
DOCUMENTS = {README: BLOCKS, ADAPTERS: ADAPTER_BLOCKS, CONNECTOR: CONNECTOR_BLOCKS}


def block(text: str, name: str) -> str:
    """What stands in the block now. Raises ValueError where the markers are missing."""
    found = re.search(rf"<!-- begin {name} -->\n(.*?)<!-- end {name} -->", text, re.DOTALL)
    if not found:
        raise ValueError(f"there is no block {name}")
    return found[1].strip("\n")


def replaced(text: str, name: str, body: str) -> str:
    """The text with that block's content replaced."""
    return re.sub(
        rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)", lambda m: f"{m[1]}{body}\n{m[2]}", text, count=1, flags=re.DOTALL
    )


def main(words: list[str]) -> int:
    out_of_date = False
    for path, blocks in DOCUMENTS.items():
        text = path.read_text()
        for name in [name for name, make in blocks.items() if block(text, name) != make()]:
            if "--write" in words:
                text = replaced(text, name, blocks[name]())
                print(f"{path.name}: block {name} written")
            else:
                out_of_date = True
                print(f"{path.name}: block {name} is out of date: python -m tests.support.generated --write")
        path.write_text(text)
    return 1 if out_of_date else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
