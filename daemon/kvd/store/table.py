"""Identity -> row number, packed: 68 bytes a row and 8 to 16 of table, where a dict with its keys and numbers takes 200.

Open addressing, linear probing, at most half full; a row's place follows from 32 bits of its identity's XXH3-64, which are
kept. Seeded at random, so that nobody can choose keys that meet in one place. Deleting closes the gap behind it, so look-ups
never get longer. A table twice as large is laid out in a few numpy passes. Not thread-safe: its owner holds a lock.
"""

import secrets
from array import array

import numpy as np
import numpy.typing as npt
import xxhash

from kvd.store.identity import IDENTITY_BYTES, Identity

LEAST = 1024
_HASH = 0xFFFFFFFF


class Table:
    """Names of rows. Row 0 is never used: it stands for nothing."""

    def __init__(self) -> None:
        self._seed = secrets.randbits(63)
        self._names = bytearray()
        self._hashes: npt.NDArray[np.uint32] = np.zeros(0, dtype=np.uint32)
        self._count = 0
        self._places = array("I")
        self._lay_out(LEAST)

    def __len__(self) -> int:
        return self._count

    def grow(self, rows: int) -> None:
        """Have that many rows."""
        hashes = np.zeros(rows, dtype=np.uint32)
        hashes[: len(self._hashes)] = self._hashes
        self._names.extend(bytes((rows - len(self._hashes)) * IDENTITY_BYTES))
        self._hashes, self._hash_of = hashes, hashes.data

    def name(self, row: int) -> Identity:
        """The identity of a row that has one."""
        return bytes(self._names[row * IDENTITY_BYTES : (row + 1) * IDENTITY_BYTES])

    def names(self) -> bytes:
        """A copy of all rows' identities, 64 bytes each; what stands in rows that have none means nothing."""
        return bytes(self._names)

    def find(self, identity: Identity) -> int:
        """The row of this identity; 0 where there is none."""
        return self._places[self._place(identity)]

    def put(self, identity: Identity, row: int) -> None:
        """Give a row a name that no other has."""
        if 2 * (self._count + 1) > len(self._places):
            self._lay_out(2 * len(self._places))
        self._names[row * IDENTITY_BYTES : (row + 1) * IDENTITY_BYTES] = identity
        self._hash_of[row] = self._hash(identity)
        self._places[self._place(identity)] = row
        self._count += 1

    def pop(self, identity: Identity) -> int:
        """Take a name away; the row that had it, 0 where none had."""
        gap = self._place(identity)
        places, mask = self._places, self._mask
        row = places[gap]
        if not row:
            return 0
        at = gap + 1 & mask
        while other := places[at]:
            if at - self._hash_of[other] & mask >= at - gap & mask:  # the gap is on its way
                places[gap] = other
                gap = at
            at = at + 1 & mask
        places[gap] = 0
        self._count -= 1
        return row

    def _hash(self, identity: Identity) -> int:
        return xxhash.xxh3_64_intdigest(identity, self._seed) & _HASH

    def _place(self, identity: Identity) -> int:
        """Where the row of this identity is, or else would be."""
        places, names, mask = self._places, self._names, self._mask
        at = self._hash(identity) & mask
        while row := places[at]:
            if names[row * IDENTITY_BYTES : (row + 1) * IDENTITY_BYTES] == identity:
                return at
            at = at + 1 & mask
        return at

    def _lay_out(self, size: int) -> None:
        """A table of `size` places, a power of two, with the rows of the one before.

        Sorted by home, each row takes its home or the place behind the row before it: what probing one by one comes to.
        """
        rows = np.frombuffer(self._places, dtype=np.uint32)
        rows = rows[rows != 0]
        homes = self._hashes[rows].astype(np.int64) & size - 1
        order = np.argsort(homes, kind="stable")
        rows, homes = rows[order], homes[order]
        steps = np.arange(len(rows))
        at = np.maximum.accumulate(homes - steps) + steps
        places = np.zeros(size, dtype=np.uint32)
        inside = at < size
        places[at[inside]] = rows[inside]
        self._places = array("I", places.tobytes())
        self._mask = size - 1
        for row, home in zip(rows[~inside].tolist(), homes[~inside].tolist(), strict=True):  # past the end: begin again
            while self._places[home]:
                home = home + 1 & self._mask
            self._places[home] = row
