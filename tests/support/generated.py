"""Blocks of README.md that are written by the project: the table of commands and the measured numbers.

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

README = Path(__file__).resolve().parents[2] / "README.md"


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


BLOCKS: dict[str, Callable[[], str]] = {"commands": commands, "numbers": numbers}


def block(text: str, name: str) -> str:
    """What stands in the block now. Raises ValueError where the markers are missing."""
    found = re.search(rf"<!-- begin {name} -->\n(.*?)<!-- end {name} -->", text, re.DOTALL)
    if not found:
        raise ValueError(f"README.md has no block {name}")
    return found[1].strip("\n")


def replaced(text: str, name: str, body: str) -> str:
    """The text with that block's content replaced."""
    return re.sub(
        rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)", lambda m: f"{m[1]}{body}\n{m[2]}", text, count=1, flags=re.DOTALL
    )


def main(words: list[str]) -> int:
    text = README.read_text()
    stale = [name for name, make in BLOCKS.items() if block(text, name) != make()]
    for name in stale:
        if "--write" in words:
            text = replaced(text, name, BLOCKS[name]())
            print(f"README.md: block {name} written")
        else:
            print(f"README.md: block {name} is out of date: python -m tests.support.generated --write")
    README.write_text(text)
    return 1 if stale and "--write" not in words else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
