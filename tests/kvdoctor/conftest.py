"""Fixtures of kvdoctor's tests: host cases laid out as captures."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtools.cli import run as run_command
from tests.support.processes import Ran

CASES = Path(__file__).parents[1] / "cases" / "doctor"


def chain(case: Path) -> list[tuple[Path, dict[str, Any]]]:
    """A case and all it extends, the deepest base first."""
    manifest = json.loads((case / "manifest.json").read_text())
    parent = manifest.get("extends")
    return [*(chain(CASES / parent) if parent else []), (case, manifest)]


def remove(target: Path) -> None:
    if target.is_symlink() or target.is_file():
        target.unlink()
    elif target.is_dir():
        shutil.rmtree(target)


def lay_out(case: Path, out: Path) -> dict[str, Any]:
    """Write a case as a capture (root/, cmd/, case.json) into `out`; returns the verdicts it must get."""
    (out / "root").mkdir(parents=True)
    (out / "cmd").mkdir()
    wanted: dict[str, Any] = {"expected": {}}
    told: dict[str, Any] = {"case": case.name, "context": "host-root", "kv_path": "/nvme/kvd-long", "env": {}}
    for home, manifest in chain(case):
        for part in ("root", "cmd"):
            if (home / part).is_dir():
                shutil.copytree(home / part, out / part, dirs_exist_ok=True, symlinks=True)
        for path in manifest.get("absent", []):
            remove(out / path if path.startswith("cmd/") else out / "root" / path.lstrip("/"))
        links = home / "links.txt"
        for line in links.read_text().splitlines() if links.exists() else []:
            name, _, target = line.partition(" -> ")
            link = out / "root" / name.strip().lstrip("/")
            if target and not (link.exists() or link.is_symlink()):
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(target.strip())
        told["env"] = {**told["env"], **manifest.get("env", {})}
        told.update({key: manifest[key] for key in ("context", "kv_path") if key in manifest})
        wanted["expected"].update(manifest.get("expected", {}))
        wanted.update({key: manifest[key] for key in ("expected_overall", "expected_posix") if key in manifest})
    (out / "case.json").write_text(json.dumps(told))
    return wanted


def case_folders() -> list[Path]:
    return sorted(path for path in CASES.iterdir() if (path / "manifest.json").exists())


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """Run kvdoctor in this process, through the same edge as the console script: (status, stdout, stderr)."""

    def run(*words: str | Path, env: dict[str, str] | None = None) -> Ran:
        capsys.readouterr()
        with monkeypatch.context() as patch:
            for name, value in (env or {}).items():
                patch.setenv(name, value)
            with pytest.raises(SystemExit) as stop:
                run_command("kvdoctor", "kvdoctor.app:app", [str(word) for word in words])
        streams = capsys.readouterr()
        return Ran(int(stop.value.code or 0), streams.out, streams.err)

    return run


@pytest.fixture
def laid_out(tmp_path: Path) -> Callable[[str], tuple[Path, dict[str, Any]]]:
    """Lay out a case by name: (its capture, what it must get)."""

    def build(name: str) -> tuple[Path, dict[str, Any]]:
        out = tmp_path / name
        return out, lay_out(CASES / name, out)

    return build


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case_name" in metafunc.fixturenames:
        metafunc.parametrize("case_name", [path.name for path in case_folders()])
