"""Batches of values through the daemon beside the same copies, value by value, between two private buffers.

put: `put_many` from a private buffer. get: a read lease and one copy a value into a private buffer, as the connector does.
All buffers are faulted in before; so is the arena, by the warm-up. numpy asks for pages of 2 MiB for the private ones and gets
them; whether shared memory may have them too is the host's setting, and the rows of either kind have names of their own.
"""

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from kvd.bench.arena import private
from kvd.store.arena import shared_memory_has_large_pages
from kvtools.units import format_size
from tests.bench.measure import Result, in_turn

if TYPE_CHECKING:
    from kvd.wire.client import Client

SIZES = (64 << 10, 1 << 20, 16 << 20)
BATCH_BYTES = 64 << 20
BUDGET = 0.85


def keys_for(count: int, salt: str) -> list[bytes]:
    """`count` distinct keys."""
    return [hashlib.sha256(f"{salt}/{i}".encode()).digest() for i in range(count)]


def pages_of_arenas() -> tuple[str, str]:
    """What names of rows end with on this host, and how large an arena's pages are."""
    return (".huge", "2 MiB") if shared_memory_has_large_pages() else ("", "4 KiB")


def measure(client: "Client", *, quick: bool = False) -> Iterator[Result]:
    """Two results a size: put and get, in bytes a second."""
    kind, pages = pages_of_arenas()
    for size in SIZES:
        count = max(4, BATCH_BYTES // size)
        total = count * size
        source, target = private(total), private(total)
        parts = [source[i * size : (i + 1) * size] for i in range(count)]
        places = [target[i * size : (i + 1) * size] for i in range(count)]
        keys = keys_for(count, f"arena {size}")
        items = [(key, part.data) for key, part in zip(keys, parts, strict=True)]
        rounds = 5 if quick else 15

        def copy(parts: list[Any] = parts, places: list[Any] = places) -> None:
            for part, place in zip(parts, places, strict=True):
                np.copyto(place, part)

        def put(items: list[Any] = items) -> None:
            assert all(client.put_many(items)), "the arena must take the whole batch"

        def get(keys: list[bytes] = keys, places: list[Any] = places) -> None:
            with client.read(keys) as lease:
                for view, place in zip(lease.views, places, strict=True):
                    assert view is not None, "what was just stored is there"
                    np.copyto(place, np.frombuffer(view, np.uint8))

        for name, job in (("put", put), ("get", get)):
            took, floor, ratio = in_turn(job, copy, rounds=rounds)
            yield Result(
                f"arena.{name}.{size}{kind}",
                f"arena {name}, {count} x {format_size(size)}, pages of {pages}",
                total / took,
                "B/s",
                total / floor,
                ratio,
                BUDGET,
            )
        assert np.array_equal(source, target), "what was read is not what was stored"
