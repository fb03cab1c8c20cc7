"""NVIDIA GPUDirect Storage: gdscheck's report, cufile.json (JSON with comments), cufile.log, the driver's version file."""

import json
import re
from typing import Any

_COMMENT = re.compile(r'("(?:[^"\\]|\\.)*")|//[^\n]*|/\*.*?\*/', re.DOTALL)
_COMMA = re.compile(r'("(?:[^"\\]|\\.)*")|,(\s*[}\]])')
_GPU = re.compile(r"^\s*GPU index \d+ .*$", re.MULTILINE)


def parse_gdscheck(text: str) -> dict[str, str] | None:
    """Its 'name : value' lines, names in lower case, first one wins; None where `text` is no gdscheck report."""
    values: dict[str, str] = {}
    for line in text.splitlines():
        name, colon, value = line.strip().partition(":")
        if not colon or name.startswith("GPU index") or "=" in name:
            continue
        values.setdefault(re.sub(r"\s+", " ", name.strip().lower()), value.strip())
    marks = ("gds release version", "nvidia_fs version", "nvme", "iommu", "nvme p2pdma")
    known = any(mark in values for mark in marks) or gdscheck_gpus(text) or "Platform verification" in text
    return values if known else None


def gdscheck_gpus(text: str) -> list[str]:
    """Its GPU lines: 'GPU index 0 NVIDIA H100 80GB HBM3 bar:1 bar size (MiB):131072 supports GDS, IOMMU State: Disabled'."""
    return [line.strip() for line in _GPU.findall(text)]


def gdscheck_verified(text: str) -> bool | None:
    """'Platform verification succeeded' or 'failed'; None where it says neither. True proves little: it also ends reports
    of hosts where all I/O runs in compatibility mode."""
    found = re.search(r"Platform verification (\w+)", text)
    return None if not found else found[1].lower().startswith("succe")


def gdscheck_kernel(text: str) -> str:
    found = re.search(r"Arch: \w+\(Linux ([^)\s]+)\)", text)
    return found[1] if found else ""


def parse_cufile_json(text: str) -> dict[str, str] | None:
    """cufile.json flattened to dotted names and lower-case words; comments and trailing commas are its normal style."""
    # Strings are matched first in both patterns, so that what looks like a comment or a comma inside one stays.
    plain = _COMMENT.sub(lambda found: found[1] or "", text)
    plain = _COMMA.sub(lambda found: found[1] or found[2], plain)
    try:
        document = json.loads(plain)
    except (ValueError, RecursionError):
        return None
    flat: dict[str, str] = {}
    _flatten("", document, flat, 0)
    return flat if isinstance(document, dict) else None


def _flatten(prefix: str, value: Any, into: dict[str, str], depth: int) -> None:
    if isinstance(value, dict) and depth < 8:
        for name, item in value.items():
            _flatten(f"{prefix}.{name}" if prefix else str(name), item, into, depth + 1)
    elif prefix:
        into[prefix] = str(value).lower() if isinstance(value, bool) else str(value)


def parse_cufile_log(text: str) -> tuple[int | None, str]:
    """The last 'errornum: N' of a cufile.log that is about peer-to-peer, and its line."""
    number, where = None, ""
    for line in text.splitlines():
        if "p2p" in line.lower() and (found := re.search(r"errornum: (\d{1,6})", line)):
            number, where = int(found[1]), line.strip()[:300]
    return number, where


def parse_nvidia_version(text: str) -> tuple[str, bool | None]:
    """/proc/driver/nvidia/version -> ('575.51.03', whether it is the open kernel module)."""
    line = next((row for row in text.splitlines() if row.startswith("NVRM version:")), "")
    found = re.search(r"\b(\d{3}\.\d{1,3}(?:\.\d{1,3})?)\b", line)
    if not line:
        return "", None
    return (found[1] if found else ""), "Open Kernel Module" in line


def parse_fs_stats(text: str) -> int | None:
    """Read and write operations counted by /proc/driver/nvidia-fs/stats ('Ops : Read=12 Write=3'), None where absent."""
    numbers = [int(found) for found in re.findall(r"^Ops\s*:.*", text, re.MULTILINE) for found in re.findall(r"=(\d{1,18})", found)]
    return sum(numbers) if numbers or re.search(r"^Ops\s*:", text, re.MULTILINE) else None
