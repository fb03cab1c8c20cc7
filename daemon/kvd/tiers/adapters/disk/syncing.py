"""Durability: who waits for the device, and for how long.

none   nothing is ever synced on the path; a clean close syncs once.
group  a thread syncs what was written every `interval_s`; a store answers at once, and a power cut loses at most that much.
fsync  a store returns when its bytes are on stable storage. Threads that wait for one region share one fdatasync: whoever
       comes while one is under way waits for it, and the first of them then syncs for all.

Failure: an fdatasync that fails may have lost bytes it was asked to keep, so what waited for it is reported as not stored.
"""

import errno
import threading
from collections.abc import Callable, Iterable

from kvd.tiers.adapters.disk.catalog import Catalog
from kvd.tiers.adapters.disk.deletes import DeletesLog
from kvd.tiers.adapters.disk.files import RegionFiles
from kvd.tiers.adapters.disk.region import Region, State
from kvd.tiers.adapters.disk.storage import Storage


class Syncer:
    """Makes regions stable."""

    def __init__(self, io: Storage, catalog: Catalog, files: RegionFiles, deletes: DeletesLog) -> None:
        self._io = io
        self._catalog = catalog
        self._files = files
        self._deletes = deletes
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def sync_region(self, region: Region) -> None:
        """Return when everything written to `region` before this call is stable. Raises OSError. The caller pins the region."""
        target = region.writes
        with region.sync_lock:
            if region.synced >= target:
                return
            covered, end = region.writes, region.data_end
            self._io.fdatasync(region.fd)
            # The bytes of a file whose name is lost are lost too.
            self._files.sync_names()
            region.synced, region.stable_end = covered, end

    def sync_regions(self, regions: Iterable[Region]) -> dict[Region, OSError]:
        """Sync several, and the folder if names in it changed; the regions that could not be synced."""
        failed: dict[Region, OSError] = {}
        for region in regions:
            with self._catalog.changed:
                if region.state is State.GONE:
                    # Evicted in the meantime. If it was not even stable it must not be acknowledged: an older version of
                    # some value could outlive it.
                    if region.stable_end < region.data_end:
                        failed[region] = OSError(errno.ENOSPC, "evicted again at once")
                    continue
                region.pins += 1
            try:
                self.sync_region(region)
            except OSError as error:
                failed[region] = error
                self._catalog.counters.io_errors += 1
            finally:
                self._files.unpin(region)
        return failed

    def sync_all(self) -> bool:
        """Sync whatever is not stable yet; False where something could not be."""
        return self._sync_dirty() is None

    def _sync_dirty(self) -> OSError | None:
        with self._catalog.changed:
            dirty = [
                region
                for region in self._catalog.regions.values()
                if region.synced < region.writes and region.state is not State.GONE
            ]
        failed = self.sync_regions(dirty)
        try:
            self._deletes.sync()
            self._files.sync_names()
        except OSError as error:
            self._catalog.counters.io_errors += 1
            return error
        return next(iter(failed.values()), None)

    def sync_everything(self) -> None:
        """Sync whatever is not stable yet, and see that all of it will be found again. Raises OSError.

        What was synced and then removed from the folder under us is served as long as we hold it open, and no longer.
        """
        if (error := self._sync_dirty()) is not None:
            raise error
        with self._catalog.changed:
            regions = set(self._catalog.regions.values())
        if removed := self.removed(regions):
            raise FileNotFoundError(errno.ENOENT, f"{removed} of its {len(regions)} region files were removed")

    def removed(self, regions: set[Region]) -> int:
        """How many of these have lost the name of their file, by no doing of ours."""
        with self._catalog.changed:
            pinned = [region for region in regions if region.state is not State.GONE]
            for region in pinned:
                region.pins += 1
        removed = 0
        for region in pinned:
            nameless = self.nameless(region.fd)
            with self._catalog.changed:
                # An eviction says so first, and takes the name then.
                removed += nameless and region.state is not State.GONE
            self._files.unpin(region)
        return removed

    def nameless(self, fd: int) -> bool:
        """Whether the file is known to have lost its name; a device that does not answer says nothing about that."""
        try:
            return self._io.nameless(fd)
        except OSError:
            return False

    def sync_all_within(self, deadline_s: float) -> None:
        """`sync_all`, waited for until the deadline; a device that takes longer is left to it."""
        thread = threading.Thread(target=self.sync_all, name="kvd-disk-last-sync", daemon=True)
        thread.start()
        thread.join(deadline_s)

    def start(self, interval_s: float, done: Callable[[bool], None] = lambda _ok: None) -> None:
        """Sync every `interval_s` from a thread of our own."""

        def run() -> None:
            while not self._stop.wait(interval_s):
                done(self.sync_all())

        self._thread = threading.Thread(target=run, name="kvd-disk-sync", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
