"""Hugging Face buckets, through huggingface_hub: metadata from the Hub, bytes from its content-addressed store (Xet).

hf://buckets/<owner>/<bucket>/<path>/v1/<64 hex of namespace>/<64 hex of key>   an envelope and the value

The Hub answers for a thousand names at once how long a file is and which content it has (a hash); the content is fetched by
that hash, in memory, and never by way of a file. A look-up wants the envelope too: its 128 bytes are fetched the first time a
content is seen and remembered under its hash, which names these very bytes for ever. A batch is uploaded as one commit, and
either all of it is in the bucket afterwards, or what is not is named.

The library tries a server that is away again and again, for half a minute: it is not asked at all while nobody listens there.
Usage and eviction: see objects.
"""

import contextlib
import os
import re
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from kvd.store.identity import Identity
from kvd.store.retention import expired
from kvd.tiers.adapters import envelope
from kvd.tiers.adapters.base import Adapter, AdapterConfigError, Item, Loaded, Want
from kvd.tiers.adapters.kind import Field, Kind, gib, seconds, size, switch, text, whole
from kvd.tiers.adapters.objects import BLOCK, ObjectAdapter
from kvtools.errors import UsageError

HEADS = 65536
"""Envelopes that are remembered."""
QUIET_S = 5.0
"""After so long without an answer the server is tried by hand before the library is let at it."""
TRIES = 3
"""How often files are deleted that are refused and still there."""
HANDLE = re.compile(r"hf://buckets/([\w.-]+/[\w.-]+)(?:/(.*))?")


class HfBucketAdapter(ObjectAdapter):
    """Files in a bucket; see the module. `connect` gives huggingface_hub's HfApi."""

    type = "hfbucket"

    def __init__(
        self, name: str, connect: Callable[[], Any], bucket: str, *, timeout_s: float = 10.0, create: bool = False, **more: Any
    ) -> None:
        super().__init__(name, **more)
        self._connect = connect
        self._bucket = bucket
        self._timeout_s = timeout_s
        self._create = create
        self._connecting = threading.Lock()
        self._made: Any = None
        self._answered = float("-inf")
        self._known: OrderedDict[str, envelope.Head | None] = OrderedDict()  # hash of a content -> its envelope, if it has one

    # ---- the Hub -----------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Load the library, make the bucket where that was asked for, and list it; a Hub that is away is no error."""
        try:
            import hf_xet  # noqa: F401 - what moves the bytes
        except ImportError as error:
            raise AdapterConfigError(
                f"adapter {self.name} (hfbucket): hf_xet does not load: {error}", hint="pip install 'kvtools[hf]'"
            ) from None
        super().open()

    @property
    def _api(self) -> Any:
        """The library's client, on a bucket that is there. Raises OSError while the Hub cannot be reached."""
        with self._connecting:
            if self._made is None:
                self._made = self._connect()
            api = self._made
        if time.monotonic() - self._answered > QUIET_S and not _proxied():
            address = urlsplit(api.endpoint)
            port = address.port or (443 if address.scheme == "https" else 80)
            socket.create_connection((address.hostname or "", port), timeout=self._timeout_s).close()
        with self._connecting:
            if self._create:
                api.create_bucket(self._bucket, private=True, exist_ok=True)
                self._create = False
        return api

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        """What `question(api)` answers. Raises OSError or one of the library's errors (which are OSErrors, or RuntimeErrors)."""
        answer = question(self._api)
        self._answered = time.monotonic()
        return answer

    def _each(self, count: int, question: Callable[[Any], Any]) -> Any:
        """The same for a batch of `count`: an error is everybody's answer."""
        try:
            return self._ask(question)
        except _failures() as error:
            self._answered = float("-inf")
            return [error] * count

    def _objects(self) -> Iterator[tuple[float, int, Identity]]:
        try:
            for one in self._ask(lambda api: api.list_bucket_tree(self._bucket, prefix=self._root, recursive=True)):
                if self._closing:
                    return
                identity = self._identity(one.path)
                if one.type == "file" and identity is not None:
                    when = one.uploaded_at or one.mtime
                    yield when.timestamp() if when is not None else 0.0, one.size, identity
        except _failures() as error:
            self.counters.io_errors += 1
            raise self._failed("list", error) from None

    def _infos(self, api: Any, identities: Sequence[Identity]) -> list[Any]:
        """What the Hub knows of each file (size, xet_hash), in order; None where there is none."""
        found: dict[str, Any] = {}
        names = [self._name(identity) for identity in identities]
        for start in range(0, len(names), BLOCK):
            found.update((info.path, info) for info in api.get_bucket_paths_info(self._bucket, names[start : start + BLOCK]))
        return [found.get(name) for name in names]

    # ---- objects -----------------------------------------------------------------------------------------------------

    def _puts(self, items: Sequence[Item]) -> Sequence[Exception | None]:
        from huggingface_hub.errors import BucketBatchError

        files = [(b"".join((envelope.seal(item), item.data)), self._name(item.identity)) for item in items]
        try:
            self._ask(lambda api: api.batch_bucket_files(self._bucket, add=files))
        except BucketBatchError as error:
            why = {row["path"]: OSError(row.get("error", "refused")) for row in error.failures}
            return [why.get(name) for _, name in files]
        except _failures() as error:
            self._answered = float("-inf")
            return [error] * len(items)
        return [None] * len(items)

    def _lengths(self, identities: Sequence[Identity]) -> Sequence[int | Exception | None]:
        infos = self._each(len(identities), lambda api: self._infos(api, identities))
        return [info if info is None or isinstance(info, Exception) else int(info.size) for info in infos]

    def _heads(self, identities: Sequence[Identity]) -> Sequence[envelope.Head | Exception | Loaded | None]:
        infos = self._each(len(identities), lambda api: self._infos(api, identities))
        strange = {
            info.xet_hash: info
            for info in infos
            if info is not None
            and not isinstance(info, Exception)
            and info.size >= envelope.SIZE
            and info.xet_hash not in self._known
        }
        failed: dict[str, Exception] = {}
        for content, answer in zip(strange, self._with_contents(self._envelope, list(strange.values())), strict=True):
            if isinstance(answer, Exception):
                failed[content] = answer
            else:
                self._remember(content, answer)
        found: list[envelope.Head | Exception | Loaded | None] = []
        for identity, info in zip(identities, infos, strict=True):
            if info is None or isinstance(info, Exception):
                found.append(info)
                continue
            head = self._known.get(info.xet_hash)
            fits = head is not None and head.identity == identity and info.size == envelope.SIZE + head.length
            found.append(failed.get(info.xet_hash, head if fits else Loaded.CORRUPT))
        return found

    def _envelope(self, contents: Any, info: Any) -> envelope.Head | Exception | None:
        """The envelope that a content begins with."""
        raw = bytearray(envelope.SIZE)
        try:
            self._fetch(contents, info, [memoryview(raw)])
        except _failures() as error:
            return error
        return envelope.open_head(raw)

    def _remember(self, content: str, head: envelope.Head | None) -> None:
        with self._lock:
            self._known[content] = head
            if len(self._known) > HEADS:
                self._known.popitem(last=False)

    @contextlib.contextmanager
    def _contents(self) -> Iterator[Any]:
        """Where contents are fetched from, with a token for this bucket."""
        from huggingface_hub.utils._xet import (
            XetTokenType,
            get_xet_session,
            xet_connection_info_refresh_url,
            xet_headers_without_auth,
        )

        api = self._api
        headers = api._build_hf_headers()
        route = xet_connection_info_refresh_url(
            token_type=XetTokenType.READ, repo_id=self._bucket, repo_type="bucket", endpoint=api.endpoint
        )
        with get_xet_session().new_download_stream_group(
            token_refresh_url=route, token_refresh_headers=headers, custom_headers=xet_headers_without_auth(headers)
        ) as group:
            yield group

    @staticmethod
    def _fetch(contents: Any, info: Any, into: Sequence[memoryview]) -> None:
        """Fill these buffers with a content's first bytes. Raises OSError, and what else the library raises."""
        from hf_xet import XetFileInfo

        left = [np.frombuffer(view, np.uint8) for view in into if len(view)]
        wanted = sum(len(view) for view in left)
        most = wanted if wanted < info.size else None
        for piece in contents.download_stream(XetFileInfo(info.xet_hash, info.size), None if most is None else 0, most):
            data = np.frombuffer(piece, np.uint8)
            while len(data):
                if not left:
                    raise OSError("more bytes than the Hub said")
                count = min(len(data), len(left[0]))
                np.copyto(left[0][:count], data[:count])
                data, left[0] = data[count:], left[0][count:]
                if not len(left[0]):
                    left.pop(0)
        if left:
            raise OSError("fewer bytes than the Hub said")

    def _gets(self, wants: Sequence[Want]) -> Sequence[Loaded | Exception]:
        infos = self._each(len(wants), lambda api: self._infos(api, [want.identity for want in wants]))
        return self._with_contents(self._get, list(zip(wants, infos, strict=True)))

    def _with_contents(self, work: Callable[[Any, Any], Any], rows: Sequence[Any]) -> list[Any]:
        """`work(contents, row)` for each row, side by side. No row, no question."""
        if not rows:
            return []
        try:
            with self._contents() as contents:
                return list(self._threads.map(lambda row: work(contents, row), rows))
        except _failures() as error:
            return [error] * len(rows)

    def _get(self, contents: Any, row: tuple[Want, Any]) -> Loaded | Exception:
        want, info = row
        if info is None:
            return Loaded.MISS
        if isinstance(info, Exception):
            return info
        if info.size != envelope.SIZE + len(want.into):
            head = self._envelope(contents, info) if info.size >= envelope.SIZE else None
            if isinstance(head, Exception):
                return head
            fits = head is not None and head.identity == want.identity and info.size == envelope.SIZE + head.length
            return Loaded.MISS if fits else Loaded.CORRUPT
        raw = bytearray(envelope.SIZE)
        try:
            self._fetch(contents, info, [memoryview(raw), want.into])
        except _failures() as error:
            return error
        head = envelope.open_head(raw)
        if head is None or head.identity != want.identity or not envelope.intact(head, want.into):
            return Loaded.CORRUPT
        return Loaded.MISS if expired(head.expires_ns, self._clock_ns()) else Loaded.OK

    def _unlink(self, identities: Sequence[Identity]) -> None:
        names = [self._name(identity) for identity in identities]
        try:
            for start in range(0, len(names), BLOCK):
                some = names[start : start + BLOCK]
                for _ in range(TRIES):  # what somebody stores meanwhile takes another
                    refused = self._refused(some)
                    some = list(refused)
                    if not some:
                        break
                else:
                    raise OSError(f"{some[0]}: {refused[some[0]]}")
        except _failures() as error:
            self.counters.io_errors += 1
            raise self._failed("delete", error) from None

    def _refused(self, names: list[str]) -> dict[str, str]:
        """Delete files; which are still there, and why. What was not there is refused as well, so all are looked for."""
        from huggingface_hub.errors import BucketBatchError

        try:
            self._ask(lambda api: api.batch_bucket_files(self._bucket, delete=names))
        except BucketBatchError as error:
            why = {row["path"]: row.get("error", "refused") for row in error.failures}
            left = self._ask(lambda api: api.get_bucket_paths_info(self._bucket, list(why)))
            return {info.path: why.get(info.path, "refused") for info in left}
        return {}


def _failures() -> tuple[type[Exception], ...]:
    """What the library raises when something does not work: HTTP errors, its own, those of what moves the bytes, and what

    comes of an answer that it does not understand.
    """
    import httpx2

    return (OSError, httpx2.HTTPError, RuntimeError, ValueError, KeyError)


def _proxied() -> bool:
    """Whether connections go by way of a proxy: then the Hub itself may not be reachable, and need not be."""
    return any(os.environ.get(name) or os.environ.get(name.upper()) for name in ("https_proxy", "http_proxy", "all_proxy"))


# ---- configuration -----------------------------------------------------------------------------------------------------


def _handle(value: Any) -> tuple[str, str]:
    """Bucket and prefix."""
    match = HANDLE.fullmatch(text(value))
    if match is None or ".." in match[1]:
        raise UsageError(f"not a bucket: {value!r}", hint="hf://buckets/OWNER/BUCKET, and a path where it is shared")
    path = (match[2] or "").strip("/")
    return match[1], f"{path}/" if path else ""


def _connector(values: dict[str, Any], token: str | None) -> Callable[[], Any]:
    def connect() -> Any:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        from huggingface_hub import HfApi

        return HfApi(endpoint=values["endpoint"], token=token if token is not None else False)

    return connect


def _make(name: str, values: dict[str, Any]) -> Adapter:
    bucket, prefix = values["bucket_handle"]
    token = values["token"] or os.environ.get(values["token_env"])
    return HfBucketAdapter(
        name,
        _connector(values, token),
        bucket,
        timeout_s=values["timeout"],
        create=values["create_bucket_if_missing"],
        where=f"hf://buckets/{bucket}",
        prefix=prefix,
        threads=values["num_workers"],
        max_bytes=values["max_capacity_gb"],
        max_value_bytes=values["max_value_bytes"],
        eviction=values.get("eviction"),
    )


KIND = Kind(
    "hfbucket",
    "Hugging Face buckets",
    "kvd.tiers.adapters.hfbucket:HfBucketAdapter",
    _make,
    (
        Field("bucket_handle", _handle, required=True, help="hf://buckets/OWNER/BUCKET, and a path in it"),
        Field("token", str, secret=True, help="token: env:NAME, file:PATH, or the text"),
        Field("token_env", text, "HF_TOKEN", help="variable with the token, where none is given"),
        Field("endpoint", text, help="URL of the Hub; Hugging Face's unless given"),
        Field("create_bucket_if_missing", switch, False, help="make the bucket, a private one"),
        Field("num_workers", whole(1, 256), 4, help="files moved side by side"),
        Field("timeout", seconds(0.1, 600), 10.0, help="how long a Hub that is away may take to say so"),
        Field("max_capacity_gb", gib(), 0, help="GiB it may take; 0: no limit, and nothing is evicted"),
        Field("max_value_bytes", size(), 1 << 30, help="larger values are not stored"),
    ),
    library="huggingface_hub",
    extra="hf",
)
