"""What is known about one host: a typed, versioned, JSON-serialisable document, and nothing but facts.

Collectors (`kvdoctor.collect`) fill it, rules (`kvdoctor.rules`) read it, and neither knows the other. `None` always means
"could not be learned"; an empty list or string means "learned, and there is none". Where the difference between "not
there" and "there, but unreadable" matters, a field of its own says so (`denied`). Bytes are integers, times are seconds.

Only dataclasses of plain values live here, so `dataclasses.asdict` is the JSON document.
"""

from dataclasses import asdict, dataclass, field
from typing import Any

SCHEMA = "kvdoctor.facts/1"


@dataclass
class ToolRun:
    """One external command: what it printed, or why it did not answer.

    `state` is ok (it ended; see `rc`), missing (not installed), hung (killed at its deadline) or abandoned (it survived
    SIGKILL, which only a child in uninterruptible sleep does; `pid`, `proc_state` and `wchan` say where it sits).
    """

    key: str
    argv: list[str] = field(default_factory=list)
    state: str = "ok"
    rc: int = 0
    out: str = ""
    err: str = ""
    seconds: float = 0.0
    pid: int = 0
    proc_state: str = ""
    wchan: str = ""

    @property
    def answered(self) -> bool:
        """Whether it ran to its end and was there to run (127 is the shell's "command not found")."""
        return self.state == "ok" and self.rc not in (126, 127)


@dataclass
class Link:
    """A PCIe link: what it runs at and what it could (GT/s and lanes), None where sysfs does not say."""

    speed: float | None = None
    width: int | None = None
    max_speed: float | None = None
    max_width: int | None = None


@dataclass
class Gpu:
    """One GPU function, by PCI address. `chain` is its bridges from the root port down to itself, root bus first."""

    bdf: str
    vendor: str = ""
    device: str = ""
    pci_class: str = ""
    name: str = ""
    driver: str | None = None
    chain: list[str] = field(default_factory=list)
    numa: int | None = None
    link: Link = field(default_factory=Link)
    vram: int | None = None
    vram_visible: int | None = None
    p2pmem: int | None = None
    """Bytes registered for peer DMA (p2pmem/size); None where the directory is absent."""
    virtual_function: bool = False
    virtualization: str = ""
    """What the vendor's library says: guest (a virtual function), passthrough, host, baremetal; '' where it was not asked."""
    bar0: int | None = None
    iommu: str = ""


@dataclass
class KfdNode:
    """One node of the KFD topology that has SIMDs (a GPU), or cores and SIMDs (an APU)."""

    node: int
    cpu_cores: int = 0
    simds: int = 0
    gfx: int = 0
    vendor: int = 0
    device: int = 0
    domain: int = 0
    location: int = 0
    capability: int | None = None
    local_mem: int | None = None


@dataclass
class ModuleFile:
    """A kernel module file on disk, from modinfo or from its own .modinfo section."""

    filename: str = ""
    version: str = ""
    srcversion: str = ""
    intree: bool = False
    vermagic: str = ""
    signer: str = ""

    @property
    def kernel(self) -> str:
        """The release it was built for: from vermagic, else from its folder below /lib/modules."""
        if self.vermagic:
            return self.vermagic.split()[0]
        parts = self.filename.split("/")
        return parts[parts.index("modules") + 1] if "modules" in parts[:-1] else ""


@dataclass
class DkmsEntry:
    """One line of `dkms status`: kernel is empty where the tree is only added."""

    version: str
    kernel: str = ""
    arch: str = ""
    state: str = ""
    note: str = ""


@dataclass
class AmdDriver:
    """The amdgpu kernel driver: what is loaded, what is on disk, what dkms and Secure Boot say."""

    loaded: bool | None = None
    initstate: str = ""
    version: str = ""
    srcversion: str = ""
    param_ais_disabled: str | None = None
    conf_ais_disabled: list[str] = field(default_factory=list)
    """Files (or "kernel command line") that set ais_disabled=1 for the next load."""
    disk: ModuleFile | None = None
    disk_asked: bool = False
    disk_missing: bool = False
    """modinfo answered: there is no such module for this kernel."""
    disk_foreign: bool = False
    """The module tree that was asked is this container's, not the host's."""
    dkms: list[DkmsEntry] | None = None
    dkms_asked: bool = False
    dkms_stale: str = ""
    dkms_failed: str = ""
    secure_boot: bool | None = None
    key_rejected: str = ""


@dataclass
class IoFailure:
    """A line of the kernel log in which AIS refused a request."""

    text: str
    errno: int | None = None


@dataclass
class KernelLog:
    """What the kernel log says about AIS. `whole` is whether it reaches back to the driver's load."""

    source: str = ""
    whole: bool = False
    registered: dict[str, int] = field(default_factory=dict)
    driver_versions: list[str] = field(default_factory=list)
    failures: list[IoFailure] = field(default_factory=list)
    bar_lines: list[str] = field(default_factory=list)
    key_rejected: str = ""
    secure_boot: bool | None = None


@dataclass
class AisVolume:
    """A row of ais-check's volume table."""

    mountpoint: str
    fstype: str = ""
    device: str = ""
    backing: str = ""
    o_direct: str = ""
    hipfile: str = ""


@dataclass
class AisCheck:
    """The vendor's tool, as it answered: a cross-check, never the verdict."""

    p2pdma: bool | None = None
    hip: bool | None = None
    amdgpu: bool | None = None
    volume: bool | None = None
    volumes: list[AisVolume] = field(default_factory=list)
    virtual_functions: list[str] = field(default_factory=list)
    rc: int | None = None


@dataclass
class Kernel:
    """The running kernel: release, the options and symbols that decide, CPU and host bridges, IOMMU, huge pages."""

    release: str = ""
    cmdline: str = ""
    config: dict[str, str] | None = None
    config_path: str = ""
    symbols: list[str] | None = None
    """Which of `collect.kernel.SYMBOLS` are in kallsyms; None where it could not be read."""
    symbols_denied: bool = False
    cpu_vendor: str = ""
    cpu_family: int | None = None
    hypervisor: bool = False
    host_bridges: dict[str, str] = field(default_factory=dict)
    """Root bus "0000:00" -> "8086:7d1b" of its device 00.0."""
    acs_readable: bool | None = None
    acs_redirect: list[str] = field(default_factory=list)
    acs_clear: int = 0
    iommu_groups: int | None = None
    iommu_devices: list[str] = field(default_factory=list)
    hugepages_total: int | None = None
    hugepage_bytes: int | None = None
    thp: str = ""


@dataclass
class Rocm:
    """ROCm's user space where this runs: None where nothing was found or nothing could be looked at."""

    looked: bool = False
    version: str = ""
    version_path: str = ""
    hip_libraries: dict[str, bool] = field(default_factory=dict)
    """libamdhip64 -> whether it holds hipAmdFileRead."""
    hipfile_libraries: list[str] = field(default_factory=list)
    hipfile_python: str | None = None
    library_folders: list[str] = field(default_factory=list)


@dataclass
class Mount:
    """A line of mountinfo."""

    dev: str
    root: str
    point: str
    fstype: str
    source: str
    options: list[str] = field(default_factory=list)
    super_options: list[str] = field(default_factory=list)


@dataclass
class Block:
    """A block device of a path's stack. `pci` is the function it hangs on; `slaves` are names of what lies below."""

    name: str
    dev: str = ""
    syspath: str = ""
    kind: str = ""
    """nvme, nvme-head, nvme-fabric, md, lvm, crypt, mpath, dm, loop, virtio, scsi, zram, other."""
    transport: str = ""
    pci: str = ""
    chain: list[str] = field(default_factory=list)
    slaves: list[str] = field(default_factory=list)
    detail: str = ""
    """md level, dm uuid, subsystem: what `kind` was decided by."""
    numa: int | None = None
    link: Link = field(default_factory=Link)
    link_virtual: bool = False
    model: str = ""
    rotational: bool | None = None
    md_state: str = ""
    md_degraded: int = 0
    slave_nodes_missing: list[str] = field(default_factory=list)


@dataclass
class DirectIo:
    """What O_DIRECT really does in a folder: the open, a write, and statx's alignment (None where the bit is absent)."""

    opened: bool | None = None
    error: str = ""
    mem_align: int | None = None
    offset_align: int | None = None
    write_error: str = ""
    unaligned_error: str = ""
    how: str = ""


@dataclass
class Proof:
    """What a real direct write and read below a path gave (only with --prove)."""

    bytes: int = 0
    write_bytes_per_s: float | None = None
    """The fsync at its end included."""
    read_bytes_per_s: float | None = None
    fsync_s: float | None = None
    direct: bool = False
    same: bool | None = None
    error: str = ""
    errno: int | None = None
    given_up: bool = False
    """It did not end within its time: nothing is proven either way."""


@dataclass
class GpuProof:
    """What a strict GPU-direct write and read below a path gave. `counted` is bytes the kernel saw as peer DMA."""

    library: str
    bytes: int = 0
    write_bytes_per_s: float | None = None
    read_bytes_per_s: float | None = None
    counted: int | None = None
    same: bool | None = None
    error: str = ""
    step: str = ""
    given_up: bool = False


@dataclass
class KvPath:
    """One folder that holds, or is to hold, KV files."""

    path: str
    origin: str = ""
    exists: bool | None = None
    is_dir: bool | None = None
    writable: bool | None = None
    dangling: bool = False
    """It is a link to what is not there."""
    probe_error: str = ""
    hung: str = ""
    """Non-empty where a system call on it did not return: how long was waited, and what it sleeps in."""
    total: int | None = None
    free: int | None = None
    free_files: int | None = None
    held: int = 0
    """Bytes of KV files that already lie there: they count towards `want`."""
    mount: Mount | None = None
    resolved: str = ""
    """How the block device was found: sysfs (by number), source (by the mount's source name), or empty."""
    stack: list[Block] = field(default_factory=list)
    user: int | None = None
    """The uid of the running kvd whose path it is, where that is known."""
    journal: str | None = None
    """ext4: ordered, writeback, journal, none; None where unreadable or not ext4."""
    journal_source: str = ""
    direct: DirectIo | None = None
    want: int | None = None
    proof: Proof | None = None
    gpu_proof: GpuProof | None = None


@dataclass
class MdArray:
    """A line pair of /proc/mdstat."""

    name: str
    active: bool = True
    level: str = ""
    members: list[str] = field(default_factory=list)
    missing: int = 0
    rebuilding: str = ""


@dataclass
class Limits:
    """Sizes and ceilings of the account and the container this runs in."""

    shm: int | None = None
    shm_free: int | None = None
    shm_source: str = ""
    memlock: int | None = None
    """Soft limit in bytes; -1 is unlimited."""
    nofile: int | None = None
    cap_ipc_lock: bool = False
    memory_max: int | None = None
    """Bytes the daemon's control group may use; -1 is no limit."""
    memory_group: str = ""
    arena: int | None = None


@dataclass
class Engine:
    """An engine, or what is known of one: its hash seed, its vLLM, and the flags that decide about caching."""

    pid: int = 0
    name: str = ""
    args: list[str] = field(default_factory=list)
    environ: dict[str, str] | None = None


@dataclass
class Engines:
    """Every engine found, and the vLLM that is installed where this runs."""

    processes: list[Engine] = field(default_factory=list)
    vllm_version: str = ""
    vllm_fixed_seed: bool | None = None
    """Whether the installed vLLM falls back on a fixed seed for its block hashes; None where no vLLM is installed."""
    lmcache_version: str = ""
    log_builtin_hash: str = ""
    log_odirect_error: str = ""
    log_tensor_parallel: int | None = None


@dataclass
class Nvidia:
    """The NVIDIA side: driver flavour, registry keys, nvidia-fs, cuFile, gdscheck."""

    driver_version: str = ""
    open_kernel_module: bool | None = None
    open_source: str = ""
    regkeys: str | None = None
    fs_loaded: bool | None = None
    fs_version: str = ""
    fs_ops: int | None = None
    gdscheck: dict[str, str] | None = None
    """Its "name : value" lines, names as printed, in lower case."""
    gdscheck_gpus: list[str] = field(default_factory=list)
    gdscheck_verified: bool | None = None
    gdscheck_kernel: str = ""
    cufile: dict[str, str] = field(default_factory=dict)
    """Flattened cufile.json: "properties.use_pci_p2pdma" -> "true"."""
    cufile_path: str = ""
    cufile_error: int | None = None
    cufile_error_line: str = ""
    devices_tried: bool = False
    devices_denied: list[str] = field(default_factory=list)


@dataclass
class Scripts:
    """A console script of ours and every distribution that claims its name."""

    name: str
    owners: list[str] = field(default_factory=list)


@dataclass
class SegmentFact:
    """A shared-memory file of this toolkit: a pool segment or a stats segment, as it was found."""

    name: str
    kind: str = ""
    health: str = ""
    """ok, stale (its writer is gone), frozen (no heartbeat), broken (unreadable), unknown (another tool's)."""
    detail: str = ""
    age_s: float | None = None
    """Seconds since its writer's last heartbeat."""
    values: dict[str, float] = field(default_factory=dict)
    folder: str = "/dev/shm"  # noqa: S108 - where it was found


@dataclass
class Environment:
    """Where this runs: container, privileges, virtual machine."""

    container_markers: list[str] = field(default_factory=list)
    in_container: bool = False
    euid: int | None = None
    capabilities: list[str] = field(default_factory=list)
    user_namespace: bool = False
    """Not the first one: a capability held there lifts no limit of the host's."""
    dmesg_restrict: str = ""
    kptr_restrict: str = ""
    lockdown: str = ""
    virtual_machine: str = ""
    os_name: str = ""
    hostname: str = ""


@dataclass
class Facts:
    """One host, seen once. `partial` marks a hand-made or incomplete capture: what is missing there proves nothing."""

    schema: str = SCHEMA
    case: str = ""
    context: str = "live"
    partial: bool = False
    files_captured: bool = True
    """False where a capture holds command output only, no file of the host."""
    env: dict[str, str] = field(default_factory=dict)
    environment: Environment = field(default_factory=Environment)
    gpus: list[Gpu] = field(default_factory=list)
    pci_captured: bool = True
    """Whether the PCI tree could be listed: where it could not, no GPU seen means nothing."""
    pci_unread: list[str] = field(default_factory=list)
    """PCI functions whose class or vendor could not be read: any of them may be a GPU."""
    kfd: list[KfdNode] | None = None
    kfd_denied: list[str] = field(default_factory=list)
    device_access: dict[str, str] | None = None
    """/dev/kfd and /dev/dri/renderD*: "ok" or the errno name; None where this cannot be tried."""
    driver: AmdDriver = field(default_factory=AmdDriver)
    kernel: Kernel = field(default_factory=Kernel)
    log: KernelLog | None = None
    ais_check: AisCheck | None = None
    rocm: Rocm = field(default_factory=Rocm)
    nvidia: Nvidia = field(default_factory=Nvidia)
    paths: list[KvPath] = field(default_factory=list)
    md: list[MdArray] | None = None
    nvme_multipath: str | None = None
    limits: Limits = field(default_factory=Limits)
    engines: Engines = field(default_factory=Engines)
    scripts: list[Scripts] = field(default_factory=list)
    segments: list[SegmentFact] = field(default_factory=list)
    tools: dict[str, ToolRun] = field(default_factory=dict)
    denied: dict[str, str] = field(default_factory=dict)
    """Files that exist and could not be read: path -> errno name, LOST where a capture once held it and no longer does."""
    lost: list[str] = field(default_factory=list)
    """What a capture's own list names and the capture no longer holds, or holds shorter."""
    captured: bool = False
    """Judged from a capture, not looked at."""
    redacted: bool = False
    """The capture says that names and addresses in it are stand-ins."""
    foreign: bool = False
    """The host is another root's (--root): its files are there, its processes, limits and environment are not."""
    seconds: float = 0.0

    @property
    def amd(self) -> list[Gpu]:
        return [gpu for gpu in self.gpus if gpu.vendor == "1002"]

    @property
    def nvidia_gpus(self) -> list[Gpu]:
        return [gpu for gpu in self.gpus if gpu.vendor == "10de"]

    def tool(self, key: str) -> ToolRun | None:
        return self.tools.get(key)

    def to_json(self) -> dict[str, Any]:
        """The document as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Any) -> "Facts":
        """Facts from `to_json`'s document, checked field by field. Raises UsageError for any other document."""
        import msgspec  # 20 ms: only those pay who read a document back

        from kvtools.errors import UsageError

        known = document.get("schema") if isinstance(document, dict) else None
        if known != SCHEMA:
            raise UsageError(f"not a facts document of this version: schema {known!r}", hint=f"it must say {SCHEMA}")
        try:
            return msgspec.convert(document, cls)
        except msgspec.ValidationError as error:
            raise UsageError(f"a facts document that does not fit: {error}", hint="write it with Facts.to_json") from None
