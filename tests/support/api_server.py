"""A real vLLM OpenAI server in processes of its own, with kvd's routes let in, for tests that ask over HTTP.

    with ApiServer(model(), daemon.socket) as server:
        answer = server.complete(prompt(300))

Starting one takes half a minute here: tests share it by module, and start the ones they need at the same time.
"""

import http.client
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from kvtools.segments.stats import find_stats, remove_unlocked
from tests.support.engine import PYTHON, TRANSFER
from tests.support.servers import free_port

CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
"""The test models have no chat template of their own."""


class ApiServer:
    """A started server. `transfer` None: without any connector. `events`: publish KV events to the server's own process."""

    def __init__(
        self,
        folder: Path,
        socket: Path | None = None,
        *,
        transfer: Mapping[str, Any] | None = None,
        plugins: str = "kvd",
        events: bool = False,
        env: Mapping[str, str] | None = None,
        words: tuple[str, ...] = (),
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._scratch = tempfile.TemporaryDirectory(prefix="kvt-api-")
        self.log = Path(self._scratch.name) / "log"
        arguments = [
            *("--model", str(folder), "--served-model-name", "tiny", "--dtype", "float32", "--enforce-eager"),
            *("--block-size", "32", "--host", "127.0.0.1", "--port", str(self.port), "--chat-template", CHAT),
            *words,
        ]
        if transfer is not None or socket is not None:
            arguments += ["--kv-transfer-config", json.dumps({"kv_load_failure_policy": "recompute", **(transfer or TRANSFER)})]
        if events:
            endpoint = f"ipc://{self._scratch.name}/events"
            arguments += ["--kv-events-config", json.dumps({"enable_kv_cache_events": True, "endpoint": endpoint})]
        mine = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "TORCHDYNAMO_DISABLE": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_PLUGINS": plugins,
            **({"KVD_SOCKET": str(socket)} if socket else {}),
            **(env or {}),
        }
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [PYTHON, "-m", "vllm.entrypoints.openai.api_server", *arguments],
                env={**{k: v for k, v in os.environ.items() if not k.startswith("PYTHONHASHSEED")}, **mine},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self.wait()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait(self, timeout_s: float = 150.0) -> Self:
        """Until it serves."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                if self.get("/health")[0] == 200:
                    return self
            except OSError:
                pass
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended with {self.process.returncode}:\n{self.text()[-6000:]}")
            if time.monotonic() > deadline:
                raise AssertionError(f"the server is not ready after {timeout_s:g} s:\n{self.text()[-6000:]}")
            time.sleep(0.1)

    def stop(self) -> None:
        """End it as an operator would, and all that it started."""
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            pass
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait(10)
        for path in find_stats(kind="connector"):
            remove_unlocked(path)
        self._scratch.cleanup()

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def get(self, path: str) -> tuple[int, Any]:
        return self._ask("GET", path, None)

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        """The body as JSON; bytes go as they are."""
        return self._ask("POST", path, body if isinstance(body, bytes) else json.dumps(body).encode())

    def _ask(self, method: str, path: str, body: bytes | None) -> tuple[int, Any]:
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            link.request(method, path, body, {"Content-Type": "application/json"})
            answer = link.getresponse()
            raw = answer.read()
        finally:
            link.close()
        try:
            return answer.status, json.loads(raw)
        except ValueError:
            return answer.status, raw.decode(errors="replace")

    def complete(self, prompt: list[int] | str, tokens: int = 4, **more: Any) -> dict[str, Any]:
        """A greedy completion; AssertionError where it fails."""
        status, body = self.post(
            "/v1/completions",
            {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more},
        )
        assert status == 200, body
        return dict(body)

    def ok(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """A route's answer; AssertionError where it is an error."""
        status, found = self.get(path) if method == "GET" else self.post(path, body)
        assert status in (200, 202), (status, found)
        return dict(found)

    def metrics(self) -> dict[str, float]:
        """The samples of /metrics, labels left out, added up by name."""
        found: dict[str, float] = {}
        for line in str(self.get("/metrics")[1]).splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                name = name.partition("{")[0].removesuffix("_total")
                found[name] = found.get(name, 0.0) + float(value)
        return found
