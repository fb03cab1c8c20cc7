"""Writing extents: one or two calls a group, in place from the caller's memory where that is aligned.

A group is up to 256 values and 8 MiB, or one large value. The small ones' header pages and payloads go out in one vectored
write. Of a large value most of the payload is written first, while another thread computes its checksum; the header page
follows together with the first part of the payload, so the device never waits for a hash nor does a 4 KiB write by itself.
Values whose memory O_DIRECT cannot use are copied through an aligned buffer.

Contract: on return all of the group is written (not synced); OSError: any part of it may be. The caller owns the region's
append path. Concurrency: any thread, one a region.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass

from kvd.store.identity import Identity
from kvd.tiers.adapters.disk.buffers import ZEROS, BufferPool, address, copy
from kvd.tiers.adapters.disk.format import (
    FLAG_INLINE,
    FLAG_NO_CHECKSUM,
    INLINE_MAX,
    PAGE,
    ExtentHeader,
    IndexEntry,
    extent_bytes,
    payload_checksum,
    round_up,
)
from kvd.tiers.adapters.disk.region import Region
from kvd.tiers.adapters.disk.storage import DirectIO, Storage, write_fully

GROUP_BYTES = 8 << 20
GROUP_EXTENTS = 256
LARGE_BYTES = 4 << 20
"""A value above this is a group of its own, its checksum computed while it is written."""
_HEAD_BYTES_MIN = 1 << 20
_BOUNCE_BYTES = 4 << 20
_HASH_AHEAD_MIN = 128 << 10


@dataclass(slots=True)
class Draft:
    """One value on its way to disk, and what became of it."""

    identity: Identity
    data: memoryview
    retention: int
    expires_ns: int
    sequence: int
    tick: int
    padded: memoryview | None = None
    note: int = 0
    hashing: "Future[list[bytes]] | None" = None
    """Payload checksums that another thread has begun to compute, this one's among them."""
    hashing_at: int = 0
    """Where in that list."""
    aligned: bool | None = None
    """Whether O_DIRECT can use its memory, once that is known."""
    unchecked: bool = False
    """Its checksum is absent, and stays so: nobody knows whether these are the bytes that were written."""
    region: Region | None = None
    """Where it is, once it is written."""
    reason: str = ""
    """Why it is not."""

    @property
    def inline(self) -> bool:
        """Whether it lies in its header page."""
        return len(self.data) <= INLINE_MAX

    @property
    def size(self) -> int:
        """Bytes of the extent."""
        return extent_bytes(len(self.data))


class ExtentWriter:
    """Writes groups of drafts into regions of one store."""

    def __init__(self, io: Storage, direct: DirectIO, pool: BufferPool, hasher: Executor, clock_ns: Callable[[], int]) -> None:
        self._io = io
        self._direct = direct
        self._pool = pool
        self._hasher = hasher
        self._clock_ns = clock_ns

    def hash_ahead(self, drafts: Sequence[Draft]) -> None:
        """Begin to compute the checksums of what is written next, up to a group of it, in one piece of work."""
        total = 0
        chosen: list[Draft] = []
        for draft in drafts:
            total += len(draft.data)
            if draft.hashing is None and len(draft.data) >= _HASH_AHEAD_MIN:
                draft.hashing_at = len(chosen)
                chosen.append(draft)
            if total >= GROUP_BYTES:
                break
        if chosen:
            work = self._hasher.submit(_checksums, [draft.data for draft in chosen])
            for draft in chosen:
                draft.hashing = work

    def write(self, region: Region, group: list[Draft]) -> list[IndexEntry]:
        """Append a group at the end of the region's data; its index entries. Raises OSError."""
        if len(group) == 1 and group[0].size > LARGE_BYTES:
            return [self._write_large(region, group[0])]
        offset = region.data_end
        bounced = sum(round_up(len(draft.data)) for draft in group if not draft.inline and not self._in_place(draft))
        entries: list[IndexEntry] = []
        parts: list[memoryview] = []
        # Two pages a value: its header, and its tail where it is written in place but does not end on a page.
        with self._pool.lend(2 * len(group) * PAGE + bounced) as scratch:
            bounce_at = 2 * len(group) * PAGE
            for number, draft in enumerate(group):
                header = self._header(region, draft, offset)
                page = scratch[number * PAGE : (number + 1) * PAGE]
                _fill(page, header.pack(), draft.data if draft.inline else None)
                parts.append(page)
                if not draft.inline and self._in_place(draft):
                    tail = scratch[(len(group) + number) * PAGE :][:PAGE]
                    parts.extend(self._in_pages(draft, 0, len(draft.data), tail))
                elif not draft.inline:
                    parts.append(_bounce(scratch[bounce_at:], draft.data))
                    bounce_at += round_up(len(draft.data))
                entries.append(header.entry(draft.tick))
                offset += draft.size
            write_fully(self._io, region.fd, parts, region.data_end)
        return entries

    def _write_large(self, region: Region, draft: Draft) -> IndexEntry:
        """The payload but for its first part, then the header page with that part."""
        offset = region.data_end
        if draft.hashing is None:
            draft.hashing = self._hasher.submit(_checksums, [draft.data])
        in_place = self._in_place(draft)
        with self._pool.lend(2 * PAGE + (0 if in_place else _BOUNCE_BYTES)) as scratch:

            def pages_of(start: int, stop: int) -> list[memoryview]:
                if in_place:
                    return self._in_pages(draft, start, stop, scratch[PAGE : 2 * PAGE])
                return [_bounce(scratch[2 * PAGE :], draft.data[start:stop])]

            first, *others = self._pieces(draft, in_place)
            for start, stop in others:
                write_fully(self._io, region.fd, pages_of(start, stop), offset + PAGE + start)
            header = self._header(region, draft, offset)
            _fill(scratch[:PAGE], header.pack(), None)
            write_fully(self._io, region.fd, [scratch[:PAGE], *pages_of(*first)], offset)
        return header.entry(draft.tick)

    def _pieces(self, draft: Draft, in_place: bool) -> Iterator[tuple[int, int]]:
        """The ranges that a large value is written in; the first one is written last, with the header."""
        length = len(draft.data)
        if not in_place:
            for start in range(0, length, _BOUNCE_BYTES):
                yield start, min(start + _BOUNCE_BYTES, length)
        elif draft.hashing is not None and draft.hashing.done():
            yield 0, length
        else:
            head = max(_HEAD_BYTES_MIN, length // 4 // PAGE * PAGE)
            yield 0, head
            yield head, length

    def _in_pages(self, draft: Draft, start: int, stop: int, tail_page: memoryview) -> list[memoryview]:
        """The payload's bytes [start, stop) from where they lie, and what brings them to a whole page."""
        size = round_up(stop - start)
        if stop - start == size:
            return [draft.data[start:stop]]
        if draft.padded is not None and len(draft.padded) >= start + size:
            return [draft.padded[start : start + size]]
        if not self._direct.ok:
            return [draft.data[start:stop], ZEROS[: size - (stop - start)]]
        middle = start + (stop - start) // PAGE * PAGE
        tail_page[:] = bytes(draft.data[middle:stop]).ljust(PAGE, b"\0")
        return [draft.data[start:middle], tail_page] if middle > start else [tail_page]

    def _in_place(self, draft: Draft) -> bool:
        """Whether the value can be written from where it lies."""
        if not self._direct.ok:
            return True
        if draft.aligned is None:
            draft.aligned = address(draft.data) % self._direct.memory_align == 0
        return draft.aligned

    def _header(self, region: Region, draft: Draft, offset: int) -> ExtentHeader:
        """The draft's header at `offset`; waits for its checksum."""
        checksum = payload_checksum(draft.data) if draft.hashing is None else draft.hashing.result()[draft.hashing_at]
        flags = FLAG_INLINE if draft.inline else 0
        if draft.unchecked:
            checksum, flags = bytes(len(checksum)), flags | FLAG_NO_CHECKSUM
        return ExtentHeader(
            region.sequence, region.nonce, offset, draft.sequence, len(draft.data), draft.expires_ns, draft.identity, checksum,
            self._clock_ns(), region.epoch, draft.retention, flags, note=draft.note,
        )  # fmt: skip


def _checksums(payloads: list[memoryview]) -> list[bytes]:
    return [payload_checksum(payload) for payload in payloads]


def _fill(page: memoryview, header: bytes, inline: memoryview | None) -> None:
    """Write a header page: header, inline value, zeros."""
    body = header + (bytes(inline) if inline is not None else b"")
    page[:] = body.ljust(PAGE, b"\0")


def _bounce(space: memoryview, data: memoryview) -> memoryview:
    """`data`, copied to the start of `space` and brought to a whole page."""
    size = round_up(len(data))
    copy(space, data)
    space[len(data) : size] = bytes(size - len(data))
    return space[:size]
