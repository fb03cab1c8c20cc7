"""Time to the first token of a long prompt on a real vLLM: computed, from the engine's own cache, from kvd's arena and disk.

    python -m tests.bench.ttft [--tokens 3900] [--rounds 3]        JSON lines, one a way, with what they are made of

Engine and scheduler run in processes of their own, as in production (an in-process engine spins and says nothing about
loads). The floor of a warm prefix is what the engine's own cache takes, plus moving the bytes once: by memcpy from the
arena, by O_DIRECT from disk, both measured here on the same machine. Needs .venv-vllm (`make test` makes it).

A small request goes before each one that is timed: for a second after it has heard from its worker, the engine's core polls
for the next answer and takes a processor from the computation, where there are only two. So all ways are timed while it
does. That request is a new one each time: it loads nothing.
"""

import argparse
import contextlib
import json
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from kvtools.segments.stats import find_stats, read_stats
from tests.bench.measure import Result, seconds
from tests.support.daemon import Daemon
from tests.support.engine import Engine, installed, model, prompt

GRACE_S = 0.015
"""What finding, planning and reporting may take, beside moving the bytes."""
MARGIN = 1.3
COLD_BUDGET = 0.2
BLOCK = 4 << 20


@dataclass
class Times:
    """Seconds to the first token, by way, and what the floor is made of."""

    tokens: int
    loaded_bytes: int = 0
    copy_s: float = 0.0
    disk_s: float = 0.0
    counted: dict[str, float] = field(default_factory=dict)
    """The connector's own counters at the end of the first engine."""
    ways: dict[str, list[float]] = field(default_factory=dict)

    def add(self, way: str, answer: dict[str, Any], *, cached: bool) -> None:
        if bool(answer["cached"]) != cached:
            raise AssertionError(f"{way}: {answer['cached']} tokens were cached")
        self.ways.setdefault(way, []).append(answer["seconds"])

    def median(self, way: str) -> float:
        return statistics.median(self.ways[way])

    def ratio(self, way: str, beside: str, more_s: float) -> float:
        """The median of the rounds' own ratios: one way beside another plus `more_s` seconds."""
        pairs = zip(self.ways[way], self.ways[beside], strict=True)
        return statistics.median(one / (other + more_s) for one, other in pairs)


def run(tokens: int, *, rounds: int = 3, size: str = "small") -> Times:
    """All ways for prompts of `tokens` tokens. Raises AssertionError where something was cached that should not be, or not."""
    times = Times(tokens)
    daemon = Daemon(max_bytes="2GiB", tier="4GiB")
    one = prompt(tokens, tokens)
    how: dict[str, Any] = {"tokens": 1, "logprobs": None}
    try:
        daemon.start()
        with daemon.client(timeout_s=60) as client:
            with _engine(size, daemon, tokens) as engine:
                fresh = iter(range(tokens + 1, tokens + 1000))

                def stir() -> None:
                    engine.one(prompt(64, next(fresh)), **how)

                stir()
                times.add("cold", engine.one(one, **how), cached=False)
                client.flush()
                for _ in range(rounds):  # in turn, so that all see the same machine
                    stir()
                    times.add("own", engine.one(one, **how), cached=True)
                    engine.ask("reset")
                    stir()
                    times.add("arena", engine.one(one, **how), cached=True)
                    engine.ask("reset")
                    client.clear(arena_only=True, all_namespaces=True)
                    stir()
                    times.add("disk", engine.one(one, **how), cached=True)
                times.counted = _counters(engine.pid)
                times.loaded_bytes = int(times.counted["load_bytes_total"] / times.counted["loads_total"])
            daemon.restart()
        with _engine(size, daemon, tokens) as engine:
            engine.one(prompt(64), **how)
            times.add("restart", engine.one(one, **how), cached=True)
        times.copy_s, times.disk_s = _floors(times.loaded_bytes, daemon.folder)
    finally:
        daemon.remove()
    return times


def _counters(pid: int) -> dict[str, float]:
    """What the connector's worker counted, from shared memory: it is a child of the engine's processes."""
    for path in find_stats(kind="connector"):
        reading = read_stats(path)
        if (
            reading.alive
            and not path.name.endswith("scheduler")
            and pid in {parent.pid for parent in psutil.Process(reading.pid).parents()}
        ):
            time.sleep(1.0)  # it writes twice a second
            reading = read_stats(path)
            return {metric.name: reading.get(metric.name) or 0 for metric in reading.schema}
    raise AssertionError("the engine publishes no numbers")


def _engine(size: str, daemon: Daemon, tokens: int) -> Engine:
    return Engine(
        model("llama", size), daemon.socket, processes=True, max_model_len=tokens + 100, env={"VLLM_CPU_KVCACHE_SPACE": "2"}
    )


def _floors(size: int, folder: Path) -> tuple[float, float]:
    """Seconds to copy `size` bytes between two buffers already faulted in, and to read them from disk past the page cache."""
    one, two = np.ones(size, dtype=np.uint8), np.zeros(size, dtype=np.uint8)
    copy_s = statistics.median(seconds(lambda: np.copyto(two, one)) for _ in range(5))
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        size = -(-size // BLOCK) * BLOCK
        for _ in range(size // BLOCK):
            file.write(os.urandom(1 << 20) * (BLOCK >> 20))
        file.flush()
        os.fsync(file.fileno())
        buffer = mmap.mmap(-1, BLOCK)
        try:
            handle = os.open(file.name, os.O_RDONLY | os.O_DIRECT)
        except OSError:
            handle = os.open(file.name, os.O_RDONLY)
        with contextlib.closing(buffer):
            disk_s = statistics.median(
                seconds(lambda: [os.preadv(handle, [buffer], at) for at in range(0, size, BLOCK)]) for _ in range(3)
            )
        os.close(handle)
    return copy_s, disk_s


def measure(*, quick: bool = False) -> Iterator[Result]:
    """Results for the bench's table: 3 900 tokens, and 11 700 unless `quick`."""
    if not installed("ttft"):
        return
    for tokens in (3900,) if quick else (3900, 11700):
        yield from results(run(tokens, rounds=2 if quick else 15))


def results(times: Times) -> Iterator[Result]:
    own, cold = times.median("own"), times.median("cold")
    of = f"first token of {times.tokens} tokens, {times.loaded_bytes >> 20} MiB"
    name = f"ttft.{times.tokens}"
    for way, moving in (("arena", times.copy_s), ("disk", times.disk_s)):
        more_s = MARGIN * moving + GRACE_S
        value = times.median(way)
        what = f"{of}: from kvd's {way}"
        ratio = round(times.ratio(way, "own", more_s), 3)
        yield Result(f"{name}.{way}", what, round(value, 4), "s", round(own + more_s, 4), ratio, 1.0, at_most=True)
        yield Result(
            f"{name}.{way}.cold", f"{what}, beside computing it", round(value, 4), "s", round(cold, 4),
            round(value / cold, 4), COLD_BUDGET, at_most=True,
        )  # fmt: skip
    value = times.median("restart")
    what = f"{of}: after restarts of both, beside computing it"
    yield Result(f"{name}.restart", what, round(value, 4), "s", round(cold, 4), round(value / cold, 4), COLD_BUDGET, at_most=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, action="append")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--size", default="small", choices=["tiny", "small"])
    options = parser.parse_args()
    for tokens in options.tokens or [3900]:
        times = run(tokens, rounds=options.rounds, size=options.size)
        for way, found in times.ways.items():
            print(json.dumps({"way": way, "tokens": tokens, "seconds": [round(one, 4) for one in found]}))
        print(json.dumps({"bytes": times.loaded_bytes, "memcpy_s": round(times.copy_s, 4), "disk_s": round(times.disk_s, 4)}))
        for kind in ("load", "save"):
            moved, took = times.counted[f"{kind}_bytes_total"], times.counted[f"{kind}_seconds_total"]
            print(
                json.dumps(
                    {"way": kind, "bytes": int(moved), "seconds": round(took, 4), "gib_per_s": round(moved / took / (1 << 30), 2)}
                )
            )
        for result in results(times):
            print(json.dumps(result.as_json()))


if __name__ == "__main__":
    main()
