"""Slots of one size on a medium of fixed size: what `raw_block` and `dax` have in common.

Block 0 is the superblock: JSON of format, version, slot size, number of slots and a random generation, padded with zeros.
Slot i lies at 4096 + i * slot_bytes: a header block of 4096 bytes (an envelope, a sequence number, XXH3-64 of these 136 bytes
seeded with the generation, so that what an earlier format left behind is nothing; zeros), then the value.
The index is in memory and is made anew at the start by reading every header, several at a time.

A slot is given away only after its header was zeroed, so what was evicted, replaced or deleted does not come back with the
next start; where a crash leaves two slots of one identity, the higher sequence number counts. A header whose value did not
arrive in time is found by the value's checksum. A slot that could not be zeroed stays out of use until it could be, which is
tried now and then, and whenever its value is deleted again. Without `flush` all this holds for a crash of the daemon, not of
the host.
"""

import contextlib
import errno
import json
import logging
import mmap
import secrets
import struct
import threading
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import numpy as np
import numpy.typing as npt
import xxhash

from kvd.store.identity import IDENTITY_BYTES, NAMESPACE_BYTES, Identity
from kvd.store.retention import Retention, expired
from kvd.tiers.adapters import envelope
from kvd.tiers.adapters.base import (
    Adapter,
    AdapterConfigError,
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
from kvd.tiers.adapters.kind import Eviction
from kvd.tiers.adapters.ledger import Entry, Ledger
from kvtools.errors import hint_for

log = logging.getLogger("kvd.tiers")

BLOCK = 4096
FORMAT, VERSION = "kvtools.slots", 1
CLEAN = 1 << 20
RECOVERY_THREADS = 8
BAD_MAX = 16
"""With more slots than this that cannot be read, it is the device that does not work."""
MEDIUM_ERRORS = (errno.EIO, errno.ENODATA, errno.EILSEQ, errno.EREMOTEIO)
"""What the kernel says of a bad place on a device."""
RETRY_S = 10.0
"""How often a slot that could not be zeroed is tried again: a sector that is bad for good answers slowly."""
_SEQUENCE = struct.Struct("<Q")
_HEADER = envelope.SIZE + _SEQUENCE.size
_NONE = bytes(BLOCK)


class ThreadBuffers:
    """Page-aligned memory of each thread's own, kept for its next call: what O_DIRECT and devices read and write."""

    def __init__(self) -> None:
        self._local = threading.local()

    def block(self) -> memoryview:
        """This thread's block for headers."""
        return self._grown("header", BLOCK)

    def bounce(self, length: int) -> memoryview:
        """This thread's buffer for values that do not lie aligned in the arena, up to the next block."""
        return self._grown("value", -(-length // BLOCK) * BLOCK)

    def _grown(self, name: str, size: int) -> memoryview:
        held: memoryview | None = getattr(self._local, name, None)
        if held is None or len(held) < size:
            held = memoryview(mmap.mmap(-1, max(size, BLOCK)))
            setattr(self._local, name, held)
        return held[:size]


class Medium(ABC):
    """Bytes at offsets. Offsets, lengths and addresses are multiples of BLOCK. Methods raise OSError; reads are whole."""

    @abstractmethod
    def open(self) -> int:
        """Own it, and say how many bytes it has. Raises AdapterConfigError, AdapterError or OSError."""

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def read(self, offset: int, buffers: Sequence[memoryview]) -> None: ...

    @abstractmethod
    def write(self, offset: int, buffers: Sequence[memoryview]) -> None: ...

    @abstractmethod
    def sync(self) -> None: ...


class SlotAdapter(Adapter):
    """Values in slots of `slot_bytes`, header included; see the module."""

    capabilities = Capabilities(evict=True, enumerate=True, durable=True, exact_usage=True, local_index=True)
    policies = ("LRU", "S3FIFO", "noop")
    ledger: type[Ledger] = Ledger

    def __init__(
        self,
        name: str,
        medium: Medium,
        slot_bytes: int,
        *,
        where: str,
        eviction: Eviction | None = None,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        super().__init__(name)
        if slot_bytes % BLOCK or slot_bytes < 2 * BLOCK:
            raise AdapterConfigError(
                f"adapter {name} ({self.type}): field 'slot_bytes': {slot_bytes} is no multiple of {BLOCK}, or too small",
                hint=f"the largest value, rounded up to {BLOCK}, and {BLOCK} more",
            )
        self.where = where
        self.slot_bytes = slot_bytes
        self.eviction = eviction or Eviction()
        self._medium = medium
        self._clock_ns = clock_ns
        self._lock = threading.Lock()
        self._ledger = self.ledger(scan_resistant=self.eviction.scan_resistant)
        self._free = array("Q")
        self._unwiped: dict[int, tuple[Identity, Entry]] = {}
        """By slot: what is not held any more, but would come back with the next start."""
        self._retry_at = 0.0
        self._slots = 0
        self._sequence = 0
        self._generation = 0
        self._open = False
        self._buffers = ThreadBuffers()

    # ---- life --------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        try:
            size = self._medium.open()
            try:
                self._slots = (size - BLOCK) // self.slot_bytes
                if self._slots < 1:
                    raise AdapterConfigError(f"{self.name}: {self.where} has {size} bytes: not one slot of {self.slot_bytes} fits")
                self._check_superblock(size)
                self._recover()
            except BaseException:
                self._medium.close()
                raise
        except OSError as error:
            raise self.unusable(error, self.where) from None
        self._open = True

    def _check_superblock(self, size: int) -> None:
        block = self._buffers.block()
        self._medium.read(0, [block])
        raw = bytes(block)
        if raw == _NONE:
            self._format(size, block)
            return
        try:
            found = json.loads(raw.rstrip(b"\0"))
            held = found["format"], found["version"]
            _ = found["slot_bytes"], found["slots"], found["generation"]
        except (ValueError, TypeError, KeyError):
            raise AdapterConfigError(
                f"{self.name}: {self.where} holds something else", hint="if nobody needs that, zero its first MiB"
            ) from None
        if held != (FORMAT, VERSION):
            raise AdapterConfigError(f"{self.name}: {self.where} holds {held[0]} version {held[1]}, not {FORMAT} version {VERSION}")
        if found["slot_bytes"] != self.slot_bytes or found["slots"] > self._slots:
            raise AdapterConfigError(
                f"{self.name}: {self.where} has {found['slots']} slots of {found['slot_bytes']} bytes, "
                f"not {self._slots} of {self.slot_bytes}",
                hint="give the size it was made with, or zero its first MiB to start anew",
            )
        self._slots, self._generation = found["slots"], found["generation"]

    def _format(self, size: int, block: memoryview) -> None:
        """Write a superblock, where nothing is: file systems have theirs in the first MiB, if not at its start."""
        for offset in range(BLOCK, min(CLEAN, size) // BLOCK * BLOCK, BLOCK):
            self._medium.read(offset, [block])
            if bytes(block) != _NONE:
                raise AdapterConfigError(
                    f"{self.name}: {self.where} holds something else, at byte {offset}",
                    hint="if nobody needs that, zero its first MiB",
                )
        self._generation = secrets.randbits(63)
        mine = {"format": FORMAT, "version": VERSION, "slot_bytes": self.slot_bytes, "slots": self._slots}
        block[:] = json.dumps(mine | {"generation": self._generation}).encode().ljust(BLOCK, b"\0")
        self._medium.write(0, [block])

    def _recover(self) -> None:
        """Read all headers; of two of one identity the higher sequence number wins, and the loser is wiped."""
        self._ledger, self._sequence = self.ledger(scan_resistant=self.eviction.scan_resistant), 0
        self._unwiped.clear()
        sequences = np.zeros(self._slots, dtype=np.uint64)
        taken = np.zeros(self._slots, dtype=np.bool_)
        bad: list[int] = []
        share = -(-self._slots // RECOVERY_THREADS)
        with ThreadPoolExecutor(RECOVERY_THREADS) as threads:
            parts = [range(first, min(first + share, self._slots)) for first in range(0, self._slots, share)]
            for _ in threads.map(lambda part: self._recover_part(part, sequences, taken, bad), parts):
                pass
        for slot in bad:
            taken[slot] = not self._give_up(slot)
        self._sequence = int(sequences.max())
        self._ledger.sort(sequences)
        now = self._clock_ns()
        while (late := self._ledger.late(now)) is not None:  # where nothing is evicted they would lie there for good
            entry = self._ledger.remove(late)
            assert entry is not None
            taken[entry.place] = False
            self._wipe(entry.place)
        self._free = array("Q", np.flatnonzero(~taken)[::-1].astype(np.uint64).tobytes())

    def _recover_part(self, part: range, sequences: npt.NDArray[np.uint64], taken: npt.NDArray[np.bool_], bad: list[int]) -> None:
        """Those of these slots that hold something, into the ledger; those that cannot be read, into `bad`. Runs on threads.

        Raises OSError where there are too many of these.
        """
        block = self._buffers.block()
        for slot in part:
            try:
                self._medium.read(self._offset(slot), [block])
            except OSError as error:
                if error.errno not in MEDIUM_ERRORS or len(bad) == BAD_MAX:
                    raise
                bad.append(slot)
                continue
            found = _read_header(block, self._generation)
            if found is None or found[1].length > self.slot_bytes - BLOCK:
                continue
            sequence, head = found
            with self._lock:
                held = self._ledger.get(head.identity)
                loser = None if held is None else held.place
                if loser is not None and sequences[loser] > sequence:
                    loser = slot
                sequences[slot] = sequence
                if loser != slot:
                    self._ledger.add(head.identity, Entry(slot, self.slot_bytes, head.hit))
                    taken[slot] = True
                if loser is not None:
                    taken[loser] = False
            if loser is not None:
                self._wipe(loser)

    def _give_up(self, slot: int) -> bool:
        """A slot that cannot be read at the start holds nothing any more; whether it may be used."""
        self.counters.io_errors += 1
        log.warning("%s: slot %d of %s cannot be read: what it held is given up", self.name, slot, self.where)
        try:
            self._wipe(slot)
        except OSError:
            self._unwiped[slot] = bytes(IDENTITY_BYTES), Entry(slot, self.slot_bytes, Hit(0, Retention.SHORT))
            return False
        return True

    def close(self, deadline_s: float = 5.0) -> None:
        if not self._open:  # what did not open has let go of its medium already
            return
        self._open = False
        with contextlib.suppress(OSError):
            self._wipe_again()
        try:
            self._medium.sync()
        except OSError as error:
            log.warning("%s: cannot sync %s: %s", self.name, self.where, error.strerror or error)
        self._medium.close()

    # ---- slots -------------------------------------------------------------------------------------------------------

    def _offset(self, slot: int) -> int:
        return BLOCK + slot * self.slot_bytes

    def _wipe(self, slot: int) -> None:
        block = self._buffers.block()
        block[:] = _NONE
        self._medium.write(self._offset(slot), [block])

    def _let_go(self, rows: Sequence[tuple[Identity, Entry]], *, last: bool = False) -> None:
        """Wipe and free the places of entries that are gone; whoever still reads one does so when the last one is done.

        `last`: they are to be used again after all others. Raises OSError where one cannot be wiped: that and those behind it
        stay out of use until they can be.
        """
        for number, (_, entry) in enumerate(rows):
            try:
                self._wipe(entry.place)
            except OSError:
                with self._lock:  # what failed to the end: it is not to keep the others from being tried
                    self._unwiped |= {row[1].place: row for row in (*rows[number + 1 :], rows[number])}
                    self._retry_at = time.monotonic() + RETRY_S
                raise
            with self._lock:
                entry.wiped = True
                if not entry.pins:
                    self._free.insert(0 if last else len(self._free), entry.place)

    def _wipe_again(self, identities: Collection[Identity] | None = None) -> set[Identity]:
        """Try once more to wipe what could not be wiped, all of it or that of some identities; whose. Raises OSError."""
        with self._lock:
            rows = [row for row in self._unwiped.values() if identities is None or row[0] in identities]
            for _, entry in rows:
                del self._unwiped[entry.place]
        self._let_go(rows)
        return {identity for identity, _ in rows}

    def _unpin(self, entry: Entry) -> None:
        with self._lock:
            if self._ledger.unpin(entry) and entry.wiped:
                self._free.append(entry.place)

    def _slot(self) -> int | None:
        """A free slot, made free if need be; None where that cannot be. Raises OSError."""
        if self._unwiped and time.monotonic() >= self._retry_at:
            with contextlib.suppress(OSError):  # the others are as good as before
                self._wipe_again()
        while True:
            victims: list[tuple[Identity, Entry]] = []
            with self._lock:
                limit = self._slots * self.slot_bytes
                left = self.eviction.excess(self._ledger.used, self.slot_bytes, limit)
                if not left and self._free:
                    return self._free.pop()
                if not left and self.eviction.policy != "noop":
                    left = self.slot_bytes  # slots are out of use, or being written: below the limit, and yet none is free
                now = self._clock_ns()
                while left > 0 and (victim := self._ledger.victim(now)) is not None:
                    entry = self._ledger.remove(victim)
                    assert entry is not None
                    victims.append((victim, entry))
                    left -= entry.size
                if not victims:
                    if self._free:
                        return self._free.pop()
                    if len(self._ledger) or not self._unwiped:
                        return None
            if victims:
                self._evict(victims)
            else:  # nothing is held, nothing is free: that is not full, but broken
                self._wipe_again()

    def _evict(self, victims: Sequence[tuple[Identity, Entry]]) -> None:
        """Let go of what was taken out of the ledger for that; what cannot be wiped is held again. Raises OSError."""
        try:
            self._let_go(victims)
        finally:
            with self._lock:
                for identity, entry in victims:
                    if not entry.wiped and identity not in self._ledger and self._unwiped.pop(entry.place, None) is not None:
                        self._ledger.add(identity, Entry(entry.place, entry.size, entry.hit))
                gone = [identity for identity, entry in victims if entry.wiped]
                self.counters.evictions += len(gone)
            self.evicted(gone)

    # ---- values ------------------------------------------------------------------------------------------------------

    def store(self, items: Sequence[Item]) -> list[Stored]:
        results = []
        failure: OSError | None = None
        for item in items:
            try:
                result = self._store(item)
            except OSError as error:
                self.counters.io_errors += 1
                failure, result = error, Stored(False, "io_error")
            if result.ok:
                self.counters.stores += 1
                self.counters.store_bytes += len(item.data)
            else:
                self.counters.store_failures += 1
            results.append(result)
        if failure is not None and not any(result.ok for result in results):
            raise AdapterError(f"{self.name}: cannot write to {self.where}: {failure.strerror or failure}", hint=hint_for(failure))
        return results

    def _cure(self, need: int) -> str:
        return f"slot_bytes must be {need} at least"

    def _store(self, item: Item) -> Stored:
        length = len(item.data)
        if expired(item.expires_ns, self._clock_ns()):
            return Stored(False, "expired")
        if length > self.slot_bytes - BLOCK:
            return self.too_large(item, self.slot_bytes - BLOCK, self._cure(BLOCK + -(-length // BLOCK) * BLOCK))
        slot = self._slot()
        if slot is None:
            return Stored(False, "full")
        entry = Entry(slot, self.slot_bytes, Hit(length, item.retention, item.expires_ns, item.note))
        try:
            self._write(slot, item)
        except OSError:
            with contextlib.suppress(OSError):  # what was not taken, and may yet lie there, must not come with the next start
                self._let_go([(item.identity, entry)], last=True)
            raise
        with self._lock:
            before = self._ledger.add(item.identity, entry)
        if before is not None:
            self._let_go([(item.identity, before)])
        return Stored(True, "", Durability.NONE)

    def _write(self, slot: int, item: Item) -> None:
        with self._lock:
            self._sequence += 1
            sequence = self._sequence
        block = self._buffers.block()
        block[:] = _header(item, sequence, self._generation)
        length = len(item.data)
        data = item.padded
        if data is None and length:
            data = self._buffers.bounce(length)
            envelope.copy(data[:length], item.data)
            data[length:] = bytes(len(data) - length)
        self._medium.write(self._offset(slot), [block, data] if data is not None else [block])

    def lookup(self, identities: Sequence[Identity]) -> list[Hit | None]:
        now = self._clock_ns()
        with self._lock:
            return [self._ledger.hit(identity, now) for identity in identities]

    def load(self, wants: Sequence[Want]) -> list[Loaded]:
        results = []
        counters = self.counters
        failure: OSError | None = None
        for want in wants:
            try:
                result = self._load(want)
            except OSError as error:
                failure, result = error, Loaded.ERROR
            if result is Loaded.OK:
                counters.hits += 1
                counters.load_bytes += len(want.into)
            counters.misses += result is Loaded.MISS
            counters.corruptions += result is Loaded.CORRUPT
            counters.io_errors += result is Loaded.ERROR
            results.append(result)
        if failure is not None and all(result is Loaded.ERROR for result in results):
            raise AdapterError(f"{self.name}: cannot read {self.where}: {failure.strerror or failure}", hint=hint_for(failure))
        return results

    def _load(self, want: Want) -> Loaded:
        """Fill one buffer. Raises OSError."""
        with self._lock:
            hit = self._ledger.hit(want.identity, self._clock_ns())
            if hit is None or hit.length != len(want.into):
                return Loaded.MISS
            entry = self._ledger.pin(want.identity)
            self._ledger.touch(want.identity)
        try:
            if self._read(entry.place, want):
                return Loaded.OK
            with self._lock:  # as long as we pin it: afterwards, who replaces or deletes it has another entry than this
                if entry.gone:
                    return Loaded.MISS
                self._ledger.remove(want.identity)
        except OSError:
            with self._lock:
                if entry.gone:  # the same: a file that is emptied while it is read may be an error to who reads it
                    return Loaded.MISS
            raise
        finally:
            self._unpin(entry)
        with contextlib.suppress(OSError):  # it stays out of use
            self._let_go([(want.identity, entry)])
        return Loaded.CORRUPT

    def _read(self, slot: int, want: Want) -> bool:
        """Fill the buffer; whether it is what was stored."""
        block = self._buffers.block()
        length = len(want.into)
        data = want.padded if want.padded is not None else self._buffers.bounce(length)
        self._medium.read(self._offset(slot), [block, data] if length else [block])
        found = _read_header(block, self._generation)
        if found is None or found[1].identity != want.identity or not envelope.intact(found[1], data[:length]):
            return False
        if want.padded is None:
            envelope.copy(want.into, data[:length])
        return True

    def delete(self, identities: Sequence[Identity]) -> int:
        with self._lock:
            gone = [(identity, entry) for identity in identities if (entry := self._ledger.remove(identity)) is not None]
        try:
            self._let_go(gone)
            again = self._wipe_again(set(identities)) if self._unwiped else set()
        except OSError as error:
            self.counters.io_errors += 1
            raise AdapterError(
                f"{self.name}: cannot write to {self.where}: {error.strerror or error}", hint=hint_for(error)
            ) from None
        return len(again.union(identity for identity, _ in gone))

    def enumerate(self) -> Iterator[tuple[Identity, Hit]]:
        return self._ledger.items(self._lock, self._clock_ns())

    def identities(self, namespace: bytes | None) -> Iterator[Identity]:
        """Expired ones as well: a clock that is set back would bring them back. And what could not be wiped."""
        with self._lock:
            left = [identity for identity, _ in self._unwiped.values()]
        held = (identity for identity, _ in self._ledger.items(self._lock, 0))
        return (identity for identity in chain(left, held) if namespace is None or identity[:NAMESPACE_BYTES] == namespace)

    def usage(self) -> Usage:
        with self._lock:
            return Usage(self._ledger.used, self._slots * self.slot_bytes, len(self._ledger))

    def flush(self) -> Durability:
        try:
            self._medium.sync()
        except OSError as error:
            self.counters.io_errors += 1
            raise AdapterError(f"{self.name}: cannot sync {self.where}: {error.strerror or error}", hint=hint_for(error)) from None
        return Durability.FSYNC

    def describe(self) -> dict[str, object]:
        return {"path": self.where, "slot_bytes": self.slot_bytes, "slots": self._slots}


def _header(item: Item, sequence: int, generation: int) -> bytes:
    body = envelope.seal(item) + _SEQUENCE.pack(sequence)
    return (body + _SEQUENCE.pack(xxhash.xxh3_64_intdigest(body, seed=generation))).ljust(BLOCK, b"\0")


def _read_header(block: memoryview, generation: int) -> tuple[int, envelope.Head] | None:
    """The sequence number and the envelope; None where there is none, or a damaged one."""
    body = bytes(block[:_HEADER])
    if _SEQUENCE.unpack_from(block, _HEADER)[0] != xxhash.xxh3_64_intdigest(body, seed=generation):
        return None
    head = envelope.open_head(body)
    return None if head is None else (_SEQUENCE.unpack_from(body, envelope.SIZE)[0], head)
