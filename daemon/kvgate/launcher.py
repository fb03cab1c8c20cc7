"""How one engine process is started: its command line, its environment, and the two ways to hold it.

The command is vLLM's server in the instance's own Python (`venv_path`, else ours), or `command` where that is given. Added
where the configuration is silent: `--host 127.0.0.1` (clients go through the gate), the short name as a second served
name, VLLM_SERVER_DEV_MODE=1 (the sleep endpoints), a segment name of its own (two engines that share one overwrite each
other's numbers), and the kvd connector when `kvd_socket` is given.

A process runs under a warden (warden.py), which leads a session of its own, so that all it starts is one process group: ending
the group ends everything. The warden does that when the gate dies, also by kill -9, so no engine is left holding a GPU.

`tmux` instead puts the engine into a session `kvgate-NAME` of the user's tmux server, to be looked at by hand; it lives
until the gate, or the user, ends it. It outlives a gate that is killed, whose successor takes it over. Its environment goes by
a file (enter.py), for the server's own is another, and words are everybody's to read.
"""

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from kvgate.config import ModelConfig, plain
from kvgate.errors import EngineError

log = logging.getLogger("kvgate.launcher")

WARDEN = Path(__file__).with_name("warden.py")
ENTER = Path(__file__).with_name("enter.py")


class Held(Protocol):
    """A running engine process."""

    pid: int

    async def wait(self) -> int:
        """Its exit status, once it has ended (negative: the signal that ended it; 0 where nobody can know)."""
        ...

    async def end(self, patience_s: float) -> None:
        """End it: SIGTERM, then after `patience_s` SIGKILL for all that is left of its group. Returns when all are gone."""
        ...


def argv(config: ModelConfig) -> list[str]:
    """The engine's command line."""
    instance = config.instance
    assert instance is not None
    given = {word.partition("=")[0] for word in instance.args}
    if instance.command:
        return [*instance.command, *instance.args]
    python = str(Path(instance.venv).expanduser() / "bin" / "python") if instance.venv else sys.executable
    words = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", instance.model, *instance.args]
    if "--host" not in given:
        words += ["--host", "127.0.0.1"]
    if "--served-model-name" not in given and instance.name != instance.model:
        words += ["--served-model-name", instance.model, instance.name]
    if instance.kvd_socket and "--kv-transfer-config" not in given:
        words += ["--kv-transfer-config", CONNECTOR]
    return words


CONNECTOR = (
    '{"kv_connector":"KvdConnector","kv_role":"kv_both","kv_connector_module_path":"kvd.connector",'
    '"kv_load_failure_policy":"recompute"}'
)


def segment_of(config: ModelConfig) -> str:
    """The name of the pool segment this engine makes, if it makes one."""
    assert config.instance is not None
    return config.segment or "kvgate_" + plain(config.instance.name)[:57]


def environment(config: ModelConfig, base: Mapping[str, str]) -> dict[str, str]:
    """The engine's environment: ours, what kvgate adds, and last what the configuration says."""
    instance = config.instance
    assert instance is not None
    name = segment_of(config)
    added = {"VLLM_SERVER_DEV_MODE": "1", "KVCACHED_IPC_NAME": name, "PYTHONUNBUFFERED": "1"}
    if config.segment and "ENABLE_KVCACHED" not in dict(instance.environment):  # its engines have a pool already
        added["KVTOOLS_SEGMENT"] = name
    if instance.kvd_socket:
        # The gate puts engines to sleep, where vLLM resets its caches; their weights are the same when they wake.
        added |= {"KVD_SOCKET": instance.kvd_socket, "KVD_RESET": "keep"}
    if config.devices:
        listed = ",".join(map(str, config.devices))
        added |= {"CUDA_VISIBLE_DEVICES": listed, "HIP_VISIBLE_DEVICES": listed}
    # The gate's own secrets are not the engine's business.
    kept = {key: value for key, value in base.items() if not key.startswith("KVGATE_")}
    return {**kept, **added, **dict(instance.environment)}


class Subprocess:
    """An engine as our child."""

    def __init__(self, process: asyncio.subprocess.Process, reader: "asyncio.Task[None]") -> None:
        self._process = process
        self._reader = reader
        self.pid = process.pid

    @classmethod
    async def start(
        cls, words: Sequence[str], env: Mapping[str, str], on_output: Callable[[bytes], None], patience_s: float
    ) -> "Subprocess":
        """Start `words`; every piece of output goes to `on_output`. Raises EngineError when the program is not there.

        `patience_s`: what it has to end by itself, should the gate die.
        """
        found = _program(words[0], env)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", str(WARDEN), str(os.getpid()), f"{patience_s:g}", found, *words[1:]),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=dict(env),
            start_new_session=True,
        )
        assert process.stdout is not None
        return cls(process, asyncio.create_task(_drain(process.stdout, on_output), name=f"output of {process.pid}"))

    async def wait(self) -> int:
        return await self._process.wait()

    async def end(self, patience_s: float) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
            await _within(self._process.wait(), patience_s)
        # The leader is gone or has had its time; whatever it left in its group has no owner any more.
        await end_group(self.pid)
        await self._process.wait()
        await asyncio.wait([self._reader], timeout=1.0)
        self._reader.cancel()


async def _within(what: Coroutine[Any, Any, object], seconds: float) -> bool:
    """Wait for this, up to so long; whether it has come to its end.

    Not `asyncio.timeout`: engines are ended in tasks that were cancelled, and there that of Python 3.11.2 (Debian 12 has it) takes
    the end of its time for one more cancellation, and the engine would be left running.
    """
    waiting = asyncio.ensure_future(what)
    await asyncio.wait([waiting], timeout=seconds)
    ended = waiting.done()
    waiting.cancel()
    return ended


async def end_group(pgid: int) -> None:
    """SIGKILL a process group until nothing of it runs (2 s at most: a process inside the kernel cannot be hurried)."""
    deadline = time.monotonic() + 2.0
    while _runs(pgid) and time.monotonic() < deadline:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pgid, signal.SIGKILL)
        await asyncio.sleep(0.02)


def _runs(pgid: int) -> bool:
    """Whether a process of the group is alive. One that ended and was not reaped still takes signals, so those do not tell."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_bytes().rpartition(b")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[2]) == pgid and fields[0] not in {b"Z", b"X"}:
            return True
    return False


async def _drain(stream: asyncio.StreamReader, on_output: Callable[[bytes], None]) -> None:
    while piece := await stream.read(1 << 16):
        on_output(piece)


def _program(word: str, env: Mapping[str, str]) -> str:
    import shutil

    found = shutil.which(word, path=env.get("PATH"))
    if found is None:
        raise EngineError(f"cannot start {word}: no such program")
    return found


MARK = "@kvgate"
"""The session's option that says whose it is ('PID:START DIGEST'): the gate, and what it was started as."""
LEFT_S = 10.0
ENTER_S, ENTER_POLL_S = 10.0, 0.02
"""How long a tmux session may take to start the little program that becomes the engine."""


def _start_of(pid: int) -> str:
    """When a process started, in clock ticks; '' where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _me() -> str:
    return f"{os.getpid()}:{_start_of(os.getpid())}"


def _lives(owner: str) -> bool:
    pid, _, start = owner.partition(":")
    return pid.isdecimal() and bool(start) and _start_of(int(pid)) == start


async def _mark(session: str, digest: str) -> None:
    await _tmux("set-option", "-t", f"={session}:", MARK, f"{_me()} {digest}")


class Tmux:
    """An engine in a tmux session."""

    def __init__(self, session: str, pid: int, pidfd: int) -> None:
        self.session, self.pid = session, pid
        self._pidfd = pidfd
        self._gone = asyncio.Event()
        asyncio.get_running_loop().add_reader(pidfd, self._on_exit)

    @classmethod
    async def start(
        cls, name: str, words: Sequence[str], env: Mapping[str, str], base: Mapping[str, str], ready: Callable[[], Awaitable[None]]
    ) -> "Tmux":
        """Start `words` in session `kvgate-NAME`, or take over what a gate that was killed left there. Raises EngineError.

        Taken over is only the very same command and environment: it holds a GPU and has a model loaded. Anything else is
        ended first. `ready` may refuse a new start, by raising. A session whose gate is alive is that gate's, and is left alone.
        """
        session = "kvgate-" + plain(name)
        found = _program(words[0], env)
        # What differs from the gate's own environment, and where segments lie: the rest changes with every log-in.
        ours = [f"{key}={value}" for key, value in env.items() if base.get(key) != value or key == "KVTOOLS_SHM"]
        digest = hashlib.sha256("\0".join([found, *words[1:], *sorted(ours)]).encode()).hexdigest()[:32]
        if left := await cls._left(session, digest):
            return left
        await ready()
        with _environment_file(env) as file:
            # Several words after the options are run as they are, without a shell.
            enter = (sys.executable, "-I", "-S", str(ENTER), str(file))
            await _tmux("new-session", "-d", "-s", session, "--", *enter, found, *words[1:])
            await _taken(file)
        pid = int(await _tmux("display-message", "-p", "-t", f"={session}:", "#{pane_pid}"))
        try:
            made = cls(session, pid, os.pidfd_open(pid))
        except ProcessLookupError:
            raise EngineError(f"{words[0]} ended at once in tmux session {session}") from None
        await _mark(session, digest)
        return made

    @classmethod
    async def _left(cls, session: str, digest: str) -> "Tmux | None":
        """What an earlier gate left in `session`, if it is the same engine; another one is ended. Raises EngineError."""
        try:
            pid = int((await _tmux("list-panes", "-t", f"={session}:", "-F", "#{pane_pid}")).split()[0])
            found = cls(session, pid, os.pidfd_open(pid))
        except (EngineError, ValueError, IndexError, ProcessLookupError):
            return None  # no such session, no server, or it ends just now
        owner, _, made_of = (await _tmux("show-options", "-qv", "-t", f"={session}:", MARK)).partition(" ")
        if owner != _me() and _lives(owner):
            found.forget()
            raise EngineError(f"the tmux session {session} belongs to another kvgate (process {owner.partition(':')[0]})")
        if made_of == digest:
            log.info("taking over process %d in tmux session %s, which an earlier gate left", pid, session)
            await _mark(session, digest)
            return found
        log.warning("ending process %d in tmux session %s, which is not what is configured", pid, session)
        await found.end(LEFT_S)
        return None

    def forget(self) -> None:
        """Watch it no longer; it runs on."""
        self._on_exit()

    def _on_exit(self) -> None:
        if not self._gone.is_set():
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._gone.set()

    async def wait(self) -> int:
        await self._gone.wait()
        return 0  # tmux is the parent: the status is its own

    async def end(self, patience_s: float) -> None:
        if not self._gone.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)
            await _within(self._gone.wait(), patience_s)
        await end_group(self.pid)
        with contextlib.suppress(EngineError):
            await _tmux("kill-session", "-t", f"={self.session}")
        if not await _within(self._gone.wait(), 2.0):
            raise TimeoutError


@contextlib.contextmanager
def _environment_file(env: Mapping[str, str]) -> Iterator[Path]:
    """A file of mode 0600 that holds `env`, for enter.py, which removes it; so do we, should that not have come about."""
    fd, name = tempfile.mkstemp(prefix="kvgate-")
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            json.dump(dict(env), file)
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


async def _taken(file: Path) -> None:
    """Wait until `file` was read and removed, or nobody can be waited for any longer."""
    left = ENTER_S
    while _there(file) and left > 0:
        await asyncio.sleep(ENTER_POLL_S)
        left -= ENTER_POLL_S


def _there(file: Path) -> bool:
    return file.exists()


async def _tmux(*words: str) -> str:
    # Into a file, not a pipe: the server that the first session starts keeps the pipe's other end open for good.
    with tempfile.TemporaryFile() as output:
        try:
            process = await asyncio.create_subprocess_exec(
                "tmux", *words, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=asyncio.subprocess.STDOUT
            )
        except FileNotFoundError:
            raise EngineError("launcher: tmux needs tmux, which is not installed") from None
        status = await process.wait()
        output.seek(0)
        said = output.read(1 << 16).decode(errors="replace").strip()
    if status:
        raise EngineError(f"tmux {words[0]}: {said or f'exit status {status}'}")
    return said
