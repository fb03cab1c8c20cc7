"""The offline check: is every byte in this folder what was written?

Purpose: `kvd verify`. Every extent of every region is read and its header and payload checksums compared, whether its value
is alive or not; index pages and the deletes log are looked at too. The folder is owned meanwhile, so a running daemon is
never disturbed (it is refused by name). Nothing is written unless `repair` is set.

Where the deletes log is lost nobody can tell which values are deleted: none would be served, and a repair gives all of them up.
Repair: the identity of each damaged value gets a line in the deletes log, so that it is a miss from now on and no older
value takes its place; damaged index pages are written anew from the extent headers. Damaged bytes stay where they are until
their region is recycled.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from kvd.store.identity import NAMESPACE_BYTES, Identity
from kvd.tiers.adapters.base import AdapterConfigError, AdapterError
from kvd.tiers.adapters.disk import manifest
from kvd.tiers.adapters.disk.buffers import BufferPool
from kvd.tiers.adapters.disk.deletes import DeletesLog
from kvd.tiers.adapters.disk.format import (
    ENTRIES_PER_PAGE,
    FORMAT_VERSION,
    PAGE,
    IndexEntry,
    IndexPage,
    blank_entry,
    extent_bytes,
    region_sequence,
)
from kvd.tiers.adapters.disk.recovery import Found, find_regions, void
from kvd.tiers.adapters.disk.region import aligned_page
from kvd.tiers.adapters.disk.scan import Gap, Source, verify_payload
from kvd.tiers.adapters.disk.storage import RealStorage, Storage, write_fully
from kvtools.errors import hint_for

_THREADS = 4


@dataclass
class Report:
    """What was found. Lists name values as namespace/key (hexadecimal) and where they lie."""

    format_version: int = FORMAT_VERSION
    regions: int = 0
    free_files: int = 0
    extents: int = 0
    extent_bytes: int = 0
    live: int = 0
    """Values a start would serve (those that expired since included)."""
    live_bytes: int = 0
    corrupt: list[str] = field(default_factory=list)
    """Values that a start would serve, and whose header or payload is not what was written."""
    corrupt_dead: int = 0
    """The same of extents that no start serves: overwritten, deleted or repaired ones."""
    absent_checksums: list[str] = field(default_factory=list)
    """Values that were written past the daemon and have no payload checksum: nothing can be said of their bytes."""
    torn: int = 0
    """Unfinished extents that a start passes over; normal after a crash."""
    damaged_index_pages: int = 0
    damaged_delete_pages: int = 0
    lost_deletes: str = ""
    """What of the deletes log is gone: then nobody can tell which values are deleted, and a start gives all of them up."""
    lost_files: list[str] = field(default_factory=list)
    """Region files whose header page is destroyed: a start uses them again, and nothing in them is served."""
    short_files: list[str] = field(default_factory=list)
    """Region files that somebody has cut: what lay behind their end is lost."""
    repaired: int = 0
    """Damaged values made misses, and index pages written anew."""

    @property
    def sound(self) -> bool:
        """Whether nothing is damaged, or all that was is repaired."""
        damaged = len(self.corrupt) + self.damaged_index_pages + self.damaged_delete_pages + bool(self.lost_deletes)
        return not self.lost_files and not self.short_files and damaged <= self.repaired


@dataclass(frozen=True)
class _Damage:
    """An extent that cannot be vouched for: damaged, or without a checksum."""

    entry: IndexEntry
    corrupt: bool


def verify(path: Path, *, repair: bool = False, io: Storage | None = None) -> Report:
    """Check the store in `path`. Raises AdapterConfigError (no store of this version, or in use), AdapterError (cannot read it)."""
    storage = io if io is not None else RealStorage()
    try:
        names = storage.listdir(path)
    except OSError as error:
        raise AdapterConfigError(
            f"cannot read {path}: {error.strerror or error}", hint=hint_for(error, "name the folder of a disk tier")
        ) from error
    if manifest.MANIFEST not in names and not any(region_sequence(name) is not None for name in names):
        raise AdapterConfigError(f"{path} holds no disk tier of kvd", hint="name the folder given to --long-path")
    owner = manifest.own(storage, path)
    try:
        version = manifest.refuse_strange(storage, path)
        return _Check(storage, path, version, repair).run()
    except OSError as error:
        raise AdapterError(f"cannot check {path}: {error.strerror or error}", hint=hint_for(error)) from error
    finally:
        storage.close(owner)


class _Check:
    """One run over one folder."""

    def __init__(self, io: Storage, root: Path, version: int, repair: bool) -> None:
        self.io = io
        self.root = root
        self.repair = repair
        self.report = Report(format_version=version)
        self.pool = BufferPool()
        self.deletes = DeletesLog(io, root, version)
        self.dead: dict[Identity, int] = {}
        self.winners: dict[Identity, tuple[int, int]] = {}
        """identity -> (sequence, region) of its newest record."""

    def run(self) -> Report:
        found = find_regions(self.io, self.root, direct=False, pool=self.pool)
        try:
            self.dead = self.deletes.load()
            self.report.damaged_delete_pages = self.deletes.bad_pages
            if any(file.scan is not None for file in found):
                self.report.lost_deletes = self.deletes.lost
            for file in found:
                self._take_stock(file)
            with ThreadPoolExecutor(_THREADS, thread_name_prefix="kvd-verify") as threads:
                damages = list(threads.map(self._examine, found))
            corrupt = [entry for file, damaged in zip(found, damages, strict=True) for entry in self._note(file, damaged)]
            alive = [entry for file in found if file.scan for entry in file.scan.entries() if self._alive(file, entry)]
            self.report.live = len(alive)
            self.report.live_bytes = sum(extent_bytes(entry.length) for entry in alive)
            if self.repair:
                self._repair(found, corrupt)
        finally:
            for file in found:
                self.io.close(file.fd)
        return self.report

    def _take_stock(self, file: Found) -> None:
        """Count, and learn which record of each identity a start would take."""
        report = self.report
        if file.header is None or file.scan is None:
            if file.damaged:
                report.lost_files.append(file.path.name)
            else:
                report.free_files += 1
            return
        report.regions += 1
        if file.size < file.header.region_bytes:
            report.short_files.append(file.path.name)
        report.torn += file.scan.torn
        report.damaged_index_pages += file.scan.damaged_pages
        for entry in file.scan.entries():
            report.extents += 1
            report.extent_bytes += extent_bytes(entry.length)
            rank = (entry.sequence, file.header.sequence)
            self.winners[entry.identity] = max(rank, self.winners.get(entry.identity, rank))

    def _alive(self, file: Found, entry: IndexEntry) -> bool:
        """Whether a start would serve this record."""
        assert file.header is not None
        if self.report.lost_deletes:
            return False
        newest = self.winners[entry.identity] == (entry.sequence, file.header.sequence)
        return newest and entry.sequence >= self.dead.get(entry.identity, 0)

    def _examine(self, file: Found) -> list[_Damage]:
        """Verify every extent of one file."""
        if file.header is None or file.scan is None:
            return []
        source = Source(file.fd, file.header.region_bytes, file.header.sequence, file.header.nonce)
        found = []
        for entry in file.scan.entries():
            verdict = verify_payload(self.io, source, entry, self.pool)
            if verdict is not True:
                found.append(_Damage(entry, corrupt=verdict is False))
        return found

    def _note(self, file: Found, damaged: list[_Damage]) -> list[IndexEntry]:
        """Report what was found in one file; the damaged records that a start would serve."""
        served = []
        for damage in damaged:
            entry = damage.entry
            name = f"{entry.identity[:NAMESPACE_BYTES].hex()}/{entry.identity[NAMESPACE_BYTES:].hex()}"
            where = f"{name} in {file.path.name} at {entry.offset}"
            if not self._alive(file, entry):
                self.report.corrupt_dead += damage.corrupt
            elif damage.corrupt:
                self.report.corrupt.append(where)
                served.append(entry)
            else:
                self.report.absent_checksums.append(where)
        return served

    def _repair(self, found: list[Found], corrupt: list[IndexEntry]) -> None:
        """Make damaged values misses, and index pages whole; where the deletes log is lost, void the regions, as a start does."""
        if self.report.lost_deletes:
            void(self.io, self.root, found)
            self.report.repaired += 1 + self.report.damaged_index_pages
        kept = self.deletes.load()
        for entry in corrupt:
            kept[entry.identity] = max(kept.get(entry.identity, 0), entry.sequence + 1)
        self.deletes.replace(list(kept.items()))
        self.deletes.close()
        self.report.repaired += len(corrupt) + self.report.damaged_delete_pages
        for file in found:
            for gap in file.scan.gaps if file.scan is not None else []:
                self._mend(file, gap)

    def _mend(self, file: Found, gap: Gap) -> None:
        """Write a damaged index page anew; entries that its extents could not give are filled with ones that mean nothing."""
        assert file.header is not None
        assert file.scan is not None
        inside = [entry.pack() for entry in file.scan.walked if gap.start <= entry.offset < gap.stop]
        entries = sorted(inside)[:ENTRIES_PER_PAGE] + [blank_entry()] * (ENTRIES_PER_PAGE - len(inside))
        page = IndexPage(file.header.sequence, file.header.nonce, gap.page, 0, gap.start, gap.stop, b"".join(entries)).pack()
        write_fully(self.io, file.fd, [aligned_page(page)], file.header.region_bytes - (gap.page + 1) * PAGE)
        self.io.fdatasync(file.fd)
        self.report.repaired += 1
