"""DiskAdapter: the crash-safe, log-structured region store as a tier.

Purpose: keep values on a local (or NFS) file system over restarts, at the speed of the device. Contract: `base.Adapter`.

    store  -> claim identities -> Writer (lanes, groups) -> Catalog -> [Syncer]
    load   -> Catalog (find, pin) -> Reader (one preadv a run) -> verify -> Catalog (touch)
    delete -> claim -> Catalog -> deletes log, or the whole region where nothing is left in it
    room   <- Evictor <- Writer, when a lane needs a new region

What a restart finds is what FORMAT.md says and nothing else. `usage` counts the pages of live extents, headers included, to
the byte, also right after a restart; `describe` tells what the files take in all, never more than `max_bytes`.

Failure: an item fails alone ('full', 'io_error', 'too_large', 'expired', 'unwanted'); where *every* item of a call failed for
the device's sake, AdapterFull or AdapterError is raised, so that the tier's breaker learns of it.
Concurrency: every method from any thread, several at once, between `open` and `close`.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from kvd.store.identity import IDENTITY_BYTES, NAMESPACE_BYTES, Identity
from kvd.store.retention import Retention, expired
from kvd.tiers.adapters.base import (
    Adapter,
    AdapterConfigError,
    AdapterError,
    AdapterFull,
    Capabilities,
    DirectExtent,
    Durability,
    Hit,
    Item,
    Loaded,
    Mark,
    Reservation,
    Stored,
    Usage,
    Want,
)
from kvd.tiers.adapters.disk import manifest, recency
from kvd.tiers.adapters.disk.buffers import BufferPool
from kvd.tiers.adapters.disk.catalog import Catalog, slices
from kvd.tiers.adapters.disk.deletes import FILE_NAME, DeletesLog
from kvd.tiers.adapters.disk.evict import Evictor
from kvd.tiers.adapters.disk.extents import Draft, ExtentWriter
from kvd.tiers.adapters.disk.files import RegionFiles, random_nonce
from kvd.tiers.adapters.disk.format import FORMAT_VERSION, region_sequence
from kvd.tiers.adapters.disk.geometry import plan
from kvd.tiers.adapters.disk.housekeeping import Housekeeper
from kvd.tiers.adapters.disk.lending import LendingDesk
from kvd.tiers.adapters.disk.presence import Presence
from kvd.tiers.adapters.disk.reader import Reader
from kvd.tiers.adapters.disk.recovery import Found, find_regions, merge, region_of, void
from kvd.tiers.adapters.disk.region import Region, State
from kvd.tiers.adapters.disk.storage import NO_ROOM, DirectIO, RealStorage, Storage, allow_open_files
from kvd.tiers.adapters.disk.syncing import Syncer
from kvd.tiers.adapters.disk.writer import Writer, reason_of
from kvtools.errors import hint_for

log = logging.getLogger("kvd.disk")

IO_MODES = ("auto", "direct", "buffered")
_FLOOR_SHARE = 100
_FLOOR_MAX = 10 << 30
_DELETES_SPENT_MIN = 4096
_HASH_THREADS, _READ_THREADS = 4, 12


class DiskAdapter(Adapter):
    """A folder of region files; see the module."""

    type = "disk"
    says_damage = True
    capabilities = Capabilities(evict=True, enumerate=True, durable=True, direct_extents=True, exact_usage=True, local_index=True)

    def __init__(
        self,
        name: str,
        path: Path,
        max_bytes: int,
        *,
        region_bytes: int | None = None,
        durability: Durability = Durability.NONE,
        io: Storage | None = None,
        io_mode: str = "auto",
        group_interval_s: float = 0.02,
        housekeeping_s: float = 30.0,
        free_floor_bytes: int | None = None,
        alone: bool = False,
        clock_ns: Callable[[], int] = time.time_ns,
        nonce: Callable[[], int] = random_nonce,
    ) -> None:
        """A store in `path` of at most `max_bytes` of files. `free_floor_bytes`: no new file when less than this would stay

        free on the file system (default: 1 % of it, at most 10 GiB). `alone`: not a member of a stripe. Raises AdapterConfigError
        for what can never work.
        """
        super().__init__(name)
        if io_mode not in IO_MODES:
            raise AdapterConfigError(f"{name}: io_mode is {io_mode!r}", hint=f"one of {', '.join(IO_MODES)}")
        self.path = Path(path)
        self.geometry = plan(name, max_bytes, region_bytes)
        self.durability = durability
        self._io = io if io is not None else RealStorage()
        self._io_mode = io_mode
        self._group_interval_s = group_interval_s
        self._housekeeping_s = housekeeping_s
        self._free_floor_bytes = free_floor_bytes
        self._alone = alone
        self._clock_ns = clock_ns
        self._nonce = nonce
        self._direct = DirectIO(False, 0, "not open")
        self._pool = BufferPool()
        self._catalog = Catalog(self.geometry, self.counters, clock_ns)
        self._lock_fd = -1
        self._folder: manifest.Folder
        self._files: RegionFiles
        self._deletes: DeletesLog
        self._evictor: Evictor
        self._writer: Writer
        self._reader: Reader
        self._house: Housekeeper
        self._desk: LendingDesk
        self._syncer: Syncer
        self._presence: Presence
        self._hasher: ThreadPoolExecutor
        self._read_threads: ThreadPoolExecutor
        self.recovery_s = 0.0
        """How long the last `open` took."""

    # -- life ------------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """See Adapter. The folder is owned from here on."""
        started = time.perf_counter()
        allow_open_files(self.geometry.regions)
        self._lock_fd = manifest.own(self._io, self.path)
        try:
            folder = manifest.check(self._io, self.path, self.geometry.region_bytes, self._clock_ns)
            self._direct = self._choose_io()
        except BaseException:
            manifest.disown(self._io, self.path, self._lock_fd)
            self._lock_fd = -1
            raise
        try:
            self._assemble(folder.version)
            self._resume(self._recover(), folder)
        except OSError as error:
            self._release()
            why = f"{self.name}: cannot start with what is in {self.path}: {error.strerror or error}"
            raise AdapterError(why, hint=hint_for(error)) from error
        except BaseException:
            self._release()
            raise
        if self._alone:
            self._folder = manifest.mark_alone(self._io, self.path, self._folder)
        if self.durability is Durability.GROUP:
            self._syncer.start(self._group_interval_s)
        if self._housekeeping_s > 0:
            self._house.start(self._housekeeping_s, self._presence.look)
        self.recovery_s = time.perf_counter() - started

    def _assemble(self, version: int) -> None:
        """Make the parts, for a folder that is ours and of this version."""
        self._hasher = ThreadPoolExecutor(_HASH_THREADS, thread_name_prefix="kvd-disk-hash")
        self._read_threads = ThreadPoolExecutor(_READ_THREADS, thread_name_prefix="kvd-disk-read")
        sync = self.durability is not Durability.NONE
        self._catalog = catalog = Catalog(self.geometry, self.counters, self._clock_ns, durable=sync)
        catalog.evicted = self.evicted
        self._deletes = DeletesLog(self._io, self.path, version)
        self._files = RegionFiles(
            self._io, self.path, catalog, direct=self._direct.ok, sync=sync, free_floor_bytes=self._floor(), nonce=self._nonce
        )
        self._evictor = Evictor(self._io, self.path, catalog, self._files, self._deletes, self._pool)
        self._syncer = Syncer(self._io, catalog, self._files, self._deletes)
        self._presence = Presence(self.name, self.path, self._lock_fd, catalog, self._syncer)
        extents = ExtentWriter(self._io, self._direct, self._pool, self._hasher, self._clock_ns)
        self._writer = Writer(self._io, catalog, extents, self._evictor.make_region, self._syncer.sync_region)
        self._reader = Reader(self._io, catalog, self._files, self._direct, self._pool, self._read_threads)
        self._evictor.writer, self._evictor.reader = self._writer, self._reader
        self._house = Housekeeper(self._io, self.path, catalog, self._files, self._evictor)
        self._desk = LendingDesk(self._io, catalog, self._files, self._writer, self._syncer.sync_region)

    def _floor(self) -> int:
        """Bytes that must stay free on the file system. Never raises: where it cannot be asked, 0."""
        if self._free_floor_bytes is not None:
            return self._free_floor_bytes
        try:
            return min(self._io.free_bytes(self.path)[1] // _FLOOR_SHARE, _FLOOR_MAX)
        except OSError:
            return 0

    def _choose_io(self) -> DirectIO:
        if self._io_mode == "buffered":
            return DirectIO(False, 0, "buffered by configuration")
        direct = self._io.direct_io(self.path)
        if self._io_mode == "direct" and not direct.ok:
            raise AdapterConfigError(
                f"{self.name}: io_mode is 'direct', but {self.path} cannot do it: {direct.reason}",
                hint="use io_mode 'auto', or a local file system such as ext4 or xfs",
            )
        return direct

    def _recover(self) -> list[Region]:
        """Find everything again; the regions that hold something."""
        catalog = self._catalog
        found = find_regions(self._io, self.path, direct=self._direct.ok, pool=self._pool)
        deletes = self._deletes.load()
        if self._deletes.lost and any(file.scan is not None for file in found):
            self._give_up(found)
        pairs = []
        for file in found:
            catalog.region_sequence = max(catalog.region_sequence, _highest(file) + 1)
            self.counters.corruptions += file.damaged
            if file.scan is None:
                continue
            with catalog.changed:
                region = region_of(file, catalog.take_slot_locked(), durable=catalog.durable)
                catalog.add_region_locked(region)
                catalog.held_bytes += region.size
            pairs.append((region, file.scan))
            if not region.whole:
                # Region files are made at full length before their header is written: somebody has cut this one.
                self.counters.corruptions += 1
                log.warning("%s is shorter than it was made: what lay behind its end is lost", file.path)
            self.counters.corruptions += file.scan.damaged_pages
            self.counters.extra["torn_extents"] += file.scan.torn
        with catalog.changed:
            merge(catalog, pairs, deletes, recency.load(self._io, self.path))
        for file in found:
            if file.scan is None:
                self._files.adopt_free(file.path, file.fd, file.size)
        if self._renew_deletes():
            self._evictor.release_dead([region for region, _ in pairs])
            self._evictor.fit()
        return [region for region, _ in pairs]

    def _give_up(self, found: list[Found]) -> None:
        """The deletes log is lost: any value here may be one that was deleted, or an older one than was last stored."""
        values = void(self._io, self.path, found)
        self.counters.corruptions += 1
        self.counters.extra["given_up"] += values
        log.error(
            "%s %s: it alone says which values there are deleted or out of date, so none of the %d found is served",
            self.path / FILE_NAME,
            self._deletes.lost,
            values,
        )

    def _renew_deletes(self) -> bool:
        """Start with a log of what is needed; on a file system without room for it, with the one there is, and False.

        What gives regions back has to note it in the log: that waits then for room, and for the next region that is wanted.
        """
        try:
            self._deletes.rewrite(self._catalog.stale)
            return True
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            log.warning("%s: no room to write the deletes log anew: going on with the old one", self.path)
            self._deletes.go_on()
            return False

    def _resume(self, regions: list[Region], folder: manifest.Folder) -> None:
        """Let the regions with the most room take appends again, in epochs of their own. Raises OSError."""
        if not self._deletes.headless and folder.version != FORMAT_VERSION:
            folder = replace(folder, version=FORMAT_VERSION)
        self._folder = folder
        try:
            if not folder.taken:
                self._folder = manifest.take_epochs(self._io, self.path, folder, self._clock_ns)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            log.warning("%s: no room to write the manifest anew: what is there stays, and nothing is added to its files", self.path)
            return
        lanes = self.geometry.lanes
        for region in sorted(regions, key=Region.room_left, reverse=True):
            usual = region.state is State.SEALED and region.whole and region.size == self.geometry.region_bytes
            if not usual or region.room_left() < region.size // 8:
                continue
            already = [other for other in self._writer.open_regions() if other.retention == region.retention]
            if len(already) < lanes:
                region.state = State.OPEN
                region.go_on(self._folder.taken)
                self._writer.adopt(region)

    def close(self, deadline_s: float = 5.0) -> None:
        """See Adapter. Index pages and the recency snapshot are written, so the next start walks no headers.

        The last sync is waited for until the deadline; without it the files are as a killed process leaves them.
        """
        if self._lock_fd < 0:
            return
        self._presence.look()
        self._house.stop()
        self._syncer.stop()
        self._desk.close()
        self._writer.close()
        try:
            self._house.save_recency()
        except OSError:
            self.counters.io_errors += 1
        self._syncer.sync_all_within(deadline_s)
        self._release()

    def _release(self) -> None:
        """Give back threads, descriptors and the folder."""
        self._hasher.shutdown()
        self._read_threads.shutdown()
        self._deletes.close()
        self._files.close()
        self._io.close(self._lock_fd)
        self._lock_fd = -1

    # -- values ----------------------------------------------------------------------------------------------------------

    def store(self, items: Sequence[Item]) -> list[Stored]:
        """See Adapter."""
        self._presence.refuse()
        now = self._clock_ns()
        results = [self._refusal(item, now) for item in items]
        last = {item.identity: number for number, item in enumerate(items) if results[number] is None}
        # Of equal identities in one call the last one counts, as if they had come one by one.
        claimed = self._catalog.claim(last)
        try:
            drafts = self._drafts(items, last)
            failure = self._append(list(drafts.values()))
            self._presence.look(draft.region for draft in drafts.values() if draft.region is not None)
            self._make_durable(drafts.values())
        finally:
            self._catalog.release(claimed)
        self._presence.refuse()
        stored = [
            result if result is not None else _outcome(drafts[item.identity], self.durability)
            for item, result in zip(items, results, strict=True)
        ]
        self._count(items, stored)
        if drafts and not any(result.ok for result in stored):
            self._raise_if_device(failure, drafts.values())
        return stored

    @property
    def parts_down(self) -> int:
        """See Adapter."""
        return int(self._presence.lost)

    def _refusal(self, item: Item, now: int) -> Stored | None:
        if len(item.identity) != IDENTITY_BYTES:
            raise ValueError(f"an identity is {IDENTITY_BYTES} bytes, not {len(item.identity)}")
        if item.retention < Retention.SHORT:
            return Stored(False, "unwanted")
        if expired(item.expires_ns, now):
            return Stored(False, "expired")
        if len(item.data) > self.geometry.max_value_bytes:
            return self.too_large(item, self.geometry.max_value_bytes, "give the tier more room, or larger region_bytes")
        return None

    def _drafts(self, items: Sequence[Item], last: dict[Identity, int]) -> dict[Identity, Draft]:
        with self._catalog.changed:
            first = self._catalog.sequence
            self._catalog.sequence += len(last)
            self._catalog.tick += 1
            tick = self._catalog.tick
        drafts = {}
        for sequence, (identity, number) in enumerate(last.items(), first):
            item = items[number]
            drafts[identity] = Draft(
                identity, item.data.cast("B"), int(item.retention), item.expires_ns, sequence, tick, item.padded, item.note
            )
        return drafts

    def _append(self, drafts: list[Draft]) -> AdapterError | None:
        failure: AdapterError | None = None
        for retention in sorted({draft.retention for draft in drafts}):
            try:
                self._writer.append([draft for draft in drafts if draft.retention == retention])
            except AdapterError as error:
                failure = error
            except OSError as error:
                self.counters.io_errors += 1
                why = f"{self.name}: cannot write to {self.path}: {error.strerror or error}"
                failure = AdapterError(why, hint=hint_for(error))
        return failure

    def _make_durable(self, drafts: Collection[Draft]) -> None:
        if self.durability is not Durability.FSYNC:
            return
        regions = {draft.region for draft in drafts if draft.region is not None}
        failed = self._syncer.sync_regions(regions)
        for draft in drafts:
            error = failed.get(draft.region) if draft.region is not None else None
            if error is not None:
                with self._catalog.changed:
                    self._catalog.drop_locked(draft.identity)
                draft.region, draft.reason = None, reason_of(error)

    def _count(self, items: Sequence[Item], stored: list[Stored]) -> None:
        with self._catalog.changed:
            for item, result in zip(items, stored, strict=True):
                if result.ok:
                    self.counters.stores += 1
                    self.counters.store_bytes += len(item.data)
                elif result.reason not in ("unwanted", "expired"):
                    self.counters.store_failures += 1

    def _raise_if_device(self, failure: AdapterError | None, drafts: Collection[Draft]) -> None:
        reasons = {draft.reason for draft in drafts}
        if failure is not None:
            raise failure
        if reasons == {"full"}:
            raise AdapterFull(f"{self.name}: no space left for {self.path}", hint="free disk space or lower the budget")
        if reasons <= {"full", "io_error"}:
            raise AdapterError(f"{self.name}: cannot write to {self.path}: I/O error", hint="see the kernel log (dmesg)")

    def lookup(self, identities: Sequence[Identity]) -> list[Hit | None]:
        """See Adapter."""
        now = self._clock_ns()
        answers: list[Hit | None] = []
        with self._catalog.changed:
            for identity in identities:
                entry = self._catalog.find_locked(identity, now)
                answers.append(entry and Hit(entry.length, Retention(entry.retention), entry.expires_ns, entry.note))
        return answers

    def load(self, wants: Sequence[Want]) -> list[Loaded]:
        """See Adapter."""
        results = self._reader.load(wants)
        if results and all(result is Loaded.ERROR for result in results):
            raise AdapterError(f"{self.name}: cannot read from {self.path}: I/O error", hint="see the kernel log (dmesg)")
        return results

    def delete(self, identities: Sequence[Identity]) -> int:
        """See Adapter."""
        catalog = self._catalog
        claimed = catalog.claim(identities)
        try:
            held = 0
            touched: set[Region] = set()
            for some in slices(list(claimed)):
                with catalog.changed:
                    now = self._clock_ns()
                    for identity in some:
                        if catalog.find_locked(identity, now) is not None and (entry := catalog.drop_locked(identity)):
                            held += 1
                            touched.add(catalog.regions[entry.slot])
            empty = [region for region in touched if region.live == 0]
            # A region that is empty now goes as a whole, which is cheaper than a line for every value in it.
            self._evictor.release_dead(empty)
            with catalog.changed:
                first = catalog.sequence
                catalog.sequence += 1
            lines = []
            for some in slices(list(dict.fromkeys(identities))):
                with catalog.changed:
                    lines += [(identity, first) for identity in some if identity in catalog.stale]
            self._note_deletes(lines)
        finally:
            catalog.release(claimed)
        return held

    def _note_deletes(self, lines: list[tuple[Identity, int]]) -> None:
        while True:
            try:
                self._deletes.append(lines, sync=self.durability is Durability.FSYNC)
                break
            except OSError as error:
                if error.errno in NO_ROOM and self._evictor.give_way({identity for identity, _ in lines}):
                    # What was dropped may have been all that the lines were for.
                    with self._catalog.changed:
                        lines = [line for line in lines if line[0] in self._catalog.stale]
                    continue
                self.counters.io_errors += 1
                why = f"{self.name}: a delete in {self.path} may not outlive a restart: {error.strerror}"
                raise AdapterError(why, hint=hint_for(error)) from error
        with self._catalog.changed:
            needed = len(self._catalog.stale)
            if self._deletes.lines - needed <= max(_DELETES_SPENT_MIN, needed):
                return
            identities = set(self._catalog.stale)
        try:
            self._deletes.rewrite(identities)
        except OSError:
            self.counters.io_errors += 1

    def delete_namespace(self, namespace: bytes) -> int:
        """See Adapter."""
        if len(namespace) != NAMESPACE_BYTES:
            raise ValueError(f"a namespace is {NAMESPACE_BYTES} bytes, not {len(namespace)}")
        return super().delete_namespace(namespace)

    def enumerate(self) -> Iterator[tuple[Identity, Hit]]:
        """See Adapter. A snapshot of the keys of each namespace as it is come to."""
        return self._held(self.identities(None))

    def identities(self, namespace: bytes | None) -> Iterator[Identity]:
        """Expired ones as well: a clock that is set back would bring them back."""
        with self._catalog.changed:
            spaces = self._catalog.index.namespaces() if namespace is None else [namespace]
        for space in spaces:
            with self._catalog.changed:
                keys = self._catalog.index.keys(space)
            yield from (space + key for key in keys)

    # -- lending ---------------------------------------------------------------------------------------------------------

    def direct_roots(self) -> list[Path]:
        """See Adapter."""
        return [self.path]

    def lend(self, wanted: Sequence[Reservation]) -> list[DirectExtent | str]:
        """See Adapter."""
        return self._desk.lend(wanted)

    def fill(self, extent: DirectExtent, checksum: bytes = b"") -> Stored:
        """See Adapter."""
        return self._desk.fill(extent, checksum, self.durability)

    def give_back(self, extent: DirectExtent) -> None:
        """See Adapter."""
        self._desk.give_back(extent)

    def hold(self, identities: Sequence[Identity]) -> list[DirectExtent | None]:
        """See Adapter."""
        return self._desk.hold(identities)

    # -- state -----------------------------------------------------------------------------------------------------------

    def sign(self) -> int:
        """See Adapter."""
        return self._folder.created_ns

    def mark(self) -> Mark:
        """See Adapter."""
        return Mark(self._folder.mark, self._folder.peers)

    def set_mark(self, mark: Mark) -> None:
        """See Adapter."""
        try:
            self._folder = manifest.mark(self._io, self.path, self._folder, mark)
        except AdapterError:
            self.counters.io_errors += 1
            raise

    def usage(self) -> Usage:
        """See Adapter. Bytes: the pages of live extents, header pages included. Expired values count until they are noticed."""
        with self._catalog.changed:
            return Usage(self._catalog.live_bytes, self.geometry.max_bytes, len(self._catalog.index))

    def flush(self) -> Durability:
        """See Adapter."""
        try:
            self._evictor.sync_free()
            self._syncer.sync_everything()
        except OSError as error:
            self.counters.io_errors += 1
            why = f"{self.name}: {self.path} does not keep what is in it: {error.strerror or error}"
            raise AdapterError(why, hint=hint_for(error)) from error
        return Durability.FSYNC

    def describe(self) -> dict[str, object]:
        """See Adapter."""
        with self._catalog.changed:
            states = [region.state for region in self._catalog.regions.values()]
            allocated = self._catalog.held_bytes
            stale = len(self._catalog.stale)
        return {
            "path": str(self.path),
            "durability": self.durability.name.lower(),
            "io": "direct" if self._direct.ok else "buffered",
            "io_reason": self._direct.reason,
            "region_bytes": self.geometry.region_bytes,
            "max_value_bytes": self.geometry.max_value_bytes,
            "regions": len(states),
            "regions_open": states.count(State.OPEN),
            "allocated_bytes": allocated,
            "preallocated": not self._files.sparse if self._lock_fd >= 0 else None,
            "stale_identities": stale,
            "lent_bytes": self._desk.lent_bytes if self._lock_fd >= 0 else 0,
            "deletes_log_lines": self._deletes.lines if self._lock_fd >= 0 else 0,
            "recovery_s": round(self.recovery_s, 6),
        }


def _highest(file: Found) -> int:
    """The highest region sequence that a file knows of: its name's or its header's."""
    return max(region_sequence(file.path.name) or 0, file.header.sequence if file.header is not None else 0)


def _outcome(draft: Draft, durability: Durability) -> Stored:
    return Stored(True, "", durability) if draft.region is not None else Stored(False, draft.reason or "io_error")
