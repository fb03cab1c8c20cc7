"""Region files: making them, using them again, giving them back.

Purpose: turn a budget into open, preallocated files. A file whose region was evicted keeps its blocks and becomes the next
region: its header page is zeroed (from then on the file holds nothing), later it is renamed to the new sequence and gets
a new header with a new nonce, so no leftover extent in it can be taken for one of the new region. A file that readers
still have pinned is unlinked instead, and closed by the last of them.

Contract: `held_bytes` of the catalog counts every file here, so the budget holds at every moment but for unlinked files
that are still being read. Failure: OSError goes up; a half-made file is removed first.
Concurrency: `make`, `release`, `drop_free` and `trim` are called by one thread at a time (the space lock of `evict`), the rest
by any.
"""

import errno
import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from kvd.tiers.adapters.disk.catalog import Catalog
from kvd.tiers.adapters.disk.format import PAGE, RegionHeader, region_name
from kvd.tiers.adapters.disk.region import Region, aligned_page
from kvd.tiers.adapters.disk.storage import Storage, write_fully

_KEEP_FREE = 2
"""Free files kept for reuse. More would hold disk space that nobody uses, after a clear for instance."""


def random_nonce() -> int:
    """64 bits that no other region has, and that nobody who only stores values can guess."""
    return secrets.randbits(64)


class FreeFile(NamedTuple):
    """A region file that holds nothing."""

    path: Path
    fd: int
    size: int
    stable: bool
    """That it holds nothing is on stable storage."""


class RegionFiles:
    """Makes and releases the files of one store's regions."""

    def __init__(
        self,
        io: Storage,
        root: Path,
        catalog: Catalog,
        *,
        direct: bool,
        sync: bool,
        free_floor_bytes: int,
        nonce: Callable[[], int],
    ) -> None:
        self.io = io
        self.root = root
        self.catalog = catalog
        self.direct = direct
        self._sync = sync
        self._nonce = nonce
        self.free_floor_bytes = free_floor_bytes
        self.free: list[FreeFile] = []
        self.sparse = False
        """The file system could not reserve the bytes of some file."""
        self._names = 0
        """Changes of names in the folder so far."""
        self._names_synced = 0
        self._names_lock = threading.Lock()

    def make(self, retention: int) -> Region:
        """A new open region, from a free file or a new one. Raises OSError (ENOSPC also where the free-space floor forbids)."""
        catalog = self.catalog
        size = catalog.geometry.region_bytes
        with catalog.changed:
            sequence = catalog.region_sequence
            catalog.region_sequence += 1
        path = self.root / region_name(sequence)
        fd = self._file_for(path, size)
        nonce = self._nonce()
        try:
            header = RegionHeader(retention, size, sequence, nonce, catalog.clock_ns())
            write_fully(self.io, fd, [aligned_page(header.pack())], 0)
        except OSError:
            self._remove(path, fd, size)
            raise
        with catalog.changed:
            region = Region(catalog.take_slot_locked(), path, fd, size, retention, sequence, nonce, durable=self._sync)
            region.mark_tick = catalog.tick
            region.writes = 1
            catalog.add_region_locked(region)
        return region

    def _file_for(self, path: Path, size: int) -> int:
        """A descriptor on an empty region file at `path`, used again or new, and counted."""
        spare = next((file for file in self.free if file.size == size), None)
        if spare is not None:
            self.free.remove(spare)
            try:
                self.io.rename(spare.path, path)
            except OSError:
                self._remove(spare.path, spare.fd, size)
                raise
            fd = spare.fd
        else:
            fd = self._create(path, size)
            with self.catalog.changed:
                self.catalog.held_bytes += size
        self._names += 1
        return fd

    def has_free(self) -> bool:
        """Whether a file of the right size waits."""
        return any(file.size == self.catalog.geometry.region_bytes for file in self.free)

    def adopt_free(self, path: Path, fd: int, size: int) -> None:
        """Take over a file that recovery found to hold nothing; its bytes are counted from now on."""
        with self.catalog.changed:
            self.catalog.held_bytes += size
        self._keep_or_remove(FreeFile(path, fd, size, stable=False))

    def _create(self, path: Path, size: int) -> int:
        free, _total = self.io.free_bytes(self.root)
        if free - size < self.free_floor_bytes:
            raise OSError(errno.ENOSPC, "the free-space floor is reached", str(path))
        fd = self.io.open(path, create=True, direct=self.direct)
        try:
            if not self.io.fallocate(fd, size):
                self.sparse = True
        except OSError:
            self.io.close(fd)
            self.io.unlink(path)
            raise
        return fd

    def release(self, region: Region) -> bool:
        """Give back the file of a region that is GONE and out of the index, stably so unless durability is none.

        Were it not stable, a power cut could bring back values whose newer versions have been deleted meanwhile.
        False where a restart may find the region again, because its file could be neither emptied nor removed.
        """
        catalog = self.catalog
        with catalog.changed:
            # From here on nobody pins it: nothing in the index names it, and it is GONE.
            pinned = region.pins > 0
        if not pinned and region.whole and region.reusable and self._empty(region):
            with catalog.changed:
                catalog.free_slot_locked(region)
            self._keep_or_remove(FreeFile(region.path, region.fd, region.size, stable=self._sync or region.unchecked))
            return True
        return self._unlink(region)

    def _empty(self, region: Region) -> bool:
        """Zero the header page, which voids the file."""
        try:
            write_fully(self.io, region.fd, [aligned_page(bytes(PAGE))], 0)
            # Were the old header to come back after a power cut, checksums would tell new bytes from old values; where there
            # are none, it must not come back.
            if self._sync or region.unchecked:
                self.io.fdatasync(region.fd)
            return True
        except OSError:
            self.catalog.counters.io_errors += 1
            return False

    def _unlink(self, region: Region) -> bool:
        """Take away the file's name; its readers keep the bytes, and the last unpin closes the descriptor."""
        try:
            self.io.unlink(region.path)
            self._names += 1
            if self._sync:
                self.sync_names()
            removed = True
        except OSError:
            self.catalog.counters.io_errors += 1
            removed = False
        with self.catalog.changed:
            self.catalog.held_bytes -= region.size
            self.catalog.free_slot_locked(region)
            region.unlinked = True
            last = region.pins == 0
        if last:
            self._close(region)
        return removed

    def _close(self, region: Region) -> None:
        with self.catalog.changed:
            fd, region.fd = region.fd, -1
        if fd >= 0:
            self.io.close(fd)

    def unpin(self, region: Region) -> None:
        """End one pin; the last one on an unlinked file closes it."""
        with self.catalog.changed:
            region.pins -= 1
            last = region.pins == 0 and region.unlinked
        if last:
            self._close(region)

    def _keep_or_remove(self, file: FreeFile) -> None:
        geometry = self.catalog.geometry
        fits = self.catalog.held_bytes <= geometry.max_bytes
        if file.size == geometry.region_bytes and fits and len(self.free) < _KEEP_FREE:
            self.free.append(file)
        else:
            self._remove(file.path, file.fd, file.size)

    def trim(self, wanted: int) -> None:
        """Remove free files of an odd size, and as many others as it takes, until `wanted` more bytes fit the budget."""
        geometry = self.catalog.geometry
        for file in sorted(self.free, key=lambda file: file.size == geometry.region_bytes):
            odd = file.size != geometry.region_bytes
            if odd or self.catalog.held_bytes + wanted > geometry.max_bytes:
                self.free.remove(file)
                self._remove(file.path, file.fd, file.size)

    def drop_free(self) -> bool:
        """Remove a free file, for the bytes it takes of the file system; False where there is none."""
        if not self.free:
            return False
        file = self.free.pop()
        self._remove(file.path, file.fd, file.size)
        return True

    def _remove(self, path: Path, fd: int, size: int) -> None:
        try:
            self.io.unlink(path)
        except OSError:
            self.catalog.counters.io_errors += 1
        self.io.close(fd)
        self._names += 1
        with self.catalog.changed:
            self.catalog.held_bytes -= size

    def sync_free(self) -> None:
        """Make it stable that free files hold nothing. Raises OSError. Under the space lock, like `make`."""
        for number, file in enumerate(self.free):
            if not file.stable:
                self.io.fdatasync(file.fd)
                self.free[number] = file._replace(stable=True)

    def sync_names(self) -> None:
        """Return when every name made, changed or removed before this call is stable. Raises OSError."""
        target = self._names
        with self._names_lock:
            if self._names_synced >= target:
                return
            covered = self._names
            self.io.fsync_dir(self.root)
            self._names_synced = covered

    def close(self) -> None:
        """Close every descriptor."""
        for file in self.free:
            self.io.close(file.fd)
        self.free = []
        for region in list(self.catalog.regions.values()):
            self.io.close(region.fd)
