"""Which tokens make a chunk, and the 32-byte key it is stored under.

A chunk is `chunk_tokens` consecutive tokens from a multiple of `chunk_tokens`; a tail chunk is the shorter run of whole
blocks that a prompt ends with. The engine chains its block hashes, so the hash of a chunk's last block stands for the whole
prefix; the key also covers where the chunk starts and ends, so that a tail and the full chunk around it are two values.

The engine mixes salts, LoRA names and multimodal inputs into its hashes; model, dtype and layout are in the namespace.
Both sides compute chunks with this module and with nothing else. The format is stored: change it only with FORMAT.
"""

import hashlib
import struct
from collections.abc import Sequence
from typing import NamedTuple

FORMAT = 1
"""Version of keys, chunk contents and namespaces together: part of every namespace."""

AUTO_CHUNK_TOKENS = 256
"""Tokens of a chunk without GPU-direct: small enough that short prompts profit, large enough for one copy a layer."""

DIRECT_CHUNK_BYTES = 128 << 20

_SPAN = struct.Struct("<QQ")


class Span(NamedTuple):
    """The tokens [start, end) of a prefix that one chunk holds."""

    start: int
    end: int


def chunk_tokens(wanted: int | None, unit: int, unit_bytes: int = 0) -> int:
    """Tokens of a chunk: `wanted`, or 256, rounded to whole blocks of every group, at least one.

    `unit_bytes` is given with GPU-direct: the bytes of `unit` tokens in all groups. A chunk is then what gives 128 MiB, since
    that is where its fan-out pays off.
    """
    if wanted is None and unit_bytes:
        return -(-DIRECT_CHUNK_BYTES // unit_bytes) * unit
    return max(1, round((wanted or AUTO_CHUNK_TOKENS) / unit)) * unit


class Keys:
    """The chunk keys of one request, grown with its block hashes. `hash_tokens`: tokens a block hash covers.

    The hashes are the engine's own list, and it may shorten it and go on otherwise: a session whose input is streamed drops the
    last sampled token for the next input. So a key that is kept counts only with the hash it was made of.
    """

    def __init__(self, hashes: Sequence[bytes], *, hash_tokens: int, chunk: int, unit: int) -> None:
        self.hashes = hashes
        self.hash_tokens = hash_tokens
        self.chunk = chunk
        self.unit = unit
        self._full: list[tuple[bytes, bytes]] = []
        """Hash of its last block and key, of the full chunks from the first on."""

    @property
    def tokens(self) -> int:
        """Tokens that have a hash, in whole units."""
        return len(self.hashes) * self.hash_tokens // self.unit * self.unit

    def of(self, span: Span) -> bytes:
        """The key of a chunk. The last block of the span must have its hash."""
        if span.end - span.start != self.chunk:
            return self._digest(span, self._last(span))
        index = span.start // self.chunk
        while len(self._full) <= index:
            start = len(self._full) * self.chunk
            self._full.append(self._made(Span(start, start + self.chunk)))
        if self._full[index][0] != self._last(span):
            self._full[index] = self._made(span)
        return self._full[index][1]

    def spans(self, first_chunk: int, end: int) -> list[Span]:
        """Chunks from number `first_chunk` on that cover the tokens up to `end` (whole units); the last may be a tail."""
        starts = range(first_chunk * self.chunk, end, self.chunk)
        return [Span(start, min(start + self.chunk, end)) for start in starts]

    def tails(self, start: int, longest: int, above: int) -> list[Span]:
        """Tail chunks from `start`, longest first, that end at most at `longest` and beyond `above`."""
        return [Span(start, end) for end in range(longest, max(start, above), -self.unit) if end - start < self.chunk]

    def _last(self, span: Span) -> bytes:
        return self.hashes[span.end // self.hash_tokens - 1]

    def _made(self, span: Span) -> tuple[bytes, bytes]:
        last = self._last(span)
        return last, self._digest(span, last)

    def _digest(self, span: Span, last: bytes) -> bytes:
        return hashlib.sha256(b"kvd chunk 1" + _SPAN.pack(span.start, span.end) + bytes(last)).digest()
