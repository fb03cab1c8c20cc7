"""A tier: values stored to it and loaded from it, beside O_DIRECT writes and reads of the same directory, with the same block
size and the same number in flight. And how long a tiny get waits while large values are written and synced.

A store is puts and one flush, the floor's the same writes and one fdatasync. A load is a prefetch of values that the arena
has dropped. A tier that lies in no directory (a server's) has no raw device here: its floor is memcpy.
"""

import mmap
import os
import random
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from kvd.bench.arena import BATCH_BYTES, MEMCPY, Batch, keys
from kvd.bench.clients import Crowd
from kvd.bench.figures import Figure, pairwise
from kvd.bench.own import Own
from kvd.errors import DeadlinePassed, KvdError
from kvd.wire.client import Client
from kvtools.errors import hint_for
from kvtools.output import note
from kvtools.units import format_size

IN_FLIGHT = 4
RAW = "raw device"
SYNCED_BYTES = 16 << 20
GIVE_UP_S = 60.0
"""A tier that has not taken one small value by then is not measured."""


class Floor(Protocol):
    """What a tier is measured beside."""

    name: str

    def write(self) -> object: ...
    def read(self) -> object: ...


class Raw:
    """The device itself: a file of its own in `folder`, written and read in blocks of `size`, IN_FLIGHT at once."""

    def __init__(self, own: Own, folder: Path, size: int, count: int) -> None:
        self.size = size + 4095 & ~4095
        self.count = count
        self.name = RAW
        self.buffers = [mmap.mmap(-1, self.size) for _ in range(IN_FLIGHT)]
        for buffer in self.buffers:
            buffer[:] = os.urandom(4096) * (self.size // 4096)
        self.threads = ThreadPoolExecutor(IN_FLIGHT)
        own.undo(self.threads.shutdown)
        path = own.folder(folder) / "raw"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            self.fd = os.open(path, flags | os.O_DIRECT, 0o600)
        except OSError:
            self.name = f"{RAW}, buffered"
            self.fd = os.open(path, flags, 0o600)
        own.undo(self._close)
        try:
            os.posix_fallocate(self.fd, 0, self.size * count)
        except OSError as error:
            raise KvdError(
                f"no room to measure in {folder}: {error.strerror}", hint=hint_for(error, "name another --path")
            ) from None

    def _close(self) -> None:
        self.threads.shutdown()
        os.close(self.fd)

    def write(self) -> None:
        list(self.threads.map(lambda i: os.pwritev(self.fd, [self.buffers[i % IN_FLIGHT]], i * self.size), range(self.count)))
        os.fdatasync(self.fd)

    def read(self) -> None:
        list(self.threads.map(lambda i: os.preadv(self.fd, [self.buffers[i % IN_FLIGHT]], i * self.size), range(self.count)))


class Memory:
    """A copy of the same values: the floor where no device is ours to measure."""

    name = MEMCPY

    def __init__(self, batch: Batch) -> None:
        self.write = self.read = batch.copy


def check_works(client: Client, name: str) -> None:
    """Store one value to the tier. Raises KvdError as soon as the daemon has given the tier up."""
    key = keys(f"{name}/works", 1)[0]
    client.put(key, b"works")
    end = time.monotonic() + GIVE_UP_S
    while True:
        try:
            client.flush([key], timeout_s=1.0)
        except DeadlinePassed:
            given_up = any(tier["breaker_open"] for tier in client.stats()["tiers"])
            if not given_up and time.monotonic() < end:
                continue
            raise KvdError(f"{name} does not work: nothing can be stored there", hint="the daemon's line above says why") from None
        client.delete([key])
        return


def floats_of(spec: Mapping[str, Any]) -> str | None:
    """The floats that an adapter of this specification quantizes, None where it does not."""
    stages = spec.get("serde") or []
    for stage in [stages] if isinstance(stages, Mapping) else stages:
        if stage.get("type") == "fp8":
            return str(stage.get("dtype", "bfloat16"))
    return None


def quantizable(room: "np.ndarray[Any, np.dtype[np.uint8]]", dtype: str) -> None:
    """Fill it with floats of four significant bits: fp8 would pass random bytes on as they are, and these come back exactly."""
    count = len(room) // (4 if dtype == "float32" else 2)
    chance = np.random.default_rng(3)
    made = chance.integers(8, 16, count) * np.exp2(-chance.integers(3, 7, count)) * (1 - 2 * chance.integers(0, 2, count))
    if dtype == "bfloat16":
        words = (made.astype("<f4").view("<u4") >> 16).astype("<u2")
    else:
        words = made.astype("<f4" if dtype == "float32" else "<f2")
    room[: words.nbytes] = words.view(np.uint8)


def measure(
    own: Own,
    client: Client,
    name: str,
    folder: Path | None,
    size: int,
    seconds: float,
    step: Callable[[str], None],
    floats: str | None = None,
) -> Iterator[Figure]:
    """Store and load of the tier `name` that `client`'s daemon has; the floor lies in `folder`. `floats`: see `floats_of`."""
    count = max(2, min(256, BATCH_BYTES // size))
    batch = Batch(size, count * size, salt=f"{name}/")
    if floats is not None:
        for part in batch.parts:
            quantizable(part, floats)
    own = own.part()
    floor: Floor = Memory(batch) if folder is None else Raw(own, folder, size, batch.count)
    items = list(zip(batch.keys, batch.parts, strict=True))

    def store() -> None:
        if not all(client.put_many(items)):
            raise KvdError("the daemon refused a put", hint="measure a daemon with room to spare")
        client.flush(timeout_s=60)

    def load() -> None:
        client.delete(batch.keys, arena_only=True)
        if client.prefetch(batch.keys, deadline_s=60) != batch.count:
            raise _lost(client, name, batch.bytes)

    for verb, job, least in (("store", store, floor.write), ("load", load, floor.read)):
        step(f"{name} {verb}")
        took, lowest, ratio = pairwise(job, least, seconds)
        yield Figure(f"{name} {verb}", size, 1, batch.bytes / took, "B/s", batch.bytes / lowest, floor.name, ratio)
    load()
    batch.get(client)
    batch.check()
    client.delete(batch.keys)
    own.remove()


def _lost(client: Client, name: str, stored: int) -> KvdError:
    """Why values that were just stored are not there: a tier that is too small has dropped them again."""
    for tier in client.stats()["tiers"]:
        if tier["name"] == name and 0 < tier["bytes_limit"] < stored:
            return KvdError(
                f"{name} holds {format_size(tier['bytes_limit'])} at most, and is measured with {format_size(stored)} at once",
                hint="give it more room for the bench, or a smaller --size where that stores less",
            )
    return KvdError(f"a value that was just stored did not come back from {name}", hint="its log, above, may say why")


def wait(own: Own, socket: Path, client: Client, seconds: float, step: Callable[[str], None]) -> Figure:
    """A tiny get at random moments, idle and beside another process that stores and syncs 16 MiB values: mean seconds."""
    step("tiny get beside synced writes")
    (key,) = keys("tiny", 1)
    client.put(key, b"tiny", retention="ephemeral")
    chance = random.Random(1)  # noqa: S311 - moments, not secrets
    crowd = Crowd(own, socket, SYNCED_BYTES, 1)

    def mean(span: float) -> float:
        times: list[float] = []
        end = time.perf_counter() + span
        while len(times) < 10 or time.perf_counter() < end:
            time.sleep(chance.uniform(0, 0.004))
            begun = time.perf_counter()
            client.get(key)
            times.append(time.perf_counter() - begun)
        return statistics.mean(times)

    crowd.rate("save", 0.0)
    idle = mean(seconds)
    crowd.begin("save", 1.5 * seconds)
    busy = mean(seconds)
    crowd.ended()
    crowd.end()
    return Figure("tiny get beside synced writes", 4, 2, busy, "s", idle, "the same, idle", busy / idle)


def folder_of(own: Own, spec: Mapping[str, Any]) -> Path | None:
    """Where an adapter of this specification keeps its values, None when that is no directory of this host.

    What is not there yet is the bench's, and gone afterwards.
    """
    named = spec.get("base_path") or spec.get("path")
    if not isinstance(named, str):
        return None
    path = Path(named).absolute()
    lacking = [one for one in (path, *path.parents) if not one.exists()]
    if lacking:
        own.undo(partial(shutil.rmtree, lacking[-1], ignore_errors=True))
        path = lacking[-1].parent
    return path if path.is_dir() else None


def say_where(folder: Path) -> None:
    """A remark when this directory is memory: the raw device then is none."""
    try:
        kinds = {line.split()[1]: line.split()[2] for line in Path("/proc/self/mounts").read_text().splitlines()}
    except OSError:
        return
    home = next((str(path) for path in (folder, *folder.parents) if str(path) in kinds), "/")
    if kinds.get(home) in ("tmpfs", "ramfs"):
        free = format_size(os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize)
        note(f"{folder} is memory ({kinds[home]}, {free} free), not a disk")


__all__ = ["Raw", "folder_of", "measure", "say_where", "wait"]
