"""One request, passed on: bytes in, bytes out, nothing re-encoded.

    read the body (bounded) -> which model -> a place in its lane -> engine -> status, headers and body as they come

What passes: the body unchanged; every header but hop-by-hop ones, Host and, when the gate has its own keys, the client's
credential. What comes back: the engine's status, headers and body bytes, still compressed when they were; SSE events leave
as they arrive. Flow control is end to end: a client that reads slowly stops the engine's sending, since `send` waits for
the client's socket and the engine's socket is read no further than 128 KiB ahead.

Failures:
- No connection: tried again, since nothing was sent; then 503, or the queue again where the engine is being started. Once a byte
  of the request may have left, never again.
- The engine is silent: 504 before the status line, a broken answer after it.
- The engine breaks off before its status line: 502. Inside an event stream the client gets an `error` event, which OpenAI
  clients raise; then, as for every broken body, the connection is closed without its proper end, so that half an
  answer never looks whole.
- The client goes away: the connection to the engine is closed at once, which makes vLLM abort the request.

Concurrency: each request is one task plus one that listens for the client's disconnect. The lane's place is given back
on every way out.
"""

import asyncio
import io
import logging
import re
import time
from collections.abc import Iterable
from typing import Any

import aiohttp
import msgspec
from yarl import URL

from kvgate.control import describe
from kvgate.errors import (
    BadRequest,
    BodyTooLarge,
    BodyTooSlow,
    NoConnection,
    RequestError,
    Unavailable,
    UpstreamBroken,
    UpstreamSilent,
)
from kvgate.router import Backend, Router
from kvgate.sleep import State
from kvgate.traffic import Ticket

log = logging.getLogger("kvgate.proxy")

Scope = dict[str, Any]
HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding upgrade".split()
)
NOT_FOR_THE_ENGINE = HOP_BY_HOP | {b"host", b"content-length", b"expect"}
CREDENTIALS = frozenset({b"authorization", b"x-api-key"})
READ_AHEAD = 64 << 10
TAIL = 2048
"""Bytes of an answer's end that are searched for the token counts."""
_PROMPT = re.compile(rb'"prompt_tokens"\s*:\s*(\d{1,12})')
_COMPLETION = re.compile(rb'"completion_tokens"\s*:\s*(\d{1,12})')
_SKIP = frozenset({"User-Agent", "Accept", "Accept-Encoding", "Content-Type"})


class _Named(msgspec.Struct):
    model: str


class ClientGone(Exception):
    """The client closed its connection; there is nobody to answer."""


def new_session() -> aiohttp.ClientSession:
    """The client for everything the gate asks of engines.

    No limit on connections (the lanes are the limit), no cookies, no proxies from the environment, no decompression.
    Idle connections are dropped after 3 s, before vLLM's server drops them after 5, so that a request never races with that.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0, ttl_dns_cache=60),
        timeout=aiohttp.ClientTimeout(total=None, sock_read=None),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=_SKIP,
        read_bufsize=READ_AHEAD,
        max_line_size=64 << 10,
        max_field_size=64 << 10,
    )


async def read_body(receive: Any, limit: int, timeout_s: float) -> bytes:
    """The whole request body. Raises BodyTooLarge, BodyTooSlow, ClientGone."""
    pieces: list[bytes] = []
    length = 0
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                piece = message.get("body", b"")
                length += len(piece)
                if length > limit:
                    raise BodyTooLarge(f"the request body is longer than {limit} bytes")
                pieces.append(piece)
                if not message.get("more_body"):
                    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
    except TimeoutError:
        raise BodyTooSlow(f"the request body did not arrive within {timeout_s:g} s") from None


def model_of(body: bytes) -> str:
    """The `model` of a JSON request. Raises BadRequest."""
    try:
        return msgspec.json.decode(body, type=_Named).model
    except msgspec.ValidationError:
        raise BadRequest("model parameter is required", param="model") from None
    except (msgspec.DecodeError, RecursionError):
        raise BadRequest("the request body is not JSON") from None


class Proxy:
    """Passes requests on to the router's backends."""

    def __init__(self, router: Router, session: aiohttp.ClientSession, *, hide_credentials: bool = False) -> None:
        self.router = router
        self.session = session
        self.hide_credentials = hide_credentials

    async def handle(self, scope: Scope, receive: Any, send: Any, body: bytes) -> None:
        """Answer one request whose body has been read. Raises RequestError while nothing has been answered yet."""
        backend = self.router.find(model_of(body))
        ticket = self.router.traffic.begin(backend.name)
        me = asyncio.current_task()
        assert me is not None
        listener = asyncio.ensure_future(_listen(receive, me))
        answer = Answer(send, ticket)
        try:
            await self._pass_on(backend, scope, body, answer)
        except asyncio.CancelledError:
            if not listener.done() or listener.cancelled():
                # The gate is shutting down, past its deadline: what is left of this task is to tell the client.
                me.uncancel()
                await answer.refuse(Unavailable(f"{backend.name}: the gate is shutting down", retry_after_s=1.0))
            else:
                me.uncancel()
                ticket.gone(sent=answer.sent)
        except RequestError as error:
            if answer.started:
                backend.poke()
            await answer.refuse(error)
        finally:
            # Whatever went wrong, the request is over: one that stays in flight would keep its model awake for ever.
            ticket.finish(ok=False, sent=answer.sent)
            listener.cancel()

    async def _pass_on(self, backend: Backend, scope: Scope, body: bytes, answer: "Answer") -> None:
        limits = backend.config.limits
        deadline = time.monotonic() + limits.queue_timeout_s
        while not answer.started:
            await backend.lane.enter(max(0.0, deadline - time.monotonic()))
            try:
                upstream = await self._ask(backend, scope, body, deadline)
                try:
                    await answer.relay(upstream, backend)
                finally:
                    # Closing what was read to its end gives the connection back; anything else drops it.
                    upstream.release() if upstream.content.at_eof() else upstream.close()
            except NoConnection:
                # Its engine died a moment ago and is started again: wait for it, as those who come now do.
                if backend.machine.state is not State.STARTING:
                    raise
            finally:
                backend.lane.leave()

    async def _ask(self, backend: Backend, scope: Scope, body: bytes, deadline: float) -> aiohttp.ClientResponse:
        """Send the request and wait for the status line."""
        limits = backend.config.limits
        query = scope["query_string"].decode("latin-1")
        # Already encoded, and to stay so: byte for byte what the client wrote.
        url = URL(backend.config.endpoint.url + scope["raw_path"].decode("latin-1") + (f"?{query}" if query else ""), encoded=True)
        headers = self._headers(backend, scope["headers"])
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=limits.connect_timeout_s, sock_read=None)
        for number in range(1, limits.connect_tries + 1):
            try:
                async with asyncio.timeout(limits.first_byte_timeout_s):
                    # aiohttp sends a file in pieces, and warns when it is handed more than 1 MiB at once.
                    data = body if len(body) <= 1 << 20 else io.BytesIO(body)
                    upstream = await self.session.request(
                        "POST", url, data=data, headers=headers, timeout=timeout, allow_redirects=False
                    )
                    return _final(backend.name, upstream)
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
                # No connection, so not one byte was sent: the only failure after which asking again is safe.
                backend.poke()
                if number == limits.connect_tries or time.monotonic() >= deadline:
                    raise NoConnection(f"{backend.name}: {describe(error)}", retry_after_s=backend.machine.retry_after_s) from None
                await asyncio.sleep(0.05 * 2**number)
            except TimeoutError:
                backend.poke()
                raise UpstreamSilent(f"{backend.name}: no answer began within {limits.first_byte_timeout_s:g} s") from None
            except (aiohttp.ClientError, OSError) as error:
                backend.poke()
                raise UpstreamBroken(f"{backend.name}: the engine broke off before it answered: {describe(error)}") from None
        raise AssertionError("connect_tries is at least 1")

    def _headers(self, backend: Backend, given: Iterable[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
        given = list(given)
        drop: frozenset[bytes] | set[bytes] = NOT_FOR_THE_ENGINE
        if named := [value for name, value in given if name == b"connection"]:
            drop = {*drop, *(word.strip().lower() for value in named for word in value.split(b","))}
        if self.hide_credentials or backend.config.api_key:
            drop = drop | CREDENTIALS
        headers = [(name.decode("latin-1"), _text(value)) for name, value in given if name not in drop]
        if backend.config.api_key:
            headers.append(("authorization", f"Bearer {backend.config.api_key}"))
        return headers


def _text(value: bytes) -> str:
    """A header's value as the text that aiohttp, which writes UTF-8, turns into the same bytes again, where there is one."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def _final(name: str, upstream: aiohttp.ClientResponse) -> aiohttp.ClientResponse:
    """`upstream`, if its status is one that ends a request. Raises UpstreamBroken: nobody asked for another protocol, and
    what HTTP does not know cannot be passed on."""
    if 200 <= upstream.status <= 599:
        return upstream
    upstream.close()
    raise UpstreamBroken(f"{name}: the engine answered with status {upstream.status}, which answers no request")


async def _listen(receive: Any, request: "asyncio.Task[Any]") -> None:
    """Wait for the client to go away, and cancel its request then."""
    while (await receive())["type"] != "http.disconnect":
        pass
    request.cancel()


class Answer:
    """The way back to one client."""

    def __init__(self, send: Any, ticket: Ticket) -> None:
        self._send = send
        self._ticket = ticket
        self.started = False
        self.sent = 0
        self._events = False

    async def relay(self, upstream: aiohttp.ClientResponse, backend: Backend) -> None:
        """Pass on status, headers and body. Raises UpstreamSilent or UpstreamBroken when the body stops short."""
        self._events = upstream.content_type == "text/event-stream"
        ticket, send, content = self._ticket, self._send, upstream.content
        drop: frozenset[bytes] | set[bytes] = HOP_BY_HOP
        if named := upstream.headers.getall("connection", ()):
            drop = {*drop, *(word.strip().lower().encode() for value in named for word in value.split(","))}
        headers = [(name.lower(), value) for name, value in upstream.raw_headers if name.lower() not in drop]
        idle_s = backend.config.limits.idle_timeout_s
        clock = asyncio.get_running_loop().time
        tail = b""
        try:
            async with asyncio.timeout(idle_s) as silence:
                self.started = True
                await send({"type": "http.response.start", "status": upstream.status, "headers": headers})
                piece = await content.readany()
                ticket.first_byte()
                while piece:
                    last = content.at_eof()
                    # A client that reads slowly is not an engine that is silent: the clock stands while we send.
                    silence.reschedule(None)
                    self.sent += len(piece)
                    tail = piece[-TAIL:] if len(piece) >= TAIL else (tail + piece)[-TAIL:]
                    if self._events:
                        ticket.chunks += piece.count(b"data:")
                    if last:
                        break  # short answers arrive whole: one write less
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                    silence.reschedule(clock() + idle_s)
                    piece = await content.readany()
        except TimeoutError:
            raise UpstreamSilent(f"{backend.name}: the engine was silent for {idle_s:g} s inside its answer") from None
        except (aiohttp.ClientError, OSError) as error:
            raise UpstreamBroken(f"{backend.name}: the engine broke off inside its answer: {describe(error)}") from None
        ticket.finish(
            upstream.status < 400, sent=self.sent, prompt_tokens=_last(_PROMPT, tail), completion_tokens=_last(_COMPLETION, tail)
        )
        await send({"type": "http.response.body", "body": piece, "more_body": False})

    async def refuse(self, error: RequestError) -> None:
        """End with `error`: raise it while nothing has been answered yet, else tell an event stream's reader why it ends here.

        The connection is then closed without a proper end.
        """
        self._ticket.finish(ok=False, sent=self.sent)
        if not self.started:
            raise error
        log.warning("%s", error.message)
        if self._events:
            event = b"\n\ndata: " + msgspec.json.encode(error.body()) + b"\n\n"
            await self._send({"type": "http.response.body", "body": event, "more_body": True})
        # Returning without `more_body: False` makes the server close the connection in the middle of the body.


def _last(pattern: re.Pattern[bytes], tail: bytes) -> int:
    found = pattern.findall(tail)
    return int(found[-1]) if found else 0
