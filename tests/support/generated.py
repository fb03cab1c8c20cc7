"""Blocks of documents that are written by the project: README's commands and numbers, the tables of ADAPTERS.md.

    python -m tests.support.generated            say which blocks are out of date (exit status 1)
    python -m tests.support.generated --write    rewrite them

A block stands between `<!-- begin NAME -->` and `<!-- end NAME -->`.
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path

from kvtools.cli import COMMANDS
from tests.support.typer_tree import Node, walk

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
ADAPTERS = ROOT / "daemon" / "ADAPTERS.md"


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


BLOCKS: dict[str, Callable[[], str]] = {"commands": commands, "keys": keys, "numbers": numbers}
ADAPTER_BLOCKS: dict[str, Callable[[], str]] = {"capabilities": capabilities, "fields": fields, "stages": stages}
DOCUMENTS = {README: BLOCKS, ADAPTERS: ADAPTER_BLOCKS}


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
