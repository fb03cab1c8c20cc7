"""Lines of the kernel log that bear on AIS.

The only line the driver prints by default when AIS comes up is 'AIS: registered N MB device memory', once per GPU; every
refusal at start is debug output, and after a module reload even the good line is missing. So its absence means nothing
unless the log is known to reach back to the driver's load, and even then only together with the gates.
"""

import errno
import re

from kvdoctor.facts import IoFailure, KernelLog

_REGISTERED = re.compile(
    r"amdgpu ([0-9a-fA-F]{4}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]): (?:amdgpu: )?AIS: registered (\d{1,12}) ?MB"
)
_VERSION = re.compile(r"\[drm\] amdgpu version: (\S+)")
_STAMP = re.compile(r"^\s*(?:<\d+>)?\[\s*(\d+)\.\d+\]")
_ERRNO = re.compile(r"(?<![\w.])-(\d{1,3})\b")
_FAILURES = (
    "Invalid file path or mount point",
    "Failed to read AIS file",
    "Failed to write AIS file",
    "DMA-BUF p2p not accessible",
    "AIS: P2P DMA not accessible",
    "AIS: P2P not accessible for slave",
    "AIS: file does not support direct I/O",
    "AIS: unsupported storage type",
    "AIS: NFS P2P check",
    "AIS: vfs transfer failed",
)
ERRNO_MEANING = {
    19: "no PCI device stands behind that file",
    22: "misaligned size or offset, or no direct I/O",
    12: "no peer-to-peer page for that memory",
    121: "the device failed the transfer",
}


def parse_kernel_log(text: str, *, source: str = "dmesg", whole: bool | None = None) -> KernelLog:
    """Facts of a kernel log. `whole` says whether it reaches back to boot; not given, it is judged from the text."""
    log = KernelLog(source=source)
    first_stamp: int | None = None
    for line in text.splitlines():
        if first_stamp is None and (found := _STAMP.match(line)):
            first_stamp = int(found[1])
        if found := _REGISTERED.search(line):
            log.registered[found[1].lower()] = int(found[2])
        if found := _VERSION.search(line):
            log.driver_versions.append(found[1])
        if any(mark in line for mark in _FAILURES):
            log.failures.append(_failure(line))
        if re.search(r"BAR 0: failed to assign|Detected VRAM RAM=", line):
            log.bar_lines.append(_body(line))
        lower = line.lower()
        if "key was rejected by service" in lower or "loading of unsigned module is rejected" in lower:
            log.key_rejected = _body(line)
        if "secure boot enabled" in lower or "secure boot disabled" in lower:
            log.secure_boot = "enabled" in lower
    began = first_stamp == 0 or bool(log.driver_versions) or "amdgpu kernel modesetting enabled" in text
    log.whole = began if whole is None else whole
    return log


_ESSENTIAL = (
    _REGISTERED,
    re.compile(r"\[drm\] amdgpu version: [\w.+-]{1,40}"),
    re.compile(r"amdgpu kernel modesetting enabled"),
    re.compile(r"BAR 0: failed to assign(?: \[mem size 0x[0-9a-f]{1,16}[ \w]{0,12}\])?"),
    re.compile(r"Detected VRAM RAM=\d{1,9}M, BAR=\d{1,9}M"),
    re.compile(r"key was rejected by service|loading of unsigned module is rejected", re.IGNORECASE),
    re.compile(r"secure boot (?:enabled|disabled)", re.IGNORECASE),
)


def essentials(text: str) -> list[str]:
    """The parts of a kernel log that `parse_kernel_log` reads, each with its time stamp and without what stands around it."""
    kept: list[str] = []
    first = True
    for line in text.splitlines():
        found = _STAMP.match(line)
        stamp = f"{found[0].strip()} " if found else ""
        if found and first:
            first = False
            if int(found[1]) == 0:
                kept.append(f"{stamp}Linux")  # the log reaches back to boot
        kept += [f"{stamp}{seen[0]}" for pattern in _ESSENTIAL if (seen := pattern.search(line))]
        if mark := next((mark for mark in _FAILURES if mark in line), ""):
            failure = _failure(line)
            kept.append(f"{stamp}amdgpu: {mark}" + (f": -{failure.errno}" if failure.errno else ""))
    return kept


def _failure(line: str) -> IoFailure:
    body = _body(line)
    found = _ERRNO.search(body)
    return IoFailure(text=body, errno=int(found[1]) if found else None)


def _body(line: str) -> str:
    return _STAMP.sub("", line).strip()[:300]


def errno_text(number: int) -> str:
    """'-19 ENODEV: no PCI device stands behind that file'."""
    name = errno.errorcode.get(number, "errno")
    meaning = ERRNO_MEANING.get(number, "")
    return f"-{number} {name}" + (f": {meaning}" if meaning else "")


def parse_kmsg(records: list[str]) -> tuple[str, bool]:
    """Records of /dev/kmsg ('prio,seq,usec,flags;text') as dmesg would print them, and whether the ring still holds record 0."""
    lines = []
    first: int | None = None
    for record in records:
        head, semicolon, body = record.partition(";")
        fields = head.split(",")
        if not semicolon or len(fields) < 3 or not fields[1].isdecimal() or not fields[2].isdecimal():
            continue
        first = int(fields[1]) if first is None else first
        micro = int(fields[2])
        lines.append(f"[{micro // 1000000:5d}.{micro % 1000000:06d}] {body.splitlines()[0] if body else ''}")
    return "\n".join(lines), first == 0
