"""Loading values: vectored reads from the extents straight into the caller's memory, then every check there is.

Header page and payload are read together; values that lie next to each other in a region (the chunks of one prefix usually
do) are read by one call, up to 4 MiB; larger values are read in pieces. While one read is checked the next two are under
way, so that checksums cost no time beside the device's. A value is only OK when its header is exactly the one looked for:
region, nonce, offset, identity, length, and both checksums. So a stale extent of a recycled file, a flipped bit or a torn write
is a miss and never bytes.

A reader pins its region: the file is not used again, nor its descriptor closed, until the pin ends. No call returns, or
raises, while a read into its buffers is still under way. Concurrency: any thread; the catalog's lock is held only to look up
and to count.
"""

import shlex
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from functools import partial

import xxhash

from kvd.store.identity import Identity
from kvd.tiers.adapters.base import Loaded, Want
from kvd.tiers.adapters.damage import DamageLog
from kvd.tiers.adapters.disk.buffers import BufferPool, address, copy
from kvd.tiers.adapters.disk.catalog import Catalog
from kvd.tiers.adapters.disk.files import RegionFiles
from kvd.tiers.adapters.disk.format import (
    EXTENT_HEADER_BYTES,
    FLAG_INLINE,
    FLAG_NO_CHECKSUM,
    INLINE_MAX,
    KIND_VALUE,
    PAGE,
    ExtentHeader,
    extent_bytes,
    payload_checksum,
    round_up,
)
from kvd.tiers.adapters.disk.index import Entry, at
from kvd.tiers.adapters.disk.region import Region
from kvd.tiers.adapters.disk.storage import DirectIO, Storage, read_fully

RUN_BYTES = 4 << 20
RUN_EXTENTS = 256
LARGE_BYTES = 8 << 20
"""From here on a value is read in pieces."""
PIECES = 4
"""So many, or more where one would be above 32 MiB."""
_PIECE_MAX = 32 << 20
_BOUNCE_BYTES = 4 << 20
_IN_FLIGHT = 3


@dataclass(slots=True)
class _Read:
    """One value to read."""

    number: int
    identity: Identity
    into: memoryview
    padded: memoryview | None
    entry: Entry
    region: Region


@dataclass(slots=True)
class _Job:
    """One call of preadv: where from, where to, and what to do with it afterwards."""

    reads: list[_Read]
    offset: int
    scratch: memoryview
    finish: Callable[[int], None]
    """Called with the bytes read."""
    parts: list[memoryview] = field(default_factory=list)
    copies: list[tuple[memoryview, memoryview]] = field(default_factory=list)
    """(target, source) for what could not be read in place."""


class Reader:
    """Loads values of one store."""

    def __init__(
        self, io: Storage, catalog: Catalog, files: RegionFiles, direct: DirectIO, pool: BufferPool, threads: Executor
    ) -> None:
        self._io = io
        self._catalog = catalog
        self._files = files
        self._direct = direct
        self._pool = pool
        self._threads = threads
        self._damage = DamageLog(
            f"Once this daemon is stopped, kvd verify --repair {shlex.quote(str(files.root))} drops all of them"
        )

    def load(self, wants: Sequence[Want]) -> list[Loaded]:
        """Fill each buffer. Never raises for bad bytes or I/O errors: those are CORRUPT and ERROR."""
        results = [Loaded.MISS] * len(wants)
        reads = self._look_up(wants)
        try:
            runs = _runs(reads)
            if len(runs) == 1 and not _large(runs[0]):
                self._finish(self._plan_run(runs[0], results), None, results)
            else:
                self._read_ahead(self._plan(runs, results), results)
        finally:
            self._settle(reads, wants, results)
        return results

    def _read_ahead(self, jobs: Iterator[_Job], results: list[Loaded]) -> None:
        """Keep some reads under way while one is being checked."""
        waiting: deque[tuple[_Job, Future[int]]] = deque()
        try:
            for job in jobs:
                waiting.append((job, self._threads.submit(self._read, job)))
                if len(waiting) == _IN_FLIGHT:
                    self._finish(*waiting.popleft(), results)
            while waiting:
                self._finish(*waiting.popleft(), results)
        finally:
            # The buffers are the caller's: whatever happened, no read may outlive this call.
            for _, future in waiting:
                future.exception()

    def _read(self, job: _Job) -> int:
        return read_fully(self._io, job.reads[0].region.fd, job.parts, job.offset)

    def _finish(self, job: _Job, future: "Future[int] | None", results: list[Loaded]) -> None:
        """Wait for the read (or do it, without a future), check what it brought, give the scratch memory back."""
        try:
            count = self._read(job) if future is None else future.result()
            for target, source in job.copies:
                copy(target, source)
            job.finish(count)
        except OSError:
            self._catalog.counters.io_errors += 1
            for read in job.reads:
                results[read.number] = Loaded.ERROR
        finally:
            self._pool.give(job.scratch)

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
            if results[read.number] is Loaded.CORRUPT:
                self.damaged(read.region, read.entry)

    def damaged(self, region: Region, entry: Entry) -> None:
        """Say that what was read at `entry` is not what was written there."""
        self._damage.note(str(region.path), f"{entry.length} bytes at offset {entry.offset}")

    # -- planning ----------------------------------------------------------------------------------------------------------

    def _plan(self, runs: list[list[_Read]], results: list[Loaded]) -> Iterator[_Job]:
        """The calls that read everything, in file order; each takes its scratch memory only when it is asked for."""
        for run in runs:
            if _large(run):
                yield from self._plan_large(run[0], results)
            else:
                yield self._plan_run(run, results)

    def _plan_run(self, run: list[_Read], results: list[Loaded]) -> _Job:
        """One call for values that lie side by side."""
        start = run[0].entry.offset
        bounced = sum(round_up(read.entry.length) for read in run if not self._in_place(read))
        scratch = self._pool.take(2 * len(run) * PAGE + bounced)
        headers = [scratch[number * PAGE : (number + 1) * PAGE] for number in range(len(run))]

        def finish(count: int) -> None:
            for read, header in zip(run, headers, strict=True):
                whole = read.entry.offset + extent_bytes(read.entry.length) - start <= count
                results[read.number] = self._check(read, header) if whole else Loaded.CORRUPT

        job = _Job(run, start, scratch, finish)
        bounce_at = 2 * len(run) * PAGE
        for number, read in enumerate(run):
            job.parts.append(headers[number])
            length = read.entry.length
            if length <= INLINE_MAX:
                continue
            if self._in_place(read):
                job.parts.extend(_targets(read, 0, length, scratch[(len(run) + number) * PAGE :][:PAGE], job.copies))
            else:
                job.parts.append(scratch[bounce_at : bounce_at + round_up(length)])
                job.copies.append((read.into, scratch[bounce_at : bounce_at + length]))
                bounce_at += round_up(length)
        return job

    def _plan_large(self, read: _Read, results: list[Loaded]) -> Iterator[_Job]:
        """Several calls for one value, its checksum computed piece by piece."""
        length = read.entry.length
        in_place = self._in_place(read)
        step = min(_PIECE_MAX, round_up(-(-length // PIECES))) if in_place else _BOUNCE_BYTES
        progress = _Progress(read, results)
        for start in range(0, length, step):
            stop = min(start + step, length)
            scratch = self._pool.take(2 * PAGE + (0 if in_place else step))
            with_header = start == 0
            offset = read.entry.offset + (0 if with_header else PAGE + start)
            header = scratch[:PAGE] if with_header else None
            size = round_up(stop - start) + (PAGE if with_header else 0)
            job = _Job([read], offset, scratch, partial(progress.take, header, start, stop, size))
            if header is not None:
                job.parts.append(header)
            if in_place:
                job.parts.extend(_targets(read, start, stop, scratch[PAGE : 2 * PAGE], job.copies))
            else:
                space = scratch[2 * PAGE : 2 * PAGE + round_up(stop - start)]
                job.parts.append(space)
                job.copies.append((read.into[start:stop], space[: stop - start]))
            yield job

    # -- checking ----------------------------------------------------------------------------------------------------------

    def _check(self, read: _Read, page: memoryview) -> Loaded:
        header = ExtentHeader.unpack(page)
        if header is None or not is_of(header, read.region, read.entry.offset, read.identity, read.entry.length):
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
        if header is None or not is_of(header, region, entry.offset, identity, entry.length):
            return None
        start = EXTENT_HEADER_BYTES if header.flags & FLAG_INLINE else PAGE
        payload = whole[start : start + entry.length]
        if header.flags & FLAG_NO_CHECKSUM or payload_checksum(payload) == header.checksum:
            return header, payload
        return None


def is_of(header: ExtentHeader, region: Region, offset: int, identity: Identity, length: int) -> bool:
    """Whether the header is the one of this very extent, and agrees with itself on where the payload lies."""
    inline = bool(header.flags & FLAG_INLINE)
    return (
        header.kind == KIND_VALUE
        and header.region == region.sequence
        and header.nonce == region.nonce
        and header.offset == offset
        and header.identity == identity
        and header.length == length
        and inline == (length <= INLINE_MAX)
    )


class _Progress:
    """The checking of one large value, piece by piece and in order."""

    def __init__(self, read: _Read, results: list[Loaded]) -> None:
        self._read = read
        self._results = results
        self._digest = xxhash.xxh3_128()
        self._header: ExtentHeader | None = None
        results[read.number] = Loaded.OK

    def take(self, header: memoryview | None, start: int, stop: int, size: int, count: int) -> None:
        """A piece is there: `count` bytes of the `size` that were to be read."""
        read = self._read
        if self._results[read.number] is not Loaded.OK:
            return
        if header is not None:
            found = ExtentHeader.unpack(header)
            if found is not None and is_of(found, read.region, read.entry.offset, read.identity, read.entry.length):
                self._header = found
        if self._header is None or count < size:
            self._results[read.number] = Loaded.CORRUPT
            return
        if self._header.flags & FLAG_NO_CHECKSUM:
            return
        self._digest.update(read.into[start:stop])
        if stop == read.entry.length and self._digest.digest() != self._header.checksum:
            self._results[read.number] = Loaded.CORRUPT


def _large(run: list[_Read]) -> bool:
    """Whether this is one value that is read in pieces."""
    return len(run) == 1 and extent_bytes(run[0].entry.length) > LARGE_BYTES


def _targets(read: _Read, start: int, stop: int, tail: memoryview, copies: list[tuple[memoryview, memoryview]]) -> list[memoryview]:
    """Where the pages of the payload's bytes [start, stop) go when the caller's memory takes them directly."""
    whole_stop = start + round_up(stop - start)
    if read.padded is not None and len(read.padded) >= whole_stop:
        return [read.padded[start:whole_stop]]
    if stop == whole_stop:
        return [read.into[start:stop]]
    middle = start + (stop - start) // PAGE * PAGE
    copies.append((read.into[middle:stop], tail[: stop - middle]))
    return [read.into[start:middle], tail] if middle > start else [tail]


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
