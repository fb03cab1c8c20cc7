"""The connector's counters. Each has one name here, in vLLM's metrics (`vllm:kvd_<name>`) and in the log line.

Counters only grow; what is sent to vLLM is the growth since the last time, because vLLM adds up what it gets.
"""

import threading
from collections.abc import Mapping

COUNTERS = {
    "lookups": "look-ups in the daemon",
    "lookup_seconds": "time the scheduler spent on look-ups",
    "lookups_slow": "of these, such that had to wait for a tier's I/O",
    "lookup_failures": "look-ups the daemon answered with an error",
    "deferred": "requests that waited for another one loading the same prefix",
    "query_tokens": "tokens of new requests that the engine did not have itself",
    "query_hit_tokens": "of these, tokens the engine accepted to load: the two make vLLM's external prefix cache hit rate",
    "hit_tokens": "tokens the engine accepted to load, also for requests that come back after a preemption",
    "hit_tokens_arena": "of these, tokens whose chunks were in the daemon's RAM",
    "hit_tokens_disk": "of these, tokens that a tier of this host had to give",
    "hit_tokens_remote": "of these, tokens that a tier of several hosts had to give",
    "loads": "requests loaded",
    "load_bytes": "bytes copied into the engine's cache",
    "load_seconds": "time from the start of a load to its end, all requests added up",
    "load_failures": "loads that failed and were recomputed",
    "saves": "chunks stored",
    "save_bytes": "bytes copied out of the engine's cache",
    "save_seconds": "time the engine's steps spent on saving",
    "save_known": "chunks not copied because they were stored already",
    "save_failures": "chunks not stored: no room, or the daemon failed",
    "direct_load_bytes": "bytes of these that came from files past the daemon (GPU-direct)",
    "direct_save_bytes": "bytes of these that went to files past the daemon (GPU-direct)",
    "down": "connections to the daemon that were lost: one outage costs each process some",
    "errors": "errors inside the connector (each with a traceback in the log)",
}


REASONED = {"direct_fallback": "chunks that went through the arena although GPU-direct was asked for, by reason"}
"""Counters with a label `reason`. Inside, such a counter's key is `<name>/<reason>`."""
REASONS = (
    "no_library",
    "library_too_old",
    "driver_not_loaded",
    "driver_error",
    "driver_setup",
    "platform_unsupported",
    "device_unsupported",
    "file_unsupported",
    "io_disabled",
    "pinning_failed",
    "no_o_direct",
    "permission_denied",
    "no_file",
    "no_daemon",
    "no_tier",
    "no_buffer",
    "unknown_root",
    "too_small",
    "too_large",
    "full",
    "evicted",
    "lease_lost",
    "corrupt",
    "short_transfer",
    "io_error",
    "other",
)


def split(key: str) -> tuple[str, str]:
    """A counter's key as (name, reason); the reason is "" for a plain one."""
    name, _, reason = key.partition("/")
    return name, reason


class Counters:
    """Thread-safe counters: `add`, and `growth` since the last call of it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        names = [*COUNTERS, *(f"{name}/{reason}" for name in REASONED for reason in REASONS)]
        self._values: dict[str, float] = dict.fromkeys(names, 0)
        self._sent: dict[str, float] = dict.fromkeys(names, 0)

    def add(self, name: str, amount: float = 1) -> None:
        with self._lock:
            self._values[name] += amount

    def add_reason(self, name: str, reason: str) -> None:
        """Count one under its reason; a reason that has no place of its own is `other`."""
        self.add(f"{name}/{reason if reason in REASONS else 'other'}")

    def values(self) -> dict[str, float]:
        """All counters since start."""
        with self._lock:
            return dict(self._values)

    def growth(self) -> dict[str, float]:
        """What grew since the last call; empty when nothing did."""
        with self._lock:
            grown = {name: value - self._sent[name] for name, value in self._values.items() if value != self._sent[name]}
            self._sent.update(self._values)
        return grown


def join(into: dict[str, float], other: Mapping[str, float]) -> dict[str, float]:
    """Add `other` to `into` and return it."""
    for name, value in other.items():
        into[name] = into.get(name, 0) + value
    return into


def summary(grown: Mapping[str, float]) -> dict[str, int | float]:
    """The log line of an interval: the counters that moved, and rates where both halves are there."""
    line: dict[str, int | float] = {
        name: round(value, 4) if name.endswith("_seconds") else int(value) for name, value in grown.items() if value
    }
    for kind in ("load", "save"):
        seconds = grown.get(f"{kind}_seconds", 0)
        if seconds and grown.get(f"{kind}_bytes"):
            line[f"{kind}_gib_per_s"] = round(grown[f"{kind}_bytes"] / seconds / (1 << 30), 2)
    return line
