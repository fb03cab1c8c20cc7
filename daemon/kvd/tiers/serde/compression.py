"""zstd and lz4. Both let go of the GIL; what does not become smaller is left as it is.

Neighbouring floats differ in their low bytes and resemble each other in their high ones. `shuffle` puts all first bytes of
the elements together, then all second ones, and so on, before compressing: 16-bit floats compress hardly at all without it.
"""

import threading
from typing import Any

import numpy as np

from kvd.store.identity import Identity
from kvd.tiers.serde.stage import Damaged, Stage


class Compression(Stage):
    """What zstd and lz4 have in common: elements of `shuffle` bytes (1: no shuffling)."""

    def __init__(self, shuffle: int) -> None:
        self.shuffle = shuffle
        self.recipe = f"{self.type} shuffle {shuffle}"

    def bound(self, length: int) -> int:
        return length

    def encode(self, source: memoryview, target: memoryview, identity: Identity, head: bytes) -> int | None:
        packed = self._compress(source if self.shuffle == 1 else _apart(source, self.shuffle))
        if len(packed) >= len(source):
            return None
        np.frombuffer(target, dtype=np.uint8)[: len(packed)] = np.frombuffer(packed, dtype=np.uint8)
        return len(packed)

    def decode(self, source: memoryview, target: memoryview, identity: Identity, head: bytes) -> None:
        plain = self._decompress(source, len(target))
        if len(plain) != len(target):
            raise Damaged(f"{len(plain)} bytes came out, not {len(target)}")
        if self.shuffle == 1:
            np.frombuffer(target, dtype=np.uint8)[:] = np.frombuffer(plain, dtype=np.uint8)
        else:
            _together(plain, target, self.shuffle)

    def _compress(self, source: Any) -> bytes:
        raise NotImplementedError

    def _decompress(self, source: memoryview, length: int) -> bytes:
        raise NotImplementedError


class Zstd(Compression):
    """zstd at `level` 1 (quick) to 19 (small), or below 0 (quicker still)."""

    type = "zstd"

    def __init__(self, level: int = 1, shuffle: int = 1) -> None:
        super().__init__(shuffle)
        self.level = level
        self._local = threading.local()  # a compressor must not be used by two threads at once

    def _compress(self, source: Any) -> bytes:
        import zstandard

        if not hasattr(self._local, "compressor"):
            self._local.compressor = zstandard.ZstdCompressor(level=self.level, write_content_size=True)
        return self._local.compressor.compress(source)  # type: ignore[no-any-return]

    def _decompress(self, source: memoryview, length: int) -> bytes:
        import zstandard

        if zstandard.frame_content_size(source) != length:
            raise Damaged("a zstd frame of another length")
        try:
            return zstandard.ZstdDecompressor().decompress(source, max_output_size=length)
        except zstandard.ZstdError as error:
            raise Damaged(f"zstd: {error}") from None


class Lz4(Compression):
    """lz4's block format; a higher `acceleration` is quicker and larger."""

    type = "lz4"

    def __init__(self, acceleration: int = 1, shuffle: int = 1) -> None:
        super().__init__(shuffle)
        self.acceleration = acceleration

    def _compress(self, source: Any) -> bytes:
        import lz4.block

        return lz4.block.compress(source, mode="fast", acceleration=self.acceleration, store_size=False)  # type: ignore[no-any-return]

    def _decompress(self, source: memoryview, length: int) -> bytes:
        import lz4.block

        try:
            return lz4.block.decompress(source, uncompressed_size=length)  # type: ignore[no-any-return]
        except lz4.block.LZ4BlockError as error:
            raise Damaged(f"lz4: {error}") from None


def _apart(source: memoryview, size: int) -> "memoryview[int]":
    """The first bytes of all elements, then the second ones, ...; what is left over at the end stays."""
    plain = np.frombuffer(source, dtype=np.uint8)
    whole = len(plain) // size * size
    made = np.empty(len(plain), dtype=np.uint8)
    lanes = made[:whole].reshape(size, -1)
    if size in (2, 4, 8):  # shifting whole elements is several times quicker than walking over their bytes
        words = plain[:whole].view(f"<u{size}")
        for place in range(size):
            np.copyto(lanes[place], words >> 8 * place, casting="unsafe")
    else:
        lanes[:] = plain[:whole].reshape(-1, size).T
    made[whole:] = plain[whole:]
    return made.data


def _together(source: bytes, target: memoryview, size: int) -> None:
    """The way back."""
    made, plain = np.frombuffer(source, dtype=np.uint8), np.frombuffer(target, dtype=np.uint8)
    whole = len(plain) // size * size
    lanes = made[:whole].reshape(size, -1)
    # The arena is 4 KiB-aligned; a caller's buffer that is not goes the long way.
    if size in (2, 4, 8) and plain.ctypes.data % size == 0:
        words = plain[:whole].view(f"<u{size}")
        words[:] = lanes[0]
        for place in range(1, size):
            words |= lanes[place].astype(words.dtype) << 8 * place
    else:
        plain[:whole].reshape(-1, size)[:] = lanes.T
    plain[whole:] = made[whole:]
