"""Work over everything that is stored, in small steps: listing it, clearing it, and saying where values are and why not.

A daemon may hold millions of values. The event loop does a few thousand of them at a time and serves others in between
(I5); what only reads, and no columns of the index, is done by a thread.
"""

import asyncio
import heapq
from collections.abc import AsyncIterator
from operator import itemgetter

from kvd.store.identity import IDENTITY_BYTES, NAMESPACE_BYTES, Identity
from kvd.store.store import ABSENT, Store
from kvd.tiers.adapters.base import Adapter, Hit
from kvd.tiers.fetch import Known
from kvd.tiers.forgetting import Forgotten
from kvd.tiers.tiering import ASK_S, Tiering
from kvd.wire import protocol as p

MAX_PAGE = 10000
MAX_OTHERS = 16
"""Other namespaces named for one key at most: a thousand tenants may have the same prompt."""

Row = tuple[bytes, int, int, int, str]
Snapshot = list[tuple[bytes, list[bytes]]]


async def clear(store: Store, tiering: Tiering, namespace: bytes | None, *, arena_only: bool) -> Forgotten:
    """Forget everything (of one namespace), in the arena and, unless `arena_only`, in every tier; how many values."""
    if arena_only or not tiering.tiers:
        return Forgotten(sum([len(identities) async for identities in _clear_arena(store, namespace)]))
    return await tiering.clear(namespace, arena=_clear_arena(store, namespace))


async def _clear_arena(store: Store, namespace: bytes | None) -> AsyncIterator[list[Identity]]:
    for identities in store.clearing(namespace):
        yield identities
        await asyncio.sleep(0)


async def page(store: Store, tiering: Tiering, m: p.Keys) -> p.KeyPage:
    """The rows after `m.after`, in the order of identity and place, of the arena and of tiers that can list at once."""
    limit = max(1, min(m.limit, MAX_PAGE))
    after, place = m.after[:IDENTITY_BYTES], m.after[IDENTITY_BYTES:].decode(errors="replace")
    loop = asyncio.get_running_loop()
    found = await loop.run_in_executor(None, _smallest, _snapshot(store, m.namespace, after), after, limit + 2)
    rows = [row for identity in found if (row := _row(store, identity)) is not None]
    unlisted = []
    for tier in tiering.tiers:
        if not (tier.adapter.capabilities.enumerate and tier.adapter.capabilities.local_index):
            unlisted.append(tier.name)
        else:
            held = await tier.call(_smallest_held, tier.adapter, m.namespace, after, limit + 2)
            rows += [(identity, hit.length, int(hit.retention), hit.expires_ns, tier.name) for identity, hit in held]
    rows = sorted(row for row in rows if (row[0], row[4]) > (after, place))
    return p.KeyPage(m.id, rows[:limit], len(rows) > limit, unlisted)


def _snapshot(store: Store, namespace: bytes, after: bytes) -> Snapshot:
    """The keys of each namespace that has any after that identity: one copy of a dict's keys each, which is quick."""
    spaces = store.index.spaces
    names = [namespace] if namespace else sorted(name for name in spaces if name >= after[:NAMESPACE_BYTES])
    return [(name, list(spaces[name].slots)) for name in names if name in spaces]


def _smallest(snapshot: Snapshot, after: bytes, count: int) -> list[Identity]:
    """The first so many identities from `after` on. Runs on a thread."""
    found: list[Identity] = []
    for name, keys in snapshot:
        floor = after[NAMESPACE_BYTES:] if name == after[:NAMESPACE_BYTES] else b""
        found += [name + key for key in heapq.nsmallest(count - len(found), (key for key in keys if key >= floor))]
        if len(found) >= count:
            break
    return found


def _smallest_held(adapter: Adapter, namespace: bytes, after: bytes, count: int) -> list[tuple[Identity, Hit]]:
    rows = (row for row in adapter.enumerate() if row[0] >= after and row[0].startswith(namespace))
    return heapq.nsmallest(count, rows, key=itemgetter(0))


def _row(store: Store, identity: Identity) -> Row | None:
    index = store.index
    space = index.spaces.get(identity[:NAMESPACE_BYTES])
    slot = space.slots.get(identity[NAMESPACE_BYTES:]) if space is not None else None
    if slot is None:
        return None
    return identity, index.length_of[slot], index.klass_of[slot], index.expires_of[slot], "arena"


REMOTE = frozenset({"s3", "resp", "hfbucket", "mooncake_store", "lmcache"})
"""Types of tiers that several hosts share."""


def sources(store: Store, tiering: Tiering, namespaces: list[bytes], keys: list[bytes], known: Known) -> bytes:
    """Where each of these keys, which are there in all namespaces, comes from: the farthest place, as numbers of SOURCES."""
    far = bytearray(len(keys))
    if not tiering.tiers:
        return bytes(far)
    kinds = [2 if tier.adapter.type in REMOTE else 1 for tier in tiering.tiers]
    for namespace in namespaces:
        below = [i for i, slot in enumerate(store.find(namespace, keys).tolist()) if slot == ABSENT]
        for i, number in zip(below, tiering.numbers([namespace + keys[i] for i in below], known), strict=True):
            far[i] = max(far[i], kinds[number])
    return bytes(far)


async def places(store: Store, tiering: Tiering, namespace: bytes, keys: list[bytes]) -> list[list[str]]:
    """Where each key is: 'arena' and the names of tiers. Tiers that must be asked have ASK_S to answer."""
    found: list[list[str]] = [["arena"] if slot != ABSENT else [] for slot in store.find(namespace, keys).tolist()]
    identities = [namespace + key for key in keys]
    deadline = asyncio.get_running_loop().time() + ASK_S
    tiers = list(tiering.tiers)
    for tier, hits in zip(tiers, await asyncio.gather(*(tier.ask(identities, deadline) for tier in tiers)), strict=True):
        for place, hit in zip(found, hits, strict=True):
            if hit is not None:
                place.append(tier.name)
    return found


async def why(store: Store, tiering: Tiering, m: p.Why) -> p.Answer:
    """The answer to Why: see there. Other namespaces are looked for in the arena whoever made them, in tiers where named."""
    asked = set(m.namespaces)
    others_asked = [name for name in dict.fromkeys(m.others) if name not in asked]
    # At once: a tier that must be asked may take its time, and there is a namespace for every rank and cache group.
    found = await asyncio.gather(*(places(store, tiering, name, m.keys) for name in (*m.namespaces, *others_asked)))
    where, below = found[: len(m.namespaces)], found[len(m.namespaces) :]
    notes = []
    for namespace in m.namespaces:
        asked_for = [namespace + key for key in m.keys]
        told = await asyncio.get_running_loop().run_in_executor(None, store.tombstones.find, asked_for)
        notes.append([[(int(one.fate), one.at_ns, one.place, one.why, one.pid) for one in some] for some in told])
    others: list[list[bytes]] = [[] for _ in m.keys]
    for number, (name, space) in enumerate(list(store.index.spaces.items())):
        if name not in asked:
            for held, key in zip(others, m.keys, strict=True):
                if key in space.slots and len(held) < MAX_OTHERS:
                    held.append(name)
        if not number % 64:
            await asyncio.sleep(0)
    for name, there in zip(others_asked, below, strict=True):
        for held, one in zip(others, there, strict=True):
            if one and name not in held and len(held) < MAX_OTHERS:
                held.append(name)
    body = {"places": where, "notes": notes, "others": others, "since_ns": store.tombstones.since_ns}
    return p.Info(m.id, body)
