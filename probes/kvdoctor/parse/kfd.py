"""KFD topology properties and amd-smi's table."""

import re

from kvdoctor.facts import KfdNode
from kvdoctor.parse.versions import decimal


def parse_properties(text: str, node: int) -> KfdNode | None:
    """A node's 'key value' lines (decimal), or None where there are none."""
    values: dict[str, int] = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) == 2 and (value := decimal(words[1])) is not None:
            values[words[0]] = value
    if not values:
        return None
    return KfdNode(
        node=node,
        cpu_cores=values.get("cpu_cores_count", 0),
        simds=values.get("simd_count", 0),
        gfx=values.get("gfx_target_version", 0),
        vendor=values.get("vendor_id", 0),
        device=values.get("device_id", 0),
        domain=values.get("domain", 0),
        location=values.get("location_id", 0),
        capability=values.get("capability"),
        local_mem=values.get("local_mem_size"),
    )


def node_bdf(node: KfdNode) -> str:
    """The PCI address a node stands for: location_id is bus << 8 | device << 3 | function."""
    bus, devfn = node.location >> 8 & 0xFF, node.location & 0xFF
    return f"{node.domain:04x}:{bus:02x}:{devfn >> 3:02x}.{devfn & 7}"


def smi_names(text: str) -> dict[str, str]:
    """PCI address -> market name, from amd-smi's table ('| 0000:05:00.0 AMD Instinct MI300X VF | ...') or CSV-like lines."""
    found = {}
    for line in text.splitlines():
        if match := re.search(r"([0-9a-fA-F]{4}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7])[ ,]+([^|,\n]*[A-Za-z][^|,\n]*)", line):
            found[match[1].lower()] = match[2].strip()
    return found


def smi_guest(text: str) -> bool:
    """Whether amd-smi says that it runs in a guest ('Platform: Linux Guest')."""
    return bool(re.search(r"Platform:\s*Linux Guest", text)) and "Passthrough" not in text
