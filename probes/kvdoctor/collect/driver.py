"""The amdgpu driver: loaded, on disk, in dkms, and whether Secure Boot lets it in.

What is *loaded* counts. modinfo, dkms and the package manager speak of the disk; between an upgrade and the reboot, or with
an old module in the initramfs, disk and memory differ.
"""

import re

from kvdoctor.collect.source import Source
from kvdoctor.facts import AmdDriver, DkmsEntry, KernelLog, ModuleFile, ToolRun
from kvdoctor.parse import driver as parse

MODULE = "/sys/module/amdgpu"
EFI_SECURE_BOOT = "/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"


def start_tools(source: Source, kernel: str) -> None:
    """Begin the commands whose answers `collect_driver` wants, so that they run beside the file reads."""
    source.start("modinfo-amdgpu", ["modinfo", "-k", kernel, "amdgpu"])
    source.start("dkms-status", ["dkms", "status", "amdgpu"])
    source.start("mokutil-sb", ["mokutil", "--sb-state"])


INITSTATES = ("live", "coming", "going")
SWITCH = ("0", "1", "N", "Y", "n", "y")
"""What the kernel prints of a module's state and of an on/off parameter."""


def collect_driver(source: Source, kernel: str, cmdline: str, log: KernelLog | None, *, in_container: bool) -> AmdDriver:
    """Everything about the driver of the running `kernel`."""
    found = AmdDriver()
    # Without /sys/module itself (not captured, not mounted) an absent folder says nothing.
    found.loaded = source.is_folder(MODULE) or (False if source.is_folder("/sys/module") else None)
    found.initstate = source.one_of(f"{MODULE}/initstate", INITSTATES) or ""
    found.version = source.word(f"{MODULE}/version") or ""
    found.srcversion = source.word(f"{MODULE}/srcversion") or ""
    found.param_ais_disabled = source.one_of(f"{MODULE}/parameters/ais_disabled", SWITCH)
    found.conf_ais_disabled = _configured(source, cmdline)
    _disk(source, kernel, found)
    found.disk_foreign = in_container and not source.exists("/lib/modules/" + kernel)
    _dkms(source, found)
    _secure_boot(source, found, log)
    return found


def _configured(source: Source, cmdline: str) -> list[str]:
    """Where ais_disabled=1 is set for the next load of the module."""
    where = []
    if re.search(r"(?:^|\s)amdgpu\.ais_disabled=1(?:\s|$)", cmdline):
        where.append("kernel command line")
    for folder in ("/etc/modprobe.d", "/run/modprobe.d", "/usr/lib/modprobe.d"):
        for name in source.names(folder, r".*\.conf"):
            text = source.read(f"{folder}/{name}", 1 << 16)
            if text and re.search(r"^\s*options\s+amdgpu\b.*\bais_disabled=[1yY]", text, re.MULTILINE):
                where.append(f"{folder}/{name}")
    return where


def _disk(source: Source, kernel: str, found: AmdDriver) -> None:
    run = source.answer("modinfo-amdgpu")
    found.disk_asked = run is not None
    if run and run.answered:
        found.disk = parse.parse_modinfo(run.out)
        found.disk_missing = found.disk is None and "not found" in run.err
    if found.disk is None and not found.disk_missing and kernel:
        found.disk = _module_file(source, kernel)
        found.disk_asked = found.disk_asked or found.disk is not None


def _module_file(source: Source, kernel: str) -> ModuleFile | None:
    """Read the module file itself where kmod is not installed. modules.dep says which file modprobe would take."""
    base = f"/lib/modules/{kernel}"
    listing = source.matching(f"{base}/modules.dep", ["/amdgpu.ko"])
    for line in listing or []:
        name = line.split(":", 1)[0]
        if name.rsplit("/", 1)[-1].startswith("amdgpu.ko"):
            path = name if name.startswith("/") else f"{base}/{name}"
            data = source.read_bytes(path, 256 << 20, record=False)
            image = parse.unpack_module(data) if data else None
            found = parse.parse_module_elf(image, path) if image else None
            if found and source.recorder:
                # What the file says of itself, as modinfo would: not megabytes of it.
                source.recorder.tool(ToolRun(key="modinfo-amdgpu", out=parse.as_modinfo(found)))
            return found
    return None


def _dkms(source: Source, found: AmdDriver) -> None:
    run = source.answer("dkms-status")
    found.dkms_asked = run is not None
    if run and run.answered:
        text = f"{run.out}\n{run.err}"
        found.dkms = parse.parse_dkms_status(run.out)
        found.dkms_stale = parse.stale_tree(text)
        found.dkms_failed = parse.build_failure(text)
    else:
        found.dkms = _dkms_tree(source)
    for text in source.command_texts(r"dkms|make|apt|dpkg|yum|dnf").values():
        found.dkms_failed = found.dkms_failed or parse.build_failure(text)


def _dkms_tree(source: Source) -> list[DkmsEntry] | None:
    """dkms's own folders, where the command is not installed: VERSION/KERNEL/ARCH/module/*.ko* is a built module."""
    base = "/var/lib/dkms/amdgpu"
    if not source.is_folder(base):
        return None
    entries = []
    for version in source.names(base):
        folder = f"{base}/{version}"
        if version.startswith("kernel-") or not source.is_folder(folder):
            continue
        kernels = [
            name for name in source.names(folder) if name not in ("build", "source") and source.is_folder(f"{folder}/{name}")
        ]
        for kernel in kernels:
            for arch in source.names(f"{folder}/{kernel}"):
                built = any(".ko" in name for name in source.names(f"{folder}/{kernel}/{arch}/module"))
                installed = built and any(True for _ in source.names(f"/lib/modules/{kernel}/updates/dkms", r"amdgpu\.ko.*"))
                state = "installed" if installed else "built" if built else "added"
                entries.append(DkmsEntry(version=version, kernel=kernel, arch=arch, state=state))
        if not kernels:
            entries.append(DkmsEntry(version=version, state="added"))
    return entries


def _secure_boot(source: Source, found: AmdDriver, log: KernelLog | None) -> None:
    variable = source.read_bytes(EFI_SECURE_BOOT, 16)
    if variable is not None and len(variable) >= 5:
        found.secure_boot = variable[4] == 1
    elif (run := source.answer("mokutil-sb")) and run.answered:
        if found_state := re.search(r"SecureBoot (enabled|disabled)", run.out):
            found.secure_boot = found_state[1] == "enabled"
    elif log and log.secure_boot is not None:
        found.secure_boot = log.secure_boot
    for text in (source.captured("modprobe.err"), source.captured("modprobe.out")):
        line = next((row for row in (text or "").splitlines() if "Key was rejected by service" in row), "")
        found.key_rejected = found.key_rejected or line.strip()
    if log and not found.key_rejected:
        found.key_rejected = log.key_rejected
