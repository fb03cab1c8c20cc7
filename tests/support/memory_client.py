"""A kvd client without a daemon, for tests of pure scheduling and copying logic: a dict behind the same calls.

Only those tests use it; everything that claims something about the daemon runs against a real one.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, Self

from kvd.errors import NoRoom, Unavailable


class Found:
    """A PrefixResult."""

    def __init__(self, length: int, token: bytes | None) -> None:
        self.length = length
        self.token = token
        self.sources = bytes(length)


class MemoryLease:
    def __init__(self, views: list[Any], commit: Callable[..., list[bool]] | None = None) -> None:
        self.views = views
        self._commit = commit

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def check(self) -> None:
        pass

    def release(self) -> None:
        pass

    def abort(self) -> None:
        pass

    def commit(self, keys: Sequence[bytes], **how: Any) -> list[bool]:
        assert self._commit is not None
        return self._commit(keys, **how)


class MemoryClient:
    """`values` by (namespace, key). `away` makes every call fail as if the daemon were gone; `calls` counts by name."""

    def __init__(self) -> None:
        self.values: dict[tuple[bytes, bytes], bytes] = {}
        self.facts: dict[bytes, bytes] = {}
        self.away = False
        self.full = False
        self.calls: dict[str, int] = {}
        self.slow_lookups = False
        self.below: set[tuple[bytes, bytes]] = set()
        """What only a tier holds that must be asked, with patience."""
        self.asked: threading.Event | None = None
        """Asking such a tier waits for this."""
        self.written: list[tuple[bytes, str, float | None]] = []

    def _called(self, name: str) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1
        if self.away:
            raise Unavailable("gone")

    def ping(self) -> None:
        self._called("ping")

    def close(self) -> None:
        pass

    def _holds(self, name: tuple[bytes, bytes], ask_s: float | None) -> bool:
        if name in self.values or not self.slow_lookups or not ask_s:
            return name in self.values
        assert self.asked is None or self.asked.wait(10)
        return name in self.below

    def prefix(
        self,
        keys: Sequence[bytes],
        *,
        namespaces: Sequence[bytes],
        pin_s: float = 0.0,
        where: bool = False,
        ask_s: float | None = None,
    ) -> Found:
        self._called("prefix")
        length = 0
        while length < len(keys) and all(self._holds((namespace, keys[length]), ask_s) for namespace in namespaces):
            length += 1
        return Found(length, b"t" * 16 if length and pin_s else None)

    def get(self, key: bytes, *, namespace: str) -> bytes | None:
        self._called("get")
        return self.facts.get(key)

    def put(self, key: bytes, data: bytes, *, namespace: str) -> None:
        self._called("put")
        self.facts[key] = data

    def note(self, keys: Sequence[bytes], why: str, *, namespace: bytes) -> None:
        self._called("note")

    def exists(self, keys: Sequence[bytes], *, namespace: bytes, ask_s: float | None = None) -> list[bool]:
        self._called("exists")
        return [self._holds((namespace, key), ask_s) for key in keys]

    def read(self, keys: Sequence[bytes], *, namespace: bytes, timeout_s: float) -> MemoryLease:
        self._called("read")
        found = [self.values.get((namespace, key)) for key in keys]
        return MemoryLease([memoryview(value) if value is not None else None for value in found])

    def unpin(self, token: bytes, *, namespace: bytes) -> None:
        self._called("unpin")

    def write(self, sizes: Sequence[int], *, wait_s: float) -> MemoryLease:
        self._called("write")
        if self.full:
            raise NoRoom("the arena is full")
        buffers = [bytearray(size) for size in sizes]

        def commit(keys: Sequence[bytes], *, namespace: bytes, retention: str, ttl_s: float | None) -> list[bool]:
            for key, buffer in zip(keys, buffers, strict=True):
                self.values[namespace, key] = bytes(buffer)
                self.written.append((key, retention, ttl_s))
            return [True] * len(keys)

        return MemoryLease([memoryview(buffer) for buffer in buffers], commit)

    def clear(self, *, namespace: bytes) -> int:
        self._called("clear")
        gone = [identity for identity in self.values if identity[0] == namespace]
        for identity in gone:
            del self.values[identity]
        return len(gone)
