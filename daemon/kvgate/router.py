"""Which engine a request goes to, and whether that engine is fit to take it.

A `Backend` is everything about one model: its configuration, its lane (admission), its sleep machine, its control calls
and the watch over its health. The `Router` holds them by name and replaces them on reload.

Reload: a model whose settings are the same keeps its backend, queue and state. A changed or removed one is *retired*: no
new request finds it, its queue is sent away, and streams that run go on to their end because they hold the backend
themselves. A changed one is at once replaced by a fresh backend.

Concurrency: one event loop. Each backend has one watch task; `poke` makes it look now instead of at the next interval.
"""

import asyncio
import difflib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import aiohttp

from kvgate.config import GateConfig, ModelConfig
from kvgate.control import HttpControl
from kvgate.errors import EngineError, UnknownModel
from kvgate.lane import Lane
from kvgate.sleep import SleepMachine, State
from kvgate.traffic import TrafficMonitor
from kvtools.output import printable

log = logging.getLogger("kvgate.router")

MakeRoom = Callable[[str], Awaitable[None]]
"""Returns when the model of this name may wake up."""


class Backend:
    """One model and its engine."""

    def __init__(
        self,
        config: ModelConfig,
        gate: GateConfig,
        session: aiohttp.ClientSession,
        *,
        make_room: MakeRoom | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.config = config
        self.name = config.name
        self.lane = Lane(config.name, config.limits.max_concurrency, config.limits.max_queue)
        self.control = HttpControl(session, config.endpoint.url, api_key=config.api_key)
        self.machine = SleepMachine(
            config.name,
            self.lane,
            self.control,
            config.sleep,
            health_failures=gate.health_failures,
            make_room=make_room,
            on_change=on_change,
        )
        self.process_up: bool | None = None
        """Whether the engine's process runs, for one that kvgate starts itself; None for the others."""
        self.card: dict[str, object] = {}
        """What the engine says of itself in /v1/models."""
        self._interval_s = gate.health_interval_s
        self._poked = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to watch the engine."""
        self._watch = asyncio.create_task(self._run(), name=f"watch {self.name}")

    def poke(self) -> None:
        """Something about the engine looks wrong: look now."""
        self._poked.set()

    async def look(self) -> None:
        """One look at the engine."""
        if self.process_up is False:
            return  # whatever answers at its place is not the engine that kvgate starts
        await self.machine.check()
        if self.machine.reachable and not self.card:
            await self._fetch_card()

    async def _fetch_card(self) -> None:
        try:
            cards = await self.control.models()
        except EngineError:
            return
        self.card = next((card for card in cards if card.get("id") == self.name), {"id": self.name})
        served = [str(card.get("id")) for card in cards]
        named = {self.name, self.config.instance.name if self.config.instance else self.name}
        if served and not named & set(served):
            # Requests pass unchanged, so the name in them is the engine's to know.
            known = ", ".join(repr(printable(name[:100])) for name in served[:5])
            log.warning("%s: its engine serves %s and answers 404 to this name: see --served-model-name", self.name, known)

    async def _run(self) -> None:
        while True:
            try:
                await self.look()
            except Exception:  # the edge of a task that must go on: one bad look is logged, the next may be good
                log.exception("%s: the health check failed", self.name)
            # While nothing is known of the engine yet, requests wait in the queue for it: look more often.
            pause = min(self._interval_s, 1.0) if self.machine.state is State.STARTING else self._interval_s
            try:
                async with asyncio.timeout(pause):
                    await self._poked.wait()
            except TimeoutError:
                pass
            self._poked.clear()

    async def stop(self) -> None:
        """Stop watching and let nobody else in; requests that run are left alone."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        await self.machine.close()


@dataclass
class Reloaded:
    """What a reload did, by model name."""

    added: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    at_start: list[str] = field(default_factory=list)
    """Settings that changed in the file and are read at the start only."""


class Router:
    """Backends by name."""

    def __init__(self, traffic: TrafficMonitor, session: aiohttp.ClientSession) -> None:
        self.backends: dict[str, Backend] = {}
        self.traffic = traffic
        self.make_room: MakeRoom | None = None
        self.on_change: Callable[[], None] = lambda: None
        """Called when any model's state changes."""
        self._session = session
        self._retired: set[asyncio.Task[None]] = set()

    def find(self, model: str) -> Backend:
        """The backend of `model`, by its name or by the short name of its instance. Raises UnknownModel."""
        if backend := self.backends.get(model):
            return backend
        for backend in self.backends.values():
            if backend.config.instance is not None and backend.config.instance.name == model:
                return backend
        near = difflib.get_close_matches(model, self.backends, n=1) if len(model) < 200 else []
        hint = f"did you mean {near[0]!r}?" if near else "/v1/models lists what there is"
        raise UnknownModel(f"the model {model[:200]!r} does not exist", hint=hint, param="model")

    def apply(self, gate: GateConfig) -> Reloaded:
        """Make the backends those of `gate`; answers what changed."""
        done = Reloaded()
        old, self.backends = self.backends, {}
        self.traffic.know(gate.models)
        for name, config in gate.models.items():
            had = old.pop(name, None)
            if had is not None and had.config == config:
                self.backends[name] = had
                done.unchanged.append(name)
                continue
            self.backends[name] = backend = Backend(config, gate, self._session, make_room=self.make_room, on_change=self.on_change)
            backend.start()
            (done.added if had is None else done.changed).append(name)
            if had is not None:
                self._retire(had)
        for name, backend in old.items():
            self._retire(backend)
            done.removed.append(name)
        return done

    def _retire(self, backend: Backend) -> None:
        task = asyncio.create_task(backend.stop(), name=f"retire {backend.name}")
        self._retired.add(task)
        task.add_done_callback(self._retired.discard)

    async def stop(self) -> None:
        """Retire everything."""
        await asyncio.gather(*(backend.stop() for backend in self.backends.values()), *self._retired)
