"""Where every value lies: the disk tier's index in RAM, at most 192 bytes a value.

Purpose: identity -> (region, offset, length, class, expiry, last use). A dict of one 64-byte key and a tuple a value
would cost 250 to 300 bytes; so the dict is split by namespace (32-byte keys, few namespaces) and everything else is
packed into one Python integer, which costs 48 bytes up to 180 bits and 56 with a note. That is 80 for the key, 48 for the
integer and 30 to 60 for the dict's own table.

    bits 0..23    offset in the region, in pages    (regions up to 64 GiB)
    bits 24..39   region slot                       (65 536 regions)
    bits 40..75   length in bytes
    bits 76..77   retention
    bits 78..115  tick of the last use
    bits 116..179 expiry, unix nanoseconds          (0: never; such integers are shorter still)
    bits 180..211 note                              (0: none)

Concurrency: none of its own; the caller holds the store's lock.
"""

from collections.abc import Iterator
from typing import NamedTuple

from kvd.store.identity import NAMESPACE_BYTES, Identity

MAX_REGION_BYTES = 1 << 36
MAX_REGIONS = 1 << 16

_PAGE_MASK = (1 << 24) - 1
_SLOT_MASK = (1 << 16) - 1
_LENGTH_MASK = (1 << 36) - 1
_TICK_MASK = (1 << 38) - 1
_PLACE_MASK = (1 << 40) - 1
_EXPIRY_MAX = (1 << 64) - 1
_TICK_CLEAR = ~(_TICK_MASK << 78)


class Entry(NamedTuple):
    """One value's place and properties."""

    slot: int
    offset: int
    length: int
    retention: int
    tick: int
    expires_ns: int
    note: int = 0


def pack(slot: int, offset: int, length: int, retention: int, tick: int, expires_ns: int, note: int = 0) -> int:
    """The integer that stands for an entry."""
    return (
        offset >> 12
        | slot << 24
        | length << 40
        | retention << 76
        | (tick & _TICK_MASK) << 78
        | min(expires_ns, _EXPIRY_MAX) << 116
        | note << 180
    )


def unpack(word: int) -> Entry:
    """The entry in `word`."""
    return Entry(
        word >> 24 & _SLOT_MASK,
        (word & _PAGE_MASK) << 12,
        word >> 40 & _LENGTH_MASK,
        word >> 76 & 3,
        word >> 78 & _TICK_MASK,
        word >> 116 & _EXPIRY_MAX,
        word >> 180,
    )


def place(slot: int, offset: int) -> int:
    """What `word & PLACE` is for a value at this place."""
    return slot << 24 | offset >> 12


def at(word: int | None, slot: int, offset: int) -> bool:
    """Whether `word` (None: nothing held) is a value at exactly this place."""
    return word is not None and word & _PLACE_MASK == place(slot, offset)


class Index:
    """A dict of identities with packed entries."""

    def __init__(self) -> None:
        self._spaces: dict[bytes, dict[bytes, int]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def get(self, identity: Identity) -> int | None:
        """The packed entry, or None."""
        space = self._spaces.get(identity[:NAMESPACE_BYTES])
        return None if space is None else space.get(identity[NAMESPACE_BYTES:])

    def put(self, identity: Identity, word: int) -> int | None:
        """Set the entry; what was there before."""
        namespace = identity[:NAMESPACE_BYTES]
        space = self._spaces.get(namespace)
        if space is None:
            space = self._spaces[namespace] = {}
        key = identity[NAMESPACE_BYTES:]
        old = space.get(key)
        space[key] = word
        if old is None:
            self._count += 1
        return old

    def touch(self, identity: Identity, tick: int) -> None:
        """Set the last use of an entry that is there."""
        space = self._spaces[identity[:NAMESPACE_BYTES]]
        key = identity[NAMESPACE_BYTES:]
        space[key] = space[key] & _TICK_CLEAR | (tick & _TICK_MASK) << 78

    def pop(self, identity: Identity) -> int | None:
        """Remove the entry; what was there."""
        namespace = identity[:NAMESPACE_BYTES]
        space = self._spaces.get(namespace)
        old = None if space is None else space.pop(identity[NAMESPACE_BYTES:], None)
        if old is not None and space is not None:
            self._count -= 1
            if not space:
                del self._spaces[namespace]
        return old

    def keys(self, namespace: bytes) -> list[bytes]:
        """Every key of one namespace, without the namespace (adding that is work for when the lock is free again)."""
        return list(self._spaces.get(namespace, ()))

    def namespaces(self) -> list[bytes]:
        """Every namespace that holds something."""
        return list(self._spaces)

    def items(self) -> Iterator[tuple[Identity, int]]:
        """Every identity with its packed entry; not to be changed meanwhile."""
        for namespace, space in self._spaces.items():
            for key, word in space.items():
                yield namespace + key, word
