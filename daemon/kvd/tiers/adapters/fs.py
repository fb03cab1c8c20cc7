"""One file an object: for NFS, WekaFS and other file systems that several daemons share.

<root>/kvtools-fs.json                 the manifest: format and version
<root>/objects/<xx>/<128 hex>.kv       an envelope and the value; xx: first byte of the key
<root>/writing/                        files being written

A file is written under a name of its own in writing/ and renamed over the object, so a reader sees the old value, the new one
or none. There is no index: what another daemon on the same root has stored or deleted counts at once, and a look-up
reads the envelope. `usage` is a count kept from a scan at start, corrected by a scan whenever room has to be made and every
`rescan_s`; eviction takes the files that were used longest ago by their modification time, which a load renews.

A file that is not exactly what its name says is removed and counted. Files are 0600 and directories 0700.
"""

import contextlib
import ctypes
import errno
import heapq
import json
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import xxhash

from kvd.store.identity import IDENTITY_BYTES, NAMESPACE_BYTES, Identity
from kvd.store.retention import expired
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
from kvd.tiers.adapters.kind import MAX_BYTES, Eviction, Field, Kind, path, seconds, word
from kvtools.errors import hint_for

MANIFEST = "kvtools-fs.json"
FORMAT, VERSION = "kvtools.fs", 1
WRITING = "writing"
PATH_MAX = 4096
"""Bytes of a path that Linux takes, with the 0 at its end."""
STALE_S = 3600.0
RENEW_S = 30.0
"""A load renews the time of last use when it is older than this."""
PIECE = 1 << 20
"""A value is read, or written, and hashed in pieces that fit a core's cache: a second pass over memory costs a quarter more."""
RECOUNT_S = 30.0
"""After damage the files are counted again before a store that comes so much later, not for each damaged file."""
NAME = re.compile(rf"[0-9a-f]{{{2 * IDENTITY_BYTES}}}\.kv")
VICTIMS = 16384
"""How many of the oldest files a scan remembers for the evictions to come."""


class FsAdapter(Adapter):
    """Objects below `root`; see the module."""

    type = "fs"
    capabilities = Capabilities(evict=True, enumerate=True, durable=True)
    manifest = (MANIFEST, FORMAT, VERSION)

    def __init__(
        self,
        name: str,
        root: Path,
        max_bytes: int,
        *,
        durability: Durability = Durability.NONE,
        eviction: Eviction | None = None,
        rescan_s: float = 600.0,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        super().__init__(name)
        self.root = root
        self.max_bytes = max_bytes
        self.durability = durability
        self.eviction = eviction or Eviction()
        self._rescan_s = rescan_s
        self._clock_ns = clock_ns
        self._usage = Usage(0, max_bytes, 0)
        self._coming = 0  # bytes being written
        self._scanned_ns = 0
        self._victims: list[tuple[int, int, str]] = []  # used last (ns), bytes, file name; the oldest at the end
        self._lock = threading.Lock()  # the usage
        self._room = threading.Lock()  # one thread makes room

    # ---- life --------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        longest = len(os.fsencode(self._path(bytes(IDENTITY_BYTES))))
        if longest >= PATH_MAX:  # else the start would succeed, and every store fail
            raise AdapterConfigError(
                f"{self.name}: the path is too long: with a value's name it has {longest} bytes, over {PATH_MAX - 1}",
                hint="name a directory with a shorter path",
            )
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._own()
            for folder in ("objects", WRITING):
                (self.root / folder).mkdir(mode=0o700, exist_ok=True)
            self._sweep()
            self._scan()
        except OSError as error:
            raise self.unusable(error, self.root) from None

    def _own(self) -> None:
        """Check the manifest, or write it into a folder that is empty."""
        name, kind, version = self.manifest
        manifest = self.root / name
        if not manifest.exists():
            if others := sorted(e.name for e in os.scandir(self.root) if not e.name.startswith(".") and e.name != "lost+found"):
                raise AdapterConfigError(
                    f"{self.name}: {self.root} is no {kind} folder and holds {others[0]!r}", hint="name an empty directory"
                )
            draft = self.root / f".{name}.{secrets.token_hex(8)}"
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                json.dump({"format": kind, "version": version}, file)
            draft.rename(manifest)
        try:
            body = json.loads(manifest.read_text())
            found = (body["format"], body["version"])
        except (ValueError, KeyError, TypeError):
            raise AdapterConfigError(f"{self.name}: {manifest} is damaged", hint="empty the directory to start anew") from None
        if found != (kind, version):
            raise AdapterConfigError(
                f"{self.name}: {self.root} holds {found[0]} version {found[1]}, this kvd reads {kind} version {version}",
                hint="name another directory, or empty this one",
            )

    def _sweep(self) -> None:
        """Remove what writers left behind that died; what is young may be another daemon's, at work."""
        limit = time.time() - STALE_S
        for entry in os.scandir(self.root / WRITING):
            if entry.stat(follow_symlinks=False).st_mtime < limit:
                _unlink(Path(entry.path))

    def close(self, deadline_s: float = 5.0) -> None:
        self._victims.clear()

    # ---- values ------------------------------------------------------------------------------------------------------

    def _failed(self, what: str, error: OSError) -> AdapterError:
        return AdapterError(f"{self.name}: cannot {what} {self.root}: {error.strerror or error}", hint=hint_for(error))

    def _path(self, identity: Identity) -> Path:
        return self.root / "objects" / f"{identity[NAMESPACE_BYTES]:02x}" / f"{identity.hex()}.kv"

    def _fresh(self) -> Path:
        """A name that nobody else has."""
        return self.root / WRITING / secrets.token_hex(16)

    def store(self, items: Sequence[Item]) -> list[Stored]:
        results = []
        failure: OSError | None = None
        for item in items:
            result = Stored(False, "io_error")
            try:
                result = self._store(item)
            except OSError as error:
                self.counters.io_errors += 1
                failure = error
            if result.ok:
                self.counters.stores += 1
                self.counters.store_bytes += len(item.data)
            else:
                self.counters.store_failures += 1
            results.append(result)
        if failure is not None and not any(result.ok for result in results):
            raise self._failed("write to", failure)
        return results

    def _store(self, item: Item) -> Stored:
        if expired(item.expires_ns, self._clock_ns()):
            return Stored(False, "expired")
        total = self._total(len(item.data))
        if total > self.max_bytes:
            return self.too_large(item, self.max_bytes, "give the tier more room")
        if not self._make_room(total):
            return Stored(False, "full")
        try:
            if self._fits(item, total):
                return Stored(True, "", self.durability)
            # The file system is fuller than our limit: make room there as if it were the limit.
            self.full_note.note(self.root, self.max_bytes)
            if self.eviction.policy != "noop" and self._evict(2 * total) and self._fits(item, total):
                return Stored(True, "", self.durability)
            return Stored(False, "full")
        finally:
            with self._lock:
                self._coming -= total

    def _fits(self, item: Item, total: int) -> bool:
        """Write the file; False where the file system is full."""
        try:
            self._write(item, total)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            return False
        return True

    def _write(self, item: Item, total: int) -> None:
        temporary = self._fresh()
        try:
            fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                self._pour(fd, item)
                if self.durability is Durability.FSYNC:
                    os.fsync(fd)
            finally:
                os.close(fd)
            target = self._path(item.identity)
            before = _size(target)
            if before == -1:
                self._set_aside(target)
                before = None
            try:
                temporary.rename(target)
            except FileNotFoundError:
                target.parent.mkdir(mode=0o700, exist_ok=True)
                temporary.rename(target)
            if self.durability is Durability.FSYNC:
                _sync_folder(target.parent)
        except OSError:
            _unlink(temporary)
            raise
        with self._lock:
            self._usage.bytes_used += total - (before or 0)
            self._usage.entries += before is None

    def lookup(self, identities: Sequence[Identity]) -> list[Hit | None]:
        now = self._clock_ns()
        found: list[Hit | None] = []
        damaged: list[Identity] = []
        failure: OSError | None = None
        for identity in identities:
            there, head = False, None
            try:
                there, head = self._head(self._path(identity))
            except OSError as error:
                failure = error
            if there and (head is None or head.identity != identity):
                damaged.append(identity)
                head = None
            found.append(head.hit if head is not None and not expired(head.expires_ns, now) else None)
        self.found_damaged(damaged)
        if failure is not None:
            self.counters.io_errors += 1
            if not any(found):
                raise self._failed("read", failure)
        return found

    def _head(self, target: Path) -> tuple[bool, envelope.Head | None]:
        """Whether anything is there, and the envelope, where that is a file as long as it says."""
        fd = _open(target)
        if fd is None or fd < 0:
            return fd is not None, None
        try:
            status = os.fstat(fd)
            head = envelope.open_head(os.pread(fd, envelope.SIZE, 0)) if stat.S_ISREG(status.st_mode) else None
            return True, head if head is not None and status.st_size == self._total(head.length) else None
        finally:
            os.close(fd)

    def _total(self, length: int) -> int:
        """Bytes of the file of a value of this length."""
        return envelope.SIZE + length

    def _pour(self, fd: int, item: Item) -> None:
        """Write an empty file's content: the value, hashed piece by piece while it is warm, then the envelope. Raises OSError."""
        sum_ = xxhash.xxh3_64()
        for start in range(0, len(item.data), PIECE):
            piece = item.data[start : start + PIECE]
            sum_.update(piece)
            at = envelope.SIZE + start
            while len(piece):
                done = os.pwrite(fd, piece, at)
                piece, at = piece[done:], at + done
        if os.pwrite(fd, envelope.seal(item, sum_.intdigest()), 0) != envelope.SIZE:
            raise OSError(errno.EIO, "a part of an envelope was written")

    def _draw(self, fd: int, size: int, want: Want) -> tuple[envelope.Head | None, bool]:
        """Read a file of `size` bytes, and the value into its buffer where that is its length; and whether it is intact."""
        raw = bytearray(envelope.SIZE)
        piece = want.into[:PIECE]
        got = os.preadv(fd, [raw, piece], 0) - envelope.SIZE
        head = envelope.open_head(raw)
        if head is None or head.length != len(want.into):
            return head, False
        sum_ = xxhash.xxh3_64()
        sum_.update(piece[: max(0, got)])
        while 0 <= got < head.length:
            piece = want.into[got : got + PIECE]
            more = os.preadv(fd, [piece], envelope.SIZE + got)
            if not more:
                return head, False
            sum_.update(piece[:more])
            got += more
        return head, got == head.length and sum_.intdigest() == head.checksum

    def load(self, wants: Sequence[Want]) -> list[Loaded]:
        results = []
        for want in wants:
            try:
                result = self._load(want)
            except OSError:
                result = Loaded.ERROR
            counters = self.counters
            if result is Loaded.OK:
                counters.hits += 1
                counters.load_bytes += len(want.into)
            elif result is Loaded.MISS:
                counters.misses += 1
            elif result is Loaded.CORRUPT:
                counters.corruptions += 1
                with contextlib.suppress(AdapterError):
                    self._remove_damaged([want.identity])
            else:
                counters.io_errors += 1
            results.append(result)
        return results

    def _load(self, want: Want) -> Loaded:
        fd = _open(self._path(want.identity))
        if fd is None:
            return Loaded.MISS
        if fd < 0:
            return Loaded.CORRUPT
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                return Loaded.CORRUPT
            head, whole = self._draw(fd, status.st_size, want)
            if head is None or head.identity != want.identity or status.st_size != self._total(head.length):
                return Loaded.CORRUPT
            if head.length != len(want.into) or expired(head.expires_ns, self._clock_ns()):
                return Loaded.MISS
            if not whole:
                return Loaded.CORRUPT
            if time.time_ns() - status.st_mtime_ns > RENEW_S * 1e9:
                _renew(fd)
            return Loaded.OK
        finally:
            os.close(fd)

    def delete(self, identities: Sequence[Identity]) -> int:
        try:
            return sum(self._drop(self._path(identity)) for identity in identities)
        except OSError as error:
            self.counters.io_errors += 1
            raise self._failed("delete in", error) from None

    def _remove_damaged(self, identities: Sequence[Identity]) -> None:
        """What is damaged may have another size than was counted: what is there is counted anew soon."""
        self._scanned_ns = min(self._scanned_ns, self._clock_ns() - int((self._rescan_s - RECOUNT_S) * 1e9))
        self.delete(identities)

    def _drop(self, target: Path) -> bool:
        """Remove a file, whatever it is; False where there is none. Raises OSError where it stays."""
        size = _size(target)
        if size is None:
            return False
        try:
            target.unlink()
        except FileNotFoundError:
            return False
        except IsADirectoryError:
            self._set_aside(target)
        with self._lock:
            self._usage.bytes_used = max(0, self._usage.bytes_used - max(size, 0))
            self._usage.entries = max(0, self._usage.entries - (size >= 0))
        return size >= 0

    def _set_aside(self, target: Path) -> None:
        """Move what is no file out of an object's way; the next start sweeps it, where it is empty."""
        target.rename(self._fresh())

    # ---- room --------------------------------------------------------------------------------------------------------

    def _make_room(self, coming: int) -> bool:
        """Whether so many bytes fit now; they are reserved in `_coming` then."""
        if self._clock_ns() - self._scanned_ns > self._rescan_s * 1e9:
            self._scan()
        if self._reserve(coming):
            return True
        if self.eviction.policy == "noop":
            return False
        with self._room:
            if not self._victims:
                self._scan()  # another daemon may have made room
            if not self._reserve(coming):
                self._evict_held(self.eviction.excess(self._usage.bytes_used + self._coming, coming, self.max_bytes))
                return self._reserve(coming, pressed=True)
        return True

    def _reserve(self, coming: int, *, pressed: bool = False) -> bool:
        """Reserve what fits below the watermark; `pressed`, below the limit."""
        with self._lock:
            used = self._usage.bytes_used + self._coming
            if used + coming > self.max_bytes or (not pressed and self.eviction.excess(used, coming, self.max_bytes)):
                return False
            self._coming += coming
            return True

    def _evict(self, size: int) -> bool:
        with self._room:
            return self._evict_held(size)

    def _evict_held(self, size: int) -> bool:
        """Remove the files used longest ago until so many bytes are free. False where there were not that many."""
        scanned = False
        left = size
        while left > 0:
            if not self._victims:
                if scanned:
                    return False
                self._scan()
                scanned = True
                continue
            used_ns, length, name = self._victims.pop()
            target = self.root / "objects" / name[2 * NAMESPACE_BYTES :][:2] / name
            try:
                status = target.stat(follow_symlinks=False)
                if status.st_mtime_ns == used_ns and self._drop(target):
                    self.counters.evictions += 1
                    self.evicted([bytes.fromhex(name.removesuffix(".kv"))])
                    left -= length
            except FileNotFoundError:
                continue
        return True

    def _scan(self) -> None:
        """Count what is there, and note what was used longest ago."""
        self._scanned_ns = self._clock_ns()
        entries = used = 0

        def rows() -> Iterator[tuple[int, int, str]]:
            nonlocal entries, used
            for target, status in self._files():
                entries += 1
                used += status.st_size
                yield status.st_mtime_ns, status.st_size, target.name

        victims = heapq.nsmallest(VICTIMS, rows())[::-1]
        with self._lock:
            self._usage = Usage(used, self.max_bytes, entries)
            self._victims = victims

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        for folder in os.scandir(self.root / "objects"):
            for entry in os.scandir(folder.path) if folder.is_dir(follow_symlinks=False) else ():
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if stat.S_ISREG(status.st_mode):
                    yield Path(entry.path), status

    def enumerate(self) -> Iterator[tuple[Identity, Hit]]:
        now = self._clock_ns()
        try:
            for target, _ in self._files():
                head = self._head(target)[1]
                if head is not None and head.identity == _identity(target):
                    if expired(head.expires_ns, now):
                        self._drop(target)
                    else:
                        yield head.identity, head.hit
        except OSError as error:
            raise self._failed("list", error) from None

    def identities(self, namespace: bytes | None) -> Iterator[Identity]:
        """By their names alone: what is damaged lies there too."""
        try:
            for target, _ in self._files():
                identity = _identity(target)
                if identity is not None and (namespace is None or identity[:NAMESPACE_BYTES] == namespace):
                    yield identity
        except OSError as error:
            raise self._failed("list", error) from None

    def usage(self) -> Usage:
        with self._lock:
            return Usage(**vars(self._usage))

    def flush(self) -> Durability:
        """Ask the kernel to write the whole file system back."""
        try:
            return Durability.FSYNC if sync_file_system(self.root) else Durability.NONE
        except OSError as error:
            raise self._failed("sync", error) from None

    def describe(self) -> dict[str, object]:
        return {"path": str(self.root), "durability": self.durability.name.lower()}


_libc = ctypes.CDLL(None, use_errno=True)


def sync_file_system(root: Path) -> bool:
    """Write back the file system that `root` lies on; False where the kernel could not. Raises OSError."""
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return bool(_libc.syncfs(fd) == 0)
    finally:
        os.close(fd)


def _identity(target: Path) -> Identity | None:
    """Whose file this is by its name; None where it is none of ours."""
    return bytes.fromhex(target.stem) if NAME.fullmatch(target.name) else None


def _open(target: Path) -> int | None:
    """A descriptor; None: there is no such file; -1: there is something that is no file."""
    try:
        return os.open(target, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            return -1
        raise


def _size(target: Path) -> int | None:
    """Bytes of a file; None where there is nothing, -1 for a directory; a link or the like counts nothing."""
    try:
        status = target.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(status.st_mode):
        return -1
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def _renew(fd: int) -> None:
    try:
        os.utime(fd)
    except OSError:
        pass  # a read-only mount: then eviction goes by the time of storing


def _unlink(target: Path) -> None:
    try:
        target.unlink()
    except IsADirectoryError:
        try:
            target.rmdir()
        except OSError:
            pass  # somebody's files are in it
    except FileNotFoundError:
        pass


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _make(name: str, values: dict[str, Any]) -> Adapter:
    return FsAdapter(
        name,
        values["base_path"],
        values["max_bytes"],
        durability=Durability[values["durability"].upper()],
        eviction=values.get("eviction"),
        rescan_s=values["rescan"],
    )


KIND = Kind(
    "fs",
    "one file an object: NFS, WekaFS, a shared directory",
    "kvd.tiers.adapters.fs:FsAdapter",
    _make,
    (
        Field("base_path", path, required=True, help="a directory, which several daemons may share"),
        MAX_BYTES,
        Field("durability", word("none", "fsync"), "none", help="none, or fsync: a stored value survives a power cut"),
        Field("rescan", seconds(1, 86400), 600.0, help="count the directory anew this often: others may use it too"),
    ),
)
