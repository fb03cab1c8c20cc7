"""The gate's face: one ASGI app that guards, passes model requests on, and answers the rest itself.

    request -> Guard (key, Host, Origin) -> a model path? -> Proxy
                                         -> else           -> Starlette routes (management, /v1/models)

Model requests skip Starlette's routing: they are nearly all there is, and one look into a set decides. Errors leave in
OpenAI's shape on model paths and in the peer's shape on management paths; this module is where an error becomes bytes.
"""

import asyncio
import logging
import re
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import aiohttp
import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from yarl import URL

from kvgate import openapi, prewarm
from kvgate.control import describe
from kvgate.errors import BadRequest, BodyTooLarge, Crowded, MethodNotAllowed, RequestError, Unavailable, UpstreamSilent
from kvgate.guard import PROBES
from kvgate.manage import Management, failed, json, retry_after
from kvgate.proxy import ClientGone, Proxy, Scope, read_body

if TYPE_CHECKING:
    from kvgate.serve import Gate

log = logging.getLogger("kvgate.front")
ENGINE_GET_S = 10.0
_OF_ENGINE = re.compile(r"/v1/cache/(engine|prewarm/[0-9A-Za-z_-]{1,64})")
"""GETs that an engine answers; its other paths are not the client's business."""

MODEL_PATHS = frozenset(
    {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/embeddings",
        "/v1/responses",
        "/v1/score",
        "/v1/rerank",
        prewarm.PATH,
        "/v1/cache/keys",
        "/v1/cache/why",
        "/tokenize",
        "/detokenize",
        "/classify",
        "/pooling",
    }
)
"""POST paths whose JSON body names a `model` and that an engine answers."""


class Front:
    """The ASGI app."""

    def __init__(self, gate: "Gate", proxy: Proxy) -> None:
        self._gate = gate
        self._proxy = proxy
        own = [Route("/v1/models", self.models), Route("/v1/models/{model:path}", self.model), Route("/openapi.json", self.openapi)]
        self.routes = [*own, *Management(gate).routes()]
        self._rest = Starlette(routes=self.routes, exception_handlers={HTTPException: _http_error, RequestError: _request_error})

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            # Lifespan is served by serve.py itself; nothing here speaks WebSocket, and closing is how one says so.
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1003})
            return
        path: str = scope["path"]
        model_path = path in MODEL_PATHS
        inference = model_path or path.startswith(("/v1/models", "/v1/cache/"))
        try:
            if len(self._gate.connections) > self._gate.config.max_connections and path not in PROBES:
                raise Crowded(
                    "too many connections are open", hint="close idle ones, or raise router.max_connections", retry_after_s=1
                )
            # What is cached says what others have asked: those paths are an operator's, whatever their shape.
            self._gate.guard.check(path, scope["headers"], inference=inference and not path.startswith("/v1/cache/"))
            if model_path and scope["method"] == "POST":
                await self._model_request(scope, receive, send)
            elif model_path:
                raise MethodNotAllowed(f"{path} takes POST")
            elif scope["method"] == "GET" and _OF_ENGINE.fullmatch(path):
                await self._ask_engine(scope, send)
            else:
                await self._rest(scope, receive, send)
        except RequestError as error:
            await _send(send, error, error.body() if inference else {"error": error.line})
        except ClientGone:
            pass
        except asyncio.CancelledError:
            me = asyncio.current_task()
            if not self._gate.draining or me is None:
                raise
            # The gate stops, and the time for requests is over: this one is told so, and needs no traceback in the log.
            me.uncancel()
            stopping = Unavailable("the gate is shutting down", retry_after_s=1)
            await _send(send, stopping, stopping.body() if inference else {"error": stopping.line})

    async def _model_request(self, scope: Scope, receive: Any, send: Any) -> None:
        config = self._gate.config
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit() and int(value) > config.max_body_bytes:
                raise BodyTooLarge(f"the request body is longer than {config.max_body_bytes} bytes")
        body = await read_body(receive, config.max_body_bytes, config.body_timeout_s)
        if scope["path"] == prewarm.PATH and prewarm.for_daemon(body):
            status, answer = await self._gate.prewarm.handle(body)
            await _send_json(send, status, answer)
            return
        await self._proxy.handle(scope, receive, send, body)

    async def _ask_engine(self, scope: Scope, send: Any) -> None:
        """What an engine says of a prewarm job or of itself: a GET names its model in the query, for it has no body."""
        query = parse_qs(scope["query_string"].decode("latin-1"))
        names = list(self._gate.router.backends)
        name = query.get("model", names if len(names) == 1 else [""])[0]
        if not name:
            raise BadRequest("model parameter is required", param="model", hint="add ?model=NAME")
        backend = self._gate.router.find(name)
        url = backend.config.endpoint.url + str(scope["path"])
        headers = {"authorization": f"Bearer {backend.config.api_key}"} if backend.config.api_key else {}
        try:
            async with asyncio.timeout(ENGINE_GET_S), self._gate.session.get(URL(url, encoded=True), headers=headers) as answer:
                body = await answer.read()
        except TimeoutError:
            raise UpstreamSilent(f"{backend.name}: no answer within {ENGINE_GET_S:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise Unavailable(f"{backend.name}: {describe(error)}", retry_after_s=backend.machine.retry_after_s) from None
        kept = [
            (b"content-type", (answer.content_type or "application/json").encode()),
            (b"content-length", str(len(body)).encode()),
        ]
        await send({"type": "http.response.start", "status": answer.status, "headers": kept})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def openapi(self, request: Request) -> Response:
        """GET /openapi.json"""
        return json(openapi.document(MODEL_PATHS, self._gate.router.backends))

    async def models(self, request: Request) -> Response:
        """GET /v1/models: the configured models, with what their engines say of them."""
        return json({"object": "list", "data": [self._card(name) for name in self._gate.router.backends]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{model}"""
        try:
            return json(self._card(self._gate.router.find(request.path_params["model"]).name))
        except RequestError as error:
            return Response(msgspec.json.encode(error.body()), error.status, media_type="application/json")

    def _card(self, name: str) -> dict[str, object]:
        backend = self._gate.router.backends[name]
        own = {"id": name, "object": "model", "created": int(self._gate.started_wall), "owned_by": "kvgate"}
        return {**own, **backend.card, "state": backend.machine.state}


async def _send(send: Any, error: RequestError, body: dict[str, object]) -> None:
    data = msgspec.json.encode(body)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    headers += [(name.encode(), value.encode()) for name, value in retry_after(error).items()]
    if error.status == 405:
        headers.append((b"allow", b"POST"))
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if error.closes:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": data, "more_body": False})


async def _send_json(send: Any, status: int, body: dict[str, object]) -> None:
    data = msgspec.json.encode(body)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data, "more_body": False})


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = f"{error.detail}: {request.method} {request.url.path[:200]}"
    if request.url.path.startswith("/v1/"):
        kind = "invalid_request_error"
        code = MethodNotAllowed.code if error.status_code == 405 else "not_found"
        return json(
            {"error": {"message": text, "type": kind, "param": None, "code": code}},
            error.status_code,
            dict(error.headers or {}),
        )
    return json({"error": text}, error.status_code, dict(error.headers or {}))


async def _request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return failed(error)
