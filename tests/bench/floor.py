"""The floor of the control plane, `kvd.bench.floor`, as a process of the measurement's own."""

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvd.bench.floor import Echo, Exists, Floor, Lease, Store

__all__ = ["Echo", "Exists", "Floor", "Lease", "Store", "running"]


@contextmanager
def running() -> Iterator[Floor]:
    """The server, gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="kvt-floor-"))
    started: list[subprocess.Popen[str]] = []

    def start(words: list[str]) -> "subprocess.Popen[str]":
        started.append(subprocess.Popen(words, stdin=subprocess.DEVNULL, text=True))
        return started[-1]

    try:
        floor = Floor(folder, start)
        try:
            yield floor
        finally:
            floor.close()
    finally:
        for server in started:
            server.terminate()
            server.wait(10)
        shutil.rmtree(folder, ignore_errors=True)
