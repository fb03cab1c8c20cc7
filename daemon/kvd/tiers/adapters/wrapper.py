"""An adapter around another: what it does not change is the inner one's, also what it counts and whether it works."""

from collections.abc import Collection

from kvd.store.identity import Identity
from kvd.tiers.adapters.base import Adapter, Counters, Durability, Evicted, Usage


class Wrapper(Adapter):
    """`inner` under this name. Methods that move or find values are for the class that wraps."""

    def __init__(self, name: str, inner: Adapter) -> None:
        self.inner = inner
        super().__init__(name)
        self.capabilities = inner.capabilities
        self.policies = inner.policies
        self.says_damage = inner.says_damage

    @property
    def counters(self) -> Counters:
        """The inner adapter's."""
        return self.inner.counters

    @counters.setter
    def counters(self, value: Counters) -> None:
        """The base class sets empty ones; the inner adapter has its own."""

    @property
    def unreadable(self) -> Collection[Identity]:
        return self.inner.unreadable

    def listen(self, evicted: Evicted) -> None:
        self.inner.listen(evicted)

    def attach(self, memory: memoryview) -> None:
        self.inner.attach(memory)

    def open(self) -> None:
        self.inner.open()

    def close(self, deadline_s: float = 5.0) -> None:
        self.inner.close(deadline_s)

    def usage(self) -> Usage:
        return self.inner.usage()

    def flush(self) -> Durability:
        return self.inner.flush()

    @property
    def parts_down(self) -> int:
        return self.inner.parts_down
