"""Making room: which region goes, what of it is kept, and in which order the disk learns of it.

The policy is a clock over regions. Within a class the region that was sealed (or spared) longest ago is looked at first;
regions without live or unexpired values go before all others, regions of class short before those of class long.
    * A region most of whose live bytes were used since is *spared*: it goes to the back of the queue. Nothing is copied.
    * Of any other region the values used since are *moved*: written again into the region that takes its place, most
      recently used first, up to a quarter of a region and 32 MiB. The rest is evicted.
So a value that is used once a round stays, at a bounded cost in writes, and what is not used goes in the order it came.

The order of steps keeps every crash safe: index forgets the region; lines go to the deletes log (synced) for older records
elsewhere that this region's records kept dead; the region's header is zeroed; only then is the file used again. A crash
before the zeroing brings the region back whole.

Concurrency: one thread at a time makes room (`_space`); others go on reading and writing meanwhile.
"""

import logging
import threading
import time
from pathlib import Path

from kvd.store.identity import Identity
from kvd.store.retention import expired
from kvd.tiers.adapters.base import AdapterError, AdapterFull, FullNote
from kvd.tiers.adapters.disk.buffers import BufferPool
from kvd.tiers.adapters.disk.catalog import Catalog, slices
from kvd.tiers.adapters.disk.deletes import DeletesLog
from kvd.tiers.adapters.disk.extents import Draft
from kvd.tiers.adapters.disk.files import RegionFiles
from kvd.tiers.adapters.disk.format import FLAG_NO_CHECKSUM, IndexEntry, extent_bytes
from kvd.tiers.adapters.disk.index import Entry, at, unpack
from kvd.tiers.adapters.disk.reader import Reader
from kvd.tiers.adapters.disk.region import Region, State
from kvd.tiers.adapters.disk.scan import read_records
from kvd.tiers.adapters.disk.storage import NO_ROOM, Storage
from kvd.tiers.adapters.disk.writer import Writer
from kvtools.errors import hint_for
from kvtools.units import format_size

log = logging.getLogger("kvd.disk")

_MOVE_BYTES_MAX = 32 << 20
_IDLE_WAIT_S = 10.0
"""A region is busy for one write. A device that takes longer is as good as full."""


class Evictor:
    """Makes regions for the writer, evicting where the budget or the disk is full."""

    def __init__(
        self, io: Storage, root: Path, catalog: Catalog, files: RegionFiles, deletes: DeletesLog, pool: BufferPool
    ) -> None:
        self._io = io
        self._root = root
        self._catalog = catalog
        self._files = files
        self._deletes = deletes
        self._pool = pool
        self._space = threading.Lock()
        self._moving: set[Identity] = set()
        """Claimed while a region is being made."""
        self.writer: Writer
        self.reader: Reader
        self._full_note = FullNote()

    def make_region(self, retention: int) -> Region:
        """A new open region of this class. Raises AdapterFull (nothing may be evicted), AdapterError, OSError."""
        moving: list[Draft] = []
        with self._space:
            try:
                region = self._make(retention, moving)
                if moving:
                    self.writer.append_to(region, moving)
                return region
            finally:
                self._catalog.release(self._moving)
                self._moving = set()

    def _make(self, retention: int, moving: list[Draft]) -> Region:
        size = self._catalog.geometry.region_bytes
        deadline = time.monotonic() + _IDLE_WAIT_S
        while True:
            if not self._files.has_free():
                self._files.trim(size)
            room = self._files.has_free() or self._catalog.held_bytes + size <= self._catalog.geometry.max_bytes
            if room:
                try:
                    return self._files.make(retention)
                except OSError as error:
                    if error.errno not in NO_ROOM or self._files.has_free():
                        raise
                    # The disk is fuller than the budget knows: live with fewer regions, as long as there is one to take.
                    self._full_note.note(self._root, self._catalog.geometry.max_bytes)
            if self._evict_one(retention, moving) or (time.monotonic() < deadline and self._wait_for_idle()):
                continue
            raise AdapterFull(f"no room in {self._root}: nothing there may be evicted", hint="free disk space or lower the budget")

    def _wait_for_idle(self) -> bool:
        """Where regions are only being written or sealed just now, wait a moment; False where there are none of that kind."""
        with self._catalog.changed:
            if not any(region.busy or region.state is State.OPEN for region in self._catalog.regions.values()):
                return False
            self._catalog.changed.wait(0.05)
            return True

    def fit(self) -> None:
        """Evict until the budget holds (it may be smaller than at the last run)."""
        before = self._catalog.counters.evictions
        with self._space:
            while self._catalog.held_bytes > self._catalog.geometry.max_bytes:
                self._files.trim(0)
                if self._catalog.held_bytes > self._catalog.geometry.max_bytes and not self._evict_one(-1, []):
                    break
        if dropped := self._catalog.counters.evictions - before:
            limit = format_size(self._catalog.geometry.max_bytes)
            log.warning("%s: %d values dropped: it held more than the %s that it may now", self._root, dropped, limit)

    def sync_free(self) -> None:
        """Make it stable that regions which were given up are gone. Raises OSError."""
        with self._space:
            self._files.sync_free()

    def release_dead(self, regions: list[Region]) -> None:
        """Give back regions in which nothing is live. Raises AdapterError where a restart would find one again."""
        with self._space:
            for region in regions:
                with self._catalog.changed:
                    mine = region.live == 0 and self._take_locked(region)
                if mine:
                    self._drop(region, self.records(region), deleting=True)

    def give_way(self, identities: set[Identity]) -> bool:
        """Give bytes back to a file system that has none left for the deletes log; False where there are none to give.

        A file that waits for its next use goes first, then a region that holds dead records of these identities: without it
        they need no lines any more. Raises AdapterError where a restart would find that region again.
        """
        with self._space:
            if self._files.drop_free():
                return True
            with self._catalog.changed:
                holders = [region for region in self._catalog.regions.values() if not identities.isdisjoint(region.stale)]
                holders.sort(key=lambda region: region.live_bytes)
                region = next((region for region in holders if self._take_locked(region)), None)
                live = region.live if region is not None else 0
            if region is None:
                return False
            self._drop(region, self.records(region))
            self._files.drop_free()
        log.warning("%s: no room to note a delete: the region it is in was given up for it, with %d other values", self._root, live)
        return True

    def _take_locked(self, region: Region) -> bool:
        """Make the region ours to drop."""
        if region.state is State.OPEN:
            region.leaving = not region.loans and self.writer.withdraw_locked(region)
        else:
            region.leaving = region.state is State.SEALED and not region.busy and not region.loans
        return region.leaving

    def _evict_one(self, retention: int, moving: list[Draft]) -> bool:
        """Evict one region, leaving its hot values of the class wanted in `moving`; False where there is none to evict."""
        with self._catalog.changed:
            region = self._victim_locked()
            if region is None:
                return False
            region.leaving = True
        records = self.records(region)
        rescued: list[Draft] = []
        if records is not None and retention >= 0 and not moving:
            rescued = self._rescue(region, records, retention)
            moving.extend(rescued)
        self._drop(region, records, moved=len(rescued))
        return True

    def _victim_locked(self) -> Region | None:
        now = self._catalog.clock_ns()
        sealed = [region for region in self._catalog.regions.values() if region.state is State.SEALED and not region.busy]
        # What is lent for writing is taken when there is nothing else: its file is unlinked then, and never used again.
        sealed.sort(key=lambda region: (region.loans > 0, region.retention, region.mark_tick, region.sequence))
        for region in sealed:
            if not region.loans and (region.live == 0 or region.all_expired(now)):
                return region
        last_of_class = {region.retention: region for region in sealed}
        for spared, region in enumerate(sealed):
            cold = 2 * region.hot_bytes <= region.live_bytes
            if cold or region is last_of_class[region.retention] or 2 * spared >= len(sealed):
                return region
            self._catalog.tick += 1
            region.mark_tick = self._catalog.tick
            region.hot_bytes = 0
            self._catalog.counters.extra["regions_spared"] += 1
        everything = self._catalog.regions.values()
        for region in sorted(everything, key=lambda region: (region.loans > 0, region.retention, region.mark_tick)):
            if region.state is State.OPEN and self.writer.withdraw_locked(region):
                return region
        return None

    def records(self, region: Region) -> list[IndexEntry] | None:
        """Everything the region holds; None where that cannot be read."""
        try:
            return read_records(self._io, region, self._pool)
        except OSError:
            self._catalog.counters.io_errors += 1
            return None

    def _rescue(self, region: Region, records: list[IndexEntry], retention: int) -> list[Draft]:
        """The values worth moving, in memory; their identities stay claimed until they are written."""
        budget = min(self._catalog.geometry.region_bytes // 4, _MOVE_BYTES_MAX)
        drafts: list[Draft] = []
        for record, entry in sorted(self._hot(region, records, retention), key=lambda pair: -pair[1].tick):
            size = extent_bytes(entry.length)
            if size > budget:
                continue
            sequence = self._claim_to_move(region, record)
            if not sequence:
                continue
            self._moving.add(record.identity)
            budget -= size
            try:
                found = self.reader.read_value(region, entry, record.identity)
                if found is None:
                    self._catalog.counters.corruptions += 1
                    self.reader.damaged(region, entry)
            except OSError:
                found = None
                self._catalog.counters.io_errors += 1
            if found is not None:
                draft = Draft(record.identity, found[1], entry.retention, entry.expires_ns, sequence, entry.tick, note=entry.note)
                draft.unchecked = bool(found[0].flags & FLAG_NO_CHECKSUM)
                drafts.append(draft)
        return drafts

    def _claim_to_move(self, region: Region, record: IndexEntry) -> int:
        """Claim a value that is still where it was; its sequence in the new place, 0 where somebody else is at it.

        The sequence is a new one: forgetting the region may write a line that kills the old one and all before it.
        """
        catalog = self._catalog
        with catalog.changed:
            here = at(catalog.index.get(record.identity), region.slot, record.offset)
            if not here or not catalog.try_claim_locked(record.identity):
                return 0
            catalog.sequence += 1
            return catalog.sequence - 1

    def _hot(self, region: Region, records: list[IndexEntry], retention: int) -> list[tuple[IndexEntry, Entry]]:
        """The live, unexpired values of one class that were used since the region was sealed or spared."""
        now = self._catalog.clock_ns()
        hot: list[tuple[IndexEntry, Entry]] = []
        for some in slices(records):
            with self._catalog.changed:
                for record in some:
                    word = self._catalog.index.get(record.identity)
                    if word is None or not at(word, region.slot, record.offset):
                        continue
                    entry = unpack(word)
                    if entry.tick > region.mark_tick and entry.retention == retention and not expired(entry.expires_ns, now):
                        hot.append((record, entry))
        return hot

    def _drop(self, region: Region, records: list[IndexEntry] | None, *, moved: int = 0, deleting: bool = False) -> None:
        """Forget a region and give its file back. Raises AdapterError where what must stay dead could not be noted."""
        catalog = self._catalog
        gone = region.live
        lines, identities = catalog.forget_region(region, records)
        with catalog.changed:
            catalog.counters.evictions += max(0, gone - moved)
            catalog.counters.extra["moved"] += moved
            catalog.counters.extra["regions_evicted"] += 1
            dropped = [one for one in identities if one not in self._moving and catalog.index.get(one) is None]
        if not deleting:
            catalog.evicted(dropped)
        try:
            if lines:
                self._note(lines)
        except OSError as error:
            catalog.counters.io_errors += 1
            self._lost(identities)
            raise AdapterError(f"{self._root}: cannot write the deletes log: {error.strerror}", hint=hint_for(error)) from error
        if not self._files.release(region):
            self._lost(identities)
            if deleting:
                raise AdapterError(f"{self._root}: a delete may not outlive a restart: a region could not be emptied")

    def _note(self, lines: list[tuple[Identity, int]]) -> None:
        """Add to the deletes log, with the room of a free file where there is no other. Raises OSError."""
        try:
            self._deletes.append(lines, sync=True)
        except OSError as error:
            if error.errno not in NO_ROOM or not self._files.drop_free():
                raise
            self._deletes.append(lines, sync=True)

    def _lost(self, identities: set[Identity]) -> None:
        """A region is forgotten here, but a restart will find it again.

        What it holds stays noted as stale for good, so that deletes, and newer records that go, leave a line in the log.
        """
        with self._catalog.changed:
            for identity in identities:
                self._catalog.stale[identity] = self._catalog.stale.get(identity, 0) + 1
