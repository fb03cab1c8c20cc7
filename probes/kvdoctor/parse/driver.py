"""dkms status, modinfo and a module file's own .modinfo section: what the driver on disk is.

`modinfo -F version` prints nothing and exits 0 for a module without a version (the kernel's own amdgpu has none), so the
full listing is read, and an absent field is an empty string.
"""

import importlib
import lzma
import re
import struct
import zlib

from kvdoctor.facts import DkmsEntry, ModuleFile

_DKMS_NEW = re.compile(r"^amdgpu/([^,:\s]+)(?:,\s*([^,:\s]+))?(?:,\s*([^,:\s]+))?\s*:\s*([a-z]+)\s*(?:\((.*)\))?")
_DKMS_OLD = re.compile(r"^amdgpu,\s*([^,:\s]+)(?:,\s*([^,:\s]+))?(?:,\s*([^,:\s]+))?\s*:\s*([a-z]+)\s*(?:\((.*)\))?")
_STALE = re.compile(r"Could not locate dkms\.conf file")
_STALE_FILE = re.compile(r"File:\s*(/\S+)/source/dkms\.conf")
FAILED = re.compile(r"bad exit status: \d+|Bad return status for module build on kernel|Error! Build of .* failed", re.IGNORECASE)


def parse_dkms_status(text: str) -> list[DkmsEntry]:
    """amdgpu's lines of `dkms status`, in the grammar of today ('amdgpu/V, K, A: state (note)') and of old ('amdgpu, V, ...')."""
    entries = []
    for line in text.splitlines():
        found = _DKMS_NEW.match(line.strip()) or _DKMS_OLD.match(line.strip())
        if found:
            version, kernel, arch, state, note = (part or "" for part in found.groups())
            entries.append(DkmsEntry(version=version, kernel=kernel, arch=arch, state=state, note=note))
    return entries


def stale_tree(text: str) -> str:
    """The half-removed tree dkms stops at ('/var/lib/dkms/amdgpu/6.7.0-1756574'), '?' where it is not named, else ''."""
    if not _STALE.search(text):
        return ""
    found = _STALE_FILE.search(text)
    return found[1] if found else "?"


def build_failure(text: str) -> str:
    """The line that says a dkms build failed, or ''."""
    return next((line.strip()[:200] for line in text.splitlines() if FAILED.search(line)), "")


def parse_modinfo(text: str) -> ModuleFile | None:
    """`modinfo amdgpu`'s listing, or None where it is not one."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        if colon and re.fullmatch(r"[a-z_]+", name):
            fields.setdefault(name, value.strip())
    return _module(fields) if "filename" in fields or "vermagic" in fields else None


def as_modinfo(module: ModuleFile) -> str:
    """A module as `modinfo` lists it: what `parse_modinfo` reads back alike."""
    fields = {"filename": module.filename, "version": module.version, "srcversion": module.srcversion, "vermagic": module.vermagic}
    if module.intree:
        fields["intree"] = "Y"
    return "".join(f"{name + ':':<16}{value}\n" for name, value in fields.items() if value)


def _module(fields: dict[str, str], filename: str = "") -> ModuleFile:
    return ModuleFile(
        filename=fields.get("filename", filename),
        version=fields.get("version", ""),
        srcversion=fields.get("srcversion", ""),
        intree=fields.get("intree", "").upper() == "Y",
        vermagic=fields.get("vermagic", ""),
        signer=fields.get("signer", ""),
    )


MAX_MODULE = 256 << 20
"""Bytes of an unpacked module that are looked at: a file may unpack to any size."""


def unpack_module(data: bytes) -> bytes | None:
    """The ELF image of a .ko, .ko.xz, .ko.gz or (with a library that reads it) .ko.zst; None where that fails."""
    if data[:4] == b"\x28\xb5\x2f\xfd":
        return _unpack_zstd(data)
    try:
        if data[:6] == b"\xfd7zXZ\0":
            return lzma.LZMADecompressor().decompress(data, MAX_MODULE)
        if data[:2] == b"\x1f\x8b":
            return zlib.decompressobj(31).decompress(data, MAX_MODULE)
    except (lzma.LZMAError, zlib.error, EOFError, MemoryError):
        return None
    return data if data[:4] == b"\x7fELF" else None


def _unpack_zstd(data: bytes) -> bytes | None:
    """Ubuntu's modules are .ko.zst, which Python before 3.14 reads only with the zstandard package."""
    for name in ("compression.zstd", "zstandard"):
        try:
            library = importlib.import_module(name)
        except ImportError:
            continue
        try:
            unpacked = (
                library.ZstdDecompressor().decompress(data, MAX_MODULE)
                if name != "zstandard"
                else library.ZstdDecompressor().stream_reader(data).read(MAX_MODULE)
            )
        except (library.ZstdError, ValueError, EOFError):
            return None
        return bytes(unpacked)
    return None


def parse_module_elf(image: bytes, filename: str = "") -> ModuleFile | None:
    """A module's .modinfo section (NUL-separated key=value) from its ELF image: what modinfo reads, for hosts without kmod."""
    section = _elf_section(image, b".modinfo")
    if section is None:
        return None
    fields: dict[str, str] = {}
    for item in section.split(b"\0"):
        name, equals, value = item.partition(b"=")
        if equals:
            fields.setdefault(name.decode("latin-1"), value.decode("utf-8", "replace"))
    return _module(fields, filename) if fields else None


def _elf_section(image: bytes, name: bytes) -> bytes | None:
    """A section of a 64-bit ELF file by name, None where the file is anything else or damaged."""
    if image[:4] != b"\x7fELF" or len(image) < 64 or image[4] != 2:
        return None
    order = "<" if image[5] == 1 else ">"
    try:
        (table,) = struct.unpack_from(order + "Q", image, 40)
        size, count, names_index = struct.unpack_from(order + "HHH", image, 58)
        headers = [struct.unpack_from(order + "IIQQQQ", image, table + i * size) for i in range(count)]
        names_at = headers[names_index][4]
        for header in headers:
            start = names_at + header[0]
            if image[start : start + len(name) + 1] == name + b"\0":
                return image[header[4] : header[4] + header[5]]
    except (struct.error, IndexError):
        return None
    return None
