"""A `kvd serve` of the demo's own: a child process on a socket in the scratch folder.

It is a session of its own, so that Ctrl-C reaches the demo alone, which then stops it in order. Readiness is the daemon's
own word (NOTIFY_SOCKET), as systemd would hear it.
"""

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from kvtools.errors import KvError, TimedOut
from kvtools.interrupts import interrupts_held

READY_S = 30.0
STOP_S = 30.0


def program(name: str) -> list[str]:
    """The console script `name` of this very installation."""
    script = Path(sys.executable).with_name(name)
    return [str(script)] if script.exists() else [sys.executable, "-m", {"kvctl": "kvtools", "kvd": "kvd", "kvtop": "kvtop"}[name]]


class DemoDaemon:
    """One daemon that can be started, stopped and started again on the same socket and disk tier."""

    def __init__(self, scratch: Path, *, max_bytes: str, long_bytes: str) -> None:
        self.socket = scratch / "kvd.sock"
        self.tier = scratch / "tier"
        self.log = scratch / "kvd.log"
        self.tier.mkdir()
        self.words = [
            *("serve", "--socket", str(self.socket), "--max-bytes", max_bytes),
            *("--long-path", str(self.tier), "--long-bytes", long_bytes),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def command(self) -> str:
        """The command line, as a person would type it."""
        return shlex.join(["kvd", *self.words])

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    def start(self) -> float:
        """Start it; the seconds until it was ready. Raises KvError with the end of its log when it ends first."""
        begun = time.monotonic()
        address = self.socket.with_name("notify")
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify, self.log.open("ab") as log:
            address.unlink(missing_ok=True)
            notify.bind(str(address))
            notify.settimeout(0.05)
            with interrupts_held():
                self._process = subprocess.Popen(
                    [*program("kvd"), *self.words],
                    env={**os.environ, "NOTIFY_SOCKET": str(address)},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            while not self._heard_ready(notify):
                if (status := self._process.poll()) is not None:
                    self._process = None
                    raise KvError(f"kvd serve ended with status {status}: {self._last_line()}")
                if time.monotonic() - begun > READY_S:
                    raise TimedOut(f"kvd serve was not ready after {READY_S:g} s: {self._last_line()}")
        return time.monotonic() - begun

    @staticmethod
    def _heard_ready(notify: socket.socket) -> bool:
        try:
            return b"READY=1" in notify.recv(4096)
        except TimeoutError:
            return False

    def stop(self) -> float:
        """Stop it in order (it writes to disk what is still on its way there); the seconds that took."""
        if self._process is None:
            return 0.0
        begun = time.monotonic()
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None
        return time.monotonic() - begun

    def bytes_on_disk(self) -> int:
        """Bytes that the tier's files take."""
        return sum(path.stat().st_blocks * 512 for path in self.tier.rglob("*") if path.is_file())

    def _last_line(self) -> str:
        lines: Sequence[str] = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"
