"""The interface of a tier: what the arena's values are stored to and loaded from.

Methods are synchronous, batched and thread-safe: tiering calls them from worker threads, several at once, never from the
event loop, save `lookup` of an adapter with `local_index`. Results are per item and in order: one bad item never fails
its neighbours. Buffers belong to the caller: an adapter touches them only between call and return, also when it raises.

An adapter never returns wrong bytes: it stores the full 64 bytes of identity and a checksum beside the value and compares
both on load. What does not match is MISS or CORRUPT, never an exception. An exception (AdapterError) means that the
adapter as a whole could not do its work, and counts against its breaker.
"""

import contextlib
import errno
import itertools
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from kvd.store.identity import Identity
from kvd.store.retention import NEVER, Retention
from kvd.tiers.adapters.damage import DamageLog
from kvtools.errors import KvError, UsageError, hint_for
from kvtools.exits import Exit
from kvtools.units import format_size

log = logging.getLogger("kvd.tiers")

FULL_PAUSE_S = 3600.0
LISTED = 1000
"""Names looked up at once while a store is listed."""


class AdapterError(KvError):
    """The adapter could not do its work (I/O error, server away): counts against its breaker; the daemon serves on."""

    values: int | None = None
    """Of a flush that failed: how many values it could not keep, where that is not all it holds."""


class AdapterFull(AdapterError):
    """No room, and nothing that may be evicted (ENOSPC, free-space floor)."""


class AdapterConfigError(UsageError):
    """A configuration this adapter cannot start with: names adapter, field and what to do."""


class AdapterInUse(AdapterConfigError):
    """What the adapter keeps its values in belongs to another daemon. Exit 1, as for a taken socket: later it may work."""

    exit_code = Exit.FAILED


class Durability(IntEnum):
    """What survives: NONE a daemon crash at most, GROUP a power cut soon, FSYNC a power cut now."""

    NONE = 0
    GROUP = 1
    FSYNC = 2


class Item(NamedTuple):
    """One value to store. `data` is read-only for the adapter and exactly the value's length.

    `padded` is the same memory rounded up to 4096 bytes when it lies 4 KiB-aligned in the arena (the slack is zeroed), so
    that O_DIRECT can write it in place; else None. `note` (32 bits; 0: none) is kept beside the value and comes back with
    every Hit: it is what a serde chain has to know before it decodes.
    """

    identity: Identity
    data: memoryview
    retention: Retention = Retention.LONG
    expires_ns: int = NEVER
    padded: memoryview | None = None
    note: int = 0


class Stored(NamedTuple):
    """What became of one item: `ok`, or why not ('full', 'too_large', 'io_error', 'expired', 'unwanted', ...)."""

    ok: bool
    reason: str = ""
    durability: Durability = Durability.NONE


class Hit(NamedTuple):
    """What a look-up knows of a stored value."""

    length: int
    retention: Retention
    expires_ns: int = NEVER
    note: int = 0


class Want(NamedTuple):
    """One value to load: exactly `into`'s length is expected. `padded` as in Item: the same memory up to the next 4096.

    `note` is what the Hit said, where there was one.
    """

    identity: Identity
    into: memoryview
    padded: memoryview | None = None
    note: int = 0


class Reservation(NamedTuple):
    """A value that somebody else will write past the daemon: what `lend` needs to know of it before it is there."""

    identity: Identity
    length: int
    retention: Retention = Retention.LONG
    expires_ns: int = NEVER


@dataclass(eq=False, slots=True)
class DirectExtent:
    """Where in a file one value lies, or will lie: for I/O past the daemon. The file is not used for anything else meanwhile.

    `offset` (a multiple of 4096) is that of the value's first byte; the extent ends at the next multiple of 4096 after
    `length` bytes. `generation` changes when the file is used for something else. `checksum`: XXH3-128 of the value, b"" if absent.
    """

    file: Path
    offset: int
    length: int
    generation: int
    identity: Identity
    checksum: bytes
    place: object
    """The adapter's own."""


class Loaded(IntEnum):
    """What became of one load. After anything but OK the bytes of `into` are undefined."""

    OK = 0
    MISS = 1
    CORRUPT = 2
    ERROR = 3


@dataclass(frozen=True)
class Capabilities:
    """What an adapter can do; shown in `kvd stats` and in the table of the docs."""

    evict: bool = False
    """Makes room by itself within its byte limit."""
    enumerate: bool = False
    """Can list what it holds, so `exists` and `clear` cover it."""
    durable: bool = False
    """Values survive a restart of the daemon."""
    direct_extents: bool = False
    """Can hand out file extents for GPU-direct I/O."""
    exact_usage: bool = False
    """`usage` counts the bytes really taken, right also after a restart."""
    local_index: bool = False
    """`lookup` is a look into memory: quick enough for the event loop."""


@dataclass
class Usage:
    """Bytes taken and allowed (limit 0: no limit known), and values held; not `known`: nobody can say, all are 0."""

    bytes_used: int = 0
    bytes_limit: int = 0
    entries: int = 0
    known: bool = True

    @property
    def fraction(self) -> float:
        """Share of the limit that is taken; -1.0 where no limit is known."""
        return self.bytes_used / self.bytes_limit if self.bytes_limit and self.known else -1.0


@dataclass
class Counters:
    """What happened since start; tiering publishes them as `tier_<name>_total{tier=...}`."""

    stores: int = 0
    store_bytes: int = 0
    store_failures: int = 0
    hits: int = 0
    load_bytes: int = 0
    misses: int = 0
    corruptions: int = 0
    evictions: int = 0
    io_errors: int = 0
    extra: dict[str, int] = field(default_factory=dict)

    def count_stores(self, items: Sequence[Item], results: Sequence[Stored]) -> None:
        """Note what became of a call's items."""
        for item, result in zip(items, results, strict=True):
            self.stores += result.ok
            self.store_bytes += len(item.data) if result.ok else 0
            self.store_failures += not result.ok

    def count_loads(self, wants: Sequence[Want], results: Sequence[Loaded]) -> None:
        """Note what became of a call's wants."""
        for want, result in zip(wants, results, strict=True):
            self.hits += result is Loaded.OK
            self.load_bytes += len(want.into) if result is Loaded.OK else 0
            self.misses += result is Loaded.MISS
            self.corruptions += result is Loaded.CORRUPT
            self.io_errors += result is Loaded.ERROR


class FullNote:
    """Says, once an hour, that a file system has less room than its tier was given: the tier's own figures do not show it."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._said = float("-inf")

    def note(self, where: object, limit: int) -> None:
        """It is full before the tier of `limit` bytes at `where` is."""
        now = self._monotonic()
        if now - self._said < FULL_PAUSE_S:
            return
        self._said = now
        log.warning(
            "%s: no room left on its file system, below the %s that the tier may take: old values go for new ones, or new "
            "ones are refused. Free some of it, or lower the limit",
            where,
            format_size(limit),
        )


_PLACE_HINTS: Mapping[int, str] = {
    errno.EACCES: "the user that runs kvd must be able to read and write there",
    errno.EPERM: "the user that runs kvd must be able to read and write there",
    errno.EEXIST: "a file has that name, and a folder is needed: name another place",
    errno.ENOTDIR: "a file is in the way, and a folder is needed: name another place",
    errno.EISDIR: "that is a folder: name a device, or a file",
    errno.ENOENT: "it does not exist, and is not made: see how its path is written, and whether a size is given",
    errno.EFBIG: "no file there can have that size: give a smaller one",
}
"""What to do about a place that a tier cannot use."""


class Mark(NamedTuple):
    """What the members of a stripe keep to tell who of them was away. `peers`: the signs of all members then, as one number.

    A member with a lower `number` than another has missed what was replaced or deleted.
    """

    number: int = 0
    peers: int = 0


Evicted = Callable[[Iterable[Identity]], None]


def _nobody(identities: Iterable[Identity]) -> None:
    """Nobody listens."""


class Adapter(ABC):
    """One tier. `name` is unique in the daemon, `type` is the registry's word."""

    type: str = ""
    capabilities = Capabilities()
    says_damage = False
    """It logs damaged values itself, with their places; else whoever asks it logs that there are some."""
    policies: tuple[str, ...] = ("LRU", "noop")
    """What an `eviction` object may name, where it can evict."""
    prefetch_max_bytes: int = 256 << 20
    """Bytes that are loaded from it at once, at most."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.counters = Counters()
        self.evicted: Evicted = _nobody
        """Called, from any thread, with what was dropped to make room: for `kvd why`."""
        self.full_note = FullNote()
        self._said_large = False
        self._looked_up_damage = DamageLog("kvd stats counts them (corruptions_total); see what keeps the values there")

    @property
    def unreadable(self) -> Collection[Identity]:
        """What it holds and was found unable to read: its own look-ups have it, so that deletes do; readers are told no."""
        return ()

    def listen(self, evicted: Evicted) -> None:
        """Tell of evictions; called before `open`. An adapter around others passes this on to them."""
        self.evicted = evicted

    def too_large(self, item: Item, most: int, cure: str) -> Stored:
        """Refuse a value of more than `most` bytes. Said once: a tier that takes none of them looks like one that works."""
        if not self._said_large:
            self._said_large = True
            log.warning(
                "tier %s: a value of %d bytes is not stored, %d is the most: %s (said once; kvd stats counts them)",
                self.name, len(item.data), most, cure,
            )  # fmt: skip
        return Stored(False, "too_large")

    def attach(self, memory: memoryview) -> None:  # noqa: B027 - most adapters need not know
        """The arena, before `open`: where most buffers lie, for those who register memory with a device once."""

    def unusable(self, error: OSError, where: object) -> AdapterError:
        """What `open` raises where the place it was told to use cannot be used: one line, and what to do about it."""
        hint = hint_for(error, _PLACE_HINTS.get(error.errno or 0, ""))
        return AdapterError(f"{self.name}: cannot use {where}: {error.strerror or error}", hint=hint)

    @abstractmethod
    def open(self) -> None:
        """Recover and become ready. Raises AdapterConfigError (will never work) or AdapterError (may work later)."""

    @abstractmethod
    def close(self, deadline_s: float = 5.0) -> None:
        """Make what was stored as durable as can be, write what speeds up the next start, release everything."""

    @abstractmethod
    def store(self, items: Sequence[Item]) -> list[Stored]:
        """Store each item. What was held under the same identity is superseded, also over a restart.

        Only new data comes here (a promoted value is never stored again), so an adapter need not look for what is equal.
        """

    @abstractmethod
    def lookup(self, identities: Sequence[Identity]) -> list[Hit | None]:
        """What is held, unexpired. Counts neither hit nor miss."""

    def found_damaged(self, identities: Sequence[Identity]) -> None:
        """What a look-up found and is not what was stored there: counted, said and removed, as what a load finds.

        Else it would never be counted: a daemon loads only what a look-up has found.
        """
        if not identities:
            return
        self.counters.corruptions += len(identities)
        self._looked_up_damage.note(
            f"tier {self.name}", f"{len(identities)} found by a look-up, the first of key {identities[0][32:].hex()}"
        )
        with contextlib.suppress(AdapterError):  # then it is found again, and stays a miss
            self._remove_damaged(identities)

    def _remove_damaged(self, identities: Sequence[Identity]) -> None:
        """Take these away, whatever is there. Raises AdapterError."""
        self.delete(identities)

    @abstractmethod
    def load(self, wants: Sequence[Want]) -> list[Loaded]:
        """Fill each buffer with exactly the bytes stored under its identity, verified."""

    @abstractmethod
    def delete(self, identities: Sequence[Identity]) -> int:
        """Forget these, also over a restart. Returns how many were held."""

    def delete_namespace(self, namespace: bytes) -> int:
        """Forget everything of one namespace. Raises AdapterError where the adapter cannot enumerate."""
        return self.delete(list(self.identities(namespace)))

    def clear(self, namespace: bytes | None) -> int:
        """Forget everything (of one namespace) where nothing is listed; how many that was. AdapterError where it cannot."""
        raise AdapterError(f"{self.name}: {self.type} can neither list nor clear what it holds: it stays there")

    def enumerate(self) -> Iterator[tuple[Identity, Hit]]:
        """Everything held. Raises AdapterError where `capabilities.enumerate` is False."""
        raise AdapterError(f"{self.type} cannot list what it holds")

    def identities(self, namespace: bytes | None) -> Iterator[Identity]:
        """What must be deleted for nothing (of one namespace) to be left. Raises AdapterError as `enumerate` does.

        An adapter in which more may lie than `enumerate` lists (expired, damaged) has its own.
        """
        return (identity for identity, _ in self.enumerate() if namespace is None or identity[:32] == namespace)

    def _held(self, identities: Iterable[Identity]) -> Iterator[tuple[Identity, Hit]]:
        """Those of `identities` that a look-up finds, LISTED at a time: for stores that list names and nothing else."""
        rest = iter(identities)
        while block := list(itertools.islice(rest, LISTED)):
            for identity, hit in zip(block, self.lookup(block), strict=True):
                if hit is not None:
                    yield identity, hit

    @abstractmethod
    def usage(self) -> Usage:
        """Bytes and entries now."""

    # What an adapter with `capabilities.direct_extents` also does. Each extent lent or held is given back exactly once.

    def direct_roots(self) -> list[Path]:
        """The folders that its extents lie in."""
        return []

    def lend(self, wanted: Sequence[Reservation]) -> "list[DirectExtent | str]":
        """Room for values that somebody else writes; a str, the reason, where there is none. Until `fill` each is a miss.

        Raises AdapterError where the adapter as a whole cannot.
        """
        raise AdapterError(f"{self.type} has no files to lend parts of")

    def fill(self, extent: DirectExtent, checksum: bytes = b"") -> Stored:
        """The value is written and synced: it is there from now on. Ends the loan, also when it is refused or raises."""
        raise AdapterError(f"{self.type} has no files to lend parts of")

    def give_back(self, extent: DirectExtent) -> None:
        """End a loan without a value, or a hold. For a loan: nobody writes there any more."""
        raise AdapterError(f"{self.type} has no files to lend parts of")

    def hold(self, identities: Sequence[Identity]) -> "list[DirectExtent | None]":
        """Where these values lie, whose files keep their bytes until `give_back`; None where there is none that can be read so."""
        return [None] * len(identities)

    # What a member of a stripe also does where it is durable.

    def sign(self) -> int:
        """What tells this store from every other one."""
        return 0

    def mark(self) -> Mark:
        """The mark last set."""
        return Mark()

    def set_mark(self, mark: Mark) -> None:  # noqa: B027 - what is not durable starts empty, and has missed nothing
        """Keep this mark, stably, over restarts. Raises AdapterError."""

    def flush(self) -> Durability:
        """Make everything stored so far as durable as this adapter can, and say how durable that is."""
        return Durability.NONE

    @property
    def parts_down(self) -> int:
        """How many of its parts (the directories of a stripe) do not work now."""
        return 0

    def describe(self) -> dict[str, object]:
        """Settings worth showing (path, durability, I/O mode); no secrets."""
        return {}
