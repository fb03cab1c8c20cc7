"""Which bytes of the arena are free: a segregated-fit allocator over 4 KiB pages.

Free runs of pages sit in bins by size: one bin a size below 16 pages, then eight bins a power of two (the two-level
scheme of TLSF). A bit mask of non-empty bins finds the smallest bin whose every run is large enough in a few integer
operations; neighbours merge through two dicts, run by first page and run by end. Every operation is O(1), and only free
runs cost a Python object: a full arena of a million values costs nothing here.

Merging is put off: a freed run first goes on the stack of its exact size, where the next value of that size finds it (the
usual case: a host stores chunks of one or two sizes). Only when nothing fits are the stacks merged into the bins, each
run once; and when many wait, every further one pays for the merging of two, so that no merge takes longer than a millisecond.

The tail that was never lent (the wilderness) is kept apart and used last, so that a young daemon stays low in its memory
and pages are faulted in from one end only. Of it, only what lies below `limit` may be lent yet: the rest is still being
faulted in, by another thread.

No allocator that never moves what it lent can promise that a mix of sizes fills its memory (half of it lies in holes too
small for the next value in bad cases, measured); `claim` is for whoever moves values together: see `compact`.
"""

PAGE = 4096
_EXACT = 16
_SUB_BITS = 3
_SUB = 1 << _SUB_BITS
_SCAN = 8  # runs looked at in the bin that may or may not hold one large enough
UNMERGED = 1024
"""Freed runs that may wait to be merged."""


def pages_of(length: int) -> int:
    """Pages that `length` bytes take; an empty value takes one, so that every value has an address."""
    return length + 4095 >> 12 or 1


def _bin_of(pages: int) -> int:
    """The bin a run of `pages` is kept in: every run of the next bin is larger."""
    if pages < _EXACT:
        return pages
    power = pages.bit_length() - 1
    return _EXACT + (power - 4) * _SUB + ((pages >> power - _SUB_BITS) & _SUB - 1)


class Extents:
    """Free pages of one arena. Not thread-safe: the event loop owns it."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.top = 0
        """First page of the wilderness: nothing at or above it is lent."""
        self.limit = pages
        """First page of the wilderness that may not be lent yet. Another thread raises it."""
        self.free_pages = pages
        self._size: dict[int, int] = {}  # first page of a free run -> pages
        self._start: dict[int, int] = {}  # page after a free run -> its first page
        self._bins: list[dict[int, None]] = [{} for _ in range(_bin_of(max(pages, 1)) + 2)]
        self._mask = 0
        self._stacks: dict[int, list[int]] = {}  # pages -> first pages of runs freed and not merged yet
        self._unmerged = 0

    def alloc(self, pages: int) -> int | None:
        """First page of a run of `pages`, or None when no run is large enough."""
        stack = self._stacks.get(pages)
        if stack:
            self.free_pages -= pages
            self._unmerged -= 1
            return stack.pop()
        if pages > self.free_pages:
            return None
        start = self._find(pages)
        if start is None and self._unmerged and self.top + pages > self.limit:
            self.merge()
            start = self._find(pages)
        if start is not None:
            size = self._take(start)
            if size > pages:
                self._put(start + pages, size - pages)
        elif self.top + pages <= self.limit:
            start = self.top
            self.top += pages
        else:
            return None
        self.free_pages -= pages
        return start

    def free(self, start: int, pages: int) -> None:
        """Give a run back."""
        self.free_pages += pages
        self._unmerged += 1
        stack = self._stacks.get(pages)
        if stack is None:
            self._stacks[pages] = [start]
        else:
            stack.append(start)
        if self._unmerged > UNMERGED:
            self._merge_two()

    @property
    def ready_pages(self) -> int:
        """Free pages that may be lent now, in whatever pieces."""
        return self.free_pages - (self.pages - max(self.top, self.limit))

    def claim(self, start: int, pages: int) -> bool:
        """Take exactly this free run: a merged one, the last one freed, or the wilderness' beginning. False: it is none."""
        if (stack := self._stacks.get(pages)) and stack[-1] == start:
            stack.pop()
            self._unmerged -= 1
        elif self._size.get(start) == pages:
            self._take(start)
        elif start == self.top and start + pages <= self.limit:
            self.top += pages
        else:
            return False
        self.free_pages -= pages
        return True

    def _merge_two(self) -> None:
        for _ in range(2):
            pages, starts = next(iter(self._stacks.items()))
            if starts:
                self._unmerged -= 1
                self._merge_one(starts.pop(), pages)
            if not starts:
                del self._stacks[pages]

    def merge(self) -> None:
        """Merge all freed runs with their neighbours."""
        stacks, self._stacks, self._unmerged = self._stacks, {}, 0
        for pages, starts in stacks.items():
            for start in starts:
                self._merge_one(start, pages)

    def _merge_one(self, start: int, pages: int) -> None:
        before = self._start.get(start)
        if before is not None:
            pages += self._take(before)
            start = before
        end = start + pages
        if end in self._size:
            pages += self._take(end)
        if start + pages == self.top:
            self.top = start
        else:
            self._put(start, pages)

    def free_runs(self) -> list[tuple[int, int]]:
        """All free runs that may be lent now, merged, as (first page, pages); the wilderness' beginning is the last."""
        self.merge()
        found = list(self._size.items())
        if self.top < self.limit:
            found.append((self.top, self.limit - self.top))
        return found

    def runs(self) -> list[tuple[int, int]]:
        """All free runs below the wilderness as (first page, pages), for tests and the fragmentation figure."""
        self.merge()
        return sorted(self._size.items())

    def largest(self) -> int:
        """Pages of the largest run that `alloc` could give now or once its pages are there, of those merged so far."""
        tail = self.pages - self.top
        if self._stacks:
            tail = max(tail, *(pages for pages, starts in self._stacks.items() if starts), 0)
        if not self._mask:
            return tail
        return max(tail, *(self._size[start] for start in self._bins[self._mask.bit_length() - 1]))

    def _find(self, pages: int) -> int | None:
        own = _bin_of(pages)
        above = self._mask >> own + 1
        if pages >= _EXACT and self._bins[own]:
            # This bin holds runs from a little smaller to a little larger: look at a few before going up.
            for tried, start in enumerate(reversed(self._bins[own])):
                if self._size[start] >= pages:
                    return start
                if tried >= _SCAN:
                    break
        elif self._mask >> own & 1:
            return next(reversed(self._bins[own]))
        if not above:
            return None
        return next(reversed(self._bins[own + 1 + (above & -above).bit_length() - 1]))

    def _put(self, start: int, pages: int) -> None:
        self._size[start] = pages
        self._start[start + pages] = start
        index = _bin_of(pages)
        self._bins[index][start] = None
        self._mask |= 1 << index

    def _take(self, start: int) -> int:
        pages = self._size.pop(start)
        del self._start[start + pages]
        index = _bin_of(pages)
        kept = self._bins[index]
        del kept[start]
        if not kept:
            self._mask &= ~(1 << index)
        return pages
