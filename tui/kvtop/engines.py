"""Engines' own numbers, where `--metrics` names an address: running and waiting requests, cache use, prefix hits.

    http://HOST:PORT/metrics --(a thread an engine)--> Prometheus text --> Engine

Contract: the tick never waits for the network. Each address has a thread that fetches every `EVERY_S` seconds with a deadline;
a snapshot takes what was fetched last, and says how old it is when that is too old. Only http is spoken, only to the addresses
given, answers are cut at `MAX_BYTES`. vLLM's metric names are read (version 1 engines), with or without the older spellings.

Concurrency: each fetcher replaces one immutable Engine; readers take it as it is.
"""

import http.client
import threading
import time
from collections.abc import Callable, Sequence

from kvtools.errors import UsageError
from kvtools.urls import http_parts
from kvtop.snapshot import Engine

EVERY_S = 2.0
TIMEOUT_S = 2.0
MAX_BYTES = 8 << 20
OLD_S = 10.0

_NAMES: dict[str, str] = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "cache_used",
    "vllm:gpu_cache_usage_perc": "cache_used",
    "vllm:prefix_cache_queries_total": "prefix_queries",
    "vllm:prefix_cache_hits_total": "prefix_hits",
    "vllm:gpu_prefix_cache_queries_total": "prefix_queries",
    "vllm:gpu_prefix_cache_hits_total": "prefix_hits",
    "vllm:generation_tokens_total": "generated",
}


def check_url(text: str) -> str:
    """The address as host:port/path, from 'host:8000' or 'http://host:8000/metrics'. Raises UsageError."""
    try:
        parts, host, port = http_parts(text if "://" in text else f"http://{text}", ("http",))
        if parts.username is not None:
            raise ValueError
    except ValueError:
        hint = "write HOST:PORT or http://HOST:PORT/metrics"
        raise UsageError(f"not an engine's address: {text!r}", hint=hint) from None
    host = f"[{host}]" if ":" in host else host
    return f"{host}:{port or 80}{parts.path or '/metrics'}{f'?{parts.query}' if parts.query else ''}"


def parse(text: str, url: str) -> Engine:
    """What a page of metrics says. Unknown lines are passed over; several engines behind one page are added up."""
    sums: dict[str, float] = {}
    most: dict[str, float] = {}
    model = ""
    for line in text.splitlines():
        name, brace, rest = line.partition("{")
        labels, _, tail = rest.rpartition("}") if brace else ("", "", "")
        if not brace:
            name, _, tail = line.partition(" ")
        field = _NAMES.get(name)
        if field is None:
            continue
        try:
            value = float(tail.split()[0])
        except (ValueError, IndexError):
            continue
        if value != value:  # NaN: an engine that has not counted yet
            continue
        model = model or _label(labels, "model_name")
        sums[field] = sums.get(field, 0.0) + value
        most[field] = max(most.get(field, 0.0), value)
    if not sums:
        return Engine(url=url, problem="its metrics page has none of vLLM's numbers")
    return Engine(
        url=url,
        model=model,
        running=sums.get("running", 0.0),
        waiting=sums.get("waiting", 0.0),
        cache_used=most.get("cache_used", -1.0),
        prefix_queries=sums.get("prefix_queries", 0.0),
        prefix_hits=sums.get("prefix_hits", 0.0),
        generated=sums.get("generated", 0.0),
    )


def _label(labels: str, name: str) -> str:
    _, found, rest = labels.partition(f'{name}="')
    return rest.partition('"')[0] if found else ""


_SAID: dict[type[BaseException], str] = {
    TimeoutError: f"nothing within {TIMEOUT_S:g} s",
    http.client.RemoteDisconnected: "it hung up",
    http.client.IncompleteRead: "it hung up in the middle",
    http.client.BadStatusLine: "what is there does not speak HTTP",
}


def fetch(url: str) -> Engine:
    """Ask one engine. Never raises."""
    host, _, path = url.partition("/")
    connection = None
    try:
        connection = http.client.HTTPConnection(host, timeout=TIMEOUT_S)
        connection.request("GET", f"/{path}")
        answer = connection.getresponse()
        if answer.status != 200:
            return Engine(url=url, problem=f"answers HTTP {answer.status}")
        return parse(answer.read(MAX_BYTES).decode(errors="replace"), url)
    except (OSError, http.client.HTTPException) as error:
        return Engine(url=url, problem=f"no answer ({getattr(error, 'strerror', None) or _SAID.get(type(error), str(error))})")
    except Exception as error:  # noqa: BLE001 - the thread's edge: whatever an address or a page brings about, the engine's line says it
        return Engine(url=url, problem=f"cannot be read ({str(error) or type(error).__name__})")
    finally:
        if connection is not None:
            connection.close()


class Engines:
    """Fetches from every address on threads of their own; call it for what is known now."""

    def __init__(
        self, urls: Sequence[str], *, ask: Callable[[str], Engine] = fetch, mono: Callable[[], float] = time.monotonic
    ) -> None:
        self.urls = [check_url(url) for url in urls]
        self._ask = ask
        self._mono = mono
        self._stop = threading.Event()
        self._found: dict[str, tuple[float, Engine]] = {}
        self._threads = [threading.Thread(target=self._run, args=(url,), name=f"kvtop-{url}", daemon=True) for url in self.urls]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop asking."""
        self._stop.set()

    def _run(self, url: str) -> None:
        while not self._stop.is_set():
            engine = self._ask(url)
            self._found[url] = (self._mono(), engine)
            self._stop.wait(EVERY_S)

    def __call__(self) -> Sequence[Engine]:
        out = []
        for url in self.urls:
            at, engine = self._found.get(url, (0.0, None))
            if engine is None:
                continue
            if self._mono() - at > OLD_S:
                engine = Engine(url=url, model=engine.model, problem=f"no answer for {self._mono() - at:.0f} s")
            out.append(engine)
        return out

    def wait(self, timeout_s: float) -> None:
        """Until every address has answered once, or the time is over (for --once)."""
        deadline = self._mono() + timeout_s
        while len(self._found) < len(self.urls) and self._mono() < deadline:
            time.sleep(0.01)
