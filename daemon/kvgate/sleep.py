"""One state machine a model: who may reach the engine, when it sleeps, how it wakes.

    starting --up--> awake --idle or told--> draining --empty--> (POST /sleep) --> asleep
       ^               ^ ^------ gave up, refused ------'                             |
       |               |                                                       demand or told
    unreachable        '------------------- waking <--(minimum sleep, room)----------'
       |                                       |
       +------------ failed <--- N tries ------'

What holds:
- The lane is open in `awake` and shut everywhere else. POST /sleep is sent only in `draining`, with nobody running in the
  lane and nobody running in the engine either: no stream is ever cut by a sleep.
- At most one transition runs, as one task (`_change`). Everyone who wants the same end waits for that task, so twenty
  requests to a sleeping model are one wake-up; a client that goes away does not take the transition with it.
- The engine is the truth: after every transition and at every health check its /is_sleeping decides. An engine that was
  restarted, or was slept or woken by hand, is found out within one health interval.
- A failure is kept (`last_error`, counters), and tried again: a failed wake-up with growing pauses for as long as it has
  failed, a refused sleep with growing pauses too.

Concurrency: one event loop. State changes only between awaits of the one transition task or in `check`, which leaves a
machine in transition alone.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from enum import StrEnum
from typing import Any

from kvgate.config import SleepPolicy
from kvgate.control import Control
from kvgate.errors import Conflict, EngineError, NotSupported, RequestError, Unavailable, UpstreamBroken
from kvgate.lane import Lane

log = logging.getLogger("kvgate.sleep")
FIRST_PAUSE_S = 1.0
LAST_PAUSE_S = 60.0
LAST_SLEEP_PAUSE_S = 3600.0
TAGS = ("weights", "kv_cache")
"""The parts that vLLM wakes one by one. It answers 200 to any other word and does nothing."""


class State(StrEnum):
    """Where a model is."""

    STARTING = "starting"
    AWAKE = "awake"
    DRAINING = "draining"
    ASLEEP = "asleep"
    WAKING = "waking"
    FAILED = "failed"


class SleepMachine:
    """The state machine of one model."""

    def __init__(
        self,
        name: str,
        lane: Lane,
        control: Control,
        policy: SleepPolicy,
        *,
        health_failures: int = 3,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        make_room: Callable[[str], Awaitable[None]] | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self.lane = lane
        self.policy = policy
        self.state = State.STARTING
        self.since = clock()
        self.last_error = ""
        self.asleep_since: float | None = None
        self.asleep_at_wall = 0.0
        self.manual = False
        self.level = policy.level
        self.can_sleep: bool | None = None
        """None until the engine has been asked."""
        self.last_wake_s = 0.0
        self.patient = False
        """Set by who starts the engine, while it may take its time: silence is then no failure."""
        self.sleeps_total = self.wakes_total = self.sleep_failures_total = self.wake_failures_total = 0
        self._control = control
        self._clock, self._wall = clock, wall
        self._make_room = make_room
        self._on_change = on_change
        self._health_failures = health_failures
        self._missed = 0
        self._change: asyncio.Task[None] | None = None
        self._change_kind = ""
        self._epoch = 0
        self._resting = False
        self._minimum_until = 0.0
        self._woke_in_vain = False
        self._hurry = asyncio.Event()
        self._wanted = False
        self._pause_s = FIRST_PAUSE_S
        self._retry_at = 0.0
        self._sleep_pause_s = FIRST_PAUSE_S
        self._sleep_again_at = 0.0
        lane.on_blocked = self._on_blocked
        lane.retry_after_s = lambda: self.retry_after_s

    # ---- what others ask -----------------------------------------------------------------------------------------

    @property
    def in_transition(self) -> bool:
        return self._change is not None and not self._change.done()

    @property
    def reachable(self) -> bool:
        """Whether the last health check found the engine."""
        return not self._missed and self.state is not State.STARTING

    @property
    def state_s(self) -> float:
        """Seconds in this state."""
        return self._clock() - self.since

    @property
    def asleep_s(self) -> float:
        """Seconds asleep; 0 when it is not."""
        return 0.0 if self.asleep_since is None else self._clock() - self.asleep_since

    @property
    def retry_after_s(self) -> float:
        """When a client that was sent away should come back: not before the minimum sleep or the pause after a failure ends."""
        ends = {State.ASLEEP: self._minimum_until, State.FAILED: self._retry_at}.get(self.state, 0.0)
        return max(1.0, float(math.ceil(ends - self._clock())))

    def may_sleep(self, idle_s: float, threshold_s: float) -> bool:
        """Whether this model, `idle_s` seconds without a request, may be put to sleep now."""
        return (
            self.state is State.AWAKE
            and self.can_sleep is not False
            and self.lane.idle
            and not self.in_transition
            and min(idle_s, self._clock() - self.since) >= threshold_s
            and self._clock() >= self._sleep_again_at
        )

    async def sleep(self, *, manual: bool, level: int | None = None, mode: str | None = None) -> str:
        """Drain, then put the engine to sleep. Answers a remark for people; raises RequestError when it stays awake."""
        if self.state is State.ASLEEP and not self.in_transition:
            return "already asleep"
        if self.state not in {State.AWAKE, State.DRAINING}:
            pending = " and about to wake" if self.state is State.ASLEEP else ""
            raise Conflict(f"{self.name} is {self.state}{pending}", hint="only an awake model can be put to sleep")
        if not self.in_transition:
            self._start("sleep", self._sleep(manual, level or self.policy.level, self.policy.mode if mode is None else mode))
        await self._join("sleep")
        return "asleep"

    async def wake(self, *, tags: Sequence[str] = (), force: bool = False) -> str:
        """Wake the engine (only `tags`, where given); waits for the minimum sleep unless `force`. Raises RequestError."""
        if self.state is State.DRAINING and self._change is not None:
            await asyncio.wait([self._change])
        if self.state is State.AWAKE:
            return "already awake"
        if self.state is State.STARTING or (self.state is State.FAILED and not self._woke_in_vain):
            raise self._unavailable()
        self._wanted = True
        if force:
            self._hurry.set()
        if not self.in_transition:
            self._start("wake", self._wake(tuple(tags)))
        await self._join("wake")
        return self._woke(tags)

    def _woke(self, tags: Sequence[str]) -> str:
        return "awake" if self.state is State.AWAKE else f"woke {', '.join(tags)}; the engine is still asleep"

    async def check(self) -> None:
        """Look at the engine and believe it. Called every health interval, and at once when a request broke."""
        if self.in_transition and not self._resting:
            return
        epoch = self._epoch
        alive = await self._control.healthy()
        if epoch != self._epoch:
            return
        if not alive:
            self._missed += 1
            failed = self.state is State.FAILED and not self._woke_in_vain
            if self._missed >= self._health_failures and not self.patient and not failed:
                self._fail("the engine does not answer /health", in_vain=False)
            return
        self._missed = 0
        if self.state is State.FAILED and self._woke_in_vain and self._clock() < self._retry_at:
            return
        await self._believe()

    def lost(self, why: str, *, hopeless: bool) -> None:
        """The engine's process is gone, says who started it. Requests wait for the next one, unless that is hopeless."""
        self.last_error = why
        if hopeless:
            self._fail(why, in_vain=False)
        elif not self.in_transition or self._resting:
            self._enter(State.STARTING)
        # Else the transition's own call fails in a moment, and what it leaves is found out by `check`.

    async def close(self) -> None:
        """Stop whatever runs and send the queue away."""
        self.lane.shut()
        self.lane.fail_waiting(Unavailable(f"{self.name} is being taken out of service", retry_after_s=1.0))
        if self._change is not None:
            self._change.cancel()
            await asyncio.gather(self._change, return_exceptions=True)

    # ---- transitions ---------------------------------------------------------------------------------------------

    def _start(self, kind: str, work: Coroutine[Any, Any, None]) -> None:
        self._change_kind = kind
        self._epoch += 1
        self._change = asyncio.create_task(work, name=f"{kind} {self.name}")
        self._change.add_done_callback(_retrieved)

    async def _join(self, kind: str) -> None:
        """Wait for the running transition; one of the other kind is a conflict."""
        if self._change is None:
            return
        if self._change_kind != kind:
            raise Conflict(f"{self.name} is {self.state}", hint="wait for that to end")
        await asyncio.shield(self._change)

    async def _sleep(self, manual: bool, level: int, mode: str) -> None:
        self._enter(State.DRAINING)
        try:
            await self._drain(manual)
            await self._control.sleep(level, mode, self.policy.sleep_timeout_s)
            await self._confirm(asleep=True)
        except RequestError:
            self._enter(State.AWAKE)
            raise
        except EngineError as error:
            await self._sleep_refused(error)
            return
        self.sleeps_total += 1
        self._sleep_pause_s = FIRST_PAUSE_S
        self.manual, self.level = manual, level
        self._minimum_until = self._clock() + self.policy.min_sleep_s
        self._enter(State.ASLEEP)
        self._demand_if_queued()

    async def _confirm(self, *, asleep: bool) -> bool:
        """Ask the engine whether it did what it answered. Raises EngineError when it says otherwise."""
        try:
            said = await self._control.is_sleeping()
        except NotSupported:
            return asleep  # it cannot say: its answer to the call itself has to do
        if said is not asleep:
            words = ("/sleep", "awake") if asleep else ("/wake_up", "asleep")
            raise EngineError(f"{words[0]} was answered, but the engine says it is {words[1]}")
        return asleep

    async def _still_asleep(self) -> bool:
        try:
            return await self._control.is_sleeping()
        except NotSupported:
            return False

    async def _drain(self, manual: bool) -> None:
        """Wait until nobody uses the engine, through the gate or past it. Raises Conflict when somebody goes on."""
        deadline = self._clock() + self.policy.drain_timeout_s
        if not await self.lane.drained(self.policy.drain_timeout_s if manual else 0.0):
            raise Conflict(f"{self.name} is busy: {self.lane.running} requests still run", hint="sleep it when they are done")
        while running := await self._control.busy():
            if not manual or self._clock() >= deadline:
                raise Conflict(f"{self.name} is busy: its engine runs {running} requests that did not come through the gate")
            await asyncio.sleep(0.2)
        if self.lane.waiting and not manual:
            raise Conflict(f"{self.name}: a request came in")

    async def _sleep_refused(self, error: EngineError) -> None:
        """The engine did not go to sleep, or did and could not say so: ask it, and serve on if it is awake."""
        self.sleep_failures_total += 1
        self.last_error = error.message
        self._sleep_again_at = self._clock() + self._sleep_pause_s
        self._sleep_pause_s = min(self._sleep_pause_s * 2, LAST_SLEEP_PAUSE_S)
        log.warning("%s: sleep failed: %s", self.name, error.message)
        await self._believe()
        if isinstance(error, NotSupported):
            self.can_sleep = False
        if self.state is not State.ASLEEP:
            raise UpstreamBroken(f"{self.name} stays awake: {error.message}", hint=error.hint)

    async def _wake(self, tags: tuple[str, ...]) -> None:
        try:
            await self._rest()
            awake_already = self.state is not State.ASLEEP and not self._woke_in_vain
            if awake_already or (not self._wanted and not self.lane.waiting):
                return
            if self._make_room is not None:
                await self._make_room(self.name)
            started = self._clock()
            self._enter(State.WAKING)
            await self._wake_tries(tags)
            self.last_wake_s = self._clock() - started
        except RequestError as error:
            self.lane.fail_waiting(error)
            raise
        finally:
            self._hurry.clear()
            self._wanted = False
            if self.state is State.WAKING:
                # Cancelled half-way: the next health check asks the engine.
                self._enter(State.ASLEEP)

    async def _rest(self) -> None:
        """Let the minimum sleep pass; a wake-up by force, and a change of state found by `check`, end it."""
        left = self._minimum_until - self._clock()
        if left <= 0 or self.state is not State.ASLEEP:
            return
        self._resting = True
        try:
            async with asyncio.timeout(left):
                await self._hurry.wait()
        except TimeoutError:
            pass
        finally:
            self._resting = False
            # A check that began while we rested must not judge what comes now.
            self._epoch += 1

    async def _wake_tries(self, tags: tuple[str, ...]) -> None:
        """Up to `wake_tries` attempts; afterwards the machine is awake, asleep (some tags only) or failed."""
        for number in range(1, self.policy.wake_tries + 1):
            try:
                await self._control.wake(tags, self.level, self.policy.wake_timeout_s)
                # With some tags only, the engine may rightly say that it still sleeps.
                asleep = await self._still_asleep() if tags else await self._confirm(asleep=False)
            except (EngineError, TimeoutError) as error:
                self.wake_failures_total += 1
                self.last_error = str(error) or f"no wake-up within {self.policy.wake_timeout_s:g} s"
                log.warning("%s: wake-up %d of %d failed: %s", self.name, number, self.policy.wake_tries, self.last_error)
                if number < self.policy.wake_tries:
                    await asyncio.sleep(min(0.2 * 2 ** (number - 1), 5.0))
                continue
            self.wakes_total += 1
            self._pause_s = FIRST_PAUSE_S
            self._enter(State.ASLEEP if asleep else State.AWAKE)
            return
        self._fail(f"could not be woken in {self.policy.wake_tries} tries: {self.last_error}", in_vain=True)
        raise UpstreamBroken(f"{self.name} {self.last_error}")

    # ---- the pieces ----------------------------------------------------------------------------------------------

    def _enter(self, state: State) -> None:
        if state is not self.state:
            log.info("%s: %s -> %s", self.name, self.state, state)
            self.since = self._clock()
            self._on_change()
        if state is State.ASLEEP and self.asleep_since is None:
            self.asleep_since, self.asleep_at_wall = self._clock(), self._wall()
        if state in {State.AWAKE, State.STARTING}:
            self.asleep_since, self.manual, self._minimum_until = None, False, 0.0
        if state is not State.FAILED:
            self._woke_in_vain = False
        if self._resting and state is not State.ASLEEP:
            self._hurry.set()
        self.state = state
        self.lane.open() if state is State.AWAKE else self.lane.shut()

    def _fail(self, why: str, *, in_vain: bool) -> None:
        self.last_error = why
        self._retry_at = self._clock() + self._pause_s
        if in_vain:
            self._pause_s = min(self._pause_s * 2, LAST_PAUSE_S)
        self._enter(State.FAILED)
        self._woke_in_vain = in_vain
        self.lane.fail_waiting(self._unavailable())

    def _unavailable(self) -> Unavailable:
        why = self.last_error or "its engine does not answer yet"
        return Unavailable(f"{self.name} is {self.state}: {why}", retry_after_s=self.retry_after_s)

    async def _believe(self) -> None:
        """Take the state the engine reports; for one that cannot say, our own memory stands."""
        epoch = self._epoch
        try:
            asleep = await self._control.is_sleeping()
            self.can_sleep = True
        except NotSupported:
            asleep = self.state is State.ASLEEP or (self.state is State.FAILED and self._woke_in_vain)
        except EngineError as error:
            self.last_error = error.message
            if self.state is State.DRAINING:
                self._enter(State.AWAKE)
            return
        if epoch != self._epoch:
            return  # a transition began while we asked: it knows better
        if asleep and self.state is not State.ASLEEP:
            was_failed = self.state is State.FAILED and self._woke_in_vain
            # Found asleep: by hand, or by us before a restart. Nobody knows at which level or since when.
            # So the minimum sleep, which is there against going to and fro, does not hold it back.
            self.manual = self.state is State.AWAKE
            self._minimum_until = 0.0 if not was_failed else self._minimum_until
            self._enter(State.ASLEEP)
            if was_failed and not self.in_transition:
                self._wanted = True
                self._start("wake", self._wake(()))
            else:
                self._demand_if_queued()
        elif not asleep and self.state is not State.AWAKE:
            self._enter(State.AWAKE)

    def _demand_if_queued(self) -> None:
        if self.lane.waiting and self.policy.wake_on_request:
            # From inside a transition its own task still counts as running: start the next one after it.
            asyncio.get_running_loop().call_soon(self._demand)

    def _demand(self) -> None:
        if self.state is State.ASLEEP and not self.in_transition and self.lane.waiting:
            self._start("wake", self._wake(()))

    def _on_blocked(self) -> None:
        """A request met the shut lane: refuse it, or see to it that the lane will open."""
        if self.state is State.FAILED:
            raise self._unavailable()
        if self.state is State.ASLEEP:
            if not self.policy.wake_on_request:
                raise Unavailable(f"{self.name} is asleep", hint="wake it with `kvgate wake`", retry_after_s=60.0)
            asyncio.get_running_loop().call_soon(self._demand)


def _retrieved(task: asyncio.Task[None]) -> None:
    """Look at a transition's exception, so that one nobody waits for is no warning at exit; it was logged where it arose."""
    if not task.cancelled():
        task.exception()
