"""The daemon: puts arena, store, tiers and server together, and takes them apart in the right order.

Start: lock the socket's path, make the arena, open the tiers (recovery), publish the stats segment, listen, say ready.
Nothing is answered before recovery is done, and the socket does not exist before it is answered on.

Stop (SIGTERM, SIGINT, or `kvd drain`): take no new writes, push what is on its way to the tiers until the drain deadline,
let the tiers write what makes the next start quick, remove socket and stats segment. A second signal stops at once: that
is safe too, the next start recovers. Told during recovery, the daemon ends when that is done, and serves nobody.
"""

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvd.service import stats
from kvd.service.http import Window, exposition
from kvd.service.operations import Operations
from kvd.service.server import Server
from kvd.store.arena import SHMEM_PAGES, Arena
from kvd.store.room import Rooms
from kvd.store.slab import Slab
from kvd.store.store import Store
from kvd.tiers.adapters.base import Adapter
from kvd.tiers.policies import Asking
from kvd.tiers.tier import IN_FLIGHT
from kvd.tiers.tiering import Flushed, Tiering
from kvtools import __version__
from kvtools.errors import KvError
from kvtools.segments.files import SHM
from kvtools.segments.stats import instance_of_path
from kvtools.units import format_size

log = logging.getLogger("kvd")

TICK_S = 0.1
HEARTBEAT_S = 0.5


@dataclass
class Options:
    """What `kvd serve` was told. Sizes in bytes."""

    socket: Path
    max_bytes: int
    adapters: Sequence[Adapter] = ()
    socket_mode: int = 0o600
    socket_group: int | None = None
    allow_uids: frozenset[int] = frozenset()
    allow_gids: frozenset[int] = frozenset()
    huge_pages: bool = False
    mlock: bool = False
    numa_node: int | None = None
    gds_l1_path: Path | None = None
    """Folder of an arena on NVMe, instead of one in RAM."""
    drain_s: float = 20.0
    evicting: bool = True
    promote: bool = False
    scan_resistant: bool = False
    watermark: float | None = None
    eviction_ratio: float = 0.2
    policies: Asking | None = None
    prefetch_in_flight: int = IN_FLIGHT
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = None
    shm: Path = field(default=SHM)
    reload: "Callable[[], Options] | None" = None
    """Reads the settings anew, for SIGHUP."""
    waiting: Sequence[str] = ()
    """After that: settings that have another value now than at the start, and need a restart."""
    preflight: "Callable[[], Sequence[str]] | None" = None
    """What this host does not do well for these settings, a line each; asked on a thread once the daemon is ready."""


class Daemon:
    """One running daemon. `run` returns when it has stopped."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._stopping = asyncio.Event()
        self._hurry = asyncio.Event()
        self._stopped = False  # the tiers are closed
        self._fresh = False  # a publication is already planned
        self._publisher: stats.Publisher | None = None
        self._published = 0.0
        self._window: Window | None = None
        self._started_ns = time.time_ns()

    async def run(self) -> None:
        """Serve until told to stop. Raises what keeps it from starting (KvdError, UsageError, AdapterError)."""
        options, loop = self.options, asyncio.get_running_loop()
        arena = self._make_arena()
        self.store = Store(arena, scan_resistant=options.scan_resistant)
        self._take_over(options)
        rooms = Rooms(self.store)
        self.tiering = Tiering(
            self.store, rooms, promote=options.promote, policies=options.policies, in_flight=options.prefetch_in_flight
        )
        instance = instance_of_path(options.socket)
        self.operations = Operations(self.store, self.tiering, instance=instance, changed=self._changed, info=self._info)
        self.operations.drain = self.drain
        self.server = Server(
            options.socket,
            self.operations,
            mode=options.socket_mode,
            group=options.socket_group,
            uids=options.allow_uids,
            gids=options.allow_gids,
        )
        self.server.lock()
        try:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._signalled, number)
            loop.add_signal_handler(signal.SIGHUP, self._reload)
            await self._unless_told_twice(self.tiering.open(options.adapters))
            if self._stopping.is_set():
                log.info("told to stop while recovering: nobody was served")
                await self._stop()
                return
            table = stats.Table(self.store, self.tiering, self.server, self.operations)
            self._publisher = stats.Publisher(table, instance, root=options.shm)
            await self._open_window()
            self.server.bind()
            self.server.start()
            notify("READY=1")
            log.info("kvd %s serves %s with an arena of %s", __version__, options.socket, format_size(arena.capacity))
            if options.gds_l1_path is None and not arena.large_pages:
                log.info("the arena has pages of 4 KiB; copies are faster with 2 MiB: echo advise > %s", SHMEM_PAGES)
            ticking = loop.create_task(self._tick())
            if options.preflight is not None:
                loop.run_in_executor(None, self._look_at_host, options.preflight)
            await self._stopping.wait()
            await self._stop()
            ticking.cancel()
        finally:
            if self._window is not None:
                await self._window.close()
            await self.server.close()
            if self._publisher is not None:
                self._publisher.close()
            with contextlib.suppress(Exception):  # the process edge: nothing here may hide what ended the daemon
                await self.tiering.close(0.5)
            rooms.close()
            arena.close()

    def _make_arena(self) -> Arena:
        options = self.options
        if options.gds_l1_path is not None:
            return Slab(options.gds_l1_path, options.max_bytes)
        return Arena(options.max_bytes, huge=options.huge_pages, mlock=options.mlock, numa_node=options.numa_node)

    async def _open_window(self) -> None:
        if self.options.metrics_port is None:
            return
        window = Window(
            self.options.metrics_host,
            self.options.metrics_port,
            {
                "/metrics": lambda: (
                    200,
                    "text/plain; version=0.0.4",
                    exposition(self._publisher.rows if self._publisher else []),
                ),
                "/healthz": lambda: (200, "text/plain", "ok\n"),
                "/readyz": lambda: (503, "text/plain", "draining\n") if self.store.draining else (200, "text/plain", "ready\n"),
            },
        )
        await window.start()
        self._window = window

    async def _stop(self) -> None:
        notify("STOPPING=1")
        log.info("stopping: no new writes, %.0f s for what is on its way to tiers", self.options.drain_s)
        self.store.draining = True
        await self._unless_told_twice(self.tiering.close(self.options.drain_s))
        self._stopped = True
        self.tiering.tiers.clear()

    async def _unless_told_twice(self, work: Coroutine[Any, Any, None]) -> None:
        """Do what may take long; the second signal ends the process at once, whatever thread is inside a tier's call."""
        working, hurry = asyncio.create_task(work), asyncio.create_task(self._hurry.wait())
        await asyncio.wait([working, hurry], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            log.warning("told twice: stopping at once")
            os._exit(1)
        hurry.cancel()
        await working

    def _signalled(self, number: int) -> None:
        if self._stopping.is_set():
            self._hurry.set()
        else:
            log.info("%s", signal.Signals(number).name)
            self._stopping.set()

    def _take_over(self, options: Options) -> None:
        """What of eviction can change while running."""
        self.store.evicting = options.evicting
        self.store.watermark, self.store.ratio = options.watermark, options.eviction_ratio

    def _look_at_host(self, preflight: Callable[[], Sequence[str]]) -> None:
        try:
            for line in preflight():
                log.warning("%s", line)
        except Exception:  # a thread edge: advice that cannot be given must not harm the daemon
            log.debug("the preflight failed", exc_info=True)

    def _reload(self) -> None:
        """SIGHUP: take over what can change while running, and say what cannot."""
        if self.options.reload is None:
            return
        try:
            new = self.options.reload()
        except KvError as error:
            log.error("the settings were not reloaded: %s", error.message)
            return
        self.options = dataclasses.replace(
            self.options, allow_uids=new.allow_uids, allow_gids=new.allow_gids, drain_s=new.drain_s, evicting=new.evicting
        )
        self.server.allow(new.allow_uids, new.allow_gids)
        self._take_over(new)
        log.info("settings reloaded%s", f"; these wait for a restart: {', '.join(new.waiting)}" if new.waiting else "")

    async def drain(self) -> Flushed:
        """Take no new writes and push everything to the tiers; see `Tiering.flush` for the answer."""
        self.store.draining = True
        self._changed()
        return await self.tiering.flush()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            for work in (self.store.tick, self.tiering.tick, self.operations.direct.tick, self._publish_due):
                try:
                    work()
                except Exception:  # a tick edge: the rest of it, and the next one, must come
                    errors = self.store.counts.tick_errors = self.store.counts.tick_errors + 1
                    if errors & (errors - 1) == 0:  # ten a second would fill the log
                        log.exception("periodic work failed unexpectedly (%d times so far)", errors)

    def _publish_due(self) -> None:
        if time.monotonic() - self._published > HEARTBEAT_S:
            self._publish()

    def _changed(self) -> None:
        if not self._fresh:
            self._fresh = True
            asyncio.get_running_loop().call_later(stats.PUBLISH_S, self._publish)

    def _publish(self) -> None:
        self._fresh = False
        self._published = time.monotonic()
        if self._publisher is not None and not self._stopped:
            self._publisher.publish()

    def _info(self) -> dict[str, Any]:
        body = stats.of_rows(self._publisher.rows) if self._publisher else {}
        body["server"] = f"kvd {__version__}"
        body["pid"] = os.getpid()
        body["socket"] = str(self.options.socket)
        body["uptime_s"] = (time.time_ns() - self._started_ns) / 1e9
        for row, tier in zip(body.get("tiers", []), self.tiering.tiers, strict=False):
            row["breaker_reason"] = tier.breaker.reason
            row.update({k: v for k, v in tier.adapter.describe().items() if k not in row})
        return body


def notify(state: str) -> None:
    """Tell systemd, where it started us (sd_notify: one datagram to $NOTIFY_SOCKET)."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path:
        return
    address = "\0" + path[1:] if path.startswith("@") else path
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as link:
        link.connect(address)
        link.send(state.encode())
