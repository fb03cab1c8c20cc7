"""Asking a running gate, with the standard library: what `kvgate models|sleep|wake|traffic` send and how answers become errors.

HTTP status -> exit status: 404 -> 3 (not found), no connection -> 4, 408/504 and time-outs -> 6, 409 -> 5 (refused),
401/403 -> 2, anything else -> 1.
"""

import http.client
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote as _quote
from urllib.parse import urlencode

from kvtools.config import is_literal, read_secret
from kvtools.errors import KvError, NotFound, Refused, TimedOut, Unreachable, UsageError
from kvtools.output import note
from kvtools.urls import http_parts

TIMEOUT_S = 10.0
ACTION_TIMEOUT_S = 600.0
"""A wake-up may load weights from disk, and a sleep waits for running requests."""
_ERRORS: dict[int, type[KvError]] = {401: UsageError, 403: UsageError, 404: NotFound, 408: TimedOut, 409: Refused, 504: TimedOut}


def quote(model: str) -> str:
    """A model's name as one path segment."""
    return _quote(model, safe="")


def get(url: str, path: str, key: str, *, query: Mapping[str, Any] | None = None) -> dict[str, Any]:
    return _ask("GET", url, path, key, query or {}, TIMEOUT_S)


def post(url: str, path: str, key: str, *, query: Mapping[str, Any] | None = None) -> dict[str, Any]:
    return _ask("POST", url, path, key, query or {}, ACTION_TIMEOUT_S)


def _ask(method: str, url: str, path: str, key: str, query: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
    try:
        where, host, port = http_parts(url)
    except ValueError:
        raise UsageError(f"not a gate's URL: {url!r}", hint="write it as http://127.0.0.1:8080") from None
    kind = http.client.HTTPSConnection if where.scheme == "https" else http.client.HTTPConnection
    if key and is_literal(key):
        note("--key has the key itself, which other users can read in the list of processes: use env:NAME or file:PATH")
    headers = {"authorization": f"Bearer {read_secret(key)}"} if key else {}
    target = where.path.rstrip("/") + path + (f"?{urlencode(query, doseq=True)}" if query else "")
    try:
        connection = kind(host, port, timeout=timeout_s)
        connection.request(method, target, headers=headers)
        answer = connection.getresponse()
        status, text = answer.status, answer.read(16 << 20)
        connection.close()
    except TimeoutError:
        raise TimedOut(f"the gate at {url} did not answer within {timeout_s:g} s") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise Unreachable(f"cannot reach the gate at {url}: {reason}", hint="is `kvgate serve` running? --url says where") from None
    try:
        body = json.loads(text)
    except ValueError:
        body = None
    if not isinstance(body, dict) or not _is_own(body, method, status):
        raise Unreachable(f"what answers at {url} is not kvgate (HTTP {status})", hint="--url says where the gate is")
    if status >= 400:
        raise _ERRORS.get(status, KvError)(_message(body, status), hint=_hint(status))
    return body


def _is_own(body: dict[str, Any], method: str, status: int) -> bool:
    """Whether this may be kvgate's answer, and not one of any other server that speaks JSON, such as an engine."""
    if status >= 400:
        # The paths that are read name no model that could be missing.
        return ("error" in body or "message" in body) and not (method == "GET" and status in {404, 405})
    return isinstance(body.get("model_name"), str) or any(isinstance(body.get(key), dict) for key in ("models", "traffic_stats"))


def _message(body: dict[str, Any], status: int) -> str:
    said = body.get("message") or body.get("error") or f"HTTP {status}"
    return str(said.get("message") if isinstance(said, dict) else said)


def _hint(status: int) -> str:
    return {401: "give --key env:NAME or --key file:PATH", 404: "kvgate models lists what there is"}.get(status, "")
