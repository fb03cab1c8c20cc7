"""The commands as Typer knows them: for the tests that compare them with man pages, README and start-up budgets."""

from collections.abc import Iterator
from typing import NamedTuple

from typer._click.core import Command, Context
from typer.core import TyperGroup

from kvtools.cli import COMMANDS, load

SCRIPTS = {"kvtools": "kvtools.cli:app", **{script: target for script, target, _ in COMMANDS.values() if script}}
"""Console script -> its app."""


class Node(NamedTuple):
    """One command of a script: its words after the script's name ((): the script itself) and what it is."""

    words: tuple[str, ...]
    command: Command

    @property
    def options(self) -> set[str]:
        """Its long options, hidden ones left out."""
        names = {"--help"}
        for parameter in self.command.params:
            if not getattr(parameter, "hidden", False):
                names.update(name for name in [*parameter.opts, *parameter.secondary_opts] if name.startswith("--"))
        return names


def walk(script: str) -> Iterator[Node]:
    """The script's root and every command below it, hidden ones left out. `kvtools` ends at the groups that are scripts."""
    yield from _walk((), load(SCRIPTS[script]), script)


def _walk(words: tuple[str, ...], command: Command, script: str) -> Iterator[Node]:
    yield Node(words, command)
    if not isinstance(command, TyperGroup):
        return
    with Context(command, info_name=script) as context:
        for name in command.list_commands(context):
            if script == "kvtools" and not words and name in COMMANDS and COMMANDS[name][0]:
                continue  # the same app has its own script and its own page
            below = command.get_command(context, name)
            if below is not None and not below.hidden:
                yield from _walk((*words, name), below, script)
