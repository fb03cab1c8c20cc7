"""Appending values: lanes, and the way of a value into the catalog.

A *lane* is an open region with one writer at a time. Because a lane's extents are written one after the other, the extents of
a region are valid up to some point and nothing after it, whatever was in flight when the process died.

Data flow: values -> lane -> groups (`extents`) -> catalog -> index page of the region. A value is visible in the index only
after its write has completed.

Failure: an OSError voids the group it hit and the rest of the call; the values are reported with the reason 'full' or
'io_error'. What the failed write left behind is written over by the next one, whose extents carry a higher epoch, so that a
leftover behind them is never taken for their successor. A region that fails three times in a row is sealed.
Concurrency: any number of threads, one per lane.
"""

from collections.abc import Callable

from kvd.tiers.adapters.base import AdapterError
from kvd.tiers.adapters.disk.catalog import Catalog
from kvd.tiers.adapters.disk.extents import GROUP_BYTES, GROUP_EXTENTS, LARGE_BYTES, Draft, ExtentWriter
from kvd.tiers.adapters.disk.format import extent_bytes
from kvd.tiers.adapters.disk.region import Region
from kvd.tiers.adapters.disk.storage import NO_ROOM, Storage


def reason_of(error: OSError) -> str:
    """The word that Stored.reason has for an OSError."""
    return "full" if error.errno in NO_ROOM else "io_error"


class Writer:
    """Appends drafts to the lanes of one store."""

    def __init__(
        self,
        io: Storage,
        catalog: Catalog,
        extents: ExtentWriter,
        make_region: Callable[[int], Region],
        sync_region: Callable[[Region], None],
    ) -> None:
        self._io = io
        self._catalog = catalog
        self._extents = extents
        self._make_region = make_region
        self._sync_region = sync_region
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

    def acquire(self, retention: int, size: int) -> Region:
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

    def release(self, region: Region) -> None:
        """End what `acquire` began; a lane that keeps failing is sealed."""
        with self._catalog.changed:
            give_up = region.spent
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
                if draft.hashing is not None:
                    draft.hashing.exception()

    def _append(self, drafts: list[Draft]) -> None:
        queue = list(drafts)
        while queue:
            try:
                region = self.acquire(queue[0].retention, queue[0].size)
            except (OSError, AdapterError) as error:
                reason = reason_of(error) if isinstance(error, OSError) else "full"
                for draft in queue:
                    draft.reason = reason
                raise
            try:
                failed = not self.append_to(region, queue)
            finally:
                self.release(region)
            if failed:
                return

    def append_to(self, region: Region, queue: list[Draft]) -> bool:
        """Write groups from the front of `queue` while they fit; False where a write failed, and then no draft is left waiting."""
        while queue:
            group = self._take_group(region, queue)
            if not group:
                return True
            self._extents.hash_ahead(queue[len(group) : len(group) + GROUP_EXTENTS])
            try:
                entries = self._extents.write(region, group)
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

    def _failed(self, region: Region, queue: list[Draft], reason: str) -> None:
        self._catalog.counters.io_errors += 1
        region.failed()
        for draft in queue:
            draft.reason = reason
        queue.clear()

    def _take_group(self, region: Region, queue: list[Draft]) -> list[Draft]:
        total = 0
        group: list[Draft] = []
        for draft in queue:
            size = draft.size
            if not region.room(total + size, len(group) + 1):
                break
            if group and (total + size > GROUP_BYTES or len(group) == GROUP_EXTENTS or size > LARGE_BYTES):
                break
            group.append(draft)
            total += size
            if size > LARGE_BYTES:
                break
        return group

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
