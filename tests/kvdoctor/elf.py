"""A kernel module file in miniature: an ELF image whose .modinfo section holds what a test wants."""

import struct


def elf_with_modinfo(fields: bytes) -> bytes:
    """A 64-bit little-endian relocatable ELF file with a .modinfo section and nothing else."""
    names = b"\0.shstrtab\0.modinfo\0"
    body = fields + names
    table = 64 + len(body)
    header = b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack("<HHIQQQIHHHHHH", 1, 62, 1, 0, 0, table, 0, 64, 0, 0, 64, 3, 1)

    def section(name: int, kind: int, offset: int, size: int) -> bytes:
        return struct.pack("<IIQQQQIIQQ", name, kind, 0, 0, offset, size, 0, 0, 1, 0)

    strings, bits = 3, 1
    return (
        header + body + section(0, 0, 0, 0) + section(1, strings, 64 + len(fields), len(names)) + section(11, bits, 64, len(fields))
    )
