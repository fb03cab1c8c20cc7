"""The README: its generated blocks are what the project would write, its links lead somewhere, its commands exist."""

import re
from pathlib import Path

import pytest

from tests.support.generated import BLOCKS, README, block
from tests.support.typer_tree import SCRIPTS, walk

ROOT = README.parent
TEXT = README.read_text()


def fences(language: str) -> list[str]:
    """The fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)


def commands() -> list[list[str]]:
    """Every command line in the shell blocks, as words, comments and continuations resolved, for our own commands only."""
    found = []
    for fence in fences("sh"):
        for line in fence.replace("\\\n", " ").splitlines():
            words = re.sub(r"\s#.*$", "", line).split()
            if words and words[0] in SCRIPTS:
                found.append(words)
    return found


@pytest.mark.parametrize("name", BLOCKS)
def test_generated_block_is_up_to_date(name: str) -> None:
    assert block(TEXT, name) == BLOCKS[name](), "python -m tests.support.generated --write"


def test_links_lead_to_files() -> None:
    targets = [target for target in re.findall(r"\]\(([^)#\s]+)", TEXT) if "://" not in target]
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_commands_and_their_options_exist() -> None:
    assert commands()
    wrong = []
    for script, *words in commands():
        nodes = {node.words: node for node in walk(script)}
        node = nodes.get(tuple(words[:1])) or nodes[()]
        options = node.options | nodes[()].options
        wrong += [
            f"{script} {' '.join(words)}: {word}" for word in words if word.startswith("--") and word.split("=")[0] not in options
        ]
        if words and not words[0].startswith("-") and len(nodes) > 1 and tuple(words[:1]) not in nodes:
            wrong.append(f"{script} {words[0]}")
    assert not wrong


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z-]+)", "\n".join(fences("sh"))) + re.findall(r"`make ([a-z-]+)`", TEXT))
    assert {"demo", "test"} <= named <= targets


def test_inline_commands_exist() -> None:
    """`kvctl prune` and the like in running text: the command must be one."""
    wrong = []
    for span in re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", TEXT, flags=re.DOTALL | re.MULTILINE)):
        script, *words = span.split()
        if script not in SCRIPTS or not words or words[0].startswith(("-", "<", "[")):
            continue
        nodes = {node.words for node in walk(script)}
        if script == "kvtools":
            nodes |= {(name,) for name in ("ctl", "top", "doctor", "d", "gate")}
        if len(nodes) > 1 and (words[0],) not in nodes:
            wrong.append(span)
    assert not wrong


def test_every_dependency_is_explained() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    table = TEXT.partition("## Dependencies")[2].partition("## What is tested")[0]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["gate"]]
    names = [re.match(r"[A-Za-z0-9_-]+", requirement)[0] for requirement in wanted]  # type: ignore[index]
    assert [name for name in names if name not in table] == []
    assert [extra for extra in project["optional-dependencies"] if f"`{extra}`" not in table] == []


def test_runnable_blocks_run(tmp_path: Path) -> None:
    """Blocks marked `sh run` are run, line by line as they stand, in an empty folder."""
    import os
    import subprocess

    from tests.support.processes import SCRIPTS as BIN

    for body in fences("sh run"):
        ended = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", body],
            cwd=tmp_path,
            env={**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "HOME": str(tmp_path)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert ended.returncode == 0, f"{body}\n{ended.stderr}"
