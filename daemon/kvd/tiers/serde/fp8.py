"""FP8 quantization: one byte (E4M3, as in the OCP 8-bit floating point specification) for each 16- or 32-bit float.

Every BLOCK elements share a scale, a power of two, as in the OCP MX formats: the largest magnitude of the block comes to
lie in E4M3's top binade. A power of two costs no precision (E4M3 is itself a floating point format) and makes both ways
exact integer work on exponents: rounding is to nearest, ties to even, subnormals included, and decoding is exact.

Bounds, for an element x of a block whose largest magnitude is A:
  |decoded - x| <= |x| / 16          where |x| >= A / 2^14 (a normal E4M3 number)
  |decoded - x| <= A / 2^17          below that
Zeros and signs are kept exactly.

Encoded form: a byte an element (sign, 4 bits of exponent, 3 of mantissa), then a byte a block: how many binades the
block was shifted down. The last block may be short.

It is lossy, and the daemon does not know what the bytes of a value are. So a value that does not look like floats of the
given type goes through as it is: its length is no multiple of the element's, it holds an infinity or a NaN, or more than a
quarter of its non-zero elements would be subnormal (packed integers read as floats do that, keys and values do not).

Speed comes from doing it in steps that stay in the cache, with numpy's vector loops on 16-bit (or 32-bit) integers; only
the few subnormals are dealt with apart.
"""

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvd.store.identity import Identity
from kvd.tiers.serde.stage import Damaged, Stage

BLOCK = 128
STEP = 1 << 17
TOP = 15
"""E4M3's highest exponent field; with mantissa 7 it is NaN, so 448 is its largest number."""
STRANGE_SHARE = 4
"""A value is left alone when one in so many of its non-zero elements would be subnormal."""

Words = npt.NDArray[Any]
Codes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Float:
    """A type of floats by its bits."""

    name: str
    size: int
    mantissa: int
    bias: int
    top: int
    """The exponent field of infinities."""

    @property
    def word(self) -> np.dtype[Any]:
        return np.dtype(f"<u{self.size}")

    @property
    def signed(self) -> np.dtype[Any]:
        return np.dtype(f"<i{self.size}")

    @property
    def sign(self) -> int:
        return 1 << (8 * self.size - 1)


FLOATS = {
    one.name: one for one in (Float("bfloat16", 2, 7, 127, 255), Float("float16", 2, 10, 15, 31), Float("float32", 4, 23, 127, 255))
}


class Fp8(Stage):
    """Quantizes elements of one type. Thread-safe: scratch memory is each thread's own."""

    type = "fp8"
    lossless = False

    def __init__(self, dtype: str = "bfloat16") -> None:
        self.float = FLOATS[dtype]
        self.recipe = f"fp8 e4m3 block {BLOCK} {dtype}"
        self._tiny = _tiny(self.float)
        self._local = threading.local()

    def bound(self, length: int) -> int:
        elements = length // self.float.size
        return elements + -(-elements // BLOCK)

    def encode(self, source: memoryview, target: memoryview, identity: Identity, head: bytes) -> int | None:
        if not len(source) or len(source) % self.float.size:
            return None
        words = np.frombuffer(source, dtype=self.float.word)
        elements = len(words)
        codes = np.frombuffer(target, dtype=np.uint8, count=elements)
        shifts = np.frombuffer(target, dtype=np.uint8, count=-(-elements // BLOCK), offset=elements)
        strange = zeros = 0
        for start in range(0, elements, STEP):
            end = min(start + STEP, elements)
            found = self._encode(words[start:end], codes[start:end], shifts[start // BLOCK : -(-end // BLOCK)])
            if found is None:
                return None
            strange, zeros = strange + found[0], zeros + found[1]
        if strange * STRANGE_SHARE > elements - zeros:
            return None
        return elements + len(shifts)

    def decode(self, source: memoryview, target: memoryview, identity: Identity, head: bytes) -> None:
        elements = len(target) // self.float.size
        if len(target) % self.float.size or len(source) != self.bound(len(target)):
            raise Damaged(f"{len(source)} bytes cannot be {elements} elements")
        words = np.frombuffer(target, dtype=self.float.word)
        codes = np.frombuffer(source, dtype=np.uint8, count=elements)
        shifts = np.frombuffer(source, dtype=np.uint8, offset=elements)
        if int(shifts.max()) > self.float.top - TOP:
            raise Damaged("a scale that cannot be")
        for start in range(0, elements, STEP):
            end = min(start + STEP, elements)
            self._decode(codes[start:end], shifts[start // BLOCK : -(-end // BLOCK)], words[start:end])

    # ---- one step ----------------------------------------------------------------------------------------------------

    def _scratch(self, elements: int) -> tuple[Words, Words]:
        """Two arrays of whole blocks."""
        if not hasattr(self._local, "pair"):
            self._local.pair = np.empty(STEP, dtype=self.float.word), np.empty(STEP, dtype=self.float.word)
        count = -(-elements // BLOCK) * BLOCK
        one, two = self._local.pair
        return one[:count], two[:count]

    def _encode(self, words: Words, codes: Codes, shifts: Codes) -> tuple[int, int] | None:
        """Encode one step: how many elements became subnormal, how many are zero in blocks where that was looked at.

        None where there are infinities or NaNs.
        """
        kind, elements = self.float, len(words)
        size, code = self._scratch(elements)
        size[elements:] = 0
        np.bitwise_and(words, kind.sign - 1, out=size[:elements])
        blocks = size.reshape(-1, BLOCK)
        largest = blocks.max(axis=1)
        if int(largest.max()) >= kind.top << kind.mantissa:
            return None
        # What would round to 480 or more goes one binade further down: 1.8125 is the tie, and goes to the even 1.75.
        spare = (1 << kind.mantissa) - 1 - (13 << kind.mantissa - 4)
        shift = np.maximum((largest.astype(np.int64) + spare >> kind.mantissa) - TOP, 0)
        shifts[:] = shift
        # Round the mantissa to 3 bits, to nearest, ties to even; a carry runs into the exponent, as it must.
        drop = kind.mantissa - 3
        np.right_shift(size, drop, out=code)
        np.bitwise_and(code, 1, out=code)
        np.add(code, (1 << drop - 1) - 1, out=code)
        np.add(code, size, out=code)
        np.right_shift(code, drop, out=code)
        signed = code.view(kind.signed)
        np.subtract(signed.reshape(-1, BLOCK), (shift << 3).astype(kind.signed)[:, None], out=signed.reshape(-1, BLOCK))
        strange, zeros = self._subnormals(size, signed, shift)
        np.right_shift(words, 8 * kind.size - 8, out=size[:elements])
        np.bitwise_and(size, 0x80, out=size)
        np.bitwise_or(size, code, out=size)
        np.copyto(codes, size[:elements], casting="unsafe")
        return strange, zeros

    def _subnormals(self, size: Words, code: Words, shift: npt.NDArray[np.int64]) -> tuple[int, int]:
        """Mend what is no normal number after the shift; how many such there were, zeros apart, and how many zeros."""
        kind = self.float
        # Where nothing was shifted the bits are right already: subnormals go on where normal numbers end.
        limit = np.where(shift > 0, 8, -1).astype(kind.signed)
        small = code.reshape(-1, BLOCK) < limit[:, None]
        if not small.any():
            return 0, 0
        where = np.flatnonzero(small)
        value = size[where].astype(np.int64)
        field = value >> kind.mantissa
        mantissa = value & (1 << kind.mantissa) - 1
        mantissa = np.where(field > 0, mantissa | 1 << kind.mantissa, mantissa)
        down = np.minimum(kind.mantissa - 2 + shift[where // BLOCK] - np.maximum(field, 1), kind.mantissa + 2)
        # As above: half of a last place less one, and one more where it would be odd.
        odd = mantissa >> down & 1
        code[where] = mantissa + (1 << down - 1) - 1 + odd >> down
        zeros = len(value) - int(np.count_nonzero(value))
        return len(value) - zeros, zeros

    def _decode(self, codes: Codes, shifts: Codes, words: Words) -> None:
        kind, elements = self.float, len(codes)
        code, made = self._scratch(elements)
        code[elements:] = 0
        code[:elements] = codes
        np.bitwise_and(code, 0x7F, out=made)
        limit = np.where(shifts > 0, 8, 0).astype(kind.word)
        small = np.flatnonzero(made.reshape(-1, BLOCK) < limit[:, None])
        mended = self._tiny[shifts[small // BLOCK], made[small]]
        np.left_shift(made, kind.mantissa - 3, out=made)
        shift = shifts.astype(kind.word) << kind.mantissa
        np.add(made.reshape(-1, BLOCK), shift[:, None], out=made.reshape(-1, BLOCK))
        made[small] = mended
        np.bitwise_and(code, 0x80, out=code)
        np.left_shift(code, 8 * kind.size - 8, out=code)
        np.bitwise_or(code[:elements], made[:elements], out=words)


def _tiny(kind: Float) -> Words:
    """The bits of the eight numbers below E4M3's normal ones, by shift: row s has them moved up by s binades."""
    units = np.arange(8, dtype=np.float64)
    rows = np.ldexp(units[None, :], (np.arange(kind.top - TOP + 1) + 1 - kind.bias - 3)[:, None])
    if kind.name == "float16":
        return rows.astype(np.float16).view(np.uint16)
    bits = rows.astype(np.float32).view(np.uint32)
    return (bits >> 16).astype(np.uint16) if kind.name == "bfloat16" else bits
