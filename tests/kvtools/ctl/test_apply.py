"""kvctl apply on plan files: once, as a dry run, and kept in force while engines come, go and idle."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtools.ctl.applying import Keeper, read_plan
from kvtools.ctl.plan import parse_plan
from kvtools.devices import Device
from kvtools.segments import pool
from tests.kvtools.engines import ANSWERING, end, start_engine
from tests.support.generated import ROOT
from tests.support.processes import SCRIPTS, Ran, wait_until

from .conftest import GiB, MiB

Kvctl = Callable[..., Ran]


def limits(shm: Path) -> dict[str, int]:
    return {reading.name: reading.limit_bytes for reading in pool.list_pools(shm).pools}


@pytest.fixture
def plan(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        (tmp_path / "plan.yaml").write_text(text)
        return tmp_path / "plan.yaml"

    return write


def test_all_limits_at_once(kvctl: Kvctl, shm: Path, plan: Callable[[str], Path]) -> None:
    for name in ("chat", "batch-1", "embed", "other"):
        pool.create_pool(name, GiB, root=shm)
    shares = "chat: {weight: 3}", "batch-*: {weight: 1}", "embed: {limit: 8G}", "gone: {optional: true}"
    file = plan("budget: 40G\nsegments:\n" + "".join(f"  {share}\n" for share in shares))
    before = limits(shm)
    ran = kvctl("apply", file, "--dry-run")
    assert (ran.rc, limits(shm)) == (0, before)
    assert ran.stdout.splitlines()[-1] == "not applied (dry run): 40 GiB of a budget of 40 GiB, 3 would change"
    ran = kvctl("apply", file, "--json")
    body = ran.json()
    assert (ran.rc, body["schema"], body["applied"], body["sum_bytes"]) == (0, "kvctl.apply/1", True, 40 * GiB)
    assert limits(shm) == {"chat": 24 * GiB, "batch-1": 8 * GiB, "embed": 8 * GiB, "other": GiB}
    assert "other (limit 1 GiB) is not in the plan" in ran.stderr
    assert kvctl("apply", file).stdout.splitlines()[-1] == "applied: 40 GiB of a budget of 40 GiB, 0 changed"


def test_a_dry_run_says_what_would_be_asked(kvctl: Kvctl, shm: Path, plan: Callable[[str], Path]) -> None:
    pool.create_pool("x", GiB, used_bytes=512 * MiB, root=shm)
    pool.create_pool("y", GiB, root=shm)
    ran = kvctl("apply", plan("segments: {x: {limit: 1M}, y: {limit: 0}}"), "--dry-run")
    assert (ran.rc, "2 would change" in ran.stdout) == (0, True)
    assert "note: needs a yes: x: 512 MiB are in use: at 1 MiB" in ran.stderr
    assert "note: needs a yes: y: the plan leaves it 0 B" in ran.stderr
    assert limits(shm) == {"x": GiB, "y": GiB}


def test_rounds_are_counted_only_where_there_are_some(kvctl: Kvctl, shm: Path, plan: Callable[[str], Path]) -> None:
    pool.create_pool("x", GiB, root=shm)
    ran = kvctl("apply", plan("segments: {x: {limit: 2G}}"), "--count", "3")
    assert (ran.rc, "--count means nothing without --watch" in ran.stderr) == (2, True)
    assert limits(shm) == {"x": GiB}


def test_the_plan_of_the_manual_can_be_applied(kvctl: Kvctl, shm: Path, plan: Callable[[str], Path]) -> None:
    for name in ("chat", "batch-1", "embed"):
        pool.create_pool(name, 40 * GiB, root=shm)
    text = (ROOT / "man/man1/kvctl.1").read_text()
    shown = text.partition(".Bd -literal -offset indent\nbudget:")[2].partition(".Ed")[0]
    ran = kvctl("apply", plan("budget:" + shown))
    assert ran.rc == 0, ran.stderr
    assert limits(shm) == {"chat": 24 * GiB, "batch-1": 10 * GiB, "embed": 2 * GiB}


@pytest.mark.parametrize(
    ("text", "status", "said"),
    [
        ("segments: {x: {limit: 1G}}\nsegments: {y: {limit: 1G}}", 2, "line 1: 'segments' is given twice"),
        ("segments: {x: {limit: 1G}, x: {limit: 2G}}", 2, "'x' is given twice"),
        ("segments: {x: {limit: 1G}", 2, "line 1: expected ',' or '}'"),
        ("\x00", 2, "plan "),
        ("segments: !!python/object/apply:os.system ['touch /tmp/owned']", 2, "could not determine a constructor"),
        ("segments: {x: {limit: !!timestamp 1G}}", 2, "not YAML"),
        ("- 1", 2, "the plan: not a mapping"),
        (" \n", 2, "plan.yaml is empty\nhint: man kvctl, PLANS"),
        ("segments: {nowhere: {limit: 1G}}", 3, "no segment named nowhere"),
        ("budget: 1G\nsegments: {x: {floor: 2G}}", 2, "cannot be met"),
        ("segments: {x: {limit: 1M}}", 5, "x: 512 MiB are in use: at 1 MiB its engine will give up cached prefixes"),
        ("segments: {x: {limit: 0}}", 5, "x: the plan leaves it 0 B: its engine has no memory for requests then"),
        (
            "budget: {gpu: 7}\nsegments: {x: {}}",
            2,
            "budget.gpu: no GPU 7\nhint: no GPU's memory can be read here; or write the budget as a",
        ),
        ("segments: {on: {limit: 1G}}", 2, "YAML reads this one as True\nhint: put the name in quotes"),
        ("segments: {x: {limit: 1G}, '../y': {limit: 1G, optional: true}}", 2, "not a segment name: ../y"),
    ],
)
def test_bad_plans_change_nothing(kvctl: Kvctl, shm: Path, plan: Callable[[str], Path], text: str, status: int, said: str) -> None:
    pool.create_pool("x", GiB, used_bytes=512 * MiB, root=shm)
    ran = kvctl("apply", plan(text))
    assert (ran.rc, ran.stdout) == (status, ""), ran.stderr
    assert said in ran.stderr
    assert limits(shm) == {"x": GiB}


@pytest.mark.parametrize(
    "text",
    [
        "budget: {bomb}\nsegments: {x: {}}", "budget: {gpu: {bomb}}\nsegments: {x: {}}", "segments: {x: {limit: {bomb}}}",
        "segments: {x: {bomb}}", "idle_after: {bomb}\nsegments: {x: {limit: 1G}}", "segments: {x: {priority: {bomb}}}",
        "budget: 1G\nsegments: {x: {weight: {bomb}}}", "{bomb}",
    ],
)  # fmt: skip
def test_a_plan_of_lists_of_lists_is_refused_in_a_line(kvctl: Kvctl, plan: Callable[[str], Path], text: str) -> None:
    levels = [f"&l{i} [{', '.join([f'*l{i - 1}' if i else 'x'] * 9)}]" for i in range(20)]
    ran = kvctl("apply", plan(text.replace("{bomb}", f"[{', '.join(levels)}]")))
    assert (ran.rc, len(ran.stderr) < 600) == (2, True), ran.stderr[:600]


def test_a_plan_of_many_segments(kvctl: Kvctl, plan: Callable[[str], Path]) -> None:
    many = "".join(f"  s{i}: {{limit: 1M, optional: true}}\n" for i in range(500))
    assert kvctl("apply", plan(f"segments:\n{many}")).rc == 0
    ran = kvctl("apply", plan(f"segments:\n{many}  s7: {{}}\n"))
    assert (ran.rc, "'s7' is given twice" in ran.stderr) == (2, True)


def test_files_that_are_no_plan(kvctl: Kvctl, tmp_path: Path) -> None:
    assert kvctl("apply", tmp_path / "none.yaml").rc == 3
    assert kvctl("apply", tmp_path).rc == 4
    (tmp_path / "big").write_bytes(b" " * (1 << 20) + b" ")
    assert kvctl("apply", tmp_path / "big").rc == 2


def test_memory_in_use_is_taken_with_a_yes(kvctl: Kvctl, shm: Path, plan: Callable[[str], Path]) -> None:
    pool.create_pool("x", GiB, used_bytes=512 * MiB, root=shm)
    assert kvctl("apply", plan("segments: {x: {limit: 1M}}"), "--yes").rc == 0
    assert limits(shm) == {"x": MiB}


def test_0_bytes_are_given_with_a_yes(kvctl: Kvctl, shm: Path, plan: Callable[[str], Path]) -> None:
    pool.create_pool("x", GiB, root=shm)
    file = plan("budget: 0\nsegments: {x: {}}")
    assert kvctl("apply", file).rc == 5, "nothing is in use, and its engine would serve nobody all the same"
    ran = kvctl("apply", file, "--watch", "--count", "2", "-i", "50ms")
    assert (ran.rc, ran.stdout, limits(shm)) == (0, "", {"x": GiB})
    assert ran.stderr.count("x: the plan leaves it 0 B") == 1
    assert kvctl("apply", file, "--yes").rc == 0
    assert limits(shm) == {"x": 0}
    assert kvctl("apply", file).rc == 0, "it has none already"


def test_a_watch_without_a_yes_waits_with_a_fixed_limit_until_memory_is_free(
    kvctl: Kvctl, shm: Path, plan: Callable[[str], Path]
) -> None:
    pool.create_pool("x", GiB, used_bytes=512 * MiB, root=shm)
    words = ("apply", plan("segments: {x: {limit: 1M}}"), "--watch", "--count", "1")
    assert kvctl(*words).rc == 0
    assert limits(shm) == {"x": 512 * MiB}, "what is in use stays; what is not goes"
    pool.write_usage("x", 0, 0, root=shm)
    assert kvctl(*words).rc == 0
    assert limits(shm) == {"x": MiB}


def test_what_is_no_segment_is_a_missing_one(kvctl: Kvctl, shm: Path, plan: Callable[[str], Path]) -> None:
    for name in ("a", "b"):
        pool.create_pool(name, GiB, root=shm)
    (shm / "c").write_bytes(b"")
    ran = kvctl("apply", plan("segments: {a: {limit: 512M}, b: {limit: 2G}, c: {limit: 1G}}"))
    assert (ran.rc, limits(shm)) == (3, {"a": GiB, "b": GiB})


def test_a_locked_segment_leaves_all_as_it_was(kvctl: Kvctl, shm: Path, plan: Callable[[str], Path]) -> None:
    """What it holds is unknown: it is neither missing, nor may its part be given to the others."""
    for name in ("a", "b"):
        pool.create_pool(name, GiB, root=shm)
    file = plan("budget: 1G\nsegments: {a: {}, 'b*': {optional: true}}")
    with (shm / "b").open("r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        ran = kvctl("apply", file)
        assert (ran.rc, "segment b stayed locked" in ran.stderr) == (6, True)
        ran = kvctl("apply", file, "--watch", "--count", "1")
        assert (ran.rc, "segment b stayed locked" in ran.stderr) == (0, True)
    assert limits(shm) == {"a": GiB, "b": GiB}
    assert kvctl("apply", file).rc == 0


@pytest.mark.real("segments")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_finds_the_plan_in_force_or_not_at_all(shm: Path, plan: Callable[[str], Path], number: int) -> None:
    """The last limit waits for a lock when the signal comes; the first is written by then."""
    for name in ("a", "b"):
        pool.create_pool(name, GiB, root=shm)
    file = plan("segments: {a: {limit: 512M}, b: {limit: 2G}}")
    env = {**os.environ, "XDG_STATE_HOME": str(shm.parent)}
    held = (shm / "b").open("r+b")
    running = subprocess.Popen(
        [sys.executable, "-c", _SLOWLY, shm, file], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert running.stdout is not None
    assert running.stdout.readline() == "looked\n"
    fcntl.flock(held, fcntl.LOCK_EX)
    assert running.stdin is not None
    running.stdin.write("\n")
    running.stdin.flush()
    wait_until(lambda: limits_of("a", shm) == 512 * MiB, what="the first limit")
    running.send_signal(number)
    held.close()
    running.communicate(timeout=20)
    assert running.returncode in (-number, 130)
    assert limits(shm) == {"a": 512 * MiB, "b": 2 * GiB}


_SLOWLY = """
import sys
from kvtools import cli
from kvtools.ctl import applying
real = applying.apply_targets
def slowly(*words, **more):
    print("looked", flush=True)
    sys.stdin.readline()
    return real(*words, **more)
applying.apply_targets = slowly
cli.run("kvctl", "kvtools.ctl.app:app", ["--shm", sys.argv[1], "apply", sys.argv[2]])
"""


def limits_of(name: str, shm: Path) -> int:
    return pool.read_pool(name, root=shm).limit_bytes


@pytest.mark.real("segments")
def test_a_segment_whose_engine_is_gone_is_said_to_be(kvctl: Kvctl, shm: Path, plan: Callable[[str], Path]) -> None:
    end(start_engine(shm, "x"))
    ran = kvctl("apply", plan("segments: {x: {limit: 1M}}"))
    assert (ran.rc, "segment x is stale: its engine is gone" in ran.stderr) == (3, True)
    assert kvctl("apply", plan("segments: {x: {limit: 1M, optional: true}}")).rc == 0
    assert limits(shm) == {"x": GiB}


def test_yaml_that_merges_is_a_plan(kvctl: Kvctl, shm: Path, plan: Callable[[str], Path]) -> None:
    for name in ("a", "b"):
        pool.create_pool(name, GiB, root=shm)
    assert kvctl("apply", plan("budget: 4G\nsegments:\n  a: &one {weight: 1, floor: 1M}\n  b: {<<: *one, weight: 3}")).rc == 0
    assert limits(shm) == {"a": GiB, "b": 3 * GiB}


def test_a_budget_of_a_gpu(kvctl: Kvctl, shm: Path, plan: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    pool.create_pool("x", GiB, root=shm)
    monkeypatch.setattr("kvtools.devices.find_devices", lambda: [Device(0, "amd", "MI300X", "GPU-1", "0", 192 * GiB, 0)])
    assert kvctl("apply", plan("budget: {gpu: 0, percent: 50}\nsegments: {x: {}}")).rc == 0
    assert limits(shm) == {"x": 96 * GiB}
    ran = kvctl("apply", plan("budget: {gpu: 1}\nsegments: {x: {}}"))
    assert (ran.rc, "hint: kvctl show NAME lists the GPUs; or write" in ran.stderr) == (2, True)


def test_json_is_yaml(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({"budget": "1G", "segments": {"x": {"weight": 2.5}}}))
    assert read_plan(tmp_path / "plan.json").budget_bytes == GiB


@pytest.mark.real("segments")
def test_a_plan_kept_in_force_follows_engines_that_come_and_go(shm: Path, plan: Callable[[str], Path], tmp_path: Path) -> None:
    file = plan("budget: 1G\nsegments:\n  'm*': {}\n")
    words = [SCRIPTS / "kvctl", "--shm", shm, "apply", file, "--watch", "-i", "50ms", "--yes"]
    keeper = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    first = start_engine(shm, "m1", ANSWERING, used=900 * MiB)
    second = start_engine(shm, "m2", ANSWERING)
    wait_until(lambda: limits(shm) == {"m1": 512 * MiB, "m2": 512 * MiB}, what="both have half")
    wait_until(lambda: pool.read_pool("m1", root=shm).used_bytes == 512 * MiB, what="the first has given memory back")
    end(second)
    wait_until(lambda: limits(shm)["m1"] == GiB, what="the first has all again")
    end(first)
    keeper.send_signal(2)
    out, err = keeper.communicate(timeout=10)
    assert (keeper.returncode, err) == (130, "")
    assert "m1: 1 GiB -> 512 MiB" in out
    assert "m1: 512 MiB -> 1 GiB" in out


def test_idle_pools_lend_their_part_and_get_it_back(shm: Path) -> None:
    for name in ("a", "b"):
        pool.create_pool(name, 5 * GiB, used_bytes=GiB, root=shm)
    now = [0.0]
    plan = parse_plan({"budget": "10G", "idle_after": "60s", "segments": {"a": {"floor": "2G"}, "b": {"floor": "2G"}}})
    keeper = Keeper(plan, None, root=shm, gentle=False, as_json=False, clock=lambda: now[0])
    keeper.round()
    assert limits(shm) == {"a": 5 * GiB, "b": 5 * GiB}
    now[0] = 61.0
    pool.write_usage("b", 2 * GiB, 0, root=shm)
    keeper.round()
    assert limits(shm) == {"a": 2 * GiB, "b": 8 * GiB}
    pool.write_usage("a", 2 * GiB, 0, root=shm)
    now[0] = 61.5
    keeper.round()
    assert limits(shm) == {"a": 5 * GiB, "b": 5 * GiB}


def test_a_pool_idle_with_more_than_its_floor_keeps_what_it_uses(shm: Path) -> None:
    for name in ("a", "b"):
        pool.create_pool(name, 5 * GiB, used_bytes=3 * GiB, root=shm)
    now = [0.0]
    plan = parse_plan({"budget": "10G", "idle_after": "60s", "segments": {"a": {"floor": "2G"}, "b": {}}})
    keeper = Keeper(plan, None, root=shm, gentle=False, as_json=False, clock=lambda: now[0])
    for now[0] in (0.0, 100.0, 200.0):
        keeper.round()
        assert limits(shm) == {"a": 5 * GiB, "b": 5 * GiB}


def test_what_cannot_be_met_now_is_said_once_and_ends_nothing(shm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pool.create_pool("a", 8 * GiB, used_bytes=7 * GiB, root=shm)
    keeper = Keeper(parse_plan({"budget": "4G", "segments": {"a": {}}}), None, root=shm, gentle=True, as_json=False)
    keeper.round()
    keeper.round()
    err = capsys.readouterr().err
    assert err.count("cannot be met now: use and floors sum to 7 GiB, the budget leaves 4 GiB; trying again") == 1
    pool.write_usage("a", GiB, 0, root=shm)
    keeper.round()
    assert limits(shm) == {"a": 4 * GiB}


def test_a_watch_of_fixed_rounds_ends_and_speaks_json(kvctl: Kvctl, shm: Path, plan: Callable[[str], Path]) -> None:
    pool.create_pool("x", GiB, root=shm)
    began = time.monotonic()
    ran = kvctl("apply", plan("segments: {x: {limit: 2G}, y: {limit: 2G}}"), "--watch", "--count", "2", "-i", "50ms", "--json")
    assert (ran.rc, ran.stderr) == (0, "")
    assert json.loads(ran.stdout)["segments"][0]["new_limit_bytes"] == 2 * GiB
    assert time.monotonic() - began < 5
    assert kvctl("apply", plan("segments: {x: {limit: 2G}}"), "--watch", "-i", "1ms").rc == 2
