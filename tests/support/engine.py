"""A real vLLM in a process of its own, so that tests can start, ask, kill and restart it.

    with Engine(model, daemon.socket) as engine:
        first, = engine.generate([prompt])

In-process inside that process (VLLM_ENABLE_V1_MULTIPROCESSING=0) unless `processes=True`: quicker to start and open to
questions about blocks; but it spins without sleeping, so it says nothing about how long a load takes.
"""

import contextlib
import functools
import importlib.util
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Self

from kvtools.segments.stats import find_stats, remove_unlocked

HERE = Path(__file__).parent
VENV = HERE.parent.parent / ".venv-vllm" / "bin" / "python"
PYTHON = sys.executable if importlib.util.find_spec("vllm") else str(VENV)
"""The interpreter that has the engine: this one, or the one of `make test`."""
TRANSFER = {"kv_connector": "KvdConnector", "kv_role": "kv_both", "kv_connector_module_path": "kvd.connector"}
MODELS = Path(tempfile.gettempdir()) / f"kvt-models-{os.getuid()}"


def installed(what: str) -> bool:
    """Whether there is an engine. Where there is none, `what` is said not to be measured: a table without it looks complete."""
    there = Path(PYTHON).exists()
    if not there:
        print(f"{what}: not measured, there is no .venv-vllm (`make test` makes it)", file=sys.stderr)
    return there


@functools.cache
def model(kind: str = "llama", size: str = "tiny") -> Path:
    """A model made once per machine. It is deterministic, so it stays for the next run."""
    folder = MODELS / f"{kind}-{size}"
    if not (folder / "model.safetensors").exists():
        MODELS.mkdir(mode=0o700, exist_ok=True)
        script = HERE / "tiny_model.py"
        subprocess.run([PYTHON, str(script), str(folder), "--kind", kind, "--size", size], check=True, capture_output=True)
    return folder


def prompt(tokens: int, seed: int = 0) -> list[int]:
    """Random token ids: no two blocks alike, so that a block in the wrong place changes the answer."""
    source = random.Random(seed)
    return [source.randrange(3, 500) for _ in range(tokens)]


class EngineError(AssertionError):
    """A command failed inside the engine."""


class Nursery:
    """A process that has imported the engine and forks one for each `Engine(processes=False)`: 8 s of imports, once."""

    current: "Nursery | None" = None

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kvt-nursery-"))
        self.process = subprocess.Popen(
            [PYTHON, str(HERE / "engine_main.py"), "nursery"],
            env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._count = 0
        # For a moment after exec a process has no command line, and what counts processes takes it for dead.
        while not Path(f"/proc/{self.process.pid}/cmdline").read_bytes():
            time.sleep(0.001)

    def start(self, arguments: dict[str, Any], env: Mapping[str, str], log: str) -> tuple[int, IO[str], IO[str]]:
        """Fork an engine: its pid, and the two ends to talk to it."""
        self._count += 1
        ways = [self.folder / f"{self._count}.{end}" for end in ("in", "out")]
        for way in ways:
            os.mkfifo(way, 0o600)
        wanted = {"arguments": arguments, "env": dict(env), "log": log, "in": str(ways[0]), "out": str(ways[1])}
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(wanted) + "\n")
        self.process.stdin.flush()
        reader = ways[1].open()
        writer = ways[0].open("w")
        # Nothing of a library's imports goes to stdout after the first fork, but much before it.
        while not (line := self.process.stdout.readline()).strip().isdigit():
            assert line, "the nursery ended"
        return int(line), reader, writer

    def stop(self) -> None:
        self.process.kill()  # it holds nothing, and may still be importing
        self.process.wait(20)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()
        shutil.rmtree(self.folder)


class Engine:
    """A started engine. `transfer` replaces the connector's configuration; None runs without any connector."""

    def __init__(
        self,
        folder: Path,
        socket: Path | None = None,
        *,
        processes: bool = False,
        env: Mapping[str, str] | None = None,
        transfer: Mapping[str, Any] | None = TRANSFER,
        **arguments: Any,
    ) -> None:
        mine = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(processes)),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            **({"KVD_SOCKET": str(socket)} if socket else {}),
            **(env or {}),
        }
        if transfer is not None:
            arguments["kv_transfer_config"] = dict(transfer)
        arguments = {"model": str(folder), "dtype": "float32", **arguments}
        self.log = tempfile.NamedTemporaryFile("w+", prefix="kvt-engine-", suffix=".log")  # noqa: SIM115 - lives as long as we
        self._process: subprocess.Popen[bytes] | None = None
        if Nursery.current is not None and not processes:
            self.pid, self._in, self._out = Nursery.current.start(arguments, mine, self.log.name)
        else:
            self._spawn(arguments, mine)
        self._pidfd = os.pidfd_open(self.pid)
        self._ready = False

    def _spawn(self, arguments: dict[str, Any], env: Mapping[str, str]) -> None:
        to_child, mine_out = os.pipe()
        mine_in, from_child = os.pipe()
        self._process = subprocess.Popen(
            [PYTHON, str(HERE / "engine_main.py"), str(to_child), str(from_child), json.dumps(arguments)],
            pass_fds=(to_child, from_child),
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
        )
        self.pid = self._process.pid
        os.close(to_child)
        os.close(from_child)
        self._out: IO[str] = os.fdopen(mine_out, "w")
        self._in: IO[str] = os.fdopen(mine_in)

    def __enter__(self) -> Self:
        try:
            return self.wait()
        except BaseException:  # a test's time-out, too: nobody else would end it
            self.stop(0.0)
            raise

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait(self) -> Self:
        """Until it is ready to serve. Starting several and then waiting for each is quicker than one after the other."""
        if not self._ready:
            self._answer("its start")
            self._ready = True
        return self

    def ask(self, command: str, **more: Any) -> Any:
        """One command of engine_main.Engine. Raises EngineError with the engine's log where it fails."""
        self.send(command, **more)
        return self._answer(command)

    def send(self, command: str, **more: Any) -> None:
        """Send a command; `answer` takes what comes back."""
        self.wait()
        self._out.write(json.dumps([command, more]) + "\n")
        self._out.flush()

    def answer(self) -> Any:
        return self._answer("the last command")

    def _answer(self, command: str) -> Any:
        line = self._in.readline()
        if not line:
            raise EngineError(f"the engine ended in {command}:\n{self.text()[-6000:]}")
        answer = json.loads(line)
        if "error" in answer:
            raise EngineError(f"{command}: {answer['error']}\n{self.text()[-6000:]}")
        return answer["ok"]

    def generate(self, prompts: list[list[int]], **more: Any) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.ask("generate", prompts=prompts, **more)
        return found

    def one(self, prompt: list[int], **more: Any) -> dict[str, Any]:
        """`generate` for a single prompt."""
        return self.generate([prompt], **more)[0]

    def metrics(self) -> dict[str, float]:
        """vLLM's metrics; what never moved is 0."""
        return defaultdict(float, self.ask("metrics"))

    def text(self) -> str:
        """What it logged so far."""
        return Path(self.log.name).read_text(errors="replace")

    def stop(self, timeout_s: float = 30.0) -> None:
        """End it as an operator would: it shuts its connectors down."""
        with contextlib.suppress(BrokenPipeError):
            self._out.close()
        if not self._gone(timeout_s):
            self.kill9()
        if self._process is not None:
            self._process.wait(10)
        for path in find_stats(kind="connector"):
            remove_unlocked(path)  # of processes that vLLM killed because they were slow to end
        self._in.close()
        self.log.close()
        os.close(self._pidfd)

    def kill9(self) -> None:
        self.end_by(signal.SIGKILL)

    def end_by(self, number: int) -> None:
        """Send a signal that ends it, and wait until it is gone."""
        signal.pidfd_send_signal(self._pidfd, number)
        assert self._gone(30), f"it outlives {signal.strsignal(number)}"

    def _gone(self, timeout_s: float) -> bool:
        return bool(select.select([self._pidfd], [], [], timeout_s)[0])
