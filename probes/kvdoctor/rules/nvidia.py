"""NVIDIA GPUDirect Storage. Two routes, one is enough: nvidia-fs with a patched NVMe driver, or PCI P2PDMA (CUDA 12.8 on).

A route that is off while the other works is information, not a fault. "Platform verification succeeded" is also printed on
hosts where all I/O runs in compatibility mode, so it is never the last word where a line about NVMe is there.
"""

from typing import Literal

from kvdoctor.facts import Facts
from kvdoctor.parse.versions import at_least
from kvdoctor.results import Result, command_evidence, file_evidence
from kvdoctor.rules.base import absent, check, has_nvidia, nvidia_only, rebuild_initramfs, result, skip, unknown
from kvtools.units import format_size

REGKEYS = ("RMForceStaticBar1=1", "RmForceDisableIomapWC=1")
NOT_SUPPORTED = 801
Route = Literal["up", "down", "unknown"]


def _tokens(facts: Facts, name: str) -> set[str] | None:
    """Words of a gdscheck line ('Supported', or since 1.16 'nvfs, p2pdma, compat'), lower case; None where it is not there."""
    value = (facts.nvidia.gdscheck or {}).get(name)
    return None if value is None else {word.strip() for word in value.lower().split(",") if word.strip()}


def fs_route(facts: Facts) -> Route:
    """nvidia-fs with an NVMe driver that knows it."""
    words = _tokens(facts, "nvme")
    if words is not None:
        if words & {"supported", "nvfs"}:
            return "up"
        return "down"
    if facts.nvidia.fs_loaded is False:
        return "down"
    return "up" if facts.nvidia.fs_ops else "unknown"


def p2p_route(facts: Facts) -> Route:
    """PCI P2PDMA through the open kernel module."""
    words = (_tokens(facts, "nvme p2pdma") or set()) | ((_tokens(facts, "nvme") or set()) & {"p2pdma"})
    if any(gpu.p2pmem for gpu in facts.nvidia_gpus) or words & {"supported", "p2pdma"}:
        return "up"
    if words or facts.nvidia.cufile_error == NOT_SUPPORTED or any(gpu.p2pmem == 0 for gpu in facts.nvidia_gpus):
        return "down"
    return "unknown"


def _reports_gds(facts: Facts) -> bool:
    """gdscheck's own summary says that a route is up, without saying which."""
    return bool(facts.nvidia.gdscheck_verified) and any("supports GDS" in line for line in facts.nvidia.gdscheck_gpus)


def other_is_up(facts: Facts, mine: Literal["fs", "p2p"]) -> bool:
    """Whether the route that is not `mine` (or one that gdscheck does not name) is up."""
    other = p2p_route(facts) if mine == "fs" else fs_route(facts)
    return other == "up" or (other == "unknown" and _reports_gds(facts))


def _closed(facts: Facts, mine: Literal["fs", "p2p"], bad: Result) -> Result:
    """A gate of one route is closed: a failure, unless the other route is up."""
    if other_is_up(facts, mine):
        bad.status, bad.why, bad.fix, bad.commands = "info", "The other route is up, and one is enough.", "", []
    return bad


@check("nv.present", "R", "NVIDIA GPU")
@nvidia_only
def present(facts: Facts) -> Result:
    """By PCI (10de, class 03xxxx), or by gdscheck in a capture without a PCI tree."""
    if facts.nvidia_gpus:
        return result("pass", ", ".join(gpu.bdf for gpu in facts.nvidia_gpus))
    lines = facts.nvidia.gdscheck_gpus
    return result("pass", lines[0] if lines else "by its tools' output", confidence="medium")


@check("nv.devices", "R", "NVIDIA device access")
@nvidia_only
def devices(facts: Facts) -> Result:
    """/dev/nvidia*: a permission or sandbox problem looks like a driver problem, so it is tested first."""
    denied = facts.nvidia.devices_denied
    if denied:
        return result(
            "fail",
            f"no permission on {', '.join(denied)}",
            fix="Start the container with its GPUs (--gpus all), or mend the nodes' mode.",
        )
    return result("pass", "openable") if facts.nvidia.devices_tried else skip("device nodes can be tried only on the live host")


@check("nv.driver_open", "R", "Open kernel module")
@nvidia_only
def driver_open(facts: Facts) -> Result:
    """The P2PDMA route needs the open flavour of the driver (565 or later)."""
    here = facts.nvidia
    if here.open_kernel_module is None:
        return absent(facts, "the driver's flavour")
    evidence = [file_evidence(here.open_source, here.driver_version)]
    if here.open_kernel_module:
        old = bool(here.driver_version) and at_least(here.driver_version, (565,)) is False
        if old:
            return _closed(
                facts,
                "p2p",
                result(
                    "fail",
                    f"open module {here.driver_version}",
                    expected="565 or later for P2PDMA",
                    fix="Update the driver.",
                    evidence=evidence,
                ),
            )
        return result("pass", f"open module {here.driver_version}".strip(), evidence=evidence)
    return _closed(
        facts,
        "p2p",
        result(
            "fail",
            f"the closed module {here.driver_version} is loaded",
            fix="Install the open kernel module of the driver.",
            evidence=evidence,
        ),
    )


@check("nv.regkeys", "R", "Driver registry keys")
@nvidia_only
def regkeys(facts: Facts) -> Result:
    """RMForceStaticBar1=1 and RmForceDisableIomapWC=1: without them cuFile answers 801 on the P2PDMA route."""
    here = facts.nvidia
    bad = result(
        "fail",
        "the keys for peer DMA are not set",
        expected=" and ".join(REGKEYS),
        fix=f"Add {';'.join(REGKEYS)} to NVreg_RegistryDwords, reload the driver.",
        commands=[
            f"echo 'options nvidia NVreg_RegistryDwords=\"{';'.join(REGKEYS)};\"' > /etc/modprobe.d/nvidia-gds.conf",
            rebuild_initramfs(facts),
            "reboot",
        ],
    )
    if here.regkeys is not None:
        bad.evidence = [file_evidence("/proc/driver/nvidia/params", here.regkeys or "RegistryDwords is empty")]
        missing = [key for key in REGKEYS if key.lower() not in here.regkeys.replace(" ", "").lower()]
        if not missing:
            return result("pass", "both set", evidence=bad.evidence)
        bad.observed = f"not set: {', '.join(missing)}"
        return _closed(facts, "p2p", bad)
    if here.cufile_error == NOT_SUPPORTED:
        bad.observed, bad.confidence = "cuFile answers 801, which is what missing keys lead to", "medium"
        bad.evidence = [file_evidence("cufile.log", here.cufile_error_line)]
        return _closed(facts, "p2p", bad)
    if other_is_up(facts, "p2p"):
        return result("info", "not known; the other route is up")
    return absent(facts, "/proc/driver/nvidia/params")


@check("nv.p2pmem", "R", "BAR1 registered for peer DMA")
@nvidia_only
def p2pmem(facts: Facts) -> Result | list[Result]:
    """p2pmem/size above 0. The directory alone proves nothing: a driver may publish it with zeros."""
    sizes = {gpu.bdf: gpu.p2pmem for gpu in facts.nvidia_gpus}
    if any(sizes.values()):
        return [
            result("pass", format_size(size), scope=bdf, evidence=[file_evidence(f"/sys/bus/pci/devices/{bdf}/p2pmem/size", size)])
            if size
            else result("warn", "not registered, while another GPU's is", scope=bdf)
            for bdf, size in sizes.items()
        ]
    fix = "See nv.regkeys and nv.driver_open; then reload the driver."
    if any(size == 0 for size in sizes.values()):
        return [
            _closed(
                facts,
                "p2p",
                result(
                    "fail",
                    "p2pmem is there with size 0" if size == 0 else "no p2pmem",
                    expected="above 0",
                    fix=fix,
                    scope=bdf,
                    evidence=[file_evidence(f"/sys/bus/pci/devices/{bdf}/p2pmem/size", size)],
                ),
            )
            for bdf, size in sizes.items()
        ]
    if p2p_route(facts) == "up":
        return result(
            "pass",
            "gdscheck says NVMe P2PDMA",
            confidence="medium",
            evidence=[command_evidence("gdscheck -p", "NVMe P2PDMA : Supported")],
        )
    if facts.nvidia.cufile_error == NOT_SUPPORTED or p2p_route(facts) == "down":
        where = facts.nvidia.cufile_error_line or "NVMe P2PDMA : Unsupported"
        return _closed(
            facts,
            "p2p",
            result("fail", "cuFile gets no peer address for GPU memory", fix=fix, evidence=[file_evidence("cufile.log", where)]),
        )
    if other_is_up(facts, "p2p"):
        return result("info", "no p2pmem; the other route is up")
    if sizes and not facts.partial:
        return [result("fail", "no p2pmem", expected="above 0", fix=fix, scope=bdf) for bdf in sizes]
    return absent(facts, "p2pmem")


@check("nv.kernel", "R", "Kernel for the P2PDMA route")
@nvidia_only
def kernel(facts: Facts) -> Result:
    """Kernel 6.2 or later with p2pdma_pgmap_ops. nvidia-fs does without."""
    release = facts.kernel.release or facts.nvidia.gdscheck_kernel
    symbols = facts.kernel.symbols
    if not release:
        return absent(facts, "the kernel release")
    new = at_least(release, (6, 2))
    if new is None:
        return unknown(f"release {release!r} is not understood")
    if new and (symbols is None or "p2pdma_pgmap_ops" in symbols):
        return result("pass", release, confidence="medium" if symbols is None else "high")
    if facts.nvidia.fs_loaded:
        return result("info", f"kernel {release} cannot do the P2PDMA route; nvidia-fs is the one installed here")
    what = f"kernel {release} is older than 6.2" if not new else f"kernel {release} has no p2pdma_pgmap_ops (CONFIG_PCI_P2PDMA)"
    return _closed(
        facts,
        "p2p",
        result("fail", what, expected="6.2 or later with CONFIG_PCI_P2PDMA", fix="Boot such a kernel, or use the nvidia-fs route."),
    )


@check("nv.nvidia_fs", "R", "nvidia-fs")
@nvidia_only
def nvidia_fs(facts: Facts) -> Result:
    """Loaded, and known to the NVMe driver: `NVMe : Unsupported` beside a loaded module means the NVMe driver is not patched."""
    here = facts.nvidia
    if here.fs_loaded is None:
        return skip("not known whether nvidia-fs is loaded")
    if not here.fs_loaded:
        return result("info", "not loaded", why="It is one of two routes.")
    route = fs_route(facts)
    if route == "down":
        return _closed(
            facts,
            "fs",
            result(
                "fail",
                f"nvidia-fs {here.fs_version} is loaded, and the NVMe driver does not know it (NVMe : Unsupported)".replace(
                    "  ", " "
                ),
                expected="an NVMe driver built with nvidia-fs",
                fix="Install the NVMe driver of MLNX_OFED or DOCA (--enable-gds) for this kernel, rebuild the initramfs, reboot; "
                "or use the P2PDMA route (CUDA 12.8, kernel 6.2).",
            ),
        )
    counted = f", {here.fs_ops} operations so far" if here.fs_ops is not None else ""
    return result("pass", f"loaded {here.fs_version}{counted}")


@check("nv.gdscheck", "R", "gdscheck")
@nvidia_only
def gdscheck(facts: Facts) -> Result:
    """gdscheck -p: a supported NVMe line on either route."""
    here = facts.nvidia
    run = facts.tool("gdscheck")
    if here.gdscheck is None:
        if run and run.state in ("hung", "abandoned"):
            return unknown(f"gdscheck did not answer ({run.state} after {run.seconds:.1f} s)")
        return skip("gdscheck is not installed or was not run")
    lines = {name: value for name, value in here.gdscheck.items() if name in ("nvme", "nvme p2pdma")}
    evidence = [command_evidence("gdscheck -p", "; ".join(f"{name} : {value}" for name, value in lines.items()) or "no NVMe line")]
    if "up" in (fs_route(facts), p2p_route(facts)):
        return result("pass", "; ".join(f"{name}: {value}" for name, value in lines.items()) or "a route is up", evidence=evidence)
    if lines:
        return result(
            "fail",
            "no route to NVMe: " + "; ".join(f"{name}: {value}" for name, value in lines.items()),
            expected="Supported on one of the two routes",
            fix="See nv.regkeys, nv.p2pmem and nv.nvidia_fs for the gate that is closed.",
            evidence=evidence,
        )
    if here.gdscheck_verified is False:
        return result("fail", "Platform verification failed", evidence=evidence, fix="Read gdscheck's own lines above that one.")
    if _reports_gds(facts):
        return result("pass", here.gdscheck_gpus[0], evidence=evidence, confidence="medium")
    return unknown("gdscheck says nothing about NVMe", evidence=evidence)


@check("nv.multipath", "R", "NVMe multipath")
@nvidia_only
def multipath(facts: Facts) -> Result:
    """A multipath head under a KV path; the parameter alone is harmless."""
    heads = [block.name for path in facts.paths for block in path.stack if block.kind == "nvme-head"]
    if heads:
        return result(
            "fail", f"{', '.join(heads)} is a multipath head", fix="options nvme_core multipath=N, rebuild the initramfs, reboot."
        )
    if not any(path.stack for path in facts.paths):
        return skip("no block device under a KV path is known")
    return result("pass", "no multipath head")


@check("nv.raid", "R", "RAID")
@nvidia_only
def raid(facts: Facts) -> Result:
    """cuFile's P2PDMA route has no RAID; nvidia-fs takes md RAID0."""
    levels = [(path.path, block.detail) for path in facts.paths for block in path.stack if block.kind == "md"]
    if not levels:
        return skip("no md array under a KV path")
    told = ", ".join(f"{path} on {level or 'md'}" for path, level in levels)
    if fs_route(facts) == "up" and all(level in ("raid0", "") for _, level in levels):
        return result("pass", f"{told}: the nvidia-fs route takes it")
    return result(
        "fail",
        told,
        expected="plain drives, or RAID0 with the nvidia-fs route",
        why="cuFile's P2PDMA route has no RAID.",
        fix="Use separate drives (one KV root a drive), or the nvidia-fs route.",
    )


@check("nv.iommu", "R", "IOMMU")
@nvidia_only
def iommu(facts: Facts) -> Result:
    """Off or passthrough: translation breaks or slows both routes."""
    kinds = {gpu.bdf: gpu.iommu for gpu in facts.nvidia_gpus if gpu.iommu}
    fix = "Boot with iommu=pt, or switch the IOMMU off in the BIOS."
    if kinds:
        translated = {bdf: kind for bdf, kind in kinds.items() if kind.startswith("DMA")}
        if not translated:
            return result("pass", ", ".join(f"{bdf} {kind}" for bdf, kind in kinds.items()))
        only_p2p = fs_route(facts) != "up" and p2p_route(facts) == "up"
        return result(
            "fail" if only_p2p else "warn", f"translation is on for {', '.join(translated)}", expected="identity or off", fix=fix
        )
    word = (facts.nvidia.gdscheck or {}).get("iommu", "").lower()
    lines = " ".join(facts.nvidia.gdscheck_gpus).lower()
    if word.startswith("disabled") or "iommu state: disabled" in lines:
        return result("pass", "disabled", evidence=[command_evidence("gdscheck -p", "IOMMU: disabled")])
    if word.startswith("enabled") or "iommu state: enabled" in lines:
        if "iommu=pt" in facts.kernel.cmdline.split():
            return result("pass", "enabled, in passthrough (iommu=pt)")
        return result(
            "warn", "enabled", expected="passthrough or off", fix=fix, evidence=[command_evidence("gdscheck -p", "IOMMU: enabled")]
        )
    if "iommu=pt" in facts.kernel.cmdline.split():
        return result("pass", "iommu=pt")
    if not facts.partial and not facts.kernel.iommu_groups:
        return result("pass", "off")
    return absent(facts, "the IOMMU setting")


@check("nv.cufile_json", "R", "cuFile configuration")
@nvidia_only
def cufile(facts: Facts) -> Result:
    """cufile.json and CUFILE_* variables: forced compatibility shuts both routes; P2PDMA must be allowed to be used."""
    here, env = facts.nvidia, facts.env
    if (
        env.get("CUFILE_FORCE_COMPAT_MODE", "").lower() in ("1", "true")
        or here.cufile.get("properties.force_compat_mode") == "true"
    ):
        return result(
            "fail", "compatibility mode is forced: every transfer is copied by the CPU", fix="Set force_compat_mode to false."
        )
    if not here.cufile:
        return skip("no cufile.json: cuFile's defaults apply")
    allowed = "true" in (
        here.cufile.get("properties.use_pci_p2pdma"),
        here.cufile.get("block.nvme.use_pci_p2pdma"),
        here.cufile.get("fs.block.nvme.use_pci_p2pdma"),
        env.get("CUFILE_USE_PCIP2PDMA", "").lower(),
    )
    evidence = [file_evidence(here.cufile_path, f"use_pci_p2pdma {'true' if allowed else 'not true'}")]
    if allowed:
        return result("pass", "P2PDMA is allowed", evidence=evidence)
    return _closed(
        facts,
        "p2p",
        result(
            "fail" if p2p_route(facts) == "up" else "info",
            "use_pci_p2pdma is not true",
            fix=f'Set "use_pci_p2pdma": true under "properties" in {here.cufile_path}.',
            evidence=evidence,
        ),
    )


def needs_p2p(facts: Facts) -> bool:
    """Whether GPU-direct on this NVIDIA host can only go the P2PDMA way."""
    return has_nvidia(facts) and fs_route(facts) != "up"
