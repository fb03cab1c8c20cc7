"""`nixl_store` with the back end OBJ: a pool of objects in an S3 bucket, one value in each.

<bucket>/<prefix>manifest     the manifest, as the first block of a pool of files
<bucket>/<prefix>obj_<i>      slot i: a header block and the value; a block of zeros where nothing is in it any more

NIXL writes an object at once, so header and value are put together in a buffer of the thread's first. It does not say when an
object was shorter than what was asked for: headers are zeroed before they are read, and the value has its checksum. It does
not delete: what is evicted leaves 4096 zeros behind. A bucket knows no owner: two daemons on one prefix would take each
other's slots away (found out by identity and checksum, but a waste): give each a prefix of its own.
"""

import json
import secrets
from collections.abc import Sequence

import numpy as np

from kvd.tiers.adapters.base import AdapterConfigError
from kvd.tiers.adapters.nixl import Transfers
from kvd.tiers.adapters.slots import BLOCK, Medium, ThreadBuffers

FORMAT, VERSION = "kvtools.nixl-objects", 1


class ObjectPool(Medium):
    """`count` objects as one space of slots: slot i begins at BLOCK + i * `stride`. Block 0 is nowhere."""

    def __init__(self, name: str, bucket: str, prefix: str, count: int, stride: int, transfers: Transfers) -> None:
        self.where = f"{bucket}/{prefix}"
        self.transfers = transfers
        self.generation = 0
        self._name, self._prefix, self._count, self._stride = name, prefix, count, stride
        self._buffers = ThreadBuffers()

    def open(self) -> int:
        self.transfers.open()
        manifest = f"{self._prefix}manifest"
        block = self._buffers.block()
        if not self.transfers.exists(manifest):
            body = {"format": FORMAT, "version": VERSION, "generation": secrets.randbits(63)}
            block[:] = json.dumps(body).encode().ljust(BLOCK, b"\0")
            self.transfers.put(manifest, block)
        block[:] = bytes(BLOCK)
        self.transfers.get(manifest, [(0, block)])
        try:
            found = json.loads(bytes(block).rstrip(b"\0"))
            held, self.generation = (found["format"], found["version"]), int(found["generation"])
        except (ValueError, TypeError, KeyError):
            raise AdapterConfigError(f"{self._name}: {self.where}manifest is none", hint="give a prefix of its own") from None
        if held != (FORMAT, VERSION):
            raise AdapterConfigError(
                f"{self._name}: {self.where} holds {held[0]} version {held[1]}, this kvd reads {FORMAT} version {VERSION}",
                hint="give another prefix, or empty this one",
            )
        return BLOCK + self._count * self._stride

    def close(self) -> None:
        self.transfers.close()

    def _key(self, offset: int) -> tuple[str, int]:
        slot, within = divmod(offset - BLOCK, self._stride)
        return f"{self._prefix}obj_{slot}", within

    def read(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """What is not there reads as zeros, which is no header."""
        key, at = self._key(offset)
        buffers[0][:BLOCK] = bytes(BLOCK)
        if not self.transfers.exists(key):
            return
        parts = []
        for buffer in buffers:
            parts.append((at, buffer))
            at += len(buffer)
        self.transfers.get(key, parts)

    def write(self, offset: int, buffers: Sequence[memoryview]) -> None:
        key, _ = self._key(offset)
        total = sum(map(len, buffers))
        whole = self._buffers.bounce(total)[:total]
        at = 0
        for buffer in buffers:
            np.copyto(np.frombuffer(whole[at : at + len(buffer)], np.uint8), np.frombuffer(buffer, np.uint8))
            at += len(buffer)
        self.transfers.put(key, whole)

    def sync(self) -> None:
        """What the service has taken is there."""
