"""An adapter whose values pass a chain: encoded before the inner adapter stores them, decoded after it has loaded them.

All of it happens on the thread that tiering calls the adapter with, never on the event loop, in buffers of its own (half of
their budget for stores, half for loads, so that a slow store starves no load). Values go one by one through the chain and
in groups to the inner adapter.

An encoded value lies under another identity than the value: the namespace is combined (exclusive or) with the chain's mask.
So the same medium used without the chain, or with another one, simply holds nothing under the value's identity: nobody can
mistake encoded bytes for the value or the other way round. The length of the value itself, which look-ups have to know, is
the note that the inner adapter keeps with the encoded one (plus 1: a note of 0 is no note).

Failures: what does not decode is CORRUPT and deleted; what was encrypted with a key that is not configured any more is MISS.
"""

import logging
import threading
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from kvd.store.identity import NAMESPACE_BYTES, Identity
from kvd.tiers.adapters.base import Adapter, AdapterError, Evicted, Hit, Item, Loaded, Stored, Want
from kvd.tiers.adapters.wrapper import Wrapper
from kvd.tiers.serde import frame
from kvd.tiers.serde.buffers import PAGE, Buffers
from kvd.tiers.serde.chain import Chain
from kvd.tiers.serde.stage import LENGTH_MAX, Damaged, KeyUnknown

log = logging.getLogger("kvd.tiers")

BUFFER_BYTES = 64 << 20
GROUP_BYTES = 8 << 20
GROUP_ITEMS = 64
UNREADABLE_MAX = 1 << 14
"""Identities remembered that lie under a key nobody named: the oldest is forgotten, and found again by the next load."""


class SerdeAdapter(Wrapper):
    """`inner` behind a chain. What is counted in bytes is encoded ones."""

    def __init__(self, inner: Adapter, chain: Chain, buffer_bytes: int = BUFFER_BYTES) -> None:
        super().__init__(inner.name, inner)
        self.type = inner.type
        self.capabilities = replace(inner.capabilities, direct_extents=False)
        self.chain = chain
        self.store_buffers = Buffers(buffer_bytes // 2)
        self.load_buffers = Buffers(buffer_bytes // 2)
        self._lock = threading.Lock()
        self.plain_bytes = 0
        """Of the values stored, before they were encoded."""
        self.encoded_bytes = 0
        self.counters.extra["keys_unknown"] = 0
        self._unreadable: dict[Identity, None] = {}
        self._said_unknown = False
        self._notes_checked = False

    @property
    def unreadable(self) -> Collection[Identity]:
        """Values under a key that is not configured: hidden once found, so that they are stored anew, and kept for its return."""
        return self._unreadable

    def listen(self, evicted: Evicted) -> None:
        self.inner.listen(lambda identities: evicted([self._there(identity) for identity in identities]))

    def attach(self, memory: memoryview) -> None:
        """The inner adapter never sees the arena: what it is given lies in buffers of ours."""

    # ---- identities --------------------------------------------------------------------------------------------------

    def _there(self, identity: Identity) -> Identity:
        """The identity that stands for this one in the inner adapter; applied twice, the same again."""
        return self._space(identity[:NAMESPACE_BYTES]) + identity[NAMESPACE_BYTES:]

    def _space(self, namespace: bytes) -> bytes:
        return (int.from_bytes(namespace, "little") ^ self.chain.mask).to_bytes(NAMESPACE_BYTES, "little")

    # ---- down --------------------------------------------------------------------------------------------------------

    def store(self, items: Sequence[Item]) -> list[Stored]:
        results: list[Stored] = []
        group: list[Item] = []
        need = 0
        for item in items:
            bound = self.chain.bounds(len(item.data))[-1]
            if group and (need + bound > GROUP_BYTES or len(group) >= GROUP_ITEMS):
                results += self._store(group)
                group, need = [], 0
            group.append(item)
            need += bound
        return results + (self._store(group) if group else [])

    def _store(self, items: list[Item]) -> list[Stored]:
        """Encode and store one group."""
        results: dict[int, Stored] = {}
        fitting = [i for i, item in enumerate(items) if len(item.data) <= LENGTH_MAX]
        bounds = {i: self.chain.bounds(len(items[i].data)) for i in fitting}
        for bound in bounds.values():
            bound[-1] = -(-bound[-1] // PAGE) * PAGE
        steps = range(len(self.chain.stages) - 1)
        between = [max((bounds[i][step] for i in fitting), default=0) for step in steps]
        with self.store_buffers.lend([*between, *(bounds[i][-1] for i in fitting)]) as lent:
            encoded = []
            for i, target in zip(fitting, lent[len(between) :], strict=True):
                item = items[i]
                length = self.chain.encode(item.data, [*lent[: len(between)], target], item.identity)
                there, note = self._there(item.identity), len(item.data) + 1
                data, padded = target[:length].toreadonly(), _padded(target, length)
                encoded.append(Item(there, data, item.retention, item.expires_ns, padded, note))
            for i, made, result in zip(fitting, encoded, self.inner.store(encoded) if encoded else [], strict=True):
                results[i] = result
                if result.ok:
                    self._check_notes(made)
                    with self._lock:
                        self._unreadable.pop(items[i].identity, None)
                        self.plain_bytes += len(items[i].data)
                        self.encoded_bytes += len(made.data)
        return [results.get(i) or self.too_large(item, LENGTH_MAX, "serde takes no longer ones") for i, item in enumerate(items)]

    def _check_notes(self, item: Item) -> None:
        """Once: an adapter of somebody's that keeps no notes would lose everything in silence. Raises AdapterError."""
        if self._notes_checked:
            return
        (hit,) = self.inner.lookup([item.identity])
        if hit is not None and hit.note != item.note:
            raise AdapterError(
                f"{self.name}: this adapter does not keep the note of a value, so serde cannot work with it",
                hint="its Hit must have the note that its Item had (kvd.tiers.adapters.base)",
            )
        self._notes_checked = hit is not None

    # ---- up ----------------------------------------------------------------------------------------------------------

    def lookup(self, identities: Sequence[Identity]) -> list[Hit | None]:
        return [_outer(hit) for hit in self.inner.lookup([self._there(identity) for identity in identities])]

    def load(self, wants: Sequence[Want]) -> list[Loaded]:
        results = []
        for start in range(0, len(wants), GROUP_ITEMS):
            results += self._load(wants[start : start + GROUP_ITEMS])
        return results

    def _load(self, wants: Sequence[Want]) -> list[Loaded]:
        """Load and decode a few, in groups that are small enough; the encoded lengths are asked for where they are not known."""
        there = [self._there(want.identity) for want in wants]
        stored = [want.note for want in wants]
        unknown = [i for i, note in enumerate(stored) if not note]
        if unknown:
            for i, hit in zip(unknown, self.inner.lookup([there[i] for i in unknown]), strict=True):
                stored[i] = hit.length if hit is not None and hit.note == len(wants[i].into) + 1 else 0
        results = [Loaded.MISS] * len(wants)
        self.counters.misses += stored.count(0)
        group: list[int] = []
        need = 0
        for i in [i for i, length in enumerate(stored) if length]:
            if group and need + stored[i] > GROUP_BYTES:
                self._load_group(wants, there, stored, group, results)
                group, need = [], 0
            group.append(i)
            need += stored[i]
        if group:
            self._load_group(wants, there, stored, group, results)
        return results

    def _load_group(
        self, wants: Sequence[Want], there: list[Identity], stored: list[int], group: list[int], results: list[Loaded]
    ) -> None:
        # What lies between two stages is never longer than the bounds say: with that, one need is known before it begins.
        between = [max(self.chain.bounds(len(wants[i].into))[step] for i in group) for step in range(len(self.chain.stages) - 1)]
        damaged = []
        with self.load_buffers.lend([*between, *(-(-stored[i] // PAGE) * PAGE for i in group)]) as lent:
            sources = lent[len(between) :]
            inner = [Want(there[i], source[: stored[i]], source) for i, source in zip(group, sources, strict=True)]
            for i, want, result in zip(group, inner, self.inner.load(inner), strict=True):
                if result is Loaded.OK:
                    result = self._decode(wants[i], want.into, lent[: len(between)])
                    if result is not Loaded.OK:
                        with self._lock:
                            self.counters.hits -= 1
                            self.counters.load_bytes -= len(want.into)
                            self.counters.corruptions += result is Loaded.CORRUPT
                            self.counters.misses += result is Loaded.MISS
                if result is Loaded.CORRUPT:
                    damaged.append(there[i])
                results[i] = result
        if damaged:
            self.inner.delete(damaged)

    def _decode(self, want: Want, source: memoryview, between: Sequence[memoryview]) -> Loaded:
        try:
            lengths = self.chain.scratch(source, len(want.into))
            if any(length > len(buffer) for length, buffer in zip(lengths, between, strict=False)):
                raise Damaged("a length that cannot be")
            buffers = [buffer[:length] for length, buffer in zip(lengths, between, strict=False)]
            self.chain.decode(source, want.into, buffers, want.identity)
        except Damaged as error:
            log.warning("tier %s: a value does not decode (%s): a miss", self.name, error)
            return Loaded.CORRUPT
        except KeyUnknown as error:
            with self._lock:
                self.counters.extra["keys_unknown"] += 1
                self._unreadable[want.identity] = None
                if len(self._unreadable) > UNREADABLE_MAX:
                    del self._unreadable[next(iter(self._unreadable))]
            if not self._said_unknown:
                self._said_unknown = True
                log.warning("tier %s holds values under key %s, which is not among old_keys: they are misses", self.name, error)
            return Loaded.MISS
        return Loaded.OK

    # ---- the rest ----------------------------------------------------------------------------------------------------

    def delete(self, identities: Sequence[Identity]) -> int:
        return self.inner.delete([self._there(identity) for identity in identities])

    def delete_namespace(self, namespace: bytes) -> int:
        return self.inner.delete_namespace(self._space(namespace))

    def clear(self, namespace: bytes | None) -> int:
        return self.inner.clear(None if namespace is None else self._space(namespace))

    def identities(self, namespace: bytes | None) -> Iterator[Identity]:
        """Also what lies there from before: plain values, and, where all must go, those of other chains."""
        spaces = None if namespace is None else {namespace, self._space(namespace)}
        return (self._there(identity) for identity in self.inner.identities(None) if not spaces or identity[:32] in spaces)

    def enumerate(self) -> Iterator[tuple[Identity, Hit]]:
        for identity, hit in self.inner.enumerate():
            outer = _outer(hit)
            if outer is not None:
                yield self._there(identity), outer

    def describe(self) -> dict[str, object]:
        return {
            **self.inner.describe(),
            "serde": str(self.chain),
            "serde_plain_bytes": self.plain_bytes,
            "serde_encoded_bytes": self.encoded_bytes,
            "serde_keys_unknown": self.counters.extra["keys_unknown"],
            "serde_buffer_peak_bytes": self.store_buffers.peak + self.load_buffers.peak,
        }


def _outer(hit: Hit | None) -> Hit | None:
    """What a look-up says of the value, from what the inner adapter knows; its note is the encoded length, for the load."""
    if hit is None or not hit.note or hit.length < frame.SIZE:
        return None
    return Hit(hit.note - 1, hit.retention, hit.expires_ns, hit.length)


def _padded(buffer: memoryview, length: int) -> memoryview | None:
    """The same memory up to the end of its page, the rest zeroed; None where the buffer ends before."""
    end = -(-length // PAGE) * PAGE
    if not length or end > len(buffer):
        return None
    buffer[length:end] = bytes(end - length)
    return buffer[:end]
