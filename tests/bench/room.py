"""Room: what others wait while it is made for a long prefix or while a tier syncs, and how full a mix of sizes fills the arena.

The longest ping of another client while a pinned prefix of 180 MiB comes up from the disk tier right after the start, beside
what faulting in as much takes in one piece; and the least share of a 2 GiB arena that is taken when a value of a random mix
of 4 KiB to 128 MiB is refused (policy `noop`, a part of what is there deleted each time). And the mean of a tiny get at
random moments while another process puts 16 MiB values and waits for each to be synced, over the same with nobody else there.
And puts a second that evict one each, of a full store with many entries, beside one with few.
"""

import asyncio
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

from tests.bench.measure import Result
from tests.kvd.service.test_known_weaknesses import evictions_per_second
from tests.kvd.service.test_loop_latency import CHUNK, CHUNKS, faulting_s, key, longest_ping_s
from tests.kvd.store.test_room import scene
from tests.support.daemon import Daemon


def measure(*, quick: bool = False) -> Iterator[Result]:
    """Waits first."""
    yield _waiting(2 if quick else 5)
    yield _beside_synced_writes(2 if quick else 7)
    yield _evicting(2 if quick else 9)
    yield asyncio.run(_filling(10 if quick else 60))


def _waiting(rounds: int) -> Result:
    daemon = Daemon(max_bytes="512MiB", tier="512MiB")
    keys = [key(i) for i in range(CHUNKS)]
    try:
        with daemon.start().client() as client:
            assert all(client.put_many([(k, bytes(CHUNK)) for k in keys]))
            client.flush(timeout_s=60)
        waits, whole = [], []
        for _ in range(rounds):
            daemon.restart()
            waits.append(longest_ping_s(daemon, lambda client: client.claim(client.prefix(keys, pin_s=20).token or b"").release()))
            whole.append(faulting_s(CHUNK * CHUNKS))
    finally:
        daemon.remove()
    middle = sorted(wait / least for wait, least in zip(waits, whole, strict=True))[rounds // 2]
    what = "longest ping while 180 MiB are promoted, beside faulting them in at once"
    return Result("room.ping", what, sorted(waits)[rounds // 2], "s", sorted(whole)[rounds // 2], middle, 0.33, at_most=True)


TINY = b"tiny" * 8
"""A key that the writer below does not have."""
SYNCER = """
import sys
from kvd.wire.client import Client
client, data, number = Client(sys.argv[1]), bytes(16 << 20), 0
for line in sys.stdin:
    while line.strip() == "go":
        number += 1
        assert client.put((number % 8).to_bytes(32, "big"), data, wait="tier").durability == "fsync"
        if number % 4 == 0:
            print("done", flush=True)
            break
"""


def _beside_synced_writes(rounds: int) -> Result:
    daemon = Daemon("--durability", "fsync", max_bytes="512MiB", tier="1GiB")
    try:
        with daemon.start().client() as client:
            assert client.put(TINY, b"tiny", retention="ephemeral")
            chance = random.Random(1)
            syncer = subprocess.Popen(
                [sys.executable, "-c", SYNCER, str(daemon.socket)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            assert syncer.stdin is not None
            assert syncer.stdout is not None

            def mean(busy: bool) -> float:
                times: list[float] = []
                for _ in range(4):
                    if busy:
                        print("go", file=syncer.stdin, flush=True)
                    for _ in range(80):
                        time.sleep(chance.uniform(0, 0.002))
                        begun = time.perf_counter()
                        client.get(TINY)
                        times.append(time.perf_counter() - begun)
                    if busy:
                        assert syncer.stdout is not None
                        assert syncer.stdout.readline() == "done\n"
                return statistics.mean(times)

            idle, busy = zip(*[(mean(False), mean(True)) for _ in range(rounds)], strict=True)
            syncer.communicate()
    finally:
        daemon.remove()
    wait = statistics.median(b - i for b, i in zip(busy, idle, strict=True))
    what = "mean wait of a tiny get beside synced 16 MiB writes, over idle"
    return Result("room.synced", what, max(wait, 0.0), "s", statistics.median(idle), max(wait, 0.0) / 0.0005, 1.0, at_most=True)


def _evicting(rounds: int) -> Result:
    pairs = [(evictions_per_second(200), evictions_per_second(20_000)) for _ in range(rounds)]
    few, many = (statistics.median(side) for side in zip(*pairs, strict=True))
    ratio = statistics.median(b / a for a, b in pairs)
    return Result("room.evicting", "a put that evicts, of 20 000 entries beside of 200", many, "1/s", few, ratio, 1.0)


async def _filling(refusals: int) -> Result:
    chance = random.Random(1)
    number = 0
    full: list[float] = []
    async with scene(2 << 30, evicting=False) as made:
        while len(full) < refusals:
            number += 1
            if await made.put(number, int(2 ** chance.uniform(12, 27))):
                continue
            full.append(made.arena.used_bytes / made.arena.capacity)
            for victim in chance.sample(sorted(made.sizes), max(1, int(len(made.sizes) * chance.choice((0.02, 0.1, 0.4))))):
                made.delete(victim)
    what = f"least of 2 GiB in use when a mix of sizes is refused, {refusals} times"
    return Result("room.filled", what, min(full), "", 1.0, min(full), 0.9)
