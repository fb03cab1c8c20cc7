"""Mooncake Store: the memory of many hosts as one pool, over TCP or RDMA, through Mooncake's own client.

<prefix><64 hex of namespace>/<64 hex of key>   an envelope and the value, as one object of two parts

Mooncake's master knows where objects are; the bytes travel between client and the host that holds them, in place: from the
arena and into it, without a copy here. There is no index: what other daemons store and delete counts at once, and a look-up
reads the envelopes of what exists. The master lists nothing, but clears what matches a pattern. Room is its business: it
evicts what was used longest ago, so there is no `eviction` here. `global_segment_size` gives so much of this host's memory to
the pool, on top of the arena; what lies there is gone when this daemon ends.

Three of the client's habits would break promises and are met here. A put under a key that exists does nothing and reports
success: what is there is removed first, by force, since the master keeps what was read lately. An object that is removed
while it is read gives bytes of whatever took its place: what fails its checksum is read once more before it is called
damaged. And calls to a master that is away wait for minutes: `timeout` bounds each, a transfer that makes no progress is
cut off with its connection (so nothing arrives later in a buffer that was given back), a master that does not even accept a
connection is not asked, and one that accepts and says nothing is found out by another process.
"""

import contextlib
import ctypes
import http.client
import logging
import mmap
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from kvd.store.identity import NAMESPACE_BYTES, Identity
from kvd.store.retention import expired
from kvd.tiers.adapters import envelope
from kvd.tiers.adapters.base import (
    Adapter,
    AdapterError,
    AdapterFull,
    Capabilities,
    Durability,
    Hit,
    Item,
    Loaded,
    Stored,
    Usage,
    Want,
)
from kvd.tiers.adapters.kind import Field, Kind, mapping, nearest, seconds, size, text, whole, word
from kvd.tiers.adapters.mooncake_client import connector, environment, load_library
from kvtools.errors import UsageError

log = logging.getLogger("kvd.tiers")

NO_ROOM, TOO_SMALL, NOT_READY, NOT_FOUND = -200, -600, -703, -704
AWAY = (-900, -901)
"""The master cannot be reached, or does not answer."""
STEP = 512
"""Objects in one call of the client."""
USAGE_S = 2.0
REACH_S = 2.0
WORKERS = 16
OPERATIONS = ("lookup", "retrieve", "store", "delete")


class MooncakeAdapter(Adapter):
    """Objects in a pool; see the module. `connect` makes the client when it is first needed; `where` is the master."""

    type = "mooncake_store"
    capabilities = Capabilities(durable=True)

    def __init__(
        self,
        name: str,
        connect: Callable[[], Any],
        *,
        where: str,
        prefix: str = "kvd/",
        zero_copy_anywhere: bool = True,
        workers: Mapping[str, int] | None = None,
        master: tuple[str, int] | None = None,
        metrics: tuple[str, int] | None = None,
        max_value_bytes: int = 1 << 30,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        super().__init__(name)
        self.where = where
        self._connect = connect
        self._prefix = prefix
        self._anywhere = zero_copy_anywhere
        self._max_value = max_value_bytes
        self._clock_ns = clock_ns
        self._gates = {word: threading.BoundedSemaphore((workers or {}).get(word, WORKERS)) for word in OPERATIONS}
        self._lock = threading.Lock()  # the usage: asked for on the event loop, so never held for long
        self._connecting = threading.Lock()
        self._client: Any = None
        self._closing = False
        self._master = master
        self._doubt = False
        """The last call found the master away: somebody has to listen there before the client is let at it again."""
        self._local = threading.local()
        self._rooms: list[memoryview] = []  # what the device knows must outlive the threads that made it
        self._arena = range(0)  # addresses that the device knows
        self._arena_view: memoryview | None = None
        self._metrics = metrics
        self._usage = Usage(known=False)
        self._asked = float("-inf")

    # ---- the client --------------------------------------------------------------------------------------------------

    def attach(self, memory: memoryview) -> None:
        self._arena_view = memory

    def open(self) -> None:
        """Load the library, and connect; a master that is away is no error."""
        load_library(self.name)
        try:
            self._pool()
            if self._metrics is not None:
                self._read_metrics()
        except AdapterError as error:
            log.warning("%s; serving without it until it answers", error.message)

    def close(self, deadline_s: float = 5.0) -> None:
        self._closing = True
        with self._connecting:
            client, self._client = self._client, None
        if client is None:
            return
        try:
            self._reach()
        except OSError:
            # It would ask the master for its leave, again and again. What ends with the process needs no leave.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))
            return
        for room in self._rooms:
            client.unregister_buffer(_address(room))
        client.close()

    def _reach(self) -> None:
        """Raises OSError where nobody listens at the master's address."""
        if self._master is not None:
            socket.create_connection(self._master, timeout=REACH_S).close()

    def _pool(self) -> Any:
        """The client, connected. Raises AdapterError while the master is away."""
        with self._connecting:
            if self._client is None:
                if self._closing:
                    raise AdapterError(f"{self.name}: closed")
                try:
                    self._client = self._connect()
                except OSError as error:
                    raise self._unreachable(error) from None
                self._register(self._client)
            client, doubt = self._client, self._doubt
        if doubt:
            try:
                self._reach()
            except OSError as error:
                raise self._unreachable(error) from None
            self._doubt = False
        return client

    def _unreachable(self, error: OSError) -> AdapterError:
        return AdapterError(f"{self.name}: cannot reach the master at {self.where}: {error.strerror or error}")

    def _register(self, client: Any) -> None:
        """Tell the device of the arena; where any memory will do (TCP) that would only cost time."""
        if not self._anywhere and self._arena_view is not None:
            start = _address(self._arena_view)
            if code := client.register_buffer(start, len(self._arena_view)):
                raise AdapterError(f"{self.name}: cannot register the arena with the device (code {code})")
            self._arena = range(start, start + len(self._arena_view))

    def _heads(self, client: Any) -> tuple[memoryview, int]:
        """This thread's room for STEP envelopes, and its address; registered, since ranges are read only into such memory."""
        if getattr(self._local, "client", None) is not client:
            if not hasattr(self._local, "heads"):
                self._local.heads = memoryview(mmap.mmap(-1, STEP * envelope.SIZE))
                self._rooms.append(self._local.heads)
            if code := client.register_buffer(_address(self._local.heads), len(self._local.heads)):
                raise AdapterError(f"{self.name}: cannot register memory with the device (code {code})")
            self._local.client = client
        return self._local.heads, _address(self._local.heads)

    def _in_place(self, data: memoryview) -> bool:
        """Whether the device may read and write this memory itself."""
        return self._anywhere or not len(data) or _address(data) in self._arena

    def _away(self, what: str, code: int) -> AdapterError:
        self.counters.io_errors += 1
        self._doubt = code in AWAY
        why = {-900: "it is away", -901: "it does not answer"}.get(code, f"code {code}")
        return AdapterError(f"{self.name}: cannot {what} at {self.where}: {why}")

    # ---- values ------------------------------------------------------------------------------------------------------

    def _key(self, identity: Identity) -> str:
        return f"{self._prefix}{identity[:NAMESPACE_BYTES].hex()}/{identity[NAMESPACE_BYTES:].hex()}"

    def store(self, items: Sequence[Item]) -> list[Stored]:
        results: list[Stored] = []
        with self._gates["store"]:
            for start in range(0, len(items), STEP):
                results += self._store(items[start : start + STEP])
        self.counters.count_stores(items, results)
        return results

    def _store(self, items: Sequence[Item]) -> list[Stored]:
        now = self._clock_ns()
        results = [self._refusal(item, now) for item in items]
        todo = [i for i, refused in enumerate(results) if refused is None]
        if todo:
            codes = self._put([items[i] for i in todo])
            if all(code in AWAY for code in codes):
                raise self._away("store", codes[0])
            if all(code == NO_ROOM for code in codes):
                raise AdapterFull(f"{self.name}: the pool at {self.where} has no room, or no host gives it memory")
            for i, code in zip(todo, codes, strict=True):
                results[i] = Stored(True) if code == 0 else Stored(False, "full" if code == NO_ROOM else "io_error")
                self.counters.io_errors += code not in (0, NO_ROOM)
        return [result or Stored(False, "io_error") for result in results]

    def _refusal(self, item: Item, now: int) -> Stored | None:
        if expired(item.expires_ns, now):
            return Stored(False, "expired")
        return self.too_large(item, self._max_value, "raise max_value_bytes") if len(item.data) > self._max_value else None

    def _put(self, items: Sequence[Item]) -> list[int]:
        """Put each item in the place of what is there; the client's codes."""
        client = self._pool()
        keys = [self._key(item.identity) for item in items]
        there = client.batch_is_exist(keys)
        if all(answer in AWAY for answer in there):
            return list(there)
        if old := [key for key, answer in zip(keys, there, strict=True) if answer == 1]:
            client.batch_remove(old, True)
        heads, address = self._heads(client)
        codes = [0] * len(items)
        pointers, sizes, direct = [], [], []
        for i, item in enumerate(items):
            at = i * envelope.SIZE
            heads[at : at + envelope.SIZE] = envelope.seal(item)
            if self._in_place(item.data):
                direct.append(i)
                parts = [(address + at, envelope.SIZE), (_address(item.data), len(item.data))]
                pointers.append([start for start, length in parts if length])
                sizes.append([length for _, length in parts if length])
            else:
                codes[i] = client.put_parts(keys[i], heads[at : at + envelope.SIZE], item.data)
        if direct:
            for i, code in zip(
                direct, client.batch_put_from_multi_buffers([keys[i] for i in direct], pointers, sizes), strict=True
            ):
                codes[i] = code
        return codes

    def lookup(self, identities: Sequence[Identity]) -> list[Hit | None]:
        found: list[Hit | None] = []
        with self._gates["lookup"]:
            for start in range(0, len(identities), STEP):
                found += self._lookup(identities[start : start + STEP])
        return found

    def _lookup(self, identities: Sequence[Identity]) -> list[Hit | None]:
        client = self._pool()
        answers = client.batch_is_exist([self._key(identity) for identity in identities])
        if all(answer in AWAY for answer in answers):
            raise self._away("look up", answers[0])
        held = [i for i, answer in enumerate(answers) if answer == 1]
        found: list[Hit | None] = [None] * len(identities)
        now = self._clock_ns()
        heads, damaged = self._envelopes([identities[i] for i in held])
        for i, head in zip(held, heads, strict=True):
            if head is not None and not expired(head.expires_ns, now):
                found[i] = head.hit
        self.found_damaged(damaged)
        return found

    def _envelopes(self, identities: Sequence[Identity]) -> tuple[list[envelope.Head | None], list[Identity]]:
        """What the objects' first bytes say, None where that is nothing; and whose say something else than they should."""
        if not identities:
            return [], []
        client = self._pool()
        heads, address = self._heads(client)
        keys = [self._key(identity) for identity in identities]
        places = [[i * envelope.SIZE] for i in range(len(keys))]
        (answers,) = client.get_into_ranges([address], [keys], [places], [[[0]] * len(keys)], [[[envelope.SIZE]] * len(keys)])
        codes = [code for (code,) in answers]
        if all(code in AWAY for code in codes):  # it told us that they exist, and then nothing more
            raise self._away("look up", codes[0])
        found: list[envelope.Head | None] = []
        damaged: list[Identity] = []
        for (at,), (code,), identity in zip(places, answers, identities, strict=True):
            head = envelope.open_head(heads[at : at + envelope.SIZE]) if code == envelope.SIZE else None
            found.append(head if head is not None and head.identity == identity else None)
            if code == envelope.SIZE and found[-1] is None:
                damaged.append(identity)
        return found, damaged

    def load(self, wants: Sequence[Want]) -> list[Loaded]:
        results: list[Loaded] = []
        with self._gates["retrieve"]:
            for start in range(0, len(wants), STEP):
                results += self._load(wants[start : start + STEP])
        damaged = [want.identity for want, result in zip(wants, results, strict=True) if result is Loaded.CORRUPT]
        if damaged:
            self.delete(damaged)
        self.counters.count_loads(wants, results)
        return results

    def _load(self, wants: Sequence[Want]) -> list[Loaded]:
        codes, results = self._get(wants)
        if codes and all(code in AWAY for code in codes):
            raise self._away("load", codes[0])
        for i, result in enumerate(results):
            if result is Loaded.CORRUPT:  # replaced while we read, perhaps
                (code,), (results[i],) = self._get(wants[i : i + 1])
                codes[i] = code
            if codes[i] < 0 and codes[i] != NOT_FOUND:
                results[i] = self._why(wants[i], codes[i])
        return results

    def _get(self, wants: Sequence[Want]) -> tuple[list[int], list[Loaded]]:
        """Read each object: the client's codes (bytes read, or below 0), and what was found where something was read."""
        client = self._pool()
        heads, address = self._heads(client)
        codes = [0] * len(wants)
        keys, pointers, sizes, direct = [], [], [], []
        for i, want in enumerate(wants):
            at = i * envelope.SIZE
            if self._in_place(want.into):
                direct.append(i)
                keys.append(self._key(want.identity))
                parts = [(address + at, envelope.SIZE), (_address(want.into), len(want.into))]
                pointers.append([start for start, length in parts if length])
                sizes.append([length for _, length in parts if length])
            else:
                codes[i] = _copy(client, self._key(want.identity), heads[at : at + envelope.SIZE], want.into)
        if direct:
            for i, code in zip(direct, client.batch_get_into_multi_buffers(keys, pointers, sizes), strict=True):
                codes[i] = code
        now = self._clock_ns()
        results = []
        for i, want in enumerate(wants):
            head = envelope.open_head(heads[i * envelope.SIZE : (i + 1) * envelope.SIZE]) if codes[i] > 0 else None
            whole = codes[i] == envelope.SIZE + len(want.into)
            if codes[i] < 0:
                results.append(Loaded.MISS)
            elif head is None or not whole or head.identity != want.identity or not envelope.intact(head, want.into):
                results.append(Loaded.CORRUPT)
            else:
                results.append(Loaded.MISS if expired(head.expires_ns, now) else Loaded.OK)
        return codes, results

    def _why(self, want: Want, code: int) -> Loaded:
        """Why an object that is known could not be read: it has another size, or its host is away."""
        length = self._pool().get_size(self._key(want.identity))
        if length < 0:
            return Loaded.ERROR if length in AWAY else Loaded.MISS
        if length != envelope.SIZE + len(want.into):
            (head,), _ = self._envelopes([want.identity])
            return Loaded.MISS if head is not None and length == envelope.SIZE + head.length else Loaded.CORRUPT
        if code == TOO_SMALL:  # it had another size a moment ago
            return Loaded.MISS
        # The master lives and the host with the bytes does not: one host of many, so the pool is not to blame.
        self.counters.io_errors += 1
        return Loaded.MISS

    def delete(self, identities: Sequence[Identity]) -> int:
        if not identities:
            return 0
        with self._gates["delete"]:
            codes = self._pool().batch_remove([self._key(identity) for identity in identities], True)
        # What somebody is just putting is not there yet: theirs comes after this.
        if bad := next((code for code in codes if code not in (0, NOT_FOUND, NOT_READY)), None):
            raise self._away("delete", bad)
        return sum(code == 0 for code in codes)

    def clear(self, namespace: bytes | None) -> int:
        """Everything below the prefix, or below the namespace in it, by a pattern that the master matches."""
        inside = re.escape(self._prefix) + (namespace.hex() + "/" if namespace is not None else "[0-9a-f]{64}/")
        gone = self._pool().remove_by_regex(f"^{inside}[0-9a-f]{{64}}$", True)
        if gone < 0:
            raise self._away("clear", int(gone))
        return int(gone)

    # ---- state -------------------------------------------------------------------------------------------------------

    def _refresh(self) -> None:
        """Ask the master for the pool's numbers where they are old, without waiting for them."""
        now = time.monotonic()
        with self._lock:
            if self._metrics is None or self._closing or now - self._asked < USAGE_S:
                return
            self._asked = now
        threading.Thread(target=self._read_metrics, name=f"kvd-{self.name}-usage", daemon=True).start()

    def _read_metrics(self) -> None:
        assert self._metrics is not None
        try:
            with contextlib.closing(http.client.HTTPConnection(*self._metrics, timeout=USAGE_S)) as link:
                link.request("GET", "/metrics")
                usage = read_metrics(link.getresponse().read().decode(errors="replace"))
        except (OSError, http.client.HTTPException) as error:
            log.debug("%s: no numbers from the master: %s", self.name, error)
            return
        with self._lock:
            self._usage = usage

    def usage(self) -> Usage:
        """What the whole pool holds, where the master's numbers can be had; else nothing is known."""
        self._refresh()
        with self._lock:
            return Usage(**vars(self._usage))

    def flush(self) -> Durability:
        """The pool is memory."""
        return Durability.NONE

    def describe(self) -> dict[str, object]:
        return {"master": self.where, "prefix": self._prefix}


def read_metrics(text: str) -> Usage:
    """The pool's size and content, from the master's Prometheus page."""
    values = {}
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name in ("master_allocated_bytes", "master_total_capacity_bytes", "master_key_count"):
            values[name] = int(float(value))
    keys = ("master_allocated_bytes", "master_total_capacity_bytes", "master_key_count")
    used, limit, entries = (values.get(key, 0) for key in keys)
    return Usage(used, limit, entries)


def _address(data: memoryview) -> int:
    """Where this memory lies."""
    return int(np.frombuffer(data, np.uint8).ctypes.data) if len(data) else 0


def _copy(client: Any, key: str, head: memoryview, into: memoryview) -> int:
    """Read an object through the client's own buffer: bytes read, or a code below 0."""
    length = client.get_size(key)
    if length < 0:
        return int(length)
    if length != len(head) + len(into):
        return TOO_SMALL
    handle = client.get_buffer(key)
    if handle is None or handle.size() != length:
        return NOT_FOUND
    raw = memoryview(handle).cast("B")
    np.copyto(np.frombuffer(head, np.uint8), np.frombuffer(raw[: len(head)], np.uint8))
    if len(into):
        np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(raw[len(head) :], np.uint8))
    return int(length)


# ---- configuration -----------------------------------------------------------------------------------------------------


def _endpoint(value: Any) -> tuple[str, int]:
    """host:port."""
    host, _, port = text(value).rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise UsageError(f"not host:port: {value!r}")
    return host, int(port)


def _make(name: str, values: dict[str, Any]) -> Adapter:
    environment(values["timeout"], values["local_hostname"])
    return MooncakeAdapter(
        name,
        connector(name, values),
        where="{}:{}".format(*values["master_server_address"]),
        prefix=values["prefix"],
        zero_copy_anywhere=values["protocol"] == "tcp",
        master=values["master_server_address"],
        metrics=values["master_metrics_address"],
        workers=dict.fromkeys(OPERATIONS, values["num_workers"]) | values["per_op_workers"],
        max_value_bytes=values["max_value_bytes"],
    )


def _any_size(value: Any) -> int:
    return int(value) if value in (0, "0") else size()(value)


def _workers(value: Any) -> dict[str, int]:
    made = mapping(value)
    if strange := next((name for name in made if name not in OPERATIONS), None):
        raise UsageError(f"unknown operation {strange!r}", hint=nearest(strange, list(OPERATIONS)))
    return {name: whole(1, 256)(number) for name, number in made.items()}


def _words(value: Any) -> str:
    """A text that may be empty."""
    return text(value) if value else ""


KIND = Kind(
    "mooncake_store",
    "Mooncake Store: many hosts, one pool of memory",
    "kvd.tiers.adapters.mooncake:MooncakeAdapter",
    _make,
    (
        Field("master_server_address", _endpoint, required=True, help="host:port of mooncake_master"),
        Field("local_hostname", text, required=True, help="this host's name or address, where the others reach it"),
        Field("metadata_server", text, "P2PHANDSHAKE", help="http://HOST:PORT/metadata, etcd or Redis; none: P2PHANDSHAKE"),
        Field("protocol", word("tcp", "rdma"), "tcp", help="tcp, or rdma"),
        Field("device_name", _words, "", help="RDMA devices, with commas; found by itself unless given"),
        Field("global_segment_size", _any_size, 0, help="memory of this host given to the pool, on top of the arena; 0: none"),
        Field("local_buffer_size", size(1 << 20), 16 << 20, help="the client's buffer for what does not lie in the arena"),
        Field("master_metrics_address", _endpoint, help="host:port of the master's metrics: then usage is known"),
        Field("num_workers", whole(1, 256), WORKERS, help="calls of each kind at once"),
        Field("per_op_workers", _workers, {}, help="the same for lookup, retrieve, store or delete, as an object"),
        Field("prefix", text, "kvd/", help="what all keys begin with"),
        Field("timeout", seconds(0.1, 600), 5.0, help="how long the master, or a transfer without progress, is waited for"),
        Field("max_value_bytes", size(), 1 << 30, help="larger values are not stored"),
    ),
    library="mooncake",
    extra="mooncake",
)
__all__ = ["KIND", "MooncakeAdapter"]
