"""One step of a serde chain.

A stage turns bytes into bytes in memory that its caller owns, on the caller's thread, and keeps no state that two threads
could share. It may decline to encode a value (`None`): then the value goes to the next stage as it is, which the frame notes.
"""

from abc import ABC, abstractmethod

from kvd.store.identity import Identity

LENGTH_MAX = (1 << 31) - (1 << 20)
"""Bytes of a value that a chain takes at most: lengths are 32 bits, and the ciphers' own limit is 2 GiB."""


class Damaged(Exception):
    """These bytes are not what the stage made, or not for this identity. The text says how it was noticed."""


class KeyUnknown(Exception):
    """They were encrypted with a key that is not configured: they may be sound."""


class Stage(ABC):
    """`type` is the word in the configuration; `recipe` names, without secrets, all that decoding depends on."""

    type = ""
    lossless = True
    recipe = ""

    @abstractmethod
    def bound(self, length: int) -> int:
        """The most bytes that `encode` makes of `length`."""

    @abstractmethod
    def encode(self, source: memoryview, target: memoryview, identity: Identity, head: bytes) -> int | None:
        """Write the encoded form of `source` into `target` (of at least `bound` bytes); how many, or None: left as it is.

        `head` is what of the frame is known by then; a stage that authenticates covers it and the identity.
        """

    @abstractmethod
    def decode(self, source: memoryview, target: memoryview, identity: Identity, head: bytes) -> None:
        """Fill `target`, which has exactly the length that was encoded. Raises Damaged, KeyUnknown."""
