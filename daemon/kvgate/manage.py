"""The management endpoints: the peer's paths and field names, with status codes that mean something, and ours beside.

    GET  /models                         what is served, where, in which state
    GET  /models/idle  /models/active    by idle time (?threshold=SECONDS) and recent requests (?window=SECONDS)
    GET  /health  /health/{model|all}    of the gate; of the engines
    GET  /healthz  /readyz               for probes: the process is up; every model's state is known and the gate takes requests
    GET  /get_server_info                version and settings
    GET  /traffic/stats[/{model}]        ?window=SECONDS, 3600 at most
    GET  /sleep/status  /sleep/candidates
    POST /action/sleep/{model}           ?level=1|2&mode=MODE
    POST /action/wakeup/{model}          ?tags=weights&tags=kv_cache, &force=1 ends the minimum sleep
    POST /admin/reload                   read models.yaml again
    GET  /metrics                        Prometheus

Errors are `{"error": "one line"}` (actions: the peer's `model_name`, `success`, `message`) with 400 for what cannot be
meant, 404 for an unknown model, 409 when the state forbids it, 502 or 503 when the engine does.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from kvgate import metrics
from kvgate.errors import BadRequest, RequestError
from kvgate.router import Backend
from kvgate.sleep import TAGS, State
from kvgate.traffic import WINDOW_MAX_S
from kvtools import __version__
from kvtools.errors import KvError

if TYPE_CHECKING:
    from kvgate.serve import Gate


def json(body: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON response."""
    return Response(msgspec.json.encode(body), status, media_type="application/json", headers=headers)


def failed(error: RequestError) -> Response:
    """A RequestError in the peer's shape."""
    return json({"error": error.line}, error.status, retry_after(error))


def retry_after(error: RequestError) -> dict[str, str]:
    return {"retry-after": str(int(error.retry_after_s))} if error.retry_after_s is not None else {}


class Management:
    """The endpoints over one gate."""

    def __init__(self, gate: "Gate") -> None:
        self._gate = gate

    def routes(self) -> list[Route]:
        return [
            Route("/models", self.models),
            Route("/models/idle", self.idle),
            Route("/models/active", self.active),
            Route("/health", self.health),
            Route("/health/{model:path}", self.model_health),
            Route("/healthz", self.health),
            Route("/readyz", self.ready),
            Route("/get_server_info", self.server_info),
            Route("/traffic/stats", self.traffic),
            Route("/traffic/stats/{model:path}", self.model_traffic),
            Route("/sleep/status", self.sleep_status),
            Route("/sleep/candidates", self.sleep_candidates),
            Route("/action/sleep/{model:path}", self.sleep, methods=["POST"]),
            Route("/action/wakeup/{model:path}", self.wake, methods=["POST"]),
            Route("/admin/reload", self.reload, methods=["POST"]),
            Route("/metrics", self.metrics),
        ]

    # ---- what there is -------------------------------------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        return json({"models": {name: self._model(backend) for name, backend in self._gate.router.backends.items()}})

    def _model(self, backend: Backend) -> dict[str, object]:
        machine = backend.machine
        return {
            "endpoint": backend.config.endpoint.url,
            "state": machine.state,
            "state_seconds": round(machine.state_s, 3),
            "healthy": machine.reachable,
            "running": backend.lane.running,
            "queued": backend.lane.waiting,
            "idle_time_seconds": round(self._gate.traffic.idle_s(backend.name), 3),
            "can_sleep": machine.can_sleep,
            "last_error": machine.last_error,
            "sleeps": machine.sleeps_total,
            "wakes": machine.wakes_total,
            "last_wake_seconds": round(machine.last_wake_s, 3),
        }

    async def idle(self, request: Request) -> Response:
        threshold_s = _seconds(request, "threshold", self._gate.config.sleep.idle_threshold_s)
        idle = [name for name in self._gate.router.backends if self._gate.traffic.idle_s(name) >= threshold_s]
        return json(
            {
                "idle_models": idle,
                "idle_threshold_seconds": threshold_s,
                "idle_model_details": {name: self._stats(name, 60.0, threshold_s) for name in idle},
                "idle_models_count": len(idle),
            }
        )

    async def active(self, request: Request) -> Response:
        threshold_s = _seconds(request, "threshold", self._gate.config.sleep.idle_threshold_s)
        window_s = _seconds(request, "window", 60.0, WINDOW_MAX_S)
        active = [name for name in self._gate.router.backends if self._gate.traffic.idle_s(name) < threshold_s]
        return json(
            {
                "active_models": active,
                "idle_threshold_seconds": threshold_s,
                "window_seconds": window_s,
                "active_model_details": {name: self._stats(name, window_s, threshold_s) for name in active},
                "active_models_count": len(active),
            }
        )

    async def health(self, request: Request) -> Response:
        return json({"status": "healthy"})

    async def ready(self, request: Request) -> Response:
        unknown = [name for name, backend in self._gate.router.backends.items() if backend.machine.state is State.STARTING]
        if self._gate.draining:
            return json({"status": "shutting down"}, 503)
        return json({"status": "starting", "models": unknown}, 503) if unknown else json({"status": "ready"})

    async def model_health(self, request: Request) -> Response:
        name = request.path_params["model"]
        try:
            backends = list(self._gate.router.backends.values()) if name == "all" else [self._gate.router.find(name)]
        except RequestError as error:
            return failed(error)
        for backend in backends:
            await backend.look()
        return json({"model": name, "health": {b.config.endpoint.url: b.machine.reachable for b in backends}})

    async def server_info(self, request: Request) -> Response:
        config = self._gate.config
        return json({"status": "ok", "version": __version__, "models": len(config.models), "config": str(config.path)})

    async def metrics(self, request: Request) -> Response:
        text = metrics.prometheus(metrics.table(self._gate.router))
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    # ---- traffic -------------------------------------------------------------------------------------------------

    async def traffic(self, request: Request) -> Response:
        window_s = _seconds(request, "window", 60.0, WINDOW_MAX_S)
        stats = {name: self._stats(name, window_s) for name in self._gate.router.backends}
        return json({"traffic_stats": stats, "window_seconds": window_s})

    async def model_traffic(self, request: Request) -> Response:
        window_s = _seconds(request, "window", 60.0, WINDOW_MAX_S)
        try:
            name = self._gate.router.find(request.path_params["model"]).name
        except RequestError as error:
            return failed(error)
        return json({"model_stats": self._stats(name, window_s), "model": name, "window_seconds": window_s})

    def _stats(self, name: str, window_s: float, threshold_s: float | None = None) -> dict[str, object]:
        own = self._gate.router.backends[name].config.sleep.idle_threshold_s
        return self._gate.traffic.stats(name, window_s, own if threshold_s is None else threshold_s)

    # ---- sleep ---------------------------------------------------------------------------------------------------

    async def sleep_status(self, request: Request) -> Response:
        policy = self._gate.config.sleep
        sleeping = {
            name: {
                "sleep_start_time": backend.machine.asleep_at_wall,
                "sleep_duration": round(backend.machine.asleep_s, 3),
                "manual_sleep": backend.machine.manual,
            }
            for name, backend in self._gate.router.backends.items()
            if backend.machine.state in {State.ASLEEP, State.WAKING}
        }
        return json(
            {
                "sleeping_models": sleeping,
                "sleep_candidates": [backend.name for backend in self._gate.idle.candidates()],
                "auto_sleep_enabled": policy.auto_sleep,
                "idle_threshold_seconds": policy.idle_threshold_s,
                "wakeup_on_request": policy.wake_on_request,
                "min_sleep_duration": policy.min_sleep_s,
                "states": {name: backend.machine.state for name, backend in self._gate.router.backends.items()},
            }
        )

    async def sleep_candidates(self, request: Request) -> Response:
        found = self._gate.idle.candidates()
        return json(
            {
                "sleep_candidates": [backend.name for backend in found],
                "candidate_details": {backend.name: self._stats(backend.name, 60.0) for backend in found},
                "sleep_candidates_count": len(found),
                "idle_threshold_seconds": self._gate.config.sleep.idle_threshold_s,
            }
        )

    async def sleep(self, request: Request) -> Response:
        level = _one(request, "level", "1", "2")
        mode = _one(request, "mode")

        async def act(backend: Backend) -> str:
            return await backend.machine.sleep(manual=True, level=int(level) if level else None, mode=mode)

        return await self._act(request, act)

    async def wake(self, request: Request) -> Response:
        tags = request.query_params.getlist("tags")
        for tag in tags:
            _of("tags", tag, TAGS)
        force = _one(request, "force", "0", "1", "true", "false") in {"1", "true"}

        async def act(backend: Backend) -> str:
            return await backend.machine.wake(tags=tags, force=force)

        return await self._act(request, act)

    async def _act(self, request: Request, act: Any) -> Response:
        try:
            backend = self._gate.router.find(request.path_params["model"])
        except RequestError as error:
            return failed(error)
        try:
            message = await act(backend)
        except RequestError as error:
            return json({"model_name": backend.name, "success": False, "message": error.line}, error.status, retry_after(error))
        return json({"model_name": backend.name, "success": True, "message": message, "state": backend.machine.state})

    async def reload(self, request: Request) -> Response:
        try:
            done = self._gate.reload()
        except KvError as error:
            return json({"error": f"{error.message}: {error.hint}" if error.hint else error.message, "success": False}, 400)
        body = {"success": True, "added": done.added, "removed": done.removed, "changed": done.changed, "unchanged": done.unchanged}
        return json({**body, "needs_restart": done.at_start})


def _one(request: Request, name: str, *words: str) -> str | None:
    """A query parameter given once at most, and one of `words` where there are any. Raises BadRequest."""
    given = request.query_params.getlist(name)
    if len(given) > 1:
        raise BadRequest(f"{name} is given {len(given)} times")
    if given and words:
        _of(name, given[0], words)
    return given[0] if given else None


def _of(name: str, given: str, words: Sequence[str]) -> None:
    """Raises BadRequest for a word that is not one of `words`."""
    if given not in words:
        raise BadRequest(f"{name} is one of {', '.join(words)}, not {given[:40]!r}")


def _seconds(request: Request, name: str, default: float, most: float = 1e9) -> float:
    """A query parameter in seconds. Raises BadRequest."""
    given = _one(request, name)
    if given is None:
        return default
    try:
        value = float(given)
    except ValueError:
        value = -1.0
    if not 0 < value <= most:
        raise BadRequest(f"{name} is a number of seconds above 0 and up to {most:g}, not {given[:40]!r}")
    return value
