"""Zero-copy views of the arena, with an end: ReadLease and WriteLease.

A lease is good until released, until its deadline, or until the connection goes. The deadline is counted from before the
request was sent, so this side's clock runs out first, and whoever copies can check afterwards, without a round trip,
that the bytes were pinned all the while: `check`. Leaving the context checks too.
"""

import functools
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from kvd.errors import LeaseLost
from kvd.wire import protocol as p
from kvd.wire.connection import Connection

if TYPE_CHECKING:
    from kvd.wire.client import Client, PutResult


class ReadLease:
    """Values pinned in the arena: `views`, in key order, or offsets and lengths in the arena (MISSING where there is none).

    `complete` is False when the arena had no room to bring up the rest from a tier: ask again for those after releasing.
    """

    def __init__(self, link: Connection, asked_s: float, keys: int, answer: p.Leased) -> None:
        self._link = link
        self._number = answer.lease
        self._until = asked_s + link.welcome.lease_s
        self._inline = answer.inline or {}
        self._answer = answer
        self.keys = keys
        self.served = len(answer.offsets) // 8
        self.complete = self.served >= keys

    @functools.cached_property
    def offsets(self) -> list[int]:
        """Where in the arena each value lies."""
        return list(memoryview(self._answer.offsets).cast("Q"))

    @functools.cached_property
    def lengths(self) -> list[int]:
        """Bytes of each value."""
        return list(memoryview(self._answer.lengths).cast("Q"))

    @functools.cached_property
    def views(self) -> list[memoryview | None]:
        """One read-only view a key, None where there is none. Made when first asked for."""
        view, inline = self._link.mapping.read_view, self._inline
        if not inline and self.complete and p.MISSING not in self.offsets:
            return [view[offset : offset + length] for offset, length in zip(self.offsets, self.lengths, strict=True)]
        made: list[memoryview | None] = [
            memoryview(inline[i]) if i in inline else None if offset == p.MISSING else view[offset : offset + length]
            for i, (offset, length) in enumerate(zip(self.offsets, self.lengths, strict=True))
        ]
        return made + [None] * (self.keys - self.served)

    def inline(self, i: int) -> bytes | None:
        """The value itself where it came in the frame."""
        return self._inline.get(i)

    @property
    def valid(self) -> bool:
        """Whether the bytes are still pinned (and so were from the start until now)."""
        return not self._number or (time.monotonic() < self._until and self._link.alive())

    def check(self) -> None:
        """Raises LeaseLost when the lease has ended: what was read under it is void."""
        if not self.valid:
            raise LeaseLost("the lease ended while its bytes were being read", hint="read again, or renew() long readings")

    def renew(self) -> None:
        """Make it last anew from now. Raises LeaseLost when it has ended."""
        asked = time.monotonic()
        if self._number:
            self._link.call(p.Renew(0, self._number), p.Done)
            self._until = asked + self._link.welcome.lease_s

    def release(self) -> None:
        """Unpin. Views must not be used any more. A second call does nothing."""
        if self._number:
            self._link.tell(p.Release(0, [self._number]))
            self._number = 0
            self._until = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None and self._number:
                self.check()
        finally:
            self.release()


class WriteLease:
    """Extents of the arena to write to. `views` has one writable memoryview a size; `commit` makes them values.

    Left without a commit, everything is given back. Until then nobody else gets these bytes, whatever happens to the
    connection: the daemon keeps them apart until this process has committed, aborted or ended.
    """

    def __init__(self, client: "Client", link: Connection, sizes: Sequence[int], serials: list[int], offsets: list[int]) -> None:
        self._client = client
        self._link = link
        self.sizes = list(sizes)
        self._serials = serials
        view = link.mapping.write_view
        assert view is not None
        self.views = [view[offset : offset + size] for offset, size in zip(offsets, sizes, strict=True)]

    def commit(
        self,
        keys: Sequence[bytes],
        *,
        retention: str = "long",
        ttl_s: float | None = None,
        wait: str = "",
        namespace: str | bytes | None = None,
    ) -> "list[PutResult]":
        """Make the values visible under these keys (one a view); never raises for a lost lease: the results say so."""
        if len(keys) != len(self._serials):
            raise ValueError(f"{len(keys)} keys for {len(self._serials)} views")
        serials, self._serials = self._serials, []
        return self._client._commit(self._link, serials, self.sizes, keys, retention, ttl_s, wait, namespace)

    def abort(self) -> None:
        """Give the extents back."""
        if self._serials:
            self._link.tell(p.Abort(0, self._serials))
            self._serials = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.abort()
