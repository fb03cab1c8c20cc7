"""`nixl_store`: a pool of files or objects, one value in each, moved by NIXL (POSIX, GDS, GDS_MT, HF3FS, OBJ).

<file_path>/kvtools-nixl.json   the manifest: format, version, a random generation; whoever holds its lock owns the pool
<file_path>/obj_<i>.bin         slot i of `pool_size`: a header block and the value, as in slots; empty when nothing is in it

A file is as large as the value in it, whatever that is, unless `file_size` bounds it: then larger values are refused, and the
log says so once. So a pool that was given only a number of files holds that many chunks. Empty files take no room: what is
evicted or deleted is given back to the file system at once. `trigger_watermark` counts files, `usage` their bytes.

The index is made anew from the headers at each start: values, their sizes and what may be evicted survive it. Files are
opened for the length of one transfer, so a large pool needs no large number of descriptors. Objects: see nixl_objects.
"""

import errno
import fcntl
import json
import logging
import os
import re
import secrets
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvd.store.identity import Identity
from kvd.tiers.adapters.base import Adapter, AdapterConfigError, AdapterError, Item, Stored, Usage
from kvd.tiers.adapters.fs import sync_file_system
from kvd.tiers.adapters.kind import Eviction, Field, Kind, mapping, path, size, switch, text, whole, word
from kvd.tiers.adapters.ledger import Entry, Ledger
from kvd.tiers.adapters.nixl import BACKENDS, OBJECTS, Transfers
from kvd.tiers.adapters.slots import BLOCK, Medium, SlotAdapter
from kvtools.config import read_secret
from kvtools.errors import UsageError

if TYPE_CHECKING:
    from kvd.tiers.adapters.nixl_objects import ObjectPool

log = logging.getLogger("kvd.tiers")

MANIFEST = "kvtools-nixl.json"
FORMAT, VERSION = "kvtools.nixl", 1
LARGEST = 1 << 30
"""The largest value where nothing else bounds it."""
SMALLEST_FILE = 64 << 10
"""A file below this holds no chunk of any model: bounds given so small are a mistake."""
NO_FILE = (errno.ELOOP, errno.ENXIO, errno.EISDIR)
"""What `open` says to a link, a fifo and a folder in a file's place."""
FILE = re.compile(r"obj_(\d{1,9})\.bin")


class Pool(Medium):
    """`files` files as one space of slots: slot i begins at BLOCK + i * `stride`, wherever its file ends. Block 0 is nowhere."""

    def __init__(self, name: str, folder: Path, files: int, stride: int, transfers: Transfers, *, direct: bool) -> None:
        self._name, self._folder, self._files, self._stride = name, folder, files, stride
        self.transfers = transfers
        self._flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | (os.O_DIRECT if direct else 0)
        self._lock = -1
        self.generation = 0

    def open(self) -> int:
        self.transfers.open()
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            self._own()
            self._tidy()
        except BaseException:
            self.close()
            raise
        return BLOCK + self._files * self._stride

    def _own(self) -> None:
        """Lock and check the manifest, or write it into a folder that is empty."""
        manifest = self._folder / MANIFEST
        others = sorted(entry.name for entry in os.scandir(self._folder) if entry.name != "lost+found")
        if others and not manifest.exists():
            raise AdapterConfigError(
                f"{self._name}: {self._folder} is no {FORMAT} folder and holds {others[0]!r}", hint="name an empty directory"
            )
        self._lock = os.open(manifest, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise AdapterError(f"{self._name}: {self._folder} is in use by another daemon", hint="one daemon a pool") from None
        raw = os.pread(self._lock, 4096, 0)
        if not raw:  # new, or its maker died before it wrote: then nothing else is there either
            raw = json.dumps({"format": FORMAT, "version": VERSION, "generation": secrets.randbits(63)}).encode()
            os.pwrite(self._lock, raw, 0)
            os.fsync(self._lock)
        try:
            found = json.loads(raw)
            held, self.generation = (found["format"], found["version"]), int(found["generation"])
        except (ValueError, TypeError, KeyError):
            raise AdapterConfigError(f"{self._name}: {manifest} is damaged", hint="empty the directory to start anew") from None
        if held != (FORMAT, VERSION):
            raise AdapterConfigError(
                f"{self._name}: {self._folder} holds {held[0]} version {held[1]}, this kvd reads {FORMAT} version {VERSION}",
                hint="name another directory, or empty this one",
            )

    def _tidy(self) -> None:
        """Remove the files of a larger pool: nobody would find what is in them."""
        gone = 0
        for entry in os.scandir(self._folder):
            match = FILE.fullmatch(entry.name)
            if match and int(match[1]) >= self._files and entry.is_file(follow_symlinks=False):
                gone += entry.stat(follow_symlinks=False).st_size > 0
                Path(entry.path).unlink()
        if gone:
            log.warning("%s: %d values dropped with the files of the larger pool that %s was", self._name, gone, self._folder)

    def close(self) -> None:
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)
        self.transfers.close()

    def _place(self, offset: int) -> tuple[Path, int]:
        slot, within = divmod(offset - BLOCK, self._stride)
        return self._folder / f"obj_{slot}.bin", within

    def read(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """What is not there reads as zeros, which is no header."""
        target, within = self._place(offset)
        try:
            fd = os.open(target, os.O_RDONLY | self._flags)
        except (FileNotFoundError, NotADirectoryError):
            fd = -1
        except OSError as error:
            if error.errno not in NO_FILE:
                raise
            fd = -1
        try:
            status = os.fstat(fd) if fd >= 0 else None
            if status is None or not stat.S_ISREG(status.st_mode) or status.st_size < within + sum(map(len, buffers)):
                buffers[0][:BLOCK] = bytes(BLOCK)
                return
            self.transfers.read(fd, _laid_out(within, buffers))
        finally:
            if fd >= 0:
                os.close(fd)

    def write(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Write a slot; one empty block alone empties the file."""
        target, within = self._place(offset)
        if len(buffers) == 1 and not any(buffers[0][:8]):
            self._empty(target)
            return
        total = within + sum(map(len, buffers))
        fd = os.open(target, os.O_RDWR | os.O_CREAT | self._flags, 0o600)
        try:
            if os.fstat(fd).st_size > total:
                os.ftruncate(fd, total)
            os.posix_fallocate(fd, 0, total)  # a full file system says so here, in words
            self.transfers.write(fd, _laid_out(within, buffers))
        except OSError:
            os.ftruncate(fd, 0)
            raise
        finally:
            os.close(fd)

    def _empty(self, target: Path) -> None:
        """A slot without a value. What is there and no file of ours is left alone, a link's target above all."""
        try:
            fd = os.open(target, os.O_WRONLY | self._flags)
        except OSError as error:
            if error.errno in (errno.ENOENT, *NO_FILE):
                return
            raise
        try:
            if stat.S_ISREG(os.fstat(fd).st_mode):
                os.ftruncate(fd, 0)
        finally:
            os.close(fd)

    def sync(self) -> None:
        if not sync_file_system(self._folder):
            raise OSError(errno.EIO, "the file system could not be synced")


def _laid_out(offset: int, buffers: Sequence[memoryview]) -> list[tuple[int, memoryview]]:
    """The buffers, one behind the other from this offset."""
    rows = []
    for buffer in buffers:
        rows.append((offset, buffer))
        offset += len(buffer)
    return rows


class Files(Ledger):
    """Counts the bytes of files too: `used` counts files, for eviction goes by those."""

    def __init__(self, *, scan_resistant: bool = False) -> None:
        super().__init__(scan_resistant=scan_resistant)
        self.file_bytes = 0
        self.largest = BLOCK

    def add(self, identity: Identity, entry: Entry) -> Entry | None:
        before = super().add(identity, entry)
        size = BLOCK + _padded(entry.hit.length)
        self.file_bytes += size
        self.largest = max(self.largest, size)
        return before

    def remove(self, identity: Identity) -> Entry | None:
        entry = super().remove(identity)
        if entry is not None:
            self.file_bytes -= BLOCK + _padded(entry.hit.length)
        return entry


class NixlStoreAdapter(SlotAdapter):
    """Slots that are files; see the module. `file_size` 0: as large as need be."""

    type = "nixl_store"
    ledger = Files
    _ledger: Files

    def __init__(
        self,
        name: str,
        folder: Path,
        pool_size: int,
        transfers: Transfers,
        *,
        file_size: int = 0,
        direct: bool = False,
        eviction: Eviction | None = None,
        objects: "ObjectPool | None" = None,
    ) -> None:
        stride = file_size or BLOCK + LARGEST
        self._pool: Pool | ObjectPool = objects or Pool(name, folder, pool_size, stride, transfers, direct=direct)
        super().__init__(name, self._pool, stride, where=objects.where if objects else str(folder), eviction=eviction)
        self._file_size = file_size

    def attach(self, memory: memoryview) -> None:
        self._pool.transfers.attach(memory)

    def _check_superblock(self, size: int) -> None:
        """The pool has checked its manifest; each slot stands for itself, so there is no geometry to agree on."""
        self._generation = self._pool.generation

    def _cure(self, need: int) -> str:
        return f"leave file_size out, or make it {need} at least"

    def _store(self, item: Item) -> Stored:
        while True:
            try:
                return super()._store(item)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                # The file system is fuller than the pool: make room there as if that were the limit.
                self.full_note.note(self.where, self.usage().bytes_limit)
                if self.eviction.policy == "noop" or not self._give_back():
                    return Stored(False, "full")

    def _give_back(self) -> bool:
        """Evict one value; False where there is none that may go."""
        with self._lock:
            victim = self._ledger.victim(self._clock_ns())
            entry = self._ledger.remove(victim) if victim is not None else None
            if victim is None or entry is None:
                return False
        self._evict([(victim, entry)])
        return True

    def usage(self) -> Usage:
        """Bytes of the files, and of as many of the largest as the pool has (or of `file_size`)."""
        with self._lock:
            held = self._ledger
            return Usage(held.file_bytes, self._slots * (self._file_size or held.largest), len(held))

    def describe(self) -> dict[str, object]:
        backend = self._pool.transfers.backend
        return {"path": self.where, "backend": backend, "files": self._slots, "file_size": self._file_size}


def _padded(length: int) -> int:
    return -(-length // BLOCK) * BLOCK


# ---- configuration -----------------------------------------------------------------------------------------------------


def parameters(
    name: str, type_name: str, values: dict[str, Any], ours: dict[str, Any], *, needs: str = "file_path"
) -> tuple[dict[str, Any], dict[str, str]]:
    """`backend_params` read: those of ours (name -> how to read it), and those for the back end. Raises AdapterConfigError."""
    made: dict[str, Any] = {}
    rest: dict[str, str] = {}
    for word_, value in values["backend_params"].items():
        if word_ not in ours:
            rest[word_] = str(value).lower() if isinstance(value, bool) else str(value)
            continue
        try:
            made[word_] = ours[word_](value)
        except UsageError as error:
            raise AdapterConfigError(
                f"adapter {name} ({type_name}): field 'backend_params': {word_!r}: {error.message}", hint=error.hint
            ) from None
    if needs not in made and needs not in rest:
        raise AdapterConfigError(
            f"adapter {name} ({type_name}): field 'backend_params': {needs!r} is missing",
            hint='such as {"file_path": "/srv/kv", "use_direct_io": "false"}' if needs == "file_path" else "the bucket's name",
        )
    return made, rest


def _file_size(value: Any) -> int:
    made: int = size(1)(value)
    if made % BLOCK or made < SMALLEST_FILE:
        raise UsageError(
            f"{value}: a file of this size can hold no chunk",
            hint=f"a multiple of {BLOCK}, {SMALLEST_FILE} at least; or leave it out: a file is as large as its chunk",
        )
    return made


def _make_objects(name: str, values: dict[str, Any]) -> Adapter:
    from kvd.tiers.adapters.nixl_objects import ObjectPool

    def secret(value: Any) -> str:
        return read_secret(text(value))

    readers = {"prefix": text, "file_size": _file_size, "use_direct_io": switch, "access_key": secret, "secret_key": secret}
    ours, rest = parameters(name, "nixl_store", values, readers, needs="bucket")
    rest |= {word_: ours[word_] for word_ in ("access_key", "secret_key") if word_ in ours}
    transfers = Transfers(name, "nixl_store", OBJECTS, rest)
    file_size = ours.get("file_size", 0)
    objects = ObjectPool(
        name, rest["bucket"], ours.get("prefix", "kvd/"), values["pool_size"], file_size or BLOCK + LARGEST, transfers
    )
    return NixlStoreAdapter(
        name, Path(), values["pool_size"], transfers, file_size=file_size, eviction=values.get("eviction"), objects=objects
    )


def _make(name: str, values: dict[str, Any]) -> Adapter:
    if values["backend"] == OBJECTS:
        return _make_objects(name, values)
    ours, rest = parameters(name, "nixl_store", values, {"file_path": path, "use_direct_io": switch, "file_size": _file_size})
    transfers = Transfers(name, "nixl_store", values["backend"], rest)
    return NixlStoreAdapter(
        name,
        ours["file_path"],
        values["pool_size"],
        transfers,
        file_size=ours.get("file_size", 0),
        direct=ours.get("use_direct_io", False),
        eviction=values.get("eviction"),
    )


KIND = Kind(
    "nixl_store",
    "NIXL: a pool of files",
    "kvd.tiers.adapters.nixl_store:NixlStoreAdapter",
    _make,
    (
        Field("backend", word(*BACKENDS, OBJECTS), required=True, help="POSIX, GDS, GDS_MT or HF3FS; OBJ: objects in a bucket"),
        Field(
            "backend_params",
            mapping,
            required=True,
            help='{"file_path": DIR, "use_direct_io": "false"}, or for OBJ {"bucket": NAME, "prefix": TEXT}; '
            '"file_size" bounds a file; more is the back end\'s own',
        ),
        Field("pool_size", whole(1, 1 << 24), required=True, help="number of files: as many values fit"),
    ),
    library="nixl",
    extra="nixl",
)
