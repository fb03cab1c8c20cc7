"""A gate on a real socket in the test's own loop, and a plain client for it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from yarl import URL

from kvgate import config as configuration
from kvgate.serve import Gate, listen, new_server
from kvgate.sleep import State

QUICK = {"check_interval_seconds": 0.05, "idle_threshold_seconds": 3600, "min_sleep_duration": 0}


def write_config(path: Path, models: dict[str, Any], **top: Any) -> Path:
    router = {"router_port": 0, "health_interval_seconds": 0.1, **top.pop("router", {})}
    body = {"models": models, "router": router, "sleep_manager": {**QUICK, **top.pop("sleep_manager", {})}, **top}
    path.write_text(yaml.safe_dump(body))
    return path


class Client:
    """Requests to one gate."""

    def __init__(self, gate: Gate, base: str, session: aiohttp.ClientSession) -> None:
        self.gate, self.base, self.session = gate, base, session

    async def ask(self, path: str | URL, body: Any = None, **options: Any) -> tuple[int, Any, Mapping[str, str]]:
        method = options.pop("method", "GET" if body is None else "POST")
        url = path if isinstance(path, URL) else self.base + path
        async with self.session.request(method, url, json=body, **options) as answer:
            text = await answer.read()
            kind = answer.content_type
            return answer.status, await answer.json() if kind == "application/json" else text, answer.headers.copy()

    async def complete(self, model: str = "tiny", prompt: str = "hi", **fake: Any) -> tuple[int, Any, Mapping[str, str]]:
        stream = fake.pop("stream", False)
        return await self.ask("/v1/completions", {"model": model, "prompt": prompt, "stream": stream, "fake": fake})

    def machine(self, model: str = "tiny") -> Any:
        return self.gate.router.backends[model].machine

    async def until(self, state: State, model: str = "tiny", timeout: float = 5.0) -> None:
        await eventually(lambda: self.machine(model).state is state, timeout, lambda: f"{model} is {self.machine(model).state}")


async def eventually(true: Any, timeout: float = 5.0, why: Any = lambda: "") -> None:
    deadline = asyncio.get_running_loop().time() + timeout
    while not true():
        assert asyncio.get_running_loop().time() < deadline, why()
        await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def running_gate(path: Path, *, wait: bool = True) -> AsyncIterator[Client]:
    """Serve the configuration in `path`; `wait`: until every model's state is known."""
    config = configuration.load(path)
    sock = listen(config, allow_open=False)
    gate = Gate(config)
    gate.start()
    server = new_server(gate)
    # As uvicorn's own `serve`, without its loop that looks ten times a second whether it should stop.
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    await server.startup(sockets=[sock])
    base = f"http://127.0.0.1:{sock.getsockname()[1]}"
    try:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            client = Client(gate, base, session)
            if wait:
                for name in config.models:
                    await eventually(lambda name=name: client.machine(name).state is not State.STARTING)
            yield client
    finally:
        await server.shutdown(sockets=[sock])
        await gate.stop()
