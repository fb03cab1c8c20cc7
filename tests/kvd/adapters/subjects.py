"""The adapters under conformance: how each is made on a fresh medium, made again on the same one, and damaged from outside.

A Subject is a medium (a directory, a server, a file). `make()` gives an adapter on it, not open; made again it is what a
restarted daemon would have. `raw`, `set_raw` and `remove` reach past the adapter: they see and change the stored object
of one identity (envelope and value), as a fault of the medium or another tool would.
"""

import contextlib
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvd.store.identity import Identity
from kvd.tiers.adapters import registry
from kvd.tiers.adapters.base import Adapter
from kvd.tiers.adapters.dax import DaxAdapter, MapMedium
from kvd.tiers.adapters.disk import DiskAdapter
from kvd.tiers.adapters.disk.format import EXTENT_MAGIC, extent_bytes
from kvd.tiers.adapters.fs import FsAdapter
from kvd.tiers.adapters.kind import Eviction
from kvd.tiers.adapters.mock import MockAdapter
from kvd.tiers.adapters.mooncake import MooncakeAdapter
from kvd.tiers.adapters.mooncake_client import load_library
from kvd.tiers.adapters.nixl import Transfers
from kvd.tiers.adapters.nixl_dynamic import NixlDynamicAdapter
from kvd.tiers.adapters.nixl_store import NixlStoreAdapter
from kvd.tiers.adapters.raw_block import FileMedium, RawBlockAdapter
from tests.support.fake_hub import TOKEN


class Subject(ABC):
    """One medium. `shared`: two adapters may be at work on it at once. `capped`: max_bytes is obeyed."""

    shared = False
    capped = True
    scan_resistant = True
    """Where it is capped: S3FIFO is among its policies."""
    damageable = True
    empty_is_missing = False
    """An empty object cannot be told from none."""
    indexed = False
    """It knows in memory what it has: what is taken away behind its back is damage."""
    slack = False
    """Bytes behind a value's end are nobody's: they do not matter."""
    needs = ""
    """The server it lives on."""
    part = ""
    """The real part it stands for, where that is not the server."""

    def __init__(self, folder: Path, server: Any = None) -> None:
        self.folder = folder
        self.server = server

    @abstractmethod
    def make(self, *, max_bytes: int = 64 << 20, eviction: Eviction | None = None) -> Adapter: ...

    def raw(self, identity: Identity) -> bytes:
        """The object as it lies there."""
        raise NotImplementedError

    def set_raw(self, identity: Identity, body: bytes) -> None:
        """Put this in its place."""
        raise NotImplementedError

    def remove(self, identity: Identity) -> None:
        """Take it away."""
        raise NotImplementedError

    @contextlib.contextmanager
    def opened(self, *, max_bytes: int = 64 << 20, eviction: Eviction | None = None) -> Iterator[Adapter]:
        adapter = self.make(max_bytes=max_bytes, eviction=eviction)
        adapter.open()
        try:
            yield adapter
        finally:
            adapter.close(1.0)

    def stop(self) -> None:  # noqa: B027 - most media are just files
        """Give everything back."""


class Fs(Subject):
    """A directory."""

    shared = True
    scan_resistant = False

    def make(self, *, max_bytes: int = 64 << 20, eviction: Eviction | None = None) -> FsAdapter:
        return FsAdapter("fs", self.folder / "root", max_bytes, eviction=eviction)

    def path(self, identity: Identity) -> Path:
        return self.folder / "root" / "objects" / f"{identity[32]:02x}" / f"{identity.hex()}.kv"

    def raw(self, identity: Identity) -> bytes:
        return self.path(identity).read_bytes()

    def set_raw(self, identity: Identity, body: bytes) -> None:
        self.path(identity).write_bytes(body)

    def remove(self, identity: Identity) -> None:
        self.path(identity).unlink()


class Mock(Subject):
    """Memory: nothing survives, and nobody else can reach it."""

    damageable = False

    def make(self, *, max_bytes: int = 64 << 20, eviction: Eviction | None = None) -> MockAdapter:
        return MockAdapter("mock", max_bytes, float(64 << 30), eviction=eviction)


class Resp(Subject):
    """A Redis server, emptied."""

    shared = True
    capped = False
    empty_is_missing = True
    needs = "redis"

    def __init__(self, folder: Path, server: Any = None) -> None:
        super().__init__(folder, server)
        server.ask("FLUSHALL")

    def make(self, *, max_bytes: int = 64 << 20, eviction: Eviction | None = None) -> Adapter:
        (adapter,) = registry.build([{"type": "resp", "host": "127.0.0.1", "port": self.server.port, "timeout": "2s"}])
        return adapter

    @staticmethod
    def key(identity: Identity) -> str:
        return f"kvd:{identity[:32].hex()}:{identity[32:].hex()}"

    def raw(self, identity: Identity) -> bytes:
        answer = self.server.ask("GET", self.key(identity))
        return bytes(answer[answer.index(b"\n") + 1 : -2])

    def set_raw(self, identity: Identity, body: bytes) -> None:
        assert self.server.ask("SET", self.key(identity), body) == b"+OK\r\n"

    def remove(self, identity: Identity) -> None:
        assert self.server.ask("DEL", self.key(identity)) == b":1\r\n"


class Disk(Subject):
    """The region store. What it does within a limit is its own (eviction by region), and tested in tests/kvd/disk."""

    capped = False
    indexed = True
    slack = True

    def make(self, *, max_bytes: int = 64 << 20, eviction: Eviction | None = None) -> Adapter:
        return DiskAdapter("disk", self.folder / "disk", max_bytes, free_floor_bytes=0, housekeeping_s=0.0)

    def _extent(self, identity: Identity) -> tuple[Path, int, int]:
        """Region file, offset of the extent's header page, bytes behind it."""
        for path in sorted((self.folder / "disk").glob("*.kvcache")):
            with path.open("rb") as file:
                for at in range(4096, path.stat().st_size, 4096):
                    file.seek(at)
                    page = file.read(128)
                    if page[:8] == EXTENT_MAGIC and page[64:] == identity:
                        return path, at, extent_bytes(int.from_bytes(page[48:56], "little")) - 4096
        raise AssertionError("it is in no region")

    def raw(self, identity: Identity) -> bytes:
        path, at, _ = self._extent(identity)
        with path.open("rb") as file:
            file.seek(at)
            page = file.read(4096)
            return page[:128] + file.read(int.from_bytes(page[48:56], "little"))

    def set_raw(self, identity: Identity, body: bytes) -> None:
        path, at, size = self._extent(identity)
        with path.open("r+b") as file:
            file.seek(at)
            file.write(body[:128].ljust(128, b"\0"))
            file.seek(at + 4096)
            file.write(body[128 : 128 + size].ljust(size, b"\0"))

    def remove(self, identity: Identity) -> None:
        path, at, _ = self._extent(identity)
        with path.open("r+b") as file:
            file.seek(at)
            file.write(bytes(4096))


class RawBlock(Subject):
    """A file with slots of 12 KiB, or 80 KiB where it is large."""

    indexed = True
    slack = True

    def make(self, *, max_bytes: int = 64 << 20, eviction: Eviction | None = None) -> Adapter:
        slot = self.slot = (80 << 10) if max_bytes > 8 << 20 else (12 << 10)
        return self.build(4096 + min(max_bytes, 8 << 20) // slot * slot, slot, eviction)

    def build(self, capacity: int, slot: int, eviction: Eviction | None) -> Adapter:
        medium = FileMedium("raw", self.folder / "slots", capacity, direct=True)
        return RawBlockAdapter("raw", medium, slot, where=str(self.folder / "slots"), eviction=eviction)

    def _offset(self, identity: Identity) -> int:
        path = self.folder / "slots"
        with path.open("rb") as file:
            (offset,) = (
                at for at in range(4096, path.stat().st_size, self.slot) if file.seek(at + 8) and file.read(64) == identity
            )
        return offset

    def raw(self, identity: Identity) -> bytes:
        raw = (self.folder / "slots").read_bytes()
        at = self._offset(identity)
        length = int.from_bytes(raw[at + 72 : at + 80], "little")
        return raw[at : at + 128] + raw[at + 4096 : at + 4096 + length]

    def set_raw(self, identity: Identity, body: bytes) -> None:
        at = self._offset(identity)
        with (self.folder / "slots").open("r+b") as file:
            file.seek(at)
            file.write(body[:128].ljust(128, b"\0"))
            file.seek(at + 4096)
            file.write(body[128:].ljust(self.slot - 4096, b"\0"))

    def remove(self, identity: Identity) -> None:
        at = self._offset(identity)
        with (self.folder / "slots").open("r+b") as file:
            file.seek(at)
            file.write(bytes(4096))


class Dax(RawBlock):
    """The same in a mapped file."""

    def build(self, capacity: int, slot: int, eviction: Eviction | None) -> Adapter:
        medium = MapMedium("dax", self.folder / "slots", capacity)
        return DaxAdapter("dax", medium, slot, where=str(self.folder / "slots"), eviction=eviction)


class NixlStore(Subject):
    """A pool of 12 KiB files, or of files as large as need be where there is room."""

    indexed = True
    slack = True
    part = "nixl"

    def make(self, *, max_bytes: int = 64 << 20, eviction: Eviction | None = None) -> Adapter:
        size = 0 if max_bytes > 8 << 20 else (12 << 10)
        transfers = Transfers("nixl", "nixl_store", "POSIX", {})
        files = max_bytes // size if size else 256
        return NixlStoreAdapter("nixl", self.folder / "pool", files, transfers, file_size=size, eviction=eviction)

    def _file(self, identity: Identity) -> Path:
        (found,) = (one for one in (self.folder / "pool").glob("obj_*") if one.read_bytes()[8:72] == identity)
        return found

    def raw(self, identity: Identity) -> bytes:
        raw = self._file(identity).read_bytes()
        return raw[:128] + raw[4096 : 4096 + int.from_bytes(raw[72:80], "little")]

    def set_raw(self, identity: Identity, body: bytes) -> None:
        path = self._file(identity)
        raw = path.read_bytes()
        path.write_bytes(body[:128].ljust(128, b"\0") + raw[128:4096] + body[128:].ljust(len(raw) - 4096, b"\0"))

    def remove(self, identity: Identity) -> None:
        self._file(identity).unlink()


class NixlDynamic(Fs):
    """A directory, through NIXL."""

    part = "nixl"
    slack = True

    def make(self, *, max_bytes: int = 64 << 20, eviction: Eviction | None = None) -> FsAdapter:
        transfers = Transfers("nixl", "nixl_store_dynamic", "POSIX", {})
        return NixlDynamicAdapter("nixl", self.folder / "root", max_bytes, transfers, eviction=eviction)

    def raw(self, identity: Identity) -> bytes:
        raw = super().raw(identity)
        return raw[:128] + raw[4096 : 4096 + int.from_bytes(raw[72:80], "little")]

    def set_raw(self, identity: Identity, body: bytes) -> None:
        raw = super().raw(identity)
        value = body[128:]
        padded = value.ljust(-(-len(value) // 4096) * 4096, b"\0")
        super().set_raw(identity, body[:128].ljust(128, b"\0") + raw[128:4096] + padded if body else b"")


class S3(Subject):
    """A bucket of its own on moto's server."""

    shared = True
    needs = "s3"

    def __init__(self, folder: Path, server: Any = None) -> None:
        super().__init__(folder, server)
        self.bucket = "kvt-" + secrets.token_hex(8)
        server.request("PUT", f"/{self.bucket}")

    def make(self, *, max_bytes: int = 64 << 20, eviction: Eviction | None = None) -> Adapter:
        rule = eviction or Eviction()
        policy = {"eviction_policy": rule.policy, "trigger_watermark": rule.watermark, "eviction_ratio": rule.ratio}
        spec = {
            "type": "s3",
            "bucket": self.bucket,
            "prefix": "some/where",
            "s3_endpoint": f"http://127.0.0.1:{self.server.port}",
            "aws_access_key_id": "test",
            "aws_secret_access_key": "test",
            "timeout": "5s",
            "max_capacity_gb": max_bytes / (1 << 30),
        }
        (adapter,) = registry.build([spec | ({"eviction": policy} if eviction else {})])
        return adapter

    def _url(self, identity: Identity) -> str:
        return f"/{self.bucket}/some/where/v1/{identity[:32].hex()}/{identity[32:].hex()}"

    def raw(self, identity: Identity) -> bytes:
        return bytes(self.server.request("GET", self._url(identity)))

    def set_raw(self, identity: Identity, body: bytes) -> None:
        self.server.request("PUT", self._url(identity), body)

    def remove(self, identity: Identity) -> None:
        self.server.request("DELETE", self._url(identity))


class HfBucket(Subject):
    """A bucket of its own on a Hub of the tests. Its limit has a test in test_hfbucket: each store is a commit."""

    shared = True
    capped = False
    needs = "hub"
    part = "huggingface_hub"

    def __init__(self, folder: Path, server: Any = None) -> None:
        super().__init__(folder, server)
        self.bucket = f"tests/{secrets.token_hex(8)}"
        server.buckets[self.bucket] = {}

    def make(self, *, max_bytes: int = 64 << 20, eviction: Eviction | None = None) -> Adapter:
        rule = eviction or Eviction()
        policy = {"eviction_policy": rule.policy, "trigger_watermark": rule.watermark, "eviction_ratio": rule.ratio}
        spec = {
            "type": "hfbucket",
            "bucket_handle": f"hf://buckets/{self.bucket}/some/where",
            "endpoint": self.server.url,
            "token": TOKEN,
            "max_capacity_gb": max_bytes / (1 << 30),
        }
        (adapter,) = registry.build([spec | ({"eviction": policy} if eviction else {})])
        return adapter

    @staticmethod
    def path(identity: Identity) -> str:
        return f"some/where/v1/{identity[:32].hex()}/{identity[32:].hex()}"

    def raw(self, identity: Identity) -> bytes:
        return bytes(self.server.read(self.bucket, self.path(identity)))

    def set_raw(self, identity: Identity, body: bytes) -> None:
        self.server.api().batch_bucket_files(self.bucket, add=[(body, self.path(identity))])

    def remove(self, identity: Identity) -> None:
        del self.server.buckets[self.bucket][self.path(identity)]


class Lmcache(Subject):
    """A prefix of its own, as long as may be, on an LMCache server: nothing there can be cleared."""

    shared = True
    capped = False
    empty_is_missing = True
    needs = "lmcache"

    def __init__(self, folder: Path, server: Any = None) -> None:
        super().__init__(folder, server)
        self.prefix = secrets.token_hex(6)[:11]

    def make(self, *, max_bytes: int = 64 << 20, eviction: Eviction | None = None) -> Adapter:
        (adapter,) = registry.build(
            [{"type": "lmcache", "remote_url": f"lm://127.0.0.1:{self.server.port}", "prefix": self.prefix}]
        )
        return adapter

    def key(self, identity: Identity) -> str:
        return f"{self.prefix}@1@0@{identity.hex()}@uint8"

    def raw(self, identity: Identity) -> bytes:
        return bytes(self.server.ask(2, self.key(identity)))

    def set_raw(self, identity: Identity, body: bytes) -> None:
        assert self.server.ask(1, self.key(identity), body) == b""

    def remove(self, identity: Identity) -> None:
        self.set_raw(identity, b"")


class Mooncake(Subject):
    """A prefix of its own in a Mooncake pool, and a plain client that reaches past the adapter."""

    shared = True
    capped = False
    empty_is_missing = True
    needs = "mooncake"

    def __init__(self, folder: Path, server: Any = None) -> None:
        super().__init__(folder, server)
        self.prefix = f"{secrets.token_hex(8)}/"

    def make(self, *, max_bytes: int = 64 << 20, eviction: Eviction | None = None) -> Adapter:
        load_library("mooncake_store")
        return MooncakeAdapter("mooncake_store", lambda: Shared(self.outside), where="the pool", prefix=self.prefix)

    @property
    def outside(self) -> Any:
        """A client that is connected once: each takes a second to close. Adapters with their own are in test_mooncake."""
        return self.server.client()

    def key(self, identity: Identity) -> str:
        return f"{self.prefix}{identity[:32].hex()}/{identity[32:].hex()}"

    def raw(self, identity: Identity) -> bytes:
        return bytes(self.outside.get(self.key(identity)))

    def set_raw(self, identity: Identity, body: bytes) -> None:
        self.remove(identity)
        if body:  # it holds no empty objects
            assert self.outside.put(self.key(identity), body) == 0

    def remove(self, identity: Identity) -> None:
        assert self.outside.remove(self.key(identity), True) == 0


class Shared:
    """Somebody else's client: closing it is not for the adapter to do."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def close(self) -> None:
        pass


SUBJECTS: dict[str, type[Subject]] = {
    "disk": Disk,
    "fs": Fs,
    "raw_block": RawBlock,
    "dax": Dax,
    "s3": S3,
    "resp": Resp,
    "lmcache": Lmcache,
    "hfbucket": HfBucket,
    "mooncake_store": Mooncake,
    "nixl_store": NixlStore,
    "nixl_store_dynamic": NixlDynamic,
    "mock": Mock,
}
