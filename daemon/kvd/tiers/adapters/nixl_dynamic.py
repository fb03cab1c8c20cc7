"""`nixl_store_dynamic`: one file an object, moved by NIXL (POSIX, GDS, GDS_MT, HF3FS).

As `fs` in all else (names, renaming into place, usage, eviction, sharing by several daemons), with files that suit direct
I/O: a header block of 4096 bytes that begins with the envelope, then the value, padded with zeros to 4096. The manifest has
a name of its own: `fs` and this read each other's folders not at all.
"""

import errno
import os
from pathlib import Path
from typing import Any

from kvd.tiers.adapters import envelope
from kvd.tiers.adapters.base import Adapter, AdapterConfigError, Item, Want
from kvd.tiers.adapters.fs import FsAdapter
from kvd.tiers.adapters.kind import Eviction, Field, Kind, gib, mapping, path, switch, word
from kvd.tiers.adapters.nixl import BACKENDS, Transfers
from kvd.tiers.adapters.nixl_store import parameters
from kvd.tiers.adapters.slots import BLOCK, ThreadBuffers
from kvtools.errors import UsageError


class NixlDynamicAdapter(FsAdapter):
    """Files through NIXL; see the module. `keep` False: the files are removed when the daemon ends in order."""

    type = "nixl_store_dynamic"
    manifest = ("kvtools-nixl-dynamic.json", "kvtools.nixl-dynamic", 1)

    def __init__(
        self,
        name: str,
        root: Path,
        max_bytes: int,
        transfers: Transfers,
        *,
        direct: bool = False,
        keep: bool = True,
        eviction: Eviction | None = None,
    ) -> None:
        super().__init__(name, root, max_bytes, eviction=eviction)
        self._transfers = transfers
        self._direct = direct
        self._keep = keep
        self._buffers = ThreadBuffers()

    def attach(self, memory: memoryview) -> None:
        self._transfers.attach(memory)

    def open(self) -> None:
        self._transfers.open()
        super().open()

    def close(self, deadline_s: float = 5.0) -> None:
        if not self._keep:
            self.delete([identity for identity, _ in self.enumerate()])
        super().close(deadline_s)
        self._transfers.close()

    def _total(self, length: int) -> int:
        return BLOCK + -(-length // BLOCK) * BLOCK

    def _reopened(self, fd: int, flags: int) -> int:
        """The same file with other flags: O_DIRECT where that is wanted and to be had. The caller closes it."""
        try:
            return os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC | (os.O_DIRECT if self._direct else 0))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC)

    def _pour(self, fd: int, item: Item) -> None:
        length = len(item.data)
        block = self._buffers.block()
        block[:] = envelope.seal(item).ljust(BLOCK, b"\0")
        data = item.data
        if self._direct:
            data = item.padded if item.padded is not None else self._buffers.bounce(length)
            if item.padded is None:
                envelope.copy(data[:length], item.data)
                data[length:] = bytes(len(data) - length)
        os.posix_fallocate(fd, 0, self._total(length))  # a full file system says so here, in words
        again = self._reopened(fd, os.O_RDWR)
        try:
            self._transfers.write(again, [(0, block), (BLOCK, data)])
        finally:
            os.close(again)

    def _draw(self, fd: int, size: int, want: Want) -> tuple[envelope.Head | None, bool]:
        length = len(want.into)
        block = self._buffers.block()
        if size < BLOCK:
            return None, False
        if size != self._total(length):  # another value: its header says which
            return envelope.open_head(os.pread(fd, envelope.SIZE, 0)), False
        data = want.into
        if self._direct:
            data = want.padded if want.padded is not None else self._buffers.bounce(length)
        again = self._reopened(fd, os.O_RDONLY)
        try:
            self._transfers.read(again, [(0, block), (BLOCK, data)])
        finally:
            os.close(again)
        if self._direct and want.padded is None:
            envelope.copy(want.into, data[:length])
        head = envelope.open_head(block)
        return head, head is not None and envelope.intact(head, want.into)

    def describe(self) -> dict[str, object]:
        return {"path": str(self.root), "backend": self._transfers.backend}


# ---- configuration -----------------------------------------------------------------------------------------------------


def _capacity(value: Any) -> int:
    made: int = gib()(value)
    if made <= 0:
        raise UsageError(f"not a capacity: {value!r}", hint="GiB that the files may take, such as 100")
    return made


def _make(name: str, values: dict[str, Any]) -> Adapter:
    readers = {"file_path": path, "use_direct_io": switch, "max_capacity_gb": _capacity, "shard_dirs": switch}
    ours, rest = parameters(name, "nixl_store_dynamic", values, readers)
    if "max_capacity_gb" not in ours:
        raise AdapterConfigError(
            f"adapter {name} (nixl_store_dynamic): field 'backend_params': 'max_capacity_gb' is missing",
            hint="GiB that the files may take, such as 100",
        )
    return NixlDynamicAdapter(
        name,
        ours["file_path"],
        ours["max_capacity_gb"],
        Transfers(name, "nixl_store_dynamic", values["backend"], rest),
        direct=ours.get("use_direct_io", False),
        keep=values["persist_enabled"],
        eviction=values.get("eviction"),
    )


KIND = Kind(
    "nixl_store_dynamic",
    "NIXL: one file an object",
    "kvd.tiers.adapters.nixl_dynamic:NixlDynamicAdapter",
    _make,
    (
        Field("backend", word(*BACKENDS), required=True, help="POSIX, GDS, GDS_MT or HF3FS"),
        Field(
            "backend_params",
            mapping,
            required=True,
            help='{"file_path": DIR, "max_capacity_gb": N, "use_direct_io": "false"}; `shard_dirs` is understood: '
            "files are always spread over folders; more is the back end's own",
        ),
        Field("persist_enabled", switch, True, help="keep the files when the daemon ends"),
    ),
    library="nixl",
    extra="nixl",
)
