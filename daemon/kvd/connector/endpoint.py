"""kvd's routes on the engine's own OpenAI server: the entry point `vllm.endpoint_plugins` "kvd".

vLLM loads it only where it is named: VLLM_PLUGINS=kvd (with the other plug-ins' names, where there are some).

    POST /v1/cache/prewarm         bring a prompt's chunks up from the tiers: 202 with a job
    GET  /v1/cache/prewarm/{id}    how far it is
    POST /v1/cache/why             chunk by chunk, where a prompt is and why not
    POST /v1/cache/keys            its block hashes, chunk keys and namespaces
    GET  /v1/cache/engine          what this engine is, and the canary of its block hashes

They stand below /v1 so that the server's API key guards them. A prompt becomes tokens in the engine's own renderer and
block hashes in the engine's own function, so that keys are those the engine will use; nothing is generated, and no request
reaches the scheduler. What the workers know comes through `collective_rpc`; the daemon is asked on threads of our own.

Errors have the shape of the server's own: 400 a body that cannot be meant, 404 an unknown model or job, 409 this engine
cannot say (no connector, its cache not stored, its hash seed unknown), 429 too many jobs, 503 no daemon.
"""

import asyncio
import json
import logging
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from kvd.connector import hashing
from kvd.connector.asked import Asked, BadBody, read
from kvd.connector.describe import METHOD, engine_view
from kvd.connector.events import Watch
from kvd.connector.explain import explain
from kvd.connector.keys import Span
from kvd.connector.link import Down, Link, wait_up
from kvd.connector.lora import Adapters
from kvd.connector.prewarm import Busy, Prewarmer
from kvd.connector.prompt import Prompt, Refusal, prompt_of
from kvd.connector.view import HashSource, NotAView, View
from kvd.errors import KvdError

logger = logging.getLogger("vllm.kvd")

RPC_S = 10.0
CALL_S = 5.0
"""Less than `kvd why` waits for this server: that the daemon is silent must not look as if the engine were."""
CONNECT_S = 2.0


class KvdEndpoint:
    """The plug-in: see vLLM's plugins/endpoint_plugins/interface.py."""

    name = "kvd"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._engine: Any = None
        self._state: Any = None
        self._link: Link | None = None
        self._prewarmer: Prewarmer | None = None
        self._watch = Watch()
        self._adapters = Adapters()

    def attach_router(self, app: FastAPI) -> None:
        app.add_api_route("/v1/cache/prewarm", self.prewarm, methods=["POST"])
        app.add_api_route("/v1/cache/prewarm/{job_id}", self.job, methods=["GET"])
        app.add_api_route("/v1/cache/why", self.why, methods=["POST"])
        app.add_api_route("/v1/cache/keys", self.keys, methods=["POST"])
        app.add_api_route("/v1/cache/engine", self.engine, methods=["GET"])

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        self._engine, self._state = engine_client, state
        if engine_client is not None:
            self._watch.start(engine_client)

    # ---- routes ------------------------------------------------------------------------------------------------------

    async def prewarm(self, request: Request) -> JSONResponse:
        try:
            asked = await _body(request)
            view, prompt = await self._understood(asked)
            jobs = await self._jobs(view)
            job = jobs.start(
                view,
                prompt.hashes,
                prompt.tokens,
                tenant=prompt.whose,
                max_bytes=asked.max_bytes,
                deadline_s=asked.deadline_s,
            )
        except Refusal as refusal:
            return _refused(refusal)
        except Busy as busy:
            return _refused(Refusal(429, str(busy)))
        # While it waits here, too, another process of this server may be asked for it.
        await asyncio.get_running_loop().run_in_executor(None, jobs.leave, job)
        body = {"schema": "kvd.prewarm/1", **job.body(), "status_url": f"/v1/cache/prewarm/{job.id}"}
        return JSONResponse(body, status_code=202, headers={"Location": f"/v1/cache/prewarm/{job.id}"})

    async def job(self, job_id: str) -> JSONResponse:
        try:
            jobs = self._prewarmer or await self._jobs(await self._view())
        except Refusal as refusal:
            return _refused(refusal)
        found = await asyncio.get_running_loop().run_in_executor(None, jobs.find, job_id)
        if found is None:
            return _refused(Refusal(404, f"no prewarm job {job_id}: it ended more than ten minutes ago, or never was"))
        return JSONResponse({"schema": "kvd.prewarm/1", **found})

    async def why(self, request: Request) -> JSONResponse:
        try:
            asked = await _body(request)
            view, prompt = await self._understood(asked)
            body = await self._on_a_thread(view, lambda client: self._explained(client, view, prompt, asked))
        except Refusal as refusal:
            return _refused(refusal)
        return JSONResponse({"schema": "kvd.why_prompt/1", **body})

    async def keys(self, request: Request) -> JSONResponse:
        try:
            asked = await _body(request)
            view, prompt = await self._understood(asked)
        except Refusal as refusal:
            return _refused(refusal)
        keys = view.keys(prompt.hashes)
        spans = view.spans(keys, prompt.tokens)
        body = {
            "schema": "kvd.keys_of_prompt/1",
            "prompt_tokens": prompt.tokens,
            "block_hashes": [one.hex() for one in prompt.hashes],
            "chunks": [{"start": span.start, "end": span.end, "key": keys.of(span).hex()} for span in spans],
            "namespaces": [
                {"namespace": place.namespace.hex(), "rank": place.rank, "group": view.groups[place.group].id}
                for place in view.places(prompt.whose)
            ],
        }
        return JSONResponse(body)

    async def engine(self) -> JSONResponse:
        """Never fails for want of a connector: a decode engine without kvd has block hashes to compare, too."""
        config = self._engine.vllm_config
        source = hashing.server_source(config)
        view: View | None = None
        problem = ""
        try:
            view = await self._view()
            source = view.hashes
        except Refusal as refusal:
            problem = refusal.message
        daemon = await self._daemon_problem(view) if view is not None else None
        transfer = config.kv_transfer_config
        body: dict[str, Any] = {
            "schema": "kvd.engine/1",
            "engine": "vllm",
            "version": hashing.engine_version(),
            "model": str(config.model_config.model),
            "served": [model.name for model in self._state.openai_serving_models.base_model_paths],
            "kv_connector": getattr(transfer, "kv_connector", None),
            "kv_role": getattr(transfer, "kv_role", None),
            "hash_algorithm": source.algorithm,
            "hash_tokens": source.tokens,
            "canary": hashing.canary(source) if source.none_hash else None,
            "problem": problem,
            "daemon_problem": daemon,
            "kv_events": self._watch.known,
            "view": json.loads(view.as_json()) if view is not None else None,
            "facts": view.facts if view is not None else None,
        }
        return JSONResponse(body)

    # ---- the work ----------------------------------------------------------------------------------------------------

    async def _view(self) -> View:
        """This engine's view, from its workers. Raises Refusal."""
        try:
            answers = await self._engine.collective_rpc(METHOD, timeout=RPC_S)
        except NotImplementedError:
            raise Refusal(409, "this engine runs without KvdConnector") from None
        except Exception as error:  # the process's edge: a worker's error comes back as any type, and becomes an answer
            if METHOD in str(error) or "not implemented" in str(error).lower():
                raise Refusal(409, "this engine runs without KvdConnector") from None
            raise Refusal(503, f"the engine's workers do not answer: {error}") from error
        try:
            return engine_view(_flat(answers), hashing.server_source(self._engine.vllm_config).none_hash)
        except NotAView as problem:
            raise Refusal(409, str(problem)) from None

    async def _daemon_problem(self, view: View) -> str:
        """Why the daemon does not answer now, '' where it does. The workers know of connections: one to a daemon that hangs
        looks well to them.
        """
        from kvd.wire.client import Client

        def ask() -> str:
            try:
                with Client(view.more.get("socket"), timeout_s=CONNECT_S) as client:
                    client.ping()
            except KvdError as error:
                return _told(error)
            return ""

        return await asyncio.get_running_loop().run_in_executor(None, ask)

    async def _understood(self, asked: Asked) -> tuple[View, Prompt]:
        """The engine, and the prompt as block hashes. Raises Refusal."""
        view = await self._view()
        if not view.hashes.none_hash:
            raise Refusal(
                409,
                f"this engine's block hashes ({view.hashes.algorithm}) start from a seed that is random in each process and is "
                "known here only after its first request; set PYTHONHASHSEED, without which nothing stored outlives the engine",
            )
        return view, await prompt_of(asked, self._engine, self._state, view, self._adapters)

    def _explained(self, client: Any, view: View, prompt: Prompt, asked: Asked) -> dict[str, Any]:
        def in_engine(span: Span) -> bool | None:
            return self._watch.has(view, prompt.hashes, span)

        def rehash(source: HashSource) -> Sequence[bytes] | None:
            return prompt.rehash(source)

        body = explain(
            client,
            view,
            prompt.hashes,
            prompt.tokens,
            tenant=prompt.whose,
            retention=asked.retention,
            in_engine=in_engine,
            rehash=rehash,
        )
        return {**body, "tenant": asked.tenant, "remarks": [*asked.slips, *body["remarks"]]}

    async def _jobs(self, view: View) -> Prewarmer:
        """What runs jobs. Raises Refusal where there is no daemon to run them with."""
        link = self._connected(view)
        if not link.up and not await asyncio.get_running_loop().run_in_executor(None, wait_up, link, CONNECT_S):
            raise _no_daemon(view, link)
        if self._prewarmer is None:

            def connect() -> Any:
                wait_up(link, CONNECT_S)
                return link.call(lambda client: client)

            self._prewarmer = Prewarmer(connect)
        return self._prewarmer

    def _connected(self, view: View) -> Link:
        if self._link is None:
            from kvd.wire.client import Client

            socket = view.more.get("socket")

            def connect() -> Client:
                client = Client(socket, timeout_s=CALL_S)
                try:
                    client.ping()
                except BaseException:
                    client.close()
                    raise
                return client

            self._link = Link("server", connect)
            self._link.start()
        return self._link

    async def _on_a_thread(self, view: View, work: Any) -> Any:
        """`work(client)` off the event loop. Raises Refusal where the daemon is not there."""
        link = self._connected(view)

        def run() -> Any:
            wait_up(link, CONNECT_S)
            return link.call(work)

        try:
            return await asyncio.get_running_loop().run_in_executor(None, run)
        except Down:
            raise _no_daemon(view, link) from None
        except KvdError as error:
            raise Refusal(503, f"the kvd daemon: {error}") from error


def _no_daemon(view: View, link: Link) -> Refusal:
    why = f": {_told(link.problem)}" if link.problem is not None else f" at {view.more.get('socket')}"
    return Refusal(503, f"no kvd daemon answers{why}")


def _told(error: KvdError) -> str:
    """An error and what to do about it, in one line."""
    return f"{error.message} ({error.hint})" if error.hint else error.message


def _flat(answers: Any) -> list[str]:
    """One list of texts, whatever the engine's arrangement made of one answer a worker."""
    if isinstance(answers, str):
        return [answers]
    return [text for one in answers for text in _flat(one)]


async def _body(request: Request) -> Asked:
    try:
        return read(await request.json())
    except RecursionError:
        raise Refusal(400, "the body is not JSON: too many brackets inside each other") from None
    except BadBody as error:
        raise Refusal(400, str(error), error.field) from None
    except (ValueError, UnicodeDecodeError) as error:
        raise Refusal(400, f"the body is not JSON: {error}") from None


def _refused(refusal: Refusal) -> JSONResponse:
    kind = {400: "BadRequestError", 404: "NotFoundError", 429: "RateLimitError"}.get(refusal.status, "ServiceError")
    body = {"error": {"message": refusal.message, "type": kind, "param": refusal.field or None, "code": refusal.status}}
    return JSONResponse(body, status_code=refusal.status)
