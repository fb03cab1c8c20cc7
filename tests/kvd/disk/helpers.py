"""What the disk tier's tests share."""

import hashlib
import mmap
import random
from pathlib import Path

from kvd.store.retention import NEVER, Retention
from kvd.tiers.adapters.base import Durability, Item, Loaded, Want
from kvd.tiers.adapters.disk import DiskAdapter


def identity(number: int, namespace: int = 0) -> bytes:
    return hashlib.sha256(b"ns%d" % namespace).digest() + hashlib.sha256(b"key%d" % number).digest()


def value(seed: int, length: int) -> bytes:
    return random.Random(seed).randbytes(length)


def item(name: bytes, data: bytes, retention: Retention = Retention.LONG, expires_ns: int = NEVER, *, arena: bool = False) -> Item:
    """An item whose bytes lie anywhere, or, for `arena`, page-aligned with zeroed slack as in the arena."""
    if not arena or not data:
        return Item(name, memoryview(data), retention, expires_ns)
    padded = memoryview(mmap.mmap(-1, -(-len(data) // 4096) * 4096))
    padded[: len(data)] = data
    return Item(name, padded[: len(data)].toreadonly(), retention, expires_ns, padded.toreadonly())


def put(adapter: DiskAdapter, name: bytes, data: bytes, **more) -> bool:
    return adapter.store([item(name, data, **more)])[0].ok


def get(adapter: DiskAdapter, name: bytes, *, arena: bool = False) -> bytes | None:
    """The value as `load` gives it, None for anything but OK."""
    return get_as(adapter, name, arena=arena)[1]


def get_as(adapter: DiskAdapter, name: bytes, *, arena: bool = False) -> tuple[Loaded, bytes | None]:
    hit = adapter.lookup([name])[0]
    if hit is None:
        return Loaded.MISS, None
    if arena and hit.length:
        padded = memoryview(mmap.mmap(-1, -(-hit.length // 4096) * 4096))
        want = Want(name, padded[: hit.length], padded)
    else:
        want = Want(name, memoryview(bytearray(hit.length)))
    result = adapter.load([want])[0]
    return result, bytes(want.into) if result is Loaded.OK else None


def opened(path: Path, max_bytes: int = 4 << 20, **more) -> DiskAdapter:
    more.setdefault("free_floor_bytes", 0)
    more.setdefault("housekeeping_s", 0.0)
    adapter = DiskAdapter("disk", path, max_bytes, **more)
    adapter.open()
    return adapter


DURABILITIES = [Durability.NONE, Durability.GROUP, Durability.FSYNC]
