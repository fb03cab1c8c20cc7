"""What leaves an answer open: lost evidence, junk where a number belongs, a proof that does not end, options that go nowhere."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvdoctor import api
from kvdoctor.collect import tools
from kvdoctor.facts import KvPath, Mount, Proof
from kvdoctor.parse.versions import decimal
from kvdoctor.prove import prove
from kvdoctor.verdict import exit_code
from tests.kvdoctor.conftest import remove
from tests.kvdoctor.hosts import host, path, status
from tests.support.processes import Ran

LaidOut = Callable[[str], tuple[Path, dict[str, Any]]]
Cli = Callable[..., Ran]


def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proofs that never end: a real child, and the real way to be rid of it."""
    real = tools.run
    monkeypatch.setattr(tools, "run", lambda key, argv, *rest, **more: real(key, ["sleep", "300"], *rest, **more))


def test_one_deadline_for_all_proofs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    endless(monkeypatch)
    facts = host(
        gpus=[], paths=[KvPath(path=str(tmp_path), exists=True, is_dir=True, writable=True) for _ in range(3)], seconds=1.0
    )
    began = time.monotonic()
    prove(facts, deadline_s=1.5)
    assert time.monotonic() - began < 10  # three times 45 s without it
    assert all(one.proof and one.proof.given_up for one in facts.paths)
    assert facts.seconds > 2.0, "the proof's time counts"


def test_without_time_no_child_is_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    facts = host(gpus=[], paths=[KvPath(path=str(tmp_path), exists=True, is_dir=True, writable=True)])
    monkeypatch.setattr(tools, "run", lambda *_, **__: pytest.fail("a child"))
    prove(facts, deadline_s=-1.0)
    assert facts.paths[0].proof
    assert "deadline" in facts.paths[0].proof.error


@pytest.mark.parametrize(
    ("proof", "word", "code"),
    [
        (None, "usable", 0),
        (Proof(direct=True, same=True, bytes=1), "usable", 0),
        (Proof(error="allocate: No space left on device", errno=28), "unusable", 1),
        (Proof(error="write: File too large", errno=27), "unusable", 1),
        (Proof(direct=True, same=False, bytes=1), "unusable", 1),
        (Proof(error="abandoned after 4.0 s (pid 7, state D)", given_up=True), "undetermined", 7),
    ],
)
def test_a_proof_decides_about_the_posix_tier(proof: Proof | None, word: str, code: int) -> None:
    report = api.judge(host(paths=[path(proof=proof)]))
    assert (report.posix, exit_code(report, strict=False)) == (word, code)


@pytest.mark.parametrize(
    ("case", "part"),
    [
        ("74-remount-read-only-after-errors", "root/proc/self/mountinfo"),
        ("26-hashseed-unset-lmcache-builtin", "cmd/engine.log"),
        ("25-docker-shm-64M", "cmd/df-h.out"),
        ("69-raid5-degraded-and-rebuilding", "root/proc/self/mountinfo"),
        ("69-raid5-degraded-and-rebuilding", "root/proc/mdstat"),
    ],
)
def test_lost_evidence_does_not_improve_the_posix_tier(
    doctor: Cli, laid_out: LaidOut, tmp_path: Path, case: str, part: str
) -> None:
    whole = tmp_path / "whole"
    assert doctor("capture", whole, "--from", laid_out(case)[0]).rc == 0
    before = api.judge(api.collect_capture(whole)).posix
    (whole / part).unlink()
    assert before in ("unusable", "degraded")
    assert api.judge(api.collect_capture(whole)).posix == "undetermined"


def test_a_mount_table_that_is_none(laid_out: LaidOut) -> None:
    capture, _ = laid_out("69-raid5-degraded-and-rebuilding")
    (capture / "root/proc/self/mountinfo").write_text("nan\n")
    assert api.judge(api.collect_capture(capture)).posix == "undetermined"


def test_numbers_without_end(laid_out: LaidOut) -> None:
    capture, _ = laid_out("00-base-amd-good")
    huge = "9" * 400
    for place in (capture / "root").rglob("*"):
        if place.is_file() and not place.is_symlink() and place.name.startswith(("size", "mem_info", "numa_node", "current_link")):
            place.write_text(huge + "\n")
    (capture / "root/proc/meminfo").write_text(f"HugePages_Total: {huge}\nHugepagesize: {huge} kB\n")
    report = api.judge(api.collect_capture(capture))
    assert {item.status for item in report.by_id("ais.registered") + report.by_id("gpu.largebar")} == {"unknown"}


def test_what_is_a_number() -> None:
    assert [decimal(text) for text in ("18446744073709551615", "0x10", " 7\n", "-1")] == [(1 << 64) - 1, 16, 7, -1]
    assert [decimal(text) for text in ("9" * 21, "9" * 5000, "", "x", "1.5")] == [None] * 5


@pytest.mark.parametrize("damage", ["cut", "missing", "empty", "folder", "fifo", "nothing listed"])
def test_a_damaged_list_of_one_of_our_captures(doctor: Cli, laid_out: LaidOut, tmp_path: Path, damage: str) -> None:
    whole = tmp_path / "whole"
    doctor("capture", whole, "--from", laid_out("00-base-amd-good")[0])
    index, text = whole / "index.json", (whole / "index.json").read_text()
    assert json.loads((whole / "case.json").read_text())["complete"] is False
    assert api.judge(api.collect_capture(whole)).verdict != "undetermined"
    remove(index)
    if damage == "folder":
        index.mkdir()
    elif damage == "fifo":
        os.mkfifo(index)
    elif damage != "missing":
        listed = json.dumps({**json.loads(text), "root": {}, "cmd": {}})
        index.write_text({"cut": text[:-3], "empty": "{}", "nothing listed": listed}[damage])
    report = api.judge(api.collect_capture(whole))
    assert (report.verdict, report.posix) == ("undetermined", "undetermined")
    assert "index.json" in report.by_id("env.capture")[0].observed


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--from", "/tmp", "capture"], "capture --from"),
        (["--path", "/tmp", "capture"], "capture --path"),
        (["--root", "/", "capture"], "capture --root"),
        (["--json", "explain"], "explain --json"),
        (["--strict", "explain"], "no such option"),
        (["--prove", "diff"], "no such option"),
        (["--only", "storage", "explain"], "no such option"),
    ],
)
def test_an_option_before_a_subcommand_is_not_swallowed(doctor: Cli, tmp_path: Path, words: list[str], hint: str) -> None:
    place = tmp_path / "taken"
    ran = doctor(*words, *{"capture": [place], "diff": [place, place]}.get(words[-1], []))
    assert (ran.rc, ran.stdout) == (2, "")
    assert words[0] in ran.stderr
    assert hint in ran.stderr
    assert not place.exists()


def test_debug_may_stand_before_a_subcommand(doctor: Cli) -> None:
    assert doctor("--debug", "explain", "storage.fs").rc == 0


def test_json_says_that_nothing_of_the_tier_was_judged(doctor: Cli) -> None:
    assert doctor("--only", "env.container", "--json").json()["overall"]["posix"] == "not-judged"


@pytest.mark.parametrize("word", ["--json", "--fix"])
def test_quiet_and_output_exclude_each_other(doctor: Cli, word: str) -> None:
    assert doctor("-q", word).rc == 2


# Files that hold what they cannot hold


@pytest.mark.parametrize(
    ("place", "text", "check"),
    [
        ("sys/module/amdgpu/parameters/ais_disabled", "2\n", "ais.param"),
        ("sys/module/amdgpu/parameters/ais_disabled", "x\n", "ais.param"),
        ("sys/module/amdgpu/parameters/ais_disabled", "\n", "ais.param"),
        ("sys/module/amdgpu/initstate", "nonsense\n", "gpu.driver.loaded"),
        ("proc/kallsyms", "nonsense\n", "ais.symbol"),
        ("sys/bus/pci/devices/0000:41:00.0/p2pmem/size", "nonsense\n", "ais.registered"),
    ],
)
def test_what_a_file_cannot_hold_is_not_judged(laid_out: LaidOut, place: str, text: str, check: str) -> None:
    capture, _ = laid_out("00-base-amd-good")
    remove(capture / "root" / place)
    (capture / "root" / place).parent.mkdir(parents=True, exist_ok=True)
    (capture / "root" / place).write_text(text)
    report = api.judge(api.collect_capture(capture))
    assert [item.status for item in report.by_id(check)] == ["unknown"]
    assert report.verdict == "undetermined"


def replaced(capture: Path, name: str, text: str) -> int:
    found = [place for place in (capture / "root").rglob(name) if place.is_file() and not place.is_symlink()]
    for place in found:
        place.write_text(text)
    return len(found)


@pytest.mark.parametrize(
    ("case", "name", "check"),
    [
        ("00-base-amd-good", "transport", "storage.backing"),
        ("21-ext4-writeback-hidden", "options", "storage.journal"),
    ],
)
def test_junk_about_storage_is_not_judged(laid_out: LaidOut, case: str, name: str, check: str) -> None:
    capture, _ = laid_out(case)
    assert replaced(capture, name, "nonsense\n")
    assert [item.status for item in api.judge(api.collect_capture(capture)).by_id(check)] == ["unknown"]


def test_a_journal_that_a_whole_host_does_not_show(laid_out: LaidOut) -> None:
    capture, _ = laid_out("21-ext4-writeback-hidden")
    for place in (capture / "root/proc/fs/ext4").rglob("options"):
        place.unlink()
    case = json.loads((capture / "case.json").read_text())
    assert api.judge(api.collect_capture(capture)).by_id("storage.journal")[0].status == "pass", "made by hand: it may be left out"
    (capture / "case.json").write_text(json.dumps({**case, "complete": True}))
    assert api.judge(api.collect_capture(capture)).by_id("storage.journal")[0].status == "unknown"


def test_a_function_that_shows_nothing_may_be_a_gpu(laid_out: LaidOut) -> None:
    capture, _ = laid_out("34-no-gpu-at-all")
    assert api.judge(api.collect_capture(capture)).verdict == "no-gpu"
    (capture / "root/sys/bus/pci/devices/0000:99:00.0").mkdir(parents=True)
    assert api.judge(api.collect_capture(capture)).verdict == "undetermined"


# The tier's place


@pytest.mark.parametrize(
    ("changes", "check", "expected"),
    [
        ({"free": 0}, "storage.space", "fail"),
        ({"free": 0, "held": 1 << 30}, "storage.space", "warn"),
        ({"mount": Mount("0:5", "/", "/proc", "proc", "proc", ["rw"], ["rw"])}, "storage.exists", "fail"),
        ({"mount": Mount("0:5", "/", "/sys", "sysfs", "sysfs", ["rw"], ["rw"])}, "storage.exists", "fail"),
        ({"writable": False}, "storage.writable", "fail"),
        ({"writable": False, "user": 4711}, "storage.writable", "info"),
        ({"writable": False, "user": 0}, "storage.writable", "fail"),
    ],
)
def test_the_place_of_a_tier(changes: dict[str, Any], check: str, expected: str) -> None:
    assert status(host(paths=[path(**changes)]), check) == expected


def test_proc_is_no_place_for_a_tier(doctor: Cli) -> None:
    report = doctor("--path", "/proc", "--only", "storage", "--json").json()
    assert report["overall"]["posix"] == "unusable"
    assert any("no place for a tier" in item["observed"] for item in report["results"])


@pytest.mark.parametrize(("ids", "lifted"), [("0 0 4294967295\n", True), ("0 1000 1\n", False), ("", True)])
def test_a_capability_of_a_user_namespace_lifts_no_limit(tmp_path: Path, ids: str, lifted: bool) -> None:
    (tmp_path / "root/proc/self").mkdir(parents=True)
    (tmp_path / "cmd").mkdir()
    (tmp_path / "case.json").write_text(json.dumps({"case": "ns", "env": {}}))
    (tmp_path / "root/proc/self/status").write_text("Uid:\t0\t0\t0\t0\nCapEff:\t000001ffffffffff\n")
    (tmp_path / "root/proc/self/uid_map").write_text(ids)
    assert api.collect_capture(tmp_path).limits.cap_ipc_lock is lifted


PLAIN_USER = (
    "import ctypes, os, sys\n"
    "for capability in (1, 2): ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)\n"  # PR_CAPBSET_DROP: those that read anything
    "os.execv(sys.executable, [sys.executable, '-m', 'kvdoctor', *sys.argv[1:]])"
)
"""kvdoctor as somebody whom permissions bind, root too."""


@pytest.mark.parametrize("part", ["root/proc/kallsyms", "root/proc/self/mountinfo", "cmd", "root", "root/sys"])
@pytest.mark.parametrize("ours", [True, False])
def test_what_may_not_be_read_is_not_held(laid_out: LaidOut, doctor: Cli, tmp_path: Path, part: str, ours: bool) -> None:
    capture, _ = laid_out("00-base-amd-good")
    if ours:
        assert doctor("capture", tmp_path / "whole", "--from", capture).rc == 0
        capture = tmp_path / "whole"
    (capture / part).chmod(0)
    ran = subprocess.run(
        [sys.executable, "-c", PLAIN_USER, "--from", str(capture), "--json"], capture_output=True, text=True, check=False
    )
    (capture / part).chmod(0o755)
    assert ran.stdout, ran.stderr
    assert (ran.returncode, json.loads(ran.stdout)["overall"]["verdict"]) == (7, "undetermined")


# Words for people


def test_a_reboot_comes_last_and_once(laid_out: LaidOut, doctor: Cli) -> None:
    lines = doctor("--from", laid_out("01-driver-too-old-6.14.14")[0], "--fix").stdout.splitlines()
    assert lines[-1] == "reboot"
    assert sum(line.startswith("reboot") for line in lines) == 1


def test_a_dangling_link(doctor: Cli, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    ran = doctor("--path", tmp_path / "link", "--only", "storage.exists", "--fix").stdout
    made = next(line for line in ran.splitlines() if line.startswith("install"))
    subprocess.run(["/bin/sh", "-c", made], check=True)
    assert (tmp_path / "nowhere").is_dir()


def test_a_blank_path_of_the_environment_names_nothing(doctor: Cli) -> None:
    assert doctor("--only", "storage", "--json", env={"KVD_LONG_PATH": " "}).json()["host"]["paths"][0]["from"] != "KVD_LONG_PATH"


def test_a_capture_from_a_directory_that_is_gone(doctor: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    ran = doctor("capture", "x")
    assert (ran.rc, "the current directory is gone" in ran.stderr) == (2, True)


def test_what_the_deadline_cut_off_says_so() -> None:
    facts = host(denied={"(ulimit)": "ETIMEDOUT"})
    facts.limits.memlock = None
    assert "deadline" in api.judge(facts, only=["limits.memlock"]).results[0].observed


def test_root_that_is_refused_gets_advice_of_its_own() -> None:
    assert "immutable" in api.judge(host(paths=[path(writable=False)]), only=["storage.writable"]).results[0].fix


def test_an_error_that_cannot_be_written_keeps_its_status() -> None:
    with open("/dev/full", "w") as full:
        ran = subprocess.run([sys.executable, "-m", "kvdoctor", "nope"], stderr=full, check=False)
    assert ran.returncode == 2
