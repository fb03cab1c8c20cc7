"""The 128 bytes that stand in front of a value in every tier but `disk`: what it is, and how to tell that it still is that.

Little-endian: magic `KVTVALUE` (8), identity (64), length (u64), expiry (u64, unix ns, 0: never), retention (u8), 7 zero
bytes, XXH3-64 of the value (u64), note (u32), 12 zero bytes, XXH3-64 of the 120 bytes before (u64).
"""

import struct
from typing import NamedTuple

import numpy as np
import xxhash

from kvd.store.identity import Identity
from kvd.store.retention import Retention
from kvd.tiers.adapters.base import Hit, Item

MAGIC = b"KVTVALUE"
SIZE = 128
_FIELDS = struct.Struct("<8s64sQQB7xQI12x")
_SUM = struct.Struct("<Q")


class Head(NamedTuple):
    """What an envelope says. `checksum` is that of the value."""

    identity: Identity
    length: int
    expires_ns: int
    retention: Retention
    checksum: int
    note: int = 0

    @property
    def hit(self) -> Hit:
        return Hit(self.length, self.retention, self.expires_ns, self.note)


def seal(item: Item, checksum: int | None = None) -> bytes:
    """The envelope of this item. `checksum` where it is known already: XXH3-64 of the value."""
    if checksum is None:
        checksum = xxhash.xxh3_64_intdigest(item.data)
    body = _FIELDS.pack(MAGIC, item.identity, len(item.data), item.expires_ns, item.retention, checksum, item.note)
    return body + _SUM.pack(xxhash.xxh3_64_intdigest(body))


def open_head(raw: bytes | bytearray | memoryview) -> Head | None:
    """What the first bytes of `raw` say, or None where they are no intact envelope."""
    if len(raw) < SIZE or bytes(raw[:8]) != MAGIC:
        return None
    body = bytes(raw[: _FIELDS.size])
    if _SUM.unpack_from(raw, _FIELDS.size)[0] != xxhash.xxh3_64_intdigest(body):
        return None
    _, identity, length, expires_ns, retention, checksum, note = _FIELDS.unpack(body)
    try:
        return Head(identity, length, expires_ns, Retention(retention), checksum, note)
    except ValueError:
        return None


def copy(into: memoryview, source: memoryview | bytes) -> None:
    """Copy as many bytes, without the interpreter's lock: a slice assignment holds it, and with it up the event loop."""
    if len(into):
        np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(source, np.uint8))


def intact(head: Head, data: memoryview | bytes | bytearray) -> bool:
    """Whether these are the bytes that were sealed."""
    return len(data) == head.length and xxhash.xxh3_64_intdigest(data) == head.checksum


assert _FIELDS.size + _SUM.size == SIZE
