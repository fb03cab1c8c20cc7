"""kvctl list and show: what people and programs see, on good, foreign, locked and oddly named files."""

import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtools.segments import owner, pool
from tests.kvtools.engines import end, start_engine
from tests.support.processes import Ran, run_cli

from .conftest import GiB, MiB

Kvctl = Callable[..., Ran]
GOLDEN = bytes.fromhex("0000000002000000 000000c000000000 0000001000000000")


def test_an_empty_folder_is_no_error_and_prints_no_data(kvctl: Kvctl, shm: Path) -> None:
    ran = kvctl("list")
    assert (ran.rc, ran.stdout, ran.stderr) == (0, "", f"no segments in {shm}\n")
    assert kvctl("list", "--json").json() == {"schema": "kvctl.list/1", "segments": [], "problems": []}


def test_kvcacheds_bytes_as_table_and_json(kvctl: Kvctl, shm: Path) -> None:
    (shm / "VLLM").write_bytes(GOLDEN)
    ran = kvctl("list")
    assert (ran.rc, ran.stderr) == (0, "")
    assert ran.stdout == (
        "IPC   Limit   Used       %  Prealloc      Free  State\nVLLM  8 GiB  3 GiB  37.5 %   256 MiB  4.75 GiB  unknown\n"
    )
    segment = kvctl("list", "--json").json()["segments"][0]
    assert list(segment)[:4] == ["ipc", "limit_bytes", "used_bytes", "prealloc_bytes"]
    assert segment | {"mtime_ns": 0} == {
        "ipc": "VLLM", "limit_bytes": 8 * GiB, "used_bytes": 3 * GiB, "prealloc_bytes": 256 * MiB,
        "mapped_bytes": 3 * GiB + 256 * MiB, "free_bytes": 5 * GiB - 256 * MiB, "used_percent": 37.5, "mtime_ns": 0,
        "state": "unknown", "owner_pid": None, "engine": None, "model": None, "devices": None, "start_capacity_bytes": None,
        "page_bytes": None,
    }  # fmt: skip


def test_output_in_a_pipe_has_no_colour_and_with_force_color_it_has(
    kvctl: Kvctl, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shm / "VLLM").write_bytes(GOLDEN)
    assert "\033" not in kvctl("list").stdout + kvctl("show", "VLLM").stdout
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\033[32m37.5 %\033[0m" in kvctl("list").stdout
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\033" not in kvctl("list").stdout
    assert "\033" not in kvctl("list", "--json").stdout


@pytest.mark.parametrize(("used", "style"), [(0, "32"), (49, "32"), (50, "33"), (79, "33"), (80, "31"), (150, "31")])
def test_percent_is_green_yellow_red(kvctl: Kvctl, shm: Path, monkeypatch: pytest.MonkeyPatch, used: int, style: str) -> None:
    pool.create_pool("x", 100, used_bytes=used, root=shm)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert f"\033[{style}m{used}.0 %\033[0m" in kvctl("list").stdout


def test_a_limit_of_0_is_listed_and_has_no_percentage(kvctl: Kvctl, shm: Path) -> None:
    pool.create_pool("x", 0, used_bytes=5, root=shm)
    assert kvctl("list").stdout.splitlines()[1].split() == ["x", "0", "B", "5", "B", "-", "0", "B", "0", "B", "unknown"]


def test_named_segments_only_and_errors_for_the_rest(kvctl: Kvctl, shm: Path) -> None:
    for name in ("VLLM_MODEL_1", "VLLM_MODEL_2"):
        (shm / name).write_bytes(GOLDEN)
    assert [s["ipc"] for s in kvctl("list", "VLLM_MODEL_2", "--json").json()["segments"]] == ["VLLM_MODEL_2"]
    ran = kvctl("list", "VLLM_MODEL_1", "vllm_model_2")
    assert ran.rc == 3
    assert "VLLM_MODEL_1" in ran.stdout
    assert ran.stderr == "kvctl: error: no segment named vllm_model_2\nhint: did you mean VLLM_MODEL_2?\n"


@pytest.mark.parametrize(
    "words", [["list"], ["show"], ["limit", "1G"], ["limit-percent", "5"], ["restore"], ["delete", "--yes"], ["watch"]]
)
def test_an_unknown_segment_is_status_3_everywhere(kvctl: Kvctl, shm: Path, words: list[str]) -> None:
    (shm / "VLLM_MODEL_1").write_bytes(GOLDEN)
    ran = kvctl(words[0], "VLLM_MODEL_2", *words[1:])
    assert (ran.rc, ran.stdout) == (3, "")
    assert ran.stderr == "kvctl: error: no segment named VLLM_MODEL_2\nhint: did you mean VLLM_MODEL_1?\n"
    assert kvctl(words[0], "other", *words[1:]).stderr.endswith(f"hint: segments in {shm}: VLLM_MODEL_1\n")


@pytest.mark.parametrize(
    "words", [["list"], ["show"], ["limit", "1G"], ["delete", "--yes"], ["restore", "--yes"], ["limit", "1G", "--dry-run"]]
)
@pytest.mark.parametrize("make", ["short", "long", "garbage", "link", "folder", "fifo"])
def test_what_is_no_segment_is_refused_by_name_and_untouched(kvctl: Kvctl, shm: Path, words: list[str], make: str) -> None:
    path = shm / "x"
    if make == "link":
        (shm / "real").write_bytes(GOLDEN)
        path.symlink_to("real")
    elif make == "folder":
        path.mkdir()
    elif make == "fifo":
        os.mkfifo(path)
    else:
        path.write_bytes({"short": b"12345", "long": GOLDEN + b"1", "garbage": b"\xff" * 24}[make])
    before = path.lstat().st_mtime_ns
    ran = kvctl(words[0], "x", *words[1:])
    assert (ran.rc, ran.stdout) == (4, "")
    assert ran.stderr.startswith("kvctl: error: ")
    assert path.lstat().st_mtime_ns == before
    assert not [s for s in kvctl("list", "--json").json()["segments"] if s["ipc"] == "x"]


@pytest.mark.parametrize("name", ["../x", "/dev/shm/x", "", ".", "..", "a/b", ".hidden", "x" * 256])
@pytest.mark.parametrize("words", [["show"], ["limit", "1G"], ["delete", "--yes"]])
def test_names_that_are_paths_are_usage_errors(kvctl: Kvctl, words: list[str], name: str) -> None:
    ran = kvctl(words[0], name, *words[1:])
    assert (ran.rc, ran.stdout) == (2, "")


@pytest.mark.parametrize(
    "name",
    ["x" * 255, "名前", "ü" * 127, "a b", "$(touch owned)", "a;b", "-x", "--json", "kvcached_mem_info", "a\x1b[2Jb", "tab\tnl\n"],
)
def test_odd_names_are_served_and_shown_safely(kvctl: Kvctl, shm: Path, name: str) -> None:
    (shm / name).write_bytes(GOLDEN)
    ran = kvctl("list")
    assert ran.rc == 0
    assert "\x1b" not in ran.stdout
    assert len(ran.stdout.splitlines()) == 2
    assert kvctl("list", "--json", "--", name).json()["segments"][0]["ipc"] == name
    shown = kvctl("show", "--", name)
    assert shown.rc == 0
    assert "\x1b" not in shown.stdout
    assert kvctl("limit", "--json", "--", name, "4G").json()["limit_bytes"] == 4 * GiB
    assert kvctl("delete", "--yes", "--", name).rc == 0
    assert list(shm.iterdir()) == []


def test_a_name_that_is_not_utf_8(shm: Path) -> None:
    (shm / os.fsdecode(b"\xff\xfe")).write_bytes(GOLDEN)
    ran = run_cli("kvctl", "--shm", shm, "list")
    assert (ran.rc, r"\udcff\udcfe" in ran.stdout) == (0, True)
    ran = run_cli("kvctl", "--shm", shm, "list", "--json")
    assert os.fsencode(ran.json()["segments"][0]["ipc"]) == b"\xff\xfe"
    ran = run_cli("kvctl", "--shm", shm, "show", os.fsdecode(b"\xff\xfe"))
    assert (ran.rc, ran.stderr, r"\udcff\udcfe" in ran.stdout) == (0, "", True)
    assert run_cli("kvctl", "--shm", shm, "show", "--json", os.fsdecode(b"\xff\xfe")).rc == 0


def test_a_locked_segment_is_named_on_stderr_and_the_rest_is_listed(kvctl: Kvctl, shm: Path) -> None:
    (shm / "free").write_bytes(GOLDEN)
    (shm / "stuck").write_bytes(GOLDEN)
    with open(shm / "stuck", "rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        ran = kvctl("list", "--json")
        body = ran.json()
        assert ran.rc == 0
        assert [s["ipc"] for s in body["segments"]] == ["free"]
        assert [p["ipc"] for p in body["problems"]] == ["stuck"]
        assert "segment stuck stayed locked by another process" in ran.stderr
        ran = kvctl("limit", "stuck", "1G")
        assert (ran.rc, ran.stdout) == (6, "")
    assert (shm / "stuck").read_bytes() == GOLDEN


@pytest.mark.real("segments")
def test_live_stale_and_unknown(kvctl: Kvctl, shm: Path) -> None:
    engine = start_engine(shm, "ours")
    (shm / "theirs").write_bytes(GOLDEN)
    body = {s["ipc"]: s for s in kvctl("list", "--json").json()["segments"]}
    assert (body["ours"]["state"], body["ours"]["owner_pid"], body["ours"]["engine"]) == ("live", engine.pid, "vllm")
    assert (body["ours"]["start_capacity_bytes"], body["ours"]["page_bytes"], body["theirs"]["state"]) == (GiB, MiB, "unknown")
    assert "live: its owner holds the lock on its owner file" in kvctl("show", "ours").stdout
    table = [line.split() for line in kvctl("list").stdout.splitlines()]
    assert [line[-2:] for line in table] == [["State", "Owner"], ["vllm", str(engine.pid)], ["unknown", "-"]]
    end(engine)
    assert {s["ipc"]: s["state"] for s in kvctl("list", "--json").json()["segments"]} == {"ours": "stale", "theirs": "unknown"}
    assert f"pid {engine.pid} is gone" in kvctl("show", "ours").stdout


def test_show_has_every_fact(kvctl: Kvctl, shm: Path) -> None:
    pool.create_pool("x", 8 * GiB, used_bytes=3 * GiB, root=shm)
    info = owner.OwnerInfo(
        "vllm", "Qwen/Qwen3-8B", ("GPU-5f2a",), 1, 2, start_capacity_bytes=8 * GiB, page_bytes=128 * MiB, version="0.32.0"
    )
    with owner.OwnerLock.acquire("x", info, root=shm) as lock:
        kvctl("limit", "x", "2G", "--yes")
        lock.mark(2 * GiB, "deferred", effective_bytes=3 * GiB, reason="a long request is running")
        body = kvctl("show", "x", "--json").json()
        text = kvctl("show", "x").stdout
    assert list(body)[:5] == ["schema", "ipc", "limit_bytes", "used_bytes", "prealloc_bytes"]
    assert (body["schema"], body["overage_bytes"], body["owner"]["tp_size"]) == ("kvctl.show/1", GiB, 2)
    assert body["limits"][0]["state"] == "deferred"
    for fact in (
        "1 GiB (1073741824 B) above the limit", "150.0 % of the limit", "vllm 0.32.0", "Qwen/Qwen3-8B", "TP 1 of 2", "GPU-5f2a",
        "8 GiB (8589934592 B) at start", "128 MiB", "kvctl limit, deferred, 3 GiB holds: a long request is running", "mode 0644",
    ):  # fmt: skip
        assert fact in text


def test_show_survives_a_spoiled_owner_file(kvctl: Kvctl, shm: Path) -> None:
    (shm / "x").write_bytes(GOLDEN)
    (shm / "x.kvtools").write_text("{")
    ran = kvctl("show", "x")
    assert ran.rc == 0
    assert f"owner file {shm}/x.kvtools is damaged: it is not JSON" in " ".join(ran.stdout.split())
    assert kvctl("list").rc == 0
    assert json.loads(kvctl("show", "x", "--json").stdout)["owner"]["error"]


@pytest.mark.real("segments")
def test_the_real_command_on_the_real_folder(shm_name: Callable[[], str]) -> None:
    name = shm_name()
    pool.create_pool(name, 8 * GiB, used_bytes=3 * GiB, prealloc_bytes=256 * MiB)
    assert [s["limit_bytes"] for s in run_cli("kvctl", "list", name, "--json").json()["segments"]] == [8 * GiB]
    assert run_cli("kvctl", "limit", name, "4G").rc == 0
    assert Path("/dev/shm", name).read_bytes().hex() == "000000000100000000" + "0000c000000000" + "0000001000000000"
    assert run_cli("kvctl", "delete", name, "--yes").rc == 0
    assert not Path("/dev/shm", name).exists()
