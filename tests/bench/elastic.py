"""The elastic pool: a block, a page, a limit on an idle engine, a whole engine with it and without; and kvctl beside the peer's.

    python -m tests.bench.elastic [--quick]        JSON lines

Blocks and pages are measured in CPU time of the thread, which a busy machine changes least; the budgets are the floors. A page's
first touch is the kernel's zeroing, so it is shown beside the same memset of memory that is there. The engines (where .venv-vllm
is) run in processes of their own, in turn, so that both see the same machine. `kvctl list` is compared with kvcached's own over the
same 64 segments, where KVCACHED_SRC names a checkout and KVCACHED_PYTHON an interpreter that has what it imports.
"""

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvtools.elastic.geometry import PageMemory, choose, planes_of
from kvtools.elastic.manager import KVCacheManager
from kvtools.elastic.memory import open_memory
from kvtools.elastic.pages import PageAllocator
from kvtools.segments import owner, pool
from kvtools.segments.stats import instance_of_pool, remove_unlocked, stats_name
from tests.bench.measure import Result
from tests.bench.startup import cpu_seconds
from tests.support.engine import PYTHON, Engine, installed, model, prompt
from tests.support.processes import PREFIX, SCRIPTS, SHARED_MEMORY, compile_sources

BLOCK_S, PAGE_S, LIMIT_S, THROUGHPUT, LIST = 2e-6, 20e-6, 0.2, 0.97, 8.0
PAGE = 2 << 20
SEGMENTS = 64


def _pool(layers: int = 1) -> tuple[Any, PageMemory, KVCacheManager]:
    """1 GiB of blocks of 32 KiB a layer, pages of 2 MiB a layer."""
    blocks, stride = (1 << 30) // (layers << 15), 1 << 15
    memory = open_memory("cpu", layers * stride * blocks)
    planes = planes_of((layer * stride * blocks, stride) for layer in range(layers))
    geometry = choose(planes, blocks, page_bytes=PAGE, granularity=memory.granularity)
    pages = PageMemory(memory, geometry)
    allocator = PageAllocator(pages, geometry.pages, min_reserved=0, max_reserved=4)
    return memory, pages, KVCacheManager(allocator, blocks, geometry.blocks_per_page, geometry.page_bytes)


def block_s(count: int, rounds: int) -> float:
    """CPU seconds to allocate and free a block of a warm page, `count` at a time; the least of several runs."""
    memory, _, manager = _pool(4)
    kept = manager.alloc(10)  # the page stays in use, as a busy engine's does
    assert kept is not None
    best = float("inf")
    for _ in range(rounds):
        turns = 20_000 // count
        begun = time.thread_time()
        for _ in range(turns):
            blocks = manager.alloc(count)
            assert blocks is not None
            manager.free(blocks)
        best = min(best, (time.thread_time() - begun) / turns / count)
    memory.close()
    return best


def page_s(rounds: int) -> tuple[float, float, float]:
    """CPU seconds to map one page of 2 MiB, to touch it first, and to write it again: medians."""
    memory, pages, manager = _pool()
    times: list[tuple[float, float, float]] = []
    for turn in range(rounds):
        page = turn * 7 % manager.allocator.pages
        at = memory.address + page * PAGE
        begun = time.thread_time()
        pages.map([page])
        mapped = time.thread_time()
        ctypes.memset(at, 1, PAGE)
        touched = time.thread_time()
        ctypes.memset(at, 2, PAGE)
        times.append((mapped - begun, touched - mapped, time.thread_time() - touched))
        pages.unmap([page])
    memory.close()
    mapping, touch, again = (statistics.median(column) for column in zip(*times, strict=True))
    return mapping, touch, again


def physical(pid: int) -> int:
    """Bytes the kernel holds behind an engine's KV memory files."""
    found: dict[int, int] = {}
    processes = [pid]
    for one in processes:
        for task in Path(f"/proc/{one}/task").glob("*/children"):
            processes += [int(word) for word in task.read_text().split()]
        for link in Path(f"/proc/{one}/fd").iterdir():
            if "kvtools-elastic" in os.readlink(link):
                found[link.stat().st_ino] = link.stat().st_blocks * 512
    return sum(found.values())


def _elastic_engine(name: str) -> Engine:
    return Engine(model(), transfer=None, processes=True, env={"KVTOOLS_SEGMENT": name})


def limit_s(engine: Engine, name: str, rounds: int) -> tuple[float, int]:
    """Seconds from writing a limit to the kernel's count of an idle engine's memory within it (the worst), and the bytes freed."""
    said = owner.read_owner(name)
    assert said is not None
    page, whole = said.info.page_bytes, said.info.start_capacity_bytes
    times, freed = [], 0
    for turn in range(rounds):
        owner.change_limit(name, whole, by="a bench")
        # Enough cached prefixes for most of a GiB would take minutes here: a hundred pages show what giving back costs.
        engine.generate([prompt(3000, 100 * turn + seed) for seed in range(12)], tokens=1)
        time.sleep(0.3)
        before = physical(engine.pid)
        begun = time.perf_counter()
        owner.change_limit(name, 2 * page, by="a bench")
        while physical(engine.pid) > 2 * page:
            if time.perf_counter() - begun > 10:
                raise RuntimeError("the limit does not hold")
            time.sleep(0.001)
        times.append(time.perf_counter() - begun)
        freed = max(freed, before - physical(engine.pid))
    return max(times), freed


def throughput(plain: Engine, elastic: Engine, rounds: int) -> tuple[float, float, float]:
    """Tokens a second (prompt and output) of both, medians, and the median over rounds of elastic/plain."""
    speeds: dict[Engine, list[float]] = {plain: [], elastic: []}
    for turn in range(rounds + 1):
        work = [prompt(600, 1000 * turn + seed) for seed in range(8)]
        for engine in (plain, elastic) if turn % 2 else (elastic, plain):
            begun = time.perf_counter()
            engine.generate(work, tokens=48)
            if turn:  # the first turn warms up
                speeds[engine].append(8 * 648 / (time.perf_counter() - begun))
    ratios = [b / a for a, b in zip(speeds[plain], speeds[elastic], strict=True)]
    return statistics.median(speeds[elastic]), statistics.median(speeds[plain]), statistics.median(ratios)


def _engines(quick: bool) -> Iterator[Result]:
    name = f"{PREFIX}bench"
    plain, elastic = Engine(model(), transfer=None, processes=True), _elastic_engine(name)
    try:
        plain.wait()
        elastic.wait()
        ours, theirs, ratio = throughput(plain, elastic, 2 if quick else 11)
        yield Result(
            "elastic.engine",
            "engine with the elastic pool, 8 prompts of 600 tokens, 48 out",
            ours,
            "tokens/s",
            theirs,
            ratio,
            THROUGHPUT,
        )
        took, freed = limit_s(elastic, name, 1 if quick else 5)
        what = f"limit on an idle engine, {freed >> 20} MiB of cached prefixes given back, worst of 5"
        yield Result("elastic.limit", what, took, "s", LIMIT_S, took / LIMIT_S, 1.0, at_most=True)
    finally:
        plain.stop()
        elastic.stop()
        remove_unlocked(SHARED_MEMORY / stats_name("pool", instance_of_pool(name)))


def _lists(quick: bool) -> Iterator[Result]:
    compile_sources()
    runs = 3 if quick else 15
    bare = cpu_seconds([sys.executable, "-c", "pass"], runs)
    names = [f"{PREFIX}list-{number:02d}" for number in range(SEGMENTS)]
    locks = []
    try:
        for number, name in enumerate(names):
            pool.create_pool(name, (1 + number % 7) << 30, used_bytes=number << 24)
            locks.append(owner.OwnerLock.acquire(name, owner.OwnerInfo("vllm", model=f"model-{number}")))
        ours = cpu_seconds([str(SCRIPTS / "kvctl"), "list"], runs)
        yield Result(
            f"elastic.list.{SEGMENTS}", f"`kvctl list`, {SEGMENTS} segments, CPU", ours, "s", bare, ours / bare, LIST, at_most=True
        )
        if source := os.environ.get("KVCACHED_SRC"):
            theirs = _peer_s(Path(source), names[0], 1 if quick else 5)
            what = f"`kvctl list` against kvcached's own, the same {SEGMENTS} segments, CPU"
            yield Result("elastic.list.peer", what, ours, "s", theirs, ours / theirs, 1.0, at_most=True)
    finally:
        for lock in locks:
            lock.close()
        for name in names:
            (SHARED_MEMORY / name).unlink(missing_ok=True)


def _peer_s(source: Path, name: str, runs: int) -> float:
    """CPU seconds of the peer's `kvctl list`, run from its checkout."""
    words = [os.environ.get("KVCACHED_PYTHON", PYTHON), "-m", "kvcached.cli.kvctl", "list"]
    path = os.pathsep.join([str(source), os.environ.get("KVCACHED_PATH", "")]).rstrip(os.pathsep)
    os.environ["PYTHONPATH"], before = path, os.environ.get("PYTHONPATH", "")
    try:
        with tempfile.TemporaryDirectory() as elsewhere:
            ran = subprocess.run(words, capture_output=True, text=True, cwd=elsewhere)
            if name not in ran.stdout:
                raise RuntimeError(f"the peer's kvctl does not list {name}: {ran.stderr[-300:]}")
            return cpu_seconds(words, runs)
    finally:
        os.environ["PYTHONPATH"] = before


def measure(*, quick: bool = False) -> Iterator[Result]:
    """Blocks, pages, engines, lists."""
    for count in (1, 16):
        took = block_s(count, 3 if quick else 15)
        many = "one at a time" if count == 1 else f"{count} at a time"
        yield Result(
            f"elastic.block.{count}",
            f"alloc and free of a warm block, {many}, CPU",
            took,
            "s",
            BLOCK_S,
            took / BLOCK_S,
            1.0,
            at_most=True,
        )
    mapping, touch, again = page_s(50 if quick else 500)
    yield Result("elastic.map", "mapping a page of 2 MiB, CPU", mapping, "s", PAGE_S, mapping / PAGE_S, 1.0, at_most=True)
    # No budget: it is the kernel's zeroing, and stands here so that nobody takes the line above for all of it.
    yield Result(
        "elastic.touch",
        "first touch of that page, beside the same memset again",
        touch,
        "s",
        again,
        touch / again,
        100.0,
        at_most=True,
    )
    yield from _lists(quick)
    if installed("elastic: an engine's throughput"):
        yield from _engines(quick)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true")
    for result in measure(quick=parser.parse_args().quick):
        print(json.dumps(result.as_json()), flush=True)
