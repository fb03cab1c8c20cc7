"""The running kernel: options, symbols, CPU, host bridges, IOMMU, ACS, huge pages, and its log.

The configuration file must match the running release exactly: a host keeps several, and the first one found is the wrong
one after every kernel update.
"""

import os
import re

from kvdoctor.collect.gpu import DEVICES
from kvdoctor.collect.source import Source
from kvdoctor.facts import Kernel, KernelLog, ToolRun
from kvdoctor.parse import klog, pci
from kvdoctor.parse.gds import gdscheck_kernel
from kvdoctor.parse.versions import decimal

SYMBOLS = (
    "kfd_ais_rw_file",
    "kfd_ais_init",
    "kfd_ais_create_counter",
    "kfd_ais_zerosize_io_rw_file",
    "get_pci_dev_from_dm",
    "kfd_ais_get_storage_type",
    "nfs_check_all_transports_p2p",
    "p2pdma_pgmap_ops",
)
OPTIONS = ("CONFIG_PCI_P2PDMA", "CONFIG_ZONE_DEVICE", "CONFIG_DMABUF_MOVE_NOTIFY", "CONFIG_HSA_AMD_P2P")


MAX_RELEASE = 255


def release(source: Source) -> str:
    """`uname -r` of the host."""
    if source.live:
        # A foreign root with its own /proc says it itself; else it shares this kernel.
        running = (source.word("/proc/sys/kernel/osrelease") if source.root else None) or os.uname().release
        if source.recorder:
            source.recorder.tool(ToolRun(key="uname-r", out=running + "\n"))
        return running
    run = source.answer("uname-r")
    if run and run.out.strip():
        return run.out.split(None, 1)[0][:MAX_RELEASE]
    if text := source.word("/proc/sys/kernel/osrelease"):
        return text
    for key, pattern in (("ais-check", r"^Linux \S+ (\S+) "), ("gdscheck", "")):
        if run := source.answer(key):
            found = re.search(pattern, run.out, re.MULTILINE) if pattern else None
            if text := (found[1] if found else "" if pattern else gdscheck_kernel(run.out)):
                return text
    return ""


def collect_kernel(source: Source, *, symbols: bool) -> Kernel:
    """Facts of the running kernel. Symbols cost up to 150 ms to search, so they are read only where a GPU makes them matter."""
    kernel = Kernel(release=release(source), cmdline=source.word("/proc/cmdline") or "")
    _config(source, kernel)
    if symbols:
        lines = source.matching("/proc/kallsyms", SYMBOLS, shape=r"[0-9a-fA-F]+\s+\S\s+\S")
        if lines is not None:
            present = {words[2] for line in lines if len(words := line.split()) >= 3}
            kernel.symbols = [symbol for symbol in SYMBOLS if symbol in present]
        kernel.symbols_denied = "/proc/kallsyms" in source.denied
    _cpu(source, kernel)
    _iommu(source, kernel)
    huge = source.read("/proc/meminfo", 16384) or ""
    if found := re.search(r"^HugePages_Total:\s+(\d+)", huge, re.MULTILINE):
        kernel.hugepages_total = decimal(found[1])
    found = re.search(r"^Hugepagesize:\s+(\d+) kB", huge, re.MULTILINE)
    if found and (size := decimal(found[1])) is not None:
        kernel.hugepage_bytes = size << 10
    if found := re.search(r"\[(\w+)\]", source.read("/sys/kernel/mm/transparent_hugepage/enabled", 256) or ""):
        kernel.thp = found[1]
    return kernel


def _config(source: Source, kernel: Kernel) -> None:
    here = kernel.release
    paths = [f"/boot/config-{here}", f"/lib/modules/{here}/config", f"/lib/modules/{here}/build/.config"] if here else []
    # What the running kernel says of itself comes first: it cannot be another kernel's.
    for path in ["/proc/config.gz", "/proc/config.txt", *paths]:
        lines = source.matching(path, OPTIONS)
        if lines is not None:
            kernel.config_path = path
            kernel.config = {}
            for line in lines:
                if found := re.fullmatch(r"(CONFIG_\w+)=(\S+)", line.strip()):
                    kernel.config[found[1]] = found[2]
                elif found := re.fullmatch(r"# (CONFIG_\w+) is not set", line.strip()):
                    kernel.config[found[1]] = "n"
            return


def _cpu(source: Source, kernel: Kernel) -> None:
    text = source.read("/proc/cpuinfo", 1 << 16) or ""
    if found := re.search(r"^vendor_id\s*:\s*(\S+)", text, re.MULTILINE):
        kernel.cpu_vendor = found[1]
    if found := re.search(r"^cpu family\s*:\s*(\d+)", text, re.MULTILINE):
        kernel.cpu_family = decimal(found[1])
    flags = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    kernel.hypervisor = bool(flags) and "hypervisor" in (flags[1].split() if flags else [])
    for bdf in source.names(DEVICES):
        if bdf.endswith(":00.0"):
            pci_class = source.word(f"{DEVICES}/{bdf}/class") or ""
            # The kernel's peer-DMA whitelist looks at device 00.0 of the root bus, host bridge or root port.
            if pci_class.startswith(("0x0600", "0x0604")) and len(pci.chain(source.real(f"{DEVICES}/{bdf}"))) <= 2:
                vendor, device = (source.word(f"{DEVICES}/{bdf}/{part}") or "" for part in ("vendor", "device"))
                kernel.host_bridges[bdf[:7]] = f"{vendor.removeprefix('0x')}:{device.removeprefix('0x')}"
    if not kernel.host_bridges and (tree := source.captured("lspci-tv.out")):
        kernel.host_bridges = pci.parse_lspci_tree(tree)


def _iommu(source: Source, kernel: Kernel) -> None:
    kernel.iommu_devices = source.names("/sys/class/iommu")
    groups = "/sys/kernel/iommu_groups"
    if source.is_folder(groups):
        kernel.iommu_groups = len(source.names(groups))


def collect_acs(source: Source, kernel: Kernel, chains: list[list[str]]) -> None:
    """ACS control of every bridge above a GPU or a drive. Without root sysfs stops at 64 bytes, before that capability."""
    for name in ("lspci-acs.out", "lspci-vv.out"):
        text = source.captured(name)
        if text and "ACSCtl" in text:
            kernel.acs_clear, kernel.acs_redirect = pci.parse_lspci_acs(text)
            kernel.acs_readable = True
            return
    bridges = sorted({bridge for chain in chains for bridge in chain[1:-1]})
    for bridge in bridges:
        config = source.read_bytes(f"{DEVICES}/{bridge}/config", 4096)
        if config is None:
            continue
        if len(config) <= 64:
            kernel.acs_readable = False
            return
        kernel.acs_readable = True
        control = pci.acs_control(config)
        if control is not None and control & pci.ACS_REDIRECT:
            kernel.acs_redirect.append(f"{bridge} (control 0x{control:02x})")
        else:
            kernel.acs_clear += 1


def collect_log(source: Source) -> KernelLog | None:
    """The kernel log, from /dev/kmsg, else the journal, else dmesg; None where this user may read none of them."""
    if not source.live:
        run = source.answer("dmesg")
        if run is None or run.state != "ok" or run.rc != 0:
            return None
        told = source.value("log", dict)
        told = told if isinstance(told, dict) else {}
        whole = told.get("whole") if isinstance(told.get("whole"), bool) else None
        return klog.parse_kernel_log(run.out, source=str(told.get("source", "dmesg")), whole=whole)
    read, name = _read_kmsg(source), "/dev/kmsg"
    body, whole = read or ("", None)
    for key in ("journal", "dmesg") if read is None else ():
        run = source.answer(key, record=False)
        if run and run.answered and run.rc == 0 and run.out.strip():
            body, name = run.out, key
            break
    if read is None and not body:
        return None
    log = klog.parse_kernel_log(body, source=name, whole=whole)
    if source.recorder:
        kept = [line for line in body.splitlines() if re.search(r"amdgpu|AIS|ecure ?boot|rejected|nvidia", line)]
        source.recorder.tool(ToolRun(key="dmesg", out="\n".join(kept) + "\n"))
        source.recorder.value("log", {"whole": log.whole, "source": name})
    return log


def _read_kmsg(source: Source) -> tuple[str, bool] | None:
    records: list[str] = []
    try:
        handle = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        source.refused("/dev/kmsg", error)
        return None
    try:
        while len(records) < 200_000 and source.remaining() > 0:
            try:
                records.append(os.read(handle, 8192).decode("utf-8", "replace"))
            except BlockingIOError:
                break
            except BrokenPipeError:  # the ring wrapped while we read: the next read goes on
                continue
            except OSError as error:
                source.refused("/dev/kmsg", error)
                return None
    finally:
        os.close(handle)
    text, whole = klog.parse_kmsg(records)
    return text, whole
