"""The life of `kvgate serve`: what starts in which order, what a signal does, what stops in which order.

Start: configuration -> listener bound -> traffic monitor -> router with its sleep machines -> engines, in order -> idle
watch, stats segment -> requests are accepted. kvdoctor looks at the host meanwhile; its warnings are logged.
Stop (SIGTERM, SIGINT): not ready -> no new connections -> requests in flight finish, up to the deadline (10 s) -> idle
watch -> engines (SIGTERM, up to the deadline again, then their whole group) -> health watches and queues -> segments ->
client. A second signal ends the wait for requests. SIGHUP reloads models.yaml.

A configuration belongs to one gate: two would start its engines twice, on the same ports, and put each other's to sleep. So the
gate holds a flock on the file; after a reload on the file that was read then. Where an editor has put another file in its place
meanwhile, the stats segment, which is named after the path, tells of the gate that runs. `listen` and `claim` come before all else.

A reload that does not parse changes nothing and is reported. What is read at the start only (AT_START) is named when it changed.
"""

import asyncio
import contextlib
import errno
import fcntl
import gc
import logging
import os
import resource
import signal
import socket
import time
from collections.abc import Collection, Iterator
from pathlib import Path

import uvicorn

from kvgate import config as configuration
from kvgate import preflight
from kvgate.config import GateConfig
from kvgate.engines import Supervisor
from kvgate.errors import ConfigError
from kvgate.front import Front
from kvgate.guard import Guard, KeyRing, is_loopback
from kvgate.idle import IdleWatch
from kvgate.prewarm import Prewarm
from kvgate.protocol import BoundedProtocol
from kvgate.proxy import Proxy, new_session
from kvgate.publish import Publisher
from kvgate.room import Room
from kvgate.router import Reloaded, Router
from kvgate.traffic import TrafficMonitor
from kvtools.errors import KvError, Refused
from kvtools.segments.files import SHM, pid_namespace
from kvtools.segments.stats import instance_of_path, read_stats, stats_name

log = logging.getLogger("kvgate.serve")


class Claim:
    """The hold of a gate on its configuration: a lock on the file itself, whatever path leads to it."""

    def __init__(self, path: Path, *, root: Path = SHM) -> None:
        """Raises KvError where another gate has it. A pipe, or a file system without locks, is nobody's."""
        self._fd = -1
        if _served(path, root):
            raise _taken(path)
        self.renew(path)

    def renew(self, path: Path) -> None:
        """Hold the file that is there now, which an editor may have put in the place of the old one. Raises KvError."""
        try:
            if not path.is_file():
                return  # opening a pipe once more would take what its reader waits for
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return  # whoever reads it says what is wrong
        if self._fd >= 0 and os.path.sameopenfile(fd, self._fd):
            os.close(fd)
            return
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            if error.errno == errno.EWOULDBLOCK:
                raise _taken(path) from None
            return
        self.close()
        self._fd = fd

    def close(self) -> None:
        """Let go."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _taken(path: Path) -> KvError:
    return KvError(f"another kvgate serves {path}", hint="stop it first, or give this one a configuration of its own")


def _served(path: Path, root: Path) -> bool:
    """Whether a living gate beside us publishes for this path. One of another container may have another file there."""
    try:
        found = read_stats(stats_name("gate", instance_of_path(path)), root)
    except KvError:
        return False
    return found.alive and found.pid_namespace == pid_namespace() and found.pid != os.getpid()


AT_START = {
    "port": "router.router_port",
    "host": "router.router_host",
    "health_interval_s": "router.health_interval_seconds",
    "health_failures": "router.health_failures",
    "shutdown_timeout_s": "router.shutdown_timeout_seconds",
    "launch_delay_s": "launch_delay_seconds",
    "log_dir": "log_dir",
}
"""What a reload does not change, by its name in the file. Engines and models that are new use the new health settings."""


class Gate:
    """Everything that runs in one `kvgate serve`. Made inside the running loop."""

    def __init__(self, config: GateConfig, *, may_be_open: bool = True, claim: Claim | None = None) -> None:
        self.guard = _guard(config)  # first, for it may fail, and all else would have to be closed
        self.config = config
        self.claim = claim
        self.connections: Collection[object] = ()
        """The server's connections, once there is one."""
        self._started_with = config
        self._may_be_open = may_be_open
        self.started_wall = time.time()
        self.draining = False
        self.session = new_session()
        self.traffic = TrafficMonitor()
        self.router = Router(self.traffic, self.session)
        self.idle = IdleWatch(self.router)
        self.room = Room(self.router, config.devices)
        self.router.make_room, self.router.on_change = self.room.make, self.room.changed
        self.supervisor = Supervisor(self.router, config)
        self.publisher = Publisher(self.router, config.path)
        self.proxy = Proxy(self.router, self.session, hide_credentials=config.api_keys is not None)
        self.prewarm = Prewarm(self.router)
        self.app = Front(self, self.proxy)

    def start(self) -> None:
        """Begin to watch engines and idle models."""
        self.router.apply(self.config)
        self.supervisor.apply()
        self.idle.start()
        self.room.start()
        self.publisher.start()

    def reload(self) -> Reloaded:
        """Read the configuration again. Raises ConfigError and changes nothing when it cannot be meant."""
        if self.config.path.exists() and not self.config.path.is_file():
            # A pipe gave what it had at the start: reading it again would wait for ever, and with it every request.
            raise ConfigError(f"{self.config.path} is no regular file and cannot be read again", hint="restart the gate")
        config = configuration.load(self.config.path)
        if config.api_keys is None and not self._may_be_open:
            raise ConfigError("router.api_keys is gone, and other machines reach this gate", hint="restart it with --allow-open")
        guard = _guard(config)
        if self.claim is not None:
            self.claim.renew(config.path)
        done = self.router.apply(config)
        done.at_start = _at_start(self._started_with, config)
        self.supervisor.apply()
        self.room.devices = config.devices
        self.proxy.hide_credentials = config.api_keys is not None
        self.config, self.guard = config, guard
        allow_open_files(config.max_connections)
        told = [f"{what} {', '.join(names)}" for what in ("added", "removed", "changed") if (names := getattr(done, what))]
        log.info("reloaded: %s", "; ".join(told) or "no model changed")
        if done.at_start:
            log.warning("reloaded, but a restart is what it takes to change %s", ", ".join(done.at_start))
        return done

    async def stop(self) -> None:
        """Stop what `start` began, in the contract's order; requests have ended by now."""
        await self.idle.stop()
        await self.room.stop()
        if engines := len(self.supervisor.engines):
            log.info("requests have ended: ending %d engines, which have %g s", engines, self.config.shutdown_timeout_s)
        await self.supervisor.stop()
        await self.router.stop()
        await self.prewarm.stop()
        await self.publisher.stop()
        await self.session.close()


def _guard(config: GateConfig) -> Guard:
    keys = KeyRing.load(config.api_keys) if config.api_keys else None
    return Guard(keys, config.allowed_hosts, config.allowed_origins)


def _at_start(was: GateConfig, now: GateConfig) -> list[str]:
    """What has changed in the file since the start and stays as it was."""
    # Host and port may have been given by a flag: the file is compared with the file.
    file = {read.path: read.value for read in was.report}
    host_port = {"host": file.get("router.host", was.host), "port": file.get("router.port", was.port)}
    return [word for name, word in AT_START.items() if host_port.get(name, getattr(was, name)) != getattr(now, name)]


def listen(config: GateConfig, *, allow_open: bool) -> socket.socket:
    """The listening socket. Raises Refused off loopback without keys, ConfigError when the address is taken."""
    if not is_loopback(config.host) and config.api_keys is None and not allow_open:
        raise Refused(
            f"{config.host} can be reached from other machines, and there are no API keys",
            hint="set router.api_keys, or pass --allow-open to let everyone in",
        )
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((config.host, config.port))
        sock.listen(2048)
    except OSError as error:
        sock.close()
        hint = "stop what listens there, or choose another --port" if error.errno == errno.EADDRINUSE else "see --host and --port"
        raise ConfigError(f"cannot listen on {config.host}:{config.port}: {error.strerror}", hint=hint) from None
    sock.setblocking(False)
    return sock


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers: `serve` decides what a signal means."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def new_server(gate: Gate) -> uvicorn.Server:
    """The HTTP server in front of `gate`."""
    server = _Server(
        uvicorn.Config(
            gate.app,
            http=BoundedProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            # Longer than a reverse proxy keeps its connections: whoever closes first must not be us.
            timeout_keep_alive=75,
            # Nothing here looks at a client's address: forwarded headers go on as they came.
            proxy_headers=False,
            timeout_graceful_shutdown=max(1, int(gate.config.shutdown_timeout_s)),
        )
    )
    # Beyond router.max_connections the app answers, for uvicorn's own limit knows neither probes nor Retry-After.
    gate.connections = server.server_state.connections
    return server


def allow_open_files(connections: int) -> None:
    """Raise this process's limit of open files, as far as it may: a client takes one, and its engine another."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * connections + 256
    if soft != resource.RLIM_INFINITY and soft < wanted:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))


async def serve(config: GateConfig, sock: socket.socket, *, allow_open: bool = False, claim: Claim | None = None) -> None:
    """Serve until a signal says stop."""
    allow_open_files(config.max_connections)
    gate = Gate(config, may_be_open=allow_open or is_loopback(config.host), claim=claim)
    server = new_server(gate)
    loop = asyncio.get_running_loop()

    def stop() -> None:
        running = sum(backend.lane.running for backend in gate.router.backends.values())
        if gate.draining:
            log.info("stopping at once: %d requests are cut", running)
        else:
            log.info("stopping: %d requests have %g s to end", running, config.shutdown_timeout_s)
        server.force_exit = gate.draining
        gate.draining = server.should_exit = True

    def reload() -> None:
        try:
            gate.reload()
        except KvError as error:
            log.error("not reloaded, what was read before stays: %s%s", error.message, f" ({error.hint})" if error.hint else "")

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    loop.add_signal_handler(signal.SIGHUP, reload)
    gc.freeze()  # the modules are here for good: looking for garbage among them again and again costs a tenth of the CPU
    gate.start()
    preflight.start()
    host, port = sock.getsockname()[:2]
    log.info("serving %d models on %s", len(config.models), f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
    try:
        await server.serve(sockets=[sock])
    finally:
        gate.draining = True
        await gate.stop()
        log.info("stopped")
