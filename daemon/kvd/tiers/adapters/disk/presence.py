"""Whether the folder is still there.

A file whose name somebody removed takes writes and syncs without a word, and what lies in it ends with the process. So a store
looks at the files it has written to, and the housekeeper at the folder, by its lock file; from then on nothing is taken any more.
Coming back by itself would be no good: a folder made again by others has neither our lock nor what says which values are dead.
"""

import logging
from collections.abc import Iterable
from pathlib import Path

from kvd.tiers.adapters.base import AdapterError
from kvd.tiers.adapters.disk.catalog import Catalog
from kvd.tiers.adapters.disk.region import Region
from kvd.tiers.adapters.disk.syncing import Syncer

log = logging.getLogger("kvd.disk")


class Presence:
    """What is known of one open folder. `lost`: files of it were removed under us."""

    def __init__(self, name: str, root: Path, lock_fd: int, catalog: Catalog, syncer: Syncer) -> None:
        self._name = name
        self._why = f"{root} does not keep what is in it: its files were removed"
        self._lock_fd = lock_fd
        self._catalog = catalog
        self._syncer = syncer
        self.lost = False

    def look(self, regions: Iterable[Region] = ()) -> None:
        """Notice that the folder, or one of these regions' files, was removed. Never raises."""
        if self.lost or not (self._syncer.nameless(self._lock_fd) or self._syncer.removed(set(regions))):
            return
        with self._catalog.changed:
            held = len(self._catalog.index)
        self.lost = True
        what = f"{held} value" + ("" if held == 1 else "s")
        log.error("%s: what is there (%s) ends with this process; a restart makes the folder anew", self._why, what)

    def refuse(self) -> None:
        """Raises AdapterError where nothing is kept any more."""
        if self.lost:
            self._catalog.counters.io_errors += 1
            raise AdapterError(f"{self._name}: {self._why}", hint="restart kvd: it makes the folder anew")
