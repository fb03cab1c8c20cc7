"""Memory-aware waking: a model wakes only where it fits, and the least recently used idle model sleeps to make it fit.

`devices: {0: 80GiB}` says what all models awake on a device may hold together. A model's part of it is `weights_bytes`
plus its KV: what its pool segment says is in use, and at least `kv_bytes`. A sleeping model still holds what its pool has
mapped. Without `devices` everything fits, and nothing here happens.

    make(m): fits? -> share the KV memory out -> m may wake
             else  -> put the longest idle model of that device to sleep -> again
             else  -> wait for somebody to become idle, up to the queue's deadline -> 503

Sharing out is `kvctl apply`'s own engine (kvtools.ctl.plan): the pools of the models that are awake get what the weights
leave, by `weight`, at least `kv_bytes` and what they use. It is done before a wake-up, so that the others have given
memory back before the new one maps it, and after a model fell asleep, so that they may have it again.

Failure: a limit that cannot be written is logged and changes nothing. A model that could never fit is no configuration (config.py).

Concurrency: one `make` at a time holds the lock, and the machine enters `waking` in the same step in which its `make`
returns, so two models never count the same room. Segments are read and written in a thread: their locks may be held.
"""

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from kvgate.errors import RequestError, Unavailable
from kvgate.router import Backend, Router
from kvgate.sleep import State
from kvtools.ctl.plan import Candidate, Plan, Share, Target, apply_targets, share_out
from kvtools.errors import KvError
from kvtools.segments.files import SHM
from kvtools.segments.owner import judge
from kvtools.segments.pool import PoolReading, read_pool
from kvtools.units import format_size

log = logging.getLogger("kvgate.room")
HOLDING = frozenset({State.STARTING, State.AWAKE, State.DRAINING, State.WAKING})
"""States in which an engine has its weights on the device, or may have."""


def _holds(backend: Backend) -> bool:
    return backend.machine.state in HOLDING and backend.process_up is not False


@dataclass(frozen=True)
class Part:
    """What one model holds of each of its devices. Bytes."""

    backend: Backend
    fixed_bytes: int
    """What no limit can take away: weights, KV without a segment, and what a sleeping model's pool still maps."""
    pool: PoolReading | None
    """The pool of a model that is awake, or about to be."""

    @property
    def least_bytes(self) -> int:
        """What it takes at the least while its requests run."""
        kv = max(self.backend.config.kv_bytes, self.pool.used_bytes) if self.pool else 0
        return self.fixed_bytes + kv


class Room:
    """The devices' memory, over all models of one gate."""

    def __init__(self, router: Router, devices: Mapping[int, int], *, root: Path = SHM, poll_s: float = 0.5) -> None:
        self.devices = dict(devices)
        self._router = router
        self._root = root
        self._poll_s = poll_s
        self._lock = asyncio.Lock()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="room")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def changed(self) -> None:
        """A model fell asleep or woke up: share the memory out anew, soon."""
        self._changed.set()

    async def make(self, name: str) -> None:
        """Return when `name` fits. Raises Unavailable when nobody made room in time."""
        backend = self._router.backends.get(name)
        if backend is None or not self._limited(backend):
            return
        deadline = time.monotonic() + backend.config.limits.queue_timeout_s
        while True:
            async with self._lock:
                short = await self._short_after_sleeps(backend)
                if not short:
                    await self._share([*self._holding(), backend])
                    return
            if time.monotonic() >= deadline:
                device, missing = short[0]
                raise Unavailable(
                    f"{name}: no room on device {device}: {format_size(missing)} short, and no other model is idle",
                    retry_after_s=5.0,
                )
            await asyncio.sleep(self._poll_s)

    # ---- who fits ------------------------------------------------------------------------------------------------

    def _limited(self, backend: Backend) -> list[int]:
        return [device for device in backend.config.devices if device in self.devices]

    async def _short_after_sleeps(self, backend: Backend) -> list[tuple[int, int]]:
        """What is missing on each device for `backend`, after every idle model that had to has gone to sleep."""
        refused: set[str] = set()
        while True:
            parts = await asyncio.to_thread(self._parts, list(self._router.backends.values()), backend)
            short = self._missing(backend, parts)
            if not short:
                return []
            crowded = {device for device, _ in short}
            victim = self._least_recently_used(backend, crowded, refused)
            if victim is None:
                return short
            try:
                log.info("%s sleeps to make room for %s", victim.name, backend.name)
                await victim.machine.sleep(manual=False)
            except RequestError as error:
                log.info("%s", error.message)
                refused.add(victim.name)

    def _missing(self, backend: Backend, parts: Iterable[Part]) -> list[tuple[int, int]]:
        parts = list(parts)
        found = []
        for device in self._limited(backend):
            held = sum(part.least_bytes for part in parts if device in part.backend.config.devices)
            if held > self.devices[device]:
                found.append((device, held - self.devices[device]))
        return found

    def _least_recently_used(self, waker: Backend, crowded: set[int], refused: set[str]) -> Backend | None:
        idle = [
            backend
            for backend in self._router.backends.values()
            if backend is not waker
            and backend.name not in refused
            and backend.config.sleep.auto_sleep
            and crowded & set(backend.config.devices)
            and backend.machine.may_sleep(0.0, 0.0)
        ]
        return max(idle, key=lambda backend: self._router.traffic.idle_s(backend.name), default=None)

    def _parts(self, backends: Iterable[Backend], waker: Backend | None) -> list[Part]:
        """Reads segments: call it in a thread."""
        parts = []
        for backend in backends:
            config = backend.config
            reading = self._read(config.segment)
            if backend is waker or _holds(backend):
                fixed = config.weights_bytes + (0 if reading else config.kv_bytes)
                parts.append(Part(backend, fixed, reading))
            else:
                parts.append(Part(backend, reading.mapped_bytes if reading else 0, None))
        return parts

    def _read(self, segment: str) -> PoolReading | None:
        if not segment:
            return None
        try:
            return read_pool(segment, root=self._root)
        except KvError:
            return None  # not made yet, or unreadable: then kv_bytes speaks for it

    # ---- sharing out ---------------------------------------------------------------------------------------------

    def _holding(self) -> list[Backend]:
        return [backend for backend in self._router.backends.values() if _holds(backend)]

    async def _share(self, awake: list[Backend]) -> None:
        """Give the pools of `awake` what the weights leave of their devices."""
        try:
            done = await asyncio.to_thread(self._share_in_thread, awake)
        except KvError as error:
            log.warning("limits stay as they are: %s", error.message)
            return
        for name, limit in done:
            log.info("limit of %s is now %s", name, format_size(limit))

    def _share_in_thread(self, awake: list[Backend]) -> list[tuple[str, int]]:
        everybody = list(self._router.backends.values())
        parts = [part for part in self._parts(everybody, None) if part.backend not in awake]
        parts += [part for backend in awake for part in self._parts([backend], backend)]
        least: dict[str, Target] = {}
        for device, capacity in self.devices.items():
            here = [part for part in parts if device in part.backend.config.devices]
            budget = capacity - sum(part.fixed_bytes for part in here)
            for target in self._targets([part for part in here if part.pool], budget):
                # A pool on several devices has one limit: the tightest of them.
                known = least.get(target.name)
                least[target.name] = target if known is None or target.limit_bytes < known.limit_bytes else known
        changes = apply_targets(list(least.values()), by="kvgate", root=self._root)
        return [(change.after.name, change.after.limit_bytes) for change in changes]

    def _targets(self, parts: list[Part], budget: int) -> list[Target]:
        if not parts:
            return []
        shares, candidates = [], []
        for part in parts:
            assert part.pool is not None
            config = part.backend.config
            shares.append(Share(config.segment, weight=Fraction(str(config.weight)), floor_bytes=config.kv_bytes))
            owner = judge(part.pool, root=self._root).owner
            info = owner.info if owner is not None and not owner.error else None
            candidates.append(Candidate(part.pool, info.start_capacity_bytes if info else 0, info.page_bytes if info else 0))
        return share_out(Plan(tuple(shares), budget_bytes=budget), candidates, gentle=True)

    async def _run(self) -> None:
        while True:
            await self._changed.wait()
            await asyncio.sleep(self._poll_s)  # several models often change together
            self._changed.clear()
            if self.devices:
                async with self._lock:
                    await self._share(self._holding())
