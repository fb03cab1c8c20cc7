"""Which GPU there is, and whether it is one that AIS takes."""

from kvdoctor.facts import Facts, Gpu, Link
from kvdoctor.parse.kfd import node_bdf
from kvdoctor.results import Result, file_evidence
from kvdoctor.rules.base import (
    absent,
    amd_only,
    apu_reason,
    candidates,
    check,
    gpu_unjudged,
    has_amd,
    has_nvidia,
    in_virtual_machine,
    missing,
    result,
    skip,
    unknown,
    vf_reason,
)
from kvtools.units import format_size

DEVICES = "/sys/bus/pci/devices"
VENDOR_NAMES = {"1002": "AMD", "10de": "NVIDIA"}


@check("gpu.present", "R", "GPU")
def present(facts: Facts) -> Result:
    """An AMD or NVIDIA GPU on the PCI bus (classes 0300, 0302, 0380, 1200). None: every GPU check is skipped."""
    if facts.gpus:
        names = [f"{gpu.name or VENDOR_NAMES.get(gpu.vendor, 'GPU') + ' ' + gpu.device} at {gpu.bdf}" for gpu in facts.gpus[:4]]
        more = f" and {len(facts.gpus) - 4} more" if len(facts.gpus) > 4 else ""
        return result("pass", ", ".join(names) + more, evidence=[file_evidence(DEVICES)])
    if has_amd(facts) or has_nvidia(facts):
        return result("pass", "a vendor's tool reports one; no PCI tree in this capture", confidence="medium")
    if gpu_unjudged(facts):
        if facts.pci_unread:
            told = f"{len(facts.pci_unread)} PCI functions do not say what they are, such as {facts.pci_unread[0]}"
            return unknown(told, fix="Run kvdoctor where /sys can be read.", evidence=[file_evidence(DEVICES)])
        if facts.partial and not facts.files_captured:
            return skip("this capture holds command output only: no GPU is asserted")
        return missing(facts, f"the PCI tree ({DEVICES})", fix="Run kvdoctor where /sys is mounted and can be read.")
    return result("fail", "no AMD or NVIDIA GPU on the PCI bus", expected="at least one", evidence=[file_evidence(DEVICES)])


def _shared(facts: Facts, found: list[Result]) -> list[Result]:
    """Where one GPU of the host can, the others (an integrated one, VFs beside their PF) only inform."""
    if any(item.status == "pass" for item in found):
        for item in found:
            if item.status == "fail":
                item.status, item.fix = "info", ""
    return found


@check("gpu.vf", "R", "Whole GPU")
@amd_only
def virtual_function(facts: Facts) -> list[Result]:
    """AIS is never enabled on an SR-IOV virtual function. ais-check exits 0 on one."""
    found = []
    for gpu in facts.amd:
        if reason := vf_reason(facts, gpu):
            found.append(
                result(
                    "fail",
                    f"a virtual function: {reason}",
                    expected="a whole GPU",
                    why="The driver never enables AIS on a virtual function.",
                    fix="Use a whole GPU: PF passthrough or bare metal.",
                    confidence="medium" if reason.startswith("PCI id") else "high",
                    scope=gpu.bdf,
                    evidence=[
                        file_evidence(f"{DEVICES}/{gpu.bdf}/physfn"),
                        file_evidence(f"{DEVICES}/{gpu.bdf}/device", gpu.device),
                    ],
                )
            )
        else:
            found.append(result("pass", "a whole GPU", scope=gpu.bdf))
    return _shared(facts, found)


@check("gpu.apu", "R", "Discrete GPU")
@amd_only
def apu(facts: Facts) -> list[Result]:
    """AIS is for discrete GPUs; parts that share memory with the CPU are excluded by the driver."""
    found = []
    for gpu in facts.amd:
        if reason := apu_reason(facts, gpu):
            found.append(
                result(
                    "fail",
                    f"shares memory with the CPU: {reason}",
                    expected="a discrete GPU",
                    why="The driver excludes APUs and GPUs joined to the CPU by XGMI from AIS.",
                    fix="Use the POSIX tier: on shared memory there is no copy to save.",
                    scope=gpu.bdf,
                )
            )
        else:
            found.append(result("pass", "discrete", scope=gpu.bdf))
    return _shared(facts, found)


@check("gpu.largebar", "R", "Large BAR")
@amd_only
def large_bar(facts: Facts) -> list[Result]:
    """All of the VRAM must be reachable over PCIe: mem_info_vis_vram_total == mem_info_vram_total, exactly the driver's gate."""
    return [_large_bar(facts, gpu) for gpu in candidates(facts)]


def _large_bar(facts: Facts, gpu: Gpu) -> Result:
    evidence = [
        file_evidence(f"{DEVICES}/{gpu.bdf}/mem_info_vis_vram_total", gpu.vram_visible),
        file_evidence(f"{DEVICES}/{gpu.bdf}/mem_info_vram_total", gpu.vram),
    ]
    if gpu.vram is None or gpu.vram_visible is None:
        bar = f"; BAR 0 has {format_size(gpu.bar0)}" if gpu.bar0 else ""
        return unknown(f"VRAM sizes are not in sysfs{bar}", scope=gpu.bdf, evidence=evidence)
    if gpu.vram_visible == gpu.vram:
        return result("pass", f"all {format_size(gpu.vram)} visible", scope=gpu.bdf, evidence=evidence)
    lines = facts.log.bar_lines if facts.log else []
    stuck = any("failed to assign" in line for line in lines)
    return result(
        "fail",
        f"{gpu.vram_visible >> 20} of {gpu.vram >> 20} MiB of VRAM is reachable over PCIe",
        expected="all of it",
        why="The driver registers VRAM for peer DMA only where every byte is visible.",
        fix="Enable Above-4G decoding and Resizable BAR, switch legacy (CSM) boot off, update the BIOS."
        + (" The kernel could not assign the BAR: remove other PCIe devices or free address space." if stuck else ""),
        scope=gpu.bdf,
        evidence=[*evidence, *(file_evidence("kernel log", line) for line in lines[:2])],
    )


@check("gpu.kfd", "R", "Compute device access")
@amd_only
def kfd(facts: Facts) -> Result:
    """/dev/kfd and a render node must be openable by this user; an unreadable KFD node means "not given to this container"."""
    if facts.kfd_denied:
        return result(
            "fail",
            f"KFD node {', '.join(facts.kfd_denied)} may not be read: that GPU is not given to this container",
            fix="Pass --device /dev/kfd --device /dev/dri to the container, and allow the device in its control group.",
        )
    if facts.device_access is None:
        return skip("device nodes can be tried only on the live host")
    nodes = facts.device_access
    state = nodes.get("/dev/kfd", "ENOENT")
    render = {node: how for node, how in nodes.items() if "renderD" in node}
    if state == "ok" and any(how == "ok" for how in render.values()):
        return result("pass", "/dev/kfd and a render node can be opened", evidence=[file_evidence("/dev/kfd", state)])
    bad = "/dev/kfd" if state != "ok" else next(iter(render), "/dev/dri/renderD*")
    how = state if state != "ok" else next(iter(render.values()), "ENOENT")
    fix = (
        "Pass --device /dev/kfd --device /dev/dri to the container."
        if how == "ENOENT"
        else "Add this user to the groups render and video."
    )
    return result(
        "fail",
        f"{bad}: {'not there' if how == 'ENOENT' else 'no permission'}",
        fix=fix,
        commands=[] if how == "ENOENT" else ["usermod -aG render,video $USER    # then log in again"],
        evidence=[file_evidence(bad, how)],
    )


@check("gpu.smi", "i", "Vendor tool answers")
def smi(facts: Facts) -> Result:
    """amd-smi or nvidia-smi as a canary: one that hangs shows a wedged driver. Its answers decide nothing."""
    runs = [run for key in ("amd-smi", "rocm-smi", "rocminfo", "nvidia-smi") if (run := facts.tool(key))]
    stuck = [run for run in runs if run.state in ("hung", "abandoned")]
    if stuck:
        told = []
        for run in stuck:
            where = f", state {run.proc_state}" if run.proc_state else ""
            where += f", in {run.wchan}" if run.wchan else ""
            how = "abandoned" if run.state == "abandoned" else "killed"
            told.append(
                f"{run.key} {how}" + (f" after {run.seconds:.1f} s (pid {run.pid}{where})" if run.pid else ": it never returned")
            )
        return unknown(
            "; ".join(told),
            fix="The driver may be wedged: read the kernel log, and expect the engine to hang too. A reboot clears it.",
        )
    ran = [run for run in runs if run.answered]
    if not ran:
        return skip("no vendor tool was run")
    bad = next((run for run in ran if run.rc != 0), None)
    if bad:
        return result("info", f"{bad.key} ended with {bad.rc}", why="Its answers decide nothing here; sysfs was read directly.")
    return result("pass", f"{ran[0].key} answered")


def link_text(link: Link) -> str:
    def word(speed: float | None, width: int | None) -> str:
        return f"x{width if width is not None else '?'} at {speed if speed is not None else '?'} GT/s"

    now, best = word(link.speed, link.width), word(link.max_speed, link.max_width)
    return now if now == best else f"{now} of {best}"


def judge_link(link: Link, scope: str, what: str) -> Result:
    """Width below what both ends can do is a fault; speed alone may be power saving at idle."""
    if link.width is not None and link.max_width is not None and link.width < link.max_width:
        return result(
            "warn",
            f"{what} runs {link_text(link)}",
            expected="full width",
            why="Lanes are missing: transfers are slower by that factor, whatever the software does.",
            fix="Reseat the card or drive, check riser, cable and BIOS bifurcation.",
            scope=scope,
        )
    if link.speed is not None and link.max_speed is not None and link.speed < link.max_speed:
        return result(
            "warn",
            f"{what} runs {link_text(link)}",
            why="A slower link at full width may be power saving at idle.",
            fix="Check again under load; if it stays, reseat and look at the slot's generation in the BIOS.",
            confidence="low",
            scope=scope,
        )
    return result("pass", link_text(link), scope=scope)


@check("gpu.pcie_link", "i", "PCIe link of the GPU")
def pcie_link(facts: Facts) -> Result | list[Result]:
    """current_link_* against max_link_*, the narrowest of the card's own switch; lspci's LnkSta in a capture without sysfs."""
    if not facts.gpus:
        return skip("no GPU")
    found = []
    for gpu in facts.gpus:
        if gpu.link.width is None or gpu.link.max_width is None:
            found.append(absent(facts, "the link of the GPU", gpu.bdf))
            continue
        answer = judge_link(gpu.link, gpu.bdf, gpu.bdf)
        answer.evidence = [file_evidence(f"{DEVICES}/{gpu.bdf}/current_link_width", gpu.link.width)]
        found.append(answer)
    return found


@check("gpu.pcie_path", "i", "PCIe path in a virtual machine")
def pcie_path(facts: Facts) -> Result:
    """A GPU or drive directly on the root bus of a virtual machine: peer DMA works there, at a fraction of the speed."""
    if not facts.gpus:
        return skip("no GPU")
    machine = in_virtual_machine(facts)
    if not machine:
        return result("pass", "not a virtual machine")
    flat = [gpu.bdf for gpu in facts.gpus if len(gpu.chain) == 2 or (not gpu.chain and gpu.bdf[5:7] == "00")]
    flat += [block.pci for path in facts.paths for block in path.stack if block.pci and len(block.chain) == 2]
    if not flat:
        return result("pass", "GPU and drives sit behind bridges")
    return result(
        "warn",
        f"{', '.join(sorted(set(flat)))} directly on the virtual root bus",
        expected="GPU and drive behind a shared PCIe root port or switch",
        why="hipFile's own figures for this layout are 5.5 to 7 GB/s against 21 to 28 GB/s behind a common port.",
        fix="Give the virtual machine a pcie-root-port (or a switch) above the GPU and the drives.",
    )


@check("gpu.numa", "i", "NUMA node of the GPU")
def numa(facts: Facts) -> Result | list[Result]:
    """Each GPU against the drives under the KV paths. -1 means a single node, or that the firmware does not say."""
    if not facts.gpus:
        return skip("no GPU")
    drives = {block.numa for path in facts.paths for block in path.stack if block.pci and block.numa is not None}
    found = []
    for gpu in facts.gpus:
        if gpu.numa is None or not drives or gpu.numa in drives:
            where = "node not stated" if gpu.numa is None else f"node {gpu.numa}"
            found.append(result("pass", where, scope=gpu.bdf))
        else:
            nodes = ", ".join(str(node) for node in sorted(drives))
            found.append(
                result(
                    "warn",
                    f"node {gpu.numa}; the KV drives are on node {nodes}",
                    why="Every transfer crosses the link between the sockets: one x4 drive rarely notices, a striped set does.",
                    fix=f"Put a KV path on a drive of node {gpu.numa}, or let this path serve the GPUs of node {nodes}.",
                    scope=gpu.bdf,
                )
            )
    return found


def kfd_node_of(facts: Facts, gpu: Gpu) -> int | None:
    """The KFD capability word of a GPU, joined by PCI location (node numbers are not DRM card numbers)."""
    nodes = [node for node in facts.kfd or [] if node.simds > 0]
    mine = [node for node in nodes if node_bdf(node) == gpu.bdf]
    if not mine and len(nodes) == 1 and len(facts.amd) == 1:
        mine = nodes
    return mine[0].capability if mine else None
