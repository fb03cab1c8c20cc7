"""Clients that store and read while their daemon is killed with -9 again and again and its disk tier is damaged between lives.

Every value carries its key, a version and bytes that follow from both, so that any answer proves or betrays itself: a read
is a miss, or exactly bytes that were once stored under that key. Nothing else is asked of a daemon that is killed; it has
to start again every time, and serve.

`make soak` runs the long one, and after it the soak in tests/kvd/soak.
"""

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Self

import pytest

from kvtools.errors import KvError
from tests.kvd import proof
from tests.kvd.proof import proves, value
from tests.support.daemon import Daemon, MakeDaemon

KEYS = proof.keys("storm", 160)


class Clients:
    """Threads that put and get until told to stop. `wrong` collects every answer that is neither a miss nor right."""

    def __init__(self, daemon: Daemon, seed: int, count: int = 3) -> None:
        self.wrong: list[str] = []
        self.done: Counter[str] = Counter()
        self._daemon = daemon
        self._enough = threading.Event()
        self._threads = [threading.Thread(target=self._work, args=(random.Random(seed * 100 + i),)) for i in range(count)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._enough.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a client hangs"

    def _work(self, chance: random.Random) -> None:
        with self._daemon.client(namespace="storm", timeout_s=2.0) as client:
            while not self._enough.is_set():
                try:
                    if chance.random() < 0.5:
                        keys = chance.sample(KEYS, chance.randint(1, 6))
                        sizes = [chance.choice([64, 3000, 4096, 65536, 300_000, 1 << 20]) for _ in keys]
                        items = [(key, value(key, chance.getrandbits(20), size)) for key, size in zip(keys, sizes, strict=True)]
                        self.done["stored"] += sum(map(bool, client.put_many(items)))
                    else:
                        keys = chance.sample(KEYS, chance.randint(1, 12))
                        for key, data in zip(keys, client.get_many(keys), strict=True):
                            self._judge(key, data)
                except KvError:
                    self.done["refused"] += 1  # the daemon is dead or starting: that is the point
                    time.sleep(0.01)

    def _judge(self, key: bytes, data: bytes | None) -> None:
        if data is None:
            self.done["missed"] += 1
        elif proves(key, data):
            self.done["read"] += 1
        else:
            self.wrong.append(f"{key.hex()[:12]}: {len(data)} bytes, {data[:48].hex()}")


def damage(tier: Path, chance: random.Random) -> None:
    """Flip bits, cut a tail, or overwrite a piece of one of the tier's files.

    Not of the manifest: one that names another version is refused at the start, which is right and would end the storm.
    """
    files = [path for path in tier.rglob("*") if path.is_file() and path.stat().st_size > 0 and path.suffix != ".json"]
    if not files:
        return
    path = chance.choice(files)
    size = path.stat().st_size
    kind = chance.choice(["flip", "cut", "garbage", "nothing"])
    with path.open("r+b") as file:
        if kind == "cut":
            file.truncate(chance.randrange(size))
        elif kind == "garbage":
            file.seek(chance.randrange(size))
            file.write(chance.randbytes(min(chance.randint(1, 20_000), size)))
        elif kind == "flip":
            for _ in range(chance.randint(1, 30)):
                place = chance.randrange(size)
                file.seek(place)
                byte = file.read(1)
                file.seek(place)
                file.write(bytes([byte[0] ^ 1 << chance.randrange(8)]))


def storm(make: MakeDaemon, lives: int, seed: int, *, damaging: bool) -> Counter[str]:
    """Start and kill `lives` times; what the clients counted. AssertionError for any wrong byte."""
    chance = random.Random(seed)
    daemon = make(max_bytes="24MiB", tier="96MiB", start=False)
    with Clients(daemon, seed) as clients:
        for _ in range(lives):
            daemon.start()
            time.sleep(chance.choice([0.05, 0.3, 0.6, 1.2]))
            daemon.kill9()
            if damaging:
                damage(daemon.tier, chance)
        daemon.start()
        time.sleep(0.5)
    assert clients.wrong == [], f"seed {seed}"
    assert min(clients.done["read"], clients.done["stored"]) > 0, f"the storm did nothing: {clients.done}"
    with daemon.client(namespace="storm") as client:
        for key, data in zip(KEYS, client.get_many(KEYS), strict=True):
            assert data is None or proves(key, data), f"seed {seed}"
    assert daemon.stop() == 0
    return clients.done


@pytest.mark.real("kvd")
@pytest.mark.parametrize("damaging", [False, True], ids=["killed", "killed and damaged"])
def test_short_storm(kvd_daemon: MakeDaemon, damaging: bool) -> None:
    storm(kvd_daemon, 4, random.SystemRandom().randrange(1 << 30), damaging=damaging)


@pytest.mark.soak
@pytest.mark.real("kvd")
@pytest.mark.timeout(0)
def test_long_storm(kvd_daemon: MakeDaemon, record_property: Callable[[str, object], None]) -> None:
    end = time.monotonic() + float(os.environ.get("KVTEST_SOAK_S", "600")) / 3  # tests/kvd/soak has the rest
    while time.monotonic() < end:
        seed = random.SystemRandom().randrange(1 << 30)
        done = storm(kvd_daemon, 30, seed, damaging=bool(seed % 2))
        print(f"seed {seed}: {dict(done)}", flush=True)
