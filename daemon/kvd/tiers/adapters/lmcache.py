"""An LMCache server (`lmcache_server`, what LMCache itself calls a remote tier at lm://HOST:PORT), spoken to without LMCache.

The protocol is a fixed frame of 186 bytes each way of asking (nine int32, a key of 150 characters) and of 36 bytes each
answer, over TCP, little-endian; the bytes of a value follow the frame of a PUT and the answer to a GET. It knows PUT, GET,
EXIST and HEALTH. What it lacks is made up for here:

- a PUT is not answered: each run of them ends with a HEALTH, whose answer says that the server has worked off what came before;
- nothing can be asked about a value but the whole value: its envelope is stored a second time, under a key of its own;
- nothing can be deleted: an empty value takes the place, and with it the memory, of what is to go. Empty is the same as absent;
- nothing is listed, and the server neither bounds nor evicts: it takes memory until it is restarted. Watch it, or bound it by
  its cgroup.

<prefix>@1@0@<128 hex of identity>@uint8   an envelope and the value (<prefix>@1@1@... : the envelope alone)

A connection that fails, or is silent for `timeout`, is closed before a call returns, so nothing arrives in a buffer that was
given back. There is no index: what other daemons store and delete counts at once.
"""

import contextlib
import logging
import queue
import re
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from kvd.store.identity import Identity
from kvd.store.retention import expired
from kvd.tiers.adapters import envelope
from kvd.tiers.adapters.base import Adapter, AdapterError, Capabilities, Hit, Item, Loaded, Stored, Usage, Want
from kvd.tiers.adapters.kind import Field, Kind, seconds, size, text, whole
from kvtools.errors import UsageError

log = logging.getLogger("kvd.tiers")

KEY_BYTES = 150
PREFIX = re.compile(r"[A-Za-z0-9._-]{1,11}")
_ASK = struct.Struct(f"<9i{KEY_BYTES}s")
"""Command, length, format, dtype, location, shape (4), key."""
_ANSWER = struct.Struct("<9i")
"""Code, length, format, dtype, shape (4), location."""
PUT, GET, HEALTH = 1, 2, 5
SUCCESS, FAILURE = 200, 400
BINARY, UINT8 = 4, 6
"""What we say our bytes are: MemoryFormat.BINARY, and torch.uint8 in the protocol's table."""
MAX_VALUE = (1 << 31) - 1 - envelope.SIZE
RUN_BYTES = 16 << 20
ASKS = 64
"""Questions sent before the first answer is read: few enough that neither side's buffers fill."""
SCRATCH = 64 << 10
VALUE, HEAD = 0, 1


class Answer(NamedTuple):
    """What came back: whether it was SUCCESS, and how many bytes follow."""

    good: bool
    length: int


class Link:
    """One connection. Whatever goes wrong on it is an OSError, and then it is of no more use."""

    def __init__(self, address: tuple[str, int], timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._socket = socket.create_connection(address, timeout=timeout_s)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def close(self) -> None:
        self._socket.close()

    @property
    def stale(self) -> bool:
        """Whether, idle, it was closed from the other side (or says something unasked)."""
        self._socket.setblocking(False)
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        finally:
            self._socket.settimeout(self._timeout_s)
        return True

    def ask(self, command: int, key: str, *parts: bytes | memoryview) -> None:
        """Send one command, and what belongs to it."""
        length = sum(len(part) for part in parts)
        frame = _ASK.pack(command, length, BINARY, UINT8, 0, length, 0, 0, 0, key.encode().ljust(KEY_BYTES))
        rows = [memoryview(frame), *(memoryview(part) for part in parts if len(part))]
        while rows:
            sent = self._socket.sendmsg(rows)
            while rows and sent >= len(rows[0]):
                sent -= len(rows.pop(0))
            if rows and sent:
                rows[0] = rows[0][sent:]

    def answer(self) -> Answer:
        """The frame of the next answer."""
        # The server sends a frame and what follows it as two writes, and holds the second back until the first was
        # acknowledged: the kernel would take its time for that (40 ms), and forgets that it should not.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        raw = bytearray(_ANSWER.size)
        self.fill(memoryview(raw))
        code, length = _ANSWER.unpack(raw)[:2]
        if code not in (SUCCESS, FAILURE) or length < 0:
            raise OSError(f"an answer that is none of LMCache's (code {code})")
        return Answer(code == SUCCESS, length)

    def fill(self, into: memoryview) -> None:
        """Receive exactly so many bytes."""
        while len(into):
            got = self._socket.recv_into(into)
            if not got:
                raise ConnectionResetError("the server has closed the connection")
            into = into[got:]

    def skip(self, length: int) -> None:
        """Receive bytes that nobody wants."""
        scratch = memoryview(bytearray(min(length, SCRATCH)))
        while length:
            part = scratch[: min(length, SCRATCH)]
            self.fill(part)
            length -= len(part)


class LmcacheAdapter(Adapter):
    """Values on an LMCache server; see the module."""

    type = "lmcache"
    capabilities = Capabilities(durable=True)

    def __init__(
        self,
        name: str,
        address: tuple[str, int],
        *,
        prefix: str = "kvd",
        links: int = 16,
        timeout_s: float = 5.0,
        max_value_bytes: int = MAX_VALUE,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        super().__init__(name)
        self.where = f"{address[0]}:{address[1]}"
        self._address = address
        self._prefix = prefix
        self._timeout_s = timeout_s
        self._max_value = min(max_value_bytes, MAX_VALUE)
        self._clock_ns = clock_ns
        # A fixed number of places, each with a connection or none: who takes one makes the connection where it is missing.
        self._links: queue.LifoQueue[Link | None] = queue.LifoQueue()
        self._closing = False
        for _ in range(links):
            self._links.put(None)

    # ---- the server --------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Say hello; a server that is away is no error."""
        self._closing = False
        try:
            with self._link("connect") as link:
                self._settled(link)
        except AdapterError as error:
            log.warning("%s; serving without it until it answers", error.message)

    def close(self, deadline_s: float = 5.0) -> None:
        self._closing = True  # what is under way closes its connection itself
        places = []
        with contextlib.suppress(queue.Empty):
            while True:
                places.append(self._links.get_nowait())
        for link in places:
            if link is not None:
                link.close()
            self._links.put(None)

    @contextlib.contextmanager
    def _link(self, what: str) -> Iterator[Link]:
        """A connection for one conversation, from its beginning to its end. Raises AdapterError where it fails."""
        try:
            held = self._links.get(timeout=self._timeout_s)
        except queue.Empty:
            raise AdapterError(f"{self.name}: cannot {what} at {self.where}: all connections are busy") from None
        link, done = held, False
        try:
            if link is not None and link.stale:
                link.close()
                link = None
            if link is None:
                link = Link(self._address, self._timeout_s)
            yield link
            done = not self._closing
        except OSError as error:
            self.counters.io_errors += 1
            raise AdapterError(f"{self.name}: cannot {what} at {self.where}: {error.strerror or error}") from None
        finally:
            if not done and link is not None:
                link.close()
            self._links.put(link if done else None)

    def _settled(self, link: Link) -> None:
        """Wait until the server has worked off what was sent."""
        link.ask(HEALTH, self._key(bytes(64), VALUE))
        if not link.answer().good:
            raise OSError("the server says that it is not well")

    def _key(self, identity: Identity, which: int) -> str:
        return f"{self._prefix}@1@{which}@{identity.hex()}@uint8"

    # ---- values ------------------------------------------------------------------------------------------------------

    def store(self, items: Sequence[Item]) -> list[Stored]:
        now = self._clock_ns()
        results = [self._refusal(item, now) for item in items]
        todo = [item for item, result in zip(items, results, strict=True) if result.ok]
        if todo:
            with self._link("store") as link:
                size = 0
                for item in todo:
                    head = envelope.seal(item)
                    link.ask(PUT, self._key(item.identity, VALUE), head, item.data)
                    link.ask(PUT, self._key(item.identity, HEAD), head)
                    size += len(item.data)
                    if size >= RUN_BYTES:
                        self._settled(link)
                        size = 0
                self._settled(link)
        self.counters.count_stores(items, results)
        return results

    def _refusal(self, item: Item, now: int) -> Stored:
        if expired(item.expires_ns, now):
            return Stored(False, "expired")
        return self.too_large(item, self._max_value, "raise max_value_bytes") if len(item.data) > self._max_value else Stored(True)

    def lookup(self, identities: Sequence[Identity]) -> list[Hit | None]:
        if not identities:
            return []
        found: list[Hit | None] = []
        damaged: list[Identity] = []
        now = self._clock_ns()
        with self._link("look up") as link:
            for start in range(0, len(identities), ASKS):
                some = identities[start : start + ASKS]
                for identity in some:
                    link.ask(GET, self._key(identity, HEAD))
                for identity in some:
                    there, head = self._head(link)
                    if there and (head is None or head.identity != identity):
                        damaged.append(identity)
                        head = None
                    found.append(head.hit if head is not None and not expired(head.expires_ns, now) else None)
        self.found_damaged(damaged)
        return found

    def _remove_damaged(self, identities: Sequence[Identity]) -> None:
        self._empty(identities)

    @staticmethod
    def _head(link: Link) -> tuple[bool, envelope.Head | None]:
        """Whether the server has anything (what is empty is deleted), and the envelope that it is."""
        answer = link.answer()
        if not answer.good or answer.length != envelope.SIZE:
            link.skip(answer.length)
            return answer.good and answer.length > 0, None
        raw = bytearray(envelope.SIZE)
        link.fill(memoryview(raw))
        return True, envelope.open_head(raw)

    def load(self, wants: Sequence[Want]) -> list[Loaded]:
        if not wants:
            return []
        with self._link("load") as link:
            results = [self._load(link, want) for want in wants]
        damaged = [want.identity for want, result in zip(wants, results, strict=True) if result is Loaded.CORRUPT]
        if damaged:
            self._empty(damaged)
        self.counters.count_loads(wants, results)
        return results

    def _load(self, link: Link, want: Want) -> Loaded:
        link.ask(GET, self._key(want.identity, VALUE))
        answer = link.answer()
        if not answer.length:
            return Loaded.MISS
        if answer.length < envelope.SIZE:
            link.skip(answer.length)
            return Loaded.CORRUPT
        raw = bytearray(envelope.SIZE)
        link.fill(memoryview(raw))
        head = envelope.open_head(raw)
        left = answer.length - envelope.SIZE
        if head is None or head.identity != want.identity or head.length != left:
            link.skip(left)
            return Loaded.CORRUPT
        if left != len(want.into):
            link.skip(left)
            return Loaded.MISS
        link.fill(want.into)
        if not envelope.intact(head, want.into):
            return Loaded.CORRUPT
        return Loaded.MISS if expired(head.expires_ns, self._clock_ns()) else Loaded.OK

    def delete(self, identities: Sequence[Identity]) -> int:
        held = [identity for identity, hit in zip(identities, self.lookup(identities), strict=True) if hit is not None]
        # Also what only seems not to be there: an envelope may be damaged, or have expired.
        self._empty(identities)
        return len(held)

    def _empty(self, identities: Sequence[Identity]) -> None:
        if not identities:
            return
        with self._link("delete") as link:
            for identity in identities:
                for which in (HEAD, VALUE):
                    link.ask(PUT, self._key(identity, which))
            self._settled(link)

    def usage(self) -> Usage:
        """The server does not say."""
        return Usage(known=False)

    def describe(self) -> dict[str, object]:
        return {"server": self.where, "prefix": self._prefix}


# ---- configuration -----------------------------------------------------------------------------------------------------


def _url(value: Any) -> tuple[str, int]:
    """lm://HOST:PORT."""
    given = text(value)
    scheme, slashes, rest = given.rpartition("://")
    host, _, port = rest.rstrip("/").rpartition(":")
    if (slashes and scheme != "lm") or not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise UsageError(f"not lm://HOST:PORT: {given!r}", hint="the address of lmcache_server, such as lm://kv.example:65432")
    return host.strip("[]"), int(port)


def _prefix(value: Any) -> str:
    given = text(value)
    if not PREFIX.fullmatch(given):
        raise UsageError(f"not a prefix: {given!r}", hint="1 to 11 letters, digits, dots, dashes, underscores: a key has 150 bytes")
    return given


def _make(name: str, values: dict[str, Any]) -> Adapter:
    return LmcacheAdapter(
        name,
        values["remote_url"],
        prefix=values["prefix"],
        links=values["num_workers"],
        timeout_s=values["timeout"],
        max_value_bytes=values["max_value_bytes"],
    )


KIND = Kind(
    "lmcache",
    "an LMCache server as remote tier",
    "kvd.tiers.adapters.lmcache:LmcacheAdapter",
    _make,
    (
        Field("remote_url", _url, required=True, help="lm://HOST:PORT of lmcache_server"),
        Field("prefix", _prefix, "kvd", help="what all keys begin with, in the place of a model's name"),
        Field("num_workers", whole(1, 256), 16, help="connections at most"),
        Field("timeout", seconds(0.1, 600), 5.0, help="how long the server may be silent"),
        Field("max_value_bytes", size(), MAX_VALUE, help="larger values are not stored; the protocol takes 2 GiB"),
    ),
)
