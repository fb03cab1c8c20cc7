"""What a KV path lies on: the walk from its file system's device down to PCI functions, and the health of what is there."""

from kvdoctor.facts import Block, Facts, KvPath
from kvdoctor.results import WORST, Result, file_evidence
from kvdoctor.rules.base import absent, check, direct_only, each_path, missing, quote, rebuild_initramfs, result, skip, unknown
from kvdoctor.rules.storage import NETWORK, NO_BLOCK, PARALLEL

MAX_LVM_SLAVES, MAX_LVM_DEPTH = 16, 4


def _behind(path: KvPath) -> str:
    """'md0 (raid0) over nvme1n1, nvme2n1'."""
    if not path.stack:
        return "nothing known"
    head, below = path.stack[0], path.stack[1:]
    detail = head.detail if head.kind == "md" else head.kind if head.kind != "nvme" else ""
    return head.name + (f" ({detail})" if detail else "") + (f" over {', '.join(block.name for block in below)}" if below else "")


@check("storage.backing", "R", "What the path lies on")
def backing(facts: Facts) -> list[Result]:
    """The walk from the file system's device through md, LVM and crypt down to PCI functions."""
    return each_path(facts, lambda facts, path: direct_only(facts, backing_of(facts, path)))


def backing_of(facts: Facts, path: KvPath) -> Result:
    if path.mount is None:
        return missing(facts, "the mount table")
    kind = path.mount.fstype
    if kind in NETWORK or kind in PARALLEL:
        return result(
            "warn",
            f"{path.mount.source}, over the network",
            fix="GPU-direct there is the network file system's own matter: see storage.nfs.",
        )
    if not path.stack:
        if kind in NO_BLOCK or kind.startswith("fuse"):
            return result("pass", f"{kind} has no block device of its own: storage.fs decides", confidence="low")
        return unknown(f"the device {path.mount.dev} ({path.mount.source}) was not found in sysfs")
    evidence = [file_evidence(block.syspath or block.name, f"{block.kind} {block.detail}".strip()) for block in path.stack[:4]]
    kinds = {block.kind for block in path.stack}
    leaves = [block for block in path.stack if not block.slaves]
    answer = (
        _no_way(path, kinds)
        or _fabric(facts, leaves)
        or (_md(facts, path) if "md" in kinds else None)
        or (_lvm(facts, path, leaves) if "lvm" in kinds else None)
        or (
            result("fail", f"{_behind(path)}: a device-mapper target of its own", fix="Use a plain NVMe partition.")
            if "dm" in kinds
            else None
        )
        or _plain(path, leaves)
    )
    answer.evidence = [*answer.evidence, *evidence]
    if path.resolved == "source" and answer.status == "pass":
        answer.confidence = "low"
    return answer


def _no_way(path: KvPath, kinds: set[str]) -> Result | None:
    """Kinds that can never do it, whatever lies around them."""
    if doubtful := next((block for block in path.stack if block.kind == "nvme-unknown"), None):
        return unknown(f"{doubtful.detail} names no transport of NVMe")
    if "crypt" in kinds:
        return result(
            "fail",
            f"encrypted: {_behind(path)}",
            why="Encryption needs the CPU in the path; newer drivers do not look at the target's type, which makes it dangerous.",
            fix="Use a plain partition, or self-encrypting drives.",
        )
    if "mpath" in kinds:
        return result("fail", f"device-mapper multipath: {_behind(path)}", fix="Use the drive without multipath.")
    if "nvme-head" in kinds:
        return result("pass", f"{_behind(path)}: NVMe; storage.multipath decides", confidence="low")
    other = sorted(kinds & {"loop", "virtio", "scsi", "zram", "other"})
    if other:
        return result(
            "fail",
            f"{_behind(path)}: {other[0]}, not NVMe",
            expected="NVMe on PCIe",
            why="The POSIX tier works on it; peer DMA needs an NVMe drive behind the file.",
            fix="Put the path on a local NVMe drive.",
        )
    return None


def _fabric(facts: Facts, leaves: list[Block]) -> Result | None:
    remote = [block for block in leaves if block.kind == "nvme-fabric"]
    if not remote:
        return None
    kinds = ", ".join(sorted({block.transport for block in remote}))
    if all(block.transport == "rdma" for block in remote):
        return result(
            "warn",
            f"NVMe over {kinds}",
            fix="Needs the driver generation with NVMe-oF (amdgpu-dkms 31.40 or later); prove it here.",
        )
    return result("fail", f"NVMe over {kinds}", expected="NVMe on PCIe, or over RDMA", fix="Use local NVMe.")


def _md(facts: Facts, path: KvPath) -> Result:
    from kvdoctor.rules.ais import enodev

    array = next(block for block in path.stack if block.kind == "md")
    level = array.detail or "RAID"
    refusal = enodev(facts)
    if refusal:
        return result(
            "fail",
            f"{path.path} is on md {level}, and the kernel refused AIS requests with -19",
            why="No PCI device stands behind an md array: the kernel log shows that it was tried.",
            fix="Use separate drives, one KV root a drive.",
            evidence=[file_evidence(facts.log.source if facts.log else "kernel log", refusal.text)],
        )
    parity = level in ("raid4", "raid5", "raid6")
    mirrored = level in ("raid1", "raid10")
    why = "Sources disagree whether AIS takes it: a field report has 20.8 GB/s on seven drives, AMD's documents say "
    why += "not supported, the kernel finds no PCI parent."
    if parity:
        why += " Parity needs the CPU to see the data, so expect a refusal."
    elif mirrored:
        why += " A mirror writes twice, which peer DMA does not do."
    return result(
        "warn",
        f"{path.path} is on software RAID: {_behind(path)}",
        expected="a plain NVMe partition",
        why=why,
        fix=f"Prove it on this host: kvdoctor --prove --path {quote(path.path)} (strict mode). "
        "If that fails, use separate drives, one KV root a drive.",
        commands=[f"kvdoctor --prove --path {quote(path.path)}"],
        confidence="medium",
    )


def _lvm(facts: Facts, path: KvPath, leaves: list[Block]) -> Result:
    symbols = facts.kernel.symbols
    local = all(block.kind == "nvme" and block.pci for block in leaves)
    depth = len({block.syspath for block in path.stack}) - len(leaves)
    hidden = [name for block in path.stack for name in block.slave_nodes_missing]
    told = f"LVM: {_behind(path)}"
    fix = "LVM works only with a driver that walks device-mapper. "
    if symbols is None:
        return result(
            "warn",
            told,
            why="It cannot be told which driver this is.",
            fix=fix + "Prove it here: kvdoctor --prove.",
            confidence="low",
        )
    if "get_pci_dev_from_dm" not in symbols:
        return result(
            "warn",
            told,
            why="This driver does not walk device-mapper (no get_pci_dev_from_dm).",
            fix=fix + "Update amdgpu-dkms, or use a plain partition.",
        )
    if not local or len(leaves) > MAX_LVM_SLAVES or depth > MAX_LVM_DEPTH:
        why = "not every drive below is local NVMe" if not local else "too many drives or layers for the driver's walk (16, 4)"
        return result("warn", told, why=why, fix="Use a plain NVMe partition.")
    if hidden:
        return result(
            "warn",
            told,
            why=f"/dev/{hidden[0]} is not in this container, and the driver opens it.",
            fix="Pass the drives' nodes to the container.",
        )
    return result("pass", f"{told}; this driver walks it")


def _plain(path: KvPath, leaves: list[Block]) -> Result:
    lost = [block.name for block in leaves if block.kind == "nvme" and not block.pci]
    if lost:
        return unknown(f"no PCI function above {', '.join(lost)} is known")
    return result("pass", _behind(path) + (f" at {leaves[0].pci}" if len(leaves) == 1 else ""))


@check("storage.multipath", "R", "NVMe multipath head")
def multipath(facts: Facts) -> list[Result]:
    """A head (/virtual/nvme-subsystem/ in its real path) has a normal name and no PCI parent. multipath=Y alone is harmless."""

    def rule(facts: Facts, path: KvPath) -> Result:
        heads = [block for block in path.stack if block.kind == "nvme-head"]
        if heads:
            return direct_only(
                facts,
                result(
                    "fail",
                    f"{heads[0].name} is a multipath head of {heads[0].detail}",
                    expected="a drive on its own PCI path",
                    fix="If the second path is not needed: options nvme_core multipath=N, rebuild the initramfs, reboot. "
                    "Real dual-port failover is lost with it.",
                    commands=[
                        "echo 'options nvme_core multipath=N' > /etc/modprobe.d/nvme-multipath.conf",
                        rebuild_initramfs(facts),
                        "reboot",
                    ],
                    evidence=[file_evidence(heads[0].syspath)],
                ),
            )
        if path.mount is None:
            return direct_only(facts, missing(facts, "the mount table"))
        if not any(block.kind == "nvme" for block in path.stack):
            return result("pass", "no NVMe drive under this path")
        more = " (multipath=Y, and no head here)" if facts.nvme_multipath == "Y" else ""
        return result("pass", f"PCI path{more}")

    return each_path(facts, rule)


@check("storage.degraded", "P", "RAID health")
def degraded(facts: Facts) -> list[Result]:
    """Arrays under the path: missing members, rebuilds, inactive."""

    def rule(facts: Facts, path: KvPath) -> Result:
        arrays = [block for block in path.stack if block.kind == "md"]
        if not arrays:
            return skip("no md array under this path")
        answers = [_array(facts, block) for block in arrays]
        return max(answers, key=lambda answer: WORST.index(answer.status))

    return each_path(facts, rule)


def _array(facts: Facts, block: Block) -> Result:
    row = next((array for array in facts.md or [] if array.name == block.name), None)
    evidence = [file_evidence("/proc/mdstat", block.name), file_evidence(f"{block.syspath}/md/array_state", block.md_state)]
    if (row and not row.active) or block.md_state in ("inactive", "clear", "broken"):
        return result(
            "fail", f"{block.name} is {block.md_state or 'inactive'}", fix="Assemble or rebuild the array.", evidence=evidence
        )
    missing = max(block.md_degraded, row.missing if row else 0)
    if missing:
        doing = f", {row.rebuilding}" if row and row.rebuilding else ""
        return result(
            "warn" if doing else "fail",
            f"{block.name} lacks {missing} member{'s' * (missing > 1)}{doing}",
            fix="Replace the member and let it rebuild; expect low speed until then.",
            commands=["cat /proc/mdstat", f"mdadm --detail {quote(f'/dev/{block.name}')}"],
            evidence=evidence,
        )
    if row and row.rebuilding and not row.rebuilding.startswith("check"):
        return result("warn", f"{block.name}: {row.rebuilding}", fix="Wait for it to end; measure after.", evidence=evidence)
    if row is None and not block.md_state:
        return absent(facts, f"the state of {block.name}")
    return result("pass", f"{block.name} is whole", evidence=evidence)


@check("storage.link", "i", "PCIe link of the drive")
def link(facts: Facts) -> list[Result]:
    """current_link_* of each drive's function; virtual drives report nonsense and are left out."""
    from kvdoctor.rules.gpu import judge_link

    def rule(facts: Facts, path: KvPath) -> Result:
        drives = [block for block in path.stack if block.pci]
        real = [
            block
            for block in drives
            if not block.link_virtual and block.link.width is not None and block.link.max_width is not None
        ]
        if path.mount is None:
            return absent(facts, "the mount table")
        if not real:
            return result("pass", "no PCIe link is stated that could be degraded", confidence="low")
        answers = [judge_link(block.link, path.path, f"{block.name} at {block.pci}") for block in real]
        return next((answer for answer in answers if answer.status == "warn"), answers[0])

    return each_path(facts, rule)


@check("storage.numa", "i", "NUMA node of the drive")
def numa(facts: Facts) -> list[Result]:
    """The drive's node against the GPUs', with the matrix where there are several."""

    def rule(facts: Facts, path: KvPath) -> Result:
        drives = {block.name: block.numa for block in path.stack if block.pci}
        gpus = {gpu.bdf: gpu.numa for gpu in facts.gpus}
        if path.mount is None:
            return absent(facts, "the mount table")
        if not drives:
            return result("pass", "no PCIe drive under this path")
        nodes, wanted = {node for node in drives.values() if node is not None}, {node for node in gpus.values() if node is not None}
        told = ", ".join(f"{name} node {'?' if node is None else node}" for name, node in drives.items())
        if not wanted or not nodes or nodes & wanted:
            far = [bdf for bdf, node in gpus.items() if node is not None and nodes and node not in nodes]
            return result("pass", told + (f"; {len(far)} of {len(gpus)} GPUs are on another node" if far else ""))
        where = ", ".join(f"{bdf} node {node}" for bdf, node in gpus.items() if node is not None)
        better = _better_drive(facts, wanted)
        return result(
            "warn",
            f"{where}; {told}",
            expected="the same node",
            why="Each transfer crosses the link between the sockets; a single x4 drive rarely notices, a striped set does.",
            fix=f"Prefer {better}" if better else f"Use a drive of node {min(wanted)}, or pin the engine to node {min(nodes)}.",
        )

    return each_path(facts, rule)


def _better_drive(facts: Facts, wanted: set[int]) -> str:
    for path in facts.paths:
        if any(block.pci and block.numa in wanted for block in path.stack):
            return f"{path.path}, whose drive is on the GPU's node."
    return ""
