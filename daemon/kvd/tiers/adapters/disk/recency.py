"""The recency snapshot: when each value was last used, kept over a clean restart.

Index pages hold the time of last use as of when they were written; uses after that are known only in RAM. At close they
go to one small file: a page with a header, then (region, offset, tick) for every value, sorted. It is a hint and nothing
else: a value's place and bytes never depend on it, and a damaged, missing or old file costs only some order of eviction.
"""

import struct
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvd.tiers.adapters.disk.format import PAGE, RECENCY_MAGIC, RECORD_VERSION
from kvd.tiers.adapters.disk.storage import Storage, read_fully, write_fully

FILE_NAME = "recency.kvsnap"
_HEAD = struct.Struct("<8sIIQQ")
_ROW = np.dtype([("region", "<u8"), ("offset", "<u8"), ("tick", "<u8")])
_MAX_BYTES = 1 << 32


class Recency:
    """The rows of a snapshot, by region."""

    def __init__(self, rows: NDArray[np.void]) -> None:
        self._rows = rows

    def apply(self, region: int, table: NDArray[np.void]) -> None:
        """Raise the ticks in a region's table of entries to those of the snapshot."""
        low, high = np.searchsorted(self._rows["region"], np.array([region, region + 1], np.uint64))
        mine = self._rows[low:high]
        if not len(mine) or not len(table):
            return
        spots = np.minimum(np.searchsorted(mine["offset"], table["offset"]), len(mine) - 1)
        known = mine["offset"][spots] == table["offset"]
        table["tick"] = np.where(known, np.maximum(table["tick"], mine["tick"][spots]), table["tick"])


def save(io: Storage, root: Path, places: list[tuple[int, int, int]]) -> None:
    """Write (region sequence, offset, tick) of every value, atomically. Raises OSError."""
    rows = np.array(places, _ROW)
    rows.sort(order=["region", "offset"])
    body = rows.tobytes()
    head = _HEAD.pack(RECENCY_MAGIC, RECORD_VERSION, 0, len(rows), xxhash.xxh3_64_intdigest(body)).ljust(PAGE, b"\0")
    temporary = root / (FILE_NAME + ".tmp")
    if temporary.name in io.listdir(root):
        io.unlink(temporary)
    fd = io.open(temporary, create=True)
    try:
        write_fully(io, fd, [memoryview(head)], 0)
        if body:
            write_fully(io, fd, [memoryview(body)], PAGE)
    finally:
        io.close(fd)
    io.rename(temporary, root / FILE_NAME)


def load(io: Storage, root: Path) -> Recency | None:
    """The snapshot, or None where there is none that is sound."""
    try:
        fd = io.open(root / FILE_NAME)
    except OSError:
        return None
    try:
        size = io.size(fd)
        if not PAGE <= size <= _MAX_BYTES:
            return None
        buffer = memoryview(bytearray(size))
        if read_fully(io, fd, [buffer], 0) != size:
            return None
    except OSError:
        return None
    finally:
        io.close(fd)
    magic, version, _zero, count, checksum = _HEAD.unpack_from(buffer)
    body = buffer[PAGE:]
    if magic != RECENCY_MAGIC or version != RECORD_VERSION or len(body) != count * _ROW.itemsize:
        return None
    if xxhash.xxh3_64_intdigest(body) != checksum:
        return None
    return Recency(np.frombuffer(body, _ROW))
