"""A tier in memory that behaves as a slower one would: bandwidth, latency, loss. For trials and tests, not for service.

Every call takes `latency_s` and then its bytes at `bandwidth` bytes a second; all calls share that bandwidth, as on a real
device. `loss` is the share of loads that find the value lost: it is then really gone.
"""

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import xxhash

from kvd.store.identity import NAMESPACE_BYTES, Identity
from kvd.store.retention import expired
from kvd.tiers.adapters import envelope
from kvd.tiers.adapters.base import Adapter, Capabilities, Hit, Item, Loaded, Stored, Usage, Want
from kvd.tiers.adapters.kind import Eviction, Field, Kind, gib, number, seconds, whole
from kvd.tiers.adapters.ledger import Entry, Ledger


class MockAdapter(Adapter):
    """Copies of values, checksummed; see the module."""

    type = "mock"
    policies = ("LRU", "S3FIFO", "noop")
    capabilities = Capabilities(evict=True, enumerate=True, exact_usage=True, local_index=True)

    def __init__(
        self,
        name: str,
        max_bytes: int,
        bandwidth: float,
        *,
        latency_s: float = 0.0,
        loss: float = 0.0,
        seed: int = 0,
        eviction: Eviction | None = None,
        clock_ns: Callable[[], int] = time.time_ns,
        sleep: Callable[[float], None] = time.sleep,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(name)
        self.max_bytes = max_bytes
        self.bandwidth = bandwidth
        self.latency_s = latency_s
        self.loss = loss
        self.eviction = eviction or Eviction()
        self._clock_ns, self._sleep, self._monotonic = clock_ns, sleep, monotonic
        self._random = random.Random(seed)  # noqa: S311 - trials must be repeatable
        self._lock = threading.Lock()
        self._ledger = Ledger(scan_resistant=self.eviction.scan_resistant)
        self._values: dict[Identity, tuple[bytes, int]] = {}
        self._free_at = 0.0  # when the device has done what it was given so far

    def open(self) -> None:
        """Nothing to recover: what it held is gone with the daemon."""

    def close(self, deadline_s: float = 5.0) -> None:
        with self._lock:
            self._values.clear()
            self._ledger = Ledger(scan_resistant=self.eviction.scan_resistant)

    def _take(self, size: int) -> None:
        """The time that so many bytes need, behind what others have under way."""
        with self._lock:
            begin = max(self._free_at, self._monotonic())
            self._free_at = begin + size / self.bandwidth
            wait = self._free_at - self._monotonic() + self.latency_s
        if wait > 0:
            self._sleep(wait)

    def store(self, items: Sequence[Item]) -> list[Stored]:
        self._take(sum(len(item.data) for item in items))
        results = [self._store(item) for item in items]
        for item, result in zip(items, results, strict=True):
            if result.ok:
                self.counters.stores += 1
                self.counters.store_bytes += len(item.data)
            else:
                self.counters.store_failures += 1
        return results

    def _store(self, item: Item) -> Stored:
        now, size = self._clock_ns(), len(item.data)
        if expired(item.expires_ns, now):
            return Stored(False, "expired")
        if size > self.max_bytes:
            return self.too_large(item, self.max_bytes, "raise max_size_gb")
        with self._lock:
            self._forget(item.identity)
            left = self.eviction.excess(self._ledger.used, size, self.max_bytes)
            while left > 0 and (victim := self._ledger.victim(now)) is not None:
                left -= self._forget(victim)
                self.counters.evictions += 1
                self.evicted([victim])
            if self._ledger.used + size > self.max_bytes:
                return Stored(False, "full")
            data = bytes(item.data)
            self._values[item.identity] = (data, xxhash.xxh3_64_intdigest(data))
            self._ledger.add(item.identity, Entry(0, size, Hit(size, item.retention, item.expires_ns, item.note)))
        return Stored(True)

    def _forget(self, identity: Identity) -> int:
        entry = self._ledger.remove(identity)
        self._values.pop(identity, None)
        return entry.size if entry is not None else 0

    def lookup(self, identities: Sequence[Identity]) -> list[Hit | None]:
        now = self._clock_ns()
        with self._lock:
            return [self._ledger.hit(identity, now) for identity in identities]

    def load(self, wants: Sequence[Want]) -> list[Loaded]:
        self._take(sum(len(want.into) for want in wants))
        return [self._load(want) for want in wants]

    def _load(self, want: Want) -> Loaded:
        with self._lock:
            hit = self._ledger.hit(want.identity, self._clock_ns())
            lost = hit is not None and self.loss > 0 and self._random.random() < self.loss
            if lost:
                self._forget(want.identity)
            if hit is None or lost or hit.length != len(want.into):
                self.counters.misses += 1
                return Loaded.MISS
            data, checksum = self._values[want.identity]
            self._ledger.touch(want.identity)
        if xxhash.xxh3_64_intdigest(data) != checksum:
            self.counters.corruptions += 1
            self.delete([want.identity])
            return Loaded.CORRUPT
        envelope.copy(want.into, data)
        self.counters.hits += 1
        self.counters.load_bytes += len(data)
        return Loaded.OK

    def delete(self, identities: Sequence[Identity]) -> int:
        with self._lock:
            held = sum(identity in self._values for identity in identities)
            for identity in identities:
                self._forget(identity)
        return held

    def enumerate(self) -> Iterator[tuple[Identity, Hit]]:
        return self._ledger.items(self._lock, self._clock_ns())

    def identities(self, namespace: bytes | None) -> Iterator[Identity]:
        """Expired ones as well: a clock that is set back would bring them back."""
        held = self._ledger.items(self._lock, 0)
        return (identity for identity, _ in held if namespace is None or identity[:NAMESPACE_BYTES] == namespace)

    def usage(self) -> Usage:
        with self._lock:
            return Usage(self._ledger.used, self.max_bytes, len(self._ledger))

    def describe(self) -> dict[str, object]:
        return {"bandwidth": self.bandwidth, "latency_s": self.latency_s, "loss": self.loss}


def _make(name: str, values: dict[str, Any]) -> Adapter:
    return MockAdapter(
        name,
        values["max_size_gb"],
        values["mock_bandwidth_gb"],
        latency_s=values["latency"],
        loss=values["loss"],
        seed=values["seed"],
        eviction=values.get("eviction"),
    )


KIND = Kind(
    "mock",
    "memory, as slow and lossy as told: for trials",
    "kvd.tiers.adapters.mock:MockAdapter",
    _make,
    (
        Field("max_size_gb", gib(1e-6), required=True, help="GiB it holds"),
        Field("mock_bandwidth_gb", gib(1e-6), required=True, help="GiB a second it moves"),
        Field("latency", seconds(0, 60), 0.0, help="seconds, or text such as 5ms, that every call takes besides"),
        Field("loss", number(0, 1), 0.0, help="share of loads that find the value lost"),
        Field("seed", whole(0, (1 << 31) - 1), 0, help="the same seed loses the same loads"),
    ),
)
