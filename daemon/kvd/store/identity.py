"""What a value is stored under: 64 bytes, 32 of namespace and 32 of key.

A namespace is the fingerprint of everything that must match for the bytes to be reusable (DESIGN: "Words"); a key is the
digest of a chunk's prefix. The two are never folded into fewer bytes: all 64 are the index key in RAM, are written beside
the value in every tier, and are compared when it is read. Equal keys in two namespaces are two values.
"""

import hashlib
from collections.abc import Sequence

NAMESPACE_BYTES = 32
KEY_BYTES = 32
IDENTITY_BYTES = NAMESPACE_BYTES + KEY_BYTES

Identity = bytes
"""namespace + key, 64 bytes."""


def namespace_of(name: str | bytes) -> bytes:
    """The 32 bytes of a namespace: the SHA-256 of a str's UTF-8, or bytes as they are. Raises ValueError unless 32 long."""
    if isinstance(name, str):
        return hashlib.sha256(name.encode(errors="surrogateescape")).digest()
    if len(name) != NAMESPACE_BYTES:
        raise ValueError(f"a namespace is {NAMESPACE_BYTES} bytes, not {len(name)}")
    return bytes(name)


def check_key(key: bytes) -> bytes:
    """`key` itself. Raises ValueError unless it is exactly 32 bytes."""
    given: object = key
    if len(key) != KEY_BYTES or isinstance(given, str):
        raise ValueError(f"a key is exactly {KEY_BYTES} bytes, not {'a str' if isinstance(given, str) else len(key)}")
    return key


def check_keys(keys: Sequence[bytes]) -> list[bytes]:
    """`keys` as a list. Raises ValueError when one is not exactly 32 bytes.

    One join is the quickest look at all lengths. Lengths that cancel out (31 and 33) pass: such keys are just not there.
    """
    try:
        fits = len(b"".join(keys)) == KEY_BYTES * len(keys)
    except TypeError:  # one of them is no bytes at all
        fits = False
    if not fits:
        for key in keys:
            check_key(key)
    return list(keys)
