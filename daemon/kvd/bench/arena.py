"""Batches of values through the arena, beside the same copies, value by value, between two private buffers."""

import hashlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from kvd.bench.figures import Figure, pairwise
from kvd.errors import KvdError
from kvd.store.extents import PAGE
from kvd.wire.client import Client

BATCH_BYTES = 64 << 20
MEMCPY = "memcpy"


def keys(salt: str, count: int) -> list[bytes]:
    """So many keys that nobody else has."""
    return [hashlib.sha256(f"kvd bench/{salt}/{i}".encode()).digest() for i in range(count)]


def private(size: int, seed: int = 1) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    """A private buffer of `size` bytes on a page of its own, as engines have theirs, with every page there and no two alike.

    numpy's own begin 16 bytes into a page. On AMD's Zen a copy between two places that lie so much apart in their pages
    (`rep movsb`, up to the size of the second-level cache) takes up to twice as long: two such buffers would flatter the
    floor, and one of them beside the arena would slow the arena's copies, by what no engine's buffer has.
    """
    room = np.empty(size + PAGE, dtype=np.uint8)
    begin = -room.ctypes.data % PAGE
    made = room[begin : begin + size]
    made[:] = np.random.default_rng(seed).integers(0, 255, size, dtype=np.uint8)
    return made


class Batch:
    """Values of one size in private memory, places to copy them to, and their keys. All pages are there before any timing."""

    def __init__(self, size: int, total: int = BATCH_BYTES, salt: str = "") -> None:
        self.size = size
        self.count = max(2, min(1024, total // size))
        self.source = private(self.count * size)
        self.target = private(self.count * size, seed=2)
        self.parts = [self.source[i * size : (i + 1) * size] for i in range(self.count)]
        self.places = [self.target[i * size : (i + 1) * size] for i in range(self.count)]
        self.keys = keys(f"{salt}{size}", self.count)

    @property
    def bytes(self) -> int:
        return self.count * self.size

    def copy(self) -> None:
        """The floor."""
        for part, place in zip(self.parts, self.places, strict=True):
            np.copyto(place, part)

    def put(self, client: Client) -> None:
        """All of it, as values that no tier takes."""
        if not all(client.put_many(list(zip(self.keys, self.parts, strict=True)), retention="ephemeral")):
            raise KvdError("the daemon refused a put", hint="measure a daemon with room to spare")

    def save(self, client: Client) -> None:
        """All of it, waiting until the tiers have it."""
        if not all(client.put_many(list(zip(self.keys, self.parts, strict=True)), wait="tier")):
            raise KvdError("the daemon refused a put", hint="measure a daemon with room to spare")

    def get(self, client: Client) -> None:
        """All of it, into the places."""
        if client.get_into(self.keys, self.places) != [self.size] * self.count:
            raise KvdError("a value that was just put is gone", hint="measure a daemon with room to spare")

    def check(self) -> None:
        """Raises KvdError unless what came back is what was put."""
        if not np.array_equal(self.source, self.target):
            raise KvdError("what came back is not what was put")


def measure(client: Client, size: int, seconds: float, step: Callable[[str], None]) -> Iterator[Figure]:
    """Put, then get."""
    batch = Batch(size)
    for name, job in (("arena put", batch.put), ("arena get", batch.get)):
        step(name)
        took, floor, ratio = pairwise(partial(job, client), batch.copy, seconds)
        yield Figure(name, size, 1, batch.bytes / took, "B/s", batch.bytes / floor, MEMCPY, ratio)
    batch.check()
