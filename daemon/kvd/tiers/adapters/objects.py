"""What tiers of objects in a bucket have in common (`s3`, `hfbucket`): what is there, how much of it, and what must go.

There is no index of what is where: what other daemons store and delete counts at once, and a look-up reads the envelope.

With a capacity the tier keeps a ledger of what it holds, from a listing when it is opened (oldest first) and of what it has
stored and loaded since; so usage is right from the start and the least recently used goes when room is needed. What other
daemons store meanwhile is not in it until the next start: give each a prefix of its own, or let one of them evict. Without a
limit only bytes and objects are counted, from the same listing, in the background.

A service that is away, at start too, is an adapter that fails: its breaker opens, and it is asked again later.
"""

import contextlib
import logging
import math
import re
import threading
import time
from abc import abstractmethod
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from kvd.store.identity import IDENTITY_BYTES, NAMESPACE_BYTES, Identity
from kvd.store.retention import Retention, expired
from kvd.tiers.adapters import envelope
from kvd.tiers.adapters.base import Adapter, AdapterError, Capabilities, Durability, Hit, Item, Loaded, Stored, Usage, Want
from kvd.tiers.adapters.kind import Eviction
from kvd.tiers.adapters.ledger import Entry, Ledger

log = logging.getLogger("kvd.tiers")

FOLDER = "v1/"
"""The format's version is part of every name: another version's objects are not even seen."""
OPEN_S = 2.0
ANSWER = re.compile(r"^(.*?):? *(?:<\?xml.*?)?<Error>.*?<Code>([^<]+)</Code>(?: *<Message>([^<]+)</Message>)?")
"""An S3 server's error in XML, behind what the client says of it."""
BLOCK = 1000
"""Objects that one request may name."""


class ObjectAdapter(Adapter):
    """Objects in a bucket; see the module. Hooks answer one result a question; an exception as a result is that question's."""

    capabilities = Capabilities(evict=True, enumerate=True, durable=True)
    policies = ("LRU", "S3FIFO", "noop")

    def __init__(
        self,
        name: str,
        *,
        where: str,
        prefix: str = "",
        threads: int = 16,
        max_bytes: int = 0,
        max_value_bytes: int = 1 << 30,
        eviction: Eviction | None = None,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        super().__init__(name)
        self.where = where
        self._root = prefix + FOLDER
        self._max_bytes = max_bytes
        self._max_value = max_value_bytes
        self.eviction = eviction or Eviction()
        self._clock_ns = clock_ns
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=f"kvd-{name}")
        self._lock = threading.Lock()
        self._room = threading.Lock()  # one thread lists or makes room
        self._ledger = Ledger(scan_resistant=self.eviction.scan_resistant)
        self._doomed: dict[Identity, int] = {}
        """What must go, or was replaced in vain, and still takes so many bytes: the service was away."""
        self._deleted: set[Identity] = set()  # while it is listed: what a page that is under way may still name
        self._usage = Usage(0, max_bytes, 0)
        self._listed = False
        self._ages = array("d", [math.inf])  # while it is listed: of what has this place. 0: stored by us meanwhile
        self._closing = False

    # ---- what a service does -----------------------------------------------------------------------------------------

    @abstractmethod
    def _objects(self) -> Iterator[tuple[float, int, Identity]]:
        """When it was stored, how long it is, whose it is: every object of ours. Raises AdapterError."""

    @abstractmethod
    def _puts(self, items: Sequence[Item]) -> Sequence[Exception | None]:
        """Put each object in the place of what is there."""

    @abstractmethod
    def _heads(self, identities: Sequence[Identity]) -> Sequence[envelope.Head | Exception | Loaded | None]:
        """The envelope of each object that is as long as it says; CORRUPT where it is not, None where there is none."""

    @abstractmethod
    def _gets(self, wants: Sequence[Want]) -> Sequence[Loaded | Exception]:
        """Fill each buffer."""

    @abstractmethod
    def _lengths(self, identities: Sequence[Identity]) -> Sequence[int | Exception | None]:
        """How long each object is, whatever it is; None where there is none."""

    @abstractmethod
    def _unlink(self, identities: Sequence[Identity]) -> None:
        """Delete objects, there or not. Raises AdapterError."""

    def open(self) -> None:
        """Start listing what is there, and wait a moment for it: a small bucket is counted from the start.

        A server that is away is no error: what is there is listed later.
        """
        with contextlib.suppress(TimeoutError):
            self._threads.submit(self._list_quietly).result(OPEN_S)

    def close(self, deadline_s: float = 5.0) -> None:
        self._closing = True
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _failed(self, what: str, error: Exception) -> AdapterError:
        return AdapterError(f"{self.name}: cannot {what} at {self.where}: {one_line(error)}")

    def _name(self, identity: Identity) -> str:
        return f"{self._root}{identity[:NAMESPACE_BYTES].hex()}/{identity[NAMESPACE_BYTES:].hex()}"

    def _identity(self, name: str) -> Identity | None:
        """The identity in an object's name; None where it is none of ours."""
        try:
            identity = bytes.fromhex(name.removeprefix(self._root).replace("/", ""))
        except ValueError:
            return None
        return identity if len(identity) == IDENTITY_BYTES and self._name(identity) == name else None

    # ---- what is there -----------------------------------------------------------------------------------------------

    def _list_quietly(self) -> None:
        try:
            self._list()
        except AdapterError as error:
            log.warning("%s; serving without it until it answers", error.message)

    def _list(self) -> None:
        """Count what is there, oldest first into the ledger, once. Raises AdapterError."""
        with self._room:
            if self._listed:
                return
            if self._max_bytes:
                self._list_into_ledger()
            else:
                total = entries = 0
                for _, length, _ in self._objects():
                    total += length
                    entries += 1
                with self._lock:
                    self._usage.bytes_used += total
                    self._usage.entries += entries
            self._listed = True

    def _list_into_ledger(self) -> None:
        """Entries as they come, and then their order. A listing that fails half-way is gone through again from its beginning."""
        for age, length, identity in self._objects():
            with self._lock:
                # Known already: from before the listing failed, or better.
                if identity not in self._ledger and identity not in self._deleted:
                    hit = Hit(max(0, length - envelope.SIZE), Retention.LONG)
                    self._ledger.add(identity, Entry(len(self._ages), length, hit))
                    self._ages.append(age)
        with self._lock:
            self._ledger.sort(np.array(self._ages))
            del self._ages[1:]
            self._deleted.clear()

    def _note_stored(self, item: Item, total: int) -> None:
        with self._lock:
            if self._max_bytes:
                self._ledger.add(item.identity, Entry(0, total, Hit(len(item.data), item.retention, item.expires_ns, item.note)))
                self._doomed.pop(item.identity, None)
            else:  # what it replaced is not known without asking: counted anew at the next start
                self._usage.bytes_used += total
                self._usage.entries += 1

    def _note_gone(self, identity: Identity, total: int) -> None:
        with self._lock:
            if self._max_bytes:
                self._ledger.remove(identity)
                self._doomed.pop(identity, None)
            else:
                self._usage.bytes_used = max(0, self._usage.bytes_used - total)
                self._usage.entries = max(0, self._usage.entries - 1)

    def usage(self) -> Usage:
        with self._lock:
            if self._max_bytes:
                doomed = self._doomed
                return Usage(self._ledger.used + sum(doomed.values()), self._max_bytes, len(self._ledger) + len(doomed))
            return Usage(**vars(self._usage))

    def enumerate(self) -> Iterator[tuple[Identity, Hit]]:
        yield from self._held(identity for _, _, identity in self._objects())

    def identities(self, namespace: bytes | None) -> Iterator[Identity]:
        """By their names alone: what has expired or is damaged lies there too."""
        return (name for _, _, name in self._objects() if namespace is None or name[:NAMESPACE_BYTES] == namespace)

    # ---- values ------------------------------------------------------------------------------------------------------

    def store(self, items: Sequence[Item]) -> list[Stored]:
        before: dict[Identity, int] = {}
        results = [self._refusal(item) for item in items]
        todo = [i for i, refused in enumerate(results) if refused is None]
        if self._max_bytes and todo:
            if not self._listed:
                self._list()
            before = self._make_rooms([items[i] for i in todo])
            for i in list(todo):
                if items[i].identity not in before:
                    results[i] = Stored(False, "full")
                    todo.remove(i)
        answers = self._puts([items[i] for i in todo]) if todo else []
        failure: Exception | None = None
        for i, answer in zip(todo, answers, strict=True):
            if isinstance(answer, Exception):
                self.counters.io_errors += 1
                failure = answer
                if self._max_bytes:
                    self._note_failed(items[i].identity, before[items[i].identity])
                results[i] = Stored(False, "io_error")
            else:
                results[i] = Stored(True, "", Durability.FSYNC)
                if not self._max_bytes:
                    self._note_stored(items[i], envelope.SIZE + len(items[i].data))
        made = [result or Stored(False, "io_error") for result in results]
        self.counters.count_stores(items, made)
        if failure is not None and not any(result.ok for result in made):
            raise self._failed("store", failure)
        return made

    def _refusal(self, item: Item) -> Stored | None:
        if expired(item.expires_ns, self._clock_ns()):
            return Stored(False, "expired")
        total = envelope.SIZE + len(item.data)
        if len(item.data) > self._max_value:
            return self.too_large(item, self._max_value, "raise max_value_bytes")
        if self._max_bytes and total > self._max_bytes:
            return self.too_large(item, self._max_bytes, "raise max_capacity_gb")
        return None

    def _make_rooms(self, items: Sequence[Item]) -> dict[Identity, int]:
        """Room for each that fits, and how much of the service what it replaces takes. Raises AdapterError."""
        before: dict[Identity, int] = {}
        try:
            for item in items:
                replaced = self._make_room(item)
                if replaced is not None:
                    before[item.identity] = replaced
        except AdapterError:
            for identity, replaced in before.items():
                self._note_failed(identity, replaced)
            raise
        with self._lock:  # a small one may have gone again for those behind it
            return {identity: replaced for identity, replaced in before.items() if identity in self._ledger}

    def _make_room(self, item: Item) -> int | None:
        """Evict what must go for this value, and note it as held: several threads make room at once.

        Bytes of what it replaces; None where it does not fit. Raises AdapterError.
        """
        total = envelope.SIZE + len(item.data)
        with self._room:
            now = self._clock_ns()
            with self._lock:
                entry = self._ledger.remove(item.identity)
                replaced = entry.size if entry is not None else self._doomed.get(item.identity, 0)
                if replaced:
                    self._doomed[item.identity] = replaced  # until the new one is there
                waiting = sum(self._doomed.values()) - replaced
                left = self.eviction.excess(self._ledger.used + waiting, total, self._max_bytes)
                short = left > 0 or self._ledger.used + waiting + total > self._max_bytes
                victims = [identity for identity in self._doomed if identity != item.identity] if short else []
                left -= waiting
                while left > 0 and (victim := self._ledger.victim(now)) is not None:
                    entry = self._ledger.remove(victim)
                    assert entry is not None
                    self._doomed[victim] = entry.size
                    left -= entry.size
                    victims.append(victim)
                fits = self._ledger.used + total <= self._max_bytes
            if victims:
                self._unlink(victims)
                self._let_go(victims)
                self.counters.evictions += len(victims)
                self.evicted(victims)
            if fits:
                self._note_stored(item, total)
                return replaced
            if replaced:
                self._unlink([item.identity])
                self._let_go([item.identity])
            return None

    def _let_go(self, identities: Sequence[Identity]) -> None:
        with self._lock:
            for identity in identities:
                self._doomed.pop(identity, None)

    def _note_failed(self, identity: Identity, replaced: int) -> None:
        """A value was not taken: what it was to replace is still there, out of date."""
        with self._lock:
            self._ledger.remove(identity)
            if replaced:
                self._doomed[identity] = replaced

    def lookup(self, identities: Sequence[Identity]) -> list[Hit | None]:
        now = self._clock_ns()
        found: list[Hit | None] = []
        failure: Exception | None = None
        damaged: list[Identity] = []
        for identity, answer in zip(identities, self._heads(identities) if identities else (), strict=True):
            if isinstance(answer, Exception):
                failure, answer = answer, None
            elif isinstance(answer, Loaded):
                damaged.append(identity)
                answer = None
            found.append(answer.hit if answer is not None and not expired(answer.expires_ns, now) else None)
        self.found_damaged(damaged)
        if failure is not None:
            self.counters.io_errors += 1
            if not any(found):
                raise self._failed("look up", failure)
        return found

    def load(self, wants: Sequence[Want]) -> list[Loaded]:
        answers = self._gets(wants) if wants else []
        results: list[Loaded] = []
        failure: Exception | None = None
        for want, answer in zip(wants, answers, strict=True):
            if isinstance(answer, Exception):
                failure, answer = answer, Loaded.ERROR
            if answer is Loaded.MISS:
                self._note_gone(want.identity, 0)
            elif answer is Loaded.OK:
                with self._lock:
                    self._ledger.touch(want.identity)
            results.append(answer)
        self.counters.count_loads(wants, results)
        damaged = [want.identity for want, result in zip(wants, results, strict=True) if result is Loaded.CORRUPT]
        if damaged:
            self.delete(damaged)
        if failure is not None and all(result is Loaded.ERROR for result in results):
            raise self._failed("load", failure)
        return results

    def delete(self, identities: Sequence[Identity]) -> int:
        held: list[tuple[Identity, int]] = []
        for identity, answer in zip(identities, self._lengths(identities) if identities else (), strict=True):
            if isinstance(answer, Exception):
                self.counters.io_errors += 1
                raise self._failed("delete", answer)
            if answer is not None:
                held.append((identity, answer))
            elif self._max_bytes:  # gone already: somebody else's doing, or a delete of ours that failed half-way
                self._note_gone(identity, 0)
        with self._lock:
            if self._max_bytes and not self._listed:
                self._deleted.update(identities)
        self._unlink([identity for identity, _ in held])
        for identity, length in held:
            self._note_gone(identity, length)
        return len(held)

    def flush(self) -> Durability:
        """What the service has answered is there."""
        return Durability.FSYNC

    def describe(self) -> dict[str, object]:
        return {"bucket": self.where, "root": self._root}


def one_line(error: Exception) -> str:
    """Errors of these libraries go on for a page; the first line says it, and before all what the server said, where it did."""
    line = " ".join(str(error).split("\n\n", maxsplit=1)[0].split()) or type(error).__name__
    if said := ANSWER.search(line):
        line = f"{said[2]}: {said[3]} ({said[1]})" if said[3] else f"{said[2]} ({said[1]})"
    return line if len(line) <= 300 else line[:297] + "..."
