"""What every command has in common: help, version, errors of one line with a hint, exit status 2 for what cannot be meant."""

from pathlib import Path

import pytest

from kvtools import __version__
from tests.support.processes import run_cli, run_python
from tests.support.typer_tree import SCRIPTS, walk


@pytest.mark.parametrize("script", SCRIPTS)
def test_version(script: str) -> None:
    ran = run_cli(script, "--version")
    assert (ran.rc, ran.stdout, ran.stderr) == (0, f"kvtools {__version__}\n", "")


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_is_data_and_plain(script: str, flag: str) -> None:
    ran = run_cli(script, flag)
    assert (ran.rc, ran.stderr) == (0, "")
    assert ran.stdout.startswith(f"Usage: {script}")
    assert ran.stdout.isascii(), "no boxes: help is read in logs and over serial lines"


def test_every_command_has_help_for_itself_and_for_every_option() -> None:
    silent = []
    for script in SCRIPTS:
        for node in walk(script):
            path = " ".join([script, *node.words])
            if not node.command.help:
                silent.append(path)
            silent += [
                f"{path} {parameter.opts[0]}"
                for parameter in node.command.params
                if parameter.param_type_name == "option"
                and not getattr(parameter, "help", None)
                and not getattr(parameter, "hidden", False)
            ]
    assert not silent


@pytest.mark.parametrize("script", ["kvctl", "kvd", "kvgate", "kvtools", "kvdoctor", "kvtop"])
def test_unknown_option_names_itself_and_the_nearest(script: str) -> None:
    ran = run_cli(script, "--versoin")
    assert ran.rc == 2
    assert ran.stdout == ""
    assert ran.stderr == f"{script}: error: no such option: --versoin\nhint: did you mean --version?\n"


@pytest.mark.parametrize(
    ("script", "typed", "near"),
    [
        ("kvctl", "lst", "list"),
        ("kvctl", "limt", "limit"),
        ("kvd", "stat", "stats"),
        ("kvtools", "docter", "doctor"),
        ("kvtools", "kvctl", "ctl"),
    ],
)
def test_unknown_command_names_the_nearest(script: str, typed: str, near: str) -> None:
    ran = run_cli(script, typed)
    assert ran.rc == 2
    assert ran.stdout == ""
    assert ran.stderr == f"{script}: error: no such command '{typed}'\nhint: did you mean {near}?\n"


def test_a_word_like_nothing_points_to_help() -> None:
    ran = run_cli("kvctl", "frobnicate")
    assert (ran.rc, ran.stderr) == (2, "kvctl: error: no such command 'frobnicate'\nhint: kvctl --help lists what there is\n")


@pytest.mark.parametrize("line", ["kvctl", "kvd", "kvgate", "kvtools", "kvtools ctl", "kvtools d", "kvtools gate"])
def test_without_a_word_and_a_terminal_help_and_status_2(line: str) -> None:
    """Help that nobody asked for is no data: it goes to stderr, whole, whichever way the command is called."""
    script, *words = line.split()
    ran = run_cli(script, *words)
    assert (ran.rc, ran.stdout) == (2, "")
    assert ran.stderr.startswith(f"Usage: {line} [OPTIONS] COMMAND [ARGS]...\n")
    assert "\\n" not in ran.stderr
    assert ran.stderr == run_cli(script, *words, "--help").stdout


@pytest.mark.parametrize("module", ["kvtools", "kvd", "kvdoctor", "kvtop", "kvgate"])
def test_python_m_is_the_same_program(module: str) -> None:
    ran = run_python(f"import runpy, sys; sys.argv = ['{module}', '--version']; runpy.run_module('{module}', run_name='__main__')")
    assert (ran.rc, ran.stdout) == (0, f"kvtools {__version__}\n"), ran.stderr


def test_a_group_is_the_same_program_as_its_script(tmp_path: Path) -> None:
    # A folder of its own: what lies in the host's shared memory may change between the two calls.
    words = ("--shm", str(tmp_path), "list", "--json")
    assert run_cli("kvtools", "ctl", *words).json() == run_cli("kvctl", *words).json()


def test_a_closed_pipe_is_no_error() -> None:
    """`kvctl --help | true`: the reader goes away; no traceback, and the status a shell reports for SIGPIPE."""
    code = (
        "import subprocess, sysconfig; s = sysconfig.get_path('scripts')\n"
        "p = subprocess.Popen([s + '/kvctl', '--help'], stdout=subprocess.PIPE, stderr=subprocess.PIPE)\n"
        "p.stdout.close(); err = p.stderr.read(); print(p.wait(), err)"
    )
    assert run_python(code).stdout in {"141 b''\n", "0 b''\n"}
