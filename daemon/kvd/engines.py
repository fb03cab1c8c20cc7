"""Asking an engine's own server, over HTTP, with nothing but the standard library.

`EngineServer.identify` finds out what the server is before anything else is asked of it: kvd works with vLLM (0.32 or
newer, with KvdConnector), and a server that is something else gets told so by name rather than by a 404. The routes of
`kvd.connector.endpoint` are there only where the operator let them in: VLLM_PLUGINS=kvd.

The server's API key, where it wants one, comes from VLLM_API_KEY, as vLLM's own does; never from the command line.
"""

import http.client
import json
import os
import socket
import ssl
from collections.abc import Mapping
from typing import Any

from kvtools.errors import KvError, NotFound, TimedOut, Unreachable, UsageError
from kvtools.urls import http_parts

MAX_ANSWER = 256 << 20
SUPPORTED = "vLLM 0.32 or newer, started with KvdConnector"
SIGNS: tuple[tuple[str, str, str], ...] = (
    ("SGLang", "/get_server_info", "model_path"),
    ("SGLang", "/server_info", "model_path"),
    ("SGLang", "/get_model_info", "model_path"),
    ("Text Generation Inference", "/info", "docker_label"),
    ("Text Generation Inference", "/info", "max_total_tokens"),
    ("llama.cpp", "/props", "default_generation_settings"),
    ("LMDeploy", "/distserve/engine_info", "tp_size"),
)
"""A server's name, a path it answers, and a field of that answer which others do not have."""


SCHEMAS = {
    "/v1/cache/why": "kvd.why_prompt/1",
    "/v1/cache/prewarm": "kvd.prewarm/1",
    "/v1/cache/engine": "kvd.engine/1",
}
"""What each of kvd's routes answers with."""


class NotVllm(KvError):
    """A server that kvd's connector does not run in."""


class NoRoutes(NotFound):
    """A vLLM whose server has not let kvd's routes in."""


class EngineServer:
    """One engine's HTTP server. Raises UsageError for a URL that names none."""

    def __init__(self, url: str, *, timeout_s: float = 10.0) -> None:
        try:
            parts, self._host, port = http_parts(url if "://" in url else f"http://{url}")
            if parts.query or parts.fragment:
                raise ValueError
            if parts.username is not None or parts.password is not None:
                # Named without what may be a password.
                url = f"{parts.scheme}://...@{parts.netloc.rpartition('@')[2]}"
                raise ValueError("no name and password are sent: leave them out; an API key goes into VLLM_API_KEY")
        except ValueError as error:
            raise UsageError(f"not an engine's URL: {url!r}", hint=str(error) or "such as http://127.0.0.1:8000") from None
        if not timeout_s > 0:
            raise UsageError("a timeout of 0 leaves the engine no time to answer", hint="such as --timeout 10s")
        self._port = port or (443 if parts.scheme == "https" else 80)
        self._secure = parts.scheme == "https"
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self._timeout_s = timeout_s
        self.url = f"{parts.scheme}://{parts.netloc}{self._base}"

    def get(self, path: str) -> tuple[int, Any, Mapping[str, str]]:
        """Status, the body (JSON where it is, else text) and the headers. Raises Unreachable, TimedOut."""
        return self._ask("GET", path, None)

    def post(self, path: str, body: Any) -> tuple[int, Any, Mapping[str, str]]:
        return self._ask("POST", path, json.dumps(body).encode())

    def _ask(self, method: str, path: str, body: bytes | None) -> tuple[int, Any, Mapping[str, str]]:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        link = kind(self._host, self._port, timeout=self._timeout_s)
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if key := os.environ.get("VLLM_API_KEY"):
            if not all(" " <= char <= "~" or "\xa0" <= char <= "\xff" for char in key):
                raise UsageError(
                    "the key in VLLM_API_KEY has characters that no request can carry", hint="is there a line break at its end?"
                )
            headers["Authorization"] = f"Bearer {key}"
        try:
            link.request(method, self._base + path, body, headers)
            answer = link.getresponse()
            raw = answer.read(MAX_ANSWER)
        except TimeoutError:
            raise TimedOut(f"{self.url} did not answer in {self._timeout_s:g} s") from None
        except ssl.SSLCertVerificationError as error:
            hint = "SSL_CERT_FILE names a file with the certificate to trust"
            raise Unreachable(f"the certificate of {self.url} is not trusted: {error.verify_message}", hint=hint) from None
        except ssl.SSLError:
            raise Unreachable(f"{self.url} speaks no TLS", hint="is its address http:// and not https://?") from None
        except (OSError, http.client.HTTPException, socket.gaierror) as error:
            why = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise Unreachable(
                f"no server answers at {self.url}: {why}", hint="is the engine up, and is this its address?"
            ) from None
        finally:
            link.close()
        try:
            found: Any = json.loads(raw)
        except (ValueError, RecursionError):
            found = raw.decode(errors="replace")
        return answer.status, found, {name.lower(): value for name, value in answer.headers.items()}

    def identify(self) -> str:
        """The version of the vLLM at this address. Raises NotVllm naming what it is instead, as far as it can be told."""
        status, body, headers = self.get("/version")
        models = self.get("/v1/models")[1] if status == 200 else None
        if status == 200 and isinstance(body, dict) and isinstance(body.get("version"), str) and _owned_by_vllm(models):
            return str(body["version"])
        raise NotVllm(f"{self.url} is {self._what(headers)}, not vLLM", hint=f"kvd works with {SUPPORTED}")

    def _what(self, headers: Mapping[str, str]) -> str:
        for name, path, field in SIGNS:
            status, body, _ = self.get(path)
            if status == 200 and isinstance(body, dict) and field in body:
                return name
        status, body, _ = self.get("/")
        if status == 200 and "Ollama is running" in str(body):
            return "Ollama"
        if self.get("/v1/models")[0] in (200, 401):
            return "an OpenAI-compatible server of another kind"
        return f"another server ({headers['server']})" if headers.get("server") else "another server"

    def cache(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """One of kvd's routes. Raises NotVllm, NoRoutes, and KvError with the server's reason."""
        status, found, _ = self.get(path) if method == "GET" else self.post(path, body)
        wanted = next(schema for route, schema in SCHEMAS.items() if path.startswith(route))
        schema = str(found.get("schema", "")) if isinstance(found, dict) else ""
        if 200 <= status < 300 and schema == wanted:
            return dict(found)
        if status in (401, 403):
            raise KvError(f"{self.url} wants an API key", hint="put it into VLLM_API_KEY")
        # Whatever else it says may be said by anybody: a server that is no vLLM is told so, not quoted.
        version = self._identified()
        if status == 404 and not (isinstance(found, dict) and "error" in found):
            raise NoRoutes(
                f"the vLLM {version} at {self.url} has no kvd routes".replace("  ", " "),
                hint="start it with VLLM_PLUGINS=kvd (with its other plug-ins' names, where there are some)",
            )
        if 200 <= status < 300:
            raise KvError(
                f"{self.url}{path} answers with {schema or 'something else'}, not {wanted}",
                hint="is kvd of the same version in the engine's environment, and nothing else at this address?",
            )
        raise _error(status)(f"{self.url}: {_reason(found, status)}")

    def _identified(self) -> str:
        """The version of the vLLM; '' where it does not say just now. Raises NotVllm."""
        try:
            return self.identify()
        except (Unreachable, TimedOut):
            return ""

    def metrics(self) -> dict[str, float]:
        """The sums of all samples of each name on /metrics; labels are left out, but `reason`: that sum is under `name/reason`."""
        status, text, _ = self.get("/metrics")
        if status != 200:
            raise KvError(f"{self.url}/metrics answers {status}")
        found: dict[str, float] = {}
        for line in str(text).splitlines():
            if line.startswith("# TYPE "):
                found.setdefault(line.split()[2], 0.0)
            elif line and not line.startswith("#"):
                sample, _, value = line.rpartition(" ")
                name, _, labels = sample.partition("{")
                reason = labels.partition('reason="')[2].partition('"')[0]
                try:
                    for key in (name, f"{name}/{reason}")[: 1 + bool(reason)]:
                        found[key] = found.get(key, 0.0) + float(value)
                except ValueError:
                    continue
        return found


def _owned_by_vllm(models: Any) -> bool:
    """SGLang and others answer /version alike; whose models these are, they say truly."""
    rows = models.get("data") if isinstance(models, dict) else None
    if models is None or not rows:
        return isinstance(models, dict) and "error" in models  # an API key is wanted: /version is all there is to go by
    return any(isinstance(row, dict) and row.get("owned_by") == "vllm" for row in rows)


def _error(status: int) -> type[KvError]:
    return {404: NotFound, 400: UsageError, 422: UsageError, 503: Unreachable}.get(status, KvError)


def _reason(found: Any, status: int) -> str:
    error = found.get("error") if isinstance(found, dict) else None
    if isinstance(error, dict) and error.get("message"):
        return str(error["message"])
    return f"{error or found or 'no reason given'} (HTTP {status})"[:500]
