"""The deletes log: what must stay dead although a region still holds it.

Regions are append-only, so a deleted value's bytes, and an overwritten value's older bytes, stay in their region until
that is recycled, and a recovery finds them. An overwrite is decided by the sequence numbers of the two records. A delete
has no record in a region: it is a line here, (identity, sequence), meaning that every record of the identity with a lower
sequence is dead. The same line is written when the *newer* record of an overwritten value is evicted before the older one.

The file is appended to in pairs of equal pages, because one flipped bit in the only copy of a line would bring a deleted
value back. It is written anew (temporary file, sync, rename) at the start and when most of its lines are spent: a line is
needed only as long as some region holds an older record.

A log can also be lost as a whole, or in part: removed, emptied, cut, overwritten. Every store has one from its first start on,
and its first pair, the head, says how many pairs were stable when it was last synced; so `load` notices, and says so in `lost`.
Then nobody can tell what of the store is dead, and the caller serves none of it. Of the two copies of the head one is written
at a time, with a sync in between: a power cut cannot tear both. Pairs behind the count may be torn or missing without that.

Concurrency: `append` and `rewrite` take the log's own lock, which is never held together with the store's.
Failure: an OSError of a write is raised, and the log stays as it was (a torn pair has a bad checksum and is skipped).
"""

import contextlib
import threading
from collections.abc import Container
from pathlib import Path

from kvd.store.identity import Identity
from kvd.tiers.adapters.disk.buffers import BufferPool
from kvd.tiers.adapters.disk.format import (
    DELETES_PER_PAGE,
    FORMAT_VERSION,
    PAGE,
    pack_deletes,
    pack_deletes_head,
    unpack_deletes,
    unpack_deletes_head,
)
from kvd.tiers.adapters.disk.storage import Storage, read_fully, write_fully

FILE_NAME = "deletes.kvlog"
_PAIR = 2 * PAGE
_WRITE_PAIRS = 512
_READ_BYTES = 1 << 20


class DeletesLog:
    """The open log of one store."""

    def __init__(self, io: Storage, root: Path, version: int = FORMAT_VERSION) -> None:
        """`version`: that of the folder. A log of version 1 has no head, and is believed without one."""
        self._io = io
        self._root = root
        self._path = root / FILE_NAME
        self.headless = version == 1
        """It is in the form of version 1 (until it is written anew)."""
        self._lock = threading.Lock()
        self._fd = -1
        self._pairs = 0
        """The number of the next pair."""
        self._stated = 0
        """How many pairs of lines the head speaks of."""
        self._copy = 0
        """Which copy of the head is written next."""
        self.lines = 0
        """Lines in the file, spent ones included."""
        self._unsynced = False
        self.bad_pages = 0
        """Pages found damaged when the log was read; their twins were used where they were whole."""
        self.lost = ""
        """What of the log was found missing when it was read, '' where nothing: then it does not say all that is dead."""

    def load(self) -> dict[Identity, int]:
        """Read the log, and set `lost` and `bad_pages`. Later lines of one identity win. Raises OSError."""
        self.bad_pages, self.lost, self._pairs = 0, "", 0
        if self._fd >= 0:
            return self._read(self._fd)  # not by its name, which somebody may have taken away from under us
        try:
            fd = self._io.open(self._path)
        except FileNotFoundError:
            self.lost = "is missing"
            return {}
        try:
            return self._read(fd)
        finally:
            self._io.close(fd)

    def _read(self, fd: int) -> dict[Identity, int]:
        size = self._io.size(fd)
        found: dict[Identity, int] = {}
        whole = bytearray(-(-size // _PAIR))
        """By number: whether one page of the pair at least is sound."""
        stated = -1
        bad = 0
        with BufferPool().lend(_READ_BYTES) as buffer:
            for start in range(0, size, _READ_BYTES):
                count = read_fully(self._io, fd, [buffer[: min(_READ_BYTES, size - start)]], start)
                for at in range(0, count - PAGE + 1, PAGE):
                    page, pair = buffer[at : at + PAGE], (start + at) // _PAIR
                    if pair == 0 and (head := unpack_deletes_head(page)) is not None:
                        stated, bad = max(stated, head), 0  # one copy that tore is no damage
                        continue
                    lines = unpack_deletes(page)
                    if lines is None:
                        bad += pair > 0 or stated < 0
                        continue
                    # A page that is bad and has sound ones behind it was damaged; bad ones at the end are an append that tore.
                    self.bad_pages += bad
                    bad = 0
                    whole[pair] = True
                    self._pairs = pair + 1
                    for identity, sequence in lines:
                        found[identity] = max(sequence, found.get(identity, 0))
        self._judge(stated, whole)
        return found

    def _judge(self, stated: int, whole: bytearray) -> None:
        """Whether all is there that the head speaks of."""
        self._stated = max(stated, 0)
        self.headless = self.headless and stated < 0
        if self.headless:
            return
        self._pairs = max(self._pairs, 1)
        if stated < 0:
            self.lost = "has no head: it was emptied or overwritten" if whole else "is empty"
        elif missing := stated - sum(whole[1 : 1 + stated]):
            self.lost = f"lacks {missing} of the {stated} pairs of pages that were in it"

    def rewrite(self, needed: Container[Identity]) -> None:
        """Replace the log by its lines for the identities that still need one, atomically and synced.

        Raises OSError; the old log is then still in use.
        """
        with self._lock:
            self._replace([(identity, sequence) for identity, sequence in self.load().items() if identity in needed])

    def go_on(self) -> None:
        """Go on with the log as it is, where there is no room to write it anew: it says all it has to, and more. Raises OSError."""
        with self._lock:
            lines = len(self.load())
            try:
                fd = self._io.open(self._path)
            except FileNotFoundError:
                fd = self._io.open(self._path, create=True)
            self.close()
            self._fd, self.lines = fd, lines  # what tore, or is half a pair, at the end is written over
            if self.lost:
                self._write_head(0)
                self._write_head(0)
                self._io.fdatasync(fd)
                self._io.fsync_dir(self._root)

    def replace(self, lines: list[tuple[Identity, int]]) -> None:
        """Replace the log by these lines, as `rewrite` does."""
        with self._lock:
            self._replace(lines)

    def _replace(self, kept: list[tuple[Identity, int]]) -> None:
        temporary = self._path.with_suffix(".tmp")
        if temporary.name in self._io.listdir(self._root):
            self._io.unlink(temporary)
        fd = self._io.open(temporary, create=True)
        try:
            pairs = self._write(fd, 1, kept)
            write_fully(self._io, fd, [memoryview(2 * pack_deletes_head(pairs))], 0)
            self._io.fdatasync(fd)
            self._io.rename(temporary, self._path)
            self._io.fsync_dir(self._root)
        except OSError:
            self._io.close(fd)
            with contextlib.suppress(OSError):
                self._io.unlink(temporary)  # what it took is badly needed where there is no room
            raise
        self.close()
        self._fd, self._pairs, self.lines = fd, 1 + pairs, len(kept)
        self._stated, self.headless, self._unsynced = pairs, False, False

    def append(self, lines: list[tuple[Identity, int]], *, sync: bool) -> None:
        """Add lines; with `sync` they are on stable storage on return. Raises OSError: then they may or may not be there."""
        if not lines:
            return
        with self._lock:
            self._pairs += self._write(self._fd, self._pairs, lines)
            self.lines += len(lines)
            self._unsynced = True
            if sync:
                self._sync()

    def sync(self) -> None:
        """Make what was appended stable. Raises OSError."""
        with self._lock:
            if self._fd >= 0 and self._unsynced:
                self._sync()

    def _sync(self) -> None:
        self._io.fdatasync(self._fd)
        self._unsynced = False
        if not self.headless and self._pairs - 1 > self._stated:
            # All of these are stable now. That the head knows it only helps to notice a loss: the lines count without it.
            with contextlib.suppress(OSError):
                self._write_head(self._pairs - 1)

    def _write_head(self, pairs: int) -> None:
        write_fully(self._io, self._fd, [memoryview(pack_deletes_head(pairs))], self._copy * PAGE)
        self._copy ^= 1
        self._stated = pairs

    def _write(self, fd: int, pair: int, lines: list[tuple[Identity, int]]) -> int:
        """Write lines from pair number `pair` on; how many pairs that took."""
        pages = [
            pack_deletes(pair + number, lines[at : at + DELETES_PER_PAGE])
            for number, at in enumerate(range(0, len(lines), DELETES_PER_PAGE))
        ]
        for at in range(0, len(pages), _WRITE_PAIRS):
            block = b"".join(page + page for page in pages[at : at + _WRITE_PAIRS])
            write_fully(self._io, fd, [memoryview(block)], (pair + at) * _PAIR)
        return len(pages)

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            self._io.close(self._fd)
            self._fd = -1
