"""What of each kind of file leaves a host in a redacted capture: a table of what is kept, never a list of what is cut.

Every file the collectors read is of some kind here (`FILES`, `COMMANDS`), and of each only what a rule looks at is kept, in
a form its parser reads alike: so a log line, a boot parameter or a mount option nobody thought of stays at home. A file of no
known kind is left out, which makes its gate "unknown" when the capture is judged. Names that must stay recognisable (KV
paths, mount points, device names) go through `Redactor.path` and always get the same stand-in.

Pure: text in, text out. `Keeper` holds one host's stand-ins and which mount points matter.
"""

import json
import re
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from kvdoctor.parse import driver, gds, kfd, klog, mounts, shape
from kvdoctor.parse.aischeck import COLUMNS, parse_ais_check
from kvdoctor.redact import Redactor

BOOT_KEPT = re.compile(
    r"(amd_iommu|intel_iommu|iommu|iommu\.\w+|pci|pcie_aspm|pcie_acs_override|amdgpu\.\w+|nvme_core\.multipath"
    r"|nvidia\.NVreg_\w+|hugepages|hugepagesz|default_hugepagesz|transparent_hugepage|numa_balancing|lockdown)"
)
"""Boot parameters whose value a rule or a reader of a report needs. Of all others only the name is kept."""
MOUNT_KEPT = re.compile(
    r"(r[ow]|soft|hard|softerr|(no|rel|strict)atime|data=[a-z]{1,12}|proto=[a-z0-9]{1,8}|nconnect=\d{1,4}|[rw]size=\d{1,12}"
    r"|vers=[\d.]{1,6}|size=\d{1,18}[kmg]?|nodiscard|discard|nobarrier|noquota|[upg]quota|inode64|dax(=\w+)?)"
)
ENVIRON_KEPT = re.compile(
    r"(PYTHONHASHSEED|KVD_MAX_BYTES|(INFERA_)?KVD_CHUNK_TOKENS|HIPFILE_(ALLOW_COMPAT_MODE|FORCE_COMPAT_MODE|UNSUPPORTED_FILE_SYSTEMS)"
    r"|CUFILE_(FORCE_COMPAT_MODE|ALLOW_COMPAT_MODE|USE_PCIP2PDMA)|KUBERNETES_SERVICE_HOST|container)"
)
ENVIRON_PATHS = ("KVD_LONG_PATH", "INFERA_KVD_HIPFILE_ROOTS", "ROCM_PATH", "VIRTUAL_ENV", "CUFILE_ENV_PATH_JSON")
CGROUP_KEPT = re.compile(
    r"docker|kubepods|libpod|lxc|containerd|system\.slice|user\.slice|init\.scope|kvd(\.service)?|machine\.slice"
)
KFD_KEPT = (
    *("cpu_cores_count", "simd_count", "gfx_target_version", "vendor_id", "device_id", "domain", "location_id", "capability"),
    "local_mem_size",
)
CUFILE_KEPT = re.compile(r"properties\.(use_pci_p2pdma|force_compat_mode|allow_compat_mode)|(fs\.)?block\.nvme\.use_pci_p2pdma")
GDSCHECK_KEPT = re.compile(
    r"\s*(GDS release version|nvidia_fs version|NVMe|NVMe P2PDMA|IOMMU|Nvidia Driver Info Status)\s*:[\w ,.:()-]{0,120}"
    r"|\s*Platform verification \w+\s*|\s*Platform: [\w.-]{1,20}\s*",
    re.IGNORECASE,
)
LOCAL_SOURCE = re.compile(r"/dev/(nvme\w+|md_?[\w-]{0,8}\d+|sd[a-z]+\d*|vd[a-z]+\d*|loop\d+|dm-\d+|root|pmem[\w.]+|zram\d+)")
WORD = re.compile(r"[\x20-\x7e\t]{0,200}")
BLANKED = "***"


@dataclass
class Keeper:
    """One host's stand-ins, and the mount points that its KV paths lie on."""

    redactor: Redactor
    points: frozenset[str] = frozenset()
    files: list[tuple[re.Pattern[str], Callable[["Keeper", str], str]]] = field(default_factory=lambda: FILES)

    def file(self, path: str, data: bytes) -> bytes | None:
        """What is kept of a captured file, None for one of no known kind. What was merely seen (no bytes) stays so."""
        if not data:
            return data
        if path.startswith("/sys/devices/") and path.endswith("/config"):
            return without_serial(data)
        if "/efi/efivars/SecureBoot-" in path or data in MARKERS:
            return data[:16] if data not in MARKERS else data
        text = data.decode("utf-8", "replace")
        for pattern, keep in self.files:
            if pattern.fullmatch(path):
                return keep(self, text).encode()
        return None

    def command(self, name: str, text: str) -> str | None:
        """What is kept of a command's answer or of a system call's; None for one of no known kind."""
        if name.endswith((".rc", ".hang")):
            return "\n".join(line for line in text.splitlines() if WORD.fullmatch(line))[:300] + "\n"
        if name.endswith(".json"):
            return self._json(name, text)
        for pattern, keep in COMMANDS:
            if pattern.fullmatch(name):
                return keep(self, text)
        return None

    def path(self, path: str) -> str:
        return self.redactor.path(path)

    def environ(self, environ: dict[str, str]) -> dict[str, str]:
        """Variables by name; values only of switches that a rule judges, and of folders."""
        kept = {}
        for name, value in environ.items():
            if name in ENVIRON_PATHS:
                kept[name] = self.paths(value)
            elif ENVIRON_KEPT.fullmatch(name) and re.fullmatch(r"[\w.+-]{0,32}", value):
                kept[name] = value if name != "KUBERNETES_SERVICE_HOST" else BLANKED
            else:
                kept[name] = BLANKED
        return kept

    def paths(self, text: str) -> str:
        """Folders in a list such as 'long=/a,short=/b' or '/a:/b'."""
        return "".join(self.path(part) if part.startswith("/") else part for part in re.split(r"([,:=])", text))

    # JSON answers

    def _json(self, name: str, text: str) -> str | None:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return None
        keep = JSON.get(name)
        return None if keep is None else json.dumps(keep(self, value), indent=1) + "\n"

    def kv_paths(self, value: Any) -> Any:
        return {self.path(path): answer for path, answer in shape.mapping(value).items()}

    def processes(self, value: Any) -> Any:
        def one(item: dict[str, Any]) -> dict[str, Any]:
            environ = item.get("environ")
            return {
                "pid": shape.whole(item.get("pid")),
                "uid": shape.whole(item.get("uid")),
                "args": [self.paths(word) for word in shape.texts(item.get("args"))],
                "environ": self.environ({key: str(word) for key, word in environ.items()}) if isinstance(environ, dict) else None,
                "cgroup": self.group(str(item.get("cgroup") or "")),
            }

        return {kind: [one(item) for item in shape.objects(items)] for kind, items in shape.mapping(value).items()}

    def segments(self, value: Any) -> Any:
        kept: list[dict[str, Any]] = []
        for item in shape.objects(value):
            name = str(item.get("name", ""))
            ours = re.fullmatch(r"kvtools\.(kvd|connector|gate)\.[0-9a-f-]{1,40}", name)
            shown = name if ours else self.redactor.stand_in("segment", name)
            values: dict[str, Any] = {
                re.sub(r"=([^{}]*)", lambda found: f"={self.redactor.stand_in('label', found[1])}", key): number
                for key, number in shape.mapping(item.get("values")).items()
            }
            detail = str(item.get("detail", "")).replace(name, shown) if name else str(item.get("detail", ""))
            known: dict[str, Any] = {key: item[key] for key in ("kind", "health", "age_s") if key in item}
            kept.append({**known, "name": shown, "detail": self.redactor.free(detail), "values": values})
        return kept

    def scripts(self, value: Any) -> Any:
        """Owners of our commands' names; a distribution of the house's own is a name like another."""
        known = ("kvtools", "kvcached")
        return {
            name: [owner if owner in known else self.redactor.stand_in("distribution", owner) for owner in shape.texts(owners)]
            for name, owners in shape.mapping(value).items()
        }

    def scalars(self, value: Any) -> Any:
        """Numbers, flags and short words of an object, and what lies one level below."""
        if isinstance(value, dict):
            return {str(key): self.scalars(item) for key, item in value.items() if not isinstance(item, dict)}
        if isinstance(value, list):
            return [item for item in value if isinstance(item, int | float)] or [str(item) for item in value if self._is_word(item)]
        return value if value is None or isinstance(value, int | float) or self._is_word(value) else BLANKED

    @staticmethod
    def _is_word(value: Any) -> bool:
        return isinstance(value, str) and re.fullmatch(r"[\w ./-]{0,40}", value, re.ASCII) is not None

    def packages(self, value: Any) -> Any:
        return {
            key: self.path(str(item)) if key.endswith("_folder") else str(item)[:64] for key, item in shape.mapping(value).items()
        }

    # Control groups

    def group(self, path: str) -> str:
        """A control group's path: what says "container" stays, names do not."""
        return "/".join(self._group_part(part) for part in path.split("/"))

    def _group_part(self, part: str) -> str:
        if not part or part in (".", "..") or part.endswith((".max", ".limit_in_bytes")) or part == "memory":
            return part
        known = CGROUP_KEPT.search(part)
        if known and known[0] == part:
            return part
        return (f"{known[0]}-" if known else "") + self.redactor.stand_in("group", part)


MARKERS = (b"hipAmdFileRead", b"(searched, not found)")


def without_serial(config: bytes) -> bytes:
    """PCI configuration space without its Device Serial Number (extended capability 3), which often is a MAC address."""
    kept, offset, seen = bytearray(config), 0x100, 0
    while 0x100 <= offset <= len(config) - 12 and seen < 96:
        (header,) = struct.unpack_from("<I", config, offset)
        if header in (0, 0xFFFFFFFF):
            break
        if header & 0xFFFF == 0x0003:
            kept[offset + 4 : offset + 12] = bytes(8)
        offset, seen = header >> 20 & 0xFFC, seen + 1
    return bytes(kept)


# Files


def _lines(pattern: str, flags: int = 0) -> Callable[[Keeper, str], str]:
    """Keep the lines that match `pattern` whole."""
    wanted = re.compile(pattern, flags)
    return lambda _, text: "".join(f"{line}\n" for line in text.splitlines() if wanted.fullmatch(line))


def _word(_: Keeper, text: str) -> str:
    """One short printable line: most of sysfs."""
    line = text.split("\n", 1)[0]
    return f"{line if WORD.fullmatch(line) else ''}\n"


def boot_parameters(_: Keeper, text: str) -> str:
    """The kernel's command line: known parameters with their value, all others by name only."""
    kept = []
    for found in re.finditer(r'(?:"[^"]*"?|[^\s"])+', text):
        word = found[0]
        if word == "--":
            break  # what follows is for init: anything may be in it
        name, equals, _value = word.partition("=")
        if equals and not BOOT_KEPT.fullmatch(name):
            word = f"{name}={BLANKED}"
        elif not equals and not re.fullmatch(r"[A-Za-z0-9_.-]{1,40}", word):
            word = BLANKED
        name = word.partition("=")[0]
        kept.append(word if re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name) else BLANKED)
    return " ".join(kept) + "\n"


def mount_table(keeper: Keeper, text: str) -> str:
    """The lines of /, /dev/shm and the KV paths; of options only those a rule reads; no server, share, user or address."""
    kept = []
    for line, mount in zip(*_mounts(text), strict=True):
        if mount.point not in keeper.points:
            continue
        head = line.split()
        local = LOCAL_SOURCE.fullmatch(mount.source) or mount.source in (mount.fstype, "none", "tmpfs", "shm", "overlay")
        source = mount.source if local else _source(keeper, mount)
        super_options = ",".join(option for option in mount.super_options if MOUNT_KEPT.fullmatch(option)) or "rw"
        options = ",".join(option for option in mount.options if MOUNT_KEPT.fullmatch(option)) or "rw"
        point = _escape(keeper.path(mount.point))
        kept.append(f"{head[0]} {head[1]} {mount.dev} / {point} {options} - {mount.fstype} {_escape(source)} {super_options}")
    return "".join(f"{line}\n" for line in kept)


def _mounts(text: str) -> tuple[list[str], list[Any]]:
    lines, found = [], []
    for line in text.splitlines():
        if one := mounts.parse_mountinfo(line):
            lines.append(line)
            found += one[:1]
    return lines, found


def _source(keeper: Keeper, mount: Any) -> str:
    if mount.source.startswith("/dev/"):
        folder = "/dev/mapper/" if mount.source.startswith("/dev/mapper/") else "/dev/"
        return folder + keeper.redactor.stand_in("volume", mount.source)
    return keeper.redactor.stand_in("server", mount.source) + (":/export" if mount.fstype.startswith("nfs") else "")


def _escape(text: str) -> str:
    return re.sub(r"[\s\\]", lambda found: f"\\{ord(found[0]):03o}", text)


def processor(_: Keeper, text: str) -> str:
    first = text.split("\n\n", 1)[0]
    return "".join(f"{line}\n" for line in first.splitlines() if re.match(r"(vendor_id|cpu family|model name|flags)\s*:", line))


def symbols(_: Keeper, text: str) -> str:
    """Names without addresses, which would undo the kernel's address randomisation."""
    return re.sub(r"^[0-9a-f]{8,16}", lambda found: "0" * len(found[0]), text, flags=re.MULTILINE)


def cgroups(keeper: Keeper, text: str) -> str:
    found = [re.fullmatch(r"(\d+:[\w,=]*:)(/.*)", line) for line in text.splitlines()]
    return "".join(f"{line[1]}{keeper.group(line[2])}\n" for line in found if line)


def journal_options(_: Keeper, text: str) -> str:
    kept = [line for line in text.splitlines() if re.fullmatch(r"r[ow]|data=[a-z]{1,12}", line)]
    return "".join(f"{line}\n" for line in kept) or "?\n"


def module_options(_: Keeper, text: str) -> str:
    off = re.search(r"^\s*options\s+amdgpu\b.*\bais_disabled=([1yY])", text, re.MULTILINE)
    return f"options amdgpu ais_disabled={off[1]}\n" if off else ""


def registry_keys(_: Keeper, text: str) -> str:
    found = re.search(r'^RegistryDwords:\s*"?([^"\n]*)', text, re.MULTILINE)
    keys = [key.strip() for key in found[1].split(";")] if found else []
    kept = [key for key in keys if re.fullmatch(r"(RMForceStaticBar1|RmForceDisableIomapWC)=\w{1,10}", key, re.IGNORECASE)]
    return f'RegistryDwords: "{"".join(f"{key};" for key in kept)}"\n'


def cufile_settings(_: Keeper, text: str) -> str:
    nested: dict[str, Any] = {}
    for name, value in (gds.parse_cufile_json(text) or {}).items():
        if CUFILE_KEPT.fullmatch(name) and value in ("true", "false"):
            *above, last = name.split(".")
            place = nested
            for part in above:
                place = place.setdefault(part, {})
            place[last] = value == "true"
    return json.dumps(nested or {"properties": {}}) + "\n"


def modules(_: Keeper, text: str) -> str:
    return (
        "".join(f"{line.split()[0]} 1 1 -\n" for line in text.splitlines() if re.match(r"(nvidia\w*|amdgpu)\s", line))
        or "none 1 1 -\n"
    )


def dm_identity(keeper: Keeper, text: str) -> str:
    kind, dash, name = text.strip().partition("-")
    return f"{kind}-{keeper.redactor.stand_in('volume', name)}\n" if dash and kind in ("LVM", "CRYPT", "mpath") else "dm\n"


def seed_mark(_: Keeper, text: str) -> str:
    return "DEFAULT_NONE_HASH_SEED\n" if "DEFAULT_NONE_HASH_SEED" in text else "(searched, not found)\n"


def kfd_node(_: Keeper, text: str) -> str:
    return "".join(f"{' '.join(words)}\n" for line in text.splitlines() if len(words := line.split()) == 2 and words[0] in KFD_KEPT)


FILES: list[tuple[re.Pattern[str], Callable[[Keeper, str], str]]] = [
    (re.compile(pattern), keep)
    for pattern, keep in (
        (r"/proc/(self|\d+)/mountinfo", mount_table),
        (r"/proc/cmdline", boot_parameters),
        (r"/proc/sys/kernel/hostname", lambda _, _text: "host1\n"),
        (r"/proc/sys/kernel/\w+", _word),
        (r"/proc/cpuinfo", processor),
        (r"/proc/meminfo", _lines(r"(HugePages_Total|Hugepagesize):[ \d]+( kB)?")),
        (r"/proc/kallsyms", symbols),
        (r"/proc/config\.txt|/boot/config-[^/]+|/lib/modules/.*/(config|\.config)", _lines(r"(# )?CONFIG_\w+(=[ymn]| is not set)")),
        (r"/proc/(self|\d+)/cgroup", cgroups),
        (r"/proc/self/uid_map", _lines(r"[\s0-9]+")),
        (r"/proc/(self|\d+)/status", _lines(r"(Uid|CapEff):[\s0-9a-f]+")),
        (r"/proc/mdstat", _lines(r"(?!.*\bfile:).*")),
        (r"/proc/modules", modules),
        (r"/proc/fs/ext4/[^/]+/options", journal_options),
        (r"/proc/driver/nvidia/version", _lines(r"NVRM version:.*")),
        (r"/proc/driver/nvidia/params", registry_keys),
        (r"/proc/driver/nvidia-fs/version", _lines(r"[\w ]*version:?[ \d.]+", re.IGNORECASE)),
        (r"/proc/driver/nvidia-fs/stats", _lines(r"Ops\s*:[\w\s=]*")),
        (r"(/usr)?/(etc|lib)/os-release", _lines(r"(PRETTY_NAME|ID|VERSION_ID)=.*")),
        (r"(/usr)?/(etc|run|lib)/modprobe\.d/.*", module_options),
        (r".*/cufile[^/]*\.json", cufile_settings),
        (r"/sys/.*/dm/uuid", dm_identity),
        (r"/sys/.*/properties", kfd_node),
        (r"/sys/.*/uevent", _lines(r"(DRIVER|PCI_CLASS|PCI_ID|PCI_SUBSYS_ID|PCI_SLOT_NAME)=[\w:.-]*")),
        (r"/sys/.*/resource", _lines(r"[0-9a-fx ]+")),
        (r"/sys/.*/(serial|wwid|unique_id|product_serial|product_uuid|board_serial|subsysnqn|address)", lambda _, _text: "\n"),
        (r"/sys/(bus|devices|class|module|kernel|block|dev|fs|hypervisor|firmware)/.*", _word),
        (r"/opt/rocm[^/]*/\.info/version(-dev)?", _word),
        (r".*/vllm/v1/core/kv_cache_utils\.py", seed_mark),
        (r"/lib/modules/[^/]+/modules\.dep|/usr/lib/modules/[^/]+/modules\.dep", _lines(r"[^:]*/amdgpu\.ko[^:]*:.*")),
        (r".*/lib(amdhip64|hipfile)\.so[^/]*", lambda _, text: text if text.encode() in MARKERS else ""),
    )
]


# Commands


def _only(pattern: str, flags: int = 0) -> Callable[[Keeper, str], str]:
    """Keep what matches, a line each, and nothing around it."""
    wanted = re.compile(pattern, flags)
    return lambda _, text: "".join(f"{found[0].strip()}\n" for line in text.splitlines() if (found := wanted.search(line)))


def smi(_: Keeper, text: str) -> str:
    rows = [f"{bdf} {name}" for bdf, name in kfd.smi_names(text).items() if re.fullmatch(r"[\w ()/.+-]{1,60}", name)]
    return "".join(f"{row}\n" for row in [*(["Platform: Linux Guest"] if kfd.smi_guest(text) else []), *rows])


def library(_: Keeper, text: str) -> str:
    answer: Any = {}
    for line in text.splitlines():
        try:
            answer = json.loads(line)
        except ValueError:
            continue
    rows = shape.objects(shape.mapping(answer).get("gpus"))
    return (
        json.dumps({"gpus": [{key: str(row.get(key, ""))[:60] for key in ("bdf", "name", "virtualization")} for row in rows]})
        + "\n"
    )


def ais_check(keeper: Keeper, text: str) -> str:
    """Its verdict lines, the release it saw, and the rows of its volume table that are about a KV path."""
    release = re.search(r"^Linux \S+ (\S+) ", text, re.MULTILINE)
    kept = [f"Linux host1 {release[1]} x86_64"] if release else []
    kept += [line for line in text.splitlines() if re.fullmatch(r"\s*[\w -]+?\s*:\s*(true|false)\s*", line, re.IGNORECASE)]
    found = parse_ais_check(text)
    rows = [row for row in found.volumes if row.mountpoint in keeper.points] if found else []
    if rows:
        table = [COLUMNS]
        for row in rows:
            device = row.device if LOCAL_SOURCE.fullmatch(row.device) else keeper.redactor.stand_in("volume", row.device)
            table.append((keeper.path(row.mountpoint), row.fstype, device, row.backing, row.o_direct, row.hipfile))
        widths = [max(len(row[i]) for row in table) for i in range(len(COLUMNS))]
        kept += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
    return "".join(f"{line}\n" for line in kept)


def gdscheck(_: Keeper, text: str) -> str:
    kept = [
        line
        for line in text.splitlines()
        if GDSCHECK_KEPT.fullmatch(line) or re.fullmatch(r"\s*GPU index \d+ [\w ()/.:,+-]*", line)
    ]
    if release := gds.gdscheck_kernel(text):
        kept.append(f"Arch: x86_64(Linux {release})")
    return "".join(f"{line}\n" for line in kept)


def kernel_log(_: Keeper, text: str) -> str:
    return "".join(f"{line}\n" for line in klog.essentials(text))


def engine_log(_: Keeper, text: str) -> str:
    """What rules look for in an engine's log, in words of our own: its lines hold models, prompts and keys."""
    kept = []
    for line in text.splitlines():
        if "PYTHONHASHSEED" in line and re.search(r"builtin hash|not set|without PYTHONHASHSEED", line):
            kept.append("builtin hash without PYTHONHASHSEED")
        if re.search(r"\[Errno 22\]|EINVAL|Invalid argument", line):
            kept.append("[Errno 22] Invalid argument")
        if (found := re.search(r"(?:v|version )(0\.\d{1,2}\.\d{1,2})\b", line)) and "vLLM" in line:
            kept.append(f"vLLM version {found[1]}")
        if found := re.search(r"tensor_parallel_size=(\d{1,3})", line):
            kept.append(f"tensor_parallel_size={found[1]}")
    return "".join(f"{line}\n" for line in dict.fromkeys(kept))


def build_log(_: Keeper, text: str) -> str:
    found = driver.FAILED.search(text)
    return f"{found[0]}\n" if found else ""


def dkms(_: Keeper, text: str) -> str:
    entries = driver.parse_dkms_status(text)
    kept = [f"amdgpu/{one.version}" + f", {one.kernel}, {one.arch}" * bool(one.kernel) + f": {one.state}" for one in entries]
    kept = [
        f"{line} ({one.note})" if re.fullmatch(r"[\w !]{1,60}", one.note) else line for line, one in zip(kept, entries, strict=True)
    ]
    if tree := driver.stale_tree(text):
        kept += [
            "Error! Could not locate dkms.conf file.",
            *([f"File: {tree}/source/dkms.conf does not exist."] if tree != "?" else []),
        ]
    if failed := driver.FAILED.search(text):
        kept.append(failed[0])
    return "".join(f"{line}\n" for line in kept)


def cufile_log(_: Keeper, text: str) -> str:
    number, _line = gds.parse_cufile_log(text)
    return "" if number is None else f"failed to get cuda p2p device address, errornum: {number}\n"


LSPCI = (
    r"^(?:[0-9a-f]{4}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7] .{0,120}|\bLnk(?:Cap|Sta):.{0,160}|\bACSCtl:.{0,160}"
    r"|-\[[0-9a-f]{4}:[0-9a-f]{2}\]-\+-00\.0 .{0,80}"
)

COMMANDS: list[tuple[re.Pattern[str], Callable[[Keeper, str], str]]] = [
    (re.compile(pattern), keep)
    for pattern, keep in (
        (r"uname-r\.out", _word),
        (r"modinfo-amdgpu\.out", _lines(r"(filename|version|srcversion|vermagic|intree):\s.*")),
        (r"modinfo-amdgpu\.err", _only(r"Module \w+ not found|not found")),
        (r"dkms-status\.(out|err)", dkms),
        (r"mokutil-sb\.(out|err)", _only(r"SecureBoot (enabled|disabled)")),
        (r"modprobe\.(out|err)", _only(r"Key was rejected by service")),
        (r"amd-smi\.out", smi),
        (
            r"(rocm-smi|rocminfo|nvidia-smi)\.(out|err)|(amd-smi|gdscheck|library-\w+|dmesg|journal|uname-r)\.err",
            lambda _, _text: "",
        ),
        (r"library-\w+\.out", library),
        (r"ais-check\.out", ais_check),
        (r"ais-check\.err", _only(r".*virtual function.*|No kernel config files found!|Unable to open /proc/kallsyms: [a-z ]+")),
        (r"gdscheck\.out", gdscheck),
        (r"cufile\.log", cufile_log),
        (r"(dmesg|journal)\.out", kernel_log),
        (r"engine\.log", engine_log),
        (r"lspci[\w-]*\.out", _only(LSPCI)),
        (r"lsmod\.out", modules),
        (r"df[\w-]*\.out", _lines(r"Filesystem.*|\S+\s+[\d.]+[KMGTP]?\s.*\s/dev/shm")),
        (r"systemd-detect-virt[\w-]*\.out", _word),
        (r".*(dkms|make|apt|dpkg|yum|dnf).*", build_log),
    )
]

JSON: dict[str, Callable[[Keeper, Any], Any]] = {
    "paths.json": Keeper.kv_paths,
    "processes.json": Keeper.processes,
    "segments.json": Keeper.segments,
    "python-packages.json": Keeper.packages,
    "scripts.json": Keeper.scripts,
    **{f"{key}.json": Keeper.scalars for key in ("ulimit", "shm", "devices", "nvidia-devices", "statx", "log")},
}


def mount_points(points: Iterable[str], paths: Iterable[str]) -> frozenset[str]:
    """Mount points worth keeping: those of KV paths and every folder above them, /, and /dev/shm."""
    above = set()
    for path in [*points, *paths]:
        parts = path.split("/")
        above |= {"/".join(parts[:i]) for i in range(2, len(parts) + 1)}
    return frozenset({*above, *points, "/", "/dev/shm"})  # noqa: S108 - a name to look for
