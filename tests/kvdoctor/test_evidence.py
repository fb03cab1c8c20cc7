"""Missing evidence is never good news: what a capture lacks, and what a host will not show, leaves its gate undetermined."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvdoctor import api
from kvdoctor.capture import Recording, write_capture
from kvtools.errors import NotFound, UsageError
from tests.kvdoctor.hosts import gpu, host
from tests.support.processes import Ran

LaidOut = Callable[[str], tuple[Path, dict[str, Any]]]
Cli = Callable[..., Ran]


def remove(place: Path) -> None:
    if place.is_symlink() or place.is_file():
        place.unlink()
    else:
        shutil.rmtree(place)


def written(case: Path, home: Path, *, redact: bool = True) -> Path:
    """A capture as `kvdoctor capture` writes it, that says it is complete: what it lacks, the host lacked."""
    recording = Recording()
    facts = api.collect_capture(case, recorder=recording)
    facts.partial = False
    write_capture(recording, facts, home, redact=redact)
    return home


@pytest.fixture
def whole(laid_out: LaidOut, tmp_path: Path) -> Path:
    return written(laid_out("00-base-amd-good")[0], tmp_path / "whole")


# What is no capture


def empty_root(home: Path) -> None:
    (home / "root").mkdir()
    (home / "case.json").write_text('{"case": "x"}')


def only_root(home: Path) -> None:
    (home / "root/proc").mkdir(parents=True)
    (home / "root/proc/cmdline").write_text("quiet\n")


def empty_folders(home: Path) -> None:
    (home / "root/proc/self").mkdir(parents=True)
    (home / "cmd").mkdir()
    (home / "case.json").write_text('{"case": "x"}')


def some_json(home: Path) -> None:
    only_root(home)
    (home / "case.json").write_text('{"name": "npm", "version": "1"}')


def link_out(home: Path) -> None:
    (home / "root").symlink_to("/")
    (home / "case.json").write_text('{"case": "x"}')


@pytest.mark.parametrize("make", [empty_root, only_root, empty_folders, some_json, link_out, lambda home: None])
def test_a_folder_that_is_no_capture_is_refused_in_one_line(doctor: Cli, tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path)
    ran = doctor("--from", tmp_path)
    assert (ran.rc, ran.stdout) == (2, "")
    line, hint = ran.stderr.splitlines()
    assert line.startswith("kvdoctor: error: not a capture: ")
    assert str(tmp_path) in line
    assert hint.startswith("hint: ")


@pytest.mark.parametrize("place", ["/", "/usr", "/etc/passwd", "/proc"])
def test_places_of_the_system_are_no_captures(place: str) -> None:
    with pytest.raises(UsageError, match=r"^not a capture: "):
        api.collect_capture(place)
    with pytest.raises(NotFound):
        api.collect_capture("/nowhere/at/all")


# What was there once


def test_a_whole_capture_is_ready_and_names_no_loss(whole: Path, doctor: Cli) -> None:
    ran = doctor("--from", whole, "--json")
    (mine,) = [item for item in ran.json()["results"] if item["id"] == "env.capture"]
    # A capture from a hand-made case holds no system call's answer: all else of it is good.
    unknown = {item["id"] for item in ran.json()["results"] if item["need"] == "R" and item["status"] in ("fail", "unknown")}
    assert (mine["status"], mine["observed"]) == ("info", "whole")
    assert unknown <= {"gpu.kfd", "rocm.hipfile_lib", "rocm.hipfile_py", "rocm.hip_ais"}


def parts() -> list[str]:
    names = ["root/sys", "root/proc", "root/sys/bus", "root/sys/bus/pci/devices", "root/sys/module", "root/opt", "cmd", "root"]
    names += ["root/proc/kallsyms", "root/proc/self/mountinfo", "root/proc/cpuinfo", "root/sys/module/amdgpu/version"]
    names += ["root/sys/module/amdgpu", "root/sys/bus/pci/devices/0000:41:00.0", "cmd/uname-r.out", "index.json"]
    return [*names, "root/sys/bus/pci/devices/0000:41:00.0/vendor", "root/sys/bus/pci/devices/0000:41:00.0/p2pmem/size"]


@pytest.mark.parametrize("part", parts())
def test_a_part_that_went_missing_is_named_and_leaves_the_verdict_open(whole: Path, doctor: Cli, part: str) -> None:
    remove(whole / part)
    ran = doctor("--from", whole, "--json")
    assert ran.rc == 7
    overall, results = ran.json()["overall"], ran.json()["results"]
    assert overall["verdict"] == "undetermined"
    (mine,) = [item for item in results if item["id"] == "env.capture"]
    assert mine["status"] == "unknown"
    assert "no longer holds" in mine["observed"]
    assert "undetermined" in doctor("--from", whole).stdout.lower()


@pytest.mark.parametrize("path", ["proc/kallsyms", "proc/cpuinfo", "sys/module/amdgpu/version", "proc/self/mountinfo"])
def test_a_file_cut_short_counts_as_gone(whole: Path, doctor: Cli, path: str) -> None:
    (whole / "root" / path).write_bytes(b"")
    ran = doctor("--from", whole, "--json")
    assert (ran.rc, ran.json()["overall"]["verdict"]) == (7, "undetermined")


def test_no_gpu_is_not_read_from_a_tree_that_is_not_there(whole: Path, doctor: Cli) -> None:
    remove(whole / "root/sys")
    results = {item["id"]: item for item in doctor("--from", whole, "--json").json()["results"]}
    assert results["gpu.present"]["status"] == "unknown"
    assert "/sys/bus/pci/devices" in results["gpu.present"]["observed"]


def test_what_rests_on_a_lost_file_is_unknown_not_failed(whole: Path) -> None:
    """The kernel's own driver has no version file: its absence is a fault only where it was always absent."""
    remove(whole / "root/sys/module/amdgpu/version")
    (answer,) = api.judge(api.collect_capture(whole)).by_id("gpu.driver.version")
    assert (answer.status, answer.observed) == ("unknown", "/sys/module/amdgpu/version is gone from the capture")


# Hand-made ones


@pytest.mark.parametrize(
    "part",
    [
        *("root/sys", "root/proc", "root", "cmd", "root/sys/bus", "root/sys/bus/pci", "root/proc/kallsyms", "root/proc/cpuinfo"),
        *("root/proc/self", "root/sys/module", "root/sys/devices", "root/opt", "cmd/modinfo-amdgpu.out"),
    ],
)
def test_a_hand_made_host_without_a_gate_is_undetermined(laid_out: LaidOut, doctor: Cli, part: str) -> None:
    case, _ = laid_out("00-base-amd-good")
    assert doctor("--from", case, "--json").json()["overall"]["verdict"] == "ready"
    remove(case / part)
    ran = doctor("--from", case, "--json")
    assert (ran.rc, ran.json()["overall"]["verdict"]) == (7, "undetermined")


def test_answers_about_something_else_make_nobody_ready(tmp_path: Path, doctor: Cli) -> None:
    (tmp_path / "cmd").mkdir()
    (tmp_path / "cmd/ulimit.json").write_text('{"memlock": -1, "nofile": 1000000}')
    (tmp_path / "case.json").write_text('{"case": "limits only", "kv_path": "/kv"}')
    ran = doctor("--from", tmp_path)
    assert ran.rc == 7
    assert "UNDETERMINED" in ran.stdout
    assert "POSIX tier: not judged" in ran.stdout


# Live hosts


def test_a_root_without_sys_is_undetermined(doctor: Cli, tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    ran = doctor("--root", tmp_path, "--json", "--path", "/")
    assert (ran.rc, ran.json()["overall"]["verdict"]) == (7, "undetermined")
    present = next(item for item in ran.json()["results"] if item["id"] == "gpu.present")
    assert present["observed"] == "the PCI tree (/sys/bus/pci/devices) could not be read"


def test_what_is_not_known_is_shown_once_and_first(doctor: Cli, tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    lines = doctor("--root", tmp_path).stdout.splitlines()
    first = next(line for line in lines if line.startswith("[?]"))
    assert first.endswith("(gpu.present)")
    assert "Next step: Run kvdoctor where /sys is mounted" in lines[-1]
    assert sum("no KV path to judge" in line for line in lines) == 1
    assert any(line.strip().startswith("and so storage.fs") for line in lines)


def test_a_capture_given_as_a_root_is_told_from_one(doctor: Cli, laid_out: LaidOut) -> None:
    case, _ = laid_out("00-base-amd-good")
    ran = doctor("--root", case)
    assert ran.rc == 2
    assert ran.stderr == f"kvdoctor: error: --root {case} is a capture\nhint: kvdoctor --from {case}\n"


def test_a_kernel_without_a_pci_bus_has_no_gpu(doctor: Cli, tmp_path: Path) -> None:
    (tmp_path / "sys/bus/virtio").mkdir(parents=True)
    assert doctor("--root", tmp_path, "--json", "--path", "/").json()["overall"]["verdict"] == "no-gpu"


def test_functions_that_do_not_say_what_they_are(doctor: Cli, tmp_path: Path) -> None:
    (tmp_path / "sys/bus/pci/devices/0000:01:00.0").mkdir(parents=True)
    ran = doctor("--root", tmp_path, "--json", "--path", "/")
    assert ran.json()["overall"]["verdict"] == "undetermined"
    present = next(item for item in ran.json()["results"] if item["id"] == "gpu.present")
    assert present["observed"] == "1 PCI functions do not say what they are, such as 0000:01:00.0"


@pytest.mark.parametrize("reason", ["EACCES", "EPERM", "EIO", "LOST"])
def test_a_pass_that_rests_on_a_file_nobody_could_read(reason: str) -> None:
    facts = host(gpus=[gpu()])
    facts.denied["/sys/module/amdgpu/parameters/ais_disabled"] = reason
    report = api.judge(facts)
    assert report.by_id("ais.param")[0].status == "unknown"
    assert report.verdict == "undetermined"


@pytest.fixture
def other_root(laid_out: LaidOut, tmp_path: Path) -> Path:
    """A host's file tree mounted somewhere: files, and none of its processes."""
    root = laid_out("00-base-amd-good")[0] / "root"
    (root / "nvme/kvd-long").mkdir(parents=True)
    return root


def test_another_root_is_not_judged_by_this_process(doctor: Cli, other_root: Path) -> None:
    """Limits, environment, privileges, packages and the current directory are the caller's, and say nothing about it."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1000, soft), hard))
    try:
        env = {
            "PYTHONHASHSEED": "random",
            "HIPFILE_FORCE_COMPAT_MODE": "1",
            "KVD_LONG_PATH": "/callers/own",
            "KVD_CHUNK_TOKENS": "7",
        }
        report = doctor("--root", other_root, "--path", "/nvme/kvd-long", "--json", env=env).json()
        none = doctor("--root", other_root, "--json", env=env).json()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    by_id = {item["id"]: item for item in report["results"]}
    for check in ("limits.shm", "limits.memlock", "limits.nofile", "limits.memcg", "gpu.kfd", "storage.writable", "env.privilege"):
        assert by_id[check]["status"] == "skip", by_id[check]
    assert {by_id[check]["status"] for check in ("cfg.hipfile_env", "cfg.chunk")} == {"pass"}
    assert by_id["cfg.hashseed"]["status"] == "skip"
    assert by_id["cfg.scripts"]["status"] == "skip"
    assert by_id["storage.exists"]["status"] == "pass"
    assert report["overall"]["posix"] != "unusable"
    assert report["host"]["paths"] == [{"path": "/nvme/kvd-long", "from": "--path"}]
    assert none["host"]["paths"] == [], "no folder of the caller's is judged in its place"
    assert none["overall"]["verdict"] != "ready"


def test_a_capture_of_another_root_says_the_same(doctor: Cli, other_root: Path, tmp_path: Path) -> None:
    live = doctor("--root", other_root, "--path", "/nvme/kvd-long", "--json").json()
    assert doctor("capture", tmp_path / "copy", "--root", other_root, "--path", "/nvme/kvd-long").rc == 0
    again = doctor("--from", tmp_path / "copy", "--json").json()
    assert [(item["id"], item["status"]) for item in again["results"]] == [(item["id"], item["status"]) for item in live["results"]]
    assert again["overall"]["verdict"] == live["overall"]["verdict"]


def test_a_mount_over_its_shared_memory_counts(other_root: Path) -> None:
    """A bind mount of a whole host brings that host's /dev/shm along."""
    (other_root / "dev/shm").mkdir(parents=True)
    facts = api.collect_host(other_root, ["/nvme/kvd-long"], run_tools=False)
    assert (facts.limits.shm, facts.foreign) == (None, True)


# Selections


def test_a_selection_of_checks_that_do_not_apply_is_not_ready(laid_out: LaidOut, doctor: Cli) -> None:
    case, _ = laid_out("00-base-amd-good")
    ran = doctor("--from", case, "--only", "nv", "--json")
    assert {item["status"] for item in ran.json()["results"]} == {"skip"}
    assert (ran.rc, ran.json()["overall"]["verdict"]) == (7, "undetermined")
    assert doctor("--from", case, "--only", "limits.shm").rc == 0


def test_the_index_lists_everything(whole: Path) -> None:
    index = json.loads((whole / "index.json").read_text())
    there = {f"/{path.relative_to(whole / 'root')}" for path in (whole / "root").rglob("*") if path.is_symlink() or path.is_file()}
    assert there <= set(index["root"])
    assert {path.name for path in (whole / "cmd").iterdir()} == set(index["cmd"])
