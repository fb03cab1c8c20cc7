"""Appending values: lanes, groups of extents, and one or two writes a group.

Purpose: put values on disk at the speed of the device, in place from the caller's memory where that is aligned.
A *lane* is an open region with one writer at a time. Because a lane's extents are written one after the other, the extents of
a region are valid up to some point and nothing after it, whatever was in flight when the process died.

Data flow: values -> groups (up to 8 MiB or one large value) -> one pwritev of header pages and payloads together, or, for a
large value, payload first (its checksum is computed meanwhile by another thread) and the header page last, which makes it
valid -> catalog. A value is visible in the index only after all of that.

Failure: an OSError voids the group it hit and the rest of the call; the values are reported with the reason 'full' or
'io_error'. What the failed write left behind is written over by the next one, whose extents carry a higher epoch, so that a
leftover behind them is never taken for their successor. A region that fails three times in a row is sealed.
Concurrency: any number of threads, one per lane.
"""

import errno
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass

from kvd.store.identity import Identity
from kvd.tiers.adapters.base import AdapterError
from kvd.tiers.adapters.disk.buffers import ZEROS, BufferPool, address, copy
from kvd.tiers.adapters.disk.catalog import Catalog
from kvd.tiers.adapters.disk.format import (
    FLAG_INLINE,
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
"""From here on the payload is written first and hashed meanwhile."""
_BOUNCE_BYTES = 4 << 20
_FAILURES_MAX = 3
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
    checksum: "Future[bytes] | None" = None
    """The payload's checksum, where another thread has begun to compute it."""
    region: Region | None = None
    """Where it is, once it is written."""
    reason: str = ""
    """Why it is not."""

    @property
    def inline(self) -> bool:
        """Whether it lies in its header page."""
        return len(self.data) <= INLINE_MAX


def reason_of(error: OSError) -> str:
    """The word that Stored.reason has for an OSError."""
    return "full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "io_error"


class Writer:
    """Appends drafts to the lanes of one store."""

    def __init__(
        self,
        io: Storage,
        catalog: Catalog,
        make_region: Callable[[int], Region],
        sync_region: Callable[[Region], None],
        direct: DirectIO,
        pool: BufferPool,
        hasher: Executor,
    ) -> None:
        self._io = io
        self._catalog = catalog
        self._make_region = make_region
        self._sync_region = sync_region
        self._direct = direct
        self._pool = pool
        self._hasher = hasher
        self._lanes: dict[int, list[Region]] = {}
        self._opening: dict[int, int] = {}

    # -- lanes -----------------------------------------------------------------------------------------------------------

    def adopt(self, region: Region) -> None:
        """A region that recovery found unfinished takes appends again."""
        self._lanes.setdefault(region.retention, []).append(region)

    def open_regions(self) -> list[Region]:
        """Every open region."""
        with self._catalog.changed:
            return [region for lanes in self._lanes.values() for region in lanes]

    def _acquire(self, retention: int, size: int) -> Region:
        """An open region of this class with room for `size` bytes, owned by the caller. Raises OSError, AdapterError."""
        changed = self._catalog.changed
        while True:
            with changed:
                lanes = self._lanes.setdefault(retention, [])
                idle = [region for region in lanes if not region.busy]
                fits = next((region for region in idle if region.room(size, 1)), None)
                if fits is not None:
                    fits.busy = True
                    return fits
                opening = self._opening.get(retention, 0)
                full = None
                if len(lanes) + opening < self._catalog.geometry.lanes:
                    self._opening[retention] = opening + 1
                elif idle:
                    full = min(idle, key=Region.room_left)
                    full.busy = True
                    lanes.remove(full)
                else:
                    changed.wait()
                    continue
            if full is not None:
                self._seal(full)
            else:
                self._open_lane(retention)

    def _open_lane(self, retention: int) -> None:
        region = None
        try:
            region = self._make_region(retention)
        finally:
            with self._catalog.changed:
                self._opening[retention] -= 1
                if region is not None:
                    self._lanes[retention].append(region)
                self._catalog.changed.notify_all()

    def _release(self, region: Region) -> None:
        with self._catalog.changed:
            give_up = region.failures >= _FAILURES_MAX
            if give_up:
                self._lanes[region.retention].remove(region)
            else:
                region.busy = False
            self._catalog.changed.notify_all()
        if give_up:
            self._seal(region)

    def _seal(self, region: Region) -> None:
        """Close a region (out of its lanes, owned by us) for appends; a failed index page is only a slower recovery."""
        self._finish_index(region)
        with self._catalog.changed:
            self._catalog.seal_locked(region)
            region.writes += 1
            region.busy = False
            self._catalog.changed.notify_all()

    def withdraw_locked(self, region: Region) -> bool:
        """Take an idle open region out of its lanes so that it can be evicted; False where a writer has it."""
        if region.busy or region not in self._lanes.get(region.retention, []):
            return False
        self._lanes[region.retention].remove(region)
        return True

    # -- values ----------------------------------------------------------------------------------------------------------

    def append(self, drafts: list[Draft]) -> None:
        """Write drafts of one retention class; each ends with `region` or `reason` set.

        Raises AdapterError or OSError where not even a region could be had.
        """
        try:
            self._append(drafts)
        finally:
            # The caller may take its memory back once we return or raise: the hashers must have let go of it.
            for draft in drafts:
                if draft.checksum is not None:
                    draft.checksum.exception()

    def _append(self, drafts: list[Draft]) -> None:
        queue = list(drafts)
        while queue:
            try:
                region = self._acquire(queue[0].retention, extent_bytes(len(queue[0].data)))
            except (OSError, AdapterError) as error:
                reason = reason_of(error) if isinstance(error, OSError) else "full"
                for draft in queue:
                    draft.reason = reason
                raise
            try:
                failed = not self.append_to(region, queue)
            finally:
                self._release(region)
            if failed:
                return

    def append_to(self, region: Region, queue: list[Draft]) -> bool:
        """Write groups from the front of `queue` while they fit; False where a write failed, and then no draft is left waiting."""
        while queue:
            group = self._take_group(region, queue)
            if not group:
                return True
            self._hash_ahead(queue, len(group))
            try:
                entries = self._write_group(region, group)
            except OSError as error:
                self._failed(region, queue, reason_of(error))
                return False
            del queue[: len(group)]
            last = entries[-1]
            region.appended(entries, last.offset + extent_bytes(last.length))
            region.failures = 0
            with self._catalog.changed:
                self._catalog.insert_locked(region, entries)
                region.writes += 1
            for draft in group:
                draft.region = region
            try:
                region.write_index(self._io, partial=False)
            except OSError:
                # The values are safe; only the shortcut for the next start is missing, and is tried again with the next group.
                self._catalog.counters.io_errors += 1
        return True

    def _hash_ahead(self, queue: list[Draft], skip: int) -> None:
        """While a group is written, other threads compute the checksums of the next one."""
        total = 0
        for draft in queue[skip : skip + GROUP_EXTENTS]:
            total += len(draft.data)
            if draft.checksum is None and len(draft.data) >= _HASH_AHEAD_MIN:
                draft.checksum = self._hasher.submit(payload_checksum, draft.data)
            if total >= GROUP_BYTES:
                return

    def _failed(self, region: Region, queue: list[Draft], reason: str) -> None:
        self._catalog.counters.io_errors += 1
        region.epoch += 1
        region.failures += 1
        for draft in queue:
            draft.reason = reason
        queue.clear()

    def _take_group(self, region: Region, queue: list[Draft]) -> list[Draft]:
        total = 0
        group: list[Draft] = []
        for draft in queue:
            size = extent_bytes(len(draft.data))
            if not region.room(total + size, len(group) + 1):
                break
            if group and (total + size > GROUP_BYTES or len(group) == GROUP_EXTENTS or size > LARGE_BYTES):
                break
            group.append(draft)
            total += size
            if size > LARGE_BYTES:
                break
        return group

    def _write_group(self, region: Region, group: list[Draft]) -> list[IndexEntry]:
        if len(group) == 1 and extent_bytes(len(group[0].data)) > LARGE_BYTES:
            return [self._write_large(region, group[0])]
        start = region.data_end
        offset = start
        bounced = sum(round_up(len(draft.data)) for draft in group if not draft.inline and not self._in_place(draft))
        entries: list[IndexEntry] = []
        parts: list[memoryview] = []
        # One tail page a value that is written in place but does not end on a page.
        with self._pool.lend(2 * len(group) * PAGE + bounced) as scratch:
            bounce_at = 2 * len(group) * PAGE
            for number, draft in enumerate(group):
                header = self._header(region, draft, offset, _checksum_of(draft))
                page = scratch[number * PAGE : (number + 1) * PAGE]
                _fill(page, header.pack(), draft.data if draft.inline else None)
                parts.append(page)
                if not draft.inline:
                    size = round_up(len(draft.data))
                    if self._in_place(draft):
                        tail = scratch[(len(group) + number) * PAGE :][:PAGE]
                        parts.extend(_payload_parts(draft, tail, whole_pages=self._direct.ok))
                    else:
                        space = scratch[bounce_at : bounce_at + size]
                        copy(space, draft.data)
                        space[len(draft.data) :] = bytes(size - len(draft.data))
                        parts.append(space)
                        bounce_at += size
                entries.append(header.entry(draft.tick))
                offset += extent_bytes(len(draft.data))
            write_fully(self._io, region.fd, parts, start)
        return entries

    def _write_large(self, region: Region, draft: Draft) -> IndexEntry:
        offset = region.data_end
        if draft.checksum is None:
            draft.checksum = self._hasher.submit(payload_checksum, draft.data)
        with self._pool.lend(2 * PAGE) as scratch:
            if self._in_place(draft):
                parts = _payload_parts(draft, scratch[PAGE : 2 * PAGE], whole_pages=self._direct.ok)
                write_fully(self._io, region.fd, parts, offset + PAGE)
            else:
                self._write_bounced(region, draft, offset + PAGE)
            header = self._header(region, draft, offset, draft.checksum.result())
            _fill(scratch[:PAGE], header.pack(), None)
            write_fully(self._io, region.fd, [scratch[:PAGE]], offset)
        return header.entry(draft.tick)

    def _write_bounced(self, region: Region, draft: Draft, offset: int) -> None:
        with self._pool.lend(_BOUNCE_BYTES) as bounce:
            for at in range(0, len(draft.data), _BOUNCE_BYTES):
                piece = draft.data[at : at + _BOUNCE_BYTES]
                size = round_up(len(piece))
                copy(bounce, piece)
                bounce[len(piece) : size] = bytes(size - len(piece))
                write_fully(self._io, region.fd, [bounce[:size]], offset + at)

    def _in_place(self, draft: Draft) -> bool:
        """Whether the value can be written from where it lies."""
        return not self._direct.ok or address(draft.data) % self._direct.memory_align == 0

    def _header(self, region: Region, draft: Draft, offset: int, checksum: bytes) -> ExtentHeader:
        return ExtentHeader(
            region.sequence, region.nonce, offset, draft.sequence, len(draft.data), draft.expires_ns, draft.identity, checksum,
            self._catalog.clock_ns(), region.epoch, draft.retention, FLAG_INLINE if draft.inline else 0,
        )  # fmt: skip

    # -- end -------------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Write what is left of the index of every open region. The store is quiet by now."""
        for region in self.open_regions():
            self._finish_index(region)
            region.writes += 1
        self._lanes.clear()

    def _finish_index(self, region: Region) -> None:
        """Write the last index page; where that fails, the next start walks headers instead."""
        try:
            if region.durable:
                self._sync_region(region)
            region.write_index(self._io, partial=True)
        except OSError:
            self._catalog.counters.io_errors += 1


def _checksum_of(draft: Draft) -> bytes:
    return payload_checksum(draft.data) if draft.checksum is None else draft.checksum.result()


def _fill(page: memoryview, header: bytes, inline: memoryview | None) -> None:
    """Write a header page: header, inline value, zeros."""
    body = header + (bytes(inline) if inline is not None else b"")
    page[:] = body.ljust(PAGE, b"\0")


def _payload_parts(draft: Draft, tail_page: memoryview, *, whole_pages: bool) -> list[memoryview]:
    """What to write for a payload that stays where it is: its memory, and what brings it to a whole page."""
    data = draft.data
    size = round_up(len(data))
    if len(data) == size:
        return [data]
    if draft.padded is not None and len(draft.padded) == size:
        return [draft.padded]
    if not whole_pages:
        return [data, ZEROS[: size - len(data)]]
    whole = len(data) // PAGE * PAGE
    tail_page[:] = bytes(data[whole:]).ljust(PAGE, b"\0")
    return [data[:whole], tail_page] if whole else [tail_page]
