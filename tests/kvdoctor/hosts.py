"""Hosts made of facts, for tests of rules: a healthy one, and what a test changes about it."""

from dataclasses import replace
from typing import Any

from kvdoctor.facts import AmdDriver, Block, DirectIo, DkmsEntry, Facts, Gpu, KernelLog, KvPath, Link, ModuleFile, Mount
from kvdoctor.results import Result, worst
from kvdoctor.verdict import judge

VRAM = 192 << 30


def gpu(**changes: Any) -> Gpu:
    """A healthy MI300X."""
    base = Gpu(
        bdf="0000:41:00.0",
        vendor="1002",
        device="74a1",
        driver="amdgpu",
        chain=["pci0000:40", "0000:40:01.2", "0000:41:00.0"],
        numa=0,
        link=Link(32.0, 16, 32.0, 16),
        vram=VRAM,
        vram_visible=VRAM,
        p2pmem=VRAM,
    )
    return replace(base, **changes)


def nvme(**changes: Any) -> Block:
    base = Block(
        name="nvme1n1",
        syspath="/sys/devices/pci0000:40/0000:40:01.1/0000:42:00.0/nvme/nvme1/nvme1n1",
        kind="nvme",
        transport="pcie",
        pci="0000:42:00.0",
        chain=["pci0000:40", "0000:40:01.1", "0000:42:00.0"],
        numa=0,
        link=Link(32.0, 4, 32.0, 4),
    )
    return replace(base, **changes)


def path(**changes: Any) -> KvPath:
    base = KvPath(
        path="/nvme/kv",
        origin="test",
        exists=True,
        is_dir=True,
        writable=True,
        total=4 << 40,
        free=3 << 40,
        mount=Mount("259:5", "/", "/nvme", "xfs", "/dev/nvme1n1p1", ["rw"], ["rw"]),
        resolved="sysfs",
        stack=[nvme()],
        direct=DirectIo(opened=True, mem_align=4, offset_align=512, how="nameless file"),
    )
    return replace(base, **changes)


def host(**changes: Any) -> Facts:
    """A bare-metal host where all is well."""
    facts = Facts(gpus=[gpu()], paths=[path()])
    facts.driver = AmdDriver(
        loaded=True,
        initstate="live",
        version="6.16.13",
        disk=ModuleFile(filename="/lib/modules/6.8.0/updates/dkms/amdgpu.ko", version="6.16.13", vermagic="6.8.0 SMP"),
        disk_asked=True,
        dkms=[DkmsEntry("6.16.13-1", "6.8.0", "x86_64", "installed")],
        dkms_asked=True,
    )
    facts.kernel.release = "6.8.0"
    facts.kernel.symbols = ["kfd_ais_rw_file", "p2pdma_pgmap_ops"]
    facts.kernel.cpu_vendor, facts.kernel.cpu_family = "AuthenticAMD", 25
    facts.kernel.acs_readable = True
    facts.log = KernelLog(source="/dev/kmsg", whole=True)
    facts.device_access = {"/dev/kfd": "ok", "/dev/dri/renderD128": "ok"}
    facts.rocm.version, facts.rocm.version_path, facts.rocm.looked = "7.2.1", "/opt/rocm/.info/version", True
    facts.rocm.hip_libraries, facts.rocm.hipfile_libraries = (
        {"/opt/rocm/lib/libamdhip64.so.7": True},
        ["/opt/rocm/lib/libhipfile.so.0"],
    )
    facts.rocm.hipfile_python = ""
    facts.limits.shm, facts.limits.memlock, facts.limits.nofile, facts.limits.memory_max = 64 << 30, -1, 1 << 20, -1
    facts.environment.euid, facts.environment.os_name = 0, "Ubuntu 24.04"
    for name, value in changes.items():
        setattr(facts, name, value)
    return facts


def status(facts: Facts, check: str) -> str:
    return worst(judge(facts, only=[check]).by_id(check))


def answer(facts: Facts, check: str) -> Result:
    results = judge(facts, only=[check]).by_id(check)
    return max(results, key=lambda item: ("skip", "info", "pass", "unknown", "warn", "fail").index(item.status))
