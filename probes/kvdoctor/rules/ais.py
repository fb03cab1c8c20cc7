"""AIS itself: is it in the driver, switched on, registered for each GPU, and has it refused anything?

The vendor's ais-check answers True for "the loaded module contains the symbol"; a virtual function, a small BAR or
ais_disabled=1 leave it True. So the gates are judged here, one by one, and the closed one is named.
"""

from kvdoctor.facts import AisVolume, Facts, Gpu, IoFailure, KvPath
from kvdoctor.parse.klog import errno_text
from kvdoctor.results import Result, command_evidence, file_evidence
from kvdoctor.rules.base import amd_only, apu_reason, candidates, check, quote, rebuild_initramfs, result, skip, unknown, vf_reason
from kvdoctor.rules.driver import is_loaded, match, too_old, version
from kvdoctor.rules.gpu import kfd_node_of
from kvtools.units import format_size

SYMBOL = "kfd_ais_rw_file"
PARAMETER = "/sys/module/amdgpu/parameters/ais_disabled"
CAPABILITY_BIT = 0x40
PARAM_FIX = (
    "Remove the option ais_disabled=1, rebuild the initramfs, reboot. AIS costs about 1 GB of host memory per 64 GB of VRAM."
)


@check("ais.symbol", "R", "AIS in the driver")
@amd_only
def symbol(facts: Facts) -> Result:
    """kfd_ais_rw_file in kallsyms. Names stay readable without privilege; only the addresses are hidden."""
    symbols = facts.kernel.symbols
    evidence = [file_evidence("/proc/kallsyms", ", ".join(symbols or []) or "none of the AIS symbols")]
    if symbols is None:
        if facts.denied.get("/proc/kallsyms") == "EBADMSG":
            return unknown("kallsyms holds no list of symbols", evidence=evidence)
        why = "kallsyms may not be read" if facts.kernel.symbols_denied else "kallsyms is not there or empty"
        return unknown(why, fix="Run kvdoctor as root, or set kernel.kptr_restrict to 1 or 0.", evidence=evidence)
    if not is_loaded(facts.driver) and version(facts).status == "pass":
        return result(
            "pass", "no driver is loaded; the installed one is new enough to have it", evidence=evidence, confidence="low"
        )
    if SYMBOL in symbols:
        return result("pass", f"{SYMBOL} is there ({generation(symbols)})", evidence=evidence)
    return result(
        "fail",
        f"the running kernel has no {SYMBOL}",
        why="The loaded driver has no AIS: it is too old, or the kernel's own.",
        fix="See gpu.driver.version and gpu.driver.match for the driver to load.",
        evidence=evidence,
    )


def generation(symbols: list[str]) -> str:
    """Which generation of AIS the symbols prove. Inlined functions are absent, so this is a lower bound."""
    if "kfd_ais_get_storage_type" in symbols or "nfs_check_all_transports_p2p" in symbols:
        return "generation with NFS and NVMe-oF"
    if "get_pci_dev_from_dm" in symbols:
        return "generation with LVM"
    if "kfd_ais_create_counter" in symbols or "kfd_ais_zerosize_io_rw_file" in symbols:
        return "generation with byte counters"
    return "first generation"


@check("ais.param", "R", "AIS switched on")
@amd_only
def param(facts: Facts) -> Result:
    """The module parameter ais_disabled, now and for the next load."""
    value, conf = facts.driver.param_ais_disabled, facts.driver.conf_ais_disabled
    evidence = [
        file_evidence(PARAMETER, "absent" if value is None else value),
        *(file_evidence(where, "ais_disabled=1") for where in conf),
    ]
    fix = PARAM_FIX
    if value in ("1", "Y", "y") and facts.environment.in_container and not conf:
        # The switch is the host's and cannot be mended from in here: ais.registered names it as the closed gate.
        return result("pass", "nothing in here sets it; the host has ais_disabled=1 (see ais.registered)", evidence=evidence)
    if value in ("1", "Y", "y"):
        return result(
            "fail",
            f"AIS is switched off by ais_disabled=1 ({', '.join(conf) or 'module parameter'})",
            expected="0 or absent",
            fix=fix,
            commands=["grep -rn ais_disabled /etc/modprobe.d /proc/cmdline", rebuild_initramfs(facts), "reboot"],
            evidence=evidence,
        )
    if conf:
        return result(
            "warn",
            f"on now, and off after the next boot: {', '.join(conf)} sets ais_disabled=1",
            fix=fix,
            commands=[f"sed -i '/ais_disabled/d' {quote(where)}" for where in conf if where.startswith("/")],
            evidence=evidence,
        )
    return result("pass", "not switched off", evidence=evidence)


def closed_gates(facts: Facts, gpu: Gpu) -> list[str]:
    """The driver's own conditions that are known not to hold for a GPU, the first to mend at the head."""
    gates = []
    driver, symbols = facts.driver, facts.kernel.symbols
    if driver.loaded is False or driver.initstate not in ("live", ""):
        gates.append("the driver is not loaded")
    elif too_old(facts):
        gates.append(f"the loaded driver is too old ({driver.version or 'the kernel own'})")
    if symbols is not None and SYMBOL not in symbols and is_loaded(driver) and not too_old(facts):
        gates.append("the loaded driver has no AIS")
    if driver.param_ais_disabled in ("1", "Y", "y"):
        gates.append("ais_disabled=1")
    if reason := vf_reason(facts, gpu):
        gates.append(f"virtual function ({reason})")
    if reason := apu_reason(facts, gpu):
        gates.append(f"APU ({reason})")
    if gpu.vram is not None and gpu.vram_visible is not None and gpu.vram != gpu.vram_visible:
        gates.append(f"small BAR ({gpu.vram_visible >> 20} of {gpu.vram >> 20} MiB visible)")
    if facts.kernel.config is not None and facts.kernel.config.get("CONFIG_PCI_P2PDMA") != "y":
        gates.append("the kernel has no CONFIG_PCI_P2PDMA")
    return gates


@check("ais.registered", "R", "VRAM registered for peer DMA")
@amd_only
def registered(facts: Facts) -> Result | list[Result]:
    """p2pmem/size first, then the gates, then the kernel log. A missing log line alone proves nothing."""
    if not facts.amd:
        return unknown("no PCI tree in this capture")
    return [_registered(facts, gpu) for gpu in candidates(facts)]


def _registered(facts: Facts, gpu: Gpu) -> Result:
    path = f"/sys/bus/pci/devices/{gpu.bdf}/p2pmem/size"
    evidence = [file_evidence(path, "absent" if gpu.p2pmem is None else gpu.p2pmem)]
    if gpu.p2pmem:
        return result("pass", f"{format_size(gpu.p2pmem)} registered", scope=gpu.bdf, evidence=evidence)
    if gates := closed_gates(facts, gpu):
        return result(
            "fail",
            f"not registered; closed gate: {'; '.join(gates)}",
            expected="p2pmem/size above 0",
            why="The driver registers VRAM for peer DMA only where every gate is open.",
            fix="On the host, " + PARAM_FIX[0].lower() + PARAM_FIX[1:]
            if "ais_disabled=1" in gates[0]
            else "Open that gate; this follows.",
            scope=gpu.bdf,
            evidence=evidence,
        )
    log = facts.log
    if log and gpu.bdf in log.registered:
        evidence.append(file_evidence(log.source, f"AIS: registered {log.registered[gpu.bdf]}MB"))
        return result(
            "pass", f"the kernel log says so ({log.registered[gpu.bdf]} MB)", scope=gpu.bdf, evidence=evidence, confidence="medium"
        )
    if log is None:
        return unknown(
            "no p2pmem, every known gate is open, and the kernel log may not be read",
            fix="Run kvdoctor as root, or read the log: dmesg | grep AIS.",
            scope=gpu.bdf,
            evidence=evidence,
        )
    if not log.whole:
        return unknown(
            "no p2pmem, and the kernel log no longer reaches back to the driver's load", scope=gpu.bdf, evidence=evidence
        )
    return result(
        "fail",
        "not registered, and every gate that can be judged is open",
        fix="Reload the driver with dynamic debug for kfd_ais.c and read the reason it gives.",
        commands=["echo 'file kfd_ais.c +p' > /sys/kernel/debug/dynamic_debug/control", "dmesg | grep AIS"],
        scope=gpu.bdf,
        evidence=evidence,
        confidence="medium",
    )


@check("ais.capbit", "i", "KFD capability bit 6")
@amd_only
def capbit(facts: Facts) -> Result:
    """Inform only: bit 0x40 is HSA_CAP_VA_LIMIT, reused for AIS by some drivers; ais-check believes it, we do not."""
    words = {gpu.bdf: word for gpu in facts.amd if (word := kfd_node_of(facts, gpu)) is not None}
    if not words:
        return result("info", "no KFD node of a GPU")
    told = ", ".join(f"{bdf} 0x{word:x} ({'set' if word & CAPABILITY_BIT else 'clear'})" for bdf, word in words.items())
    return result(
        "info",
        told,
        why="The bit's name is VA_LIMIT; it decides nothing here.",
        evidence=[file_evidence("/sys/class/kfd/kfd/topology/nodes")],
    )


# Refusals at run time


def no_pci_behind(path: KvPath) -> bool:
    """Whether the kernel's walk from a file to a PCI function may end nowhere: anything but plain NVMe on a PCI path."""
    kinds = {block.kind for block in path.stack}
    return bool(kinds) and not (kinds == {"nvme"} and all(block.pci for block in path.stack))


def enodev(facts: Facts) -> IoFailure | None:
    """A logged AIS refusal with -19: the kernel found no PCI device behind some file."""
    return next((failure for failure in (facts.log.failures if facts.log else []) if failure.errno == 19), None)


@check("ais.iofail", "i", "Refused AIS requests")
@amd_only
def iofail(facts: Facts) -> Result:
    """Run-time refusals in the kernel log, errno decoded. -19 with a KV path that has no PCI device of its own is about it."""
    if facts.log is None:
        return (
            skip("the kernel log may not be read")
            if facts.partial
            else unknown("the kernel log may not be read", fix="Run as root.")
        )
    failures = facts.log.failures
    if not failures:
        return result("pass", "none in the kernel log", evidence=[file_evidence(facts.log.source)])
    numbers = [failure.errno for failure in failures if failure.errno]
    told = errno_text(numbers[-1]) if numbers else failures[-1].text
    mine = [path.path for path in facts.paths if no_pci_behind(path)] if enodev(facts) else []
    return result(
        "fail" if mine else "warn",
        f"the kernel refused AIS requests ({len(failures)} lines; {told})" + (f"; it fits {', '.join(mine)}" if mine else ""),
        expected="none",
        fix="-19: no PCIe device stands behind that file; put the KV path on a plain NVMe partition. "
        "-22: misaligned size or offset, or no direct I/O.",
        evidence=[file_evidence(facts.log.source, failure.text) for failure in failures[:3]],
    )


# The vendor's tool, cross-checked


@check("ais.tool", "i", "ais-check agrees")
@amd_only
def tool(facts: Facts) -> Result:
    """What ais-check said, held against better evidence. It never decides a verdict."""
    said = facts.ais_check
    run = facts.tool("ais-check")
    if said is None:
        if run and run.state in ("hung", "abandoned"):
            return unknown(f"ais-check did not answer ({run.state} after {run.seconds:.1f} s)")
        return skip("not run: --with-ais-check runs it (it writes a probe file to every mounted xfs and ext4)")
    evidence = [command_evidence("ais-check", _said(facts))]
    wrong = contradictions(facts)
    if wrong:
        return result("warn", "ais-check is wrong here: " + "; ".join(wrong), why="Better evidence decides.", evidence=evidence)
    if said.amdgpu is False:
        if facts.kernel.symbols is None:
            return unknown("it says amdgpu: False, and kallsyms cannot be read to check", evidence=evidence)
        if match(facts).status == "fail":
            return result("pass", "agrees about the driver that runs; a reboot changes that", evidence=evidence)
        return result("fail", "amdgpu: False, and rightly: the loaded driver has no AIS", evidence=evidence, fix="See ais.symbol.")
    hopeful = too_hopeful(facts)
    return result(
        "pass", f"too hopeful: {hopeful[0]}" if hopeful else "agrees", evidence=evidence, confidence="low" if hopeful else "high"
    )


def _said(facts: Facts) -> str:
    said = facts.ais_check
    assert said is not None
    words = {
        "Kernel P2PDMA support": said.p2pdma,
        "HIP runtime": said.hip,
        "amdgpu": said.amdgpu,
        "hipFile-capable volume": said.volume,
    }
    return ", ".join(f"{name}: {value}" for name, value in words.items() if value is not None)


def contradictions(facts: Facts) -> list[str]:
    """Where ais-check's answer does not fit what was read directly."""
    said = facts.ais_check
    assert said is not None
    wrong = []
    symbols = facts.kernel.symbols
    up = any(gpu.p2pmem for gpu in facts.amd)
    if said.amdgpu is False and symbols is not None and SYMBOL in symbols:
        wrong.append("amdgpu: False, but the symbol is there")
    if said.p2pdma is False and up:
        wrong.append("Kernel P2PDMA support: False, but VRAM is registered for peer DMA")
    closed = _closed(facts)
    if facts.environment.in_container and said.amdgpu and closed:
        # In a container its P2PDMA line comes from a configuration file, not from the driver.
        wrong.append(f"all True inside this container, but AIS is not up ({closed[0]})")
    for path in facts.paths:
        wrong += _refused_volume(facts, path)
    return wrong


def _closed(facts: Facts) -> list[str]:
    return [gate for gpu in candidates(facts) if not gpu.p2pmem for gate in closed_gates(facts, gpu)]


def _row(facts: Facts, path: KvPath) -> AisVolume | None:
    rows = facts.ais_check.volumes if facts.ais_check else []
    return next((row for row in rows if path.mount and row.mountpoint == path.mount.point), None)


def _refused_volume(facts: Facts, path: KvPath) -> list[str]:
    from kvdoctor.rules.backing import backing_of
    from kvdoctor.rules.storage import journal_of

    row = _row(facts, path)
    if row is None:
        return []
    kinds = {block.kind for block in path.stack}
    if row.hipfile == "no" and kinds & {"md", "lvm"}:
        return [f"HIPFILE=no for {row.mountpoint} on {row.backing}, where the sources disagree"]
    if row.hipfile == "no" and backing_of(facts, path).status == "pass" and journal_of(facts, path).status == "pass":
        return [f"HIPFILE=no for {row.mountpoint}, which is plain NVMe"]
    return []


def too_hopeful(facts: Facts) -> list[str]:
    """Where ais-check says yes and a check of ours says no: those checks fail by themselves, so this only explains."""
    from kvdoctor.rules.backing import backing_of

    told = [f"all True, but {gate}" for gate in _closed(facts)[:1] if facts.ais_check and facts.ais_check.amdgpu]
    for path in facts.paths:
        row = _row(facts, path)
        if row is None or row.hipfile != "yes":
            continue
        if any(block.kind == "nvme-head" for block in path.stack):
            told.append(f"HIPFILE=yes for {row.mountpoint}, which is a multipath head")
        elif path.journal in ("writeback", "journal"):
            told.append(f"HIPFILE=yes for {row.mountpoint}, whose ext4 runs data={path.journal}")
        elif backing_of(facts, path).status == "fail":
            told.append(f"HIPFILE=yes for {row.mountpoint}, whose backing cannot do it")
    return told
