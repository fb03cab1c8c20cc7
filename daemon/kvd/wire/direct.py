"""Parts of a tier's files, for values that a client writes and reads itself: DirectWrite and DirectRead.

The arena is not involved: whoever can move bytes between a file and a device (GPU-direct) needs no copy in RAM. The daemon
still owns the extents; what is said of the arena's leases holds for these. `path` is where the *daemon* sees the file; in a
container the same folder may lie elsewhere, which (device, inode) of its root tells.
"""

import time
from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple, Self

from kvd.errors import Disconnected, LeaseLost
from kvd.wire import protocol as p
from kvd.wire.connection import Connection
from kvd.wire.putter import DURABILITY, PutResult


class Extent(NamedTuple):
    """One value's place: `offset` is a multiple of 4096, and the file is the value's up to the next one after its end.

    `root` is a position in the daemon's roots. `checksum`: XXH3-128 of the value (16 bytes), b"" where nobody computed it.
    """

    root: int
    name: str
    offset: int
    length: int
    generation: int
    checksum: bytes = b""


class DirectWrite:
    """Extents to write to; None where there is none, `reasons` says why. Left without a commit, all are given back.

    Before the commit each must be written in full and synced: the daemon takes the caller's word for it.
    """

    def __init__(self, link: Connection, lengths: Sequence[int], answer: p.DirectLent) -> None:
        self._link = link
        self._serials = [row[0] for row in answer.rows]
        self.reasons = answer.reasons
        self.extents = [
            Extent(row[1], row[2], row[3], length, row[4]) if row[0] else None
            for row, length in zip(answer.rows, lengths, strict=True)
        ]

    def commit(self, written: Sequence[int], checksums: Sequence[bytes] = ()) -> list[PutResult]:
        """Make values of these (positions in `extents`), and give the others back. Never raises for a lost loan."""
        chosen = [self._serials[i] for i in written]
        rest = [serial for serial in self._serials if serial and serial not in chosen]
        self._serials = []
        if rest:
            self._link.tell(p.DirectAbort(0, rest))
        if not chosen:
            return []
        try:
            answer = self._link.call(p.DirectCommit(0, chosen, list(checksums)), p.Committed)
        except Disconnected:
            return [PutResult(False, "lease_lost")] * len(chosen)
        durability = DURABILITY[answer.durability]
        return [
            PutResult(not reason, reason, durability if not reason else "none") for reason in answer.reasons or [""] * len(chosen)
        ]

    def abort(self) -> None:
        """Give everything back: nobody writes there any more."""
        serials, self._serials = [serial for serial in self._serials if serial], []
        if serials:
            self._link.tell(p.DirectAbort(0, serials))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.abort()


class DirectRead:
    """Extents to read from, in key order; None for what is not in a file. Good until released, or its deadline."""

    def __init__(self, link: Connection, asked_s: float, answer: p.DirectHeld) -> None:
        self._link = link
        self._number = answer.lease
        self._until = asked_s + link.welcome.lease_s
        self.extents = [None if row is None else Extent(*row) for row in answer.rows]

    def check(self) -> None:
        """Raises LeaseLost when the lease has ended: what was read under it may be anything."""
        if self._number and not (time.monotonic() < self._until and self._link.alive()):
            raise LeaseLost("the lease ended while its bytes were being read", hint="read fewer values at once")

    def release(self) -> None:
        """Let go of the files. A second call does nothing."""
        if self._number:
            self._link.tell(p.DirectRelease(0, [self._number]))
            self._number = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                self.check()
        finally:
            self.release()
