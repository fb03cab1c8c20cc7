"""The deletes log: what must stay dead although a region still holds it.

Regions are append-only, so a deleted value's bytes, and an overwritten value's older bytes, stay in their region until
that is recycled, and a recovery finds them. An overwrite is decided by the sequence numbers of the two records. A delete
has no record in a region: it is a line here, (identity, sequence), meaning that every record of the identity with a lower
sequence is dead. The same line is written when the *newer* record of an overwritten value is evicted before the older one.

The file is appended to in pairs of equal pages, because one flipped bit in the only copy of a line would bring a deleted
value back. It is written anew (temporary file, sync, rename) at the start and when most of its lines are spent: a line is
needed only as long as some region holds an older record.

Concurrency: `append` and `rewrite` take the log's own lock, which is never held together with the store's.
Failure: an OSError of a write is raised, and the log stays as it was (a torn pair has a bad checksum and is skipped).
"""

import contextlib
import threading
from collections.abc import Container
from pathlib import Path

from kvd.store.identity import Identity
from kvd.tiers.adapters.disk.buffers import BufferPool
from kvd.tiers.adapters.disk.format import DELETES_PER_PAGE, PAGE, pack_deletes, unpack_deletes
from kvd.tiers.adapters.disk.storage import Storage, read_fully, write_fully

FILE_NAME = "deletes.kvlog"
_PAIR = 2 * PAGE
_WRITE_PAIRS = 512
_READ_BYTES = 1 << 20


class DeletesLog:
    """The open log of one store."""

    def __init__(self, io: Storage, root: Path) -> None:
        self._io = io
        self._root = root
        self._path = root / FILE_NAME
        self._lock = threading.Lock()
        self._fd = -1
        self._pairs = 0
        self.lines = 0
        """Lines in the file, spent ones included."""
        self._unsynced = False
        self.bad_pages = 0
        """Pages found damaged when the log was read; their twins were used where they were whole."""

    def load(self) -> dict[Identity, int]:
        """Read the log (absent: empty). Later lines of one identity win. Raises OSError."""
        try:
            fd = self._io.open(self._path)
        except FileNotFoundError:
            return {}
        try:
            return self._read(fd)
        finally:
            self._io.close(fd)

    def _read(self, fd: int) -> dict[Identity, int]:
        size = self._io.size(fd)
        found: dict[Identity, int] = {}
        bad = 0
        self.bad_pages = 0
        with BufferPool().lend(_READ_BYTES) as buffer:
            for start in range(0, size, _READ_BYTES):
                count = read_fully(self._io, fd, [buffer[: min(_READ_BYTES, size - start)]], start)
                for at in range(0, count - PAGE + 1, PAGE):
                    lines = unpack_deletes(buffer[at : at + PAGE])
                    if lines is None:
                        bad += 1
                        continue
                    # A page that is bad and has sound ones behind it was damaged; bad ones at the end are an append that tore.
                    self.bad_pages += bad
                    bad = 0
                    for identity, sequence in lines:
                        found[identity] = max(sequence, found.get(identity, 0))
        return found

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
            self._fd, self.lines = fd, lines
            self._pairs = self._io.size(fd) // _PAIR  # half a pair at the end is an append that tore: it is written over

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
            pairs = self._write(fd, 0, kept)
            self._io.fdatasync(fd)
            self._io.rename(temporary, self._path)
            self._io.fsync_dir(self._root)
        except OSError:
            self._io.close(fd)
            with contextlib.suppress(OSError):
                self._io.unlink(temporary)  # what it took is badly needed where there is no room
            raise
        self.close()
        self._fd, self._pairs, self.lines = fd, pairs, len(kept)
        self._unsynced = False

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
