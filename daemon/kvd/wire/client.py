"""Client: synchronous, thread-safe, reconnects. AsyncClient: the same for asyncio.

Values move through the arena, not through the socket: `put` copies into an extent that the daemon lent, `get` copies out
of a pinned one; values up to 4 KiB travel in the frame. A put is one round trip, because the answer to each brings
extents for the next ones of that size (bounded; given back after a second of idleness).

A lost connection is found again by the next call; a call that was under way is repeated once where that is harmless
(everything but commits into lent extents). No daemon: Unavailable at once. A wedged daemon: DeadlinePassed after
`timeout_s`. Wrong bytes: never; a lease that ended while its bytes were being copied is read again, or a miss.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np

from kvd.errors import Disconnected, Draining, LeaseLost
from kvd.store.identity import check_key, check_keys, namespace_of
from kvd.store.retention import Retention, expiry_ns
from kvd.store.tombstones import Fate, Tombstone
from kvd.wire import protocol as p
from kvd.wire.connection import Connection, Waiter, default_socket
from kvd.wire.direct import DirectRead, DirectWrite
from kvd.wire.leases import ReadLease, WriteLease
from kvd.wire.mapping import flat
from kvd.wire.putter import DURABILITY, Ahead, Buffer, PutResult, Putter, fill, put_one, split

T = TypeVar("T")
GET_WINDOW = 128
"""Keys a request of a long get: enough to drown the round trip, few enough to overlap it with the copying."""
INLINE_FRAME = 1 << 20
_CLASSES: dict[object, int] = {klass.name.lower(): int(klass) for klass in Retention}
HOLD_MS = 250
"""The lease of a single get: long enough for its copy, short enough to be left to run out."""


@dataclass(frozen=True, slots=True)
class PrefixResult:
    """Leading keys present in all namespaces, and the token that pins them (None when not asked or nothing found)."""

    length: int
    token: bytes | None = None
    sources: bytes = b""
    """One byte a key of the run, where asked for: numbers of protocol.SOURCES."""


@dataclass(frozen=True, slots=True)
class WhyResult:
    """`places[namespace][key]`: where it is. `notes[namespace][key]`: what became of it, newest first.

    `others[key]`: other namespaces that hold a value of this key. `since_ns`: the notes are complete from then on.
    """

    places: list[list[list[str]]]
    notes: list[list[list[Tombstone]]]
    others: list[list[bytes]]
    since_ns: int


class Client:
    """A client of one daemon. `socket` defaults to $KVD_SOCKET, then to where `kvd serve` listens.

    `namespace` is what keys belong to unless a call names another: a str is the SHA-256 of its UTF-8, bytes must be 32.
    Nothing is connected before the first call. Raises ValueError for keys that are not 32 bytes.
    """

    def __init__(
        self, socket: str | os.PathLike[str] | None = None, *, namespace: str | bytes = "default", timeout_s: float = 5.0
    ) -> None:
        self.path = Path(socket) if socket is not None else default_socket()
        self.namespace = namespace_of(namespace)
        self.timeout_s = timeout_s
        self._link: Connection | None = None
        self._ahead = Ahead()
        self._connecting = threading.Lock()

    # ---- connection --------------------------------------------------------------------------------------------------

    def connect(self) -> Connection:
        """The connection, made anew where the last one is gone (or belongs to the parent of a fork)."""
        link = self._link
        if link is not None and not link.closed and link.pid == os.getpid():
            return link
        with self._connecting:
            link = self._link
            if link is None or link.closed or link.pid != os.getpid():
                self._ahead = Ahead()
                link = self._link = Connection(self.path, timeout_s=self.timeout_s)
            return link

    def alive(self) -> bool:
        """Whether the daemon has not hung up since the last call: one system call, and nothing is sent. True before the first."""
        link = self._link
        return link is None or link.alive()

    def _writer(self) -> Connection:
        link = self.connect()
        if link.mapping.write_view is None:
            with self._connecting:
                if link.mapping.write_view is None:
                    link.allow_writing()
        return link

    def _again(self, work: Callable[[Connection], T], connect: Callable[[], Connection] | None = None) -> T:
        """Run `work` on the connection; once more on a new one when that was lost."""
        connect = connect or self.connect
        try:
            return work(connect())
        except Disconnected:  # found again, or Unavailable
            return work(connect())

    def close(self) -> None:
        """Hang up: leases end, extents lent ahead go back. The next call connects anew."""
        self._ahead.stop()
        link, self._link = self._link, None
        if link is not None:
            if link.pid == os.getpid() and (serials := self._ahead.give_back()):
                link.tell(p.Abort(0, serials))
            link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _space(self, namespace: str | bytes | None) -> bytes:
        return self.namespace if namespace is None else namespace_of(namespace)

    # ---- writing -----------------------------------------------------------------------------------------------------

    def put(
        self,
        key: bytes,
        data: Buffer,
        *,
        retention: str = "long",
        ttl_s: float | None = None,
        wait: str = "",
        namespace: str | bytes | None = None,
    ) -> PutResult:
        """Store one value. `wait="tier"` answers when the tiers have it, with the weakest durability reached."""
        if not wait and ttl_s is None:
            view = flat(data)
            if len(view) > p.INLINE_BYTES:
                klass = _CLASSES.get(retention) or Retention.of(retention)
                result = put_one(self, self._writer(), check_key(key), view, self._space(namespace), klass)
                if result is not None:
                    return result
        return self.put_many([(key, data)], retention=retention, ttl_s=ttl_s, wait=wait, namespace=namespace)[0]

    def put_many(
        self,
        items: Sequence[tuple[bytes, Buffer]],
        *,
        retention: str = "long",
        ttl_s: float | None = None,
        wait: str = "",
        namespace: str | bytes | None = None,
    ) -> list[PutResult]:
        """Store values; one result each, in order."""
        klass = Retention.of(retention)
        space = self._space(namespace)
        views = [flat(data) for _, data in items]
        check_keys([key for key, _ in items])
        results: list[PutResult | None] = [None] * len(items)
        expires = expiry_ns(ttl_s)
        wait_ms = self._wait_ms(wait)
        small = [i for i, view in enumerate(views) if len(view) <= p.INLINE_BYTES]
        for batch in split(small, views, INLINE_FRAME):
            request = p.PutInline(0, space, [items[i][0] for i in batch], [bytes(views[i]) for i in batch], klass, expires, wait_ms)
            try:
                answer = self._again(lambda link, r=request: link.call(r, p.Committed, self._patience(wait_ms)), self._writer)  # type: ignore[misc]
            except Draining:
                answer = p.Committed(0, ["draining"] * len(batch), 0, [], [])
            fill(results, batch, answer)
        large = [i for i, view in enumerate(views) if len(view) > p.INLINE_BYTES]
        if large:
            self._put_large(large, items, views, results, (space, klass, expires, wait_ms))
        return [PutResult(False, "lease_lost") if result is None else result for result in results]

    def _put_large(
        self,
        order: list[int],
        items: Sequence[tuple[bytes, Buffer]],
        views: list[memoryview],
        results: list[PutResult | None],
        how: tuple[bytes, int, int, int],
    ) -> None:
        limit = self._writer().welcome.arena_bytes
        for i in order:
            if len(views[i]) > limit:
                results[i] = PutResult(False, "too_large")
        left = [i for i in order if results[i] is None]
        try:
            Putter(self, self._writer(), items, views, results, how).run(left)
        except Disconnected:
            left = [i for i in left if results[i] is None]
            Putter(self, self._writer(), items, views, results, how).run(left)

    def write(self, sizes: Sequence[int], *, timeout_s: float | None = None, wait_s: float | None = None) -> WriteLease:
        """Room for these sizes, all of it. Raises NoRoom (too large, arena full of pinned or unwritten values).

        `wait_s`: how long the daemon may wait for a tier to make room (most of the time-out unless given; 0: not at all).
        """
        timeout = self.timeout_s if timeout_s is None else timeout_s
        wait_ms = int(timeout * 900 if wait_s is None else wait_s * 1000)

        def reserve(link: Connection) -> WriteLease:
            lent = link.call(p.Reserve(0, list(sizes), wait_ms, partial=False), p.Lent, timeout)
            return WriteLease(self, link, sizes, lent.serials, lent.offsets)

        return self._again(reserve, self._writer)

    def _commit(
        self,
        link: Connection,
        serials: list[int],
        sizes: list[int],
        keys: Sequence[bytes],
        retention: str,
        ttl_s: float | None,
        wait: str,
        namespace: str | bytes | None,
    ) -> list[PutResult]:
        check_keys(keys)
        wait_ms = self._wait_ms(wait)
        klass = Retention.of(retention)
        request = p.Commit(0, self._space(namespace), serials, sizes, list(keys), klass, expiry_ns(ttl_s), wait_ms)
        results: list[PutResult | None] = [None] * len(keys)
        try:
            fill(results, range(len(keys)), link.call(request, p.Committed, self._patience(wait_ms)))
        except Disconnected:
            return [PutResult(False, "lease_lost")] * len(keys)
        except Draining:
            return [PutResult(False, "draining")] * len(keys)
        return [PutResult(False, "lease_lost") if result is None else result for result in results]

    def _wait_ms(self, wait: str) -> int:
        if wait not in ("", "tier"):
            raise ValueError(f"unknown wait {wait!r}: 'tier', or nothing")
        return int(self.timeout_s * 1000) if wait else 0

    def _patience(self, wait_ms: int) -> float:
        return self.timeout_s + wait_ms / 1000

    # ---- reading -----------------------------------------------------------------------------------------------------

    def get(self, key: bytes, *, namespace: str | bytes | None = None) -> bytes | None:
        """A copy of the value, or None."""
        request = p.Lease(0, self._space(namespace), [check_key(key)], int(self.timeout_s * 900), p.INLINE_BYTES, HOLD_MS)
        try:
            return _get_one(self.connect(), request)
        except Disconnected:  # found again, or Unavailable
            return self.get_many([key], namespace=namespace)[0]
        except LeaseLost:
            return self.get_many([key], namespace=namespace)[0]

    def get_many(self, keys: Sequence[bytes], *, namespace: str | bytes | None = None) -> list[bytes | None]:
        """Copies of the values, None where there is none; in windows, so that the arena's size does not matter."""
        return self._collect(keys, namespace, None)

    def get_into(
        self, keys: Sequence[bytes], buffers: Sequence[Buffer], *, namespace: str | bytes | None = None
    ) -> list[int | None]:
        """Copy each value into its buffer; its length, or None where there is none or it is longer than the buffer."""
        targets = [flat(buffer) for buffer in buffers]
        if len(targets) != len(keys):
            raise ValueError(f"{len(targets)} buffers for {len(keys)} keys")
        lengths: list[int | None] = [None] * len(keys)
        self._collect(keys, namespace, (targets, lengths))
        return lengths

    def _collect(
        self, keys: Sequence[bytes], namespace: str | bytes | None, into: tuple[list[memoryview], list[int | None]] | None
    ) -> list[bytes | None]:
        check_keys(keys)
        space = self._space(namespace)
        values: list[bytes | None] = []
        lost = 0
        while len(values) < len(keys):
            try:
                self._again(lambda link: self._copy_from(link, space, keys, values, into))
            except LeaseLost:
                lost += 1
                if lost > 2:
                    raise
        return values

    def _copy_from(
        self,
        link: Connection,
        space: bytes,
        keys: Sequence[bytes],
        values: list[bytes | None],
        into: tuple[list[memoryview], list[int | None]] | None,
    ) -> None:
        """Copy window by window; the next one is asked for before this one is copied, so that both sides are busy."""

        def ask(at: int) -> tuple[p.Lease, Waiter, float] | None:
            part = list(keys[at : at + GET_WINDOW])
            if not part:
                return None
            since = time.monotonic()
            request = p.Lease(0, space, part, int(self.timeout_s * 900), p.INLINE_BYTES)
            return request, link.submit(request), since

        asked = ask(len(values))
        while asked is not None:
            request, waiter, since = asked
            asked = None
            lease = ReadLease(link, since, len(request.keys), link.wait(waiter, request, p.Leased))
            # A window cut short for lack of room wants its own room back before the next is asked for.
            if lease.complete:
                asked = ask(len(values) + lease.served)
            try:
                with lease:
                    got = _copy(link, lease, len(values), into)
                values += got
            except BaseException:
                if asked is not None:
                    link.forget(*asked[:2])
                raise
            if asked is None and len(values) < len(keys):
                asked = ask(len(values))

    def _lease(
        self, link: Connection, space: bytes, keys: list[bytes], *, inline: int = 0, timeout_s: float | None = None
    ) -> ReadLease:
        timeout = self.timeout_s if timeout_s is None else timeout_s
        asked = time.monotonic()
        answer = link.call(p.Lease(0, space, keys, int(timeout * 900), inline), p.Leased, timeout)
        return ReadLease(link, asked, len(keys), answer)

    def read(self, keys: Sequence[bytes], *, namespace: str | bytes | None = None, timeout_s: float | None = None) -> ReadLease:
        """Pin values and look at them in place. Waits up to `timeout_s` for tiers; what has not come by then is None."""
        space = self._space(namespace)
        wanted = check_keys(keys)
        return self._again(lambda link: self._lease(link, space, wanted, timeout_s=timeout_s))

    @property
    def _patience_ms(self) -> int:
        """How long look-ups may ask tiers: half of what we wait for the answer."""
        return int(self.timeout_s * 500)

    @property
    def slow_lookups(self) -> bool:
        """Whether some tier must do I/O to answer a look-up, so that one with patience may take as long as that."""
        return self.connect().welcome.slow_lookups

    def exists(self, keys: Sequence[bytes], *, namespace: str | bytes | None = None, ask_s: float | None = None) -> list[bool]:
        """Which keys are there, in the arena or a tier that can tell. Counts neither hit nor miss.

        `ask_s`: how long tiers that must do I/O to tell are asked (half of the time-out unless given; 0: not at all).
        """
        space = self._space(namespace)
        request_keys = check_keys(keys)
        patience_ms = self._patience_ms if ask_s is None else int(ask_s * 1000)
        flags = self._again(lambda link: link.call(p.Exists(0, space, request_keys, patience_ms), p.Flags)).flags
        found: list[bool] = np.frombuffer(flags, dtype=np.bool_).tolist()
        return found

    def prefix(
        self,
        keys: Sequence[bytes],
        *,
        namespaces: Sequence[str | bytes] | None = None,
        pin_s: float = 0.0,
        where: bool = False,
        ask_s: float | None = None,
    ) -> PrefixResult:
        """How many leading keys are present in all namespaces; pinned for `pin_s` under a token when that is given.

        `where` asks where each would come from, too; `ask_s` as in `exists`.
        """
        spaces = [self.namespace] if namespaces is None else [namespace_of(n) for n in namespaces]
        patience_ms = self._patience_ms if ask_s is None else int(ask_s * 1000)
        request = p.Prefix(0, spaces, check_keys(keys), int(pin_s * 1000), patience_ms, where)
        found = self._again(lambda link: link.call(request, p.PrefixFound))
        return PrefixResult(found.length, found.token or None, found.sources)

    def claim(self, token: bytes, *, namespace: str | bytes | None = None, timeout_s: float | None = None) -> ReadLease:
        """Take over what `prefix` pinned, one namespace of it, on this connection. Raises LeaseLost when it has ended."""
        timeout = self.timeout_s if timeout_s is None else timeout_s
        link = self.connect()
        asked = time.monotonic()
        answer = link.call(p.Claim(0, token, self._space(namespace), int(timeout * 900)), p.Leased, timeout)
        return ReadLease(link, asked, len(answer.offsets) // 8, answer)

    def unpin(self, token: bytes, *, namespace: str | bytes | None = None) -> None:
        """Let go of what a token pins in a namespace, when its values were read by key. No round trip; an ended token is fine."""
        self.connect().tell(p.Unpin(0, token, self._space(namespace)))

    # ---- past the daemon ---------------------------------------------------------------------------------------------

    def direct_write(
        self,
        keys: Sequence[bytes],
        lengths: Sequence[int],
        *,
        retention: str = "long",
        ttl_s: float | None = None,
        namespace: str | bytes | None = None,
    ) -> DirectWrite:
        """Room in a tier's files for values that the caller writes itself; None in `extents` where there is none."""
        klass, space = Retention.of(retention), self._space(namespace)
        request = p.DirectReserve(0, space, check_keys(keys), list(lengths), klass, expiry_ns(ttl_s))
        link = self._writer()
        if not link.welcome.roots:
            return DirectWrite(link, lengths, p.DirectLent(0, [(0, 0, "", 0, 0)] * len(keys), ["no_tier"] * len(keys)))
        return DirectWrite(link, lengths, link.call(request, p.DirectLent))

    def direct_read(self, keys: Sequence[bytes], *, namespace: str | bytes | None = None) -> DirectRead:
        """Where values lie in a tier's files, under a lease; None in `extents` for what is not (it may be in the arena)."""
        space, wanted = self._space(namespace), check_keys(keys)

        def hold(link: Connection) -> DirectRead:
            asked = time.monotonic()
            if not link.welcome.roots:
                return DirectRead(link, asked, p.DirectHeld(0, 0, [None] * len(wanted)))
            return DirectRead(link, asked, link.call(p.DirectHold(0, space, wanted), p.DirectHeld))

        return self._again(hold)

    # ---- the rest ----------------------------------------------------------------------------------------------------

    def prefetch(self, keys: Sequence[bytes], *, deadline_s: float = 30.0, namespace: str | bytes | None = None) -> int:
        """Bring values up from tiers; how many had arrived by the deadline."""
        request = p.Prefetch(0, self._space(namespace), check_keys(keys), int(deadline_s * 1000))
        return self._again(lambda link: link.call(request, p.Count, deadline_s + self.timeout_s)).count

    def places(self, keys: Sequence[bytes], *, namespace: str | bytes | None = None) -> list[list[str]]:
        """Where each key is: 'arena' and the names of tiers; nothing where it is nowhere. Counts neither hit nor miss."""
        request = p.Where(0, self._space(namespace), check_keys(keys))
        found: list[list[str]] = self._again(lambda link: link.call(request, p.Info)).info["places"]
        return found

    def why(
        self, keys: Sequence[bytes], *, namespaces: Sequence[str | bytes] | None = None, others: Sequence[bytes] = ()
    ) -> WhyResult:
        """Where each key is in each namespace, and what is remembered of it where it is not; see WhyResult.

        `others`: namespaces to look into besides, in tiers as well; the arena's are looked through anyway.
        """
        spaces = [self.namespace] if namespaces is None else [namespace_of(n) for n in namespaces]
        request = p.Why(0, spaces, check_keys(keys), list(others))
        info = self._again(lambda link: link.call(request, p.Info)).info
        notes = [
            [[Tombstone(Fate(fate), at, place, why, pid) for fate, at, place, why, pid in told] for told in row]
            for row in info["notes"]
        ]
        return WhyResult(info["places"], notes, info["others"], info["since_ns"])

    def note(self, keys: Sequence[bytes], why: str, *, namespace: str | bytes | None = None) -> None:
        """Have the daemon remember why these were not stored, for `why`. No answer is waited for."""
        self.connect().tell(p.Note(0, self._space(namespace), check_keys(keys), why))

    def flush(self, keys: Sequence[bytes] | None = None, *, timeout_s: float | None = None) -> str:
        """Wait until what was put has reached the tiers; the weakest durability there: none, group or fsync."""
        timeout = self.timeout_s if timeout_s is None else timeout_s
        request = p.Flush(0, self.namespace, check_keys(keys or ()), int(timeout * 1000))
        return DURABILITY[self._again(lambda link: link.call(request, p.Done, timeout + 1)).durability]

    def delete(self, keys: Sequence[bytes], *, arena_only: bool = False, namespace: str | bytes | None = None) -> int:
        """Forget values everywhere (or in the arena only); how many there were."""
        request = p.Delete(0, self._space(namespace), check_keys(keys), arena_only)
        return self._again(lambda link: link.call(request, p.Count, self.timeout_s + 5)).count

    def clear(self, *, arena_only: bool = False, all_namespaces: bool = False, namespace: str | bytes | None = None) -> int:
        """Forget everything of the namespace (or of all); how many values there were."""
        request = p.Clear(0, b"" if all_namespaces else self._space(namespace), arena_only)
        return self._again(lambda link: link.call(request, p.Count, self.timeout_s)).count

    def stats(self) -> dict[str, Any]:
        """The daemon's counters and gauges now, as `kvd stats --json` shows them."""
        return self._again(lambda link: link.call(p.Stats(0), p.Info)).info

    def ping(self) -> float:
        """Seconds of one empty round trip."""
        link = self.connect()
        start = time.perf_counter()
        link.call(p.Ping(0), p.Done)
        return time.perf_counter() - start


def _get_one(link: Connection, request: p.Lease) -> bytes | None:
    """A get of one key: the same as a window of one, without its bookkeeping."""
    asked = time.monotonic()
    answer = link.call(request, p.Leased)
    if answer.inline:
        return answer.inline[0]
    offset = int.from_bytes(answer.offsets, "little")
    if offset == p.MISSING:
        return None
    length = int.from_bytes(answer.lengths, "little")
    value = link.mapping.copy_out(offset, length)
    now = time.monotonic()
    pinned = now < asked + HOLD_MS / 1000 and link.alive()
    link.release_soon(answer.lease, length, now)
    if not pinned:
        raise LeaseLost("the lease ended while its bytes were being read")
    return value


def _copy(
    link: Connection, lease: ReadLease, at: int, into: tuple[list[memoryview], list[int | None]] | None
) -> list[bytes | None]:
    """Copies of a window's values; or, with `into`, Nones, and the values in the buffers from position `at` on."""
    rows = zip(lease.offsets, lease.lengths, strict=True)
    mapping = link.mapping
    if into is None:
        inline = lease.inline
        return [
            None if offset == p.MISSING else small if (small := inline(i)) is not None else mapping.copy_out(offset, length)
            for i, (offset, length) in enumerate(rows)
        ]
    targets, lengths = into
    for i, (offset, length) in enumerate(rows):
        target = targets[at + i]
        if offset != p.MISSING and length <= len(target):
            small = lease.inline(i)
            if small is not None:
                target[:length] = small
            else:
                mapping.copy_to(offset, length, target)
            lengths[at + i] = length
    return [None] * lease.served


__all__ = ["DURABILITY", "Client", "PrefixResult", "PutResult"]
