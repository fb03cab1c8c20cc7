"""The gate's own description of its HTTP interface: GET /openapi.json (OpenAPI 3.1).

Model paths are described as far as the gate looks at them: a JSON object that names a `model`; what else they may hold, and
what comes back, is the engine's. Written by hand, because routes here declare nothing to generate it from; a test
compares it with the routes, and it is what schemathesis is run with.
"""

from collections.abc import Iterable
from typing import Any

from kvgate.prewarm import MAX_DEADLINE_S
from kvgate.prewarm import PATH as PREWARM
from kvgate.sleep import TAGS
from kvgate.traffic import WINDOW_MAX_S
from kvtools import __version__

Json = dict[str, Any]
_SECONDS = {"type": "number", "exclusiveMinimum": 0, "maximum": 1e9}
_WINDOW = {"type": "number", "exclusiveMinimum": 0, "maximum": WINDOW_MAX_S}
_OBJECT = {"application/json": {"schema": {"type": "object"}}}
_ERROR = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
_OPENAI_ERROR = {"application/json": {"schema": {"$ref": "#/components/schemas/OpenAIError"}}}
_ACTION = {"application/json": {"schema": {"anyOf": [{"$ref": f"#/components/schemas/{name}"} for name in ("Action", "Error")]}}}
_WORDS = {
    400: "What was asked cannot be meant",
    401: "No API key, or one that is not known",
    403: "The key, the Origin or the Host may not do that",
    404: "No such model",
    405: "This path takes POST",
    409: "The model's state does not allow that",
    413: "The body is too long",
    429: "The queue is full",
    502: "The engine broke off, or did not sleep or wake",
    503: "The model cannot serve now, or too many connections are open",
    504: "The engine was silent",
}


def document(model_paths: Iterable[str], models: Iterable[str]) -> Json:
    """The whole document; `models` are given as examples where a model is named."""
    named = {"type": "string", "minLength": 1, "examples": list(models)}
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvgate", "version": __version__, "description": "One front for several models that share GPUs."},
        "paths": {
            **{path: {"post": _passed_on(named)} for path in sorted(model_paths)},
            **_own(named),
            PREWARM: {"post": _prewarm(named)},
            f"{PREWARM}/{{job}}": {"get": _of_engine("How far a prewarm of the engine is", named, job=True)},
            "/v1/cache/engine": {"get": _of_engine("What the engine's cache keys depend on", named)},
        },
        "components": {"schemas": _SCHEMAS, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }


def _passed_on(named: Json) -> Json:
    schema = {"type": "object", "required": ["model"], "properties": {"model": named}, "additionalProperties": True}
    answers = _answers(200, _OBJECT, errors=(400, 401, 404, 405, 413, 429, 502, 503, 504), shape=_OPENAI_ERROR)
    answers["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    answers["default"] = {"description": "Whatever the engine answers, unchanged"}
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    return {"summary": "Passed on to the engine of `model`", "requestBody": body, "responses": answers}


def _prewarm(named: Json) -> Json:
    """Passed on like the rest, unless it names keys: then the daemon is asked, and the gate answers itself."""
    found = _passed_on(named)
    digests = {"type": "array", "items": {"type": "string", "pattern": "^[0-9a-fA-F]{64}$"}}
    keyed = {
        "type": "object",
        "required": ["model", "keys", "namespaces"],
        "properties": {
            "model": named,
            "keys": digests,
            "namespaces": {**digests, "minItems": 1},
            "deadline_s": {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_DEADLINE_S},
            "wait": {"type": "boolean"},
        },
    }
    other = found["requestBody"]["content"]["application/json"]["schema"]
    found["requestBody"]["content"]["application/json"]["schema"] = {"anyOf": [keyed, {**other, "not": {"required": ["keys"]}}]}
    found["summary"] = "Bring a prompt's cache up from the tiers: keys by the daemon itself, anything else by the engine of `model`"
    found["responses"]["202"] = {"description": "Begun", "content": _OBJECT}
    return found


def _of_engine(summary: str, named: Json, *, job: bool = False) -> Json:
    """A GET that an engine answers: the query names its model."""
    found = _get(summary, _query("model", named), errors=(400, 404, 503, 504), shape=_OPENAI_ERROR)
    if job:
        text = {"type": "string", "pattern": "^[0-9a-f]{1,64}$"}
        found["parameters"].append({"name": "job", "in": "path", "required": True, "schema": text})
    found["responses"]["default"] = {"description": "Whatever the engine answers, unchanged"}
    return found


def _own(named: Json) -> Json:
    model = {"name": "model", "in": "path", "required": True, "schema": named}
    threshold, window = _query("threshold", _SECONDS), _query("window", _WINDOW)
    level, mode = _query("level", {"enum": ["1", "2"]}), _query("mode", {"type": "string"})
    tags = _query("tags", {"type": "array", "items": {"enum": list(TAGS)}})
    force = _query("force", {"enum": ["0", "1", "true", "false"]})
    acts = (400, 404, 409, 502, 503)
    return {
        "/v1/models": {"get": _get("The configured models", shape=_OPENAI_ERROR)},
        "/v1/models/{model}": {"get": _get("One model", model, errors=(404,), shape=_OPENAI_ERROR)},
        "/models": {"get": _get("What is served, where, in which state")},
        "/models/idle": {"get": _get("Models without a request for so long", threshold, errors=(400,))},
        "/models/active": {"get": _get("The other models", threshold, window, errors=(400,))},
        "/health": {"get": _get("The gate lives", open_=True)},
        "/healthz": {"get": _get("The gate lives", open_=True)},
        "/readyz": {"get": _get("Every model's state is known, and requests are taken", errors=(503,), shape=_OBJECT, open_=True)},
        "/health/{model}": {"get": _get("Does its engine answer? `all`: every engine", model, errors=(404,))},
        "/get_server_info": {"get": _get("Version and settings")},
        "/traffic/stats": {"get": _get("What each model is asked", window, errors=(400,))},
        "/traffic/stats/{model}": {"get": _get("What one model is asked", model, window, errors=(400, 404))},
        "/sleep/status": {"get": _get("Who sleeps, and the rules")},
        "/sleep/candidates": {"get": _get("Who may be put to sleep now")},
        "/action/sleep/{model}": {"post": _get("Drain, then put to sleep", model, level, mode, errors=acts, shape=_ACTION)},
        "/action/wakeup/{model}": {"post": _get("Wake up", model, tags, force, errors=acts, shape=_ACTION)},
        "/admin/reload": {"post": _get("Read the configuration again", errors=(400,))},
        "/metrics": {"get": _text("Prometheus' text format")},
        "/openapi.json": {"get": _get("This document")},
    }


def _query(name: str, schema: Json) -> Json:
    return {"name": name, "in": "query", "required": False, "schema": schema}


def _get(summary: str, *parameters: Json, errors: tuple[int, ...] = (), shape: Json = _ERROR, open_: bool = False) -> Json:
    refused = () if open_ else (401, 403, 503)
    found: Json = {"summary": summary, "responses": _answers(200, _OBJECT, errors=(*errors, *refused), shape=shape)}
    return {**found, "parameters": list(parameters)} if parameters else found


def _text(summary: str) -> Json:
    answers = _answers(200, {"text/plain": {"schema": {"type": "string"}}}, errors=(401, 403, 503), shape=_ERROR)
    return {"summary": summary, "responses": answers}


def _answers(status: int, content: Json, *, errors: tuple[int, ...], shape: Json) -> Json:
    found: Json = {str(status): {"description": "Done", "content": dict(content)}}
    for number in errors:
        found[str(number)] = {"description": _WORDS[number], "content": shape}
    return found


_SCHEMAS = {
    "Error": {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}},
    "OpenAIError": {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {
                    "message": {"type": "string"},
                    "type": {"type": "string"},
                    "param": {"type": ["string", "null"]},
                    "code": {"type": ["string", "null"]},
                },
            }
        },
    },
    "Action": {
        "type": "object",
        "required": ["model_name", "success", "message"],
        "properties": {"model_name": {"type": "string"}, "success": {"type": "boolean"}, "message": {"type": "string"}},
    },
}
