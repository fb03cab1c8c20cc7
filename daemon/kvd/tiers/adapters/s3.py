"""Any S3: AWS, MinIO, Ceph and the like, through obstore.

<bucket>/<prefix>v1/<64 hex of namespace>/<64 hex of key>   an envelope and the value

What is loaded is asked for up to the byte behind its end, and lengths and checksums are compared before one byte reaches the
arena. The objects of a batch are moved side by side by `s3_num_io_threads` threads. Look-ups, usage and eviction: see objects.
"""

import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from kvd.store.identity import IDENTITY_BYTES, Identity
from kvd.store.retention import expired
from kvd.tiers.adapters import envelope
from kvd.tiers.adapters.base import Adapter, AdapterConfigError, Item, Loaded, Want
from kvd.tiers.adapters.kind import Field, Kind, gib, seconds, size, switch, text, whole
from kvd.tiers.adapters.objects import BLOCK, FOLDER, ObjectAdapter
from kvtools.errors import UsageError

T = TypeVar("T")
A = TypeVar("A")


class S3Adapter(ObjectAdapter):
    """Objects in a bucket; see the module. `connect` makes obstore's store when it is first needed."""

    type = "s3"

    def __init__(self, name: str, connect: Callable[[], Any], **more: Any) -> None:
        super().__init__(name, **more)
        self._connect = connect
        self._connecting = threading.Lock()
        self._store_object: Any = None

    @property
    def _bucket(self) -> Any:
        with self._connecting:
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

    def _puts(self, items: Sequence[Item]) -> Sequence[Exception | None]:
        return self._each(self._put, items)

    def _put(self, item: Item) -> None:
        import obstore

        obstore.put(self._bucket, self._name(item.identity), [envelope.seal(item), item.data], use_multipart=False)

    def _heads(self, identities: Sequence[Identity]) -> Sequence[envelope.Head | Exception | Loaded | None]:
        rows: list[envelope.Head | Exception | Loaded | None] = []
        for answer in self._each(self._head, identities):
            rows.append(None if isinstance(answer, FileNotFoundError) else Loaded.CORRUPT if _is_empty(answer) else answer)
        return rows

    def _head(self, identity: Identity) -> envelope.Head | Loaded:
        import obstore

        answer = obstore.get(self._bucket, self._name(identity), options={"range": (0, envelope.SIZE)})
        head = envelope.open_head(memoryview(answer.bytes()))
        fits = head is not None and head.identity == identity and answer.meta["size"] == envelope.SIZE + head.length
        return head if fits and head is not None else Loaded.CORRUPT

    def _gets(self, wants: Sequence[Want]) -> Sequence[Loaded | Exception]:
        results: list[Loaded | Exception] = []
        for answer in self._each(self._get, wants):
            if isinstance(answer, FileNotFoundError):
                answer = Loaded.MISS
            elif _is_empty(answer):
                answer = Loaded.CORRUPT
            results.append(answer)
        return results

    def _get(self, want: Want) -> Loaded:
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
        envelope.copy(want.into, data)
        return Loaded.OK

    def _lengths(self, identities: Sequence[Identity]) -> Sequence[int | Exception | None]:
        return [None if isinstance(answer, FileNotFoundError) else answer for answer in self._each(self._length, identities)]

    def _length(self, identity: Identity) -> int:
        import obstore

        return int(obstore.head(self._bucket, self._name(identity))["size"])

    def _unlink(self, identities: Sequence[Identity]) -> None:
        """Delete objects, there or not. Raises AdapterError."""
        import obstore
        from obstore.exceptions import BaseError

        try:
            for start in range(0, len(identities), BLOCK):
                obstore.delete(self._bucket, [self._name(identity) for identity in identities[start : start + BLOCK]])
        except FileNotFoundError:
            return  # some servers say so where S3 does not
        except (BaseError, OSError) as error:
            self.counters.io_errors += 1
            raise self._failed("delete", error) from None


def _is_empty(answer: Any) -> bool:
    """The server had nothing at byte 0: the object is empty."""
    return isinstance(answer, Exception) and "416 Range Not Satisfiable" in str(answer)


# ---- configuration -----------------------------------------------------------------------------------------------------


BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{2,254}")
"""Wider than AWS's rule of today (63 lower-case letters, digits, dots, dashes): old buckets and other servers have such names."""
NAME_MAX = 1024
PREFIX_MAX = NAME_MAX - len(f"/{FOLDER}") - 2 * IDENTITY_BYTES - 1
KEYS = {"aws_access_key_id": "AWS_ACCESS_KEY_ID", "aws_secret_access_key": "AWS_SECRET_ACCESS_KEY"}


def _bucket(value: Any) -> str:
    given = text(value)
    if not BUCKET.fullmatch(given):
        raise UsageError(
            f"not a bucket's name: {given!r}", hint="3 letters, digits, dots, dashes or more; a folder in it is the prefix"
        )
    return given


def _endpoint(value: Any) -> str:
    given = text(value).removesuffix("/")
    scheme, there, rest = given.rpartition("://")
    if (there and scheme not in ("http", "https")) or not rest or any(character.isspace() for character in rest):
        raise UsageError(f"not a URL of a server: {value!r}", hint="such as https://s3.example:9000")
    return given if there else f"https://{given}"


def _prefix(value: Any) -> str:
    given = text(value).strip("/")
    if len(given.encode()) > PREFIX_MAX:
        raise UsageError(
            f"a prefix of {len(given.encode())} bytes", hint=f"{PREFIX_MAX} at most: S3 takes names of {NAME_MAX} bytes"
        )
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
    given = [field for field in KEYS if values[field] is not None]
    lacking = [field for field, variable in KEYS.items() if values[field] is None and not os.environ.get(variable)]
    if given and lacking:
        raise AdapterConfigError(f"adapter {name} (s3): field {lacking[0]!r} is missing", hint=f"it goes with {given[0]}")
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
        Field("bucket", _bucket, required=True, help="the bucket"),
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
