"""Every error of kvgate, as one tree.

KvError
 +-- UsageError
 |    +-- ConfigError            models.yaml: unknown key, wrong type, two models of one name (names the path in the file)
 |    +-- MissingExtra           starlette, uvicorn, httptools or aiohttp is not installed
 +-- EngineError                 a management call to an engine failed (sleep, wake, health): kept as `last_error`
 |    +-- NotSupported           the engine has no such endpoint (404): sleep mode is off there
 +-- RequestError                answered to the client in OpenAI's error shape, with `status` and perhaps Retry-After
      +-- BadRequest        400  no JSON, no model
      |    +-- BodyTooSlow       the body did not arrive in time
      +-- Unauthorized      401  no key, or a key nobody knows
      +-- Forbidden         403  the key may not do that; a foreign Host or Origin on a management path
      +-- UnknownModel      404
      +-- MethodNotAllowed  405
      +-- Conflict          409  the model's state does not allow that (busy, already changing)
      +-- BodyTooLarge      413
      +-- QueueFull         429  + Retry-After
      +-- UpstreamBroken    502  the engine broke the connection before its answer began, or did not sleep or wake
      +-- Unavailable       503  + Retry-After: asleep, starting or failed, and the queue's deadline passed
      |    +-- Crowded           the gate has as many connections as it may
      |    +-- NoConnection      nothing was sent
      +-- UpstreamSilent    504  the engine sent nothing for longer than its phase allows

A RequestError knows its own wording and status; front.py turns it into bytes, and nothing else does.
"""

from kvtools.errors import KvError, UsageError


class ConfigError(UsageError):
    """A configuration kvgate cannot start with; the message names the file and the path inside it."""


class MissingExtra(UsageError):
    """A package of the `gate` extra is not installed."""

    def __init__(self, package: str) -> None:
        super().__init__(f"kvgate serve needs the package {package!r}", hint="pip install 'kvtools[gate]'")


class EngineError(KvError):
    """An engine did not do what its management endpoint was asked."""


class NotSupported(EngineError):
    """The engine has no such endpoint."""


class RequestError(KvError):
    """What a client is told instead of an answer. `status` is the HTTP status, `code` the word programs match on."""

    status = 500
    code = "internal_error"
    kind = "api_error"
    closes = False
    """Whether the client's connection cannot carry another request after this."""

    def __init__(self, message: str, *, hint: str = "", param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message, hint=hint)
        self.param = param
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.message, self.hint, self.param, self.retry_after_s)

    @property
    def line(self) -> str:
        """Message and hint as one line."""
        return f"{self.message}: {self.hint}" if self.hint else self.message

    def body(self) -> dict[str, object]:
        """OpenAI's error object, which its clients turn into their own exceptions."""
        hint = f"{self.hint[:1].upper()}{self.hint[1:]}".rstrip(".")
        text = f"{self.message}. {hint}{'' if hint.endswith('?') else '.'}" if hint else self.message
        return {"error": {"message": text, "type": self.kind, "param": self.param, "code": self.code}}


def _rebuild(kind: type[RequestError], message: str, hint: str, param: str | None, retry_after_s: float | None) -> RequestError:
    return kind(message, hint=hint, param=param, retry_after_s=retry_after_s)


class BadRequest(RequestError):
    """The request cannot be meant."""

    status, code, kind = 400, "invalid_request", "invalid_request_error"


class BodyTooSlow(BadRequest):
    """The request body took longer than the gate waits."""

    closes = True  # the rest of the body may still come, or never


class Unauthorized(RequestError):
    """No API key, or one that nobody knows."""

    status, code, kind = 401, "invalid_api_key", "authentication_error"


class Forbidden(RequestError):
    """The key's role, or the page a browser sends this from, may not do that."""

    status, code, kind = 403, "forbidden", "permission_error"


class UnknownModel(RequestError):
    """No model of this name is configured."""

    status, code, kind = 404, "model_not_found", "invalid_request_error"


class MethodNotAllowed(RequestError):
    """The path exists, and takes another method."""

    status, code, kind = 405, "method_not_allowed", "invalid_request_error"


class Conflict(RequestError):
    """The model's state does not allow that now."""

    status, code, kind = 409, "conflict", "conflict_error"


class BodyTooLarge(RequestError):
    """The request body is longer than the gate accepts."""

    status, code, kind = 413, "request_too_large", "invalid_request_error"
    closes = True  # the rest of the body is not read


class QueueFull(RequestError):
    """As many requests wait for this model as may."""

    status, code, kind = 429, "queue_full", "rate_limit_error"


class UpstreamBroken(RequestError):
    """The engine closed or reset the connection before it answered, or did not do what it was told."""

    status, code, kind = 502, "upstream_broken", "api_error"


class Unavailable(RequestError):
    """The model cannot serve now; Retry-After says when to come back."""

    status, code, kind = 503, "model_unavailable", "service_unavailable_error"


class Crowded(Unavailable):
    """More connections are open than the gate takes."""

    code, kind = "too_many_connections", "rate_limit_error"
    closes = True  # or it would go on taking a place


class NoConnection(Unavailable):
    """The engine takes no connection, so not one byte of the request was sent."""


class UpstreamSilent(RequestError):
    """The engine was silent for longer than this phase allows."""

    status, code, kind = 504, "upstream_timeout", "timeout_error"
