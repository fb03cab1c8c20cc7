"""The engines that kvgate starts itself: in order, watched, started again, and ended without a trace.

    wait for the devices -> start -> serves? -> release the devices -> watch -> ended: pause, and again
                                     |-> ended, or not in time: end the group, pause, and again

Engines that share a device start one after the other, in the configuration's order: each measures the free memory it
finds, and two that measure at once both take it. Instances that name no device share one place in that order. None is started
where something listens on its port already: that would be taken for it.

An engine that ends is started again after 1 s, then 2, 4, up to 60; one that served for a minute starts again at 1 s.
Meanwhile its model is `starting` and requests wait; after three starts in a row that never served it is `failed` and they
are answered at once. The last lines of its output are part of the error.

Output goes to `<log_dir>/<name>.log` (0600), 16 MiB and one older file at most. When an engine has ended, its process group
is killed and its pool segment removed, if no other process holds it; so are the stats segments of those of its processes that
had no time to do it.

An engine whose model is removed ends when its last stream has, however long that takes, unless something new needs its port or
its name: then its streams have the model's drain time.

Concurrency: one task an engine. The event loop writes logs: lines are few and small, and the page cache takes them.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvgate.config import GateConfig, ModelConfig, plain
from kvgate.errors import EngineError
from kvgate.launcher import Held, Subprocess, Tmux, argv, environment, segment_of
from kvgate.router import Backend, Router
from kvtools.errors import KvError, NotFound, hint_for
from kvtools.output import printable
from kvtools.segments import owner, pool
from kvtools.segments.files import SHM, pid_namespace
from kvtools.segments.stats import find_stats, read_stats, remove_unlocked

log = logging.getLogger("kvgate.engines")
FIRST_PAUSE_S, LAST_PAUSE_S = 1.0, 60.0
STEADY_S = 60.0
VAIN_STARTS = 3
LISTENS_S = 1.0
LOG_BYTES = 16 << 20


class EngineLog:
    """One engine's output on disk, and its last lines in memory. A place that cannot be written costs the log, not the engine."""

    def __init__(self, path: Path | None, limit: int = LOG_BYTES) -> None:
        self.path = path
        self._limit = limit
        self._written = 0
        self._fd = -1
        self.last: deque[str] = deque(maxlen=3)
        self._unfinished = b""
        self._said = False
        self._put(b"")

    def _open(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        self._fd = os.open(path, flags, 0o600)
        self._written = os.fstat(self._fd).st_size

    def write(self, piece: bytes) -> None:
        """Keep `piece`. Raises nothing."""
        *lines, self._unfinished = (self._unfinished + piece[-4096:]).split(b"\n")
        for line in lines:
            if line.strip():
                self.last.append(printable(line.decode(errors="replace").strip())[:300])
        self._put(piece)

    def _put(self, piece: bytes) -> None:
        """Append to the file, which is opened where it is not open yet; that it cannot be done is said once."""
        if self.path is None:
            return
        try:
            if self._fd >= 0 and self._written + len(piece) > self._limit:
                self.path.replace(self.path.with_suffix(".log.1"))
                self.close()
            if self._fd < 0:
                self._open(self.path)
            os.write(self._fd, piece)
            self._written += len(piece)
            self._said = False
        except OSError as error:
            if not self._said:
                hint = hint_for(error, "log_dir says where logs go")
                log.warning("no log of the engine: %s: %s; %s", self.path, error.strerror or error, hint)
            self._said = True

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Engine:
    """One instance, from its first start to its end."""

    def __init__(self, backend: Backend, supervisor: "Supervisor") -> None:
        self.backend = backend
        self.config = backend.config
        assert backend.config.instance is not None
        self.instance = backend.config.instance
        self.starts_total = 0
        self.pid = 0
        self._supervisor = supervisor
        self._held: Held | None = None
        self._vain = 0
        backend.machine.patient, backend.process_up = True, False
        self._task = asyncio.create_task(self._run(), name=f"engine {self.instance.name}")

    @property
    def name(self) -> str:
        return self.instance.name

    async def _run(self) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            served_s = 0.0
            try:
                served_s = await self._once()
            except KvError as error:
                self._vain += 1
                self._report(f"engine {self.name}: {error.message}")
            except OSError as error:
                self._vain += 1
                about = f" ({error.filename})" if error.filename else ""
                self._report(f"engine {self.name} cannot be started: {error.strerror or error}{about}")
            if not self.instance.restart:
                self._report(self.backend.machine.last_error, final=True)
                return
            pause_s = FIRST_PAUSE_S if served_s >= STEADY_S else pause_s
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, LAST_PAUSE_S)

    async def _once(self) -> float:
        """One life of the process; answers how long it served. Whatever happens, nothing of it is left afterwards."""
        in_tmux = self.instance.launcher == "tmux"
        output = EngineLog(None if in_tmux else self._supervisor.log_path(self.name))
        ended: asyncio.Task[int] | None = None
        started_ns = time.time_ns()
        try:
            async with self._supervisor.turn(self.config):
                if self._supervisor.make_room is not None:
                    await self._supervisor.make_room(self.config.name)
                held = await self._hold(output)
                self.backend.process_up = True
                ended = asyncio.create_task(held.wait())
                ready = await self._becomes_ready(ended)
                if ready:
                    await asyncio.sleep(self._supervisor.launch_delay_s)
            served_from = time.monotonic()
            status = await ended if ready or ended.done() else None
        finally:
            if ended is not None:
                ended.cancel()
            await self._clean_up(started_ns)
            output.close()
        self._vain = 0 if ready else self._vain + 1
        why = _ended(status) if status is not None else f"did not serve within {self.instance.ready_timeout_s:g} s"
        said = f": {' | '.join(output.last)}" if output.last else ""
        self._report(f"engine {self.name} {why}{said}")
        return time.monotonic() - served_from if ready else 0.0

    async def _hold(self, output: EngineLog) -> Held:
        """Start the process and keep hold of it; being stopped meanwhile must not lose one that is half started."""
        starting = asyncio.create_task(self._start(output))
        try:
            self._held = await asyncio.shield(starting)
        except asyncio.CancelledError:
            with contextlib.suppress(KvError, OSError):
                self._held = await starting
            raise
        self.pid = self._held.pid
        return self._held

    async def _start(self, output: EngineLog) -> Held:
        words, env = argv(self.config), environment(self.config, os.environ)
        self.starts_total += 1
        shown = ["***" if before == "--api-key" else word for before, word in zip(["", *words], words, strict=False)]
        log.info("%s: starting: %s", self.name, " ".join(shown))
        if self.instance.launcher == "tmux":
            return await Tmux.start(self.name, words, env, os.environ, self._port_is_free)
        await self._port_is_free()
        return await Subprocess.start(words, env, output.write, self._supervisor.shutdown_timeout_s)

    async def _port_is_free(self) -> None:
        """Raises EngineError where something listens already: it would be taken for our engine, and ours could not listen."""
        endpoint = self.config.endpoint
        try:
            async with asyncio.timeout(LISTENS_S):
                _, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
        except (OSError, TimeoutError):
            return
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        raise EngineError(
            f"not started: something listens on {endpoint.host}:{endpoint.port} already (another gate's engine, or one left over?)"
        )

    async def _becomes_ready(self, ended: "asyncio.Task[int]") -> bool:
        """Wait until the engine serves (True), ends, or its time is over (False)."""
        machine = self.backend.machine
        deadline = time.monotonic() + self.instance.ready_timeout_s
        while time.monotonic() < deadline and not ended.done():
            if await self.backend.control.healthy() and not ended.done():
                machine.patient = False
                self.backend.poke()
                log.info("%s: serves (process %d)", self.name, self.pid)
                return True
            await asyncio.wait([ended], timeout=self._supervisor.poll_s)
        return False

    async def _clean_up(self, started_ns: int) -> None:
        self.backend.process_up = False
        held, self._held = self._held, None
        if held is not None:
            await held.end(self._supervisor.shutdown_timeout_s)
            self.pid = 0
            remove_segment(segment_of(self.config), self._supervisor.root)
            remove_stats(started_ns, self._supervisor.root)

    def _report(self, why: str, *, final: bool = False) -> None:
        """The engine is down: say so where people and clients look."""
        log.warning("%s", why)
        self.backend.machine.patient = not final
        self.backend.machine.lost(why, hopeless=final or self._vain >= VAIN_STARTS)

    async def stop(self) -> None:
        """End the engine and its task; the process has the shutdown time to do it by itself."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


def _ended(status: int) -> str:
    return f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"


def remove_segment(name: str, root: Path = SHM) -> None:
    """Remove the pool segment of an engine that is gone: ours when its owner's lock is free, a foreign one in any case.

    The gate started the engine, gave it a name of its own and has seen its whole group end: that is more than `kvctl prune`
    can know, which never takes a segment without a sidecar.
    """

    def remove_pool() -> None:
        with contextlib.suppress(NotFound):
            pool.remove(name, root=root)

    try:
        if not owner.remove_stale(name, root=root, before=remove_pool) and owner.read_owner(name, root=root) is None:
            remove_pool()
    except KvError as error:
        log.warning("the segment %s stays: %s", name, error.message)


def remove_stats(since_ns: int, root: Path = SHM) -> None:
    """Remove the connector's stats segments that were made after `since_ns` (unix) and whose writers are gone.

    They are named by pids, so no later engine takes them over: each engine that is killed would leave one a rank.
    """
    try:
        for path in find_stats(root, "connector"):
            found = read_stats(path, root)
            if not found.alive and found.created_ns >= since_ns and found.pid_namespace == pid_namespace():
                remove_unlocked(path)
    except KvError as error:
        log.warning("stats segments stay: %s", error.message)


@dataclass
class Ending:
    """An engine whose model is gone or has changed, until its process has ended."""

    config: ModelConfig
    hurry: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when something new needs its place."""
    since: float = field(default_factory=time.monotonic)

    @property
    def patience_left_s(self) -> float:
        """How long an engine beside it goes on waiting for the memory it holds."""
        return max(0.0, self.since + self.config.sleep.drain_timeout_s - time.monotonic())

    def stands_in_the_way_of(self, other: ModelConfig) -> bool:
        """Whether `other` cannot start before this one is gone: they share a port, a log and tmux session, or a segment."""
        mine, theirs = self.config.instance, other.instance
        if mine is None or theirs is None:
            return False
        same_name = plain(mine.name) == plain(theirs.name)
        return self.config.endpoint == other.endpoint or same_name or segment_of(self.config) == segment_of(other)

    def shares_a_device_with(self, other: ModelConfig) -> bool:
        return bool(set(self.config.devices or (-1,)) & set(other.devices or (-1,)))


class Supervisor:
    """All engines of one gate."""

    def __init__(
        self,
        router: Router,
        config: GateConfig,
        *,
        root: Path = SHM,
        poll_s: float = 0.5,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self.engines: dict[str, Engine] = {}
        self.launch_delay_s = config.launch_delay_s
        self.shutdown_timeout_s = config.shutdown_timeout_s
        self.root = root
        self.make_room = router.make_room
        self.poll_s = min(poll_s, config.health_interval_s)
        self._router = router
        self._log_dir = config.log_dir or default_log_dir(environ)
        self._turns: dict[int, asyncio.Lock] = {}
        self._ending: dict[asyncio.Task[None], Ending] = {}
        self._stopping = asyncio.Event()

    def apply(self) -> None:
        """Start an engine for every new backend that has an instance, and end those whose backend is gone."""
        wanted = {name: b for name, b in self._router.backends.items() if b.config.instance is not None}
        for name, engine in list(self.engines.items()):
            if wanted.get(name) is not engine.backend:
                del self.engines[name]
                ending = Ending(engine.config)
                task = asyncio.create_task(self._retire(engine, ending), name=f"end {engine.name}")
                self._ending[task] = ending
                task.add_done_callback(self._ending.pop)
        for name, backend in wanted.items():
            if name not in self.engines:
                self.engines[name] = Engine(backend, self)

    async def _retire(self, engine: Engine, ending: Ending) -> None:
        """Let the streams of a removed or changed model end, within its drain time where there is hurry, then end its engine."""
        drained = asyncio.create_task(engine.backend.lane.drained(None))
        hurry, stopping = asyncio.create_task(ending.hurry.wait()), asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait([drained, hurry, stopping], return_when=asyncio.FIRST_COMPLETED)
            patience_s = engine.config.sleep.drain_timeout_s
            await asyncio.wait([drained, stopping], timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (drained, hurry, stopping):
                task.cancel()
        await engine.stop()

    @contextlib.asynccontextmanager
    async def turn(self, config: ModelConfig) -> AsyncIterator[None]:
        """Hold the places of the engine's devices. Locks are first come first served, and taken in one order."""
        # A predecessor on the same port must be gone first; one on the same device holds memory, and has its drain time for that.
        while before := {task: ending for task, ending in self._ending.items() if ending.stands_in_the_way_of(config)}:
            for ending in before.values():
                ending.hurry.set()
            await asyncio.wait(before)
        if beside := {task: ending for task, ending in self._ending.items() if ending.shares_a_device_with(config)}:
            await asyncio.wait(beside, timeout=max(ending.patience_left_s for ending in beside.values()))
        async with contextlib.AsyncExitStack() as stack:
            for device in config.devices or (-1,):
                await stack.enter_async_context(self._turns.setdefault(device, asyncio.Lock()))
            yield

    def log_path(self, name: str) -> Path | None:
        """Where `name`'s output goes; None, said once a start, when the folder cannot be made."""
        try:
            self._log_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            log.warning("no engine logs: %s: %s; %s", self._log_dir, error.strerror, hint_for(error, "log_dir says where logs go"))
            return None
        return self._log_dir / f"{name.replace('/', '_')}.log"

    async def stop(self) -> None:
        """End all engines at once: each has the shutdown time to do it by itself."""
        self._stopping.set()
        await asyncio.gather(*(engine.stop() for engine in self.engines.values()), *self._ending)


def default_log_dir(environ: Mapping[str, str], *, uid: Callable[[], int] = os.getuid) -> Path:
    """/var/log/kvgate for root, else the user's state folder."""
    if uid() == 0:
        return Path("/var/log/kvgate")
    home = environ.get("XDG_STATE_HOME") or str(Path(environ.get("HOME", "/")) / ".local" / "state")
    return Path(home) / "kvgate"
