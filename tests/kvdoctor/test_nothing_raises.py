"""Whatever a host looks like, there is a report: damaged captures and missing facts lead to unknown, never to a traceback."""

import random
import shutil
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvdoctor import api, report
from kvdoctor.facts import Facts
from kvdoctor.fix import script
from kvtools.errors import UsageError
from tests.kvdoctor.conftest import CASES, case_folders, lay_out

VERDICTS = {"ready", "ready-with-warnings", "not-ready", "undetermined", "no-gpu"}
JUNK = ["", "\n", "garbage\n", "999999999999999999999\n", "-1\n", "0x\n", "\x00\xff", "[", "a:b - c d e\n", "True : False\n" * 50]
NAMES = [path.name for path in case_folders()]


def check(facts: Facts) -> None:
    found = api.judge(facts)
    assert found.verdict in VERDICTS
    assert found.posix in {"usable", "degraded", "unusable", "undetermined"}
    assert list(report.lines(found, verbose=True))
    assert list(report.lines(found))
    assert list(script(found))
    found.to_json()


@pytest.fixture(scope="module")
def captures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name in NAMES:
        made[name] = tmp_path_factory.mktemp("damage") / name
        lay_out(CASES / name, made[name])
    return made


@given(name=st.sampled_from(NAMES), seed=st.integers(0, 2**32))
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_a_damaged_capture(captures: dict[str, Path], tmp_path: Path, name: str, seed: int) -> None:
    """Some files are gone, cut short, or hold something else."""
    dice = random.Random(seed)
    copy = tmp_path / f"{name}-{seed}"
    shutil.copytree(captures[name], copy, symlinks=True)
    files = [path for path in sorted(copy.rglob("*")) if path.is_file() and not path.is_symlink() and path.name != "case.json"]
    for path in dice.sample(files, k=min(len(files), dice.randint(1, 8))):
        match dice.randrange(3):
            case 0:
                path.unlink()
            case 1:
                path.write_bytes(path.read_bytes()[: dice.randint(0, 40)])
            case _:
                path.write_text(dice.choice(JUNK), errors="surrogateescape")
    try:
        check(api.collect_capture(copy))
    except UsageError:
        left = [path for part in ("root", "cmd") for path in (copy / part).rglob("*") if path.is_file()]
        assert left == [], "only where all of it is gone it is no capture any more"
    finally:
        shutil.rmtree(copy)


def blank(value: Any, dice: random.Random, chance: float) -> None:
    """Forget facts at random: Optional ones become None, lists and words empty."""
    for item in fields(value):
        held = getattr(value, item.name)
        kind = str(item.type)
        if is_dataclass(held):
            blank(held, dice, chance)
            continue
        if isinstance(held, list):
            for one in held:
                if is_dataclass(one):
                    blank(one, dice, chance)
        if dice.random() >= chance:
            continue
        if "None" in kind:
            setattr(value, item.name, None)
        elif isinstance(held, list | dict | str) and item.name not in ("bdf", "path", "key", "schema"):
            setattr(value, item.name, type(held)())
        elif isinstance(held, bool):
            setattr(value, item.name, not held)


@given(name=st.sampled_from(NAMES), seed=st.integers(0, 2**32), chance=st.sampled_from([0.02, 0.1, 0.4, 1.0]))
@settings(max_examples=100, deadline=None)
def test_forgotten_facts(captures: dict[str, Path], name: str, seed: int, chance: float) -> None:
    facts = api.collect_capture(captures[name])
    blank(facts, random.Random(seed), chance)
    check(facts)


@pytest.mark.parametrize("name", NAMES)
def test_facts_survive_json(captures: dict[str, Path], name: str) -> None:
    facts = api.collect_capture(captures[name])
    again = Facts.from_json(facts.to_json())
    assert again == facts
    assert api.judge(again).verdict == api.judge(facts).verdict


def test_an_empty_host(tmp_path: Path) -> None:
    (tmp_path / "root" / "etc").mkdir(parents=True)
    (tmp_path / "root" / "etc" / "motd").write_text("nothing of use")
    (tmp_path / "case.json").write_text('{"case": "empty"}')
    facts = api.collect_capture(tmp_path)
    check(facts)
    assert api.judge(facts).verdict == "undetermined"
    check(api.collect_host(tmp_path / "root", [str(tmp_path)]))


def test_links_in_circles_and_out_of_the_root(tmp_path: Path) -> None:
    """A capture from a stranger may point anywhere; nothing outside of it is read."""
    root = tmp_path / "root"
    (root / "proc/self").mkdir(parents=True)
    (root / "sys/bus/pci").mkdir(parents=True)
    (root / "sys/bus/pci/devices").symlink_to("../pci/devices")
    (tmp_path / "secret").write_text("27 1 259:2 / / rw - outside /dev/outside rw\n")
    (root / "proc/self/mountinfo").symlink_to(f"{'../' * 40}{str(tmp_path).lstrip('/')}/secret")
    (root / "etc").mkdir()
    (root / "etc/os-release").symlink_to("/etc/os-release")
    (tmp_path / "case.json").write_text('{"case": "links"}')
    facts = api.collect_capture(tmp_path, ["/"])
    assert facts.paths[0].mount is None
    assert facts.environment.os_name == ""
    check(facts)
