"""What the dashboard costs: CPU to the first frame, CPU while it runs with 20 and with 100 segments, and memory.

The real command on a real terminal (a pty of 120 x 40 whose other end is read, as a terminal emulator does), against segments
of its own whose numbers all change between any two readings. CPU is user and system time from /proc, so a busy machine
changes little.
"""

import contextlib
import fcntl
import os
import pty
import select
import struct
import subprocess
import tempfile
import termios
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtools.segments import owner, pool
from kvtools.segments.stats import Metric, StatsWriter
from tests.bench.measure import Result
from tests.support.processes import SCRIPTS, compile_sources

GIB = 1 << 30
FIRST_FRAME_S = 0.5
SHARE_20, SHARE_100 = 0.03, 0.08
MEMORY_MIB = 50.0
SIZE = (120, 40)
_TICK = os.sysconf("SC_CLK_TCK")


@dataclass
class Terminal:
    """kvtop on a pty; `cpu_s` and `rss_mib` are its own."""

    process: subprocess.Popen[bytes]
    screen: int
    drawn: bytes = b""

    @property
    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICK

    @property
    def rss_mib(self) -> float:
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(text.partition("VmRSS:")[2].split()[0]) / 1024

    def read(self, seconds: float, until: bytes = b"") -> bool:
        """Take what is drawn for some time, or until some text was drawn."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if select.select([self.screen], [], [], 0.05)[0]:
                try:
                    self.drawn += os.read(self.screen, 65536)
                except OSError:
                    return False
            if until and until in self.drawn:
                return True
        return not until


@contextlib.contextmanager
def terminal(*words: str) -> Iterator[Terminal]:
    """kvtop with these options on a pty of `SIZE`."""
    screen, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", SIZE[1], SIZE[0], 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor", "LANG": "C.UTF-8"}
    process = subprocess.Popen(
        [str(SCRIPTS / "kvtop"), *words], stdin=side, stdout=side, stderr=side, env=environment, start_new_session=True
    )
    os.close(side)
    try:
        yield Terminal(process, screen)
    finally:
        with contextlib.suppress(OSError):
            os.write(screen, b"q")
        try:
            process.wait(3)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(screen)


@contextlib.contextmanager
def busy_host(segments: int) -> Iterator[Path]:
    """A folder with segments, owners and a daemon's numbers, all of which change about twice a second."""
    with tempfile.TemporaryDirectory(prefix="kvtop-bench-", dir="/dev/shm") as folder:
        root = Path(folder)
        names = [f"engine-{number:03d}" for number in range(segments)]
        files, locks = [], []
        for number, name in enumerate(names):
            pool.create_pool(name, (1 + number % 7) * GIB, root=root)
            locks.append(owner.OwnerLock.acquire(name, owner.OwnerInfo(engine="vllm", model=f"model-{number}"), root=root))
            files.append(pool.PoolFile(name, root=root, writable=True))
        writer = StatsWriter("kvd", "bench0000000", list(_metrics()), root=root)
        done = threading.Event()
        mover = threading.Thread(target=_move, args=(files, writer, done))
        mover.start()
        try:
            yield root
        finally:
            done.set()
            mover.join()
            writer.close()
            for one in [*files, *locks]:
                one.close()


def _metrics() -> Iterator[Metric]:
    for name in ("sets_total", "gets_total", "hits_total", "misses_total", "set_bytes_total", "get_bytes_total", "evictions_total"):
        yield Metric(name, "counter", "", "")
    for name in ("entries", "arena_bytes_used", "arena_bytes_limit", "leases_active"):
        yield Metric(name, "gauge", "", "")
    for tier in ("disk", "s3"):
        for name in ("hits_total", "misses_total", "store_bytes_total", "load_bytes_total", "bytes_used", "bytes_limit"):
            yield Metric(f"tier_{name}", "counter" if name.endswith("total") else "gauge", "", "", {"tier": tier, "type": tier})


def _move(files: Sequence[pool.PoolFile], writer: StatsWriter, done: threading.Event) -> None:
    number = 0
    while not done.wait(0.45):
        number += 1
        for place, file in enumerate(files):
            file.write_usage(((number * 37 + place * 91) % 500) << 21, 64 << 20)
        with writer.update():
            for metric in writer.schema:
                at = writer.index(metric.name, **metric.labels)
                if metric.type == "counter":
                    writer.add(at, 1000 + number % 13)
                else:
                    writer.set(at, (8 + number % 5) * GIB)
        writer.heartbeat()


def first_frame_s() -> float:
    """CPU until the first numbers stand on the screen, the interpreter's start included."""
    best = float("inf")
    with busy_host(20) as root:
        for _ in range(3):
            with terminal("--shm", str(root)) as screen:
                if not screen.read(15, until=b"engine-0"):
                    raise RuntimeError("kvtop drew no segment")
                best = min(best, screen.cpu_s)
    return best


def steady(segments: int, seconds: float, view: str) -> tuple[float, float]:
    """(share of a core, resident MiB) at one reading a second."""
    with busy_host(segments) as root, terminal("--shm", str(root), "--view", view, "-r", "1") as screen:
        if not screen.read(15, until=b"engine-0"):
            raise RuntimeError("kvtop drew no segment")
        screen.read(3.0)
        before, begun = screen.cpu_s, time.monotonic()
        screen.read(seconds)
        share = (screen.cpu_s - before) / (time.monotonic() - begun)
        return share, screen.rss_mib


def measure(*, quick: bool = False) -> Iterator[Result]:
    """First frame, both loads, memory."""
    compile_sources()
    first = first_frame_s()
    yield _result("first_frame", "`kvtop`, CPU to the first frame", first, "s", FIRST_FRAME_S)
    seconds = 8.0 if quick else 20.0
    most = 0.0
    for segments, budget in ((20, SHARE_20), (100, SHARE_100)):
        share, memory = steady(segments, seconds, "overview")
        most = max(most, memory)
        yield _result(f"steady.{segments}", f"`kvtop`, {segments} segments at 1 s, share of a core", share, "", budget)
    yield _result("memory", "`kvtop`, resident memory", most, "MiB", MEMORY_MIB)


def _result(name: str, what: str, value: float, unit: str, budget: float) -> Result:
    return Result(f"kvtop.{name}", what, value, unit, budget, value / budget, 1.0, at_most=True)


if __name__ == "__main__":
    import json

    for result in measure():
        print(json.dumps(result.as_json()), flush=True)
