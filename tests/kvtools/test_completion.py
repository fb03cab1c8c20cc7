"""Tab completion in the real shells: what they would offer for a line, asked of bash, zsh and fish themselves."""

import shutil
import subprocess
import tempfile
from collections.abc import Callable

import pytest

from tests.support.processes import SCRIPTS, run_cli


def shell(name: str, script: str) -> list[str]:
    """Lines that `script` prints in a fresh shell that has our completion loaded."""
    if not shutil.which(name):
        pytest.skip(f"needs {name}: apt-get install {name}")
    flags = {"bash": ["--norc", "--noprofile"], "zsh": ["-f"], "fish": ["--no-config"]}[name]
    with tempfile.TemporaryDirectory() as home:  # fish writes there, configuration or not
        run = subprocess.run(
            [name, *flags, "-c", script],
            env={"PATH": f"{SCRIPTS}:/usr/bin:/bin", "HOME": home, "LANG": "C.UTF-8"},
            capture_output=True,
            text=True,
            timeout=30,
        )
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    return run.stdout.split("\n")[:-1]


def in_bash(*words: str) -> list[str]:
    line = " ".join(f"'{word}'" for word in words)
    return shell(
        "bash",
        f'eval "$(kvtools completion bash)"; compopt() {{ echo "compopt $*"; }}; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1};'
        f' _kvtools_complete {words[0]}; [ ${{#COMPREPLY[@]}} -eq 0 ] || printf "%s\\n" "${{COMPREPLY[@]}}"',
    )


def in_zsh(*words: str) -> list[str]:
    line = " ".join(f"'{word}'" for word in words)
    return shell(
        "zsh",
        'compdef() { : }; _describe() { print -l -- "${(@)${(P)3}%%:*}" }; _files() { print FILES };'
        f' eval "$(kvtools completion zsh)"; words=({line}); CURRENT={len(words)}; _kvtools_complete || true',
    )


def in_fish(*words: str) -> list[str]:
    lines = shell("fish", f"kvtools completion fish | source; complete -C '{' '.join(words)}'")
    return [line.partition("\t")[0] for line in lines]


Ask = Callable[..., list[str]]
SHELLS = pytest.mark.parametrize("ask", [in_bash, in_zsh, in_fish])


@SHELLS
@pytest.mark.real("shell")
def test_commands_of_a_script(ask: Ask) -> None:
    offered = ask("kvctl", "")
    assert {"list", "show", "limit", "watch", "delete"} <= set(offered)


@SHELLS
@pytest.mark.real("shell")
def test_groups_and_their_commands(ask: Ask) -> None:
    assert ask("kvtools", "do") == ["doctor"]
    assert ask("kvtools", "ctl", "sho") == ["show"]


@SHELLS
@pytest.mark.real("shell")
def test_options(ask: Ask) -> None:
    assert ask("kvctl", "list", "--js") == ["--json"]


@SHELLS
def test_shells_of_the_command_itself(ask: Ask) -> None:
    assert sorted(ask("kvtools", "completion", "")) == ["bash", "fish", "zsh"]


@SHELLS
def test_a_line_that_is_wrong_already_offers_nothing(ask: Ask) -> None:
    assert [line for line in ask("kvctl", "list", "--nonsense", "--js") if line.startswith("--nons")] == []


def test_unknown_shell() -> None:
    ran = run_cli("kvtools", "completion", "csh")
    assert (ran.rc, ran.stdout) == (2, "")
    assert ran.stderr == "kvtools: error: no completion for 'csh'\nhint: one of bash, zsh, fish\n"


def test_hostile_names_cannot_break_the_protocol() -> None:
    """A value with a newline or an escape sequence (segment names come from the file system) stays on its line, made visible."""
    ran = run_cli("kvtools", "completion", "\n\x1b[31m", env={"KVTOOLS_COMPLETE": "1"})
    assert (ran.rc, ran.stdout) == (0, "")


def test_completion_loads_no_other_group() -> None:
    ran = run_cli("kvtools", "", env={"KVTOOLS_COMPLETE": "1", "PYTHONVERBOSE": ""})
    assert [line.partition("\t")[0] for line in ran.stdout.splitlines()][:5] == ["ctl", "top", "doctor", "d", "gate"]
