"""One region file: where the next extent goes, what is live in it, and its index pages.

A region is append-only. Extents grow from the front, index pages from the back: whenever 36 extents have been written
their index entries go to the next page from the end; what is left over goes to a partial page when the region is sealed or
the store closes, and that page is written again when more entries come. An index page is an accelerator: where it is
missing or torn, recovery walks the extent headers of its range instead.

Concurrency: fields are changed under the store's lock, except those of the append path (`data_end`, `pending`, index
pages), which belong to the one thread that has set `busy`. A thread that does I/O on `fd` holds a pin or `busy`, so the
descriptor cannot be closed under it.
"""

import mmap
import threading
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from kvd.store.identity import Identity
from kvd.tiers.adapters.disk.format import ENTRIES_PER_PAGE, FLAG_NO_CHECKSUM, PAGE, IndexEntry, IndexPage, blank_entry, index_pages
from kvd.tiers.adapters.disk.storage import Storage, write_fully

FAILURES_MAX = 3
EPOCHS = 1024
"""Epochs that one start has for each region."""
WALK_BYTES_MAX = 64 << 20
"""So many bytes of extents at most wait for their index page, where they can have one: recovery reads and verifies the rest."""


class State(Enum):
    """Where a region is in its life."""

    OPEN = "open"
    """Takes appends."""
    SEALED = "sealed"
    """Full or given up for writing; readable."""
    GONE = "gone"
    """Evicted; its entries are out of the index. The file lives on while readers have it pinned."""


@dataclass(eq=False, slots=True)
class Pending:
    """An extent that waits for its index page."""

    packed: bytes | None
    """Its index entry; None while it is lent for writing: no index page covers it, nor what follows it."""
    start: int
    epoch: int


@dataclass(eq=False, slots=True)
class Region:
    """A region that holds values."""

    slot: int
    path: Path
    fd: int
    size: int
    retention: int
    sequence: int
    nonce: int
    epoch: int = 1
    """Of what is written now; higher than that of anything that may lie behind it in the file."""
    epochs_end: int = EPOCHS
    """The first epoch that is not this start's to use."""
    state: State = State.OPEN
    busy: bool = False
    pins: int = 0
    whole: bool = True
    """The file has the size it should have, so that it can be used again."""
    loans: int = 0
    """Extents lent for writing past us and not given back; each is also a pin."""
    reusable: bool = True
    """False where somebody we do not know of may still write into the file (a loan that a dead daemon had made)."""
    unchecked: bool = False
    """It has, or had, a value without a checksum: nothing but the header's absence voids that, so it must be gone stably."""
    leaving: bool = False
    """Chosen to be given up: nothing becomes visible in it any more."""
    unlinked: bool = False
    """The file has no name any more: whoever ends the last pin closes it."""
    data_end: int = PAGE
    pages: int = 0
    """Full index pages on disk."""
    covered: int = PAGE
    """Where the range of the next index page begins."""
    pending: list[Pending] = field(default_factory=list)
    """Extents that are in no full index page yet."""
    partial_written: int = 0
    """Entries of the partial page as last written."""
    indexed_end: int = PAGE
    """Where the extents that some index page on disk lists end."""
    durable: bool = False
    """Whether values are synced (the store's durability is not none)."""
    stable_end: int = PAGE
    """Where the extents that were synced end."""
    failures: int = 0
    """Writes that failed in a row."""
    live: int = 0
    live_bytes: int = 0
    stale: list[Identity] = field(default_factory=list)
    """Identities of dead values whose records in this region a recovery would still find."""
    mark_tick: int = 0
    """Values used after this tick are hot. Set when the region is sealed or spared."""
    hot_bytes: int = 0
    first_expiry_ns: int = 0
    """When the first of its values expires, or did when it was last swept; 0: none will."""
    last_expiry_ns: int = 0
    """When the last of its values that expire does."""
    never_expires: bool = False
    """Whether it has, or had, a value that does not expire."""
    writes: int = 0
    synced: int = 0
    sync_lock: threading.Lock = field(default_factory=threading.Lock)

    def go_on(self, epoch: int) -> None:
        """Take appends again after a start, from this epoch on."""
        self.epoch = max(self.epoch + 1, epoch)
        self.epochs_end = self.epoch + EPOCHS - 1

    def failed(self) -> None:
        """A write failed, and what it left may lie where the next one ends."""
        self.epoch += 1
        self.failures += 1

    @property
    def spent(self) -> bool:
        """Whether it takes no more appends: it keeps failing, or has no epoch left."""
        return self.failures >= FAILURES_MAX or self.epoch >= self.epochs_end

    def room(self, extra_bytes: int, extra_entries: int) -> bool:
        """Whether so many bytes of extents, and their index entries, still fit."""
        reserved = (self.pages + index_pages(len(self.pending) + extra_entries)) * PAGE
        return self.data_end + extra_bytes + reserved <= self.size

    def room_left(self) -> int:
        """Bytes between data and index."""
        return self.size - self.data_end - (self.pages + index_pages(len(self.pending) + 1)) * PAGE

    def note_expiry(self, expires_ns: int) -> None:
        """Learn of one more value's expiry."""
        if expires_ns:
            self.first_expiry_ns = min(self.first_expiry_ns or expires_ns, expires_ns)
            self.last_expiry_ns = max(self.last_expiry_ns, expires_ns)
        else:
            self.never_expires = True

    def all_expired(self, now_ns: int) -> bool:
        """Whether nothing in here can be alive any more."""
        return not self.never_expires and 0 < self.last_expiry_ns <= now_ns

    def appended(self, entries: list[IndexEntry], end: int) -> None:
        """Extents were written up to `end`. The owner of `busy` only."""
        self.pending.extend(Pending(entry.pack(), entry.offset, self.epoch) for entry in entries)
        self.unchecked |= any(entry.flags & FLAG_NO_CHECKSUM for entry in entries)
        self.data_end = end

    def reserved(self, end: int) -> Pending:
        """An extent up to `end` was lent. The owner of `busy` only."""
        pending = Pending(None, self.data_end, self.epoch)
        self.pending.append(pending)
        self.data_end = end
        return pending

    def write_index(self, io: Storage, *, partial: bool) -> None:
        """Write index pages that are full and, if `partial`, the one that is not. Raises OSError. The owner of `busy` only.

        Where values are synced at all, only extents that are stable are listed: an index page that outlived a power cut which
        the extents did not would let a torn value hide the older, acknowledged one.
        """
        limit = self.stable_end if self.durable else self.data_end
        while (count := self._listable(limit)) == ENTRIES_PER_PAGE:
            stop = self._end_of(count)
            self._write_page(io, count, stop)
            self.pages += 1
            self.covered = stop
            self.partial_written = 0
            del self.pending[:count]
        late = limit - self.indexed_end >= WALK_BYTES_MAX
        if (partial or late) and count > self.partial_written:
            self._write_page(io, count, self._end_of(count))
            self.partial_written = count

    def _listable(self, limit: int) -> int:
        """How many of the pending entries may go to the next page."""
        count = min(len(self.pending), ENTRIES_PER_PAGE)
        count = next((place for place, one in enumerate(self.pending[:count]) if one.packed is None), count)
        while count and self._end_of(count) > limit:
            count -= 1
        return count

    def _end_of(self, count: int) -> int:
        """Where the first `count` pending extents end."""
        return self.pending[count].start if count < len(self.pending) else self.data_end

    def _write_page(self, io: Storage, count: int, stop: int) -> None:
        # The page has the epoch of its last extent, so that what follows it in the file is judged by that.
        listed = self.pending[:count]
        page = IndexPage(
            self.sequence,
            self.nonce,
            self.pages,
            listed[-1].epoch,
            self.covered,
            stop,
            b"".join(one.packed or blank_entry() for one in listed),
        ).pack()
        write_fully(io, self.fd, [aligned_page(page)], self.size - (self.pages + 1) * PAGE)
        self.indexed_end = stop


def aligned_page(page: bytes) -> memoryview:
    """A copy of `page` in memory that O_DIRECT accepts."""
    view = memoryview(mmap.mmap(-1, PAGE))
    view[:] = page
    return view
