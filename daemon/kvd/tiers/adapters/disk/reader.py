"""Loading values: one vectored read from the extent straight into the caller's memory, then every check there is.

Header page and payload are read together; values that lie next to each other in a region (the chunks of one prefix usually
do) are read by one call. The value is only OK when the header is exactly the one looked for: region, nonce, offset, identity,
length, and both checksums. So a stale extent of a recycled file, a flipped bit or a torn write is a miss and never bytes.

A reader pins its region: the file is not used again, nor its descriptor closed, until the pin ends.
Concurrency: any thread; the catalog's lock is held only to look up and to count.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvd.store.identity import Identity
from kvd.tiers.adapters.base import Loaded, Want
from kvd.tiers.adapters.disk.buffers import BufferPool, address, copy
from kvd.tiers.adapters.disk.catalog import Catalog
from kvd.tiers.adapters.disk.files import RegionFiles
from kvd.tiers.adapters.disk.format import (
    EXTENT_HEADER_BYTES,
    FLAG_INLINE,
    FLAG_NO_CHECKSUM,
    INLINE_MAX,
    PAGE,
    ExtentHeader,
    extent_bytes,
    payload_checksum,
    round_up,
)
from kvd.tiers.adapters.disk.index import Entry, at
from kvd.tiers.adapters.disk.region import Region
from kvd.tiers.adapters.disk.storage import DirectIO, Storage, read_fully

RUN_BYTES = 64 << 20
RUN_EXTENTS = 256
_BOUNCE_BYTES = 4 << 20


@dataclass(slots=True)
class _Read:
    """One value to read."""

    number: int
    identity: Identity
    into: memoryview
    padded: memoryview | None
    entry: Entry
    region: Region


class Reader:
    """Loads values of one store."""

    def __init__(self, io: Storage, catalog: Catalog, files: RegionFiles, direct: DirectIO, pool: BufferPool) -> None:
        self._io = io
        self._catalog = catalog
        self._files = files
        self._direct = direct
        self._pool = pool

    def load(self, wants: Sequence[Want]) -> list[Loaded]:
        """Fill each buffer. Never raises for bad bytes or I/O errors: those are CORRUPT and ERROR."""
        results = [Loaded.MISS] * len(wants)
        reads = self._look_up(wants)
        for run in _runs(reads):
            try:
                self._read_run(run, results)
            except OSError:
                self._catalog.counters.io_errors += 1
                for read in run:
                    results[read.number] = Loaded.ERROR
        self._settle(reads, wants, results)
        return results

    def _look_up(self, wants: Sequence[Want]) -> list[_Read]:
        """Find and pin."""
        catalog = self._catalog
        now = catalog.clock_ns()
        reads: list[_Read] = []
        with catalog.changed:
            for number, want in enumerate(wants):
                entry = catalog.find_locked(want.identity, now)
                if entry is None or entry.length != len(want.into):
                    continue
                region = catalog.regions[entry.slot]
                region.pins += 1
                reads.append(_Read(number, want.identity, want.into, want.padded, entry, region))
        return reads

    def _settle(self, reads: list[_Read], wants: Sequence[Want], results: list[Loaded]) -> None:
        """Count, mark as used, forget what is corrupt, unpin."""
        catalog = self._catalog
        counters = catalog.counters
        with catalog.changed:
            for read in reads:
                here = at(catalog.index.get(read.identity), read.entry.slot, read.entry.offset)
                result = results[read.number]
                if result is Loaded.OK:
                    counters.hits += 1
                    counters.load_bytes += read.entry.length
                    if here:
                        catalog.touch_locked(read.identity, read.entry)
                elif result is Loaded.CORRUPT:
                    counters.corruptions += 1
                    if here:
                        catalog.drop_locked(read.identity)
            counters.misses += len(wants) - len(reads)
        for read in reads:
            self._files.unpin(read.region)

    def _read_run(self, run: list[_Read], results: list[Loaded]) -> None:
        """Read values that lie side by side."""
        first, last = run[0].entry, run[-1].entry
        span = last.offset + extent_bytes(last.length) - first.offset
        if len(run) == 1 and not self._in_place(run[0]) and span > _BOUNCE_BYTES:
            results[run[0].number] = self._read_bounced(run[0])
            return
        bounced = sum(round_up(read.entry.length) for read in run if not self._in_place(read))
        with self._pool.lend(2 * len(run) * PAGE + bounced) as scratch:
            bounce_at = 2 * len(run) * PAGE
            parts: list[memoryview] = []
            copies: list[tuple[memoryview, memoryview]] = []
            for number, read in enumerate(run):
                parts.append(scratch[number * PAGE : (number + 1) * PAGE])
                if read.entry.length <= INLINE_MAX:
                    continue
                if self._in_place(read):
                    tail = scratch[(len(run) + number) * PAGE :][:PAGE]
                    parts.extend(self._targets(read, tail, copies))
                else:
                    size = round_up(read.entry.length)
                    parts.append(scratch[bounce_at : bounce_at + size])
                    copies.append((read.into, scratch[bounce_at : bounce_at + read.entry.length]))
                    bounce_at += size
            count = read_fully(self._io, run[0].region.fd, parts, first.offset)
            for target, source in copies:
                copy(target, source)
            for number, read in enumerate(run):
                end = read.entry.offset + extent_bytes(read.entry.length) - first.offset
                whole = end <= count
                results[read.number] = self._check(read, scratch[number * PAGE : (number + 1) * PAGE]) if whole else Loaded.CORRUPT

    def _targets(self, read: _Read, tail: memoryview, copies: list[tuple[memoryview, memoryview]]) -> list[memoryview]:
        """Where the pages of a payload go when the caller's memory takes them directly."""
        into, size = read.into, round_up(read.entry.length)
        if len(into) == size:
            return [into]
        if read.padded is not None and len(read.padded) == size:
            return [read.padded]
        whole = len(into) // PAGE * PAGE
        copies.append((into[whole:], tail[: len(into) - whole]))
        return [into[:whole], tail] if whole else [tail]

    def _read_bounced(self, read: _Read) -> Loaded:
        """A large value whose buffer O_DIRECT cannot use: piece by piece through an aligned buffer."""
        fd, entry = read.region.fd, read.entry
        with self._pool.lend(_BOUNCE_BYTES + PAGE) as bounce:
            header = bounce[_BOUNCE_BYTES : _BOUNCE_BYTES + PAGE]
            if read_fully(self._io, fd, [header], entry.offset) != PAGE:
                return Loaded.CORRUPT
            for start in range(0, entry.length, _BOUNCE_BYTES):
                piece = read.into[start : start + _BOUNCE_BYTES]
                size = round_up(len(piece))
                if read_fully(self._io, fd, [bounce[:size]], entry.offset + PAGE + start) != size:
                    return Loaded.CORRUPT
                copy(piece, bounce[: len(piece)])
            return self._check(read, header)

    def _check(self, read: _Read, page: memoryview) -> Loaded:
        header = ExtentHeader.unpack(page)
        if header is None or not _is(header, read.region, read.entry.offset, read.identity, read.entry.length):
            return Loaded.CORRUPT
        if header.flags & FLAG_INLINE:
            payload = page[EXTENT_HEADER_BYTES : EXTENT_HEADER_BYTES + header.length]
            if payload_checksum(payload) != header.checksum:
                return Loaded.CORRUPT
            copy(read.into, payload)
            return Loaded.OK
        intact = bool(header.flags & FLAG_NO_CHECKSUM) or payload_checksum(read.into) == header.checksum
        return Loaded.OK if intact else Loaded.CORRUPT

    def _in_place(self, read: _Read) -> bool:
        return read.entry.length <= INLINE_MAX or not self._direct.ok or address(read.into) % self._direct.memory_align == 0

    def read_value(self, region: Region, entry: Entry, identity: Identity) -> tuple[ExtentHeader, memoryview] | None:
        """A value in memory of its own, with its header, for moving it elsewhere; None where it does not check. Raises OSError.

        The caller holds the region.
        """
        size = extent_bytes(entry.length)
        buffer = memoryview(bytearray(size + PAGE))
        skip = -address(buffer) % PAGE
        whole = buffer[skip : skip + size]
        if read_fully(self._io, region.fd, [whole], entry.offset) != size:
            return None
        header = ExtentHeader.unpack(whole[:PAGE])
        if header is None or not _is(header, region, entry.offset, identity, entry.length):
            return None
        start = EXTENT_HEADER_BYTES if header.flags & FLAG_INLINE else PAGE
        payload = whole[start : start + entry.length]
        if header.flags & FLAG_NO_CHECKSUM or payload_checksum(payload) == header.checksum:
            return header, payload
        return None


def _is(header: ExtentHeader, region: Region, offset: int, identity: Identity, length: int) -> bool:
    """Whether the header is the one of this very extent, and agrees with itself on where the payload lies."""
    inline = bool(header.flags & FLAG_INLINE)
    return (
        header.region == region.sequence
        and header.nonce == region.nonce
        and header.offset == offset
        and header.identity == identity
        and header.length == length
        and inline == (length <= INLINE_MAX)
    )


def _runs(reads: list[_Read]) -> list[list[_Read]]:
    """Reads in file order, cut into runs without gaps."""
    runs: list[list[_Read]] = []
    total = 0
    end = -1
    for read in sorted(reads, key=lambda read: (read.entry.slot, read.entry.offset)):
        size = extent_bytes(read.entry.length)
        run = runs[-1] if runs else []
        near = run and run[-1].region is read.region and read.entry.offset == end
        if near and total + size <= RUN_BYTES and len(run) < RUN_EXTENTS:
            run.append(read)
            total += size
        else:
            runs.append([read])
            total = size
        end = read.entry.offset + size
    return runs
