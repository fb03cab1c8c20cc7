"""Any S3: AWS, MinIO, Ceph and the like, through obstore.

<bucket>/<prefix>v1/<64 hex of namespace>/<64 hex of key>   an envelope and the value

There is no index of what is where: what other daemons store and delete counts at once, and a look-up reads the envelope.
What is loaded is asked for up to the byte behind its end, and lengths and checksums are compared before one byte reaches the
arena. The objects of a batch are moved side by side by `s3_num_io_threads` threads.

With `max_capacity_gb` the tier keeps a ledger of what it holds, from a listing when it is opened (oldest first) and of what
it has stored and loaded since; so usage is right from the start and the least recently used goes when room is needed. What
other daemons store meanwhile is not in it until the next start: give each a prefix of its own, or let one of them evict.
Without a limit only bytes and objects are counted, from the same listing, in the background.

A server that is away, at start too, is an adapter that fails: its breaker opens, and it is asked again later.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from kvd.store.identity import IDENTITY_BYTES, NAMESPACE_BYTES, Identity
from kvd.store.retention import Retention, expired
from kvd.tiers.adapters import envelope
from kvd.tiers.adapters.base import Adapter, AdapterError, Capabilities, Durability, Hit, Item, Loaded, Stored, Usage, Want
from kvd.tiers.adapters.kind import Eviction, Field, Kind, gib, seconds, size, switch, text, whole
from kvd.tiers.adapters.ledger import Entry, Ledger

log = logging.getLogger("kvd.tiers")

T = TypeVar("T")
A = TypeVar("A")

FOLDER = "v1/"
"""The format's version is part of every name: another version's objects are not even seen."""
OPEN_S = 2.0
DELETES = 1000
"""Objects that one request may delete."""


class S3Adapter(Adapter):
    """Objects in a bucket; see the module. `connect` makes obstore's store when it is first needed."""

    type = "s3"
    capabilities = Capabilities(evict=True, enumerate=True, durable=True)

    def __init__(
        self,
        name: str,
        connect: Callable[[], Any],
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
        self._connect = connect
        self._root = prefix + FOLDER
        self._max_bytes = max_bytes
        self._max_value = max_value_bytes
        self.eviction = eviction or Eviction()
        self._clock_ns = clock_ns
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=f"kvd-{name}-s3")
        self._lock = threading.Lock()
        self._room = threading.Lock()  # one thread lists or makes room
        self._store_object: Any = None
        self._ledger = Ledger()
        self._usage = Usage(0, max_bytes, 0)
        self._listed = False
        self._closing = False

    # ---- the server --------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Start listing what is there, and wait a moment for it: a small bucket is counted from the start.

        A server that is away is no error: what is there is listed later.
        """
        with contextlib.suppress(TimeoutError):
            self._threads.submit(self._list_quietly).result(OPEN_S)

    def close(self, deadline_s: float = 5.0) -> None:
        self._closing = True
        self._threads.shutdown(wait=False, cancel_futures=True)

    @property
    def _bucket(self) -> Any:
        with self._lock:
            if self._store_object is None:
                self._store_object = self._connect()
            return self._store_object

    def _each(self, work: Callable[[A], T], rows: Sequence[A]) -> list[T | Exception]:
        """`work` for each row, side by side; what one raises (OSError, obstore's errors) is its answer."""
        from obstore.exceptions import BaseError

        def one(row: A) -> T | Exception:
            try:
                return work(row)
            except (BaseError, OSError) as error:
                return error

        if len(rows) == 1:
            return [one(rows[0])]
        return list(self._threads.map(one, rows))

    def _failed(self, what: str, error: Exception) -> AdapterError:
        return AdapterError(f"{self.name}: cannot {what} at {self.where}: {_one_line(error)}")

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
            rows = sorted(self._objects())
            with self._lock:
                for _, length, identity in rows:
                    if self._max_bytes:
                        if self._ledger.get(identity, 0) is None:  # stored while we listed: known better already
                            hit = Hit(max(0, length - envelope.SIZE), Retention.LONG)
                            self._ledger.add(identity, Entry(0, length, hit))
                    else:
                        self._usage.bytes_used += length
                        self._usage.entries += 1
            self._listed = True

    def _objects(self) -> Iterator[tuple[float, int, Identity]]:
        """When it was stored, how long it is, whose it is: every object of ours."""
        import obstore
        from obstore.exceptions import BaseError

        try:
            for batch in obstore.list(self._bucket, prefix=self._root):
                if self._closing:
                    return
                for row in batch:
                    identity = self._identity(row["path"])
                    if identity is not None:
                        yield row["last_modified"].timestamp(), row["size"], identity
        except (BaseError, OSError) as error:
            self.counters.io_errors += 1
            raise self._failed("list", error) from None

    def _note_stored(self, item: Item, total: int) -> None:
        with self._lock:
            if self._max_bytes:
                self._ledger.add(item.identity, Entry(0, total, Hit(len(item.data), item.retention, item.expires_ns, item.note)))
            else:  # what it replaced is not known without asking: counted anew at the next start
                self._usage.bytes_used += total
                self._usage.entries += 1

    def _note_gone(self, identity: Identity, total: int) -> None:
        with self._lock:
            if self._max_bytes:
                self._ledger.remove(identity)
            else:
                self._usage.bytes_used = max(0, self._usage.bytes_used - total)
                self._usage.entries = max(0, self._usage.entries - 1)

    def usage(self) -> Usage:
        with self._lock:
            if self._max_bytes:
                return Usage(self._ledger.used, self._max_bytes, len(self._ledger))
            return Usage(**vars(self._usage))

    def enumerate(self) -> Iterator[tuple[Identity, Hit]]:
        block: list[Identity] = []
        for _, _, identity in self._objects():
            block.append(identity)
            if len(block) == DELETES:
                yield from self._found(block)
                block = []
        yield from self._found(block)

    def _found(self, identities: list[Identity]) -> Iterator[tuple[Identity, Hit]]:
        for identity, hit in zip(identities, self.lookup(identities), strict=True):
            if hit is not None:
                yield identity, hit

    # ---- values ------------------------------------------------------------------------------------------------------

    def store(self, items: Sequence[Item]) -> list[Stored]:
        results = [self._refusal(item) for item in items]
        todo = [i for i, refused in enumerate(results) if refused is None]
        if self._max_bytes and todo:
            if not self._listed:
                self._list()
            for i in list(todo):
                if not self._make_room(items[i]):
                    results[i] = Stored(False, "full")
                    todo.remove(i)
        answers = self._each(self._put, [items[i] for i in todo])
        failure: Exception | None = None
        for i, answer in zip(todo, answers, strict=True):
            if isinstance(answer, Exception):
                self.counters.io_errors += 1
                failure = answer
                self._note_gone(items[i].identity, 0 if self._max_bytes else envelope.SIZE + len(items[i].data))
                results[i] = Stored(False, "io_error")
            else:
                results[i] = Stored(True, "", Durability.FSYNC)
        made = [result or Stored(False, "io_error") for result in results]
        for item, result in zip(items, made, strict=True):
            if result.ok:
                self.counters.stores += 1
                self.counters.store_bytes += len(item.data)
            else:
                self.counters.store_failures += 1
        if failure is not None and not any(result.ok for result in made):
            raise self._failed("store", failure)
        return made

    def _refusal(self, item: Item) -> Stored | None:
        if expired(item.expires_ns, self._clock_ns()):
            return Stored(False, "expired")
        total = envelope.SIZE + len(item.data)
        if len(item.data) > self._max_value or (self._max_bytes and total > self._max_bytes):
            return Stored(False, "too_large")
        return None

    def _put(self, item: Item) -> None:
        import obstore

        obstore.put(self._bucket, self._name(item.identity), [envelope.seal(item), item.data], use_multipart=False)
        if not self._max_bytes:
            self._note_stored(item, envelope.SIZE + len(item.data))

    def _make_room(self, item: Item) -> bool:
        """Evict what must go for this value, and note it as held: several threads make room at once."""
        total = envelope.SIZE + len(item.data)
        with self._room:
            now = self._clock_ns()
            victims: list[Identity] = []
            with self._lock:
                before = self._ledger.remove(item.identity)
                left = self.eviction.excess(self._ledger.used, total, self._max_bytes)
                while left > 0 and (victim := self._ledger.victim(now)) is not None:
                    entry = self._ledger.remove(victim)
                    assert entry is not None
                    left -= entry.size
                    victims.append(victim)
                fits = self._ledger.used + total <= self._max_bytes
            if victims:
                self._unlink(victims)
                self.counters.evictions += len(victims)
                self.evicted(victims)
            if fits:
                self._note_stored(item, total)
            elif before is not None:
                self._unlink([item.identity])
            return fits

    def lookup(self, identities: Sequence[Identity]) -> list[Hit | None]:
        now = self._clock_ns()
        answers = self._each(self._head, identities)
        found: list[Hit | None] = []
        failure: Exception | None = None
        for answer in answers:
            if isinstance(answer, FileNotFoundError) or _is_empty(answer):
                answer = None
            if isinstance(answer, Exception):
                failure, answer = answer, None
            found.append(answer.hit if answer is not None and not expired(answer.expires_ns, now) else None)
        if failure is not None:
            self.counters.io_errors += 1
            if not any(found):
                raise self._failed("look up", failure)
        return found

    def _head(self, identity: Identity) -> envelope.Head | None:
        import obstore

        answer = obstore.get(self._bucket, self._name(identity), options={"range": (0, envelope.SIZE)})
        head = envelope.open_head(memoryview(answer.bytes()))
        fits = head is not None and head.identity == identity and answer.meta["size"] == envelope.SIZE + head.length
        return head if fits else None

    def load(self, wants: Sequence[Want]) -> list[Loaded]:
        answers = self._each(self._load, wants)
        results: list[Loaded] = []
        failure: Exception | None = None
        counters = self.counters
        for want, answer in zip(wants, answers, strict=True):
            if isinstance(answer, FileNotFoundError):
                self._note_gone(want.identity, 0)
                answer = Loaded.MISS
            elif _is_empty(answer):
                answer = Loaded.CORRUPT
            elif isinstance(answer, Exception):
                failure, answer = answer, Loaded.ERROR
                counters.io_errors += 1
            if answer is Loaded.OK:
                counters.hits += 1
                counters.load_bytes += len(want.into)
                with self._lock:
                    self._ledger.touch(want.identity)
            counters.misses += answer is Loaded.MISS
            counters.corruptions += answer is Loaded.CORRUPT
            results.append(answer)
        damaged = [want.identity for want, result in zip(wants, results, strict=True) if result is Loaded.CORRUPT]
        if damaged:
            self.delete(damaged)
        if failure is not None and all(result is Loaded.ERROR for result in results):
            raise self._failed("load", failure)
        return results

    def _load(self, want: Want) -> Loaded:
        import obstore

        most = envelope.SIZE + len(want.into) + 1
        answer = obstore.get(self._bucket, self._name(want.identity), options={"range": (0, most)})
        raw = memoryview(answer.bytes())
        head = envelope.open_head(raw)
        if head is None or head.identity != want.identity or answer.meta["size"] != envelope.SIZE + head.length:
            return Loaded.CORRUPT
        if head.length != len(want.into) or expired(head.expires_ns, self._clock_ns()):
            return Loaded.MISS
        data = raw[envelope.SIZE :]
        if not envelope.intact(head, data):
            return Loaded.CORRUPT
        want.into[:] = data
        return Loaded.OK

    def delete(self, identities: Sequence[Identity]) -> int:
        import obstore

        def there(identity: Identity) -> int:
            return int(obstore.head(self._bucket, self._name(identity))["size"])

        sizes = self._each(there, identities)
        held: list[tuple[Identity, int]] = []
        for identity, answer in zip(identities, sizes, strict=True):
            if isinstance(answer, int):
                held.append((identity, answer))
            elif not isinstance(answer, FileNotFoundError):
                self.counters.io_errors += 1
                raise self._failed("delete", answer)
        self._unlink([identity for identity, _ in held])
        for identity, length in held:
            self._note_gone(identity, length)
        return len(held)

    def _unlink(self, identities: Sequence[Identity]) -> None:
        """Delete objects, there or not. Raises AdapterError."""
        import obstore
        from obstore.exceptions import BaseError

        try:
            for start in range(0, len(identities), DELETES):
                obstore.delete(self._bucket, [self._name(identity) for identity in identities[start : start + DELETES]])
        except FileNotFoundError:
            return  # some servers say so where S3 does not
        except (BaseError, OSError) as error:
            self.counters.io_errors += 1
            raise self._failed("delete", error) from None

    def flush(self) -> Durability:
        """What S3 has answered is there."""
        return Durability.FSYNC

    def describe(self) -> dict[str, object]:
        return {"bucket": self.where, "root": self._root}


def _is_empty(answer: Any) -> bool:
    """The server had nothing at byte 0: the object is empty."""
    return isinstance(answer, Exception) and "416 Range Not Satisfiable" in str(answer)


def _one_line(error: Exception) -> str:
    """obstore's errors go on for a page; the first line says it."""
    line = " ".join(str(error).split("\n\n", maxsplit=1)[0].split())
    return line if len(line) <= 300 else line[:297] + "..."


# ---- configuration -----------------------------------------------------------------------------------------------------


def _endpoint(value: Any) -> str:
    given = text(value).removesuffix("/")
    return given if "://" in given else f"https://{given}"


def _prefix(value: Any) -> str:
    given = text(value).strip("/")
    return f"{given}/" if given else ""


def _connector(values: dict[str, Any]) -> Callable[[], Any]:
    """Makes obstore's store. Credentials that are not given come from the environment and the instance, as with AWS's tools."""
    endpoint = values["s3_endpoint"]
    if endpoint is not None and values["disable_tls"]:
        endpoint = endpoint.replace("https://", "http://", 1)
    given = {
        "endpoint": endpoint,
        "region": values["s3_region"],
        "access_key_id": values["aws_access_key_id"],
        "secret_access_key": values["aws_secret_access_key"],
        "session_token": values["aws_session_token"],
        "s3_express": values["s3_enable_s3express"] or None,
    }
    timeout = f"{values['timeout']:g}s"
    client = {"timeout": timeout, "connect_timeout": timeout, "allow_http": bool(endpoint and endpoint.startswith("http://"))}

    def connect() -> Any:
        from datetime import timedelta

        from obstore.store import S3Store

        return S3Store(
            values["bucket"],
            **{name: value for name, value in given.items() if value is not None},
            virtual_hosted_style_request=values["virtual_hosted"],
            client_options=client,
            retry_config={"max_retries": 3, "retry_timeout": timedelta(seconds=2 * values["timeout"])},
        )

    return connect


def _make(name: str, values: dict[str, Any]) -> Adapter:
    return S3Adapter(
        name,
        _connector(values),
        where=f"{values['s3_endpoint'] or 's3:/'}/{values['bucket']}",
        prefix=values["prefix"],
        threads=values["s3_num_io_threads"],
        max_bytes=values["max_capacity_gb"],
        max_value_bytes=values["max_value_bytes"],
        eviction=values.get("eviction"),
    )


KIND = Kind(
    "s3",
    "any S3: AWS, MinIO, Ceph",
    "kvd.tiers.adapters.s3:S3Adapter",
    _make,
    (
        Field("bucket", text, required=True, help="the bucket"),
        Field("prefix", _prefix, "", help="what the names of all objects begin with"),
        Field("s3_endpoint", _endpoint, help="URL of the server; AWS's for the region unless given"),
        Field("s3_region", text, "us-east-1", help="region of the bucket"),
        Field("virtual_hosted", switch, False, help="put the bucket's name into the host's, not into the path"),
        Field("disable_tls", switch, False, help="talk plain HTTP where the endpoint does not say http://"),
        Field("s3_enable_s3express", switch, False, help="the bucket is of S3 Express One Zone"),
        Field("aws_access_key_id", str, secret=True, help="key: env:NAME, file:PATH; AWS's own ways unless given"),
        Field("aws_secret_access_key", str, secret=True, help="its secret"),
        Field("aws_session_token", str, secret=True, help="token of a session"),
        Field("s3_num_io_threads", whole(1, 256), 16, help="objects moved side by side"),
        Field("timeout", seconds(0.1, 600), 10.0, help="how long one request may take"),
        Field("max_capacity_gb", gib(), 0, help="GiB it may take; 0: no limit, and nothing is evicted"),
        Field("max_value_bytes", size(), 1 << 30, help="larger values are not stored"),
    ),
    library="obstore",
    extra="s3",
)
