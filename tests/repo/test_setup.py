"""What `make test` and `make demo` say on a machine that cannot have them: one line, and what to do about it."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.support import system_packages
from tests.support.system_packages import Package, install_line, missing

SETUP = Path(__file__).resolve().parents[1] / "support" / "setup.sh"


def setup_with(python: Path | str) -> "subprocess.CompletedProcess[str]":
    """setup.sh with this interpreter; it ends before it makes anything where the interpreter will not do."""
    return subprocess.run(
        ["bash", str(SETUP), "base"],
        env={**os.environ, "PYTHON": str(python)},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )


def interpreter(folder: Path, *, version: tuple[int, int], venv: bool) -> Path:
    """A program that answers setup.sh's questions as such a Python would."""
    script = folder / "python"
    script.write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        f"  *version_info\\ *) exit {0 if version >= (3, 11) else 1};;\n"
        f'  *"import venv"*) exit {0 if venv else 1};;\n'
        f"  *print*) echo {version[0]}.{version[1]};;\n"
        f"  --version) echo Python {version[0]}.{version[1]}.0;;\n"
        "esac\n"
    )
    script.chmod(0o755)
    return script


def test_no_python() -> None:
    ran = setup_with("python-that-is-not-there")
    assert ran.returncode == 1
    assert ran.stderr.splitlines() == [
        "setup: error: no python-that-is-not-there found",
        "hint: install Python 3.11 or newer, or PYTHON=/path/to/python3 make ...",
    ]


def test_a_python_that_is_too_old(tmp_path: Path) -> None:
    ran = setup_with(interpreter(tmp_path, version=(3, 9), venv=True))
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[0] == "setup: error: Python 3.9.0 is too old: Python 3.11 or newer is needed"


def test_a_python_without_venv_names_the_package(tmp_path: Path) -> None:
    ran = setup_with(interpreter(tmp_path, version=(3, 12), venv=False))
    assert ran.returncode == 1
    error, hint = ran.stderr.splitlines()
    assert error.endswith("cannot make a virtual environment: its venv module (ensurepip) is missing")
    assert hint.startswith("hint: apt-get install python3.12-venv")


def test_a_shim_without_its_version_is_passed_over(tmp_path: Path) -> None:
    """A version manager's shim is on PATH and fails when it runs."""
    shim = tmp_path / "python"
    shim.write_text("#!/bin/sh\necho 'python: command not found' >&2\nexit 127\n")
    shim.chmod(0o755)
    assert setup_with(shim).stderr.startswith("setup: error: no ")


def test_missing_packages_and_the_line_that_installs_them() -> None:
    there, absent = Package("bash", lambda: True, "x"), Package("frobnitz", lambda: False, "the frobnitz suite")
    assert missing([there, absent]) == [absent]
    assert install_line([absent]) == "apt-get install --yes --no-install-recommends frobnitz"


def test_without_root_the_line_and_what_is_skipped_are_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = Package("frobnitz", lambda: False, "the frobnitz suite")
    monkeypatch.setattr(system_packages, "PACKAGES", (absent,))
    monkeypatch.setattr(system_packages.missing, "__defaults__", ((absent,),))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert system_packages.ensure() == [absent]
    said = capsys.readouterr().err
    assert "run as root: apt-get install --yes --no-install-recommends frobnitz" in said
    assert "until then skipped: the frobnitz suite (needs frobnitz)" in said


def test_every_package_of_the_list_has_a_reason() -> None:
    assert all(package.wanted_by for package in system_packages.PACKAGES)


@pytest.mark.parametrize("target", ["help", "-n test"])
def test_make_needs_nothing_to_say_what_it_would_do(target: str) -> None:
    root = SETUP.parents[2]
    ran = subprocess.run(["make", *target.split()], cwd=root, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert ran.returncode == 0, ran.stderr
