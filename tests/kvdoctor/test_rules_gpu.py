"""Rules about GPU, driver, AIS and topology: facts in, answer out. No file is read here."""

from collections.abc import Callable

import pytest

from kvdoctor.facts import Block, DkmsEntry, Facts, IoFailure, KernelLog, KfdNode, ModuleFile
from kvdoctor.verdict import exit_code, judge
from tests.kvdoctor.hosts import answer, gpu, host, nvme, path, status


def test_the_healthy_host_is_ready() -> None:
    report = judge(host())
    assert [(item.id, item.observed) for item in report.results if item.bad] == []
    assert (report.verdict, report.posix, report.roots, report.next_step) == ("ready", "usable", [], "")
    assert exit_code(report, strict=True) == 0


# AIS: every gate, one at a time


@pytest.mark.parametrize(
    ("close", "gate"),
    [
        (lambda facts: setattr(facts.driver, "version", "6.14.14"), "too old"),
        (lambda facts: setattr(facts.driver, "version", ""), "too old"),
        (lambda facts: setattr(facts.driver, "initstate", "going"), "not loaded"),
        (lambda facts: setattr(facts.driver, "param_ais_disabled", "1"), "ais_disabled=1"),
        (lambda facts: setattr(facts.kernel, "symbols", []), "no AIS"),
        (lambda facts: setattr(facts.kernel, "config", {"CONFIG_PCI_P2PDMA": "n"}), "CONFIG_PCI_P2PDMA"),
        (lambda facts: setattr(facts.gpus[0], "vram_visible", 256 << 20), "small BAR"),
        (lambda facts: setattr(facts.gpus[0], "virtual_function", True), "virtual function"),
        (lambda facts: setattr(facts.gpus[0], "device", "74a0"), "APU"),
    ],
)
def test_a_closed_gate_is_named(close: Callable[[Facts], None], gate: str) -> None:
    facts = host()
    facts.gpus[0].p2pmem = None
    # A line from before the gate was closed must not open it again.
    facts.log = KernelLog(source="dmesg", whole=True, registered={"0000:41:00.0": 196592})
    close(facts)
    found = answer(facts, "ais.registered")
    assert found.status == "fail"
    assert gate in found.observed


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (KernelLog(whole=True, registered={"0000:41:00.0": 196592}), "pass"),
        (KernelLog(whole=True, registered={"0000:99:00.0": 196592}), "fail"),
        (KernelLog(whole=True), "fail"),
        (KernelLog(whole=False), "unknown"),
        (None, "unknown"),
    ],
)
def test_without_p2pmem_the_log_decides_only_if_it_is_whole(log: KernelLog | None, expected: str) -> None:
    facts = host(log=log)
    facts.gpus[0].p2pmem = None
    assert status(facts, "ais.registered") == expected


def test_p2pmem_beats_everything_else() -> None:
    facts = host(log=None)
    facts.kernel.symbols = None
    assert status(facts, "ais.registered") == "pass"
    assert status(facts, "kernel.p2pdma") == "pass"


def test_an_integrated_gpu_beside_a_card_only_informs() -> None:
    facts = host(gpus=[gpu(), gpu(bdf="0000:0b:00.0", device="164e", vram=512 << 20, vram_visible=512 << 20, p2pmem=None)])
    assert status(facts, "gpu.apu") == "pass"
    assert [item.scope for item in judge(facts, only=["ais.registered"]).results] == ["0000:41:00.0"]
    assert judge(facts).verdict == "ready"


def test_virtual_functions_beside_their_own_card_only_inform() -> None:
    facts = host(gpus=[gpu(), gpu(bdf="0000:41:02.0", device="74b5", virtual_function=True, p2pmem=None)])
    assert status(facts, "gpu.vf") == "pass"
    assert judge(facts).verdict == "ready"


def test_a_node_with_cores_and_simds_is_an_apu() -> None:
    facts = host(kfd=[KfdNode(node=1, cpu_cores=24, simds=912, location=0x4100)])
    assert status(facts, "gpu.apu") == "fail"


def test_one_of_two_cards_unregistered() -> None:
    facts = host(gpus=[gpu(), gpu(bdf="0000:c1:00.0", p2pmem=None)])
    assert [item.status for item in judge(facts, only=["ais.registered"]).results] == ["pass", "fail"]
    assert judge(facts).verdict == "not-ready"


def test_refusals_on_a_plain_drive_warn_and_on_raid_fail() -> None:
    log = KernelLog(source="dmesg", whole=True, failures=[IoFailure("Failed to read AIS file: -19", 19)])
    assert status(host(log=log), "ais.iofail") == "warn"
    raid = path(stack=[Block(name="md0", kind="md", detail="raid0", slaves=["nvme1n1"]), nvme()])
    facts = host(log=log, paths=[raid])
    assert (status(facts, "ais.iofail"), status(facts, "storage.backing")) == ("fail", "fail")
    assert judge(facts).roots[0] == "storage.backing"


# The driver


@pytest.mark.parametrize(
    ("loaded", "disk", "release", "expected"),
    [
        (("6.16.13", "A"), ("6.16.13", "B"), "6.8.0", "pass"),
        (("6.14.14", "A"), ("6.16.6", "A"), "6.8.0", "fail"),
        (("", "A"), ("", "A"), "6.8.0", "pass"),
        (("", "A"), ("", "B"), "6.8.0", "fail"),
        (("", ""), ("", ""), "6.8.0", "unknown"),
        (("", "A"), ("6.16.13", "A"), "6.8.0", "fail"),
        (("6.16.13", ""), ("6.14.14", ""), "6.17.0", "unknown"),
    ],
)
def test_loaded_against_installed(loaded: tuple[str, str], disk: tuple[str, str], release: str, expected: str) -> None:
    facts = host()
    facts.kernel.release = release
    facts.driver.version, facts.driver.srcversion = loaded
    facts.driver.disk = ModuleFile(
        filename="/lib/modules/6.8.0/x/amdgpu.ko", version=disk[0], srcversion=disk[1], vermagic="6.8.0 SMP"
    )
    assert status(facts, "gpu.driver.match") == expected


def test_the_kernels_own_driver_is_not_comparable_without_versions() -> None:
    facts = host()
    facts.driver.version = ""
    facts.driver.disk = ModuleFile(filename="/lib/modules/6.8.0/kernel/drivers/gpu/drm/amd/amdgpu.ko", intree=True)
    assert status(facts, "gpu.driver.match") == "warn"


def test_a_module_tree_of_the_container_proves_nothing() -> None:
    facts = host()
    facts.driver.disk_foreign = True
    assert status(facts, "gpu.driver.match") == "pass"
    facts.driver.version = "6.16.6"
    assert status(facts, "gpu.driver.match") == "unknown"


@pytest.mark.parametrize(
    ("entries", "expected", "word"),
    [
        ([DkmsEntry("6.16.6", "6.8.0", "x86_64", "installed")], "pass", "installed"),
        ([DkmsEntry("6.16.6", "6.8.0", "x86_64", "built")], "fail", '"built"'),
        ([DkmsEntry("6.16.6", "", "", "added")], "fail", '"added"'),
        (
            [DkmsEntry("6.16.6", "6.8.0", "x86_64", "installed", "WARNING! Diff between built and installed module!")],
            "warn",
            "Diff",
        ),
        ([DkmsEntry("6.15.1", "6.5.0", "x86_64", "installed")], "fail", "was built for 6.5.0"),
        ([], "fail", "missing"),
    ],
)
def test_dkms_for_the_running_kernel(entries: list[DkmsEntry], expected: str, word: str) -> None:
    facts = host()
    facts.driver.dkms, facts.driver.version = entries, "6.16.6"
    found = answer(facts, "gpu.driver.dkms")
    assert found.status == expected
    assert word in found.observed


def test_vfio_holds_the_card() -> None:
    facts = host(gpus=[gpu(driver="vfio-pci")])
    found = answer(facts, "gpu.driver.loaded")
    assert found.status == "fail"
    assert "vfio-pci" in found.observed
    assert status(host(gpus=[gpu(), gpu(bdf="0000:c1:00.0", driver="")]), "gpu.driver.loaded") == "warn"


def test_secure_boot_is_no_fault_while_the_module_is_loaded() -> None:
    facts = host()
    facts.driver.secure_boot = True
    assert status(facts, "gpu.driver.secureboot") == "pass"
    facts.driver.loaded = False
    assert status(facts, "gpu.driver.secureboot") == "warn"
    facts.driver.key_rejected = "Key was rejected by service"
    assert status(facts, "gpu.driver.secureboot") == "fail"
    assert judge(facts).roots[0] == "gpu.driver.secureboot"


def test_commands_are_in_the_words_of_the_distribution() -> None:
    facts = host()
    facts.driver.version = "6.14.14"
    facts.driver.disk = ModuleFile(version="6.14.14")
    assert answer(facts, "gpu.driver.version").commands[0].startswith("apt-get install amdgpu-dkms")
    facts.environment.os_name = "Rocky Linux 9.4 (Blue Onyx)"
    assert answer(facts, "gpu.driver.version").commands[0].startswith("dnf install amdgpu-dkms")


# Topology


@pytest.mark.parametrize(
    ("cpu", "bridges", "chains", "expected"),
    [
        (("AuthenticAMD", 25), {}, (["pci0000:40"], ["pci0000:c0"]), "pass"),
        (("AuthenticAMD", 21), {"0000:40": "1022:1480"}, (["pci0000:40"], ["pci0000:40"]), "fail"),
        (("GenuineIntel", 6), {"0000:40": "8086:2030", "0000:c0": "8086:2031"}, (["pci0000:40"], ["pci0000:c0"]), "pass"),
        (("GenuineIntel", 6), {"0000:40": "8086:2f00", "0000:c0": "8086:2f00"}, (["pci0000:40"], ["pci0000:c0"]), "fail"),
        (("GenuineIntel", 6), {"0000:40": "8086:2f00"}, (["pci0000:40"], ["pci0000:40"]), "pass"),
        (("GenuineIntel", 6), {"0000:00": "8086:7d1b"}, ([], ["pci0000:00"]), "fail"),
        (("GenuineIntel", 6), {}, (["pci0000:40"], ["pci0000:c0"]), "unknown"),
        (("", None), {}, ([], []), "unknown"),
    ],
)
def test_who_may_talk_to_whom(
    cpu: tuple[str, int | None], bridges: dict[str, str], chains: tuple[list[str], list[str]], expected: str
) -> None:
    ours = [f"{root}" for root in chains[0]] + (["0000:40:01.2", "0000:41:00.0"] if chains[0] else [])
    theirs = [f"{root}" for root in chains[1]] + ["0000:40:01.1", "0000:42:00.0"]
    facts = host(gpus=[gpu(chain=ours)], paths=[path(stack=[nvme(chain=theirs)])])
    facts.kernel.cpu_vendor, facts.kernel.cpu_family = cpu
    facts.kernel.host_bridges = bridges
    assert status(facts, "p2p.topology") == expected


def test_a_common_bridge_is_enough_on_any_cpu() -> None:
    switch = ["pci0000:40", "0000:40:01.0", "0000:41:00.0"]
    facts = host(
        gpus=[gpu(chain=[*switch, "0000:42:00.0", "0000:43:00.0"])],
        paths=[path(stack=[nvme(chain=[*switch, "0000:42:01.0", "0000:44:00.0"])])],
    )
    facts.kernel.cpu_vendor = "GenuineIntel"
    found = answer(facts, "p2p.topology")
    assert found.status == "pass"
    assert "share the bridge 0000:41:00.0" in found.observed


def test_one_bad_pair_of_many_is_found() -> None:
    far = nvme(name="nvme2n1", pci="0000:c2:00.0", chain=["pci0000:c0", "0000:c0:01.1", "0000:c2:00.0"])
    facts = host(paths=[path(stack=[nvme(), far])])
    facts.kernel.cpu_vendor = "GenuineIntel"
    facts.kernel.host_bridges = {"0000:40": "8086:2030", "0000:c0": "8086:7d1b"}
    found = answer(facts, "p2p.topology")
    assert found.status == "fail"
    assert "0000:c2:00.0" in found.observed


@pytest.mark.parametrize(("kind", "expected"), [("identity", "pass"), ("DMA", "warn"), ("DMA-FQ", "warn")])
def test_iommu(kind: str, expected: str) -> None:
    assert status(host(gpus=[gpu(iommu=kind)]), "kernel.iommu") == expected


def test_acs_without_root_is_unknown() -> None:
    facts = host()
    facts.kernel.acs_readable = False
    assert status(facts, "kernel.acs") == "unknown"
    facts.kernel.acs_readable, facts.kernel.acs_redirect = True, ["0000:40:01.1 (control 0x1d)"]
    found = answer(facts, "kernel.acs")
    assert found.status == "warn"
    assert found.commands == ["# kernel command line: pci=disable_acs_redir=0000:40:01.1"]
