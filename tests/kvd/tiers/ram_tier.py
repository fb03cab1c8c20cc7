"""A real Adapter that keeps values in a dict, with taps on it; and a whole daemon running in a thread of the test.

with running(tier := RamTier()) as daemon:
    with daemon.client() as client: ...
    tier.stores.close()          # from here on, store calls block until .open()
"""

import asyncio
import contextlib
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from kvd.service.daemon import Daemon, Options
from kvd.store.extents import PAGE
from kvd.store.identity import Identity
from kvd.store.retention import Retention, expired
from kvd.tiers.adapters.base import (
    Adapter,
    AdapterError,
    Capabilities,
    Durability,
    Hit,
    Item,
    Loaded,
    Stored,
    Usage,
    Want,
)
from kvd.wire.client import Client
from tests.support.processes import wait_until

T = TypeVar("T")


class Tap:
    """A valve in front of an operation: closed, calls wait at it; `failing`, they raise. `waiting` counts who waits."""

    def __init__(self) -> None:
        self._flows = threading.Event()
        self._flows.set()
        self.failing = ""
        self.waiting = 0
        self.calls = 0

    def close(self) -> None:
        self._flows.clear()

    def open(self) -> None:
        self._flows.set()

    @property
    def flowing(self) -> bool:
        return self._flows.is_set()

    def drip(self) -> None:
        """Let who waits now through, and close again behind them."""
        before = self.waiting
        self._flows.set()
        wait_until(lambda: self.waiting < before or not before, what="a call to go through")
        self._flows.clear()

    def until_blocked(self, calls: int = 1) -> None:
        wait_until(lambda: self.waiting >= calls, what=f"{calls} calls to wait at the tap")

    def pass_through(self) -> None:
        self.calls += 1
        self.waiting += 1
        try:
            self._flows.wait()
        finally:
            self.waiting -= 1
        if self.failing:
            raise AdapterError(self.failing)


class RamTier(Adapter):
    """Values in a dict. `refuse` gives the reason not to take an item, '' to take it; `log` is what happened, in order."""

    type = "ram"

    def __init__(self, name: str = "ram", *, local_index: bool = True, durability: Durability = Durability.FSYNC) -> None:
        super().__init__(name)
        self.capabilities = Capabilities(evict=False, enumerate=True, durable=False, local_index=local_index)
        self.durability = durability
        self.values: dict[Identity, tuple[bytes, Retention, int]] = {}
        self.stores, self.loads, self.deletes, self.lookups = Tap(), Tap(), Tap(), Tap()
        self.refuse: Callable[[Item], str] = lambda item: ""
        self.damaged: set[Identity] = set()
        self.log: list[tuple[str, Identity, bytes]] = []
        self.opened = self.closed = 0
        self.lock = threading.Lock()

    def open(self) -> None:
        self.opened += 1

    def close(self, deadline_s: float = 5.0) -> None:
        self.closed += 1

    def store(self, items: Sequence[Item]) -> list[Stored]:
        self.stores.pass_through()
        results = []
        for item in items:
            why = self.refuse(item)
            if why:
                self.counters.store_failures += 1
                results.append(Stored(False, why))
                continue
            with self.lock:
                self.values[item.identity] = (bytes(item.data), item.retention, item.expires_ns)
                self.log.append(("store", item.identity, bytes(item.data[:16])))
            self.counters.stores += 1
            results.append(Stored(True, "", self.durability))
        return results

    def lookup(self, identities: Sequence[Identity]) -> list[Hit | None]:
        if not self.capabilities.local_index:
            self.lookups.pass_through()
        now = time.time_ns()
        found: list[Hit | None] = []
        for identity in identities:
            row = self.values.get(identity)
            found.append(None if row is None or expired(row[2], now) else Hit(len(row[0]), row[1], row[2]))
        return found

    def load(self, wants: Sequence[Want]) -> list[Loaded]:
        # What is read is read when the call begins, as from a disk whose answer is slow to come.
        rows = [self.values.get(want.identity) for want in wants]
        self.loads.pass_through()
        results = []
        for want, row in zip(wants, rows, strict=True):
            if row is None or len(row[0]) != len(want.into):
                results.append(Loaded.MISS)
            elif want.identity in self.damaged:
                self.counters.corruptions += 1
                want.into[:] = b"\xee" * len(want.into)
                results.append(Loaded.CORRUPT)
            else:
                want.into[:] = row[0]
                self.counters.hits += 1
                results.append(Loaded.OK)
        return results

    def delete(self, identities: Sequence[Identity]) -> int:
        self.deletes.pass_through()
        gone = 0
        with self.lock:
            for identity in identities:
                self.log.append(("delete", identity, b""))
                gone += self.values.pop(identity, None) is not None
        return gone

    def enumerate(self) -> Iterator[tuple[Identity, Hit]]:
        with self.lock:
            rows = list(self.values.items())
        for identity, (data, retention, expires_ns) in rows:
            yield identity, Hit(len(data), retention, expires_ns)

    def usage(self) -> Usage:
        return Usage(sum(len(row[0]) for row in list(self.values.values())), 0, len(self.values))

    def flush(self) -> Durability:
        return self.durability

    def open_all(self) -> None:
        for tap in (self.stores, self.loads, self.deletes, self.lookups):
            tap.failing = ""
            tap.open()


class _Loop(uvloop.Loop):
    """Signals belong to the test's main thread: the daemon's handlers are kept, for `InProcess.signal`."""

    def __init__(self) -> None:
        super().__init__()
        self.handlers: dict[int, Callable[[], None]] = {}

    def add_signal_handler(self, sig: int, callback: Any, *args: Any) -> None:
        self.handlers[sig] = lambda: callback(*args)


class InProcess:
    """A daemon on a thread of this process: real socket, real client, adapters that the test holds in its hands."""

    def __init__(self, adapters: Sequence[Adapter], max_bytes: int, options: dict[str, Any]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kvt-"))
        self.socket = self.folder / "kvd.sock"
        (self.folder / "shm").mkdir()
        self.options = Options(self.socket, max_bytes, adapters, shm=self.folder / "shm", **options)
        self.daemon = Daemon(self.options)
        self.loop = _Loop()
        self.failure: BaseException | None = None
        self._signalled = False
        self._thread = threading.Thread(target=self._run, name="kvd-in-process")

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
                runner.run(self.daemon.run())
        except BaseException as error:
            self.failure = error

    def start(self) -> None:
        self._thread.start()
        wait_until(lambda: self._answers() or not self._thread.is_alive(), what="the daemon to answer")
        assert self.failure is None, self.failure

    def _answers(self) -> bool:
        return self.socket.exists() and getattr(self.daemon, "server", None) is not None and self.daemon.server._task is not None

    def client(self, **options: Any) -> Client:
        return Client(self.socket, **options)

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        """What the daemon does when its process gets this signal. Once: a second one ends the process, which is the test's."""
        assert not self._signalled
        self._signalled = True
        self.loop.call_soon_threadsafe(self.loop.handlers[number])

    def ask(self, question: Callable[[], T]) -> T:
        """The answer of `question`, asked on the daemon's own thread."""

        async def run() -> T:
            return question()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(10)

    @property
    def store(self) -> Any:
        return self.daemon.store

    def tier(self, number: int = 0) -> Any:
        return self.daemon.tiering.tiers[number]

    def pins(self) -> int:
        return self.ask(lambda: int(self.store.index.pins.sum()))

    def value_bytes(self) -> int:
        """Pages taken by values (and by promotions under way): all that is taken but what connections are lent."""

        def count() -> int:
            lent = sum(link.holder.lent_pages for link in self.daemon.server.connections.values())
            return int(self.store.arena.used_bytes - lent * PAGE)

        return self.ask(count)

    def settled(self, number: int = 0) -> None:
        """Wait until the tier has nothing more to do."""
        wait_until(lambda: self.ask(lambda: not self.tier(number).busy), what="the tier to be idle")

    def evict_all(self) -> None:
        """Empty the arena as eviction does, one victim after the other, unwritten ones spared."""

        def evict() -> None:
            while slot := self.store.index.victim():
                self.store._hide(slot)

        self.ask(evict)

    def wait(self, timeout_s: float = 30.0) -> None:
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), "the daemon did not stop"

    def stop(self) -> None:
        if self._thread.is_alive() and not self._signalled:
            self.signal()
        self.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def running(*adapters: Adapter, max_bytes: int = 8 << 20, **options: Any) -> Iterator[InProcess]:
    """A daemon with these tiers; on leaving, every tap is opened and the daemon has to end without an error."""
    process = InProcess(adapters, max_bytes, {"drain_s": 2.0, **options})
    process.start()
    try:
        yield process
    finally:
        for adapter in adapters:
            if isinstance(adapter, RamTier):
                adapter.open_all()
        process.stop()
    assert process.failure is None, process.failure
