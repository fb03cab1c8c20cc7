"""Starting up: from a folder of region files to the index that was there before.

    1. Every region file's header page is read. No valid header: the file holds nothing and is used again. A format version
       that is not known here: refused by name.
    2. The index pages of all regions are read, in parallel, and what follows them is walked (see `scan`).
    3. The recency snapshot, if there is a sound one, gives each value the time of its last use.
    4. All records are merged: of one identity the highest sequence number wins; a line of the deletes log with a still
       higher one kills it. Nearly all identities occur once; only the others are looked at one by one.
       Where the log is lost, in whole or in part, every record could be a dead one: none is served, all regions are voided.
    5. The budget is applied, and the regions with the most room take appends again.

Cost: the bytes read are 112 for each value, however large the values and the budget are. The time is that of building the dict.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvd.store.identity import IDENTITY_BYTES, Identity
from kvd.tiers.adapters.base import AdapterConfigError, AdapterError
from kvd.tiers.adapters.disk.buffers import BufferPool
from kvd.tiers.adapters.disk.catalog import Catalog
from kvd.tiers.adapters.disk.format import (
    ENTRY_DTYPE,
    FLAG_NO_CHECKSUM,
    INLINE_MAX,
    PAGE,
    READ_VERSIONS,
    RegionHeader,
    region_sequence,
    reserved_entry,
)
from kvd.tiers.adapters.disk.index import MAX_REGION_BYTES, pack
from kvd.tiers.adapters.disk.manifest import STRANGE_HINT, strange_version
from kvd.tiers.adapters.disk.recency import Recency
from kvd.tiers.adapters.disk.region import Pending, Region, State, aligned_page
from kvd.tiers.adapters.disk.scan import Scan, Source, entry_of, scan_region
from kvd.tiers.adapters.disk.storage import Storage, read_fully, write_fully

_SCAN_THREADS = 8


@dataclass
class Found:
    """One region file as it was found."""

    path: Path
    fd: int
    size: int
    """Bytes the file has."""
    header: RegionHeader | None = None
    scan: Scan | None = None
    damaged: bool = False
    """Page 0 is neither a header nor empty: what was in the file is lost."""


def find_regions(io: Storage, root: Path, *, direct: bool, pool: BufferPool) -> list[Found]:
    """Open and scan every region file, in parallel. Raises AdapterConfigError (strange version), AdapterError, OSError."""
    paths = sorted(root / name for name in io.listdir(root) if region_sequence(name) is not None)
    found: list[Found] = []
    try:
        for path in paths:
            with _named(path):
                fd = io.open(path, direct=direct)
                found.append(Found(path, fd, io.size(fd)))
        with ThreadPoolExecutor(_SCAN_THREADS, thread_name_prefix="kvd-disk-scan") as threads:
            list(threads.map(lambda file: _examine(io, file, pool), found))
    except BaseException:
        for file in found:
            io.close(file.fd)
        raise
    _drop_twins(found)
    return found


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """A region file that cannot be read stops the start: what it holds could be newer than anything else."""
    try:
        yield
    except OSError as error:
        raise AdapterError(
            f"cannot read {path}: {error.strerror or error}", hint="see the kernel log; move the file away to start without it"
        ) from error


def _examine(io: Storage, file: Found, pool: BufferPool) -> None:
    with _named(file.path), pool.lend(PAGE) as page:
        if read_fully(io, file.fd, [page[:PAGE]], 0) != PAGE:
            return
        header = RegionHeader.unpack(page[:PAGE])
        file.damaged = header is None and any(page[:PAGE])
    if header is None:
        return
    if header.version not in READ_VERSIONS:
        raise AdapterConfigError(strange_version(file.path, header.version), hint=STRANGE_HINT)
    if not 2 * PAGE <= header.region_bytes <= MAX_REGION_BYTES or header.region_bytes % PAGE:
        return
    file.header = header
    with _named(file.path):
        file.scan = scan_region(io, Source(file.fd, header.region_bytes, header.sequence, header.nonce), pool)


def _drop_twins(found: list[Found]) -> None:
    """Two files that claim one sequence (somebody copied one): the one whose name says so is the region."""
    owners: dict[int, Found] = {}
    for file in found:
        if file.header is None:
            continue
        other = owners.get(file.header.sequence)
        if other is None:
            owners[file.header.sequence] = file
            continue
        wrong = file if region_sequence(file.path.name) != file.header.sequence else other
        owners[file.header.sequence] = other if wrong is file else file
        wrong.header = wrong.scan = None


def void(io: Storage, root: Path, found: list[Found]) -> int:
    """Make every region hold nothing, stably; the values that were in them. Raises OSError.

    For a store of which nobody can tell what is dead. A crash half-way leaves the log lost and the next start goes on.
    """
    values = 0
    for file in list(found):
        if file.scan is None:
            continue
        values += len(file.scan.indexed) + len(file.scan.walked)
        if file.scan.reserved:
            # Whoever was lent a part may still be writing there: the file must not be used again.
            io.unlink(file.path)
            io.close(file.fd)
            found.remove(file)
            continue
        write_fully(io, file.fd, [aligned_page(bytes(PAGE))], 0)
        io.fdatasync(file.fd)
        file.scan = None
    io.fsync_dir(root)
    return values


def region_of(file: Found, slot: int, *, durable: bool) -> Region:
    """The Region for a file that holds values, as far as the file itself says."""
    header, scan = file.header, file.scan
    assert header is not None
    assert scan is not None
    region = Region(slot, file.path, file.fd, header.region_bytes, header.retention, header.sequence, header.nonce)
    region.state = State.SEALED
    region.whole = file.size == header.region_bytes
    # The process that such an extent was lent to may outlive the daemon, and a write of its own may still be under way.
    region.reusable = not scan.reserved
    listed = np.bitwise_and(scan.indexed["flags"], FLAG_NO_CHECKSUM).any()
    region.unchecked = bool(listed) or any(entry.flags & FLAG_NO_CHECKSUM for entry in scan.walked)
    region.epoch = scan.epoch
    region.data_end = scan.data_end
    region.durable = durable
    region.indexed_end = scan.indexed_end
    region.stable_end = scan.indexed_end
    # What was walked may not be stable yet (a killed process leaves it in the page cache): it is synced with the next sync.
    region.writes = int(scan.data_end > scan.indexed_end)
    region.pages = scan.full_pages
    region.covered = scan.covered
    # What is in no full index page yet is listed again: in the page that was found partial, or in a new one.
    known = [entry_of(row) for row in scan.indexed[scan.indexed["offset"] >= scan.covered].tolist()]
    pending = [Pending(entry.pack(), entry.offset, scan.indexed_epoch) for entry in known]
    walked = zip(scan.walked, scan.epochs, strict=True)
    pending += [Pending(entry.pack(), entry.offset, epoch) for entry, epoch in walked if entry.offset >= scan.covered]
    lent = [(reserved_entry(at, length, header.retention), at, epoch) for at, length, epoch in scan.reserved if at >= scan.covered]
    pending += [Pending(*one) for one in lent]
    region.pending = sorted(pending, key=lambda one: one.start)
    return region


def merge(catalog: Catalog, pairs: Sequence[tuple[Region, Scan]], deletes: dict[Identity, int], recency: Recency | None) -> None:
    """Fill the catalog's index from the scans (steps 3 and 4 above). The store is not in use yet."""
    tables = [_table(scan) for _, scan in pairs]
    for (region, _), table in zip(pairs, tables, strict=True):
        if len(table):
            region.mark_tick = int(table["tick"].max())
        if recency is not None:
            recency.apply(region.sequence, table)
    rows = np.concatenate([*tables, np.empty(0, ENTRY_DTYPE)])
    slots = np.repeat(
        np.array([region.slot for region, _ in pairs], np.uint32), np.array([len(table) for table in tables], np.intp)
    )
    catalog.sequence = max(int(rows["sequence"].max(initial=0)), max(deletes.values(), default=0)) + 1
    catalog.tick = int(rows["tick"].max(initial=0)) + 1
    now = catalog.clock_ns()
    expired = (rows["expires"] != 0) & (rows["expires"] <= now)
    several = _several(rows, deletes)
    regions = {region.slot: region for region, _ in pairs}
    _insert(catalog, regions, rows[~several & ~expired], slots[~several & ~expired])
    _insert_contested(catalog, regions, rows[several], slots[several], deletes, now)


def _table(scan: Scan) -> NDArray[np.void]:
    """All entries of one scan, as one writable array."""
    walked = b"".join(entry.pack() for entry in scan.walked)
    return np.concatenate([scan.indexed, np.frombuffer(walked, ENTRY_DTYPE)])


def _hashes(identities: NDArray[np.void]) -> NDArray[np.uint64]:
    """64 bits of each identity: equal identities have equal ones, and hardly any others do, whatever the keys look like."""
    words = np.ascontiguousarray(identities).view(np.uint64).reshape(-1, IDENTITY_BYTES // 8)
    mixed = np.zeros(len(words), np.uint64)
    for column in range(words.shape[1]):
        mixed = (mixed ^ words[:, column]) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    return mixed


def _several(rows: NDArray[np.void], deletes: dict[Identity, int]) -> NDArray[np.bool_]:
    """Which rows are not the only word on their identity (with a few false alarms)."""
    hashes = _hashes(rows["identity"])
    order = np.argsort(hashes, kind="stable")
    ordered = hashes[order]
    twin = np.zeros(len(rows), np.bool_)
    same = ordered[1:] == ordered[:-1]
    twin[order[1:][same]] = True
    twin[order[:-1][same]] = True
    if deletes:
        marked = np.frombuffer(b"".join(deletes), np.dtype("V64"))
        twin |= np.isin(hashes, _hashes(marked))
    return twin


def _insert(catalog: Catalog, regions: dict[int, Region], rows: NDArray[np.void], slots: NDArray[np.uint32]) -> None:
    """Put rows into the index, none of which is contested."""
    put = catalog.index.put
    columns = [rows[name].tolist() for name in ("identity", "offset", "length", "retention", "tick", "expires", "note")]
    for identity, offset, length, retention, tick, expires, note, slot in zip(*columns, slots.tolist(), strict=True):
        put(identity, pack(slot, offset, length, retention, tick, expires, note))
    if not len(rows):
        return
    size = np.where(
        rows["length"] <= INLINE_MAX, PAGE, PAGE + (rows["length"] + np.uint64(PAGE - 1)) // np.uint64(PAGE) * np.uint64(PAGE)
    )
    marks = np.zeros(int(slots.max()) + 1, np.uint64)
    for slot, region in regions.items():
        if slot < len(marks):
            marks[slot] = region.mark_tick
    live = np.bincount(slots)
    live_bytes = np.bincount(slots, size)
    hot_bytes = np.bincount(slots, np.where(rows["tick"] > marks[slots], size, 0))
    forever = np.bincount(slots, rows["expires"] == 0)
    expiry = np.zeros(len(marks), np.uint64)
    np.maximum.at(expiry, slots, rows["expires"])
    earliest = np.full(len(marks), np.iinfo(np.uint64).max, np.uint64)
    np.minimum.at(earliest, slots[rows["expires"] != 0], rows["expires"][rows["expires"] != 0])
    for slot in np.flatnonzero(live).tolist():
        region = regions[slot]
        region.live += int(live[slot])
        region.live_bytes += int(live_bytes[slot])
        region.hot_bytes += int(hot_bytes[slot])
        region.never_expires |= bool(forever[slot])
        if expiry[slot]:
            region.note_expiry(int(expiry[slot]))
            region.note_expiry(int(earliest[slot]))
        catalog.live_bytes += int(live_bytes[slot])


def _insert_contested(
    catalog: Catalog,
    regions: dict[int, Region],
    rows: NDArray[np.void],
    slots: NDArray[np.uint32],
    deletes: dict[Identity, int],
    now: int,
) -> None:
    """Decide, identity by identity, which record is alive."""
    records: dict[Identity, list[tuple[int, int, int]]] = {}
    for number, (identity, sequence, slot) in enumerate(
        zip(rows["identity"].tolist(), rows["sequence"].tolist(), slots.tolist(), strict=True)
    ):
        records.setdefault(identity, []).append((sequence, regions[slot].sequence, number))
    alive: list[int] = []
    for identity, versions in records.items():
        versions.sort()
        sequence, _, number = versions.pop()
        for _, _, loser in versions:
            catalog.mark_stale_locked(regions[int(slots[loser])], identity)
        expires = int(rows["expires"][number])
        if sequence < deletes.get(identity, 0):
            catalog.mark_stale_locked(regions[int(slots[number])], identity)
        elif not (expires and expires <= now):
            alive.append(number)
    _insert(catalog, regions, rows[alive], slots[alive])
