"""The 32 bytes in front of an encoded value: which stages were at work, and how long the value was before each.

Little-endian: magic `KVS1`, u8 number of stages, u8 mask of those that were at work, u16 zero, five u32 of length: of the
value, and of what the first, second, third and fourth stage made of it (0 where there is none), u32 zero. ON DISK: never change.
"""

import struct
from typing import NamedTuple

MAGIC = b"KVS1"
STAGES_MAX = 4
_FIELDS = struct.Struct("<4sBBH5II")
SIZE = _FIELDS.size
assert SIZE == 32


class Frame(NamedTuple):
    """`lengths[0]` is the value's, `lengths[i]` what stage i - 1 made of it."""

    mask: int
    lengths: tuple[int, ...]

    def pack(self) -> bytes:
        padded = self.lengths + (0,) * (STAGES_MAX + 1 - len(self.lengths))
        return _FIELDS.pack(MAGIC, len(self.lengths) - 1, self.mask, 0, *padded, 0)

    def before(self, stage: int) -> bytes:
        """What a stage that authenticates covers: all that was decided before it."""
        return Frame(self.mask & (1 << stage) - 1, self.lengths[: stage + 1]).pack()


def unpack(raw: memoryview) -> Frame | None:
    """The frame at the beginning of these bytes, or None."""
    if len(raw) < SIZE:
        return None
    magic, count, mask, zero, *rest = _FIELDS.unpack_from(raw)
    if magic != MAGIC or not 0 < count <= STAGES_MAX or mask >> count or zero or any(rest[count + 1 :]):
        return None
    return Frame(mask, tuple(rest[: count + 1]))
