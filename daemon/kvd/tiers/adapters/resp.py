"""Redis or Valkey, one server or a cluster, over RESP.

<prefix><64 hex of namespace>:<64 hex of key>   an envelope and the value; a value's expiry is also the key's (PX)

There is no index here: what other daemons store and delete counts at once. Small values share a pipeline. What is loaded is asked
for up to the byte behind its end (GETRANGE), so nothing that stands in its place can take more memory than the value would.
Room is the server's business (`maxmemory`, `maxmemory-policy`): when it refuses a write for want of memory, the value is not
stored. A server that is away, at start too, is an adapter that fails: its breaker opens, and it is asked again later.
"""

import contextlib
import ipaddress
import logging
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvd.store.identity import IDENTITY_BYTES, NAMESPACE_BYTES, Identity
from kvd.store.retention import NEVER, expired
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
from kvd.tiers.adapters.kind import Field, Kind, gib, path, seconds, size, switch, text, whole
from kvtools.errors import UsageError

if TYPE_CHECKING:
    import redis

log = logging.getLogger("kvd.tiers")

USAGE_S = 2.0
"""How long the server's numbers are good for; they are asked for beside other work, never by who wants to know them."""
SCAN = 1000
RUN_BYTES = 256 << 10
"""A pipeline carries this many bytes of values: beyond it, answers only pile up in the client."""
THREADS = 32
MAX_VALUE = 512 << 20
"""What a server takes as one string (proto-max-bulk-len)."""


class RespAdapter(Adapter):
    """Values on a server; see the module. `connect` makes the client, when it is first needed."""

    type = "resp"
    capabilities = Capabilities(enumerate=True, durable=True)

    def __init__(
        self,
        name: str,
        connect: "Callable[[], redis.Redis]",
        *,
        where: str,
        prefix: str = "kvd:",
        max_bytes: int = 0,
        max_value_bytes: int = MAX_VALUE,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        super().__init__(name)
        self.where = where
        self._connect = connect
        self._prefix = prefix.encode()
        self._max_bytes = max_bytes
        self._max_value = min(max_value_bytes, MAX_VALUE - envelope.SIZE)
        self._clock_ns = clock_ns
        self._client: redis.Redis | None = None
        self._lock = threading.Lock()  # the usage: asked for on the event loop, so never held for long
        self._connecting = threading.Lock()
        self._usage = Usage(0, max_bytes, 0)
        self._asked = float("-inf")
        self._moved = False
        """Values came or went since the numbers were asked for."""

    # ---- the server --------------------------------------------------------------------------------------------------

    def open(self) -> None:
        try:
            self._refresh(force=True)
        except AdapterError as error:
            log.warning("%s; serving without it until it answers", error.message)

    def close(self, deadline_s: float = 5.0) -> None:
        with self._lock:
            self._moved = False
        with self._connecting:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _call(self, work: "Callable[[redis.Redis], Any]", what: str) -> Any:
        """`work(client)`. Raises AdapterError when the server is away, slow, or refuses us."""
        import redis

        try:
            with self._connecting:
                if self._client is None:
                    self._client = self._connect()
                client = self._client
            return work(client)
        except (redis.RedisError, OSError) as error:
            self.counters.io_errors += 1
            raise AdapterError(f"{self.name}: cannot {what} at {self.where}: {_one_line(error)}") from None

    def _pipeline(self, add: "Callable[[redis.client.Pipeline], None]", what: str) -> list[Any]:
        """Answers of the commands that `add` queued, in order; an error of one is in its place."""

        def work(client: "redis.Redis") -> list[Any]:
            with client.pipeline(transaction=False) as pipeline:
                add(pipeline)
                return list(pipeline.execute(raise_on_error=False))

        answers = self._call(work, what)
        self._refresh(moved=True)
        return list(answers)

    def _refresh(self, *, force: bool = False, moved: bool = False) -> None:
        """Ask for the server's numbers where they are old. One thread at a time; the others go on without.

        `moved`: values come and go, so what is asked now is out of date again soon.
        """
        now = time.monotonic()
        with self._lock:
            self._moved |= moved
            if not force and now - self._asked < USAGE_S:
                return
            self._asked = now
            self._moved = moved

        def work(client: "redis.Redis") -> tuple[int, int, int]:
            # A cluster answers with one row a node, where all of them are named.
            nodes = {"target_nodes": "primaries"} if hasattr(client, "get_primaries") else {}
            rows = _rows(client.info("memory", **nodes))
            used = sum(int(row.get("used_memory", 0)) for row in rows)
            limit = sum(int(row.get("maxmemory", 0)) for row in rows)
            held = client.dbsize(**nodes)
            return used, limit, sum(held.values()) if isinstance(held, dict) else int(held)

        used, limit, entries = self._call(work, "ask for its memory")
        with self._lock:
            self._usage = Usage(used, self._max_bytes or limit, entries)

    # ---- values ------------------------------------------------------------------------------------------------------

    def _key(self, identity: Identity) -> bytes:
        return b"%b%b:%b" % (
            self._prefix,
            identity[:NAMESPACE_BYTES].hex().encode(),
            identity[NAMESPACE_BYTES:].hex().encode(),
        )

    def _identity(self, key: bytes) -> Identity | None:
        """The identity in a key; None where the key is none of ours."""
        try:
            identity = bytes.fromhex(key.removeprefix(self._prefix).replace(b":", b"").decode())
        except ValueError:
            return None
        return identity if len(identity) == IDENTITY_BYTES and self._key(identity) == key else None

    def store(self, items: Sequence[Item]) -> list[Stored]:
        now = self._clock_ns()
        results = [self._refusal(item, now) for item in items]
        todo = [i for i, refused in enumerate(results) if refused is None]

        def add(pipeline: "redis.client.Pipeline", some: list[int]) -> None:
            for i in some:
                item = items[i]
                # Redis counts whole milliseconds: rounded up, and the envelope tells the rest.
                px = None if item.expires_ns == NEVER else max(1, -((now - item.expires_ns) // 1_000_000))
                pipeline.set(self._key(item.identity), b"".join((envelope.seal(item), item.data)), px=px)

        for some in _runs(todo, [len(item.data) for item in items]):
            for i, answer in zip(some, self._pipeline(partial(add, some=some), "store"), strict=True):
                results[i] = self._stored(answer)
        made = [result or Stored(False, "io_error") for result in results]
        for item, result in zip(items, made, strict=True):
            if result.ok:
                self.counters.stores += 1
                self.counters.store_bytes += len(item.data)
            else:
                self.counters.store_failures += 1
        return made

    def _refusal(self, item: Item, now: int) -> Stored | None:
        if expired(item.expires_ns, now):
            return Stored(False, "expired")
        if len(item.data) > self._max_value:
            return self.too_large(item, self._max_value, "raise max_value_bytes")
        if self._max_bytes and self._usage.bytes_used + len(item.data) > self._max_bytes:
            return Stored(False, "full")
        return None

    def _stored(self, answer: Any) -> Stored:
        if answer is True:
            return Stored(True, "", Durability.NONE)
        if _refused(answer, "OOM"):
            return Stored(False, "full")
        self.counters.io_errors += 1
        log.warning("%s: %s refused a value: %s", self.name, self.where, _one_line(answer))
        return Stored(False, "io_error")

    def lookup(self, identities: Sequence[Identity]) -> list[Hit | None]:
        found, strange = self._look(identities)
        if strange:  # or replaced between the two questions: then it is what it should be now
            again, damaged = self._look(strange)
            now = dict(zip(strange, again, strict=True))
            found = [hit or now.get(identity) for identity, hit in zip(identities, found, strict=True)]
            self.found_damaged(damaged)
        return found

    def _look(self, identities: Sequence[Identity]) -> tuple[list[Hit | None], list[Identity]]:
        """What is there, and whose value is there and is not what it should be. Raises AdapterError."""

        def add(pipeline: "redis.client.Pipeline") -> None:
            for identity in identities:
                key = self._key(identity)
                pipeline.getrange(key, 0, envelope.SIZE - 1)
                pipeline.strlen(key)

        answers = self._pipeline(add, "look up") if identities else []
        now = self._clock_ns()
        found: list[Hit | None] = []
        strange: list[Identity] = []
        for i, identity in enumerate(identities):
            raw, length = answers[2 * i : 2 * i + 2]
            head = envelope.open_head(raw) if isinstance(raw, bytes) else None
            fits = head is not None and head.identity == identity and length == envelope.SIZE + head.length
            if not fits and (raw or length) and (isinstance(raw, bytes) or _refused(raw, "WRONGTYPE")):
                strange.append(identity)
            found.append(head.hit if fits and head is not None and not expired(head.expires_ns, now) else None)
        return found, strange

    def load(self, wants: Sequence[Want]) -> list[Loaded]:
        def add(pipeline: "redis.client.Pipeline", some: list[int]) -> None:
            for i in some:
                pipeline.getrange(self._key(wants[i].identity), 0, envelope.SIZE + len(wants[i].into))

        results: list[Loaded] = []
        for some in _runs(range(len(wants)), [len(want.into) for want in wants]):
            answers = self._pipeline(partial(add, some=some), "load")
            results += [self._taken(wants[i], answer) for i, answer in zip(some, answers, strict=True)]
        damaged = [want.identity for want, result in zip(wants, results, strict=True) if result is Loaded.CORRUPT]
        if damaged:
            self._remove(damaged)
        counters = self.counters
        for want, result in zip(wants, results, strict=True):
            if result is Loaded.OK:
                counters.hits += 1
                counters.load_bytes += len(want.into)
            elif result is Loaded.MISS:
                counters.misses += 1
            elif result is Loaded.CORRUPT:
                counters.corruptions += 1
            else:
                counters.io_errors += 1
        return results

    def _taken(self, want: Want, answer: Any) -> Loaded:
        """Put what came into the buffer, if it is what was asked for."""
        if _refused(answer, "WRONGTYPE"):
            return Loaded.CORRUPT
        if not isinstance(answer, bytes):
            return Loaded.ERROR
        if not answer:
            # No key at all, or an empty one: a miss, and whatever it was, a store replaces it.
            return Loaded.MISS
        head = envelope.open_head(answer)
        if head is None or head.identity != want.identity:
            return Loaded.CORRUPT
        if head.length != len(want.into) or expired(head.expires_ns, self._clock_ns()):
            return Loaded.MISS
        data = memoryview(answer)[envelope.SIZE :]
        if not envelope.intact(head, data):
            return Loaded.CORRUPT
        envelope.copy(want.into, data)
        return Loaded.OK

    def delete(self, identities: Sequence[Identity]) -> int:
        return self._remove(identities) if identities else 0

    def _remove(self, identities: Sequence[Identity]) -> int:
        def add(pipeline: "redis.client.Pipeline") -> None:
            for identity in identities:
                pipeline.unlink(self._key(identity))

        answers = self._pipeline(add, "delete")
        if wrong := next((answer for answer in answers if not isinstance(answer, int)), None):
            raise AdapterError(f"{self.name}: {self.where} does not delete: {_one_line(wrong)}")
        return sum(answers)

    def enumerate(self) -> Iterator[tuple[Identity, Hit]]:
        yield from self._held(self.identities(None))

    def identities(self, namespace: bytes | None) -> Iterator[Identity]:
        """By their names alone: what is damaged lies there too."""
        keys = self._call(lambda client: iter(client.scan_iter(_glob(self._prefix) + b"*", count=SCAN)), "list")
        more = partial(next, keys, None)
        names = iter(lambda: self._call(lambda client: more(), "list"), None)  # each step may be a question to the server
        found = (identity for key in names if (identity := self._identity(key)) is not None)
        return (identity for identity in found if namespace is None or identity[:NAMESPACE_BYTES] == namespace)

    def usage(self) -> Usage:
        """The server's memory and keys: all of them, for it knows no others. Asked for anew, beside this, where they are old."""
        with self._lock:
            late = self._moved and time.monotonic() - self._asked >= USAGE_S
            if late:
                self._moved = False
            usage = Usage(**vars(self._usage))
        if late:
            threading.Thread(target=self._refresh_quietly, name=f"kvd-{self.name}-usage", daemon=True).start()
        return usage

    def _refresh_quietly(self) -> None:
        with contextlib.suppress(AdapterError):  # a server that is away is noticed by what it is for
            self._refresh()

    def describe(self) -> dict[str, object]:
        return {"server": self.where, "prefix": self._prefix.decode()}


def _runs(numbers: Iterable[int], sizes: Sequence[int]) -> Iterator[list[int]]:
    """The numbers in runs of at most RUN_BYTES: small values share a round trip, and large ones gain nothing by it."""
    run: list[int] = []
    total = 0
    for i in numbers:
        if run and total + sizes[i] > RUN_BYTES:
            yield run
            run, total = [], 0
        run.append(i)
        total += sizes[i]
    if run:
        yield run


def _rows(info: dict[str, Any]) -> list[dict[str, Any]]:
    """INFO's answer: of one server, or of each node of a cluster."""
    nodes = [row for row in info.values() if isinstance(row, dict) and "used_memory" in row]
    return nodes or [info]


def _glob(literal: bytes) -> bytes:
    """A pattern that matches exactly this."""
    return b"".join(b"\\" + bytes([c]) if c in b"*?[]\\^" else bytes([c]) for c in literal)


def _refused(answer: Any, code: str) -> bool:
    """Whether the answer is this error; the client takes some codes off the text and makes a class of them."""
    words = {"OutOfMemoryError": "OOM"}
    return isinstance(answer, Exception) and (str(answer).startswith(code) or words.get(type(answer).__name__) == code)


def _one_line(error: Any) -> str:
    return " ".join(str(error).split()) or type(error).__name__


# ---- configuration -----------------------------------------------------------------------------------------------------


def _connector(values: dict[str, Any]) -> "Callable[[], redis.Redis]":
    """Makes a client for the server, or for the cluster that it is part of. Raises redis.RedisError when it is away."""

    def connect() -> "redis.Redis":
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        ca: Path | None = values["tls_ca"]
        options: dict[str, Any] = {name: values[name] for name in ("host", "port", "username", "password")}
        options |= {"socket_timeout": values["timeout"], "socket_connect_timeout": values["timeout"]}
        certificates = {"ssl_ca_certs": str(ca)} if ca else {}
        # One try more: a connection that lay idle may have been closed by the other side.
        pool = redis.BlockingConnectionPool(
            max_connections=values["num_workers"],
            timeout=values["timeout"],
            connection_class=redis.SSLConnection if values["tls"] else redis.Connection,
            db=values["db"],
            retry=Retry(NoBackoff(), 1),
            **options,
            **(certificates if values["tls"] else {}),
        )
        client = redis.Redis.from_pool(pool)
        try:
            if not client.info("cluster").get("cluster_enabled"):
                return client
        except redis.RedisError:
            client.close()
            raise
        client.close()
        # A cluster's pools do not wait for a free connection: there must be one for every thread that a tier has.
        most = max(values["num_workers"], THREADS)
        return redis.RedisCluster(**options, ssl=values["tls"], **certificates, max_connections=most)

    return connect


def _host(value: Any) -> str:
    """A name or an address; its port is a field of its own."""
    given = text(value)
    named = given.removeprefix("[").removesuffix("]")
    if "/" in given or any(character.isspace() for character in given) or (":" in named and not _is_address(named)):
        raise UsageError(f"not a host: {given!r}", hint="a name or an address alone: its port goes into the field port")
    return named


def _is_address(given: str) -> bool:
    try:
        ipaddress.ip_address(given)
    except ValueError:
        return False
    return True


def _check_tls(name: str, values: dict[str, Any]) -> None:
    """AdapterConfigError where the file of certificates does nothing, or cannot be read: later it would only be a dead tier."""
    ca: Path | None = values["tls_ca"]
    if ca is None:
        return
    if not values["tls"]:
        raise AdapterConfigError(
            f"adapter {name} (resp): field 'tls_ca' without tls: nothing would be encrypted",
            hint='add "tls": true, or leave it out',
        )
    try:
        ssl.create_default_context(cafile=str(ca))
    except (OSError, ValueError) as error:  # SSLError is an OSError
        why = error.strerror if isinstance(error, OSError) and not isinstance(error, ssl.SSLError) else "no certificates in PEM"
        raise AdapterConfigError(f"adapter {name} (resp): field 'tls_ca': {ca}: {why}") from None


def _make(name: str, values: dict[str, Any]) -> Adapter:
    _check_tls(name, values)
    return RespAdapter(
        name,
        _connector(values),
        where=f"{values['host']}:{values['port']}",
        prefix=values["prefix"],
        max_bytes=values["max_capacity_gb"],
        max_value_bytes=values["max_value_bytes"],
    )


KIND = Kind(
    "resp",
    "Redis or Valkey, one server or a cluster",
    "kvd.tiers.adapters.resp:RespAdapter",
    _make,
    (
        Field("host", _host, required=True, help="name or address of the server, or of any node of the cluster"),
        Field("port", whole(1, 65535), 6379, help="its port"),
        Field("username", text, help="user of its access list"),
        Field("password", str, secret=True, help="password: env:NAME, file:PATH, or the text"),
        Field("tls", switch, False, help="encrypt, and check the server's certificate"),
        Field("tls_ca", path, help="file of certificates to check it against; the system's unless given"),
        Field("db", whole(0, 1 << 20), 0, help="number of the database; a cluster has only 0"),
        Field("prefix", text, "kvd:", help="what all keys begin with"),
        Field("num_workers", whole(1, 256), 16, help="connections at most"),
        Field("timeout", seconds(0.01, 600), 5.0, help="how long the server may take to answer"),
        Field("max_capacity_gb", gib(), 0, help="GiB of the server's memory above which nothing is stored; 0: its own limit"),
        Field("max_value_bytes", size(), 256 << 20, help="larger values are not stored"),
    ),
    library="redis",
    extra="redis",
)
