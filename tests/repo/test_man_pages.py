"""Man pages say what the commands are: every command and long option is in its page, and the page names no other.

In mdoc, `Fl` marks an option of the command itself and `Cm` its commands; options of other programs are written as `Ql`.
"""

import itertools
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kvd.service.settings import SETTINGS
from kvtools.cli import COMMANDS
from kvtools.exits import Exit
from tests.support.typer_tree import SCRIPTS, walk

PAGES = Path(__file__).resolve().parents[2] / "man" / "man1"
SECTIONS = ("NAME", "SYNOPSIS", "DESCRIPTION", "EXIT STATUS", "EXAMPLES", "SEE ALSO")


def source(script: str) -> list[str]:
    return (PAGES / f"{script}.1").read_text().replace(r"\-", "-").splitlines()


def arguments_of(macro: str, lines: list[str]) -> set[str]:
    """The words that stand directly after `macro`, in any line of macros."""
    found = set()
    for line in lines:
        if not line.startswith(".") or line.startswith('.\\"'):
            continue
        words = re.findall(r'"[^"]*"|\S+', line[1:])
        for word, following in itertools.pairwise(words):
            if word == macro:
                found.add(following.strip('"'))
    return found


def section(lines: list[str], name: str) -> list[str]:
    """Lines of one section of a page."""
    inside, found = False, []
    for line in lines:
        if line.startswith(".Sh "):
            inside = line[4:].strip().strip('"') == name
        elif inside:
            found.append(line)
    return found


@pytest.mark.parametrize("script", SCRIPTS)
def test_options_in_page_and_program_are_the_same(script: str) -> None:
    in_page = {f"-{word}" for word in arguments_of("Fl", source(script)) if re.fullmatch(r"-[a-z0-9][a-z0-9-]*", word)}
    in_program = set().union(*(node.options for node in walk(script)))
    assert in_page - in_program == set(), "options that do not exist"
    assert in_program - in_page == set(), "options that the page leaves out"


@pytest.mark.parametrize("script", SCRIPTS)
def test_commands_in_page_and_program_are_the_same(script: str) -> None:
    in_program = {node.words[-1] for node in walk(script) if node.words}
    assert in_program <= arguments_of("Cm", source(script)), "commands that the page leaves out"
    known = in_program | {"|"} | (set(COMMANDS) if script == "kvtools" else set())
    assert arguments_of("Cm", section(source(script), "SYNOPSIS")) <= known, "commands that do not exist"


@pytest.mark.parametrize("script", SCRIPTS)
def test_page_has_the_sections_an_operator_looks_for(script: str) -> None:
    sections = [line[4:].strip().strip('"') for line in source(script) if line.startswith(".Sh ")]
    assert [name for name in SECTIONS if name not in sections] == []


@pytest.mark.parametrize("script", SCRIPTS)
def test_exit_statuses_in_the_page_exist(script: str) -> None:
    numbers = {
        int(found[1]) for line in section(source(script), "EXIT STATUS") if (found := re.match(r"\.It (?:Li )?(\d+)\b", line))
    }
    assert numbers <= {int(code) for code in Exit}


@pytest.mark.parametrize("script", SCRIPTS)
def test_command_lines_in_examples_parse(script: str) -> None:
    """Each `$ script ...` line of EXAMPLES names a command and long options that exist."""
    nodes = {node.words: node for node in walk(script)}
    wrong = []
    for line in section(source(script), "EXAMPLES"):
        found = re.match(rf"(?:\.Dl\s+)?[$#] {script}\b(.*)", line)
        if not found:
            continue
        words = found[1].split()
        command = tuple(words[:1]) if tuple(words[:1]) in nodes else ()
        options = nodes[command].options | nodes[()].options
        wrong += [f"{line}: {word}" for word in re.findall(r"(?<=\s)--[a-z][a-z0-9-]*", found[1]) if word not in options]
    assert not wrong


@pytest.mark.skipif(not shutil.which("mandoc"), reason="needs mandoc: apt-get install mandoc")
def test_mandoc_finds_nothing_to_say() -> None:
    lint = subprocess.run(["mandoc", "-T", "lint", "-W", "warning", *sorted(PAGES.glob("*.1"))], capture_output=True, text=True)
    assert (lint.returncode, lint.stdout) == (0, "")


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_folder_of_segments_is_in_every_page(script: str) -> None:
    assert ".It Ev KVTOOLS_SHM" in section(source(script), "ENVIRONMENT")


def test_every_variable_of_the_daemon_is_in_its_page() -> None:
    text = "\n".join(section(source("kvd"), "ENVIRONMENT"))
    ours = {name for setting in SETTINGS for name in setting.environment if name.startswith("KVD_")}
    assert ours - set(re.findall(r"KVD_[A-Z0-9_]+", text)) == set()
