"""kvctl limit, limit-percent and restore: what is decided, written, waited for, refused and raced."""

import fcntl
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtools.ctl.limits import decide
from kvtools.devices import Device
from kvtools.errors import UsageError
from kvtools.segments import owner, pool
from kvtools.segments.owner import Owner, OwnerInfo, PoolState
from tests.kvtools.engines import ANSWERING, STUBBORN, end, start_engine
from tests.support.processes import SCRIPTS, Ran

from .conftest import GiB, MiB

Kvctl = Callable[..., Ran]


def state_of(limit: int, used: int = 0, *, capacity: int = 0, page: int = 0, owned: bool = True) -> PoolState:
    reading = pool.PoolReading("x", limit, used, 0, 0)
    who = Owner("x", True, 1, 1, 1, 1, OwnerInfo("vllm", start_capacity_bytes=capacity, page_bytes=page)) if owned else None
    return PoolState(reading, who, "live" if owned else "unknown", "")


@given(
    wanted=st.integers(0, 2**50 - 1), limit=st.integers(0, 2**50 - 1), used=st.integers(0, 2**50 - 1),
    capacity=st.integers(0, 2**48), page=st.sampled_from([0, 1, 3, 2 * MiB, 128 * MiB]),
)  # fmt: skip
def test_a_decided_limit_is_whole_pages_within_what_was_asked_and_can_be_met(
    wanted: int, limit: int, used: int, capacity: int, page: int
) -> None:
    decision = decide(state_of(limit, used, capacity=capacity, page=page), wanted)
    assert 0 <= decision.limit_bytes <= wanted
    assert not page or decision.limit_bytes % page == 0
    assert not capacity or decision.limit_bytes <= capacity
    assert bool(decision.notes or decision.unsafe) or decision.limit_bytes == wanted
    assert not decision.notes or decision.limit_bytes != wanted
    takes_what_is_used = decision.limit_bytes < used and decision.limit_bytes < limit
    assert bool(decision.unsafe) == (decision.limit_bytes == 0 or takes_what_is_used)
    most = min(wanted, capacity) if capacity else wanted
    assert most - decision.limit_bytes < max(page, 1), "no more is lost than a part of a page"


def test_without_an_owner_file_exactly_what_was_asked_is_written_with_a_warning(kvctl: Kvctl, shm: Path) -> None:
    pool.create_pool("x", 8 * GiB, root=shm)
    ran = kvctl("limit", "x", "5000000001B")
    assert (ran.rc, ran.stdout) == (0, "x: limit 8 GiB -> 4.66 GiB (written: memory in use is within it)\n")
    assert "kvcached's does at its next allocation" in ran.stderr
    assert pool.read_pool("x", root=shm).limit_bytes == 5_000_000_001


@pytest.mark.parametrize(
    "size", ["-1", "G", "1,5G", "1e9", "inf", "nan", "0x10", "", "4GX", "1024T", "99999999999999999999", "1 2"]
)
def test_sizes_that_are_none(kvctl: Kvctl, shm: Path, size: str) -> None:
    pool.create_pool("x", 8 * GiB, root=shm)
    ran = kvctl("limit", "--yes", "--", "x", size)
    assert (ran.rc, ran.stdout) == (2, "")
    assert "hint: " in ran.stderr
    assert pool.read_pool("x", root=shm).limit_bytes == 8 * GiB


@pytest.mark.parametrize(
    ("size", "meant"), [("4G", 4 * GiB), ("4g", 4 * GiB), ("4 GiB", 4 * GiB), ("0.5GB", GiB // 2), ("4096", 4096), ("1T", 1 << 40)]
)
def test_sizes_that_are_one(kvctl: Kvctl, shm: Path, size: str, meant: int) -> None:
    pool.create_pool("x", 8 * GiB, root=shm)
    assert kvctl("limit", "x", size, "--json").json()["after"]["limit_bytes"] == meant


def test_below_use_is_refused_without_a_yes_and_done_with_it(kvctl: Kvctl, shm: Path) -> None:
    pool.create_pool("x", 8 * GiB, used_bytes=3 * GiB, root=shm)
    ran = kvctl("limit", "x", "1G")
    assert (ran.rc, ran.stdout) == (5, "")
    assert "3 GiB are in use, 2 GiB more than that" in ran.stderr
    assert ran.stderr.endswith("hint: add --yes to do it anyway\n")
    assert pool.read_pool("x", root=shm).limit_bytes == 8 * GiB
    body = kvctl("limit", "x", "1G", "--yes", "--json").json()
    assert (body["schema"], body["status"], body["before"]["limit_bytes"], body["after"]["limit_bytes"]) == (
        "kvctl.limit/1", "pending", 8 * GiB, GiB,
    )  # fmt: skip
    ran = kvctl("limit", "x", "2G")
    assert ran.rc == 0, "raising a limit that is below use takes nothing"


def test_0_is_refused_without_a_yes(kvctl: Kvctl, shm: Path) -> None:
    pool.create_pool("x", 8 * GiB, root=shm)
    ran = kvctl("limit", "x", "0")
    assert ran.rc == 5
    assert "no memory for requests" in ran.stderr
    assert kvctl("limit", "x", "0", "--yes").rc == 0
    assert pool.read_pool("x", root=shm).limit_bytes == 0


def test_a_dry_run_writes_nothing(kvctl: Kvctl, shm: Path) -> None:
    pool.create_pool("x", 8 * GiB, used_bytes=3 * GiB, root=shm)
    before = (shm / "x").stat().st_mtime_ns
    body = kvctl("limit", "x", "1G", "--dry-run", "--json").json()
    assert (body["status"], body["limit_bytes"], body["after"], len(body["unsafe"])) == ("dry-run", GiB, None, 1)
    assert (shm / "x").stat().st_mtime_ns == before


@pytest.mark.real("segments")
def test_clamped_aligned_waited_for_and_remembered(kvctl: Kvctl, shm: Path) -> None:
    engine = start_engine(shm, "x", ANSWERING, used=700 * MiB)
    ran = kvctl("limit", "x", "2G", "--json")
    assert ran.json()["limit_bytes"] == GiB
    assert "lowered to the engine's capacity, 1 GiB" in ran.stderr
    ran = kvctl("limit", "x", "512.5M", "--wait", "--yes", "--json")
    body = ran.json()
    assert (ran.rc, body["status"], body["effective_bytes"], body["limit_bytes"]) == (0, "applied", 512 * MiB, 512 * MiB)
    assert "rounded down to 512 MiB" in ran.stderr
    assert pool.read_pool("x", root=shm).used_bytes == 512 * MiB
    ran = kvctl("restore", "x", "--wait")
    assert (ran.rc, ran.stdout) == (0, "x: limit 512 MiB -> 1 GiB (applied)\n")
    end(engine)
    history = kvctl("show", "x", "--json").json()["limits"]
    assert [(one["limit_bytes"], one["state"]) for one in history][-2:] == [(512 * MiB, "applied"), (GiB, "applied")]
    assert history[-1]["by"].endswith("kvctl restore")
    ran = kvctl("limit", "x", "256M", "--wait", "--yes")
    assert ran.rc == 1
    assert "nobody will take the limit up" in ran.stderr
    assert "its engine is gone" in ran.stderr


@pytest.mark.real("segments")
def test_a_wait_that_ends_without_success_says_the_engines_reason(kvctl: Kvctl, shm: Path) -> None:
    engine = start_engine(shm, "x", STUBBORN, used=700 * MiB)
    ran = kvctl("limit", "x", "512M", "--wait", "--timeout", "300ms", "--yes")
    assert ran.rc == 6
    assert "not applied after 0.3 s: a long request is running" in ran.stderr
    assert pool.read_pool("x", root=shm).limit_bytes == 512 * MiB, "it stays in force"
    end(engine)


@pytest.mark.real("segments")
def test_an_answer_from_before_is_no_answer(kvctl: Kvctl, shm: Path) -> None:
    """The owner file cannot be written, so the change is not noted: what was once applied for that limit says nothing now."""
    with owner.OwnerLock.acquire("x", OwnerInfo("vllm", start_capacity_bytes=8 * GiB), root=shm) as engine:
        pool.create_pool("x", 8 * GiB, root=shm)
        engine.mark(4 * GiB, "applied", effective_bytes=4 * GiB)
        engine.mark(8 * GiB, "applied", effective_bytes=8 * GiB)
        with (shm / "x.kvtools").open("rb") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            ran = kvctl("limit", "x", "4G", "--wait", "--timeout", "100ms")
        assert (ran.rc, "its engine has not answered yet" in ran.stderr) == (6, True)
        timer = threading.Timer(0.1, engine.mark, (4 * GiB, "applied"), {"effective_bytes": 4 * GiB})
        timer.start()
        assert kvctl("limit", "x", "4G", "--wait").rc == 0
        timer.join()


@pytest.mark.real("segments")
def test_a_wait_whose_limit_somebody_replaces_says_so(kvctl: Kvctl, shm: Path) -> None:
    engine = start_engine(shm, "x", STUBBORN, used=700 * MiB)
    timer = threading.Timer(0.2, pool.write_limit, ("x", 800 * MiB), {"root": shm})
    timer.start()
    ran = kvctl("limit", "x", "512M", "--wait", "--timeout", "10s", "--yes")
    timer.join()
    end(engine)
    assert (ran.rc, "segment x: somebody set another limit meanwhile, 800 MiB" in ran.stderr) == (1, True)
    assert "hint: see who: kvctl show x" in ran.stderr


def test_a_wait_on_kvcacheds_segment_goes_by_its_numbers(kvctl: Kvctl, shm: Path) -> None:
    pool.create_pool("x", 8 * GiB, used_bytes=3 * GiB, root=shm)
    assert kvctl("limit", "x", "4G", "--wait").rc == 0
    ran = kvctl("limit", "x", "1G", "--wait", "--timeout", "100ms", "--yes")
    assert (ran.rc, ran.stdout) == (6, "x: limit 4 GiB -> 1 GiB (pending: 3 GiB are still mapped)\n")
    timer = threading.Timer(0.15, pool.write_usage, ("x", GiB // 2, 0), {"root": shm})
    timer.start()
    assert kvctl("limit", "x", "1G", "--wait", "--timeout", "10s", "--yes").rc == 0
    timer.join()


@pytest.mark.parametrize("timeout", ["", "5 minutes", "-1s", "1e3"])
def test_bad_durations(kvctl: Kvctl, shm: Path, timeout: str) -> None:
    pool.create_pool("x", 8 * GiB, root=shm)
    assert kvctl("limit", "x", "1G", "--timeout", timeout).rc == 2


@pytest.mark.parametrize("words", [("limit", "nobody", "1G"), ("limit-percent", "nobody", "10"), ("restore", "nobody")])
def test_a_bad_timeout_is_said_before_any_segment_is_looked_for(kvctl: Kvctl, words: tuple[str, ...]) -> None:
    ran = kvctl(*words, "--timeout", "soon")
    assert (ran.rc, "not a duration: 'soon'" in ran.stderr) == (2, True)


def test_the_start_value_of_a_kvcached_engine_is_written_one_byte_less(kvctl: Kvctl, shm: Path) -> None:
    """Its engines compare the limit with the start value only: the very same never makes a shrunk pool grow back."""
    pool.create_pool("x", 8 * GiB, root=shm)
    assert kvctl("restore", "x").rc == 5, "not known, so not guessed"
    kvctl("limit", "x", "4G")
    ran = kvctl("limit", "x", "8G", "--json")
    assert ran.json()["after"]["limit_bytes"] == 8 * GiB - 1
    assert "kvcached's engines take that one for no change" in ran.stderr
    kvctl("limit", "x", "2G")
    ran = kvctl("restore", "x", "--json")
    assert (ran.rc, ran.json()["after"]["limit_bytes"]) == (0, 8 * GiB - 1)
    shown = kvctl("show", "x", "--json").json()
    assert shown["first_limit_bytes"] == 8 * GiB
    assert [one["limit_bytes"] for one in shown["limits"]] == [4 * GiB, 8 * GiB - 1, 2 * GiB, 8 * GiB - 1]
    pool.create_pool("x", 6 * GiB, root=shm)  # the engine began anew over the same file
    assert kvctl("restore", "x").rc == 5


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"", "it is empty"),
        (b"\nx", "its first line is empty"),
        (b"{ half", "it is not JSON"),
        (b"\xff\xfe", "it is not JSON"),
        (b'{"engine":"x","limits":[]}', "it lacks the field 'pid'"),
        (b"[1]", "it does not say what an owner says"),
    ],
)
def test_restore_with_a_damaged_owner_file_says_which_and_what_to_do(kvctl: Kvctl, shm: Path, text: bytes, why: str) -> None:
    pool.create_pool("x", 8 * GiB, root=shm)
    (shm / "x.kvtools").write_bytes(text)
    ran = kvctl("restore", "x")
    assert ran.rc == 4, "a file that could have said it cannot be read"
    assert f"owner file {shm}/x.kvtools is damaged: {why}" in ran.stderr
    assert "kvctl limit x SIZE" in ran.stderr
    # kvctl keeps the history that the file cannot keep, so from its first change on it is known.
    assert kvctl("limit", "x", "2G").rc == 0
    ran = kvctl("restore", "x", "--json")
    assert (ran.rc, ran.json()["after"]["limit_bytes"]) == (0, 8 * GiB)
    assert kvctl("show", "x", "--json").json()["first_limit_bytes"] == 8 * GiB
    assert (shm / "x.kvtools").read_bytes() == text


def test_restore_with_an_owner_file_that_cannot_be_opened(kvctl: Kvctl, shm: Path) -> None:
    pool.create_pool("x", 8 * GiB, root=shm)
    (shm / "x.kvtools").symlink_to(shm / "elsewhere")
    ran = kvctl("restore", "x")
    assert ran.rc == 4
    assert "owner file x.kvtools is a symbolic link" in ran.stderr


@pytest.mark.parametrize("percent", ["0", "-5", "101", "x", "", "1e1", "nan"])
def test_percentages_that_are_none(kvctl: Kvctl, shm: Path, percent: str) -> None:
    pool.create_pool("x", 8 * GiB, root=shm)
    ran = kvctl("limit-percent", "--total", "8G", "--", "x", percent)
    assert (ran.rc, ran.stdout) == (2, "")


def test_percent_of_a_total(kvctl: Kvctl, shm: Path) -> None:
    pool.create_pool("x", 8 * GiB, root=shm)
    ran = kvctl("limit-percent", "x", "12.5%", "--total", "80G", "--json")
    assert (ran.rc, ran.json()["after"]["limit_bytes"]) == (0, 10 * GiB)
    assert "12.5 % of the given total, 80 GiB" in ran.stderr
    assert kvctl("limit-percent", "x", "5", "--total", "8G", "--gpu", "0").rc == 2


GPUS = [Device(0, "nvidia", "H200", "GPU-aaaa-1", "0", 140 * GiB, 0), Device(1, "nvidia", "L4", "GPU-bbbb-2", "1", 24 * GiB, 0)]


def test_percent_of_the_right_gpu(kvctl: Kvctl, shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool.create_pool("x", 8 * GiB, root=shm)
    monkeypatch.setattr("kvtools.devices.find_devices", lambda: GPUS)
    ran = kvctl("limit-percent", "x", "50")
    assert (ran.rc, "which GPU does segment x lie on?" in ran.stderr) == (2, True)
    assert kvctl("limit-percent", "x", "50", "--gpu", "1", "--json").json()["limit_bytes"] == 12 * GiB
    assert kvctl("limit-percent", "x", "50", "--gpu", "2").rc == 2
    with owner.OwnerLock.acquire("x", OwnerInfo("vllm", devices=("GPU-bbbb-2", "GPU-aaaa-1")), root=shm):
        ran = kvctl("limit-percent", "x", "25", "--json")
        assert (ran.json()["limit_bytes"], "its engine's GPU 1 (L4), 24 GiB" in ran.stderr) == (6 * GiB, True)
    monkeypatch.setattr("kvtools.devices.find_devices", lambda: GPUS[:1])
    assert kvctl("limit-percent", "x", "1", "--json").json()["limit_bytes"] == int(1.4 * GiB)


def test_a_host_without_gpus_asks_for_the_total(kvctl: Kvctl, shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool.create_pool("x", 8 * GiB, root=shm)
    monkeypatch.setattr("kvtools.devices.find_devices", list)
    ran = kvctl("limit-percent", "x", "50")
    assert (ran.rc, "give the whole with --total SIZE" in ran.stderr) == (2, True)


@pytest.mark.real("segments")
def test_two_operators_at_once_end_with_one_of_their_limits(shm: Path, tmp_path: Path) -> None:
    """Real commands, started together: each one either wrote its limit over the one it saw, or says that it did not."""
    pool.create_pool("x", 8 * GiB, root=shm)
    env = {"PATH": "/usr/bin:/bin", "XDG_STATE_HOME": str(tmp_path)}
    sizes = [1, 2, 3, 5]
    running = [
        subprocess.Popen(
            [SCRIPTS / "kvctl", "--shm", shm, "limit", "x", f"{n}G"],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for n in sizes
    ]
    ended = [(n, *run.communicate(), run.returncode) for n, run in zip(sizes, running, strict=True)]
    winners = [n for n, _, _, rc in ended if rc == 0]
    assert winners
    assert pool.read_pool("x", root=shm).limit_bytes in {n * GiB for n in winners}
    for _, out, err, rc in ended:
        assert rc in {0, 1}, err
        if rc == 1:
            assert out == ""
            assert "nothing was written" in err


def test_a_limit_changed_between_look_and_write_is_not_overwritten(
    kvctl: Kvctl, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.create_pool("x", 8 * GiB, root=shm)
    real = owner.change_limit

    def racing(name: str, limit: int, **more: object) -> pool.LimitChange:
        pool.write_limit(name, 7 * GiB, root=shm)
        return real(name, limit, **more)  # type: ignore[arg-type]

    monkeypatch.setattr("kvtools.segments.owner.change_limit", racing)
    ran = kvctl("limit", "x", "4G")
    assert (ran.rc, ran.stdout) == (1, "")
    assert "nothing was written" in ran.stderr
    assert pool.read_pool("x", root=shm).limit_bytes == 7 * GiB


def test_a_limit_out_of_the_format_is_a_usage_error() -> None:
    with pytest.raises(UsageError):
        decide(state_of(5), 1 << 50)


@pytest.mark.parametrize("kind", ["junk", "empty", "link", "folder"])
def test_an_owner_file_that_says_nothing_does_not_say_that_the_engine_is_gone(kvctl: Kvctl, shm: Path, kind: str) -> None:
    pool.create_pool("x", 8 * GiB, used_bytes=3 * GiB, root=shm)
    side = shm / "x.kvtools"
    if kind == "link":
        side.symlink_to(shm / "x")
    elif kind == "folder":
        side.mkdir()
    else:
        side.write_bytes(b"\xff junk" if kind == "junk" else b"")
    ran = kvctl("limit", "x", "4G", "--wait")
    assert (ran.rc, ran.stdout) == (0, "x: limit 8 GiB -> 4 GiB (written: memory in use is within it)\n")
    ran = kvctl("limit", "x", "1G", "--wait", "--timeout", "100ms", "--yes")
    assert (ran.rc, ran.stdout) == (6, "x: limit 4 GiB -> 1 GiB (pending: 3 GiB are still mapped)\n")
    if kind in ("junk", "empty"):
        assert "whether its engine lives, and takes the limit up, is not known" in ran.stderr
    assert kvctl("prune", "--yes").rc == 0
    assert (shm / "x").exists()


def test_a_dry_run_says_what_would_be_asked(kvctl: Kvctl, shm: Path) -> None:
    pool.create_pool("x", 4 * GiB, used_bytes=3 * GiB, root=shm)
    ran = kvctl("limit", "x", "1G", "--dry-run")
    assert (ran.rc, ran.stdout) == (0, "x: limit 4 GiB -> 1 GiB (dry-run)\n")
    price = "the engine will give up cached prefixes, then preempt requests, until it is met"
    assert f"note: needs a yes: 3 GiB are in use, 2 GiB more than that: {price}\n" in ran.stderr
    ran = kvctl("limit", "x", "1G")
    assert (ran.rc, price in ran.stderr) == (5, True)


def test_bad_numbers_are_told_in_words(kvctl: Kvctl, shm: Path) -> None:
    pool.create_pool("x", 4 * GiB, root=shm)
    ran = kvctl("limit-percent", "x", "50", "--total", "0")
    assert (ran.rc, "--total is nothing to take a percentage of: '0'" in ran.stderr) == (2, True)
    ran = kvctl("limit-percent", "x", "50", "--gpu", "first")
    assert (ran.rc, "'first' is not a valid whole number" in ran.stderr) == (2, True)
    assert "--count N" in kvctl("watch", "--help").stdout
