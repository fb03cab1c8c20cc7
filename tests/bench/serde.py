"""What the stages of a serde chain cost: bytes of the value a second of one core, each way. CPU seconds, so that neighbours on
the machine count for little. The floor is the budget itself: 1 GiB a second and core for fp8 and AES-GCM; for the others it
says what they do.
"""

import mmap
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from kvd.tiers.serde.aesgcm import AesGcm
from kvd.tiers.serde.chain import Chain
from kvd.tiers.serde.compression import Lz4, Zstd
from kvd.tiers.serde.fp8 import Fp8
from tests.bench.measure import Result

BYTES = 64 << 20
BUDGET = float(1 << 30)
CHAINS = {
    "fp8": ("fp8 of bfloat16", lambda: Chain([Fp8()]), 1.0),
    "fp8.float16": ("fp8 of float16", lambda: Chain([Fp8("float16")]), 1.0),
    "aesgcm": ("AES-256-GCM", lambda: Chain([AesGcm(bytes(32))]), 1.0),
    "zstd": ("zstd 1, shuffled", lambda: Chain([Zstd(shuffle=2)]), 0.1),
    "lz4": ("lz4, shuffled", lambda: Chain([Lz4(shuffle=2)]), 0.1),
    "fp8.aesgcm": ("fp8, then AES-256-GCM", lambda: Chain([Fp8(), AesGcm(bytes(32))]), 0.5),
}


def _sample(name: str) -> memoryview:
    """Normally distributed numbers, a token's head of 128 being larger here and there, in the type's own bits."""
    rng = np.random.default_rng(1)
    values = rng.standard_normal(BYTES // 2, dtype=np.float32)
    values *= np.repeat(rng.lognormal(0, 1, BYTES // 256).astype(np.float32), 128)
    if name == "fp8.float16":
        return memoryview(values.astype(np.float16).view(np.uint8))
    return memoryview((values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8))


def measure(*, quick: bool = False) -> Iterator[Result]:
    """Encode and decode of each chain."""
    for name, (what, make, budget) in CHAINS.items():
        chain, raw = make(), _sample(name)
        buffers = [memoryview(mmap.mmap(-1, bound)) for bound in chain.bounds(BYTES)]
        into = memoryview(mmap.mmap(-1, BYTES))
        length = chain.encode(raw, buffers, bytes(64))
        stored = buffers[-1][:length]
        between = [memoryview(mmap.mmap(-1, n)) for n in chain.scratch(stored, BYTES)]
        ways: dict[str, Callable[[], object]] = {
            "encode": partial(chain.encode, raw, buffers, bytes(64)),
            "decode": partial(chain.decode, stored, into, between, bytes(64)),
        }
        for way, job in ways.items():
            rate = BYTES / _cpu(job, 3 if quick else 9)
            share = f", to {100 * length / BYTES:.0f} %" if way == "encode" else ""
            yield Result(f"serde.{name}.{way}", f"{what}: {way}{share}", rate, "B/s", BUDGET, rate / BUDGET, budget)


def _cpu(job: Callable[[], object], rounds: int) -> float:
    """Median seconds of CPU of one call."""
    job()
    times = []
    for _ in range(rounds):
        begun = time.process_time()
        job()
        times.append(time.process_time() - begun)
    return statistics.median(times)
