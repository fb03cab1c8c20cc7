"""What is done in the background, now and then, so that no request has to.

Sweeping: values whose time has passed are taken out of the index, so that what they take is counted as free, and regions in
which nothing is left are given back. Only regions in which something has expired are looked at, by their index pages.
Recency: the snapshot of last uses is written every few minutes, so that a killed daemon forgets only the latest.

Both may fail without harm: the error is counted and they are tried again. Concurrency: one thread of its own; `sweep` and
`save_recency` may also be called from any other.
"""

import threading
from collections.abc import Callable
from pathlib import Path

from kvd.store.identity import Identity
from kvd.tiers.adapters.base import AdapterError
from kvd.tiers.adapters.disk import recency
from kvd.tiers.adapters.disk.catalog import Catalog, slices
from kvd.tiers.adapters.disk.evict import Evictor
from kvd.tiers.adapters.disk.files import RegionFiles
from kvd.tiers.adapters.disk.index import at, unpack
from kvd.tiers.adapters.disk.region import Region, State
from kvd.tiers.adapters.disk.storage import Storage

_RECENCY_EVERY = 20
"""Rounds from one snapshot to the next."""


class Housekeeper:
    """The background work of one store."""

    def __init__(self, io: Storage, root: Path, catalog: Catalog, files: RegionFiles, evictor: Evictor) -> None:
        self._io = io
        self._root = root
        self._catalog = catalog
        self._files = files
        self._evictor = evictor
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._saved_tick = 0

    def start(self, interval_s: float, look: Callable[[], None] = lambda: None) -> None:
        """Work every `interval_s`; `look` is what else is to be done then."""

        def run() -> None:
            rounds = 0
            while not self._stop.wait(interval_s):
                rounds += 1
                look()
                try:
                    self.sweep()
                    if rounds % _RECENCY_EVERY == 0:
                        self.save_recency()
                except (OSError, AdapterError):
                    self._catalog.counters.io_errors += 1

        self._thread = threading.Thread(target=run, name="kvd-disk-house", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def sweep(self) -> None:
        """Forget what has expired. Raises AdapterError where a region that is empty now could not be given back."""
        now = self._catalog.clock_ns()
        with self._catalog.changed:
            due = [region for region in self._catalog.regions.values() if 0 < region.first_expiry_ns <= now]
        for region in due:
            self._sweep_region(region, now)
        self._evictor.release_dead([region for region in due if region.live == 0])

    def _sweep_region(self, region: Region, now: int) -> None:
        catalog = self._catalog
        with catalog.changed:
            if region.state is State.GONE:
                return
            region.pins += 1
        try:
            records = self._evictor.records(region)
        finally:
            self._files.unpin(region)
        if records is None:
            return
        later = 0
        for some in slices(records):
            with catalog.changed:
                for record in some:
                    if not record.expires_ns or not at(catalog.index.get(record.identity), region.slot, record.offset):
                        continue
                    if catalog.find_locked(record.identity, now) is not None:
                        later = min(later or record.expires_ns, record.expires_ns)
        with catalog.changed:
            # What was stored meanwhile into an open region has noted its own expiry, which may only make us look once too often.
            region.first_expiry_ns = later if region.state is State.SEALED else min(later or now, now)

    def save_recency(self) -> None:
        """Write the snapshot if anything was used since the last one. Raises OSError."""
        catalog = self._catalog
        with catalog.changed:
            tick = catalog.tick
            namespaces = catalog.index.namespaces()
        if tick == self._saved_tick:
            return
        places: list[tuple[int, int, int]] = []
        for namespace in namespaces:
            with catalog.changed:
                keys = catalog.index.keys(namespace)
            for some in slices(keys):
                with catalog.changed:
                    for key in some:
                        word = catalog.index.get(Identity(namespace + key))
                        if word is not None:
                            entry = unpack(word)
                            places.append((catalog.regions[entry.slot].sequence, entry.offset, entry.tick))
        recency.save(self._io, self._root, places)
        self._saved_tick = tick
