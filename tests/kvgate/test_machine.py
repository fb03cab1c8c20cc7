"""The sleep machine against a model: requests, sleeps, wakes, hands that meddle and engines that fail, in any order.

The engine here is an object that answers some turns later, so that every rule may fall between a question and its answer;
time is a number that a rule moves. What must always hold is what an operator is promised.
"""

import asyncio
import functools
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvgate.config import SleepPolicy
from kvgate.errors import EngineError, RequestError
from kvgate.lane import Lane
from kvgate.sleep import SleepMachine, State


@functools.cache
def one_loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


@pytest.fixture(scope="module", autouse=True)
def _close_the_loop() -> Iterator[None]:
    yield
    one_loop().close()


class Engine:
    """What the machine controls. `lane` is looked at to catch a sleep under somebody's feet."""

    def __init__(self) -> None:
        self.alive = True
        self.sleeping = False
        self.pace = 1
        self.refuses_sleep = False
        self.refuses_wake = False
        self.lane: Lane
        self.cut = 0
        self.wakes_at_once = self.most_wakes_at_once = 0

    async def _turn(self) -> None:
        for _ in range(self.pace):
            await asyncio.sleep(0)
        if not self.alive:
            raise EngineError("gone")

    async def healthy(self) -> bool:
        for _ in range(self.pace):
            await asyncio.sleep(0)
        return self.alive

    async def is_sleeping(self) -> bool:
        sleeping = self.sleeping  # as of now; the answer travels
        await self._turn()
        return sleeping

    async def busy(self) -> int:
        await self._turn()
        return 0

    async def sleep(self, level: int, mode: str, timeout_s: float) -> None:
        self.cut += self.lane.running
        await self._turn()
        self.cut += self.lane.running
        if self.refuses_sleep:
            raise EngineError("no")
        self.sleeping = True

    async def wake(self, tags: Sequence[str], level: int, timeout_s: float) -> None:
        self.wakes_at_once += 1
        self.most_wakes_at_once = max(self.most_wakes_at_once, self.wakes_at_once)
        try:
            await self._turn()
            if self.refuses_wake:
                raise EngineError("no")
            self.sleeping = False
        finally:
            self.wakes_at_once -= 1


class MachineModel(RuleBasedStateMachine):
    """One model of the gate and everybody around it."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = one_loop()
        self.now = 1000.0
        self.engine = Engine()
        self.lane = self.engine.lane = Lane("m", max_running=3, max_queue=5)
        policy = SleepPolicy(min_sleep_s=0, drain_timeout_s=0, wake_tries=1)
        self.machine = SleepMachine("m", self.lane, self.engine, policy, health_failures=2, clock=lambda: self.now)
        self.requests: list[asyncio.Task[None]] = []
        self.others: list[asyncio.Task[object]] = []
        self.inside = 0

    def teardown(self) -> None:
        self.loop.run_until_complete(self.machine.close())
        for task in [*self.requests, *self.others]:
            task.cancel()
        self.turns(20)

    def turns(self, count: int) -> None:
        for _ in range(count):
            self.loop.run_until_complete(asyncio.sleep(0))
        for task in [*self.requests, *self.others]:
            if task.done() and not task.cancelled():
                assert task.exception() is None or isinstance(task.exception(), RequestError), task.exception()
        self.requests = [task for task in self.requests if not task.done()]
        self.others = [task for task in self.others if not task.done()]

    async def request(self) -> None:
        await self.lane.enter(60)
        self.inside += 1

    # ---- what happens ------------------------------------------------------------------------------------------------

    @rule(turns=st.integers(0, 3))
    def ask(self, turns: int) -> None:
        self.requests.append(self.loop.create_task(self.request()))
        self.turns(turns + 1)

    @precondition(lambda self: self.inside)
    @rule(turns=st.integers(0, 3))
    def answer(self, turns: int) -> None:
        self.inside -= 1
        self.lane.leave()
        self.turns(turns)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.requests)).cancel()
        self.turns(1)

    @rule(manual=st.booleans(), turns=st.integers(0, 3))
    def sleep(self, manual: bool, turns: int) -> None:
        if manual or self.machine.may_sleep(1e9, 0):
            self.others.append(self.loop.create_task(self.machine.sleep(manual=manual)))
        self.turns(turns + 1)

    @rule(turns=st.integers(0, 3))
    def wake(self, turns: int) -> None:
        self.others.append(self.loop.create_task(self.machine.wake()))
        self.turns(turns + 1)

    @rule(turns=st.integers(0, 3))
    def check(self, turns: int) -> None:
        self.others.append(self.loop.create_task(self.machine.check()))
        self.turns(turns + 1)

    @rule(
        pace=st.integers(2, 5),
        gap=st.integers(0, 2),
        others=st.lists(st.sampled_from(["check", "sleep", "wake", "ask"]), max_size=3),
    )
    def sleep_while_a_check_is_on_its_way(self, pace: int, gap: int, others: list[str]) -> None:
        """Answers that are out of date when they arrive are where machines of this kind go wrong."""
        self.engine.pace = pace
        for kind in ("check", "sleep", "ask", *others):
            getattr(self, kind)(**({"manual": True} if kind == "sleep" else {}), turns=gap)

    @rule(alive=st.booleans(), refuses_sleep=st.booleans(), refuses_wake=st.booleans())
    def fate(self, alive: bool, refuses_sleep: bool, refuses_wake: bool) -> None:
        self.engine.alive, self.engine.refuses_sleep, self.engine.refuses_wake = alive, refuses_sleep, refuses_wake

    @rule(turns=st.integers(1, 5))
    def pace(self, turns: int) -> None:
        self.engine.pace = turns

    @rule(asleep=st.booleans())
    def by_hand(self, asleep: bool) -> None:
        self.engine.sleeping = asleep

    @rule(hopeless=st.booleans())
    def process_lost(self, hopeless: bool) -> None:
        self.machine.lost("ended", hopeless=hopeless)

    @rule(seconds=st.sampled_from([0.5, 5.0, 100.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.turns(1)

    @rule()
    def all_is_well_in_the_end(self) -> None:
        """With a sound engine and time, whoever waits is served and nothing is stuck."""
        self.engine.alive, self.engine.refuses_sleep, self.engine.refuses_wake = True, False, False
        for _ in range(4):
            self.turns(40)
            self.now += 100
            self.loop.run_until_complete(self.machine.check())
        self.turns(40)
        assert not self.machine.in_transition
        assert self.machine.state in {State.AWAKE, State.ASLEEP}
        assert (self.machine.state is State.ASLEEP) == self.engine.sleeping
        assert not self.requests or self.lane.running == 3
        assert not self.others

    # ---- what always holds ------------------------------------------------------------------------------------------

    @invariant()
    def no_request_is_cut_by_a_sleep(self) -> None:
        assert self.engine.cut == 0

    @invariant()
    def one_wake_up_at_a_time(self) -> None:
        assert self.engine.most_wakes_at_once <= 1

    @invariant()
    def the_lane_is_open_exactly_when_awake(self) -> None:
        assert self.lane.is_open == (self.machine.state is State.AWAKE)

    @invariant()
    def places_are_counted(self) -> None:
        assert self.inside <= self.lane.running <= 3


TestMachine = MachineModel.TestCase
TestMachine.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
