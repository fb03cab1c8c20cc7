"""What lies on disk, byte for byte: the structures of daemon/FORMAT.md, format version 2.

Reader and writer share every constant here. All integers are little-endian; every structure starts on a multiple of
4096 bytes and carries its own checksum. ON DISK: never change a layout without a new FORMAT_VERSION. Version 2 gave the
deletes log a head; extents, index pages, lines of the log and the recency snapshot are as they were: RECORD_VERSION.

A region file holds, from the front, one region header and then extents without gaps; from the back, index pages. An extent
is a header page and, unless the value fits behind the header in that page, the value rounded up to whole pages.
Unpacking answers None for anything that is not exactly the structure asked for; it never raises on bad bytes.
"""

import struct
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import xxhash

from kvd.store.identity import IDENTITY_BYTES, Identity

FORMAT_NAME = "kvd-disk"
FORMAT_VERSION = 2
"""Of the folder: in its manifest and in the headers of its regions."""
READ_VERSIONS = (1, FORMAT_VERSION)
"""Folders of these versions can be opened; one of an older version is of the newest from then on."""
RECORD_VERSION = 1
"""Of what did not change with version 2 of the folder."""
PAGE = 4096
REGION_SUFFIX = ".kvcache"

REGION_MAGIC = b"KVDREG01"
EXTENT_MAGIC = b"KVDEXT01"
INDEX_MAGIC = b"KVDIDX01"
DELETES_MAGIC = b"KVDDEL01"
DELETES_HEAD_MAGIC = b"KVDDLH01"
RECENCY_MAGIC = b"KVDLRU01"

KIND_BLANK = 0
"""Only in index pages: an entry that means nothing."""
KIND_VALUE = 1
KIND_RESERVED = 2
"""An extent that was lent for writing and is not finished: its length is passed over, and it is no value. In an index page:
the daemon that lent it has died, and the borrower may still be writing."""

FLAG_INLINE = 1
"""The value lies behind the extent header, in the same page."""
FLAG_NO_CHECKSUM = 2
"""The payload checksum is absent: the value was written past the daemon (GPU-direct)."""

EXTENT_HEADER_BYTES = 256
INLINE_MAX = PAGE - EXTENT_HEADER_BYTES
ENTRY_BYTES = 112
ENTRIES_PER_PAGE = 36
DELETES_PER_PAGE = 56

_CHECKSUM_AT = PAGE - 8
_HALF = PAGE // 2
_U64 = struct.Struct("<Q")
_REGION = struct.Struct("<8sIB3xQQQQ")
_EXTENT = struct.Struct("<8sIBBHQQQQQQ64s16sQII")
_INDEX = struct.Struct("<8sIIQQIIQQ")
_ENTRY = struct.Struct("<64sQQQQQBBHI")
_DELETES = struct.Struct("<8sIIQ16x")
_DELETE = struct.Struct("<64sQ")
_DELETES_HEAD = struct.Struct("<8sIIQ")

ENTRY_DTYPE = np.dtype(
    [
        ("identity", "V64"),
        ("sequence", "<u8"),
        ("offset", "<u8"),
        ("length", "<u8"),
        ("expires", "<u8"),
        ("tick", "<u8"),
        ("kind", "u1"),
        ("retention", "u1"),
        ("flags", "<u2"),
        ("note", "<u4"),
    ]
)
"""An index entry, for reading many at once."""

assert _EXTENT.size <= EXTENT_HEADER_BYTES - 8
assert _ENTRY.size == ENTRY_BYTES == ENTRY_DTYPE.itemsize
assert _INDEX.size + ENTRIES_PER_PAGE * ENTRY_BYTES == _CHECKSUM_AT
assert _DELETES.size + DELETES_PER_PAGE * _DELETE.size <= _CHECKSUM_AT

Bytes = bytes | bytearray | memoryview


def round_up(count: int, step: int = PAGE) -> int:
    """`count` rounded up to a multiple of `step`."""
    return -(-count // step) * step


def extent_bytes(length: int) -> int:
    """Bytes an extent takes in its region, header page included."""
    return PAGE if length <= INLINE_MAX else PAGE + round_up(length)


def index_pages(entries: int) -> int:
    """Index pages that `entries` index entries need."""
    return -(-entries // ENTRIES_PER_PAGE)


def payload_checksum(payload: Bytes) -> bytes:
    """The 16 bytes stored for a value: XXH3-128, canonical (big-endian) order, seed 0."""
    return xxhash.xxh3_128_digest(payload)


def region_name(sequence: int) -> str:
    """The file name of a region: 16 hexadecimal digits."""
    return f"{sequence:016x}{REGION_SUFFIX}"


def region_sequence(name: str) -> int | None:
    """The sequence that a region's file name states; None for any other file."""
    stem = name.removesuffix(REGION_SUFFIX)
    if len(stem) != 16 or stem == name or stem.strip("0123456789abcdef"):
        return None
    return int(stem, 16)


def _sealed(body: bytes, size: int = PAGE) -> bytes:
    """`size` bytes: `body`, zeros, and the checksum of both in the last 8."""
    page = body.ljust(size - 8, b"\0")
    return page + _U64.pack(xxhash.xxh3_64_intdigest(page))


def _intact(page: Bytes, size: int = PAGE) -> bool:
    return len(page) == size and _U64.unpack_from(page, size - 8)[0] == xxhash.xxh3_64_intdigest(page[: size - 8])


class RegionHeader(NamedTuple):
    """Page 0 of a region file: two equal halves, either of which will do. A file without a sound one holds nothing."""

    retention: int
    region_bytes: int
    sequence: int
    nonce: int
    created_ns: int
    version: int = FORMAT_VERSION

    def pack(self) -> bytes:
        """One page."""
        body = _REGION.pack(
            REGION_MAGIC, self.version, self.retention, self.region_bytes, self.sequence, self.nonce, self.created_ns
        )
        return 2 * _sealed(body, _HALF)

    @classmethod
    def unpack(cls, page: Bytes) -> "RegionHeader | None":
        """The header in `page`, of any format version (the caller refuses strange ones by name)."""
        for half in (page[:_HALF], page[_HALF:]):
            if _intact(half, _HALF):
                magic, version, retention, size, sequence, nonce, created = _REGION.unpack_from(half)
                if magic == REGION_MAGIC:
                    return cls(retention, size, sequence, nonce, created, version)
        return None


class ExtentHeader(NamedTuple):
    """The first 256 bytes of an extent."""

    region: int
    nonce: int
    offset: int
    sequence: int
    length: int
    expires_ns: int
    identity: Identity
    checksum: bytes
    stored_ns: int
    epoch: int
    retention: int
    flags: int
    kind: int = KIND_VALUE
    note: int = 0

    def pack(self) -> bytes:
        """256 bytes, checksum included."""
        body = _EXTENT.pack(
            EXTENT_MAGIC, RECORD_VERSION, self.kind, self.retention, self.flags,
            self.region, self.nonce, self.offset, self.sequence, self.length, self.expires_ns,
            self.identity, self.checksum, self.stored_ns, self.epoch, self.note,
        ).ljust(EXTENT_HEADER_BYTES - 8, b"\0")  # fmt: skip
        return body + _U64.pack(xxhash.xxh3_64_intdigest(body))

    @classmethod
    def unpack(cls, page: Bytes) -> "ExtentHeader | None":
        """The header at the start of `page`, or None: bad checksum, other magic, version or kind, impossible length."""
        body = page[: EXTENT_HEADER_BYTES - 8]
        if len(page) < EXTENT_HEADER_BYTES:
            return None
        if _U64.unpack_from(page, EXTENT_HEADER_BYTES - 8)[0] != xxhash.xxh3_64_intdigest(body):
            return None
        (magic, version, kind, retention, flags, region, nonce, offset, sequence, length, expires, identity, checksum,
         stored, epoch, note) = _EXTENT.unpack_from(page)  # fmt: skip
        if magic != EXTENT_MAGIC or version != RECORD_VERSION or kind not in (KIND_VALUE, KIND_RESERVED):
            return None
        return cls(
            region, nonce, offset, sequence, length, expires, identity, checksum, stored, epoch, retention, flags, kind, note
        )  # fmt: skip

    def entry(self, tick: int) -> "IndexEntry":
        """What the index says of this extent."""
        return IndexEntry(
            self.identity, self.sequence, self.offset, self.length, self.expires_ns, tick, self.retention, self.flags, self.note
        )


class IndexEntry(NamedTuple):
    """One extent as an index page lists it: all that recovery needs, without reading the extent."""

    identity: Identity
    sequence: int
    offset: int
    length: int
    expires_ns: int
    tick: int
    retention: int
    flags: int
    note: int = 0

    def pack(self) -> bytes:
        """112 bytes."""
        return _ENTRY.pack(
            self.identity, self.sequence, self.offset, self.length, self.expires_ns, self.tick,
            KIND_VALUE, self.retention, self.flags, self.note,
        )  # fmt: skip


def blank_entry() -> bytes:
    """An entry that means nothing (kind 0): it fills an index page that was mended, or stands for a loan that was given back."""
    return bytes(ENTRY_BYTES)


def reserved_entry(offset: int, length: int, retention: int) -> bytes:
    """The entry of an extent that was lent when its daemon died: no value, but its file must not be used again."""
    return _ENTRY.pack(bytes(IDENTITY_BYTES), 0, offset, length, 0, 0, KIND_RESERVED, retention, 0, 0)


@dataclass(frozen=True)
class IndexPage:
    """Page `number` counted from the end of the file: the entries of the extents in [covers_from, covers_to)."""

    region: int
    nonce: int
    number: int
    epoch: int
    covers_from: int
    covers_to: int
    entries: bytes
    """Packed entries, at most 36."""

    @property
    def count(self) -> int:
        """How many entries the page holds."""
        return len(self.entries) // ENTRY_BYTES

    def pack(self) -> bytes:
        """One page."""
        head = _INDEX.pack(
            INDEX_MAGIC,
            RECORD_VERSION,
            self.count,
            self.region,
            self.nonce,
            self.number,
            self.epoch,
            self.covers_from,
            self.covers_to,
        )
        return _sealed(head + self.entries)

    @classmethod
    def unpack(cls, page: Bytes) -> "IndexPage | None":
        """The index page in `page`, or None."""
        if not _intact(page):
            return None
        magic, version, count, region, nonce, number, epoch, start, stop = _INDEX.unpack_from(page)
        if magic != INDEX_MAGIC or version != RECORD_VERSION or not 0 < count <= ENTRIES_PER_PAGE:
            return None
        return cls(region, nonce, number, epoch, start, stop, bytes(page[_INDEX.size : _INDEX.size + count * ENTRY_BYTES]))


def pack_deletes(number: int, deletes: "list[tuple[Identity, int]]") -> bytes:
    """One page of the deletes log: every record of `identity` with a sequence below the one given is dead."""
    assert 0 < len(deletes) <= DELETES_PER_PAGE
    body = b"".join(_DELETE.pack(identity, sequence) for identity, sequence in deletes)
    return _sealed(_DELETES.pack(DELETES_MAGIC, RECORD_VERSION, len(deletes), number) + body)


def unpack_deletes(page: Bytes) -> "list[tuple[Identity, int]] | None":
    """The deletes in one page of the log, or None."""
    if not _intact(page):
        return None
    magic, version, count, _number = _DELETES.unpack_from(page)
    if magic != DELETES_MAGIC or version != RECORD_VERSION or not 0 < count <= DELETES_PER_PAGE:
        return None
    end = _DELETES.size + count * _DELETE.size
    return [(identity, sequence) for identity, sequence in _DELETE.iter_unpack(page[_DELETES.size : end])]


def pack_deletes_head(pairs: int) -> bytes:
    """One page, the first of a deletes log: at least `pairs` pairs of pages with lines follow it and its copy."""
    return _sealed(_DELETES_HEAD.pack(DELETES_HEAD_MAGIC, FORMAT_VERSION, 0, pairs))


def unpack_deletes_head(page: Bytes) -> int | None:
    """How many pairs a deletes log says that it has at least, or None."""
    if not _intact(page):
        return None
    magic, version, _zero, pairs = _DELETES_HEAD.unpack_from(page)
    return int(pairs) if magic == DELETES_HEAD_MAGIC and version == FORMAT_VERSION else None


assert len(Identity()) == 0  # Identity is bytes
assert IDENTITY_BYTES == 64
