"""Whose loads come next: requests at once, clients in turn, bytes within the budget, and nobody waits for a tier that hangs."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.tiers.turns import Turns


class Desk:
    """Turns whose shares are noted when they begin and ended by hand."""

    def __init__(self, requests: int, budget: int) -> None:
        self.turns = Turns(requests, budget)
        self.begun: list[tuple[str, int]] = []
        self.diverted: list[tuple[str, int]] = []
        self.running: list[tuple[str, int]] = []

    def ask(self, owner: str, *sizes: int, client: str = "") -> None:
        for size in sizes:
            row = (owner, size)
            self.turns.submit(
                owner, client or owner, size, lambda row=row: self._begin(row), lambda row=row: self.diverted.append(row)
            )
        self.turns.go()

    def _begin(self, row: tuple[str, int]) -> None:
        self.begun.append(row)
        self.running.append(row)

    def end(self, row: tuple[str, int]) -> None:
        self.running.remove(row)
        self.turns.done(*row)


def test_so_many_requests_at_once_and_the_others_in_their_order() -> None:
    desk = Desk(2, 1000)
    for name in "abcd":
        desk.ask(name, 1, 1, client="one")
    assert desk.begun == [("a", 1), ("a", 1), ("b", 1), ("b", 1)]
    assert desk.turns.waiting == 2
    desk.end(("a", 1))
    assert len(desk.begun) == 4
    desk.end(("a", 1))
    assert desk.begun[4:] == [("c", 1), ("c", 1)]


def test_a_client_that_asks_for_much_does_not_keep_others_out() -> None:
    desk = Desk(1, 1000)
    for n in range(5):
        desk.ask(f"greedy{n}", 1, client="greedy")
    desk.ask("modest", 1, client="modest")
    order = []
    while desk.running:
        order.append(desk.running[0][0])
        desk.end(desk.running[0])
    assert order == ["greedy0", "greedy1", "modest", "greedy2", "greedy3", "greedy4"]


def test_requests_under_way_take_turns_within_the_budget() -> None:
    desk = Desk(8, 10)
    desk.ask("a", 6, 6, 6)
    desk.ask("b", 4, 4, 4)
    assert desk.begun == [("a", 6), ("b", 4)]
    desk.end(("a", 6))
    assert desk.begun[2:] == [("b", 4)] or desk.begun[2:] == [("a", 6)]
    assert desk.turns.bytes <= 10


def test_one_share_may_be_larger_than_the_budget() -> None:
    desk = Desk(8, 10)
    desk.ask("a", 50)
    desk.ask("b", 1)
    assert desk.running == [("a", 50)]
    desk.end(("a", 50))
    assert desk.running == [("b", 1)]


def test_what_has_not_begun_goes_elsewhere_when_the_tier_stops() -> None:
    desk = Desk(2, 10)
    desk.ask("a", 8, 8)
    desk.ask("b", 8)
    desk.ask("c", 8)
    assert desk.running == [("a", 8)]
    desk.turns.divert()
    assert sorted(desk.diverted) == [("a", 8), ("b", 8), ("c", 8)]
    assert desk.turns.waiting == 0
    desk.ask("d", 5)
    assert desk.running == [("a", 8)]
    desk.end(("a", 8))
    assert desk.running == [("d", 5)]
    desk.end(("d", 5))
    assert desk.turns.bytes == 0
    assert not desk.turns.active


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(1, 20),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.lists(st.integers(1, 30), min_size=1, max_size=4)), max_size=25),
    st.randoms(use_true_random=False),
)
def test_everything_is_begun_once_and_the_limits_hold(requests, budget, asked, rng) -> None:  # type: ignore[no-untyped-def]
    desk = Desk(requests, budget)
    wanted = []
    for number, (_, client, sizes) in enumerate(asked):
        desk.ask(f"{number}", *sizes, client=f"client{client}")
        wanted += [(f"{number}", size) for size in sizes]
        while desk.running and rng.random() < 0.5:
            desk.end(rng.choice(desk.running))
        assert len({owner for owner, _ in desk.running}) <= requests
        assert sum(size for _, size in desk.running) <= budget or len(desk.running) == 1
    while desk.running:
        desk.end(rng.choice(desk.running))
    assert sorted(desk.begun) == sorted(wanted)
    assert desk.turns.bytes == 0
    assert not desk.turns.active
    assert not desk.turns.waiting
