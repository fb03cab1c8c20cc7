"""What the bench makes: daemons, worker processes and folders, and that nothing of it stays behind.

Everything is written down here in the same stretch that makes it, with signals held back meanwhile, and undone by `remove`,
in the order last to first, once, also when the bench ends by Ctrl-C, SIGTERM or an error. The first signal unwinds the
bench; what comes after it waits for the end of the removal, which takes seconds at most.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from kvd.errors import KvdError, Unavailable
from kvd.wire.client import Client
from kvtools.errors import KvError, UsageError, hint_for
from kvtools.interrupts import interrupts_held

NAMESPACE = "kvd bench"
READY_S = 30.0
STOP_S = 8.0
DRAIN = "1s"


class Own:
    """All that one bench has made."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def folder(self, where: Path | None = None) -> Path:
        """A new folder (in `where`). Raises UsageError when there can be none."""
        try:
            with interrupts_held():
                made = Path(tempfile.mkdtemp(prefix="kvd-bench-", dir=where))
                self._undo.append(lambda: shutil.rmtree(made, ignore_errors=True))
        except OSError as error:
            hint = hint_for(error, "name a folder that exists and that you may write")
            raise UsageError(f"cannot make a folder in {where}: {error.strerror}", hint=hint) from None
        return made

    def part(self) -> "Own":
        """A part of it that may be removed before the rest."""
        part = Own()
        self._undo.append(part.remove)
        return part

    def process(
        self, words: Sequence[str], *, stop_s: float = STOP_S, talk: bool = False, env: Mapping[str, str] | None = None
    ) -> "subprocess.Popen[str]":
        """A child in a session of its own: Ctrl-C reaches the bench alone. `talk`: with pipes to and from it.

        What configures the operator's own daemon (KVD_*) does not reach it, only what `env` says.
        """
        pipe = subprocess.PIPE if talk else None
        clean = {name: value for name, value in os.environ.items() if not name.startswith("KVD_")}
        with interrupts_held():
            child = subprocess.Popen(
                words,
                stdin=pipe or subprocess.DEVNULL,
                stdout=pipe or sys.stderr,
                start_new_session=True,
                text=True,
                env={**clean, **(env or {})},
            )
            self._undo.append(lambda: _end(child, stop_s))
        return child

    def daemon(self, *words: str, max_bytes: int, env: Mapping[str, str] | None = None) -> Client:
        """A client of a daemon of our own, which answers. Raises KvdError when it does not start."""
        socket = self.folder() / "kvd.sock"
        command = [sys.executable, "-m", "kvd", "serve", "--socket", str(socket), "--max-bytes", str(max_bytes)]
        command += ["--log-level", "WARNING", "--drain-timeout", DRAIN, *words]
        child = self.process(command, env=env)
        client = self.client(socket)
        deadline = time.monotonic() + READY_S
        while True:
            try:
                client.ping()
            except Unavailable:
                if child.poll() is not None or time.monotonic() > deadline:
                    raise KvdError("the daemon to measure did not start", hint="its message is above") from None
                time.sleep(0.02)
            else:
                return client

    def client(self, socket: Path) -> Client:
        """A client, closed at the end; what it stored is forgotten there."""
        client = Client(socket, namespace=NAMESPACE, timeout_s=60)
        self._undo.append(lambda: _forget(client))
        return client

    def undo(self, work: Callable[[], None]) -> None:
        """Do this too at the end."""
        self._undo.append(work)

    def remove(self) -> None:
        """Undo everything."""
        with interrupts_held():
            while self._undo:
                self._undo.pop()()


def _end(child: "subprocess.Popen[str]", stop_s: float) -> None:
    for stream in (child.stdin, child.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
    child.terminate()
    try:
        child.wait(stop_s)
    except subprocess.TimeoutExpired:
        os.kill(child.pid, 9)
        child.wait()


def _forget(client: Client) -> None:
    client.timeout_s = 2.0
    with contextlib.suppress(KvError):
        client.clear()
    client.close()
