"""Parsers: the formats seen in the wild give their facts, and no text whatever raises."""

import json
import lzma
import struct
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvdoctor.facts import DkmsEntry, Mount
from kvdoctor.parse import aischeck, driver, gds, kfd, klog, mounts, pci, versions
from tests.kvdoctor.elf import elf_with_modinfo

# What parsers meet is text with the format's own words in odd places: that finds more than plain noise.
WORDS = [
    *("amdgpu", "/", ",", ":", ": ", "installed", "added", "(", ")", "6.16.13", "x86_64", " - ", "ext4", "xfs", "rw", "\\040"),
    *("MOUNTPOINT", "FSTYPE", "DEVICE", "BACKING", "O_DIRECT", "HIPFILE", "True", "False", "AIS support in:", "HIP runtime"),
    *("AIS: registered ", "MB", "amdgpu 0000:41:00.0: ", "Failed to read AIS file: -19", "[   12.3]", "[0.0]", "-", "-99999"),
    *("md0 : active raid1 a[0](F) b[1]", "[2/1] [U_]", "recovery = 12%", "/dev/shm", "64M", "1e9", "9" * 30, "shm", "size="),
    *("LnkSta: Speed 2.5GT/s, Width x4", "ACSCtl: ", "ReqRedir+", "CmpltRedir-", "EgressCtrl", "-[0000:00]-+-00.0  Intel"),
    *("GPU index 0 ", "supports GDS", "IOMMU: ", "{", "}", '"', "//", "/*", "properties", "errornum: ", "p2p", "Ops : Read=1"),
    *("simd_count ", "location_id ", "capability ", "\n", "\n", "\t", " ", "=", "\x00", "é", "vermagic:", "filename:", "Y"),
]
noise = st.one_of(st.text(max_size=300), st.lists(st.sampled_from(WORDS), max_size=60).map("".join))

TEXT_PARSERS: list[Callable[[str], Any]] = [
    versions.version_tuple,
    versions.decimal,
    mounts.unescape,
    mounts.parse_mountinfo,
    mounts.parse_mdstat,
    mounts.parse_df_shm,
    lambda text: mounts.mount_size(text.split(",")),
    aischeck.parse_ais_check,
    lambda text: aischeck.parse_ais_check(text, text, 1),
    klog.parse_kernel_log,
    lambda text: klog.parse_kmsg(text.split("\n")),
    driver.parse_dkms_status,
    driver.stale_tree,
    driver.build_failure,
    driver.parse_modinfo,
    lambda text: kfd.parse_properties(text, 1),
    kfd.smi_names,
    kfd.smi_guest,
    pci.chain,
    pci.speed,
    pci.parse_lspci_link,
    pci.parse_lspci_acs,
    pci.parse_lspci_tree,
    pci.parse_resource,
    gds.parse_gdscheck,
    gds.gdscheck_gpus,
    gds.gdscheck_verified,
    gds.gdscheck_kernel,
    gds.parse_cufile_json,
    gds.parse_cufile_log,
    gds.parse_nvidia_version,
    gds.parse_fs_stats,
]


@given(text=noise)
def test_no_text_raises(text: str) -> None:
    for parse in TEXT_PARSERS:
        parse(text)


@given(data=st.one_of(st.binary(max_size=400), st.binary(max_size=300).map(lambda tail: b"\x7fELF\x02\x01" + tail)))
@example(data=b"\xfd7zXZ\0broken")
@example(data=b"\x1f\x8bbroken")
def test_no_bytes_raise(data: bytes) -> None:
    driver.unpack_module(data)
    driver.parse_module_elf(data)
    pci.acs_control(data)
    pci.acs_control(bytes(0x100) + data)


@given(text=noise)
def test_in_doubt_a_parser_says_nothing(text: str) -> None:
    """Text without a format's own words gives no fact of that format."""
    if "AIS" not in text and "HIP" not in text and "amdgpu" not in text and "hipFile" not in text:
        assert aischeck.parse_ais_check(text) is None
    if not text.startswith("NVRM"):
        assert gds.parse_nvidia_version("x" + text.replace("\n", " ")) == ("", None)
    if "ELF" not in text:
        assert driver.parse_module_elf(text.encode()) is None


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("6.16.13", (6, 16, 13)),
        ("6.16.13-2278356.24.04", (6, 16, 13)),
        (" 7.2.1-81\n", (7, 2, 1)),
        ("v1.2", (1, 2)),
        ("amdgpu", None),
        ("", None),
        ("1." + "9" * 40, None),
    ],
)
def test_version(text: str, version: tuple[int, ...] | None) -> None:
    assert versions.version_tuple(text) == version


@pytest.mark.parametrize(
    ("text", "enough"), [("6.16.6", True), ("6.16", False), ("6.17", True), ("6.9.30", False), ("7", True), ("in-tree", None)]
)
def test_at_least_compares_numbers_not_text(text: str, enough: bool | None) -> None:
    assert versions.at_least(text, (6, 16, 6)) is enough


@pytest.mark.parametrize(
    ("line", "entry"),
    [
        (
            "amdgpu/6.16.6-2255209.24.04, 6.17.0-8-generic, x86_64: installed (Original modules exist)",
            DkmsEntry("6.16.6-2255209.24.04", "6.17.0-8-generic", "x86_64", "installed", "Original modules exist"),
        ),
        ("amdgpu/6.16.13-2278356.24.04: added", DkmsEntry("6.16.13-2278356.24.04", "", "", "added", "")),
        (
            "amdgpu, 1.9-211.el7, 3.10.0-862.11.6.el7.x86_64, x86_64: installed (original_module exists)",
            DkmsEntry("1.9-211.el7", "3.10.0-862.11.6.el7.x86_64", "x86_64", "installed", "original_module exists"),
        ),
        ("amdgpu/6.8.5, 6.8.0-44-generic, x86_64: built", DkmsEntry("6.8.5", "6.8.0-44-generic", "x86_64", "built", "")),
    ],
)
def test_dkms_status_in_three_grammars(line: str, entry: DkmsEntry) -> None:
    assert driver.parse_dkms_status(f"nvidia/570.172.08, 6.12, x86_64: installed\n{line}\n") == [entry]


def test_dkms_stale_tree_is_named() -> None:
    text = (
        "Error! Could not locate dkms.conf file.\nFile: /var/lib/dkms/amdgpu/6.7.0-1756574.22.04/source/dkms.conf does not exist.\n"
    )
    assert driver.stale_tree(text) == "/var/lib/dkms/amdgpu/6.7.0-1756574.22.04"
    assert driver.stale_tree("Error! Could not locate dkms.conf file.\nFile:  does not exist.\n") == "?"
    assert driver.stale_tree("amdgpu/1: added") == ""


def test_dkms_build_failures() -> None:
    assert (
        driver.build_failure("ok\nBuilding module(s)......(bad exit status: 2)\n") == "Building module(s)......(bad exit status: 2)"
    )
    assert driver.build_failure("Error! Bad return status for module build on kernel: 6.14.0-24-generic (x86_64)")
    assert driver.build_failure("Building module(s).... done.") == ""


def test_modinfo_without_a_version_is_not_an_error() -> None:
    module = driver.parse_modinfo(
        "filename:  /lib/modules/6.1.0-57-amd64/kernel/drivers/gpu/drm/amd/amdgpu/amdgpu.ko\nintree:  Y\n"
    )
    assert module is not None
    assert (module.version, module.intree, module.kernel) == ("", True, "6.1.0-57-amd64")
    assert driver.parse_modinfo("modinfo: ERROR: Module amdgpu not found.\n") is None


def test_module_file_is_read_without_kmod() -> None:
    image = elf_with_modinfo(b"version=6.16.13\0srcversion=D5FB5F31\0vermagic=6.8.0-60-generic SMP\0\0intree=Y\0")
    for packed in (image, lzma.compress(image)):
        unpacked = driver.unpack_module(packed)
        assert unpacked == image
        module = driver.parse_module_elf(unpacked, "/lib/modules/x/amdgpu.ko")
        assert module is not None
        assert (module.version, module.srcversion, module.kernel, module.intree) == (
            "6.16.13",
            "D5FB5F31",
            "6.8.0-60-generic",
            True,
        )


AIS_OLD = "\n AIS support in:\n   HIP Runtime: true\n        amdgpu: false\n"
AIS_NEW = """
Linux node1 6.8.0-60-generic #63 SMP x86_64

Mounted volumes:
MOUNTPOINT     FSTYPE          DEVICE     BACKING  O_DIRECT  HIPFILE
/mnt/my disk   ext4 (ordered)  nvme1n1p1  nvme     yes       yes
/nvme          xfs             md0        md       yes       no

AIS support in:
\tKernel P2PDMA support   : True
\tHIP runtime             : False
\tamdgpu                  : True
\thipFile-capable volume  : False
"""


def test_ais_check_of_every_version() -> None:
    old = aischeck.parse_ais_check(AIS_OLD)
    assert old is not None
    assert (old.hip, old.amdgpu, old.p2pdma, old.volume) == (True, False, None, None)
    new = aischeck.parse_ais_check(
        AIS_NEW, "WARNING: SR-IOV virtual function GPU(s) detected: 0000:05:00.0 (AMD Instinct MI300X VF).\n", 1
    )
    assert new is not None
    assert (new.hip, new.amdgpu, new.p2pdma, new.volume, new.rc) == (False, True, True, False, 1)
    assert [row.mountpoint for row in new.volumes] == ["/mnt/my disk", "/nvme"]
    assert [row.hipfile for row in new.volumes] == ["yes", "no"]
    assert new.virtual_functions == ["0000:05:00.0 (AMD Instinct MI300X VF)"]


def test_kernel_log_lines() -> None:
    log = klog.parse_kernel_log(
        "[    0.000000] Linux version 6.8\n"
        "[   14.100001] amdgpu 0000:41:00.0: amdgpu: AIS: registered 196592MB device memory\n"
        "[   14.200001] amdgpu 0000:42:00.0: AIS: registered 196592MB device memory\n"
        "[ 9001.000001] amdgpu: Failed to read AIS file: -19\n"
        "[ 9002.000001] amdgpu: AIS: file does not support direct I/O\n"
    )
    assert log.whole
    assert log.registered == {"0000:41:00.0": 196592, "0000:42:00.0": 196592}
    assert [failure.errno for failure in log.failures] == [19, None]
    assert not klog.parse_kernel_log("[ 9001.000001] usb 1-1: new device\n").whole
    assert klog.errno_text(19).startswith("-19 ENODEV: no PCI device")


def test_kmsg_records_say_whether_the_ring_wrapped() -> None:
    text, whole = klog.parse_kmsg(["6,0,0,-;Linux version 6.18\n", "4,1,14100001,-;amdgpu: hello\n SUBSYSTEM=pci\n"])
    assert whole
    assert text.splitlines()[1] == "[   14.100001] amdgpu: hello"
    assert klog.parse_kmsg(["6,17,5,-;late"])[1] is False


def test_mountinfo_octal_escapes_optional_fields_and_bind_mounts() -> None:
    table = mounts.parse_mountinfo(
        "22 1 0:20 / / rw shared:1 master:2 - ext4 /dev/sda1 rw\n"
        r"31 22 9:0 /kvd\040root /mnt/my\040bind rw,relatime - xfs /dev/md0 rw,attr2" + "\n"
        "broken line\n"
    )
    assert table[1] == Mount("9:0", "/kvd root", "/mnt/my bind", "xfs", "/dev/md0", ["rw", "relatime"], ["rw", "attr2"])
    assert mounts.mount_of("/mnt/my bind/kv", table) is table[1]
    assert mounts.mount_of("/mnt/my bindings", table) is table[0]


def test_of_two_mounts_on_one_point_the_last_counts() -> None:
    table = mounts.parse_mountinfo("1 0 8:1 / /a rw - ext4 /dev/a rw\n2 0 8:2 / /a rw - xfs /dev/b rw\n")
    found = mounts.mount_of("/a/b", table)
    assert found is not None
    assert found.fstype == "xfs"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("shm              64M   20M   45M  31% /dev/shm\n", 64 << 20),
        ("Filesystem 1K-blocks Used Available Use% Mounted on\ntmpfs 65536 0 65536 0% /dev/shm\n", 64 << 20),
        ("Filesystem 1B-blocks Used Available Use% Mounted on\ntmpfs 540000000000 0 1 0% /dev/shm\n", 540000000000),
        ("tmpfs 1.5G 0 1.5G 0% /dev/shm", 3 << 29),
        ("tmpfs 64M 0 64M 0% /dev\n", None),
    ],
)
def test_df_in_every_unit(text: str, size: int | None) -> None:
    assert mounts.parse_df_shm(text) == size


def test_mdstat_of_a_degraded_rebuilding_array() -> None:
    text = (
        "Personalities : [raid0] [raid5]\n"
        "md1 : active (auto-read-only) raid5 nvme2n1[3] nvme1n1[1](F) nvme0n1[0]\n"
        "      209584128 blocks super 1.2 level 5, 512k chunk, algorithm 2 [3/2] [U_U]\n"
        "      [=>...................]  recovery =  5.2% (5453824/104792064) finish=8.1min speed=203M/sec\n"
        "md0 : inactive nvme3n1[0](S)\n"
        "unused devices: <none>\n"
    )
    arrays = mounts.parse_mdstat(text)
    assert [(array.name, array.active, array.level, array.missing) for array in arrays] == [
        ("md1", True, "raid5", 1),
        ("md0", False, "", 0),
    ]
    assert arrays[0].rebuilding.startswith("recovery")


def test_pci_words() -> None:
    assert pci.chain("/sys/devices/pci0000:40/0000:40:01.1/0000:42:00.0/nvme/nvme1") == [
        "pci0000:40",
        "0000:40:01.1",
        "0000:42:00.0",
    ]
    assert pci.speed("32.0 GT/s PCIe") == 32.0
    assert pci.speed("Unknown") is None
    link = pci.parse_lspci_link(
        "LnkCap: Port #0, Speed 8GT/s, Width x16\nLnkSta: Speed 2.5GT/s (downgraded), Width x4 (downgraded)\n"
    )
    assert link is not None
    assert (link.max_speed, link.max_width, link.speed, link.width) == (8.0, 16, 2.5, 4)
    assert pci.parse_resource("0x0000000010000000 0x000000001fffffff 0x0000\n0x0 0x0 0x0\n") == 256 << 20


def test_acs_in_configuration_space() -> None:
    config = bytearray(4096)
    struct.pack_into("<I", config, 0x100, 0x148 << 20 | 0x1 << 16 | 0x0001)
    struct.pack_into("<IHH", config, 0x148, 0x0 << 20 | 0x1 << 16 | 0x000D, 0x5F, 0x1D)
    assert pci.acs_control(bytes(config)) == 0x1D
    assert 0x1D & pci.ACS_REDIRECT
    assert pci.acs_control(bytes(64)) is None
    struct.pack_into("<I", config, 0x148, 0x148 << 20 | 0x0002)  # a capability that points at itself
    assert pci.acs_control(bytes(config)) is None


def test_acs_lines_of_lspci() -> None:
    good = "ACSCtl:    SrcValid+ TransBlk- ReqRedir- CmpltRedir- UpstreamFwd+ EgressCtrl- DirectTrans-"
    bad = "40:01.1 PCI bridge: x\n\t\tACSCtl: SrcValid+ TransBlk- ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans-"
    clear, redirect = pci.parse_lspci_acs(f"{good}\n{bad}\n")
    assert clear == 1
    assert redirect[0].startswith("40:01.1:")


def test_gdscheck_before_and_after_1_16() -> None:
    old = gds.parse_gdscheck(
        " GDS release version: 1.14.0.30\n nvidia_fs version:  2.27 libcufile version: 2.12\n NVMe P2PDMA        : Unsupported\n"
    )
    assert old is not None
    assert old["nvme p2pdma"] == "Unsupported"
    new = gds.parse_gdscheck(" NVMe               : nvfs, p2pdma, compat\n")
    assert new is not None
    assert new["nvme"] == "nvfs, p2pdma, compat"
    assert gds.parse_gdscheck("something: else\n") is None


def test_cufile_json_with_comments_and_trailing_commas() -> None:
    text = '{\n // a comment with "quotes"\n "properties": { "use_pci_p2pdma": true, /* more */ "url": "http://x//y", },\n}'
    flat = gds.parse_cufile_json(text)
    assert flat == {"properties.use_pci_p2pdma": "true", "properties.url": "http://x//y"}
    assert gds.parse_cufile_json("[1, 2]") is None
    assert gds.parse_cufile_json("{broken") is None


@given(
    st.dictionaries(
        st.text(st.characters(codec="ascii", exclude_characters='/"\\'), min_size=1, max_size=8), st.booleans(), max_size=5
    )
)
def test_cufile_json_survives_comments(values: dict[str, bool]) -> None:
    text = json.dumps({"properties": values}, indent=1).replace("{", "{ // note\n", 1)
    flat = gds.parse_cufile_json(text)
    assert flat == {f"properties.{name}": str(value).lower() for name, value in values.items()}


def test_kfd_node_joins_by_location() -> None:
    node = kfd.parse_properties("simd_count 1216\ncpu_cores_count 0\nlocation_id 16640\ndomain 0\ncapability 746267328\n", 1)
    assert node is not None
    assert kfd.node_bdf(node) == "0000:41:00.0"
    assert node.capability is not None
    assert node.capability & 0x40


def test_smi_tells_virtual_functions() -> None:
    table = " | Platform: Linux Guest     |\n | 0000:05:00.0 AMD Instinct MI300X VF | 0 %   39 C |\n"
    assert kfd.smi_names(table) == {"0000:05:00.0": "AMD Instinct MI300X VF"}
    assert kfd.smi_guest(table)
    assert not kfd.smi_guest(" | Platform: Linux Baremetal |")
