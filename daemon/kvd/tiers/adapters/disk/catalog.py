"""What the store knows: the index, the regions, what is dead in them, and who holds what.

This is the one place where shared state changes. It does no I/O and no waiting: writer, reader and evictor decide here
under the lock, act outside it, and come back to say what happened. Methods whose names end in `_locked` need the lock.

Three rules keep a recovery equal to what was known here:
  * of two records of one identity the one with the higher sequence number wins, so writers of one identity take turns
    (`claim`) and get their number while they hold the claim;
  * a dead record that a recovery would still find is *stale*: counted per identity here and listed in its region;
  * when a region goes, `forget_region_locked` names the identities whose stale records elsewhere would now surface. The
    caller writes those to the deletes log before the region's file is touched.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from kvd.store.identity import Identity
from kvd.store.retention import expired
from kvd.tiers.adapters.base import Counters, Evicted
from kvd.tiers.adapters.disk.format import IndexEntry, extent_bytes
from kvd.tiers.adapters.disk.geometry import Geometry
from kvd.tiers.adapters.disk.index import Entry, Index, at, pack, unpack
from kvd.tiers.adapters.disk.region import Region, State

T = TypeVar("T")
SLICE = 256
EXTRA_COUNTERS = (
    "expired",
    "moved",
    "regions_evicted",
    "regions_spared",
    "torn_extents",
    "direct_stores",
    "direct_store_bytes",
    "direct_loads",
    "direct_load_bytes",
    "direct_given_back",
    "unchecked",
    "given_up",
)
"""What this tier counts beyond what all tiers do."""


def slices(whole: Sequence[T]) -> Iterator[Sequence[T]]:
    """Short pieces: how much is done at most while the lock is held, so that look-ups never wait for long."""
    for start in range(0, len(whole), SLICE):
        yield whole[start : start + SLICE]
        # Without a pause the lock would be taken again before anybody who waits for it has woken up.
        time.sleep(0)


class Catalog:
    """The shared state of one open store."""

    def __init__(
        self, geometry: Geometry, counters: Counters, clock_ns: Callable[[], int] = time.time_ns, *, durable: bool = False
    ) -> None:
        self.geometry = geometry
        self.durable = durable
        """Whether values are synced at all (durability is not none)."""
        self.counters = counters
        self.evicted: Evicted = lambda identities: None
        counters.extra.update(dict.fromkeys(EXTRA_COUNTERS, 0))
        self.clock_ns = clock_ns
        self.changed = threading.Condition()
        """The lock, and how threads wait for a lane, a claim or a region."""
        self.index = Index()
        self.regions: dict[int, Region] = {}
        """By slot."""
        self.stale: dict[Identity, int] = {}
        """Dead records that a recovery would find, per identity."""
        self.live_bytes = 0
        self.held_bytes = 0
        """Sizes of all region files, free ones included."""
        self.tick = 1
        self.sequence = 1
        self.region_sequence = 1
        self._claimed: set[Identity] = set()
        self._free_slots: list[int] = []
        self._slots_made = 0

    # -- claims ---------------------------------------------------------------------------------------------------------

    def claim(self, identities: Iterable[Identity]) -> set[Identity]:
        """Wait until none of these is being written, moved or deleted by another thread, and take them all at once."""
        wanted = set(identities)
        with self.changed:
            while not self._claimed.isdisjoint(wanted):
                self.changed.wait()
            self._claimed |= wanted
        return wanted

    def try_claim_locked(self, identity: Identity) -> bool:
        """Claim one identity unless it is taken."""
        if identity in self._claimed:
            return False
        self._claimed.add(identity)
        return True

    def release(self, identities: set[Identity]) -> None:
        """End claims."""
        with self.changed:
            self._claimed -= identities
            self.changed.notify_all()

    # -- numbers ---------------------------------------------------------------------------------------------------------

    def take_slot_locked(self) -> int:
        """A region slot that is free."""
        if self._free_slots:
            return self._free_slots.pop()
        self._slots_made += 1
        return self._slots_made - 1

    # -- values ----------------------------------------------------------------------------------------------------------

    def find_locked(self, identity: Identity, now_ns: int) -> Entry | None:
        """The live entry of an identity; an expired one is dropped on the way."""
        word = self.index.get(identity)
        if word is None:
            return None
        entry = unpack(word)
        if expired(entry.expires_ns, now_ns):
            # Its record needs no note: a recovery sees that it has expired.
            self._pop_locked(identity)
            self.counters.extra["expired"] += 1
            return None
        return entry

    def insert_locked(self, region: Region, entries: Iterable[IndexEntry]) -> None:
        """Make written extents visible, superseding what was held under the same identities."""
        for entry in entries:
            word = pack(region.slot, entry.offset, entry.length, entry.retention, entry.tick, entry.expires_ns, entry.note)
            old = self.index.put(entry.identity, word)
            if old is not None:
                self._retire_locked(entry.identity, unpack(old), stale=True)
            size = extent_bytes(entry.length)
            region.live += 1
            region.live_bytes += size
            self.live_bytes += size
            region.note_expiry(entry.expires_ns)

    def drop_locked(self, identity: Identity) -> Entry | None:
        """Take an identity out of the index; its record becomes stale."""
        word = self.index.pop(identity)
        if word is None:
            return None
        entry = unpack(word)
        self._retire_locked(identity, entry, stale=True)
        return entry

    def _retire_locked(self, identity: Identity, entry: Entry, *, stale: bool) -> None:
        region = self.regions[entry.slot]
        size = extent_bytes(entry.length)
        region.live -= 1
        region.live_bytes -= size
        self.live_bytes -= size
        if entry.tick > region.mark_tick and region.state is State.SEALED:
            region.hot_bytes -= size
        if stale:
            self.mark_stale_locked(region, identity)

    def mark_stale_locked(self, region: Region, identity: Identity) -> None:
        """Note that `region` holds a dead record of `identity`."""
        region.stale.append(identity)
        self.stale[identity] = self.stale.get(identity, 0) + 1

    def touch_locked(self, identity: Identity, entry: Entry) -> None:
        """A value was read: it is the most recently used one now."""
        self.tick += 1
        region = self.regions[entry.slot]
        if region.state is State.SEALED and entry.tick <= region.mark_tick:
            region.hot_bytes += extent_bytes(entry.length)
        self.index.touch(identity, self.tick)

    # -- regions ---------------------------------------------------------------------------------------------------------

    def add_region_locked(self, region: Region) -> None:
        """A region joins the store. Its file's bytes are counted by the caller."""
        self.regions[region.slot] = region

    def seal_locked(self, region: Region) -> None:
        """No more appends. From now on uses are counted towards sparing the region from eviction."""
        region.state = State.SEALED
        region.mark_tick = self.tick
        region.hot_bytes = 0

    def forget_region(self, region: Region, records: list[IndexEntry] | None) -> tuple[list[tuple[Identity, int]], set[Identity]]:
        """Take everything of `region` out of the index; the lines that the deletes log needs before its file is touched.

        A line is needed where an older record elsewhere is dead only because of one in here, and no newer one shields it:
        a newer live record does, once it is as stable as it is going to be. `records` is what the region holds (None: it
        could not be read; then the index is searched, and every stale identity that is not live gets a line, which is more
        than needed and never less). Also returned: every identity known to have a record in the region.

        The caller is the only one to drop regions. The lock is let go every few hundred records; what changes meanwhile are
        newer records, which no line of ours touches.
        """
        newest: dict[Identity, int] = {}
        for some in slices(records or []):
            with self.changed:
                for record in some:
                    newest[record.identity] = max(record.sequence, newest.get(record.identity, 0))
                    if at(self.index.get(record.identity), region.slot, record.offset):
                        self._pop_locked(record.identity)
        with self.changed:
            lost = self._search_locked(region) if region.live else []
            stale, region.stale = region.stale, []
            region.state = State.GONE
            if records is None:
                newest = dict.fromkeys(self.stale, self.sequence)
                self.sequence += 1
        for part in slices(stale):
            with self.changed:
                for identity in part:
                    self._unmark_stale_locked(identity)
        lines: list[tuple[Identity, int]] = []
        for pairs in slices(list(newest.items())):
            with self.changed:
                lines += [
                    (identity, sequence + 1)
                    for identity, sequence in pairs
                    if identity in self.stale and not self._shielded_locked(identity)
                ]
        return lines, {record.identity for record in records or ()} | set(lost) | set(stale)

    def _search_locked(self, region: Region) -> list[Identity]:
        """Take out of the index what still lies in `region`, by looking at everything; only where its records are unreadable."""
        found = [identity for identity, word in self.index.items() if unpack(word).slot == region.slot]
        for identity in found:
            self._pop_locked(identity)
        return found

    def _shielded_locked(self, identity: Identity) -> bool:
        """Whether a live record keeps older ones dead, also after a power cut where durability asks for that."""
        word = self.index.get(identity)
        if word is None:
            return False
        region = self.regions[unpack(word).slot]
        return not self.durable or region.synced >= region.writes

    def _pop_locked(self, identity: Identity) -> None:
        word = self.index.pop(identity)
        if word is not None:
            self._retire_locked(identity, unpack(word), stale=False)

    def _unmark_stale_locked(self, identity: Identity) -> None:
        left = self.stale.get(identity, 0) - 1
        if left > 0:
            self.stale[identity] = left
        else:
            self.stale.pop(identity, None)

    def free_slot_locked(self, region: Region) -> None:
        """The region's slot may be used by another one: nothing in the index names it any more."""
        del self.regions[region.slot]
        self._free_slots.append(region.slot)
