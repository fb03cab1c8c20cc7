"""What it is worth, as a sentence: how long a model's prefix takes to come back, beside computing it anew.

Measured as the engine does it: the prefix in chunks of 256 tokens, one value each, read with one request into memory of the
reader's own. A prefix larger than SAMPLE_BYTES is measured on its first part and scaled up; the sentence is about this host's
memory: the copy into the GPU comes on top.
"""

import statistics
import time
from dataclasses import dataclass
from math import ceil

import numpy as np

from kvd.bench.arena import keys
from kvd.errors import KvdError
from kvd.wire.client import Client
from kvtools.errors import UsageError
from kvtools.units import format_duration, format_size

CHUNK_TOKENS = 256
SAMPLE_BYTES = 256 << 20
BYTES_PER_TOKEN_MAX = 16 << 20
"""Some times what the largest models with a key and a value for each head take (2.5 MiB with 65B parameters in bf16)."""
ROUNDS = 3
ARENA = "RAM"


@dataclass(frozen=True)
class Prefix:
    """What is to be reloaded: `bytes_per_token` over all layers, one rank; `prefill_rate`: tokens a second, 0 when not told."""

    model: str
    tokens: int
    bytes_per_token: int
    prefill_rate: float

    def __post_init__(self) -> None:
        if not 1 <= self.bytes_per_token <= BYTES_PER_TOKEN_MAX:
            raise UsageError(
                f"--bytes-per-token {self.bytes_per_token}", hint="of all layers, from 1 to 16MiB: 128K for an 8B model in bf16"
            )
        if not 1 <= self.tokens <= 16 << 20:
            raise UsageError(f"--prefix-tokens {self.tokens}", hint="from 1 to 16 million")
        if not 0 <= self.prefill_rate < 1e9:  # nan, too
            raise UsageError("--prefill-rate is no number of tokens a second")

    @property
    def bytes(self) -> int:
        return self.tokens * self.bytes_per_token

    @property
    def chunk_bytes(self) -> int:
        return min(CHUNK_TOKENS, self.tokens, SAMPLE_BYTES // self.bytes_per_token) * self.bytes_per_token

    @property
    def chunks(self) -> int:
        """Chunks that are measured."""
        return max(1, min(ceil(self.bytes / self.chunk_bytes), SAMPLE_BYTES // self.chunk_bytes))

    @property
    def sample_bytes(self) -> int:
        return self.chunks * self.chunk_bytes


def reload_s(client: Client, prefix: Prefix, *, below: bool) -> float:
    """Seconds until the whole prefix is in the reader's memory; from the tier `below` the arena, or from the arena."""
    names = keys(f"prefix {prefix.bytes_per_token}", prefix.chunks)
    chunk = np.random.default_rng(3).integers(0, 255, prefix.chunk_bytes, dtype=np.uint8)
    places = np.ones((prefix.chunks, prefix.chunk_bytes), dtype=np.uint8)
    if not all(client.put_many([(name, chunk) for name in names], retention="long" if below else "ephemeral")):
        raise KvdError("the daemon refused a put", hint="measure a daemon with room to spare")
    if below:
        client.flush(timeout_s=60)
    times = []
    for _ in range(ROUNDS):
        if below:
            client.delete(names, arena_only=True)
        begun = time.perf_counter()
        got = client.get_into(names, list(places))
        times.append(time.perf_counter() - begun)
        if got != [prefix.chunk_bytes] * prefix.chunks or not (places == chunk).all():
            raise KvdError("a prefix that was just stored did not come back")
        places[:] = 1
    client.delete(names)
    return statistics.median(times) * prefix.bytes / prefix.sample_bytes


def sentence(prefix: Prefix, places: dict[str, float]) -> str:
    """The plain sentence. `places`: seconds by where it reloads from, RAM last."""
    times = ", ".join(f"{_time(seconds)} from {place}" for place, seconds in places.items())
    head = f"A {_tokens(prefix.tokens)}-token prefix of {prefix.model} ({format_size(prefix.bytes)}) reloads here in {times}"
    if not prefix.prefill_rate:
        return f"{head}; what recomputing costs is the engine's to say (--prefill-rate)."
    cost = prefix.tokens / prefix.prefill_rate
    place, slowest = next(iter(places.items()))
    if cost > slowest:
        return f"{head}; recomputing costs {_time(cost)}, {cost / slowest:.1f} times as long as from {place}."
    return f"{head}; recomputing costs {_time(cost)}: from {place} it is not worth it."


def _tokens(count: int) -> str:
    return f"{count >> 10}k" if count >= 1024 and not count % 1024 else f"{count}"


def _time(seconds: float) -> str:
    return f"{seconds:.2g} s" if 0.01 <= seconds < 1 else format_duration(seconds)
