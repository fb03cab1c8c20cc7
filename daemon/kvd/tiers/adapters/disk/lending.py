"""Extents for I/O past the daemon: lent to be written, held to be read (DESIGN 5.6, GPU-direct).

An engine's device moves the bytes between its memory and a region file itself; whose bytes they are stays decided here, so
budget, eviction, expiry and counting hold for them as for all others.

    lend   a header page of kind *reserved* is appended to a lane, the pages behind it are the borrower's. It is a miss, and a
           recovery passes it over. No index page covers it, nor what follows it in the region, until the loan has ended.
    fill   the borrower has written and synced: the header is written anew as that of a value, and the value becomes visible.
           So a header of a value never stands before bytes that did not arrive, whoever is killed when.
    hold   where a value lies, after its header was read and compared in full.

A file is never used for anything else while a part of it is lent or held: both pin the region. Evicting one that is pinned
unlinks its file, so a borrower that comes late, and a device whose write is still on its way, reach bytes that nobody reads.
A daemon that died may have left loans behind whose borrowers it cannot ask: recovery finds their reserved headers, and such
a file is not used again either (`Region.reusable`).

Failure: a fill that fails, or comes when its region is being given up, stores nothing; the reason is in the answer.
Concurrency: any thread; a fill owns its region's append path (`busy`) for its one page, as a writer does for its group.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvd.store.identity import IDENTITY_BYTES, Identity
from kvd.store.retention import Retention, expired
from kvd.tiers.adapters.base import AdapterError, DirectExtent, Durability, Reservation, Stored
from kvd.tiers.adapters.disk.catalog import Catalog
from kvd.tiers.adapters.disk.files import RegionFiles
from kvd.tiers.adapters.disk.format import (
    FLAG_NO_CHECKSUM,
    INLINE_MAX,
    KIND_RESERVED,
    KIND_VALUE,
    PAGE,
    ExtentHeader,
    blank_entry,
    extent_bytes,
)
from kvd.tiers.adapters.disk.index import at
from kvd.tiers.adapters.disk.reader import is_of
from kvd.tiers.adapters.disk.region import Pending, Region, State, aligned_page
from kvd.tiers.adapters.disk.storage import Storage, read_fully, write_fully
from kvd.tiers.adapters.disk.writer import Writer, reason_of
from kvtools.errors import hint_for

_CHECKSUM_BYTES = 16


@dataclass(eq=False, slots=True)
class _Place:
    """What an extent that was lent (`pending`) or held is to this store."""

    region: Region
    offset: int
    """Of the header."""
    retention: int = 0
    expires_ns: int = 0
    pending: Pending | None = None
    ended: bool = False


class LendingDesk:
    """Lends and holds extents of one store."""

    def __init__(
        self, io: Storage, catalog: Catalog, files: RegionFiles, writer: Writer, sync_region: Callable[[Region], None]
    ) -> None:
        self._io = io
        self._catalog = catalog
        self._files = files
        self._writer = writer
        self._sync_region = sync_region
        self._closed = False
        self.lent_bytes = 0
        """Bytes of the extents that are lent now."""

    # -- to be written ---------------------------------------------------------------------------------------------------

    def lend(self, wanted: Sequence[Reservation]) -> list[DirectExtent | str]:
        """See Adapter."""
        answers: list[DirectExtent | str] = []
        failure: OSError | AdapterError | None = None
        for one in wanted:
            reason = self._refusal(one)
            if not reason:
                try:
                    answers.append(self._lend(one))
                    continue
                except OSError as error:
                    self._catalog.counters.io_errors += 1
                    failure, reason = error, reason_of(error)
                except AdapterError as error:
                    failure, reason = error, "full"
            answers.append(reason)
        if failure is not None and not any(isinstance(answer, DirectExtent) for answer in answers):
            if isinstance(failure, AdapterError):
                raise failure
            raise AdapterError(
                f"cannot write to a region file: {failure.strerror or failure}",
                hint=hint_for(failure, "see the kernel log (dmesg)"),
            )
        return answers

    def _refusal(self, one: Reservation) -> str:
        if self._closed:
            raise AdapterError("the store is closed")
        if len(one.identity) != IDENTITY_BYTES:
            raise ValueError(f"an identity is {IDENTITY_BYTES} bytes, not {len(one.identity)}")
        if one.retention < Retention.SHORT:
            return "unwanted"
        if one.length <= INLINE_MAX:
            return "too_small"
        if one.length > self._catalog.geometry.max_value_bytes:
            return "too_large"
        return "expired" if expired(one.expires_ns, self._catalog.clock_ns()) else ""

    def _lend(self, one: Reservation) -> DirectExtent:
        """Append a reserved header. Raises OSError, AdapterError."""
        size = extent_bytes(one.length)
        region = self._writer.acquire(int(one.retention), size)
        try:
            place = _Place(region, region.data_end, int(one.retention), one.expires_ns)
            header = self._header(place, one.identity, one.length, 0, b"", region.epoch, KIND_RESERVED)
            try:
                self._write(region, header, place.offset)
            except OSError:
                region.failed()
                raise
            region.failures = 0
            place.pending = region.reserved(place.offset + size)
            with self._catalog.changed:
                region.writes += 1
                region.loans += 1
                region.pins += 1
                self.lent_bytes += size
        finally:
            self._writer.release(region)
        return DirectExtent(region.path, place.offset + PAGE, one.length, region.nonce, one.identity, b"", place)

    def fill(self, extent: DirectExtent, checksum: bytes, durability: Durability) -> Stored:
        """See Adapter."""
        place = _place_of(extent)
        if place.ended or place.pending is None:
            raise ValueError("this extent is not lent any more")
        if len(checksum) not in (0, _CHECKSUM_BYTES):
            raise ValueError(f"a checksum is {_CHECKSUM_BYTES} bytes, not {len(checksum)}")
        try:
            if self._closed:
                raise AdapterError("the store is closed")
            if expired(place.expires_ns, self._catalog.clock_ns()):
                return Stored(False, "expired")
            # Writers of one identity take turns, and get their sequence while it is their turn.
            claimed = self._catalog.claim([extent.identity])
            try:
                return self._fill(extent, place, checksum, durability)
            finally:
                self._catalog.release(claimed)
        finally:
            self._end(extent, place)

    def _fill(self, extent: DirectExtent, place: _Place, checksum: bytes, durability: Durability) -> Stored:
        catalog, region, pending = self._catalog, place.region, place.pending
        assert pending is not None
        if not self._own(region):
            return Stored(False, "evicted")
        try:
            with catalog.changed:
                sequence, tick = catalog.sequence, catalog.tick + 1
                catalog.sequence += 1
                catalog.tick = tick
            header = self._header(place, extent.identity, extent.length, sequence, checksum, pending.epoch)
            try:
                self._write(region, header, place.offset)
                region.writes += 1
                if region.durable:
                    self._sync_region(region)
            except OSError as error:
                with catalog.changed:
                    # It may have arrived all the same: a later delete of this identity must leave its line.
                    catalog.mark_stale_locked(region, extent.identity)
                    catalog.counters.io_errors += 1
                return Stored(False, reason_of(error))
            entry = header.entry(tick)
            region.unchecked |= not checksum
            pending.packed = entry.pack()
            with catalog.changed:
                catalog.insert_locked(region, [entry])
                self._count_store(extent.length, unchecked=not checksum)
            try:
                region.write_index(self._io, partial=region.state is State.SEALED)
            except OSError:
                catalog.counters.io_errors += 1
        finally:
            with catalog.changed:
                region.busy = False
                catalog.changed.notify_all()
        return Stored(True, "", durability)

    def _count_store(self, length: int, *, unchecked: bool) -> None:
        counters = self._catalog.counters
        counters.stores += 1
        counters.store_bytes += length
        counters.extra["direct_stores"] += 1
        counters.extra["direct_store_bytes"] += length
        counters.extra["unchecked"] += unchecked

    def _own(self, region: Region) -> bool:
        """Wait for the region's append path and take it; False where the region is being given up."""
        with self._catalog.changed:
            while region.busy and not region.leaving:
                self._catalog.changed.wait()
            if region.leaving or region.state is State.GONE:
                return False
            region.busy = True
            return True

    def give_back(self, extent: DirectExtent) -> None:
        """See Adapter."""
        place = _place_of(extent)
        if place.ended:
            return
        if place.pending is not None and place.pending.packed is None:
            # Its room is lost until the region is used again; index pages may go on behind it.
            place.pending.packed = blank_entry()
            with self._catalog.changed:
                self._catalog.counters.extra["direct_given_back"] += 1
        self._end(extent, place)

    def _end(self, extent: DirectExtent, place: _Place) -> None:
        with self._catalog.changed:
            if place.ended:
                return
            place.ended = True
            if place.pending is not None:
                if place.pending.packed is None:
                    place.pending.packed = blank_entry()
                place.region.loans -= 1
                self.lent_bytes -= extent_bytes(extent.length)
        self._files.unpin(place.region)

    # -- to be read ------------------------------------------------------------------------------------------------------

    def hold(self, identities: Sequence[Identity]) -> list[DirectExtent | None]:
        """See Adapter."""
        answers = [self._hold(identity) for identity in identities]
        counters = self._catalog.counters
        with self._catalog.changed:
            held = [answer for answer in answers if answer is not None]
            counters.hits += len(held)
            counters.extra["direct_loads"] += len(held)
            counters.load_bytes += sum(one.length for one in held)
            counters.extra["direct_load_bytes"] += sum(one.length for one in held)
        return answers

    def _hold(self, identity: Identity) -> DirectExtent | None:
        catalog = self._catalog
        with catalog.changed:
            entry = None if self._closed else catalog.find_locked(identity, catalog.clock_ns())
            if entry is None or entry.length <= INLINE_MAX or entry.note:
                # One with a note is somebody's encoding of the value, and only that somebody can read it.
                return None
            region = catalog.regions[entry.slot]
            region.pins += 1
        header = None
        try:
            page = aligned_page(bytes(PAGE))
            if read_fully(self._io, region.fd, [page], entry.offset) == PAGE:
                header = ExtentHeader.unpack(page)
        except OSError:
            catalog.counters.io_errors += 1
            self._files.unpin(region)
            return None
        sound = header is not None and is_of(header, region, entry.offset, identity, entry.length)
        with catalog.changed:
            here = at(catalog.index.get(identity), entry.slot, entry.offset)
            if here and sound:
                catalog.touch_locked(identity, entry)
            elif here:
                catalog.counters.corruptions += 1
                catalog.drop_locked(identity)
        if header is None or not sound:
            self._files.unpin(region)
            return None
        checksum = b"" if header.flags & FLAG_NO_CHECKSUM else header.checksum
        place = _Place(region, entry.offset)
        return DirectExtent(region.path, entry.offset + PAGE, entry.length, region.nonce, identity, checksum, place)

    # -- the rest --------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Nothing is lent, filled or held from now on. What is lent stays as it is: the next start passes it over."""
        self._closed = True

    def _header(
        self, place: _Place, identity: Identity, length: int, sequence: int, checksum: bytes, epoch: int, kind: int = KIND_VALUE
    ) -> ExtentHeader:
        region = place.region
        return ExtentHeader(
            region.sequence, region.nonce, place.offset, sequence, length, place.expires_ns, identity,
            checksum or bytes(_CHECKSUM_BYTES), self._catalog.clock_ns(), epoch, place.retention,
            0 if checksum else FLAG_NO_CHECKSUM, kind,
        )  # fmt: skip

    def _write(self, region: Region, header: ExtentHeader, offset: int) -> None:
        write_fully(self._io, region.fd, [aligned_page(header.pack().ljust(PAGE, b"\0"))], offset)


def _place_of(extent: DirectExtent) -> _Place:
    assert isinstance(extent.place, _Place)
    return extent.place
