"""The story with a real vLLM: a long prompt cold, then after both engine and daemon were restarted.

The engine is vLLM's own API server as a child process, asked over loopback as any client would; nothing of it is imported
here. The reference for "the same answer" is the engine's own prefix cache: that is what a loaded prefix must equal, in
tokens and in log-probabilities.
"""

import contextlib
import http
import http.client
import importlib.util
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple, Self

from kvd.demo.daemon import DemoDaemon
from kvd.demo.story import Heading, scratch_folder, start
from kvtools.errors import KvError, TimedOut, UsageError
from kvtools.interrupts import interrupts_held
from kvtools.output import emit
from kvtools.units import format_duration

PROMPT_TOKENS = 3600
ANSWER_TOKENS = 8
START_S = 300.0
ANSWER_S = 300.0
CONNECTOR = {
    "kv_connector": "KvdConnector",
    "kv_role": "kv_both",
    "kv_connector_module_path": "kvd.connector",
    "kv_load_failure_policy": "recompute",
}


class Answer(NamedTuple):
    """What the engine said: seconds to the first token, the tokens' text, and their log-probabilities."""

    first_token_s: float
    tokens: list[str]
    logprobs: list[float]


class Engine:
    """One vLLM API server on a loopback port. Context manager: the server is gone at the end."""

    def __init__(self, model: Path, daemon: DemoDaemon, log: Path) -> None:
        self._model, self._daemon, self._log = model, daemon, log
        self._process: subprocess.Popen[bytes] | None = None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]

    def __enter__(self) -> Self:
        words = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self._model)),
            *("--host", "127.0.0.1", "--port", str(self._port), "--dtype", "float32", "--block-size", "32", "--enforce-eager"),
            *("--max-model-len", "4096", "--served-model-name", "demo", "--kv-transfer-config", json.dumps(CONNECTOR)),
        ]
        environment = {
            **os.environ,
            "KVD_SOCKET": str(self._daemon.socket),
            "PYTHONHASHSEED": "0",
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
        }
        emit(f"   $ vllm serve {self._model} --kv-transfer-config '{json.dumps(CONNECTOR)}'")
        begun = time.monotonic()
        try:
            with self._log.open("ab") as log, interrupts_held():
                # Its own session: the server has children, and all of them must go with it.
                self._process = subprocess.Popen(
                    words, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                )
            self._wait_ready(self._process, begun)
        except BaseException:
            self.__exit__()
            raise
        emit(f"   ready in {format_duration(time.monotonic() - begun)}")
        return self

    def _wait_ready(self, process: "subprocess.Popen[bytes]", begun: float) -> None:
        while True:
            if (status := process.poll()) is not None:
                tail = self._log.read_text(errors="replace").strip().splitlines()[-3:]
                raise KvError(f"vLLM ended with status {status} before it was ready: {' / '.join(tail)}")
            with contextlib.suppress(OSError, http.client.HTTPException), self._connect(5) as link:
                link.request("GET", "/health")
                if link.getresponse().status == http.HTTPStatus.OK:
                    return
            if time.monotonic() - begun > START_S:
                raise TimedOut(f"vLLM was not ready after {START_S:g} s")
            time.sleep(0.2)

    def __exit__(self, *_: object) -> None:
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            pass
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _connect(self, timeout_s: float) -> "contextlib.closing[http.client.HTTPConnection]":
        return contextlib.closing(http.client.HTTPConnection("127.0.0.1", self._port, timeout=timeout_s))

    def ask(self, prompt: list[int]) -> Answer:
        """Greedy completion of `prompt`, streamed."""
        body = {
            "model": "demo",
            "prompt": prompt,
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "stream": True,
            "logprobs": 0,
            "ignore_eos": True,
        }
        begun = time.monotonic()
        first = 0.0
        tokens: list[str] = []
        logprobs: list[float] = []
        with self._connect(ANSWER_S) as link:
            link.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = link.getresponse()
            if response.status != http.HTTPStatus.OK:
                raise KvError(f"vLLM answered {response.status}: {response.read(300).decode(errors='replace')}")
            for line in response:
                data = line.decode().removeprefix("data: ").strip()
                if not data or data == "[DONE]":
                    continue
                first = first or time.monotonic() - begun
                for choice in json.loads(data)["choices"]:
                    tokens += choice["logprobs"]["tokens"]
                    logprobs += choice["logprobs"]["token_logprobs"]
        return Answer(first, tokens, logprobs)


def tell_with_engine(where: Path | None, model: Path) -> None:
    """The whole story. Raises KvError where something does not hold."""
    if importlib.util.find_spec("vllm") is None:
        raise UsageError("vLLM is not installed in this environment", hint="`make demo-vllm` makes one that has it")
    if not (model / "config.json").exists():
        raise UsageError(f"no model in {model}", hint="--engine MODEL names a folder with config.json and weights")
    prompt = [random.randrange(5, 500) for _ in range(PROMPT_TOKENS)]  # noqa: S311 - a prompt, not a secret
    step = Heading()
    with scratch_folder(where) as scratch, contextlib.ExitStack() as stack:
        daemon = DemoDaemon(scratch, max_bytes="512MiB", long_bytes="2GiB")
        stack.callback(daemon.stop)
        step("Start the daemon and a real vLLM that uses it")
        start(daemon)
        with Engine(model, daemon, scratch / "vllm.log") as engine:
            step(f"A prompt of {PROMPT_TOKENS} tokens that nobody has seen")
            cold = _ask(engine, prompt, "computed")
            step("The same prompt again: the engine's own prefix cache")
            own = _ask(engine, prompt, "the engine's own cache")
            _wait_until_stored(daemon)
        step("Stop both, and start them again: every copy in RAM is gone")
        emit(f"   stopped; {daemon.stop():.1f} s for the daemon")
        start(daemon)
        with Engine(model, daemon, scratch / "vllm.log") as engine:
            step("The same prompt, from the daemon's disk")
            warm = _ask(engine, prompt, "loaded by the connector")
            _show_stats(daemon)
        _compare(cold, own, warm)
    emit()
    emit("Done. Engine, daemon and scratch folder are gone.")


def _ask(engine: Engine, prompt: list[int], what: str) -> Answer:
    answer = engine.ask(prompt)
    emit(f"   first token after {format_duration(answer.first_token_s)} ({what})")
    return answer


def _stats(daemon: DemoDaemon) -> dict[str, Any]:
    from kvd.wire.client import Client

    with contextlib.closing(Client(daemon.socket)) as client:
        return dict(client.stats())


def _wait_until_stored(daemon: DemoDaemon) -> None:
    """Saving goes on behind the answer: wait until the daemon has it all."""
    seen, since = -1, time.monotonic()
    while time.monotonic() - since < 1.0:
        stored = int(_stats(daemon)["sets_total"])
        if stored != seen:
            seen, since = stored, time.monotonic()
        time.sleep(0.1)
    if seen <= 0:
        raise KvError("the engine stored nothing in the daemon")
    emit(f"   {seen} chunks are with the daemon")


def _show_stats(daemon: DemoDaemon) -> None:
    """What the daemon counted."""
    now = _stats(daemon)
    emit(f"   the daemon served {now['hits_total']} of {now['gets_total']} chunks asked for, {now['get_bytes_total'] >> 20} MiB")
    # Not by hits: the connector also looks up a few bytes that tell how the last engine was set up.
    if now["get_bytes_total"] < 1 << 20:
        raise KvError("nothing was loaded from the daemon")


def _compare(cold: Answer, own: Answer, warm: Answer) -> None:
    if warm.tokens != own.tokens:
        raise KvError("the answer differs from the one with the engine's own cache")
    furthest = max(abs(a - b) for a, b in zip(warm.logprobs, own.logprobs, strict=True))
    emit(f"   same {len(warm.tokens)} tokens as with the engine's own cache, log-probabilities at most {furthest:.2g} apart")
    emit(f"   {cold.first_token_s / warm.first_token_s:.0f} times sooner than computing it")
