"""Putting values: windows, extents lent ahead, and the copying that overlaps them.

A batch goes in windows. While the daemon commits one window, the next is being copied, so that a long put runs at the
speed of the copy. Every commit asks for extents for puts to come; a single put then is one round trip. What is lent ahead
and not used for a second is given back.
"""

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvd.errors import DeadlinePassed, Draining, KvdError, NoRoom
from kvd.wire import protocol as p
from kvd.wire.connection import Connection, Waiter

if TYPE_CHECKING:
    from kvd.wire.client import Client

Buffer = object
"""Anything with the buffer protocol."""

WINDOW_BYTES = 8 << 20
WINDOW_ITEMS = 64
IN_FLIGHT = 2
IDLE_S = 1.0
DURABILITY = ("none", "group", "fsync")


@dataclass(frozen=True, slots=True)
class PutResult:
    """What became of a put: truthy when stored. `reason` says why not; `durability` what it survives (none|group|fsync)."""

    stored: bool
    reason: str = ""
    durability: str = "none"

    def __bool__(self) -> bool:
        return self.stored


_STORED = PutResult(True)


class Ahead:
    """Extents lent ahead on one connection, by pages."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.extents: dict[int, list[tuple[int, int, float]]] = {}  # pages -> [(serial, offset, good until)]
        self.used_s = 0.0
        self.timer: threading.Timer | None = None

    def take(self, pages: int, now: float) -> tuple[int, int] | None:
        with self.lock:
            self.used_s = now
            ready = self.extents.get(pages)
            while ready:
                serial, offset, until = ready.pop()
                if now < until:
                    return serial, offset
            return None

    def take_many(self, pages: Sequence[int], now: float) -> list[tuple[int, int] | None]:
        """`take` for each, None where there is none."""
        taken: list[tuple[int, int] | None] = []
        with self.lock:
            self.used_s = now
            for count in pages:
                ready = self.extents.get(count)
                while ready:
                    serial, offset, until = ready.pop()
                    if now < until:
                        taken.append((serial, offset))
                        break
                else:
                    taken.append(None)
        return taken

    def put(self, sizes: Sequence[int], answer: p.Committed, until: float) -> None:
        extents = self.extents
        with self.lock:
            for size, serial, offset in zip(sizes, answer.serials, answer.offsets, strict=False):
                pages = size + 4095 >> 12 or 1
                ready = extents.get(pages)
                if ready is None:
                    ready = extents[pages] = []
                ready.append((serial, offset, until))

    def put_one(self, pages: int, serial: int, offset: int, until: float) -> None:
        with self.lock:
            ready = self.extents.get(pages)
            if ready is None:
                self.extents[pages] = [(serial, offset, until)]
            else:
                ready.append((serial, offset, until))

    def watch(self, link: Connection) -> None:
        """Give everything back once it has not been used for a second."""
        with self.lock:
            if self.timer is None:
                self.timer = threading.Timer(IDLE_S, self._idle, (link,))
                self.timer.daemon = True
                self.timer.start()

    def stop(self) -> None:
        """No more watching."""
        with self.lock:
            if self.timer is not None:
                self.timer.cancel()
                self.timer = None

    def _idle(self, link: Connection) -> None:
        with self.lock:
            self.timer = None
            idle = time.monotonic() - self.used_s >= IDLE_S
        if not idle:
            self.watch(link)
        elif (serials := self.give_back()) and not link.closed:
            link.tell(p.Abort(0, serials))

    def give_back(self) -> list[int]:
        with self.lock:
            serials = [serial for ready in self.extents.values() for serial, _, _ in ready]
            self.extents.clear()
            return serials


def split(order: Sequence[int], views: Sequence[memoryview], limit: int) -> list[list[int]]:
    """`order` in runs of at most `limit` bytes and WINDOW_ITEMS items, at least one item each."""
    batches: list[list[int]] = []
    size = 0
    for i in order:
        length = len(views[i])
        if not batches or (size + length > limit and batches[-1]) or len(batches[-1]) >= WINDOW_ITEMS:
            batches.append([])
            size = 0
        batches[-1].append(i)
        size += length
    return batches


def fill(results: list[PutResult | None], batch: Sequence[int], answer: p.Committed) -> None:
    stored = _STORED if not answer.durability else PutResult(True, "", DURABILITY[answer.durability])
    if not answer.reasons:
        for i in batch:
            results[i] = stored
        return
    for i, reason in zip(batch, answer.reasons, strict=True):
        results[i] = PutResult(False, reason) if reason else stored


def put_one(client: "Client", link: Connection, key: bytes, view: memoryview, namespace: bytes, retention: int) -> PutResult | None:
    """One value into an extent that was lent ahead: one round trip. None when there is none, or it went wrong: do it in full."""
    asked = time.monotonic()
    ahead, size = client._ahead, len(view)
    pages = size + 4095 >> 12
    extent = ahead.take(pages, asked)
    if extent is None:
        return None
    serial, offset = extent
    link.mapping.copy_in(offset, view)
    request = p.Commit(0, namespace, [serial], [size], [key], retention, 0, 0, [size])
    try:
        answer = link.call(request, p.Committed)
    except DeadlinePassed:
        raise
    except KvdError:
        return None
    if answer.serials:
        ahead.put_one(pages, answer.serials[0], answer.offsets[0], asked + link.welcome.lease_s / 2)
        if ahead.timer is None:
            ahead.watch(link)
    if not answer.reasons:
        return _STORED
    return None if answer.reasons[0] == "lease_lost" else PutResult(False, answer.reasons[0])


@dataclass(slots=True)
class _Commit:
    """A window on its way."""

    request: p.Commit
    waiter: Waiter
    indices: list[int]
    sent_s: float


class Putter:
    """One put of many values on one connection. `how`: (namespace, retention, expires_ns, wait_ms)."""

    def __init__(
        self,
        client: "Client",
        link: Connection,
        items: Sequence[tuple[bytes, Buffer]],
        views: list[memoryview],
        results: list[PutResult | None],
        how: tuple[bytes, int, int, int],
    ) -> None:
        self.client = client
        self.link = link
        self.ahead = client._ahead
        self.items = items
        self.views = views
        self.results = results
        self.how = how
        self.on_way: deque[_Commit] = deque()

    def run(self, order: list[int]) -> None:
        """Put these items. Raises Disconnected; then those without a result may or may not have been stored."""
        try:
            self._all(order)
            late = [i for i in order if self._late(i)]
            if late:  # the copying took longer than the lease: once more
                self._all(late)
        except BaseException:
            for commit in self.on_way:
                self.link.forget(commit.request, commit.waiter)
            raise

    def _all(self, order: list[int]) -> None:
        limit = min(WINDOW_BYTES, max(1 << 20, self.link.welcome.arena_bytes // 8))
        for batch in split(order, self.views, limit):
            while batch:
                batch = self._window(batch)
        self._settle_all()

    def _late(self, i: int) -> bool:
        result = self.results[i]
        return result is not None and result.reason == "lease_lost"

    def _window(self, batch: list[int]) -> list[int]:
        """Copy as many of the batch as get room and send their commit; returns those that are left."""
        space, klass, expires, wait_ms = self.how
        try:
            ready, left = self._room(batch)
        except (NoRoom, Draining) as error:
            if self.on_way:  # what is under way may make room, or take it: settle that first
                self._settle_all()
                return batch
            for i in batch:
                self.results[i] = PutResult(False, error.code)
            return []
        copy = self.link.mapping.copy_in
        for i, _, offset in ready:
            copy(offset, self.views[i])
        indices = [i for i, _, _ in ready]
        sizes = [len(self.views[i]) for i in indices]
        keys = [self.items[i][0] for i in indices]
        request = p.Commit(0, space, [serial for _, serial, _ in ready], sizes, keys, klass, expires, wait_ms, sizes)
        sent = time.monotonic()
        self.on_way.append(_Commit(request, self.link.submit(request), indices, sent))
        if len(self.on_way) >= IN_FLIGHT:
            self._settle()
        return left

    def _room(self, batch: list[int]) -> tuple[list[tuple[int, int, int]], list[int]]:
        """((item, serial, offset) of those that have room, the others). At least one has."""
        views = self.views
        taken = self.ahead.take_many([len(views[i]) + 4095 >> 12 or 1 for i in batch], time.monotonic())
        ready = [(i, *extent) for i, extent in zip(batch, taken, strict=True) if extent is not None]
        lacking = [i for i, extent in zip(batch, taken, strict=True) if extent is None]
        if not lacking or ready:
            return ready, lacking
        lent = self.link.call(p.Reserve(0, [len(self.views[i]) for i in lacking], int(self.client.timeout_s * 900)), p.Lent)
        ready += [(i, serial, offset) for i, serial, offset in zip(lacking, lent.serials, lent.offsets, strict=False)]
        return ready, lacking[len(lent.serials) :]

    def _settle_all(self) -> None:
        while self.on_way:
            self._settle()

    def _settle(self) -> None:
        """Take in the answer to the oldest commit."""
        commit = self.on_way.popleft()
        timeout = self.client._patience(commit.request.wait_ms)
        try:
            answer = self.link.wait(commit.waiter, commit.request, p.Committed, timeout)
        except Draining:
            for i in commit.indices:
                self.results[i] = PutResult(False, "draining")
            return
        if answer.serials:
            self.ahead.put(commit.request.ahead, answer, commit.sent_s + self.link.welcome.lease_s / 2)
            self.ahead.watch(self.link)
        fill(self.results, commit.indices, answer)


__all__ = ["DURABILITY", "Ahead", "Buffer", "PutResult", "Putter", "fill", "put_one", "split"]
