"""`kvgate serve` as a process, and instances that run the fake engine as a program."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.kvgate.harness import QUICK
from tests.support.processes import SCRIPTS
from tests.support.servers import free_port

FAKE = Path(__file__).with_name("fake_engine.py")


def instance(name: str, folder: Path, *, args: str = "", **more: Any) -> dict[str, Any]:
    """An instance whose engine is the fake one; it notes its pid, environment and arguments in `folder/name.note`."""
    port = free_port()
    words = f"--port {port} --model {name} --note {_note(folder, name)} {args}"
    return {"name": name, "model": name, "engine": "vllm", "command": [sys.executable, str(FAKE)], "engine_args": words, **more}


def _note(folder: Path, name: str) -> Path:
    return folder / f"{name.replace('/', '_')}.note"


def notes(folder: Path, name: str) -> list[dict[str, Any]]:
    """What each start of instance `name` noted."""
    path = _note(folder, name)
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


class GateProcess:
    """A running `kvgate serve`."""

    def __init__(self, config: Path, *words: str, env: dict[str, str] | None = None) -> None:
        self.config = config
        self.log: list[str] = []
        self.process = subprocess.Popen(
            [str(SCRIPTS / "kvgate"), "serve", "--config", str(config), *words],
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **(env or {})},
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self.url = ""
        self.until(lambda: self._address() or self.process.poll() is not None)
        assert self.url, self.log

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
        self.process.stderr.close()

    def _address(self) -> bool:
        found = re.search(r"serving \d+ models on (\S+)", "".join(self.log))
        self.url = found[1] if found else ""
        return bool(found)

    def until(self, true: Any, timeout: float = 15.0) -> None:
        deadline = time.monotonic() + timeout
        while not true():
            assert time.monotonic() < deadline, "".join(self.log[-30:])
            time.sleep(0.02)

    def ask(self, path: str, body: Any = None, *, method: str | None = None, timeout: float = 10.0) -> tuple[int, Any]:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} if data else {}
        request = urllib.request.Request(self.url + path, data=data, headers=headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    def state(self, model: str) -> str:
        return str(self.ask("/models")[1]["models"][model]["state"])

    def stop(self, number: int = signal.SIGTERM, timeout: float = 20.0) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        status = self.process.wait(timeout)
        self._reader.join(5)
        return status


@contextlib.contextmanager
def gate(folder: Path, *, environ: dict[str, str] | None = None, **top: Any) -> Iterator[GateProcess]:
    """Serve a configuration made of `top` for the duration of the block, with `environ` added to the environment."""
    process = GateProcess(write(folder, **top), env=environ)
    try:
        yield process
    finally:
        process.stop()


def write(folder: Path, **top: Any) -> Path:
    router = {"router_port": 0, "health_interval_seconds": 0.1, "shutdown_timeout_seconds": 2, **top.pop("router", {})}
    body = {"router": router, "sleep_manager": QUICK, "log_dir": str(folder / "logs"), **top}
    path = folder / "models.yaml"
    path.write_text(yaml.safe_dump(body))
    return path
