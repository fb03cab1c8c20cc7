"""The wheel: what an operator installs holds the five packages, scripts, man pages and types, and no tests."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtools import __version__
from tests.support.typer_tree import SCRIPTS

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("kvtools", "kvtop", "kvdoctor", "kvd", "kvgate")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    build = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)], cwd=ROOT, capture_output=True, text=True
    )
    assert build.returncode == 0, build.stderr
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """Runs commands of the wheel, installed beside this environment's dependencies and before its editable sources."""
    prefix = tmp_path_factory.mktemp("prefix")
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--no-deps",
            "--no-index",
            "--ignore-installed",
            "--prefix",
            str(prefix),
            str(wheel),
        ],
        check=True,
        capture_output=True,
    )
    paths = {name: sysconfig.get_path(name, vars={"base": str(prefix), "platbase": str(prefix)}) for name in ("scripts", "purelib")}
    scripts = Path(paths["scripts"])

    def run(command: str, *words: str) -> "subprocess.CompletedProcess[str]":
        program = [str(scripts / command)] if command != "python" else [sys.executable]
        environment = {**os.environ, "PYTHONPATH": paths["purelib"]}
        return subprocess.run(
            [*program, *words], env=environment, cwd=prefix, capture_output=True, text=True, stdin=subprocess.DEVNULL
        )

    run.__dict__["prefix"] = prefix
    return run


def test_wheel_holds_what_it_should_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert tops == {*NAMES, f"kvtools-{__version__}.dist-info", f"kvtools-{__version__}.data"}
    for package in NAMES:
        assert f"{package}/__init__.py" in names
        assert f"{package}/py.typed" in names
    pages = {Path(name).name for name in names if "/share/man/man1/" in name}
    assert pages == {f"{script}.1" for script in SCRIPTS}
    assert not [name for name in names if "test" in Path(name).name.lower().split("_") or name.endswith((".pyc", ".so"))]


def test_every_module_of_the_tree_is_in_the_wheel(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {
        str(path.relative_to(folder.parent))
        for folder in map(ROOT.joinpath, ("kvtools", "tui/kvtop", "probes/kvdoctor", "daemon/kvd", "daemon/kvgate"))
        for path in folder.rglob("*.py")
    }
    assert sources <= names


def test_installed_scripts_run_from_the_wheel(installed: Callable[..., "subprocess.CompletedProcess[str]"]) -> None:
    where = installed("python", "-c", "import kvtools, kvd, kvtop, kvdoctor, kvgate; print(kvd.__file__, kvtools.__file__)")
    assert str(installed.__dict__["prefix"]) in where.stdout, where.stderr
    for script in SCRIPTS:
        ran = installed(script, "--version")
        assert (ran.returncode, ran.stdout) == (0, f"kvtools {__version__}\n"), ran.stderr
    listing = installed("kvctl", "list", "--json")
    assert listing.returncode == 0, listing.stderr


def test_connector_and_plugin_are_where_the_engine_looks(installed: Callable[..., "subprocess.CompletedProcess[str]"]) -> None:
    """The connector is named to vLLM by module path; with no engine in this environment, importing the module must still work."""
    ran = installed("python", "-c", "import kvd.connector; print(kvd.connector.__name__)")
    assert (ran.returncode, ran.stdout) == (0, "kvd.connector\n"), ran.stderr
