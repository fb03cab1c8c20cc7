"""kill -9 in mid-write, at random moments: what a tier had acknowledged is there afterwards, exactly, and in its last version."""

import os
import random
import signal
import threading
import time
from dataclasses import dataclass, field

import numpy as np
import pytest

from kvtools.errors import KvError
from tests.support.daemon import Daemon, MakeDaemon

pytestmark = pytest.mark.real("kvd")

KEYS = [n.to_bytes(32, "big") for n in range(60)]
SIZES = [0, 100, 4096, 5000, 70_000, 400_000]


def content(key: bytes, version: int, size: int) -> bytes:
    """Says itself what it is: key, version, size, and bytes that follow from them."""
    head = key + version.to_bytes(8, "little") + size.to_bytes(8, "little")
    return head + np.random.default_rng(version * 1009 + key[-1]).bytes(size)


def version_of(key: bytes, data: bytes) -> int:
    """The version that `data` is of `key`. AssertionError when it is anything else."""
    assert data[:32] == key, "another key's bytes"
    version, size = int.from_bytes(data[32:40], "little"), int.from_bytes(data[40:48], "little")
    assert data == content(key, version, size), f"version {version}, {size} bytes: not what was stored"
    return version


@dataclass
class Ledger:
    """What each key was given: versions tried, the last one a tier acknowledged, whether a delete was acknowledged after it."""

    tried: dict[bytes, int] = field(default_factory=dict)
    acknowledged: dict[bytes, int] = field(default_factory=dict)
    deleted: dict[bytes, int] = field(default_factory=dict)


def write(daemon: Daemon, ledger: Ledger, keys: list[bytes], seed: int) -> None:
    """Put and delete these keys (nobody else does) until the daemon is gone, and keep the ledger."""
    chance = random.Random(seed)
    with daemon.client(timeout_s=5) as client:
        while True:
            key = chance.choice(keys)
            version = ledger.tried.get(key, 0) + 1
            ledger.tried[key] = version
            try:
                if chance.random() < 0.15:
                    client.delete([key])
                    ledger.deleted[key] = version
                elif client.put(key, content(key, version, chance.choice(SIZES)), wait="tier"):
                    ledger.acknowledged[key] = version
            except KvError:
                return


def check(daemon: Daemon, ledger: Ledger) -> int:
    """Every key reads back as what the ledger allows; how many are there."""
    there = 0
    with daemon.client(timeout_s=20) as client:
        for key, data in zip(KEYS, client.get_many(KEYS), strict=True):
            tried, acknowledged = ledger.tried.get(key, 0), ledger.acknowledged.get(key, 0)
            deleted = ledger.deleted.get(key, 0)
            if data is None:
                # Missing is right if it was deleted last, or if the very last try (unanswered) was a delete.
                assert deleted > acknowledged or tried > acknowledged or not acknowledged, f"{key[-1]}: lost version {acknowledged}"
                continue
            there += 1
            version = version_of(key, data)
            assert max(acknowledged, deleted) <= version <= tried, f"{key[-1]}: {version}, acknowledged {acknowledged}"
            assert version != deleted
    return there


def rounds(make: MakeDaemon, count: int, seed: int, *flags: str) -> None:
    chance = random.Random(seed)
    daemon = make(*flags, max_bytes="8MiB", tier="256MiB", start=False)
    ledger = Ledger()
    most = 0
    for round_ in range(count):
        daemon.start()
        most = max(most, check(daemon, ledger))
        threads = [threading.Thread(target=write, args=(daemon, ledger, KEYS[i::3], seed + 10 * round_ + i)) for i in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(chance.uniform(0.02, 0.5))
        os.kill(daemon.pid, signal.SIGKILL)
        daemon.wait()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
    daemon.start()
    most = max(most, check(daemon, ledger))
    assert most > 10, "nothing was written: the test tested nothing"
    with daemon.client() as client:
        assert client.stats()["corruptions_total"] == 0
    assert daemon.stop() == 0
    daemon.start()
    assert check(daemon, ledger) > 10


def test_what_a_tier_acknowledged_survives(kvd_daemon: MakeDaemon) -> None:
    rounds(kvd_daemon, 4, random.SystemRandom().randrange(1 << 30))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_what_a_tier_acknowledged_survives_many_times(kvd_daemon: MakeDaemon) -> None:
    for durability in ("none", "group", "fsync"):
        rounds(kvd_daemon, 70, random.SystemRandom().randrange(1 << 30), "--durability", durability)
