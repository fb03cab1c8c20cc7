"""AES-256-GCM: nobody who can read or write the adapter's medium learns or changes a value, or moves it to another key.

Encoded form: u8 version (1), 8 bytes that name the key, a random salt of 16 bytes, the ciphertext, the tag of 16 bytes.
Each value has a key of its own, HKDF-SHA256 of the configured one and the salt, so that the nonce can be constant and no
number of values wears the configured key out. The associated data are the identity (64 bytes), the frame's head and these
25 bytes: a value that was renamed, or whose frame says something else, does not decrypt.

Keys change by configuration: `key` encrypts, `old_keys` still decrypt. A value under a key that is no longer named there is
a miss. A key's name is the beginning of a digest of it, so configuration need not number them.
"""

import base64
import binascii
import hashlib
import hmac
import secrets
import struct
from collections.abc import Sequence
from typing import Any

from kvd.store.identity import Identity
from kvd.tiers.serde.stage import Damaged, KeyUnknown, Stage
from kvtools.errors import UsageError

VERSION = 1
KEY_BYTES = 32
_HEAD = struct.Struct("<B8s16s")
_TAG = 16
_NONCE = bytes(12)
_INFO = b"kvtools.serde.aesgcm/1"


def key_of(text: str) -> bytes:
    """The key that a secret's text means: 64 hex digits, or base64 of 32 bytes. Raises UsageError (without the text)."""
    try:
        key = bytes.fromhex(text) if len(text) == 2 * KEY_BYTES else base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error):
        key = b""
    if len(key) != KEY_BYTES:
        raise UsageError("not a key of 256 bits", hint="64 hex digits or base64: openssl rand -hex 32 makes one")
    return key


def key_name(key: bytes) -> bytes:
    """The 8 bytes that stand for a key in what it encrypted."""
    return hashlib.sha256(b"kvtools.serde.aesgcm key name" + key).digest()[:8]


class AesGcm(Stage):
    """`key` for what is stored, and `old_keys` besides for what is loaded."""

    type = "aesgcm"
    recipe = "aesgcm"

    def __init__(self, key: bytes, old_keys: Sequence[bytes] = ()) -> None:
        self._name = key_name(key)
        self._keys = {key_name(one): one for one in (*old_keys, key)}

    def bound(self, length: int) -> int:
        return _HEAD.size + length + _TAG

    def encode(self, source: memoryview, target: memoryview, identity: Identity, head: bytes) -> int | None:
        salt = secrets.token_bytes(16)
        own = _HEAD.pack(VERSION, self._name, salt)
        target[: _HEAD.size] = own
        end = self.bound(len(source))
        _cipher(self._keys[self._name], salt).encrypt_into(_NONCE, source, identity + head + own, target[_HEAD.size : end])
        return end

    def decode(self, source: memoryview, target: memoryview, identity: Identity, head: bytes) -> None:
        from cryptography.exceptions import InvalidTag

        if len(source) != self.bound(len(target)):
            raise Damaged(f"{len(source)} encrypted bytes cannot be {len(target)}")
        own = bytes(source[: _HEAD.size])
        version, name, salt = _HEAD.unpack(own)
        if version != VERSION:
            raise Damaged(f"aesgcm version {version}")
        if name not in self._keys:
            raise KeyUnknown(name.hex())
        try:
            _cipher(self._keys[name], salt).decrypt_into(_NONCE, source[_HEAD.size :], identity + head + own, target)
        except InvalidTag:
            raise Damaged("it was changed, or belongs to another key") from None


def _cipher(key: bytes, salt: bytes) -> Any:
    """The cipher of one value: HKDF-SHA256 (RFC 5869), one block."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    own = hmac.digest(hmac.digest(salt, key, "sha256"), _INFO + b"\x01", "sha256")
    return AESGCM(own)
