"""One adapter at work: its queue of changes, its threads, its breaker.

Changes (stores and deletes) of one tier are a first-in-first-out queue, worked off in batches by a few threads. Two values
put under one key never reach the tier in the wrong order: no identity is in two batches under way, nor twice in one, and
deletes go alone. Loads have threads of their own and never wait for changes.

A queued value is *dirty*: protected from eviction but not pinned, so that a daemon whose tier is broken can still let it
go. A value whose bytes a thread is reading is pinned.

Breaker: after FAILURES failed calls in a row the tier is left alone for a while (1 s, doubling to 30 s), then one call
probes it. Loads are misses meanwhile; what waits to be stored stays queued.
"""

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from kvd.store.identity import Identity
from kvd.store.index import Slots
from kvd.store.retention import Retention
from kvd.store.store import ABSENT, Store
from kvd.store.tombstones import Fate
from kvd.tiers.adapters.base import FULL_PAUSE_S, Adapter, AdapterError, AdapterFull, Durability, Hit, Item, Loaded, Stored, Want
from kvd.tiers.adapters.damage import DamageLog
from kvd.tiers.breaker import PAUSE_MAX_S, Breaker
from kvd.tiers.turns import Turns

log = logging.getLogger("kvd.tiers")

T = TypeVar("T")

Settled = Callable[[int, int, bool], None]
"""Told of each value that is still in the arena: its slot, the tier that has answered, and whether it took it."""

TASKS = itertools.count(1)
"""Numbers of store and load tasks, as the log names them."""
TIERS_MAX = 16
IN_FLIGHT = 8
BATCH_ITEMS = 256
BATCH_BYTES = 16 << 20
WRITERS = 4
LOAD_THREADS = 8
ASK_THREADS = 4
ASKS = 32
"""Look-ups under way or waiting for a thread, at most: what comes then is answered with "not here"."""
PATIENCE_S = 1.0
"""A look-up that was given this long and was not answered counts against the breaker."""
COPIES = 1024
"""With more changes than this waiting, a tier takes no copies of what other tiers hold."""
CLOSE_S = 2.0
"""An adapter gets at least this long to end its calls, and to close, whatever is left of the deadline."""
STUCK_S = 10.0
DOOMED_MAX = 1 << 18
"""Identities that may wait to be deleted: a tier without an index is told of every delete, held or not, and may be away long."""


class Receipt:
    """What became of the values of one put: resolved when every tier that takes them has answered."""

    def __init__(self, count: int, loop: asyncio.AbstractEventLoop) -> None:
        self.left = count
        self.weakest: Durability | None = None
        self.done: asyncio.Future[None] = loop.create_future()

    def skip(self) -> None:
        """One answer less to come: a tier that the value does not go to."""
        self.left -= 1
        if self.left <= 0 and not self.done.done():
            self.done.set_result(None)

    def note(self, durability: Durability) -> None:
        """One value's fate."""
        self.weakest = durability if self.weakest is None else min(self.weakest, durability)
        self.left -= 1
        if self.left <= 0 and not self.done.done():
            self.done.set_result(None)


@dataclass(slots=True)
class Write:
    """A value on its way: the slot, and the very key object it had, by which a reused slot is told."""

    slot: int
    key: bytes
    receipts: list[Receipt] = field(default_factory=list)
    copy: bool = False
    """Another tier holds it and it is only to be held here too: nobody waits for it, and it is dropped when that fails."""
    dirty: bool = True
    """It is counted in the value's dirty mark; a copy only while it is being written."""


@dataclass(slots=True)
class Erase:
    """Identities to delete."""

    identities: list[Identity]
    receipt: Receipt


class Tier:
    """An adapter, its queue and its threads. Lives on the event loop; only the adapter's methods run elsewhere."""

    def __init__(
        self,
        adapter: Adapter,
        store: Store,
        *,
        changed: Callable[[], None],
        number: int = 0,
        requests: int = IN_FLIGHT,
        settled: Settled = lambda slot, number, took: None,
    ) -> None:
        self.adapter = adapter
        self.number = number
        self.name = adapter.name
        self.turns = Turns(requests, adapter.prefetch_max_bytes)
        """Whose loads come next."""
        self._settled = settled
        self.store = store
        self.breaker = Breaker(store.monotonic)
        self.queue: deque[Write | Erase] = deque()
        self.doomed: dict[Identity, int] = {}
        """What a queued delete is about to remove: look-ups must not see it any more."""
        self._changed = changed
        self._loop = asyncio.get_running_loop()
        self._changes = ThreadPoolExecutor(WRITERS, thread_name_prefix=f"kvd-{self.name}-w")
        self._loads = ThreadPoolExecutor(max(LOAD_THREADS, min(requests, 64)), thread_name_prefix=f"kvd-{self.name}-r")
        self._asks = ThreadPoolExecutor(ASK_THREADS, thread_name_prefix=f"kvd-{self.name}-q")
        self._asking = 0
        self._deaf = False
        """The last failure was a look-up's: then one that works closes the breaker, else only stores and loads do."""
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._task: asyncio.Task[None] | None = None
        self.store_s: list[Callable[[float], None]] = []
        self.load_s: list[Callable[[float], None]] = []
        """Who wants to know how long calls took."""
        self._under_way: set[Identity] = set()
        self._loads_under_way = 0
        self._calls: dict[object, float] = {}  # calls into the adapter under way -> when they began
        self._said_stuck = False
        self.untaken: set[Identity] = set()
        """Values of the arena that it should hold and has refused: what a flush must own up to."""
        self._damage = DamageLog("kvd stats counts them (corruptions_total); see what keeps the values there")
        self.waiting = 0
        """Values of the arena that are on their way to it: in the queue or being written."""
        self.copied = 0
        """Values it holds because a later tier had them."""
        self._closing = False
        self._full = False
        self._said_full = float("-inf")
        self._writers: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Recover the adapter and start working. Raises what `Adapter.open` raises."""
        await self._loop.run_in_executor(self._changes, self.adapter.open)
        self._task = self._loop.create_task(self._work())

    async def close(self, deadline_s: float) -> None:
        """Work off the queue until the deadline, then close the adapter, unless a call into it never returned."""
        end = self._loop.time() + deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                await self.settle()
        except TimeoutError:
            if self.waiting:
                log.warning("tier %s: %d values were still on their way at the deadline", self.name, self.waiting)
            if self.doomed:
                log.warning("tier %s: it has not forgotten %d values: the next start finds them again", self.name, len(self.doomed))
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._closing = True  # look-ups find nothing here any more, so no load begins
        if await self._quiet(max(CLOSE_S, end - self._loop.time())):
            await self._close_adapter(max(CLOSE_S, end - self._loop.time()))
        else:
            # Closing files under a call that may come back would be worse than leaving them to the next start's recovery.
            log.warning("tier %s: a call into it does not return: it is left as it is", self.name)
        self._changes.shutdown(wait=False, cancel_futures=True)
        self._loads.shutdown(wait=False, cancel_futures=True)
        self._asks.shutdown(wait=False, cancel_futures=True)

    async def _quiet(self, seconds: float) -> bool:
        """Wait until no thread is inside the adapter; False when that takes too long."""
        end = self._loop.time() + seconds
        while self._writers or self._loads_under_way:
            if self._loop.time() >= end:
                return False
            await asyncio.sleep(0.01)
        return True

    async def _close_adapter(self, deadline_s: float) -> None:
        try:
            async with asyncio.timeout(deadline_s + CLOSE_S):
                await self._loop.run_in_executor(self._changes, self.adapter.close, deadline_s)
        except (TimeoutError, AdapterError) as error:
            log.warning("tier %s did not close cleanly: %s", self.name, str(error) or type(error).__name__)
        except Exception:  # a thread edge: what one adapter cannot close must not keep the others from closing
            log.exception("tier %s did not close cleanly", self.name)

    # ---- changes -----------------------------------------------------------------------------------------------------

    def write(self, slot: int, receipt: Receipt | None) -> None:
        """Queue a live value; it is dirty until the tier has answered."""
        index = self.store.index
        key = index.keys[slot]
        assert key is not None
        index.dirty_of[slot] |= 1 << self.number
        self.waiting += 1
        self._push(Write(slot, key, [receipt] if receipt else []))

    def copy(self, slot: int) -> None:
        """Queue a live value that another tier holds, where this one has time for it. It may be evicted before it is written."""
        key = self.store.index.keys[slot]
        if key is not None and not self._closing and not self.broken and len(self.queue) < COPIES:
            self._push(Write(slot, key, copy=True, dirty=False))

    def erase(self, identities: list[Identity], *, first: bool = False) -> Receipt:
        """Queue deletes (`first`: before all that waits); look-ups miss these identities from now on."""
        receipt = Receipt(1, self._loop)
        for identity in identities:
            self.doomed[identity] = self.doomed.get(identity, 0) + 1
        self._push(Erase(identities, receipt), first=first)
        return receipt

    @property
    def stuck(self) -> bool:
        """A call into it has not returned for STUCK_S: no error to count, and nothing will come of waiting."""
        return bool(self._calls) and self.store.monotonic() - min(self._calls.values()) > STUCK_S

    @property
    def broken(self) -> bool:
        """It does not work now, be it that its breaker is open or that it hangs."""
        return self.breaker.tripped or self.stuck

    def look(self) -> None:
        """Periodic: notice, and say once, that it hangs, and that it goes on; send elsewhere what waits for it in vain."""
        if self.broken:
            self.turns.divert()
        if self.stuck != self._said_stuck:
            self._said_stuck = not self._said_stuck
            if self._said_stuck:
                log.warning("tier %s: a call has not returned for %.0f s: serving without it", self.name, STUCK_S)
            else:
                log.warning("tier %s: goes on", self.name)
            self._changed()

    @property
    def clogged(self) -> bool:
        """So many deletes wait for it that no more are taken, nor puts that would mean one."""
        return len(self.doomed) >= DOOMED_MAX

    @property
    def busy(self) -> bool:
        """Whether changes are queued or under way."""
        return not self._idle.is_set()

    async def settle(self) -> None:
        """Wait until everything queued so far and since has been worked off."""
        await self._idle.wait()

    async def flush(self) -> tuple[Durability, str, int]:
        """Wait for what was queued so far, not for what comes after it, and make it as durable as this tier can.

        How durable that is, and, where the tier cannot keep what it has taken, why not, and how many values that is.
        """
        await self.erase([]).done
        try:
            return await self._loop.run_in_executor(self._changes, self.adapter.flush), "", 0
        except AdapterError as error:
            if not self.adapter.parts_down:  # else the rest of it works, and is not to be left alone for this
                self._failed(error.message)
            held = self.adapter.usage().entries if error.values is None else error.values
            return Durability.NONE, error.message, max(1, held)

    def _push(self, change: Write | Erase, *, first: bool = False) -> None:
        if first:
            self.queue.appendleft(change)
        else:
            self.queue.append(change)
        self._idle.clear()
        self._wake.set()

    async def _work(self) -> None:
        while True:
            if not self.queue and not self._writers:
                self._idle.set()
            if not self.queue or len(self._writers) >= WRITERS:
                self._wake.clear()
                await self._wake.wait()
                continue
            if self.breaker.open:
                await asyncio.sleep(min(0.2, self.breaker.wait_s() + 0.01))
                continue
            try:
                await self._start_next()
            except Exception:  # a task edge: a defect in one batch must not end the tier's work
                log.exception("tier %s: a batch failed unexpectedly", self.name)
                self.breaker.failed("internal")
                await asyncio.sleep(0.1)
            self._changed()

    async def _start_next(self) -> None:
        """Start the next batch of writes, or do the next delete once all writes before it are done."""
        head = self.queue[0]
        if isinstance(head, Erase):
            if not self._writers:
                await self._erase(head)
                return
        elif batch := self._next_batch():
            # Pinned and noted here and now: by the time the task runs, a put may have replaced the value.
            slots = np.array([change.slot for change, _ in batch], dtype=np.int64)
            self.store.index.pin(slots)
            self._under_way.update(identity for _, identity in batch)
            for change, _ in batch:
                if not change.dirty:  # from here on a delete must know that it may still arrive
                    self.store.index.dirty_of[change.slot] |= 1 << self.number
                    self.waiting += 1
                    change.dirty = True
            items = [self._item(change.slot, identity) for change, identity in batch]
            number = next(TASKS)
            log.debug("Submitted store task %d to adapter %d (%s) with %d keys.", number, self.number, self.name, len(batch))
            task = self._loop.create_task(self._write(number, batch, slots, items))
            del items
            self._writers.add(task)
            task.add_done_callback(self._written)
            # While it is broken, one batch probes: the others would only fail too.
            if not self.breaker.failures:
                return
        elif not self._writers:
            return
        if self._writers:
            await asyncio.wait(self._writers, return_when=asyncio.FIRST_COMPLETED)

    def _written(self, task: "asyncio.Task[None]") -> None:
        self._writers.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("tier %s: a write failed unexpectedly", self.name, exc_info=task.exception())
        self._wake.set()
        self._changed()

    def _next_batch(self) -> list[tuple[Write, Identity]]:
        """Leading writes of the queue, each identity once, values that left the arena skipped."""
        batch: list[tuple[Write, Identity]] = []
        seen: set[Identity] = set()
        size = 0
        index = self.store.index
        while self.queue and len(batch) < BATCH_ITEMS and size < BATCH_BYTES:
            change = self.queue[0]
            if isinstance(change, Erase):
                break
            if index.keys[change.slot] is not change.key or not self.store.is_live(change.slot):
                self.queue.popleft()
                self._finish(change, Durability.NONE, gone=True)
                continue
            identity = self.store.identity_of(change.slot)
            if identity in seen or identity in self._under_way:
                break
            seen.add(identity)
            batch.append((change, identity))
            size += index.length_of[change.slot]
            self.queue.popleft()
        return batch

    def _item(self, slot: int, identity: Identity) -> Item:
        index = self.store.index
        data, padded = self.store.memory_of(slot)
        return Item(identity, data, Retention(index.klass_of[slot]), index.expires_of[slot], padded)

    async def _write(self, number: int, batch: list[tuple[Write, Identity]], slots: Slots, items: list[Item]) -> None:
        results: list[Stored] | None = None
        call = object()
        begun = self._calls[call] = self.store.monotonic()
        try:
            results = _one_each(await self._loop.run_in_executor(self._changes, self.adapter.store, items), items)
            self._took(self.store_s, begun)
            self.breaker.succeeded()
            self._note_full("it has no room for a value and may drop none" if any(r.reason == "full" for r in results) else "")
        except AdapterFull as error:
            self._note_full(error.message)
            results = [Stored(False, "full")] * len(batch)
        except AdapterError as error:
            self._failed(error.message)
        except Exception as error:  # a thread edge: whatever an adapter raises counts against its breaker
            log.exception("tier %s: store failed unexpectedly", self.name)
            self._failed(repr(error))
        finally:
            del items, self._calls[call]
            self.store.unpin(slots)
            self._under_way.difference_update(identity for _, identity in batch)
        if results is None:
            # Not written: it stays queued, in order, and dirty.
            log.debug("L2 store task %d failed: adapter %d (%s), %d keys stay queued.", number, self.number, self.name, len(batch))
            for change, _ in batch:
                if change.copy:
                    self._finish(change, Durability.NONE)
            self.queue.extendleft(change for change, _ in reversed(batch) if not change.copy)
            return
        if any(not result.ok and result.reason == "io_error" for result in results):
            self._failed("io_error")
        taken = sum(result.ok for result in results)
        log.debug("L2 store task %d completed: adapter %d (%s), %d of %d keys.", number, self.number, self.name, taken, len(batch))
        for (change, identity), result in zip(batch, results, strict=True):
            if result.ok:
                self.untaken.discard(identity)
                self.copied += change.copy
            elif not change.copy and result.reason not in ("unwanted", "expired"):
                self.untaken.add(identity)
                self.store.tombstones.note(identity, Fate.REFUSED, place=self.name, why=result.reason)
        refused = [row for row, result in zip(batch, results, strict=True) if not result.ok]
        self._forget_older([identity for change, identity in refused if not change.copy])
        for (change, _), result in zip(batch, results, strict=True):
            self._finish(change, result.durability if result.ok else Durability.NONE, took=result.ok)

    def _note_full(self, why: str) -> None:
        """Say that it takes no more, once while that lasts and not for every value that comes; '': it took what it was given."""
        now = self.store.monotonic()
        if why and not self._full and now - self._said_full >= FULL_PAUSE_S:
            self._said_full = now
            log.warning("tier %s is full: %s", self.name, why)
        self._full = bool(why)

    def _forget_older(self, identities: list[Identity]) -> None:
        """What the tier did not take now, it may still hold from an earlier put under the same key: that is out of date."""
        if identities and self.adapter.capabilities.local_index:
            found = self.adapter.lookup(identities)
            identities = [identity for identity, hit in zip(identities, found, strict=True) if hit is not None]
        if identities:
            # In front: behind it waits what was put under these keys since, and must not be lost.
            self.erase(identities, first=True)

    def _finish(self, change: Write, durability: Durability, *, gone: bool = False, took: bool = False) -> None:
        index = self.store.index
        here = index.keys[change.slot] is change.key
        if change.dirty and (here or not gone):
            self.waiting -= here and self.store.is_live(change.slot)  # else it was taken off when the value went
            index.dirty_of[change.slot] &= ~(1 << self.number)
        index.stir()
        if here and not gone and not change.copy:
            self._settled(change.slot, self.number, took)
        for receipt in change.receipts:
            receipt.note(durability)

    async def _erase(self, head: Erase) -> None:
        try:
            if head.identities:
                await self._loop.run_in_executor(self._changes, self.adapter.delete, head.identities)
                self.breaker.succeeded()
        except AdapterError as error:
            self._failed(error.message)
            return
        # Still at the head: while a delete is under way no write is, and only a write's end queues anything in front.
        self.queue.popleft()
        for identity in head.identities:
            left = self.doomed[identity] - 1
            if left:
                self.doomed[identity] = left
            else:
                del self.doomed[identity]
        head.receipt.note(Durability.NONE)

    def _failed(self, reason: str) -> None:
        before, self._deaf = self.breaker.tripped, False
        self.breaker.failed(reason)
        if self.breaker.tripped and not before:
            log.warning("tier %s does not work (%s): left alone, probed every %.0f s at most", self.name, reason, PAUSE_MAX_S)
        self._changed()

    # ---- reading -----------------------------------------------------------------------------------------------------

    def has(self, identities: Sequence[Identity]) -> list[Hit | None]:
        """What the tier holds, for adapters with a local index; nothing while its breaker is open."""
        if self._closing or self.breaker.open or self.stuck or not self.adapter.capabilities.local_index:
            return [None] * len(identities)
        return self._seen(identities, self.adapter.lookup(identities))

    def _seen(self, identities: Sequence[Identity], found: list[Hit | None]) -> list[Hit | None]:
        """What a look-up found, without what is about to be deleted and what cannot be read."""
        for hidden in (self.doomed, self.adapter.unreadable):
            if hidden:
                found = [None if identity in hidden else hit for identity, hit in zip(identities, found, strict=True)]
        return found

    async def ask(self, identities: Sequence[Identity], deadline_s: float) -> list[Hit | None]:
        """What the tier holds, also where only the adapter's own I/O can tell: that is done on threads of its own.

        Nothing while its breaker is open, or when there is no answer by the deadline (event-loop time). Never raises.
        """
        if self.adapter.capabilities.local_index:
            return self.has(identities)
        nothing: list[Hit | None] = [None] * len(identities)
        if not identities or self.breaker.open or self._asking >= ASKS:
            return nothing
        self._asking += 1
        begun = self._loop.time()
        asked = self._loop.run_in_executor(self._asks, self.adapter.lookup, identities)
        asked.add_done_callback(self._asked)
        await asyncio.wait([asked], timeout=max(0.0, deadline_s - begun))
        if not asked.done():
            if self._loop.time() - begun >= PATIENCE_S:
                self._failed("no answer to a look-up in time")
                self._deaf = True
            return nothing
        if asked.cancelled() or asked.exception() is not None or len(asked.result()) != len(identities):
            return nothing
        return self._seen(identities, asked.result())

    def _asked(self, asked: "asyncio.Future[list[Hit | None]]") -> None:
        self._asking -= 1
        if asked.cancelled():
            return
        error = asked.exception()
        if isinstance(error, AdapterError):
            self._failed(error.message)
        elif error is not None:  # a thread edge: whatever an adapter raises counts against its breaker
            log.error("tier %s: look-up failed unexpectedly", self.name, exc_info=error)
            self._failed(repr(error))
        elif self._deaf:
            self.breaker.succeeded()
            self._changed()
        self._deaf = error is not None

    async def load(self, wants: list[Want]) -> list[Loaded]:
        """Fill the buffers; they are not touched any more when this returns. Never raises."""
        if self._closing:
            return [Loaded.ERROR] * len(wants)
        call = object()
        begun = self._calls[call] = self.store.monotonic()
        self._loads_under_way += 1
        try:
            results = _one_each(await self._loop.run_in_executor(self._loads, self.adapter.load, wants), wants)
            self._took(self.load_s, begun)
        except AdapterError as error:
            self._failed(error.message)
            return [Loaded.ERROR] * len(wants)
        except Exception as error:  # a thread edge: whatever an adapter raises counts against its breaker
            log.exception("tier %s: load failed unexpectedly", self.name)
            self._failed(repr(error))
            return [Loaded.ERROR] * len(wants)
        finally:
            self._loads_under_way -= 1
            del self._calls[call]
        if Loaded.CORRUPT in results and not self.adapter.says_damage:
            bad = [want.identity for want, result in zip(wants, results, strict=True) if result is Loaded.CORRUPT]
            self._damage.note(f"tier {self.name}", f"{len(bad)} of {len(wants)} loaded, the first of key {bad[0][32:].hex()}")
        if Loaded.ERROR in results:
            self._failed("io_error")
        elif self.breaker.failures:
            self.breaker.succeeded()
        return results

    def _took(self, listeners: list[Callable[[float], None]], begun: float) -> None:
        for listener in listeners:
            listener(self.store.monotonic() - begun)

    async def lending(self, function: Callable[..., T], *args: object) -> T:
        """Run one of the adapter's methods for I/O past the daemon. Raises AdapterError, which counts against the breaker."""
        if self._closing or self.broken:
            raise AdapterError(f"tier {self.name} does not work now")
        self._calls[call := object()] = self.store.monotonic()
        self._loads_under_way += 1
        try:
            return await self._loop.run_in_executor(self._loads, function, *args)
        except AdapterFull:
            raise
        except AdapterError as error:
            self._failed(error.message)
            raise
        finally:
            self._loads_under_way -= 1
            del self._calls[call]

    async def call(self, function: Callable[..., T], *args: object) -> T:
        """Run one of the adapter's other methods on its load threads. Raises AdapterError, whatever the adapter raises."""
        try:
            return await self._loop.run_in_executor(self._loads, function, *args)
        except AdapterError:
            raise
        except Exception as error:  # a thread edge
            log.exception("tier %s: a call failed unexpectedly", self.name)
            raise AdapterError(f"{self.name}: {error!r}") from error


def _one_each(results: list[T], asked: Sequence[object]) -> list[T]:
    """An adapter's answer, which must be one a question: nobody knows what another number means."""
    if len(results) != len(asked):
        raise AdapterError(f"the adapter gave {len(results)} answers to {len(asked)} questions")
    return results


__all__ = ["ABSENT", "Breaker", "Receipt", "Tier"]
