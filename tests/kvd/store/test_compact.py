"""Plans for moving values together: every step is possible, nothing is lost, pinned values stay, and they are found."""

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.store import compact
from kvd.store.compact import Plan, Snapshot

FREE, VALUE, PINNED = "free", "value", "pinned"


def snapshot(pieces: list[tuple[str, int]], evictable: set[int] | None = None) -> Snapshot:
    """The row of pieces as a snapshot; values are told by the number of their piece."""
    at, free, values = 0, [], []
    for number, (kind, pages) in enumerate(pieces):
        if kind == FREE:
            free.append((at, pages))
        elif kind == VALUE:
            values.append((number, at, pages))
        at += pages
    runs = np.array(free, dtype=np.int64).reshape(-1, 2)
    rows = np.array(values, dtype=np.int64).reshape(-1, 3)
    may_go = np.array([evictable is None or number in evictable for number, _, _ in values], dtype=bool)
    return Snapshot(runs[:, 0], runs[:, 1], rows[:, 0], rows[:, 1], rows[:, 2], may_go)


def follow(pieces: list[tuple[str, int]], plan: Plan) -> None:
    """Carry a plan out page by page. AssertionError when a step takes what is not free, or moves what is not there."""
    owner: list[int | None] = []
    for number, (kind, pages) in enumerate(pieces):
        owner += [None if kind == FREE else number] * pages
    ours = [False] * len(owner)
    for start, pages in plan.claims:
        assert owner[start : start + pages] == [None] * pages
        assert start == 0 or owner[start - 1] is not None, "only whole free runs can be taken"
        assert start + pages == len(owner) or owner[start + pages] is not None, "only whole free runs can be taken"
        ours[start : start + pages] = [True] * pages
    vacated: set[int] = set()
    for move in plan.moves:
        kind, pages = pieces[move.slot]
        assert kind == VALUE
        assert pages == move.pages
        source, target = range(move.source, move.source + pages), range(move.target, move.target + pages)
        assert all(owner[page] == move.slot for page in source)
        assert all(ours[page] and owner[page] is None for page in target)
        assert move.after or not vacated.intersection(target), "it has to wait for an earlier move, and does not say so"
        for page in source:
            owner[page], ours[page] = None, True
        for page in target:
            owner[page], ours[page] = move.slot, False
        vacated.update(source)
    for slot, start, pages in plan.evictions:
        assert pieces[slot] == (VALUE, pages)
        assert owner[start : start + pages] == [slot] * pages
        for page in range(start, start + pages):
            owner[page], ours[page] = None, True
    window = range(plan.start, plan.start + plan.pages)
    assert all(ours[page] and owner[page] is None for page in window)


def merged(pieces: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """The same row with neighbouring free runs as one, as the allocator has them."""
    made: list[tuple[str, int]] = []
    for kind, pages in pieces:
        if made and made[-1][0] == kind == FREE:
            made[-1] = FREE, made[-1][1] + pages
        else:
            made.append((kind, pages))
    return made


PIECES = st.lists(st.tuples(st.sampled_from([FREE, VALUE, VALUE, PINNED]), st.integers(1, 40)), max_size=60).map(merged)


@given(PIECES, st.integers(1, 200), st.booleans(), st.randoms(use_true_random=False))
@settings(max_examples=300, deadline=None)
def test_every_plan_can_be_followed(pieces: list[tuple[str, int]], pages: int, evict: bool, chance: random.Random) -> None:
    evictable = {number for number in range(len(pieces)) if chance.random() < 0.7}
    plan = compact.plan(snapshot(pieces, evictable), pages, evict=evict)
    if plan is None:
        return
    assert plan.pages >= pages
    assert evict or not plan.evictions
    assert {slot for slot, _, _ in plan.evictions} <= evictable
    follow(pieces, plan)


@given(PIECES, st.integers(1, 60))
@settings(max_examples=200, deadline=None)
def test_where_one_window_could_be_evicted_a_plan_is_found(pieces: list[tuple[str, int]], pages: int) -> None:
    longest, now = 0, 0
    for kind, size in pieces:
        now = 0 if kind == PINNED else now + size
        longest = max(longest, now)
    assert (compact.plan(snapshot(pieces), pages, evict=True) is not None) == (longest >= pages)


def test_the_cheapest_window_is_emptied() -> None:
    """A large value in between two holes stays; two small ones go into the hole at the end."""
    pieces = [(FREE, 30), (VALUE, 100), (FREE, 30), (VALUE, 4), (VALUE, 4), (FREE, 30), (PINNED, 1), (FREE, 9)]
    plan = compact.plan(snapshot(pieces), 60, evict=False)
    assert plan is not None
    assert [move.slot for move in plan.moves] == [3, 4]
    follow(pieces, plan)


def test_a_value_that_fits_nowhere_has_a_place_made_for_it() -> None:
    pieces = [(FREE, 20), (VALUE, 30), (FREE, 20), (PINNED, 1), (FREE, 20), (VALUE, 5), (FREE, 20), (PINNED, 1), (FREE, 6)]
    plan = compact.plan(snapshot(pieces), 70, evict=False)
    assert plan is not None
    assert [(move.slot, move.after) for move in plan.moves] == [(5, False), (1, True)]
    follow(pieces, plan)


def test_what_cannot_be_moved_is_evicted_and_no_more_than_that() -> None:
    pieces = [(VALUE, 50), (FREE, 10), (VALUE, 8), (FREE, 10), (VALUE, 50), (FREE, 3)]
    plan = compact.plan(snapshot(pieces), 28, evict=True)
    assert plan is not None
    assert [slot for slot, _, _ in plan.evictions] == [2]
    assert compact.plan(snapshot(pieces, evictable=set()), 28, evict=True) is None


def test_pinned_values_leave_no_way() -> None:
    pieces = [(FREE, 10), (PINNED, 1), (FREE, 10), (PINNED, 1), (VALUE, 9)]
    assert compact.plan(snapshot(pieces), 11, evict=True) is None
    assert compact.plan(snapshot([]), 1, evict=True) is None
