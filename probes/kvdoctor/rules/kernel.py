"""Peer DMA in the kernel and on the bus: the option, who may talk to whom, and who is in between."""

from kvdoctor.facts import Block, Facts, Gpu
from kvdoctor.parse.pci import root_bus
from kvdoctor.results import Result, file_evidence
from kvdoctor.rules.base import (
    absent,
    amd_only,
    candidates,
    check,
    gpu_unjudged,
    has_amd,
    has_nvidia,
    missing,
    no_gpu,
    result,
    skip,
    unknown,
)
from kvtools.units import format_size

WHITELIST_ANY = {"8086:2030", "8086:2031", "8086:2032", "8086:2033", "8086:2020", "8086:09a2"}
"""Intel host bridges the kernel trusts for peer DMA across host bridges (drivers/pci/p2pdma.c)."""
WHITELIST_SAME = {"8086:3c00", "8086:3c01", "8086:2f00", "8086:2f01"}
"""... and those it trusts only where both devices hang on the same one."""
AMD_ZEN = 0x17


@check("kernel.p2pdma", "R", "Kernel with peer DMA")
def p2pdma(facts: Facts) -> Result:
    """CONFIG_PCI_P2PDMA=y: by implication from p2pmem, else by the exact release's configuration, else by a symbol."""
    answer = _p2pdma(facts)
    if no_gpu(facts) and answer.bad:
        answer.status, answer.fix, answer.commands = "info", "", []
    return answer


def _p2pdma(facts: Facts) -> Result:
    if gpu_unjudged(facts):
        return skip("whether there is a GPU is not known")
    if has_nvidia(facts) and not has_amd(facts):
        return skip("judged by nv.kernel")
    if up := next((gpu for gpu in facts.gpus if gpu.p2pmem), None):
        return result(
            "pass",
            "on: VRAM is registered for peer DMA",
            evidence=[file_evidence(f"/sys/bus/pci/devices/{up.bdf}/p2pmem/size", up.p2pmem)],
        )
    kernel = facts.kernel
    if kernel.config is not None:
        value = kernel.config.get("CONFIG_PCI_P2PDMA", "n")
        evidence = [file_evidence(kernel.config_path, f"CONFIG_PCI_P2PDMA={value}")]
        if value == "y":
            return result("pass", "CONFIG_PCI_P2PDMA=y", evidence=evidence)
        return result(
            "fail",
            f"kernel {kernel.release} was built without CONFIG_PCI_P2PDMA",
            expected="CONFIG_PCI_P2PDMA=y",
            fix="Ubuntu 22.04: install linux-generic-hwe-22.04; elsewhere a kernel with the option on. It cannot be a module.",
            commands=["apt-get install linux-generic-hwe-22.04    # Ubuntu 22.04", "reboot"],
            evidence=evidence,
        )
    if kernel.symbols is not None and "p2pdma_pgmap_ops" in kernel.symbols:
        return result(
            "pass",
            "on: the kernel has p2pdma_pgmap_ops",
            evidence=[file_evidence("/proc/kallsyms", "p2pdma_pgmap_ops")],
            confidence="medium",
        )
    where = f" of {kernel.release}" if kernel.release else ""
    return unknown(
        f"no configuration{where} was found and no symbol proves it",
        fix="Run kvdoctor on the host, where /boot/config-$(uname -r) is.",
        evidence=[file_evidence(f"/boot/config-{kernel.release}", "absent")],
    )


@check("p2p.topology", "R", "Peer DMA between GPU and drive")
def topology(facts: Facts) -> Result | list[Result]:
    """The kernel's rule: a common upstream bridge, or host bridges it trusts (AMD family 0x17 on, some Xeons)."""
    if no_gpu(facts) or gpu_unjudged(facts):
        return skip("no GPU")
    gpus = candidates(facts) if has_amd(facts) else facts.nvidia_gpus
    found = []
    for path in facts.paths:
        drives = [block for block in path.stack if block.pci]
        if not drives:
            if path.mount is None:
                found.append(missing(facts, "the mount table", path.path))
            else:
                found.append(result("pass", "no drive on this bus under the path (see storage.backing)", scope=path.path))
            continue
        found.append(_pairs(facts, gpus, drives, path.path))
    return found or skip("no KV path")


def _pairs(facts: Facts, gpus: list[Gpu], drives: list[Block], scope: str) -> Result:
    if not gpus:
        return absent(facts, "the PCI place of the GPU", scope)
    answers = [_pair(facts, gpu, drive) for gpu in gpus for drive in drives]
    order = {"fail": 0, "warn": 1, "unknown": 2, "pass": 3}
    worst = min(answers, key=lambda answer: order.get(answer.status, 4))
    worst.scope = scope
    if worst.status == "pass":
        worst.observed = f"{worst.observed} ({len(gpus)} GPU{'s' * (len(gpus) > 1)}, {len(drives)} drive{'s' * (len(drives) > 1)})"
    return worst


def _pair(facts: Facts, gpu: Gpu, drive: Block) -> Result:
    if facts.environment.virtual_machine:
        return result(
            "warn",
            "the host bridge of a virtual machine says nothing about the hardware below",
            fix="Prove it here: kvdoctor --prove --path ...",
            confidence="low",
        )
    common = set(gpu.chain[1:-1]) & set(drive.chain[1:-1])
    if common:
        return result("pass", f"{gpu.bdf} and {drive.pci} share the bridge {max(common)}")
    kernel = facts.kernel
    if kernel.cpu_vendor == "AuthenticAMD" and kernel.cpu_family is not None:
        if kernel.cpu_family >= AMD_ZEN:
            return result("pass", f"AMD family 0x{kernel.cpu_family:x}: allowed between root ports")
    elif not kernel.cpu_vendor and not kernel.host_bridges:
        return unknown("neither the CPU nor the host bridges are known")
    return _bridges(facts, gpu, drive)


def _bridges(facts: Facts, gpu: Gpu, drive: Block) -> Result:
    """The whitelist of host bridges. Where a place is not known, every host bridge of the host must be on it."""
    bridges = facts.kernel.host_bridges
    places = [root_bus(gpu.chain), root_bus(drive.chain)]
    known = all(place in bridges for place in places)
    ids = [bridges[place] for place in places] if known else sorted(set(bridges.values()))
    if not ids:
        return unknown(f"host bridges of {gpu.bdf} and {drive.pci} are not known (CPU {facts.kernel.cpu_vendor})")
    same = known and places[0] == places[1]
    if all(bridge in WHITELIST_ANY or (same and bridge in WHITELIST_SAME) or bridge.startswith("1ae0:") for bridge in ids):
        return result("pass", f"host bridge {', '.join(sorted(set(ids)))} is trusted by the kernel")
    return result(
        "fail",
        f"{gpu.bdf} and {drive.pci} sit under host bridges that Linux does not trust for peer DMA ({', '.join(sorted(set(ids)))})",
        expected="a common bridge, an AMD CPU since family 0x17, or a whitelisted Xeon",
        fix="Move the drive to a slot under the same switch or root complex, or use an AMD EPYC or whitelisted Xeon host.",
        evidence=[
            file_evidence("/sys/bus/pci/devices/*:00.0/device", ", ".join(ids)),
            file_evidence("/proc/cpuinfo", facts.kernel.cpu_vendor),
        ],
        confidence="high" if known else "medium",
    )


@check("kernel.acs", "i", "ACS between GPU and drive")
def acs(facts: Facts) -> Result:
    """Access Control Services that redirect peer traffic up to the root complex."""
    kernel = facts.kernel
    if no_gpu(facts):
        return skip("no GPU")
    if kernel.acs_redirect:
        fatal = has_nvidia(facts) and not has_amd(facts)
        bridges = ", ".join(kernel.acs_redirect[:3])
        return result(
            "warn",
            f"peer traffic is redirected to the root: {bridges}",
            expected="no redirect on the bridges between GPU and drive",
            why="Each transfer then goes through the root complex"
            + (", which GDS does not want." if fatal else ": slower, and refused where the host bridge is not trusted."),
            fix="Turn ACS off in the BIOS, or for these bridges on the kernel command line; "
            "isolation between VMs on those devices is lost.",
            commands=[
                "# kernel command line: pci=disable_acs_redir="
                + ";".join(line.split(" ")[0].rstrip(":") for line in kernel.acs_redirect[:3])
            ],
        )
    if kernel.acs_readable:
        return result("pass", f"{kernel.acs_clear} bridge{'s' * (kernel.acs_clear != 1)}, none redirects")
    if kernel.acs_readable is False:
        return unknown("configuration space beyond 64 bytes needs root", fix="Run kvdoctor as root to see ACS.")
    return skip("no bridge between GPU and drive is known")


@check("kernel.iommu", "i", "IOMMU")
@amd_only
def iommu(facts: Facts) -> Result:
    """AIS works with any IOMMU setting; translation costs, and passthrough is what is tested."""
    kernel = facts.kernel
    kinds = {gpu.bdf: gpu.iommu for gpu in facts.amd if gpu.iommu}
    if kinds:
        translated = [bdf for bdf, kind in kinds.items() if kind.startswith("DMA")]
        told = ", ".join(f"{bdf} {kind}" for bdf, kind in kinds.items())
        if translated:
            return result(
                "warn",
                f"translation is on ({told})",
                expected="identity (iommu=pt) or off",
                fix="Boot with iommu=pt: the tested setting.",
                commands=["# kernel command line: iommu=pt"],
            )
        return result("pass", told)
    words = kernel.cmdline.split()
    if "iommu=pt" in words:
        return result("pass", "iommu=pt", evidence=[file_evidence("/proc/cmdline", "iommu=pt")])
    if kernel.iommu_groups == 0 or (kernel.iommu_groups is None and not facts.partial):
        return result("pass", "off", evidence=[file_evidence("/sys/kernel/iommu_groups", "absent or empty")])
    return absent(facts, "the IOMMU setting")


@check("kernel.hugepages", "i", "Huge pages")
def hugepages(facts: Facts) -> Result:
    """Inform only: nothing in AIS or GDS needs them; kvd's arena can use them on request."""
    kernel = facts.kernel
    if kernel.hugepages_total is None:
        return skip("not known")
    size = format_size(kernel.hugepage_bytes or 0)
    return result("info", f"{kernel.hugepages_total} of {size} reserved, transparent huge pages: {kernel.thp or 'not known'}")
