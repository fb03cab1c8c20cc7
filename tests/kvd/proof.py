"""Values that carry their key, a version and bytes that follow from both: any answer proves or betrays itself."""

import hashlib
import struct

import numpy as np

HEADER = struct.Struct("<32sQQ")
LEAST = HEADER.size


def keys(salt: str, count: int) -> list[bytes]:
    """So many keys."""
    return [hashlib.sha256(f"{salt} {i}".encode()).digest() for i in range(count)]


def value(key: bytes, version: int, size: int) -> bytes:
    """What is stored under `key` as `version`: `size` bytes that nothing else looks like."""
    seed = int.from_bytes(hashlib.sha256(key + version.to_bytes(8, "little")).digest()[:8], "little")
    return HEADER.pack(key, version, size) + np.random.default_rng(seed).bytes(size - HEADER.size)


def proves(key: bytes, data: bytes) -> bool:
    """Whether `data` is exactly a value of `key`."""
    if len(data) < HEADER.size:
        return False
    named, version, size = HEADER.unpack_from(data)
    return named == key and size == len(data) and data == value(key, version, size)
