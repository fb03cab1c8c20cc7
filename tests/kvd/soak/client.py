"""One client of the soak, as a process: does everything a client can, at random, until it is killed.

    python -m tests.kvd.soak.client SOCKET SEED LOG

What it finds it appends to LOG, a line each: `wrong ...` for an answer that is neither a miss nor right, `lost PID TIME` for a
lease of the daemon PID that ended while it was held, `did {...}` once a second with what it has done since.
"""

import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TextIO

from kvd.errors import KvdError, LeaseLost
from kvd.wire.client import Client
from kvtools.errors import KvError
from tests.kvd import proof

KEYS = proof.keys("soak", 240)
SPACES = ("soak a", "soak b")
SIZES = (64, 3000, 4096, 20_000, 65_536, 300_000, 1 << 20)
RETENTIONS = ("long", "long", "short", "ephemeral", "none")


class Soaker:
    """A client and its chance."""

    def __init__(self, socket: Path, seed: int, log: TextIO) -> None:
        self.chance = random.Random(seed)
        self.log = log
        self.done: Counter[str] = Counter()
        self.socket = socket

    def run(self) -> None:
        """Until killed."""
        jobs = [self.put, self.put, self.get, self.get, self.hold, self.write, self.pin, self.forget, self.warm]
        told = time.monotonic()
        while True:
            with Client(self.socket, timeout_s=3.0) as client:
                for _ in range(self.chance.randint(20, 200)):
                    try:
                        self.chance.choice(jobs)(client, self.chance.choice(SPACES))
                    except LeaseLost:
                        raise AssertionError("a lease is lost only where one is held") from None
                    except KvError:
                        self.done["refused"] += 1  # the daemon is dead, starting, full or stopped
                        time.sleep(0.02)
                    if time.monotonic() - told > 1:
                        told = time.monotonic()
                        self.say("did", json.dumps(self.done))
                        self.done.clear()

    def say(self, *words: object) -> None:
        self.log.write(" ".join(map(str, words)) + "\n")
        self.log.flush()

    def some(self, most: int) -> list[bytes]:
        return self.chance.sample(KEYS, self.chance.randint(1, most))

    def fresh(self, key: bytes) -> bytes:
        return proof.value(key, self.chance.getrandbits(20), self.chance.choice(SIZES))

    def judge(self, key: bytes, data: bytes | None, what: str) -> None:
        if data is None:
            self.done["missed"] += 1
        elif proof.proves(key, data):
            self.done["read"] += 1
        else:
            self.say("wrong", what, key.hex()[:12], len(data), data[:48].hex())

    def put(self, client: Client, space: str) -> None:
        items = [(key, self.fresh(key)) for key in self.some(5)]
        ttl = self.chance.choice([None, None, None, 0.5, 5.0])
        wait = self.chance.choice(["", "", "", "tier"])
        stored = client.put_many(items, retention=self.chance.choice(RETENTIONS), ttl_s=ttl, wait=wait, namespace=space)
        self.done["stored"] += sum(map(bool, stored))

    def get(self, client: Client, space: str) -> None:
        keys = self.some(10)
        try:
            for key, data in zip(keys, client.get_many(keys, namespace=space), strict=True):
                self.judge(key, data, "get")
        except LeaseLost:
            self.done["again"] += 1  # three times in a row: only a daemon that dies again and again does that

    def hold(self, client: Client, space: str) -> None:
        """Bytes under a lease are right, and the same a while later."""
        keys = self.some(4)
        pid = client.connect().welcome.pid
        try:
            with client.read(keys, namespace=space) as lease:
                before = [None if view is None else bytes(view) for view in lease.views]
                time.sleep(self.chance.choice([0, 0.02, 0.2, 1.0]))
                after = [None if view is None else bytes(view) for view in lease.views]
        except LeaseLost:
            self.say("lost", pid, time.time())
            return
        for key, first, second in zip(keys, before, after, strict=True):
            self.judge(key, first, "hold")
            if first != second:
                self.say("wrong", "changed under a lease", key.hex()[:12])

    def write(self, client: Client, space: str) -> None:
        """Zero copy: filled, and committed, or given back, or left to the connection's end."""
        items = [(key, self.fresh(key)) for key in self.some(3)]
        with client.write([len(data) for _, data in items]) as lease:
            for view, (_, data) in zip(lease.views, items, strict=True):
                view[:] = data
            if self.chance.random() < 0.7:
                results = lease.commit([key for key, _ in items], namespace=space)
                self.done["written"] += sum(map(bool, results))

    def pin(self, client: Client, space: str) -> None:
        """A pinned prefix: claimed, or left to run out."""
        keys = self.some(4)
        found = client.prefix(keys, namespaces=[space], pin_s=1.0)
        if not found.token or self.chance.random() < 0.3:
            return
        pid = client.connect().welcome.pid
        begun = time.monotonic()
        try:
            with client.claim(found.token, namespace=space) as lease:
                for key, view in zip(keys, lease.views, strict=False):
                    self.judge(key, None if view is None else bytes(view), "pin")
        except LeaseLost:
            if time.monotonic() - begun < 0.9:
                self.say("lost", pid, time.time())
        except KvdError as error:
            if error.code != "lease_lost":
                raise
            self.done["late"] += 1

    def forget(self, client: Client, space: str) -> None:
        self.done["deleted"] += client.delete(self.some(3), arena_only=self.chance.random() < 0.5, namespace=space)

    def warm(self, client: Client, space: str) -> None:
        self.done["promoted"] += client.prefetch(self.some(6), deadline_s=1.0, namespace=space)


if __name__ == "__main__":
    with Path(sys.argv[3]).open("a") as file:
        Soaker(Path(sys.argv[1]), int(sys.argv[2]), file).run()
