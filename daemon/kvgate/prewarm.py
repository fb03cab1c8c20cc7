"""`POST /v1/cache/prewarm` straight to kvd: bring values up from the tiers without asking, or waking, the engine.

    {"model", "keys": [64 hex digits, ...], "namespaces": [64 hex digits, ...], "deadline_s": 30, "wait": false}

A body with `keys` is meant for the daemon: the engine's own `/v1/cache/keys` says once what a prompt's keys and namespaces
are, and from then on its chunks can be warmed here, also while the model sleeps. Any other body (messages, a prompt, token
ids, block hashes) goes to the engine like every model request, since only the engine can turn it into keys.

The answer is 202 as soon as the daemon was reached, or with `wait` 200 when the values have arrived. Work runs on threads
(a prefetch waits in its call), at most `MAX_JOBS` at once for the whole gate; more are refused with 429. It counts as no
request of the model, so an idle model stays idle. Failures: 400 what cannot be meant, 503 no `kvd_socket` or no daemon there.
"""

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from kvd.errors import KvdError
from kvgate.errors import BadRequest, QueueFull, Unavailable
from kvgate.router import Router
from kvtools.errors import KvError

if TYPE_CHECKING:
    from kvd.wire.aclient import AsyncClient

log = logging.getLogger("kvgate.prewarm")

PATH = "/v1/cache/prewarm"
MAX_KEYS = 65_536
"""Keys times namespaces of one request."""
MAX_JOBS = 8
MAX_DEADLINE_S = 600.0
PING_S = 5.0
"""As long as kvd's own client waits: a busy daemon is none that hangs."""
CALL_S = 2.0
"""One call to the daemon at most, so that a gate that stops waits for no prefetch."""


class _Body(msgspec.Struct):
    model: str
    keys: list[str]
    namespaces: list[str] = []
    deadline_s: float = 30.0
    wait: bool = False


class _Asks(msgspec.Struct):
    """Enough of a body to see whom it is for."""

    keys: Any = msgspec.UNSET


def for_daemon(body: bytes) -> bool:
    """Whether a prewarm body names keys, so that the daemon can be asked without the engine."""
    try:
        return msgspec.json.decode(body, type=_Asks).keys is not msgspec.UNSET
    except (msgspec.DecodeError, RecursionError):
        return False  # the proxy says what is wrong with it


@dataclass(frozen=True, slots=True)
class Asked:
    """A prewarm that can be meant."""

    model: str
    keys: tuple[bytes, ...]
    namespaces: tuple[bytes, ...]
    deadline_s: float
    wait: bool


def read(body: bytes) -> Asked:
    """Check a body. Raises BadRequest, naming the field."""
    try:
        found = msgspec.json.decode(body, type=_Body)
    except msgspec.ValidationError as error:
        field = str(error).rpartition("$.")[2].partition("[")[0].strip("`") if "$." in str(error) else "model"
        raise BadRequest(str(error), param=field) from None
    if not found.namespaces:
        raise BadRequest("namespaces is needed", param="namespaces", hint="the engine's /v1/cache/keys names them beside the keys")
    if not 0 < found.deadline_s <= MAX_DEADLINE_S:
        raise BadRequest(f"deadline_s is a number of seconds above 0 and up to {MAX_DEADLINE_S:g}", param="deadline_s")
    if len(found.keys) * len(found.namespaces) > MAX_KEYS:
        raise BadRequest(f"more than {MAX_KEYS} keys in all namespaces together", param="keys", hint="ask in parts")
    keys = tuple(dict.fromkeys(_digest(text, "keys") for text in found.keys))
    namespaces = tuple(dict.fromkeys(_digest(text, "namespaces") for text in found.namespaces))
    return Asked(found.model, keys, namespaces, found.deadline_s, found.wait)


def _digest(text: str, field: str) -> bytes:
    try:
        value = bytes.fromhex(text)
    except ValueError:
        value = b""
    if len(value) != 32 or len(text) != 64:
        raise BadRequest(f"{field}: {text[:80]!r} is not 64 hexadecimal digits", param=field)
    return value


class Prewarm:
    """Asks daemons, one client a socket. Belongs to the event loop."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._clients: dict[str, AsyncClient] = {}
        self._jobs: set[asyncio.Task[int]] = set()

    async def handle(self, body: bytes) -> tuple[int, dict[str, object]]:
        """Status and answer of one request. Raises RequestError."""
        asked = read(body)
        backend = self._router.find(asked.model)
        socket = backend.config.kvd_socket
        if not socket:
            raise Unavailable(f"{backend.name}: no kvd_socket is configured", hint="set it beside the model in models.yaml")
        if len(self._jobs) >= MAX_JOBS:
            raise QueueFull(f"{MAX_JOBS} prewarm requests are running already", retry_after_s=1.0)
        client = self._client(socket)
        try:
            async with asyncio.timeout(PING_S):
                await client.ping()
        except (TimeoutError, KvError, OSError) as error:
            raise Unavailable(f"{backend.name}: no kvd answers at {socket}", hint=_why(error), retry_after_s=1.0) from None
        job = asyncio.ensure_future(self._run(client, asked))
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)
        told: dict[str, object] = {"accepted": True, "n_keys": len(asked.keys), "namespaces": len(asked.namespaces)}
        if not asked.wait:
            return 202, told
        # The client may leave: what was begun goes on, as without `wait`.
        return 200, {**told, "resident": await asyncio.shield(job)}

    async def _run(self, client: "AsyncClient", asked: Asked) -> int:
        """How many values are in the arena at the end, of all namespaces together."""
        loop = asyncio.get_running_loop()
        end = loop.time() + asked.deadline_s
        arrived = 0
        try:
            for namespace in asked.namespaces:
                here = 0
                while (left := end - loop.time()) > 0 and here < len(asked.keys):
                    begun, patience = loop.time(), min(left, CALL_S)
                    here = int(await client.prefetch(asked.keys, deadline_s=patience, namespace=namespace))
                    if loop.time() - begun < patience:
                        break  # it did not wait to the end: the rest is nowhere, or has no room
                arrived += here
        except (KvdError, KvError, OSError) as error:
            log.warning("prewarm for %s broke off after %d values: %s", asked.model, arrived, error)
        return arrived

    def _client(self, socket: str) -> "AsyncClient":
        # Only here: most gates never prewarm by keys, and the client brings numpy.
        from kvd.wire.aclient import AsyncClient

        if socket not in self._clients:
            self._clients[socket] = AsyncClient(socket, threads=MAX_JOBS + 1)
        return self._clients[socket]

    async def stop(self) -> None:
        """Leave what runs to itself and hang up."""
        for job in self._jobs:
            job.cancel()
        await asyncio.gather(*self._jobs, return_exceptions=True)
        for client in self._clients.values():
            await client.close()


def _why(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {PING_S:g} s"
    return error.message if isinstance(error, KvError) else str(error)
