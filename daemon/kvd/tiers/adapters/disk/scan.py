"""Reading back what a region holds, from its index pages and, where those end or are damaged, from its extent headers.

Purpose: recovery, eviction and the offline check all ask one question: which extents are in this file? Data flow: index
pages from the end of the file, in windows; each one says which range of the file it covers. A gap before a page (a damaged
one) and everything behind the last page are walked header by header. The walk ends at the first page that is no header of
this very region, or of an earlier epoch: nothing behind that was ever acknowledged as part of the region.

An extent found by walking may be torn: the process or the host died inside the write that held header and payload. So the
payloads of all of them are read and verified (index pages keep that below 64 MiB a region); a torn one is passed over, and an
older record of its identity stays alive. Extents listed in an index page are verified when they are loaded.
Failure: OSError goes up; bad bytes only shorten the answer. Concurrency: any thread, the region being held by the caller.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvd.tiers.adapters.disk.buffers import BufferPool
from kvd.tiers.adapters.disk.format import (
    ENTRIES_PER_PAGE,
    ENTRY_DTYPE,
    EXTENT_HEADER_BYTES,
    FLAG_INLINE,
    FLAG_NO_CHECKSUM,
    KIND_RESERVED,
    KIND_VALUE,
    PAGE,
    ExtentHeader,
    IndexEntry,
    IndexPage,
    extent_bytes,
    payload_checksum,
)
from kvd.tiers.adapters.disk.region import Region
from kvd.tiers.adapters.disk.storage import Storage, read_fully

_FIRST_WINDOW = 16
_LARGEST_WINDOW = 1024
_WALK_WINDOW = 1 << 16
_VERIFY_MAX = 8 << 20


@dataclass(frozen=True)
class Gap:
    """An index page that could not be used, and the range of the file that it covered."""

    page: int
    start: int
    stop: int


@dataclass
class Scan:
    """What a region file holds."""

    indexed: NDArray[np.void]
    """Entries found in index pages (dtype ENTRY_DTYPE)."""
    walked: list[IndexEntry] = field(default_factory=list)
    """Entries found by walking headers."""
    epochs: list[int] = field(default_factory=list)
    """The epochs of those."""
    indexed_epoch: int = 0
    """The epoch of the last extent that an index page lists."""
    data_end: int = PAGE
    indexed_end: int = PAGE
    """Where the extents listed in index pages end."""
    epoch: int = 0
    full_pages: int = 0
    covered: int = PAGE
    """Where the entries that are in no full index page begin."""
    gaps: list[Gap] = field(default_factory=list)
    """Index pages that could not be used although others follow them."""
    reserved: list[tuple[int, int, int]] = field(default_factory=list)
    """(offset, length, epoch) of extents that were lent for writing and never filled."""
    torn: int = 0
    """Extents with a sound header whose payload is not the one that was written."""

    @property
    def damaged_pages(self) -> int:
        """How many index pages could not be used."""
        return len(self.gaps)

    def entries(self) -> list[IndexEntry]:
        """All entries, in no particular order."""
        return [entry_of(row) for row in self.indexed.tolist()] + self.walked


def entry_of(row: tuple[bytes, int, int, int, int, int, int, int, int, int]) -> IndexEntry:
    """An index entry from a row of ENTRY_DTYPE."""
    identity, sequence, offset, length, expires, tick, _kind, retention, flags, note = row
    return IndexEntry(identity, sequence, offset, length, expires, tick, retention, flags, note)


@dataclass(frozen=True)
class Source:
    """The file to scan and who it must be."""

    fd: int
    size: int
    sequence: int
    nonce: int


def scan_region(io: Storage, source: Source, pool: BufferPool) -> Scan:
    """Everything in a region file. Raises OSError."""
    pages = _index_pages(io, source, pool)
    blocks: list[bytes] = []
    scan = Scan(np.empty(0, ENTRY_DTYPE))
    at = PAGE
    for page in pages:
        if page.covers_from > at:
            scan.gaps.append(Gap(page.number - 1, at, page.covers_from))
            _walk(io, source, scan, pool, at, page.covers_from)
        blocks.append(page.entries)
        scan.epoch = max(scan.epoch, page.epoch)
        at = page.covers_to
        if page.count == ENTRIES_PER_PAGE:
            scan.full_pages, scan.covered = page.number + 1, at
    scan.indexed_end, scan.indexed_epoch = at, scan.epoch
    rows = np.frombuffer(b"".join(blocks), ENTRY_DTYPE)
    scan.reserved = [
        (offset, length, scan.epoch) for offset, length in rows[rows["kind"] == KIND_RESERVED][["offset", "length"]].tolist()
    ]
    scan.indexed = _sound(rows, source)
    scan.data_end = _walk(io, source, scan, pool, at, source.size)
    return scan


def _index_pages(io: Storage, source: Source, pool: BufferPool) -> list[IndexPage]:
    """The usable index pages, in order. One damaged page is stepped over; two in a row are the end."""
    found: list[IndexPage] = []
    number = 0
    bad = 0
    at = PAGE
    window = _FIRST_WINDOW
    while bad < 2:
        count = min(window, (source.size - PAGE) // PAGE - number)
        if count <= 0:
            break
        start = source.size - (number + count) * PAGE
        with pool.lend(count * PAGE) as buffer:
            got = read_fully(io, source.fd, [buffer[: count * PAGE]], start)
            for back in range(count - 1, -1, -1):
                page = IndexPage.unpack(buffer[back * PAGE : (back + 1) * PAGE]) if (back + 1) * PAGE <= got else None
                if page is None or not _belongs(page, source, number, at):
                    bad += 1
                    if bad == 2:
                        break
                else:
                    bad = 0
                    found.append(page)
                    at = page.covers_to
                    if page.count < ENTRIES_PER_PAGE:
                        return found
                number += 1
        window = min(4 * window, _LARGEST_WINDOW)
    return found


def _belongs(page: IndexPage, source: Source, number: int, at: int) -> bool:
    return (
        page.region == source.sequence
        and page.nonce == source.nonce
        and page.number == number
        and at <= page.covers_from < page.covers_to <= source.size - (number + 1) * PAGE
    )


def _sound(rows: NDArray[np.void], source: Source) -> NDArray[np.void]:
    """The rows that name an extent inside the file (all of them, unless the writer had a fault)."""
    offset, length = rows["offset"], rows["length"]
    good = (offset >= PAGE) & (offset < source.size) & (offset % PAGE == 0) & (length < source.size)
    good &= (rows["kind"] == KIND_VALUE) & (rows["retention"] <= 3) & (offset + length < source.size)
    return rows if good.all() else rows[good]


def _walk(io: Storage, source: Source, scan: Scan, pool: BufferPool, start: int, stop: int) -> int:
    """Add the extents found between `start` and `stop` by their headers; where the chain ends."""
    at = start
    window_at, window_bytes = 0, 0
    with pool.lend(_WALK_WINDOW) as buffer:
        while at + PAGE <= stop:
            if not window_at <= at < window_at + window_bytes:
                window_at = at
                window_bytes = read_fully(io, source.fd, [buffer[: min(_WALK_WINDOW, source.size - at)]], at) // PAGE * PAGE
                if not window_bytes:
                    break
            page = buffer[at - window_at : at - window_at + PAGE]
            header = ExtentHeader.unpack(page)
            if header is None or not _follows(header, source, scan, at):
                break
            size = extent_bytes(header.length)
            if at + size > stop:
                break
            entry = header.entry(0)
            if header.kind != KIND_VALUE:
                scan.reserved.append((header.offset, header.length, header.epoch))
            elif verify_payload(io, source, entry, pool) is False:
                scan.torn += 1
            else:
                scan.walked.append(entry)
                scan.epochs.append(header.epoch)
            scan.epoch = max(scan.epoch, header.epoch)
            at += size
    return at


def _follows(header: ExtentHeader, source: Source, scan: Scan, at: int) -> bool:
    return header.region == source.sequence and header.nonce == source.nonce and header.offset == at and header.epoch >= scan.epoch


def verify_payload(io: Storage, source: Source, entry: IndexEntry, pool: BufferPool) -> bool | None:
    """Whether the extent is whole and its bytes match; None where it has no checksum to match. Raises OSError."""
    import xxhash

    with pool.lend(PAGE) as head:
        if read_fully(io, source.fd, [head[:PAGE]], entry.offset) != PAGE:
            return False
        header = ExtentHeader.unpack(head[:PAGE])
        if header is None or not _same(header, source, entry):
            return False
        if header.flags & FLAG_NO_CHECKSUM:
            return None
        if header.flags & FLAG_INLINE:
            return payload_checksum(head[EXTENT_HEADER_BYTES : EXTENT_HEADER_BYTES + entry.length]) == header.checksum
    digest = xxhash.xxh3_128()
    at, left = entry.offset + PAGE, entry.length
    with pool.lend(min(_VERIFY_MAX, extent_bytes(left))) as buffer:
        while left:
            step = min(len(buffer), extent_bytes(left) - PAGE)
            got = min(read_fully(io, source.fd, [buffer[:step]], at), left)
            if not got:
                return False
            digest.update(buffer[:got])
            at += got
            left -= got
    return digest.digest() == header.checksum


def _same(header: ExtentHeader, source: Source, entry: IndexEntry) -> bool:
    return (
        header.kind == KIND_VALUE
        and (header.region, header.nonce, header.offset) == (source.sequence, source.nonce, entry.offset)
        and header.identity == entry.identity
        and header.length == entry.length
        and header.sequence == entry.sequence
    )


def read_records(io: Storage, region: Region, pool: BufferPool) -> list[IndexEntry] | None:
    """Everything a region of the running store holds; None where part of it is unreadable. Raises OSError."""
    scan = scan_region(io, Source(region.fd, region.size, region.sequence, region.nonce), pool)
    if scan.gaps or scan.data_end < region.data_end:
        return None
    return scan.entries()
