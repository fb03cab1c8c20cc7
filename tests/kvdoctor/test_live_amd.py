"""A live look at a host with an AMD GPU: its files are a case's, its commands are real processes that answer, lie or hang."""

import lzma
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvdoctor import api
from kvdoctor.capture import Recording, write_capture
from kvdoctor.collect.host import collect
from kvdoctor.collect.source import Source
from kvdoctor.facts import Facts
from tests.kvdoctor.elf import elf_with_modinfo

pytestmark = pytest.mark.real("host")

KERNEL = "6.8.0-60-generic"
TOOLS = {
    "modinfo": f"echo 'filename: /lib/modules/{KERNEL}/updates/dkms/amdgpu.ko.zst'; echo 'version: 6.16.13'",
    "dkms": f"echo 'amdgpu/6.16.13-2278356.24.04, {KERNEL}, x86_64: installed (original_module exists)'",
    "mokutil": "echo 'SecureBoot disabled'",
    "amd-smi": "echo '| 0000:41:00.0 AMD Instinct MI300X | 0 % |'",
    "journalctl": "exit 1",
    "dmesg": "exit 1",
}


@pytest.fixture
def look(
    laid_out: Callable[[str], tuple[Path, dict[str, Any]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Facts]:
    """Collect from case 00 as a live host whose commands are scripts; `scripts` replaces some."""
    case, _ = laid_out("00-base-amd-good")
    osrelease = case / "root/proc/sys/kernel/osrelease"
    osrelease.write_text(KERNEL + "\n")
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def collect_it(recorder: Recording | None = None, **scripts: str) -> Facts:
        for name, body in {**TOOLS, **{name.replace("_", "-"): body for name, body in scripts.items()}}.items():
            script = folder / name
            script.write_text(f"#!/bin/sh\n{body}\n")
            script.chmod(0o755)
        source = Source(case / "root", tool_deadline_s=1.0, deadline_s=10.0, recorder=recorder)
        return collect(source, paths=["/nvme/kvd-long"])

    return collect_it


def test_every_command_answers(look: Callable[..., Facts]) -> None:
    facts = look()
    assert facts.driver.disk is not None
    assert facts.driver.disk.version == "6.16.13"
    assert [entry.state for entry in facts.driver.dkms or []] == ["installed"]
    assert facts.driver.secure_boot is False
    report = api.judge(facts)
    by_id = {item.id: item.status for item in report.results}
    for check in ("gpu.driver.match", "gpu.driver.dkms", "gpu.smi", "ais.registered", "kernel.p2pdma", "storage.backing"):
        assert by_id[check] == "pass", check
    assert by_id["storage.exists"] == "fail", "this root has no such directory"


def test_all_commands_hang_at_once(look: Callable[..., Facts]) -> None:
    hang = "trap '' TERM; sleep 30 & sleep 30"
    started = time.monotonic()
    facts = look(modinfo=hang, dkms=hang, mokutil=hang, amd_smi=hang)
    assert time.monotonic() - started < 4.0, "they wait beside each other"
    report = api.judge(facts)
    by_id = {item.id: item for item in report.results}
    assert by_id["gpu.smi"].status == "unknown"
    assert by_id["gpu.driver.match"].status == "unknown"
    assert by_id["gpu.kfd"].status == "skip", "this root was mounted without its /dev"
    assert {item["tool"] for item in report.abandoned} >= {"amd-smi", "modinfo-amdgpu", "dkms-status", "mokutil-sb"}
    assert report.verdict == "undetermined"


def test_no_command_is_installed(look: Callable[..., Facts], monkeypatch: pytest.MonkeyPatch) -> None:
    gone = "exit 127"
    report = api.judge(look(modinfo=gone, dkms=gone, mokutil=gone, amd_smi=gone))
    by_id = {item.id: item for item in report.results}
    assert by_id["gpu.driver.match"].status == "unknown"
    assert by_id["gpu.smi"].status == "skip"
    assert by_id["ais.registered"].status == "pass", "sysfs needs no tool"


def test_a_capture_of_it_judges_alike(look: Callable[..., Facts], tmp_path: Path) -> None:
    recording = Recording()
    facts = look(recorder=recording, amd_smi="trap '' TERM; sleep 30 & sleep 30")
    write_capture(recording, facts, tmp_path / "capture", redact=True)
    again = api.collect_capture(tmp_path / "capture")
    live = {(item.id, item.scope): item.status for item in api.judge(facts).results if not item.id.startswith("kvd.")}
    replayed = {(item.id, item.scope): item.status for item in api.judge(again).results if not item.id.startswith("kvd.")}
    assert replayed == live


def test_the_direct_reason_is_cheap(laid_out: Callable[[str], tuple[Path, dict[str, Any]]]) -> None:
    """What kvd and the connector ask at their start: file reads only, no process."""
    case, _ = laid_out("00-base-amd-good")
    (case / "root/sys/module/amdgpu/parameters/ais_disabled").write_text("1\n")
    (case / "root/sys/bus/pci/devices/0000:41:00.0/p2pmem/size").write_text("0\n")
    (case / "root/proc/sys/kernel/osrelease").write_text(KERNEL + "\n")
    started = time.process_time()
    reasons = {api.direct_reason("/nvme/kvd-long", root=case / "root") for _ in range(10)}
    assert (time.process_time() - started) / 10 < 0.05
    assert reasons == {"AIS: switched off by ais_disabled=1 (module parameter) (ais.param)"}


def test_a_mounted_host_without_kmod(laid_out: Callable[[str], tuple[Path, dict[str, Any]]]) -> None:
    """--root runs no command: the module file is found through modules.dep, where updates/dkms wins, and read by ourselves."""
    case, _ = laid_out("02-dkms-upgraded-no-reboot")
    root = case / "root"
    (root / "proc/sys/kernel/osrelease").write_text(KERNEL + "\n")
    modules = root / "lib/modules" / KERNEL
    (modules / "updates/dkms").mkdir(parents=True)
    (modules / "modules.dep").write_text("kernel/drivers/nvme/nvme.ko:\nupdates/dkms/amdgpu.ko.xz: updates/dkms/amdttm.ko.xz\n")
    image = elf_with_modinfo(f"version=6.16.6\0vermagic={KERNEL} SMP\0".encode())
    (modules / "updates/dkms/amdgpu.ko.xz").write_bytes(lzma.compress(image))
    (root / "var/lib/dkms/amdgpu/6.16.6-1" / KERNEL / "x86_64/module").mkdir(parents=True)
    (root / "var/lib/dkms/amdgpu/6.16.6-1" / KERNEL / "x86_64/module/amdgpu.ko.xz").write_bytes(b"")
    facts = api.collect_host(root, ["/nvme/kvd-long"], run_tools=False)
    assert facts.driver.disk is not None
    assert (facts.driver.disk.version, facts.driver.disk.kernel) == ("6.16.6", KERNEL)
    report = api.judge(facts)
    by_id = {item.id: item for item in report.results}
    assert by_id["gpu.driver.match"].observed == "6.16.6 is on disk but 6.14.14 is running"
    assert by_id["gpu.driver.dkms"].status == "pass"
    assert "gpu.driver.match" in report.roots
