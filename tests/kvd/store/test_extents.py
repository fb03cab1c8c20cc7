"""The allocator: runs never overlap, free pages are counted exactly, neighbours merge, and nothing costs O(n)."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvd.store.extents import PAGE, Extents, pages_of


@pytest.mark.parametrize(
    ("length", "pages"), [(0, 1), (1, 1), (PAGE - 1, 1), (PAGE, 1), (PAGE + 1, 2), (16 << 20, 4096), (2**40, 2**28)]
)
def test_a_length_takes_whole_pages_and_never_none(length: int, pages: int) -> None:
    assert pages_of(length) == pages


class Allocator(RuleBasedStateMachine):
    """Against the simplest model there is: a list that says for every page who has it."""

    @initialize(pages=st.integers(1, 600))
    def begin(self, pages: int) -> None:
        self.extents = Extents(pages)
        self.owner: list[int | None] = [None] * pages
        self.runs: dict[int, int] = {}

    def fits_somewhere(self, pages: int) -> bool:
        free = 0
        for owner in self.owner:
            free = free + 1 if owner is None else 0
            if free >= pages:
                return True
        return False

    @rule(pages=st.one_of(st.integers(1, 20), st.integers(1, 700)))
    def allocate(self, pages: int) -> None:
        start = self.extents.alloc(pages)
        if start is None:
            # Good fit looks at a few runs of the last bin only: a refusal is right when nothing is large enough by a bin.
            assert not self.fits_somewhere(pages + pages // 8 + 1)
            return
        assert all(owner is None for owner in self.owner[start : start + pages]), "lent twice"
        assert start + pages <= len(self.owner)
        self.owner[start : start + pages] = [start] * pages
        self.runs[start] = pages

    @precondition(lambda self: self.runs)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        start = data.draw(st.sampled_from(sorted(self.runs)))
        pages = self.runs.pop(start)
        self.owner[start : start + pages] = [None] * pages
        self.extents.free(start, pages)

    @precondition(lambda self: self.runs)
    @rule(data=st.data())
    def free_the_tail(self, data: st.DataObject) -> None:
        start = data.draw(st.sampled_from(sorted(self.runs)))
        keep = data.draw(st.integers(1, self.runs[start]))
        tail = self.runs[start] - keep
        if tail:
            self.runs[start] = keep
            self.owner[start + keep : start + keep + tail] = [None] * tail
            self.extents.free(start + keep, tail)

    @precondition(lambda self: self.runs)
    @rule(data=st.data())
    def free_and_take_back(self, data: st.DataObject) -> None:
        """The last run freed can be claimed before anybody gets it."""
        start = data.draw(st.sampled_from(sorted(self.runs)))
        self.extents.merge()
        self.extents.free(start, self.runs[start])
        assert self.extents.claim(start, self.runs[start])

    @rule(data=st.data())
    def claim(self, data: st.DataObject) -> None:
        """Exactly a free run, whole, or a beginning of the wilderness; what is neither is refused, and nothing happens."""
        runs = self.extents.free_runs()
        if runs:
            start, pages = data.draw(st.sampled_from(runs))
            if start != self.extents.top and pages > 1:
                assert not self.extents.claim(start, pages - 1)
            assert self.extents.claim(start, pages)
            assert all(owner is None for owner in self.owner[start : start + pages])
            self.owner[start : start + pages] = [start] * pages
            self.runs[start] = pages
            assert not self.extents.claim(start, pages), "it is taken"

    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        """Pages above `limit` are free, and not to be had yet."""
        limit = data.draw(st.integers(self.extents.top, self.extents.pages))
        self.extents.limit = limit
        assert self.extents.ready_pages == self.owner[:limit].count(None)
        while self.extents.ready_pages:
            start = self.extents.alloc(1)
            assert start is not None
            assert start < limit
            self.owner[start] = start
            self.runs[start] = 1
        assert self.extents.alloc(1) is None
        self.extents.limit = self.extents.pages

    @rule()
    def merge(self) -> None:
        """After a merge the free runs are exactly the gaps of the model."""
        gaps, at = [], None
        for page, owner in enumerate([*self.owner, 0]):
            if owner is None and at is None:
                at = page
            elif owner is not None and at is not None:
                gaps.append((at, page - at))
                at = None
        runs = self.extents.runs()
        if self.extents.top < self.extents.pages:
            runs.append((self.extents.top, self.extents.pages - self.extents.top))
        assert runs == gaps
        assert self.extents.largest() == max((pages for _, pages in gaps), default=0)

    @invariant()
    def counts(self) -> None:
        if hasattr(self, "owner"):
            assert self.extents.free_pages == self.owner.count(None)


Allocator.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestAllocator = Allocator.TestCase


@given(st.lists(st.integers(1, 64), min_size=1, max_size=60), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_after_everything_is_freed_one_value_takes_it_all(sizes: list[int], random: object) -> None:
    extents = Extents(4096)
    runs = [(extents.alloc(pages), pages) for pages in sizes]
    random.shuffle(runs)  # type: ignore[attr-defined]
    for start, pages in runs:
        assert start is not None
        extents.free(start, pages)
    assert extents.alloc(4096) == 0
    assert extents.alloc(1) is None


def test_a_full_arena_of_tiny_values_holds_no_objects() -> None:
    """The grid of the system before this one took a lock and a list entry per slot."""
    extents = Extents(1 << 18)
    for _ in range(1 << 18):
        extents.alloc(1)
    assert extents.free_pages == 0
    assert not extents._size
    assert not extents._start
    assert not any(extents._bins)


def churn_s(pages: int, live: int) -> float:
    """CPU seconds of 20 000 frees and allocs of mixed sizes with `live` runs held."""
    extents = Extents(pages)
    sizes = [1 + (7 * i) % 61 for i in range(live)]
    held = [(extents.alloc(size), size) for size in sizes]
    began = time.process_time()
    for i in range(20_000):
        start, size = held[(i * 7919) % live]
        assert start is not None
        extents.free(start, size)
        want = 1 + (i * 13) % 61
        held[(i * 7919) % live] = (extents.alloc(want), want)
    return time.process_time() - began


def test_the_cost_does_not_grow_with_what_is_held() -> None:
    small = min(churn_s(1 << 16, 500) for _ in range(2))
    large = min(churn_s(1 << 23, 100_000) for _ in range(2))
    assert large < small * 5 + 0.05
