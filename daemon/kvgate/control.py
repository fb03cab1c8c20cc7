"""The management side of one engine: is it up, is it asleep, put it to sleep, wake it. vLLM's endpoints, nothing else.

    GET  /health                        200: serves
    GET  /is_sleeping                   {"is_sleeping": bool}; 404: started without VLLM_SERVER_DEV_MODE=1
    POST /sleep?level=1&mode=abort      parameters are read from the query string only
    POST /wake_up?tags=weights&tags=kv_cache
    POST /collective_rpc                {"method": "reload_weights"}, after a sleep at level 2
    POST /reset_prefix_cache            the KV it indexes is gone after a sleep
    GET  /metrics                       vllm:num_requests_running and _waiting: work that did not come through the gate

Every call is bounded in time and answers or raises EngineError; NotSupported is a 404 or 405.
"""

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Protocol

import aiohttp
import msgspec

from kvgate.errors import EngineError, NotSupported

_MAX_ANSWER = 4 << 20
_BUSY = re.compile(rb"^vllm:num_requests_(?:running|waiting)(?:\{[^}\n]*\})? ([0-9.eE+]+)\s*$", re.MULTILINE)


class _Sleeping(msgspec.Struct):
    is_sleeping: bool


class Control(Protocol):
    """What the sleep machine needs of an engine. Every method may raise EngineError."""

    async def healthy(self) -> bool: ...
    async def is_sleeping(self) -> bool: ...
    async def busy(self) -> int: ...
    async def sleep(self, level: int, mode: str, timeout_s: float) -> None: ...
    async def wake(self, tags: Sequence[str], level: int, timeout_s: float) -> None: ...


class HttpControl:
    """`Control` over HTTP."""

    def __init__(self, session: aiohttp.ClientSession, url: str, *, api_key: str = "", timeout_s: float = 5.0) -> None:
        self._session = session
        self._url = url
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout_s = timeout_s

    async def healthy(self) -> bool:
        """Whether the engine answers /health with 200, or answers but has no such path; never raises."""
        try:
            status, _ = await self._call("GET", "/health", timeout_s=self._timeout_s)
        except EngineError:
            return False
        return status in {200, 404, 405}

    async def is_sleeping(self) -> bool:
        body = await self._ok("GET", "/is_sleeping", timeout_s=self._timeout_s)
        try:
            return msgspec.json.decode(body, type=_Sleeping).is_sleeping
        except msgspec.DecodeError as error:
            raise EngineError(f"/is_sleeping answered {body[:80]!r}: {error}") from None

    async def busy(self) -> int:
        """Requests running or waiting inside the engine; 0 when it does not say."""
        status, body = await self._call("GET", "/metrics", timeout_s=self._timeout_s)
        if status != 200:
            return 0
        return int(sum(float(number) for number in _BUSY.findall(body)))

    async def models(self) -> list[dict[str, object]]:
        """The engine's own /v1/models cards."""
        body = await self._ok("GET", "/v1/models", timeout_s=self._timeout_s)
        try:
            found = msgspec.json.decode(body)["data"]
        except (msgspec.DecodeError, KeyError, TypeError):
            return []
        return [card for card in found if isinstance(card, dict)] if isinstance(found, list) else []

    async def sleep(self, level: int, mode: str, timeout_s: float) -> None:
        query = [("level", str(level)), *([("mode", mode)] if mode else [])]
        await self._ok("POST", "/sleep", query=query, timeout_s=timeout_s)

    async def wake(self, tags: Sequence[str], level: int, timeout_s: float) -> None:
        """Wake up (only what `tags` name, where given). After level 2 the weights are loaded again before the KV cache."""
        async with asyncio.timeout(timeout_s):
            if level < 2 or tags:
                await self._ok("POST", "/wake_up", query=[("tags", tag) for tag in tags], timeout_s=timeout_s)
            else:
                await self._ok("POST", "/wake_up", query=[("tags", "weights")], timeout_s=timeout_s)
                await self._ok("POST", "/collective_rpc", json={"method": "reload_weights"}, timeout_s=timeout_s)
                await self._ok("POST", "/wake_up", query=[("tags", "kv_cache")], timeout_s=timeout_s)
            try:
                await self._ok("POST", "/reset_prefix_cache", timeout_s=timeout_s)
            except NotSupported:
                pass  # an engine without a prefix cache has nothing stale to forget

    async def _ok(
        self,
        method: str,
        path: str,
        *,
        query: Sequence[tuple[str, str]] = (),
        json: Mapping[str, object] | None = None,
        timeout_s: float,
    ) -> bytes:
        status, body = await self._call(method, path, query=query, json=json, timeout_s=timeout_s)
        if status in {404, 405}:
            raise NotSupported(
                f"{method} {path}: HTTP {status}", hint="start the engine with VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode"
            )
        if status >= 300:
            raise EngineError(f"{method} {path}: HTTP {status}: {body[:200].decode('utf-8', 'replace').strip()}")
        return body

    async def _call(
        self,
        method: str,
        path: str,
        *,
        query: Sequence[tuple[str, str]] = (),
        json: Mapping[str, object] | None = None,
        timeout_s: float,
    ) -> tuple[int, bytes]:
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.request(
                    method, self._url + path, params=query, json=json, headers=self._headers, allow_redirects=False
                ) as answer,
            ):
                return answer.status, await _read(answer)
        except TimeoutError:
            raise EngineError(f"{method} {path}: no answer within {timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise EngineError(f"{method} {path}: {describe(error)}") from None


async def _read(answer: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for piece in answer.content.iter_any():
        body += piece
        if len(body) > _MAX_ANSWER:
            raise EngineError(f"{answer.url.path}: the answer is longer than {_MAX_ANSWER >> 20} MiB")
    return bytes(body)


def describe(error: BaseException) -> str:
    """A client error in few words, without this host's addresses twice."""
    if isinstance(error, aiohttp.ClientConnectorError) and error.os_error.strerror:
        return f"cannot connect to {error.host}:{error.port}: {error.os_error.strerror}"
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "it closed the connection"
    if isinstance(error, aiohttp.ClientPayloadError):
        return "it closed the connection in mid-answer, or what it sent is no HTTP"
    if isinstance(error, aiohttp.ClientResponseError):
        return f"what it sent is no HTTP: {' '.join(error.message.split('  ')[0].split()).rstrip(':')}"
    return str(error) or type(error).__name__
