"""What a KV path really lies on: its mount, its stack of block devices down to the PCI functions, journal, direct I/O, space.

The mount is the longest mountpoint that is a prefix of the path, never st_dev. The stack is walked through sysfs by device
number, which needs no privilege, no /dev and no udev, and is the same inside a container. Parsing lsblk is not an option:
its tree changes with the locale and shows no transport below md or LVM.
"""

import json
import re
import sys
from pathlib import Path

from kvdoctor.collect.gpu import DEVICES, read_link
from kvdoctor.collect.source import MOUNTS, NOT_UNDERSTOOD, Source
from kvdoctor.facts import Block, DirectIo, KvPath, Mount
from kvdoctor.parse import pci, shape
from kvdoctor.parse.mounts import mount_of, parse_mountinfo

MAX_STACK = 64
PROBE_DEADLINE_S = 4.0
TRANSPORTS = ("pcie", "rdma", "tcp", "fc", "loop", "apple")
VIRTUAL_VENDORS = ("0x1b36", "0x1af4")
_DM_KINDS = (("LVM-", "lvm"), ("CRYPT-", "crypt"), ("mpath-", "mpath"))


def start_probe(source: Source, paths: list[str], *, write: bool) -> None:
    """Begin the system calls on `paths`, in a child that may hang without harm."""
    if source.live and paths:
        script = str(Path(__file__).with_name("pathprobe.py"))
        targets = [source.root + source.real_in_time(path) if source.root else path for path in paths]
        argv = [sys.executable, "-I", "-S", script, "--write" if write else "--read", *targets]
        source.run_tools, kept = True, source.run_tools
        source.start("pathprobe", argv, deadline_s=PROBE_DEADLINE_S)
        source.run_tools = kept


def collect_paths(source: Source, paths: list[tuple[str, str]], want: dict[str, int | None] | None = None) -> list[KvPath]:
    """Facts of each (path, where it comes from); `want` is how many bytes a path is to hold."""
    table = source.mount_table()
    mounts = parse_mountinfo(table)
    if table and not mounts:
        source.denied[MOUNTS] = NOT_UNDERSTOOD
    probed = _probed(source, [path for path, _ in paths])
    found = []
    for path, origin in paths:
        kv = KvPath(path=path, origin=origin, want=(want or {}).get(path))
        # Where the probe's stat never came back, no thread of ours may follow it: it could keep this process from its end.
        silent = "hung" in probed.get(path, {}) and "exists" not in probed[path]
        kv.mount = mount_of(path if silent else source.real_in_time(path), mounts)
        if kv.mount:
            _stack(source, kv, kv.mount)
            _journal(source, kv, kv.mount)
        _probe(kv, probed.get(path))
        if kv.exists is None and not source.live and source.is_folder(path):
            kv.exists = kv.is_dir = True
        found.append(kv)
    return found


def _probed(source: Source, paths: list[str]) -> dict[str, dict[str, object]]:
    """The probe's answer for each path: from the child, or from a capture (paths.json, or statx.json for the only path)."""
    if not source.live:
        recorded = source.value("paths", dict)
        if isinstance(recorded, dict):
            return {path: recorded[path] for path in paths if isinstance(recorded.get(path), dict)}
        single = source.value("statx", dict)
        return {paths[0]: {"direct": single}} if paths and isinstance(single, dict) else {}
    run = source.answer("pathprobe", record=False)
    found: dict[str, dict[str, object]] = {}
    for line in run.out.splitlines() if run else []:
        try:
            answer = json.loads(line)
            found.setdefault(paths[answer.pop("index")], {}).update(answer)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
            continue  # a line cut off by the deadline
    if run and run.state in ("hung", "abandoned"):
        where = f", state {run.proc_state}" if run.proc_state else ""
        where += f", in {run.wchan}" if run.wchan else ""
        for path in paths:
            answer = found.setdefault(path, {})
            if "exists" not in answer or (answer.get("is_dir") and "direct" not in answer):
                answer["hung"] = f"no answer within {run.seconds:.1f} s (pid {run.pid}{where})"
    if source.recorder:
        source.recorder.value("paths", found)
    return found


def _probe(kv: KvPath, answer: dict[str, object] | None) -> None:
    if answer is None:
        return

    def whole(name: str) -> int | None:
        return shape.whole(answer.get(name))

    def flag(name: str) -> bool | None:
        value = answer.get(name)
        return value if isinstance(value, bool) else None

    kv.exists, kv.is_dir, kv.writable = flag("exists"), flag("is_dir"), flag("writable")
    kv.dangling = answer.get("dangling") is True
    kv.total, kv.free, kv.free_files, kv.held = whole("total"), whole("free"), whole("free_files"), whole("held") or 0
    kv.probe_error, kv.hung = str(answer.get("error", "")), str(answer.get("hung", ""))
    if isinstance(direct := answer.get("direct"), dict):
        kv.direct = _direct(direct)


def _direct(answer: dict[str, object]) -> DirectIo:
    """DirectIo from the probe's words, or from those of a hand-made statx.json (open_odirect, write, dioalign, mem, off)."""
    found = DirectIo(how=str(answer.get("how", "capture")), error=str(answer.get("error", "")))
    opened = answer.get("opened", answer.get("open_odirect"))
    found.opened = opened if isinstance(opened, bool) or opened is None else str(opened) == "ok"
    mem, off = shape.whole(answer.get("mem")), shape.whole(answer.get("off"))
    if mem is not None and off is not None and answer.get("dioalign") is not False:
        found.mem_align, found.offset_align = mem, off
    write = answer.get("write")
    if isinstance(write, str) and write != "ok":
        found.write_error = write
    for name, value in answer.items():
        if "unaligned" in name and isinstance(value, str) and value not in ("ok", ""):
            found.unaligned_error = value
    return found


# The stack of block devices


def _stack(source: Source, kv: KvPath, mount: Mount) -> None:
    real = source.real(f"/sys/dev/block/{mount.dev}")
    if source.exists(real) and "/dev/block/" not in real:
        kv.resolved = "sysfs"
        _walk(source, real, kv.stack, 0)
        return
    name = mount.source.rsplit("/", 1)[-1] if mount.source.startswith("/dev/") else ""
    for folder in ("/sys/class/block", "/sys/block"):
        real = source.real(f"{folder}/{name}")
        if name and source.exists(real) and not real.startswith(folder):
            kv.resolved = "source"
            _walk(source, real, kv.stack, 0)
            return
    # What a name suggests is for hand-made captures: a host whose sysfs does not tell has a device of an unknown kind.
    if name and not source.whole:
        kv.stack.append(Block(name=name, dev=mount.dev, kind=_kind_by_name(name, mount)))


def _kind_by_name(name: str, mount: Mount) -> str:
    """A device's kind from its name alone: all there is where sysfs was not captured."""
    if mount.source.startswith("/dev/mapper/"):
        return "dm"
    for pattern, kind in (
        (r"vd[a-z]+\d*", "virtio"),
        (r"sd[a-z]+\d*", "scsi"),
        (r"md\d+.*", "md"),
        (r"dm-\d+", "dm"),
        (r"loop\d+", "loop"),
    ):
        if re.fullmatch(pattern, name):
            return kind
    return "nvme" if name.startswith("nvme") else "other"


def _walk(source: Source, real: str, stack: list[Block], depth: int) -> None:
    """Append the device at `real` (a partition counts as its disk) and, below it, all its slaves."""
    if source.exists(f"{real}/partition"):
        real = real.rsplit("/", 1)[0]
    if any(block.syspath == real for block in stack) or len(stack) >= MAX_STACK or depth > 16:
        return
    block = _block(source, real)
    stack.append(block)
    for name in source.names(f"{real}/slaves"):
        slave = source.real(f"{real}/slaves/{name}")
        block.slaves.append(name)
        # The kernel's walk opens the node of each slave in the caller's own /dev.
        if source.whole and not source.exists(f"/dev/{name}"):
            block.slave_nodes_missing.append(name)
        _walk(source, slave, stack, depth + 1)


def _block(source: Source, real: str) -> Block:
    name = real.rsplit("/", 1)[-1]
    chain = pci.chain(real)
    block = Block(name=name, dev=source.word(f"{real}/dev") or "", syspath=real, chain=chain)
    block.pci = chain[-1] if chain and pci.BDF.fullmatch(chain[-1]) else ""
    rotational = source.word(f"{real}/queue/rotational")
    block.rotational = None if rotational is None else rotational == "1"
    if "/virtual/nvme-subsystem/" in real:
        block.kind, block.detail = "nvme-head", real.split("/nvme-subsystem/", 1)[1].split("/", 1)[0]
    elif source.is_folder(f"{real}/md") or re.fullmatch(r"md(_?\w+)?\d+", name):
        block.kind, block.detail = "md", source.word(f"{real}/md/level") or ""
        block.md_state = source.word(f"{real}/md/array_state") or ""
        block.md_degraded = source.number(f"{real}/md/degraded") or 0
    elif name.startswith("dm-"):
        block.detail = source.word(f"{real}/dm/uuid") or ""
        block.kind = next((kind for prefix, kind in _DM_KINDS if block.detail.startswith(prefix)), "dm")
    elif name.startswith("nvme"):
        _nvme(source, real, block)
    else:
        block.kind = _plain_kind(real, name)
    if block.pci:
        _function(source, block)
    return block


def _nvme(source: Source, real: str, block: Block) -> None:
    device = source.real(f"{real}/device")
    controller = device if device != f"{real}/device" else real.rsplit("/", 1)[0]
    block.transport = source.one_of(f"{controller}/transport", TRANSPORTS) or ("pcie" if block.pci else "")
    if source.denied.get(f"{controller}/transport") == NOT_UNDERSTOOD:
        block.transport, block.kind, block.detail = "", "nvme-unknown", f"{controller}/transport"
        return
    block.model = (source.word(f"{controller}/model") or "").strip()
    block.kind = "nvme" if block.transport == "pcie" else "nvme-fabric" if block.transport else "nvme"


def _plain_kind(real: str, name: str) -> str:
    if name.startswith(("loop", "zram", "ram")):
        return "loop" if name.startswith("loop") else "zram"
    if "/virtio" in real or name.startswith("vd"):
        return "virtio"
    return "scsi" if name.startswith(("sd", "sr")) else "other"


def _function(source: Source, block: Block) -> None:
    """Link and NUMA node of the PCI function below a device."""
    folder = block.syspath[: block.syspath.index(block.pci) + len(block.pci)]
    block.link = read_link(source, folder)
    block.link_virtual = (source.word(f"{folder}/vendor") or source.word(f"{DEVICES}/{block.pci}/vendor")) in VIRTUAL_VENDORS
    node = source.number(f"{folder}/numa_node")
    block.numa = None if node is None or node < 0 else node


def _journal(source: Source, kv: KvPath, mount: Mount) -> None:
    """ext4's journal mode. The mount table does not show it when it comes from the superblock; /proc/fs/ext4 always does."""
    if mount.fstype != "ext4":
        return
    names = [source.real(f"/sys/dev/block/{mount.dev}").rsplit("/", 1)[-1], mount.source.rsplit("/", 1)[-1]]
    for name in names:
        text = source.read(f"/proc/fs/ext4/{name}/options", 16384)
        if text:
            kv.journal_source = f"/proc/fs/ext4/{name}/options"
            if not re.search(r"^(r[wo]|data=\w+)$", text, re.MULTILINE):
                source.denied[kv.journal_source] = NOT_UNDERSTOOD
                return
            mode = re.search(r"^data=(\w+)", text, re.MULTILINE)
            kv.journal = mode[1] if mode else "none"
            return
    kv.journal_source = "mount table"
    # A host's kernel always has that file: not shown, the mode is not known. A case made by hand often lacks it.
    kv.journal = next(
        (option[5:] for option in mount.super_options if option.startswith("data=")), None if source.whole else "assumed ordered"
    )
