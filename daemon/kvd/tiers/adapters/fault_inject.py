"""Another adapter, with faults: calls that fail, hang or come late, loads that lose or damage values. For trials and tests.

Faults are drawn from a seeded generator, one draw a call or a load, so the same calls meet the same faults. Damage is done
to the buffer after the inner adapter has verified it, and is reported as the inner one would have: CORRUPT. So what is
tried out here is everything above the adapter; that an adapter notices damage by itself is for its own tests.
"""

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kvd.store.identity import Identity
from kvd.tiers.adapters.base import (
    Adapter,
    AdapterConfigError,
    AdapterError,
    AdapterFull,
    DirectExtent,
    Hit,
    Item,
    Loaded,
    Reservation,
    Stored,
    Want,
)
from kvd.tiers.adapters.kind import Field, Kind, mapping, number, seconds, whole
from kvd.tiers.adapters.wrapper import Wrapper


class FaultInject(Wrapper):
    """`inner` with faults; rates are shares of calls (errors, full, hang) or of loads (loss, damage)."""

    type = "fault_inject"

    def __init__(
        self,
        name: str,
        inner: Adapter,
        *,
        error_rate: float = 0.0,
        full_rate: float = 0.0,
        loss_rate: float = 0.0,
        corrupt_rate: float = 0.0,
        hang_rate: float = 0.0,
        delay_s: float = 0.0,
        hang_s: float = 0.0,
        seed: int = 0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(name, inner)
        self.error_rate, self.full_rate, self.hang_rate = error_rate, full_rate, hang_rate
        self.loss_rate, self.corrupt_rate = loss_rate, corrupt_rate
        self.delay_s, self.hang_s = delay_s, hang_s
        self._sleep = sleep
        self._random = random.Random(seed)  # noqa: S311 - faults must be repeatable
        self._lock = threading.Lock()
        self.injected: dict[str, int] = {}

    def _hit_by(self, fault: str, rate: float) -> bool:
        if rate <= 0:
            return False
        with self._lock:
            if self._random.random() >= rate:
                return False
            self.injected[fault] = self.injected.get(fault, 0) + 1
            return True

    def _suffer(self, call: str) -> None:
        if self.delay_s:
            self._sleep(self.delay_s)
        if self._hit_by("hang", self.hang_rate):
            self._sleep(self.hang_s)
        if self._hit_by("error", self.error_rate):
            self.counters.io_errors += 1
            raise AdapterError(f"{self.name}: injected error in {call}")

    def store(self, items: Sequence[Item]) -> list[Stored]:
        self._suffer("store")
        if self._hit_by("full", self.full_rate):
            self.counters.store_failures += len(items)
            raise AdapterFull(f"{self.name}: injected: no room")
        return self.inner.store(items)

    def direct_roots(self) -> list[Path]:
        return self.inner.direct_roots()

    def lend(self, wanted: Sequence[Reservation]) -> list[DirectExtent | str]:
        self._suffer("lend")
        if self._hit_by("full", self.full_rate):
            raise AdapterFull(f"{self.name}: injected: no room")
        return self.inner.lend(wanted)

    def fill(self, extent: DirectExtent, checksum: bytes = b"") -> Stored:
        self._suffer("fill")
        return self.inner.fill(extent, checksum)

    def give_back(self, extent: DirectExtent) -> None:
        self.inner.give_back(extent)

    def hold(self, identities: Sequence[Identity]) -> list[DirectExtent | None]:
        self._suffer("hold")
        return self.inner.hold(identities)

    def lookup(self, identities: Sequence[Identity]) -> list[Hit | None]:
        if not self.capabilities.local_index:
            self._suffer("lookup")
        return self.inner.lookup(identities)

    def load(self, wants: Sequence[Want]) -> list[Loaded]:
        self._suffer("load")
        results = self.inner.load(wants)
        for i, result in enumerate(results):
            if result is not Loaded.OK:
                continue
            if self._hit_by("loss", self.loss_rate):
                self.inner.delete([wants[i].identity])
                self.counters.misses += 1
                results[i] = Loaded.MISS
            elif self._hit_by("corrupt", self.corrupt_rate):
                if wants[i].into:
                    wants[i].into[0] ^= 0x80
                self.inner.delete([wants[i].identity])
                self.counters.corruptions += 1
                results[i] = Loaded.CORRUPT
        return results

    def delete(self, identities: Sequence[Identity]) -> int:
        self._suffer("delete")
        return self.inner.delete(identities)

    def delete_namespace(self, namespace: bytes) -> int:
        return self.inner.delete_namespace(namespace)

    def clear(self, namespace: bytes | None) -> int:
        self._suffer("clear")
        return self.inner.clear(namespace)

    def identities(self, namespace: bytes | None) -> Iterator[Identity]:
        return self.inner.identities(namespace)

    def enumerate(self) -> Iterator[tuple[Identity, Hit]]:
        return self.inner.enumerate()

    def describe(self) -> dict[str, object]:
        return {"injected": dict(self.injected), "inner": {"type": self.inner.type, **self.inner.describe()}}


def _make(name: str, values: dict[str, Any]) -> Adapter:
    from kvd.tiers.adapters import registry

    spec = {**values.pop("inner")}
    spec.pop("name", None)
    where = f"adapter {name} (fault_inject): field 'inner'"
    kind = registry.kind_of(spec, where)
    try:
        inner = registry.make(kind, name, spec)
    except AdapterConfigError as error:
        raise AdapterConfigError(f"{where}: {error.message}", hint=error.hint) from None
    times = {"delay_s": values.pop("delay"), "hang_s": values.pop("hang")}
    return FaultInject(name, inner, **times, **values)


_SHARE = number(0, 1)
KIND = Kind(
    "fault_inject",
    "another adapter, with faults: for trials",
    "kvd.tiers.adapters.fault_inject:FaultInject",
    _make,
    (
        Field("inner", mapping, required=True, help="the object of the adapter that is to suffer"),
        Field("error_rate", _SHARE, 0.0, help="share of calls that fail as if the device did"),
        Field("full_rate", _SHARE, 0.0, help="share of stores that find no room"),
        Field("loss_rate", _SHARE, 0.0, help="share of loads whose value is lost"),
        Field("corrupt_rate", _SHARE, 0.0, help="share of loads whose value is damaged"),
        Field("hang_rate", _SHARE, 0.0, help="share of calls that hang"),
        Field("hang", seconds(0, 86400), 0.0, help="how long these hang"),
        Field("delay", seconds(0, 60), 0.0, help="how much later every call comes"),
        Field("seed", whole(0, (1 << 31) - 1), 0, help="the same seed brings the same faults"),
    ),
)
