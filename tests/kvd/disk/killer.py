"""Kills a process in the middle of its writes, again and again, and checks what it left: `python killer.py DIR ROUNDS SEED BYTES`.

Each round forks a writer that stores, overwrites and deletes, saying in a pipe what it is about to do and what was
acknowledged. It is killed at a random moment. Then the store is opened, and every key must hold exactly a version that it may
hold. Prints one line of JSON with what was seen; exits 1 at the first wrong value.
"""

import json
import os
import random
import signal
import struct
import sys
import threading
import time
from pathlib import Path

from kvd.store.retention import Retention
from kvd.tiers.adapters.disk import DiskAdapter
from tests.kvd.disk.helpers import get, identity, item, value

_NOTE = struct.Struct("<cHI")
KEYS = 42
THREADS = 3
LENGTHS = [100, 4096, 20_000, 300_000, 5 << 20]


def content(key: int, version: int) -> bytes:
    head = b"%d/%d/" % (key, version)
    return head + value(version, LENGTHS[version % len(LENGTHS)])


def write_until_killed(path: Path, budget: int, seed: int, first: int, notes: int) -> None:
    """The life of one writer: three threads, each with keys of its own."""
    adapter = DiskAdapter("killed", path, budget, free_floor_bytes=0)
    adapter.open()
    os.write(notes, _NOTE.pack(b"o", 0, 0))
    for thread in range(THREADS):
        threading.Thread(target=write, args=(adapter, seed, first, notes, thread)).start()


def write(adapter: DiskAdapter, seed: int, first: int, notes: int, thread: int) -> None:
    """Store, overwrite and delete, for ever."""
    rng = random.Random(seed + thread)
    for turn in range(100_000):
        version = first + turn * THREADS + thread
        key = rng.randrange(KEYS // THREADS) * THREADS + thread
        if rng.random() < 0.1:
            os.write(notes, _NOTE.pack(b"d", key, 0))
            adapter.delete([identity(key)])
            os.write(notes, _NOTE.pack(b"D", key, 0))
        else:
            os.write(notes, _NOTE.pack(b"s", key, version))
            kept = rng.choice([Retention.SHORT, Retention.LONG])
            done = adapter.store([item(identity(key), content(key, version), kept, arena=True)])
            if done[0].ok:
                os.write(notes, _NOTE.pack(b"S", key, version))


class Expect:
    """What each key may hold: None for nothing, else a version."""

    def __init__(self) -> None:
        self.may: dict[int, set[int | None]] = {key: {None} for key in range(KEYS)}
        self.version = 1

    def read(self, raw: bytes) -> int:
        """Take in a writer's notes; how many it wrote."""
        count = 0
        for kind, key, version in _NOTE.iter_unpack(raw[: len(raw) // _NOTE.size * _NOTE.size]):
            count += 1
            if kind in b"sd":
                self.may[key] |= {version if kind == b"s" else None}
            elif kind in b"SD":
                self.may[key] = {version if kind == b"S" else None}
            self.version = max(self.version, version + 1)
        return count


def one_round(path: Path, budget: int, rng: random.Random, expect: Expect) -> int:
    """Fork, let it write for a while, kill; how much it noted."""
    reader, writer = os.pipe()
    seed = rng.randrange(1 << 30)
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            write_until_killed(path, budget, seed, expect.version, writer)
            threading.Event().wait()
        finally:
            os._exit(70)
    os.close(writer)
    raw = os.read(reader, _NOTE.size)
    time.sleep(rng.choice([0.0, 0.01, 0.05, 0.1, 0.2]) * rng.random())
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), f"the writer ended by itself: {status}"
    while more := os.read(reader, 1 << 16):
        raw += more
    os.close(reader)
    return expect.read(raw)


def main() -> int:
    path, rounds, seed, budget = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    rng = random.Random(seed)
    expect = Expect()
    evicting = budget < (1 << 30)
    seen = {"rounds": 0, "notes": 0, "hits": 0, "misses": 0, "corruptions": 0}
    for number in range(rounds):
        seen["notes"] += one_round(path, budget, rng, expect)
        adapter = DiskAdapter("checks", path, budget, free_floor_bytes=0)
        adapter.open()
        for key in range(KEYS):
            data = get(adapter, identity(key))
            allowed = {None if version is None else content(key, version) for version in expect.may[key]}
            if data not in allowed | ({None} if evicting else set()):
                print(f"round {number}, key {key}: {data[:20] if data else data!r}, may be {expect.may[key]}", file=sys.stderr)
                return 1
            seen["hits" if data is not None else "misses"] += 1
            expect.may[key] = {None if data is None else int(data.split(b"/", 2)[1])}
        seen["corruptions"] += adapter.counters.corruptions
        seen["rounds"] += 1
        adapter.close()
    print(json.dumps(seen))
    return 0


if __name__ == "__main__":
    sys.exit(main())
