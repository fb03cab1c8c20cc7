"""Container, privileges, virtual machine: what decides how far the other facts can be trusted.

/.dockerenv inside a virtual machine that was made from an image proves nothing, and `/proc/1/cgroup` is `0::/` in any
container with its own control-group namespace: so markers are reported, and only the strong ones conclude.
"""

import re

from kvdoctor.collect.source import Source
from kvdoctor.facts import Environment
from kvdoctor.parse.mounts import mount_of, parse_mountinfo
from kvdoctor.parse.versions import decimal

CAPABILITIES = {"SYS_ADMIN": 21, "SYS_RAWIO": 17, "IPC_LOCK": 14, "SYS_NICE": 23, "SYSLOG": 34, "BPF": 39}
_CGROUP = re.compile(r"docker|kubepods|libpod|lxc|containerd")


def collect_environment(source: Source, env: dict[str, str], context: str) -> Environment:
    """Where this runs. `context` is a capture's own word about it (host-root, container-root)."""
    found = Environment()
    strong = _container(source, env, found.container_markers)
    found.in_container = strong or context == "container-root"
    if context == "container-root":
        found.container_markers.append("captured in a container")
    if not source.foreign:
        _privileges(source, found)
    found.virtual_machine = _virtual_machine(source)
    release = source.read("/etc/os-release", 8192) or ""
    name = re.search(r'^PRETTY_NAME="?([^"\n]*)', release, re.MULTILINE)
    found.os_name = name[1] if name else ""
    found.hostname = source.word("/proc/sys/kernel/hostname") or ""
    return found


def _container(source: Source, env: dict[str, str], markers: list[str]) -> bool:
    strong = False
    for path in ("/.dockerenv", "/run/.containerenv"):
        if source.exists(path):
            markers.append(path)
    if kind := env.get("container"):
        markers.append(f"environment container={kind}")
        strong = True
    if "KUBERNETES_SERVICE_HOST" in env:
        markers.append("environment KUBERNETES_SERVICE_HOST")
        strong = True
    group = source.read("/proc/1/cgroup", 8192) or ""
    if named := _CGROUP.search(group):
        markers.append(f"/proc/1/cgroup names {named[0]}")
        strong = True
    root = mount_of("/", parse_mountinfo(source.mount_table()))
    if root and root.fstype == "overlay":
        markers.append("the root file system is an overlay")
        strong = True
    return strong


def _privileges(source: Source, found: Environment) -> None:
    status = source.read("/proc/self/status", 16384) or ""
    if match := re.search(r"^Uid:\s+\d+\s+(\d+)", status, re.MULTILINE):
        found.euid = decimal(match[1])
    if match := re.search(r"^CapEff:\s+([0-9a-fA-F]{1,16})\s*$", status, re.MULTILINE):
        mask = int(match[1], 16)
        found.capabilities = [name for name, bit in CAPABILITIES.items() if mask >> bit & 1]
    ids = (source.read("/proc/self/uid_map", 4096) or "").split()
    found.user_namespace = bool(ids) and ids[:3] != ["0", "0", "4294967295"]
    found.dmesg_restrict = source.word("/proc/sys/kernel/dmesg_restrict") or ""
    found.kptr_restrict = source.word("/proc/sys/kernel/kptr_restrict") or ""
    if match := re.search(r"\[(\w+)\]", source.read("/sys/kernel/security/lockdown", 256) or ""):
        found.lockdown = match[1]


def _virtual_machine(source: Source) -> str:
    """What says that this is a virtual machine, or ''."""
    dmi = next((folder for folder in ("/sys/class/dmi/id", "/sys/devices/virtual/dmi/id") if source.is_folder(folder)), "")
    vendor = source.word(f"{dmi}/sys_vendor") or ""
    product = source.word(f"{dmi}/product_name") or ""
    detected = (source.captured("systemd-detect-virt.out") or source.captured("systemd-detect-virt-v.out") or "").strip()
    if re.fullmatch(r"kvm|qemu|vmware|xen|microsoft|oracle|amazon|google|bochs|parallels|bhyve|apple", detected):
        return f"systemd-detect-virt says {detected}"
    if re.search(
        r"QEMU|KVM|VMware|innotek|Xen|Amazon EC2|Google|Microsoft Corporation.*Virtual|OpenStack|Bochs", f"{vendor} {product}"
    ):
        # Bare-metal instances of the clouds carry the cloud's name too: the CPU flag decides.
        if "hypervisor" in _cpu_flags(source) or not _cpu_flags(source):
            return f"{vendor} {product}".strip()
        return ""
    if kind := source.word("/sys/hypervisor/type"):
        return kind
    return "the CPU says hypervisor" if "hypervisor" in _cpu_flags(source) else ""


def _cpu_flags(source: Source) -> list[str]:
    text = source.read("/proc/cpuinfo", 1 << 16) or ""
    found = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    return found[1].split() if found else []
