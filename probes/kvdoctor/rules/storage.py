"""Each KV path: is it there, writable and roomy, on which file system, in which journal mode, with which NFS options?"""

from kvdoctor.facts import Facts, KvPath
from kvdoctor.parse.versions import decimal
from kvdoctor.results import Result, file_evidence
from kvdoctor.rules.base import absent, check, direct_only, each_path, has_amd, missing, other_host, quote, result, skip, unknown
from kvtools.units import format_size

GOOD = ("xfs", "ext4")
NETWORK = ("nfs", "nfs4")
PARALLEL = ("lustre", "wekafs", "beegfs", "gpfs", "scatefs", "ceph", "glusterfs", "cifs", "smb3", "9p", "virtiofs")
HUNG_FIX = "A dead network mount or a frozen file system: look at the mount, and at the kernel log."
MIN_ROOM = 16 << 20
"""Below this a tier holds next to nothing: a chunk alone is larger."""
PSEUDO = (
    *("proc", "sysfs", "cgroup", "cgroup2", "debugfs", "tracefs", "securityfs", "configfs", "devpts", "mqueue", "pstore"),
    *("bpf", "efivarfs", "fusectl", "binfmt_misc", "nsfs", "selinuxfs"),
)
"""What the kernel shows as files and no file can be put into."""
NO_BLOCK = ("overlay", "tmpfs", "ramfs", "zfs", "squashfs")


@check("storage.exists", "P", "KV path is there")
def exists(facts: Facts) -> list[Result]:
    """A directory that answers. A path that hangs is a failure, not a mystery."""

    def rule(facts: Facts, path: KvPath) -> Result:
        if path.exists is None and path.hung:
            return result("fail", f"does not answer: {path.hung}", fix=HUNG_FIX)
        if path.exists is None:
            return unknown(f"stat says {path.probe_error}") if path.probe_error else absent(facts, "what stat says of it")
        if path.probe_error in ("ELOOP", "ENAMETOOLONG", "ENOTDIR"):
            why = {"ELOOP": "its links go in a circle", "ENAMETOOLONG": "its name is too long"}
            return result("fail", why.get(path.probe_error, "a part of it is no directory"), fix="Name a directory.")
        if path.dangling:
            target = f'"$(readlink -m -- {quote(path.path)})"'
            return result(
                "fail",
                "a link to a directory that is not there",
                fix=f"Create what it points at, or mount it: mkdir -p {target}",
                commands=[f"install -d -m 0700 {target}"],
            )
        if not path.exists:
            return result(
                "fail",
                "no such directory",
                fix=f"Create it: mkdir -p {quote(path.path)}",
                commands=[f"install -d -m 0700 {quote(path.path)}"],
            )
        if path.is_dir is False:
            return result("fail", "not a directory", fix="Name a directory.")
        if path.mount and path.mount.fstype in PSEUDO:
            return result(
                "fail",
                f"on {path.mount.fstype}, which holds no files of anybody's: no place for a tier",
                fix="Name a directory on a drive's file system.",
                evidence=[file_evidence("/proc/self/mountinfo", f"{path.mount.point} {path.mount.fstype}")],
            )
        return result("pass", "a directory")

    return each_path(facts, rule)


@check("storage.writable", "P", "KV path can be written")
def writable(facts: Facts) -> list[Result]:
    """Mounted read-write, and writable by this user."""

    def rule(facts: Facts, path: KvPath) -> Result:
        if path.mount and ("ro" in path.mount.options or "ro" in path.mount.super_options):
            return result(
                "fail",
                f"{path.mount.point} is mounted read-only",
                fix="Mount it read-write. If it turned read-only by itself, the kernel log has the I/O error.",
                commands=[f"mount -o remount,rw {quote(path.mount.point)}"],
                evidence=[file_evidence("/proc/self/mountinfo", ",".join(path.mount.options))],
            )
        if path.hung and path.exists:
            return result("fail", f"a write does not return: {path.hung}", fix=HUNG_FIX)
        if path.writable is None and facts.foreign and path.exists:
            return other_host("whether its daemon may write there")
        if path.writable is None:
            return skip("the directory does not answer") if path.exists is False or path.hung else absent(facts, "its permissions")
        if not path.writable and path.user is not None and path.user != facts.environment.euid:
            told = f"the running kvd, uid {path.user}, writes there; uid {facts.environment.euid}, which asks, may not"
            return result("info", told, why="Whether the daemon may is its own answer: run kvdoctor as its user, or kvd stats.")
        if not path.writable and facts.environment.euid == 0:
            return result(
                "fail",
                "uid 0 itself may not write there",
                fix="It is immutable (lsattr -d shows an i: chattr -i), or its server maps root to nobody.",
                commands=[f"lsattr -d {quote(path.path)}"],
            )
        if not path.writable:
            return result("fail", f"uid {facts.environment.euid} may not write there", fix="Give the daemon's user the directory.")
        return result("pass", "writable")

    return each_path(facts, rule)


@check("storage.space", "P", "Free space")
def space(facts: Facts) -> list[Result]:
    """statvfs against what the tier is to hold. Project quotas are not visible this way."""

    def rule(facts: Facts, path: KvPath) -> Result:
        if path.free is None or not path.total:
            return skip("the directory does not answer") if path.exists is False or path.hung else absent(facts, "free space")
        told = f"{format_size(path.free)} of {format_size(path.total)} free"
        if path.want and path.free + path.held < path.want:
            return result("fail", f"{told}, --long-bytes asks {format_size(path.want)}", fix="Make room, or lower --long-bytes.")
        if path.free_files is not None and path.free_files < 1000:
            return result(
                "fail",
                f"{told}, but {path.free_files} files more",
                fix="The file system is out of inodes: remove files, or make it anew with more.",
            )
        point = path.mount.point if path.mount else path.path
        room = [f"du -xh --max-depth=2 {quote(point)} | sort -h | tail -n 20"]
        if path.free + path.held < MIN_ROOM:
            return result(
                "fail",
                told,
                expected=f"{format_size(MIN_ROOM)} or more",
                fix=f"Make room below {point}, or name a directory elsewhere.",
                commands=room,
            )
        if path.free < path.total // 5:
            return result(
                "warn",
                told,
                expected="20 % or more",
                why="A nearly full file system slows down and leaves the tier no room to grow.",
                fix=f"Make room below {point}, or name a directory elsewhere.",
                commands=room,
            )
        return result("pass", told, why="A project quota would not show here.")

    return each_path(facts, rule)


@check("storage.fs", "R", "File system")
def filesystem(facts: Facts) -> list[Result]:
    """xfs and ext4; hipFile refuses the rest (and looks a file up by st_dev, which fails on overlay and btrfs)."""
    return each_path(facts, lambda facts, path: direct_only(facts, filesystem_of(facts, path)))


def filesystem_of(facts: Facts, path: KvPath) -> Result:
    if path.mount is None:
        return missing(facts, "the mount table")
    kind = path.mount.fstype
    evidence = [file_evidence("/proc/self/mountinfo", f"{path.mount.point} {kind} {path.mount.source}")]
    if kind in GOOD:
        return result("pass", kind, evidence=evidence)
    if kind in NETWORK:
        return result(
            "warn", f"{kind}: see storage.nfs", evidence=evidence, fix="GPU-direct over NFS needs RDMA and a recent driver."
        )
    override = facts.env.get("HIPFILE_UNSUPPORTED_FILE_SYSTEMS", "").lower() in ("1", "true")
    if override and has_amd(facts):
        return result(
            "warn",
            f"{kind}, and HIPFILE_UNSUPPORTED_FILE_SYSTEMS=true makes hipFile take it all the same",
            why="The library's refusal protects data: on such a file system direct and cached writes can disagree.",
            fix=f"Unset the variable and put {path.path} on xfs or ext4.",
            evidence=evidence,
        )
    if kind in PARALLEL and not has_amd(facts):
        return result(
            "warn", f"{kind}: its vendor's own GDS support decides", evidence=evidence, fix="Look for its line in gdscheck -p."
        )
    inside = facts.environment.in_container and kind == "overlay"
    return result(
        "fail",
        f"{path.path} is on {kind}",
        expected="xfs or ext4",
        why="The image's own layer cannot do direct I/O for a GPU." if inside else "",
        fix="Mount a host directory as a volume instead of using the image's layer."
        if inside
        else f"Put {path.path} on xfs or ext4 directly on an NVMe partition.",
        evidence=evidence,
    )


@check("storage.journal", "R", "ext4 journal mode")
def journal(facts: Facts) -> list[Result]:
    """From /proc/fs/ext4/<device>/options: the mount table does not show a mode that comes from the superblock."""
    return each_path(facts, lambda facts, path: direct_only(facts, journal_of(facts, path)))


def journal_of(facts: Facts, path: KvPath) -> Result:
    if path.mount is None:
        return missing(facts, "the mount table")
    if path.mount.fstype == "xfs":
        return result("pass", "xfs journals metadata only")
    if path.mount.fstype != "ext4":
        return result("pass", f"{path.mount.fstype} has no ext4 journal")
    evidence = [file_evidence(path.journal_source, f"data={path.journal}")]
    if path.journal in ("ordered", "assumed ordered"):
        sure = path.journal == "ordered" and path.journal_source.startswith("/proc/fs")
        return result("pass", path.journal, confidence="high" if sure else "low", evidence=evidence)
    if path.journal == "none":
        return result(
            "warn",
            "no journal",
            why="hipFile takes it for ordered; after a crash the file system needs a check.",
            evidence=evidence,
        )
    if path.journal in ("writeback", "journal"):
        visible = any(option.startswith("data=") for option in path.mount.super_options)
        device, point = quote(path.mount.source), quote(path.mount.point)
        return result(
            "fail",
            f"ext4 runs data={path.journal}"
            + ("" if visible else ", which the mount table does not show: it comes from the superblock"),
            expected="ordered",
            why="hipFile and ais-check take a missing data= for ordered and go the fast path on it." if not visible else "",
            fix="Unmount and mount with data=ordered (a remount is refused)."
            + ("" if visible else " The superblock's default goes with tune2fs."),
            commands=[
                f"umount {point}",
                *([] if visible else [f"tune2fs -o ^journal_data{'_writeback' if path.journal == 'writeback' else ''} {device}"]),
                f"mount -o data=ordered {device} {point}",
            ],
            evidence=evidence,
        )
    if path.journal is None:
        return unknown("the journal mode is not shown (/proc/fs/ext4/DEVICE/options)", evidence=evidence)
    return unknown(f"journal mode {path.journal!r} is not known", evidence=evidence)


@check("storage.nfs", "i", "NFS options")
def nfs(facts: Facts) -> list[Result]:
    """Hard or soft, transport, nconnect, transfer sizes; GPU-direct only over RDMA with a driver that checks the transports."""

    def rule(facts: Facts, path: KvPath) -> Result:
        if path.mount is None or path.mount.fstype not in NETWORK:
            return skip("not NFS")
        options = dict(option.partition("=")[::2] for option in [*path.mount.options, *path.mount.super_options])
        evidence = [file_evidence("/proc/self/mountinfo", ",".join(path.mount.super_options))]
        if "soft" in options:
            return result(
                "fail",
                "mounted soft: a slow server turns into I/O errors and lost writes",
                expected="hard",
                fix="Mount it hard.",
                evidence=evidence,
            )
        proto = options.get("proto", "tcp")
        words = []
        if not proto.startswith("rdma"):
            words.append(f"proto={proto}: GPU-direct needs RDMA")
        elif facts.kernel.symbols is not None and not {"nfs_check_all_transports_p2p", "kfd_ais_get_storage_type"} & set(
            facts.kernel.symbols
        ):
            words.append("RDMA, but this driver does not take NFS (amdgpu-dkms 31.40 or later does)")
        connections = decimal(options.get("nconnect", "")) or 1
        if connections < 16:
            words.append(f"nconnect={connections}: 16 or more are wanted")
        sizes = [size for name in ("rsize", "wsize") if (size := decimal(options.get(name, ""))) is not None]
        if sizes and min(sizes) < 4 << 20 and not words:
            words.append(f"transfers of {format_size(min(sizes))} split larger chunks")
        if words:
            return result(
                "warn" if len(words) > 1 or not words[0].startswith("transfers") else "info",
                "; ".join(words),
                fix="Mount with hard, nconnect=16 and, where the network has it, proto=rdma.",
                commands=[f"mount -o hard,nconnect=16,vers=4.2 {quote(path.mount.source)} {quote(path.mount.point)}"],
                evidence=evidence,
            )
        return result("pass", f"hard, {proto}, nconnect={connections}", evidence=evidence)

    return each_path(facts, rule)
