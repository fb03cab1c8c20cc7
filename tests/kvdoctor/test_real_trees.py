"""Block stacks against a tree captured from a real kernel (Debian 6.1 in QEMU): md, LVM, crypt, multipath, bind, overlay."""

from pathlib import Path

import pytest

from kvdoctor.collect.source import Source
from kvdoctor.collect.storage import collect_paths
from kvdoctor.facts import Facts, KvPath
from kvdoctor.parse.mounts import parse_mdstat
from kvdoctor.rules.backing import backing_of, multipath
from kvdoctor.rules.storage import filesystem_of, journal_of

TREE = Path(__file__).parents[1] / "cases" / "doctor" / "_captures" / "qemu-nvme-6.1"


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The captured tree as files and links: 'F path = value' is a file, 'L path -> target' a link."""
    out = tmp_path_factory.mktemp("qemu")
    root = out / "root"
    (out / "cmd").mkdir()
    lines = [line for name in ("tree.txt", "pci-tree.txt") for line in (TREE / name).read_text().splitlines()]
    links = [line[2:].partition(" -> ") for line in lines if line.startswith("L ")]
    for path, _, target in sorted(links, key=lambda parts: parts[0].count("/")):
        # A link may lie behind another one: a new source each time, because a source remembers where links were.
        parent, _, name = path.rpartition("/")
        link = Path(Source(root).host_path("/" + parent)) / name
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(target)
    source = Source(root, commands=out / "cmd")
    for line in (line for line in lines if line.startswith("F ")):
        path, _, value = line[2:].partition(" = ")
        file = Path(source.host_path("/" + path))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(value + "\n")
    proc = root / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "mountinfo").write_text((TREE / "mountinfo.txt").read_text())
    (proc / "mdstat").write_text((TREE / "mdstat.txt").read_text())
    for line in (TREE / "ext4opts.txt").read_text().splitlines():
        path, _, value = line.partition(": ")
        file = root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(value + "\n")
    return out


def look(host: Path, path: str) -> tuple[Facts, KvPath]:
    source = Source(host / "root", commands=host / "cmd")
    facts = Facts(partial=True, paths=collect_paths(source, [(path, "test")]))
    facts.md = parse_mdstat(source.read("/proc/mdstat") or "")
    facts.kernel.symbols = ["kfd_ais_rw_file"]
    facts.gpus = []
    return facts, facts.paths[0]


def test_md_over_two_drives(host: Path) -> None:
    facts, path = look(host, "/mnt/md/kvd")
    assert [(block.name, block.kind) for block in path.stack] == [("md0", "md"), ("nvme0n1", "nvme"), ("nvme1n1", "nvme")]
    assert path.stack[0].detail == "raid0"
    assert [block.pci for block in path.stack[1:]] == ["0000:01:00.0", "0000:02:00.0"]
    assert backing_of(facts, path).status == "warn"
    assert filesystem_of(facts, path).status == "pass"


def test_a_bind_mount_leads_to_the_same_stack(host: Path) -> None:
    _, path = look(host, "/mnt/bind/x")
    assert path.mount is not None
    assert path.mount.root == "/kvd"
    assert path.stack[0].name == "md0"


def test_lvm_is_judged_by_the_drivers_generation(host: Path) -> None:
    facts, path = look(host, "/mnt/lvm")
    assert {block.kind for block in path.stack} == {"lvm", "nvme"}
    assert backing_of(facts, path).status == "warn"
    facts.kernel.symbols = ["kfd_ais_rw_file", "get_pci_dev_from_dm"]
    assert backing_of(facts, path).status == "pass"
    facts.kernel.symbols = None
    assert backing_of(facts, path).status == "warn"
    assert journal_of(facts, path).status == "pass"


def test_crypt_never(host: Path) -> None:
    facts, path = look(host, "/mnt/crypt")
    assert path.stack[0].detail == "CRYPT-PLAIN-kvcrypt"
    answer = backing_of(facts, path)
    assert answer.status == "fail"
    assert "CPU" in answer.why


def test_a_multipath_head_hides_behind_a_normal_name(host: Path) -> None:
    facts, path = look(host, "/mnt/mp")
    assert [(block.name, block.kind, block.detail) for block in path.stack] == [("nvme5n1", "nvme-head", "nvme-subsys5")]
    assert [answer.status for answer in multipath(facts)] == ["info"], "no GPU here: it would matter to GPU-direct only"


def test_overlay_has_no_block_device_of_its_own(host: Path) -> None:
    facts, path = look(host, "/mnt/ov/x")
    assert path.stack == []
    assert filesystem_of(facts, path).status == "fail"


def test_emulated_links_are_marked(host: Path) -> None:
    _, path = look(host, "/mnt/crypt")
    assert path.stack[-1].link_virtual


def test_the_root_file_system_in_memory(host: Path) -> None:
    facts, path = look(host, "/tmp/x")
    assert path.mount is not None
    assert path.mount.fstype == "rootfs"
    assert filesystem_of(facts, path).status == "fail"
