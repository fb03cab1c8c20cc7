"""Admission to one engine, against a model: bounded, in order, and no place is ever lost."""

import asyncio
import functools
from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvgate.errors import QueueFull, Unavailable
from kvgate.lane import Lane


@functools.cache
def one_loop() -> asyncio.AbstractEventLoop:
    """One loop for all examples: Hypothesis also makes machines that it never tears down."""
    return asyncio.new_event_loop()


@pytest.fixture(scope="module", autouse=True)
def _close_the_loop() -> Iterator[None]:
    yield
    one_loop().close()


class LaneModel(RuleBasedStateMachine):
    """Requests enter, give up, time out and leave, while the lane is shut and opened, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = one_loop()
        self.lane = Lane("m", max_running=2, max_queue=3)
        self.tasks: list[asyncio.Task[None]] = []
        self.entered: list[int] = []
        self.asked = 0
        self.inside: list[int] = []

    def teardown(self) -> None:
        for task in self.tasks:
            task.cancel()
        self.settle()

    def settle(self) -> None:
        for _ in range(4):
            self.loop.run_until_complete(asyncio.sleep(0))
        self.tasks = [task for task in self.tasks if not task.done()]

    async def request(self, number: int) -> None:
        await self.lane.enter(60)
        self.entered.append(number)
        self.inside.append(number)

    @rule()
    def ask(self) -> None:
        self.asked += 1
        full = self.lane.waiting >= 3
        would_run = self.lane.is_open and self.lane.running < 2 and not self.lane.waiting
        task = self.loop.create_task(self.request(self.asked))
        self.tasks.append(task)
        self.settle()
        if full and not would_run:
            assert isinstance(task.exception(), QueueFull)

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.inside.remove(data.draw(st.sampled_from(self.inside)))
        self.lane.leave()
        self.settle()

    @precondition(lambda self: self.tasks)
    @rule(data=st.data(), also_leave=st.booleans())
    def give_up(self, data: st.DataObject, also_leave: bool) -> None:
        """Also in the same step in which a place is granted."""
        task = data.draw(st.sampled_from(self.tasks))
        if also_leave and self.inside:
            self.inside.pop()
            self.lane.leave()
        task.cancel()
        self.settle()

    @rule()
    def open(self) -> None:
        self.lane.open()
        self.settle()

    @rule()
    def shut(self) -> None:
        self.lane.shut()

    @rule()
    def fail(self) -> None:
        self.lane.fail_waiting(Unavailable("no"))
        self.settle()
        assert self.lane.waiting == 0

    @invariant()
    def counts_are_right(self) -> None:
        assert self.lane.running == len(self.inside) <= 2
        assert self.lane.waiting == len(self.tasks) <= 3
        assert self.lane.idle == (not self.inside and not self.tasks)

    @invariant()
    def order_is_kept(self) -> None:
        assert self.entered == sorted(self.entered)

    @invariant()
    def nobody_waits_for_nothing(self) -> None:
        assert not (self.lane.is_open and self.lane.waiting and self.lane.running < 2)


TestLane = LaneModel.TestCase
TestLane.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_time_in_the_queue_is_bounded_and_counted() -> None:
    lane = Lane("m", 1, 1)
    lane.retry_after_s = lambda: 9.0
    with pytest.raises(Unavailable) as caught:
        one_loop().run_until_complete(lane.enter(0.01))
    assert caught.value.retry_after_s == 9.0
    assert (lane.waiting, lane.running, lane.timeouts_total) == (0, 0, 1)


def test_drained_waits_for_the_last_one() -> None:
    async def story() -> tuple[bool, bool]:
        lane = Lane("m", 2, 1)
        lane.open()
        await lane.enter(1)
        lane.shut()
        early = await lane.drained(0.01)
        asyncio.get_running_loop().call_later(0.02, lane.leave)
        return early, await lane.drained(5)

    assert one_loop().run_until_complete(story()) == (False, True)
