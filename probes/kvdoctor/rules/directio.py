"""Direct I/O in a KV directory.

Open(O_DIRECT) succeeding proves little: it does on tmpfs, overlay, btrfs and ext4 data=journal, and an engine's unaligned
write then fails each time while its tier stays silently empty. statx's alignment decides.
"""

from kvdoctor.facts import Facts, KvPath
from kvdoctor.results import Result, command_evidence
from kvdoctor.rules.base import check, direct_only, each_path, missing, result, skip, unknown
from kvdoctor.rules.storage import GOOD, NETWORK


@check("storage.odirect", "R", "Direct I/O")
def odirect(facts: Facts) -> list[Result]:
    """statx's alignment on a file of that directory: both above 0. Opening with O_DIRECT proves little."""
    return each_path(facts, lambda facts, path: direct_only(facts, odirect_of(facts, path)))


def odirect_of(facts: Facts, path: KvPath) -> Result:
    kind = path.mount.fstype if path.mount else ""
    found = path.direct
    if kind in NETWORK:
        return result("pass", "NFS states no alignment: storage.nfs decides", confidence="low")
    if found is not None and found.mem_align is not None and found.offset_align is not None:
        evidence = [command_evidence("statx STATX_DIOALIGN", f"memory {found.mem_align}, offset {found.offset_align}")]
        if found.mem_align and found.offset_align:
            if found.write_error and not _unaligned(facts, path):
                return result(
                    "fail",
                    f"statx offers it, and an aligned write failed: {found.write_error}",
                    evidence=evidence,
                    fix="See the kernel log.",
                )
            return result("pass", f"memory {found.mem_align}, offset {found.offset_align}", evidence=evidence)
        return result(
            "fail",
            f"{kind or 'the file system'} accepts O_DIRECT but offers no direct I/O for this file (alignment 0)",
            expected="an alignment above 0",
            fix="ext4: mount with data=ordered. Otherwise use xfs or ext4 on NVMe.",
            evidence=evidence,
        )
    if found is not None and found.opened is False:
        return result("fail", f"O_DIRECT is refused ({found.error or 'EINVAL'})", fix="Use xfs or ext4 on NVMe.")
    return _odirect_by_kind(facts, path, kind)


def _odirect_by_kind(facts: Facts, path: KvPath, kind: str) -> Result:
    """No alignment was learned: what each file system is known to do, at low confidence."""
    if not kind:
        return missing(facts, "the mount table")
    if kind in ("tmpfs", "ramfs", "btrfs"):
        return result(
            "fail",
            f"{kind} offers no direct I/O, even where the open succeeds",
            fix="Use xfs or ext4 on NVMe.",
            confidence="medium",
        )
    row = next(
        (row for row in (facts.ais_check.volumes if facts.ais_check else []) if path.mount and row.mountpoint == path.mount.point),
        None,
    )
    if row and row.o_direct == "no":
        return result(
            "fail",
            "ais-check could not open with O_DIRECT",
            confidence="medium",
            evidence=[command_evidence("ais-check", "O_DIRECT no")],
        )
    if kind == "ext4" and path.journal == "journal":
        return result("fail", "ext4 data=journal offers no direct I/O", fix="Mount with data=ordered.", confidence="medium")
    if kind == "overlay":
        return result("pass", "passes on what the layer below offers: storage.fs decides", confidence="low")
    if kind in GOOD and (facts.partial or path.direct is None):
        return result("pass", f"{kind} offers it; not tried on this path", confidence="low")
    return unknown("this file system does not state an alignment (kernel before 6.1, or no support)")


def _unaligned(facts: Facts, path: KvPath) -> str:
    """An engine's own unaligned direct write was refused: its log, or a probe that tried one."""
    if path.direct and path.direct.unaligned_error:
        return f"an unaligned write fails with {path.direct.unaligned_error}"
    if path.direct and path.direct.write_error in ("EINVAL", "22") and path.direct.how == "capture":
        return "a write failed with EINVAL although statx offers direct I/O: its buffer was not aligned"
    return f"an engine's direct write was refused: {facts.engines.log_odirect_error}" if facts.engines.log_odirect_error else ""


@check("storage.align", "R", "Direct I/O alignment")
def align(facts: Facts) -> list[Result]:
    """What statx asks for. Chunk files are multiples of 4096, which also satisfies drivers that want whole pages."""

    def rule(facts: Facts, path: KvPath) -> Result:
        kind = path.mount.fstype if path.mount else ""
        told = _unaligned(facts, path)
        if told:
            return result(
                "warn",
                told,
                why="The open succeeds, each write fails, and the tier stays silently empty.",
                fix="The file system is fine: the writer must align buffer, offset and size to 4096. kvd does; "
                "another connector may need its O_DIRECT switched off.",
            )
        found = path.direct
        if found is None or found.mem_align is None or found.offset_align is None:
            return skip("no alignment is stated" if kind else "not in this capture")
        if not found.mem_align or not found.offset_align:
            return result("fail", "0: no direct I/O for this file", fix="See storage.odirect.")
        if found.offset_align > 4096 or found.mem_align > 4096:
            return result(
                "warn",
                f"memory {found.mem_align}, offset {found.offset_align}",
                expected="4096 or less",
                fix="Chunks are aligned to 4096: use another drive or format.",
            )
        return result("pass", f"memory {found.mem_align}, offset {found.offset_align}")

    return each_path(facts, lambda facts, path: direct_only(facts, rule(facts, path)))
