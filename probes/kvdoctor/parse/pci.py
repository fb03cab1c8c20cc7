"""PCI: addresses, link words, lspci's output, and the Access Control Services capability in configuration space."""

import re
import struct

from kvdoctor.facts import Link

BDF = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_ROOT = re.compile(r"pci([0-9a-f]{4}:[0-9a-f]{2})")
_ACS = re.compile(r"ACSCtl:.*?ReqRedir([+-])\s+CmpltRedir([+-]).*?EgressCtrl([+-])")
_TREE_ROOT = re.compile(r"-\[([0-9a-f]{4}:[0-9a-f]{2})\]-\+-00\.0\s+(.*)")
_VENDORS = {"Intel Corporation": "8086", "Advanced Micro Devices": "1022", "Google, Inc.": "1ae0"}


def chain(path: str) -> list[str]:
    """'/sys/devices/pci0000:40/0000:40:01.1/0000:42:00.0/nvme/...' -> ['pci0000:40', '0000:40:01.1', '0000:42:00.0']."""
    parts = path.split("/")
    found = [part for part in parts if BDF.fullmatch(part)]
    root = next((part for part in parts if _ROOT.fullmatch(part)), None)
    return ([root] if root else []) + found


def root_bus(chain_: list[str]) -> str:
    """The root bus of a chain ('0000:40'), '' where it is unknown."""
    found = _ROOT.fullmatch(chain_[0]) if chain_ else None
    return found[1] if found else ""


def speed(text: str | None) -> float | None:
    """'32.0 GT/s PCIe' -> 32.0; None for 'Unknown'."""
    found = re.match(r"\s*(\d{1,3}(?:\.\d)?)\s*GT/s", text or "")
    return float(found[1]) if found else None


def parse_lspci_link(text: str) -> Link | None:
    """The first LnkCap / LnkSta pair of `lspci -vv`, or None."""
    link = Link()
    for line in text.splitlines():
        found = re.search(r"Lnk(Cap|Sta):.*?Speed (\d{1,3}(?:\.\d)?)GT/s[^,]*, Width x(\d{1,2})", line)
        if found and found[1] == "Cap" and link.max_width is None:
            link.max_speed, link.max_width = float(found[2]), int(found[3])
        elif found and found[1] == "Sta" and link.width is None:
            link.speed, link.width = float(found[2]), int(found[3])
    return link if link.width is not None else None


def parse_lspci_acs(text: str) -> tuple[int, list[str]]:
    """Bridges whose ACS control word redirects nothing (a count), and the lines of those that do."""
    clear, redirect = 0, []
    where = ""
    for line in text.splitlines():
        if found := re.match(r"((?:[0-9a-f]{4}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]) ", line):
            where = found[1]
        if found := _ACS.search(line):
            if "+" in found.groups():
                redirect.append(f"{where or 'a bridge'}: {line.strip()}")
            else:
                clear += 1
    return clear, redirect


def parse_lspci_tree(text: str) -> dict[str, str]:
    """Host bridges of `lspci -tv`: '-[0000:00]-+-00.0  Intel Corporation Device 7d1b' -> {'0000:00': '8086:7d1b'}.

    A bridge that lspci knows by name carries no id there, and is left out.
    """
    found = {}
    for line in text.splitlines():
        if match := _TREE_ROOT.search(line):
            vendor = next((number for name, number in _VENDORS.items() if match[2].startswith(name)), "")
            device = re.search(r"Device ([0-9a-f]{4})\b", match[2])
            if vendor and device:
                found[match[1]] = f"{vendor}:{device[1]}"
    return found


def acs_control(config: bytes) -> int | None:
    """The ACS control word (extended capability 0x000d, offset 6) of a configuration space, None where there is none.

    Without root sysfs gives 64 bytes, which end before the extended capabilities: the caller must tell that apart.
    """
    offset, seen = 0x100, 0
    while 0x100 <= offset <= len(config) - 8 and seen < 96:
        (header,) = struct.unpack_from("<I", config, offset)
        if header in (0, 0xFFFFFFFF):
            return None
        if header & 0xFFFF == 0x000D:
            return int(struct.unpack_from("<H", config, offset + 6)[0])
        offset, seen = header >> 20 & 0xFFC, seen + 1
    return None


ACS_REDIRECT = 0x04 | 0x08 | 0x20
"""Request redirect, completion redirect, egress control."""


def parse_resource(text: str) -> int | None:
    """Bytes of BAR 0 from sysfs `resource`: the first 'start end flags' line."""
    words = text.split("\n", 1)[0].split()
    try:
        start, end = int(words[0], 16), int(words[1], 16)
    except (IndexError, ValueError):
        return None
    return end - start + 1 if end > start else 0
