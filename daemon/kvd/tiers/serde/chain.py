"""The stages of one adapter, in order: how they are read from its `serde` field, and how values pass them.

    "serde": {"type": "zstd"}
    "serde": [{"type": "fp8", "dtype": "bfloat16"}, {"type": "zstd", "level": 3}, {"type": "aesgcm", "key": "file:/etc/kvd/key"}]

Values pass the list from left to right on their way down. What lies in the adapter is a frame (`frame`) and what the last
stage made. A chain's `mask` is a digest of all that decoding depends on: see `adapter` for what it is for.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np

from kvd.store.identity import NAMESPACE_BYTES, Identity
from kvd.tiers.adapters.base import AdapterConfigError
from kvd.tiers.adapters.kind import Field, nearest, read_values, whole, word
from kvd.tiers.serde import frame
from kvd.tiers.serde.aesgcm import AesGcm, key_of
from kvd.tiers.serde.compression import Lz4, Zstd
from kvd.tiers.serde.fp8 import FLOATS, Fp8
from kvd.tiers.serde.stage import Damaged, Stage
from kvtools.errors import UsageError

EXTRA = "serde"


@dataclass(frozen=True)
class StageKind:
    """One type of stage: its fields, how it is made of them, and the library it needs."""

    type: str
    about: str
    make: Callable[[dict[str, Any]], Stage]
    fields: tuple[Field, ...] = ()
    library: str = ""


class Chain:
    """`stages` for one adapter. Thread-safe."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self.stages = list(stages)
        recipe = "\n".join(["kvtools.serde/1", *(stage.recipe for stage in stages)])
        self.mask = int.from_bytes(hashlib.sha256(recipe.encode()).digest(), "little")
        assert hashlib.sha256().digest_size == NAMESPACE_BYTES

    def __str__(self) -> str:
        return " > ".join(stage.type for stage in self.stages)

    def bounds(self, length: int) -> list[int]:
        """The most bytes there can be after each stage; the last one with the frame."""
        made = []
        for stage in self.stages:
            length = max(length, stage.bound(length))
            made.append(length)
        made[-1] += frame.SIZE
        return made

    def encode(self, source: memoryview, buffers: Sequence[memoryview], identity: Identity) -> int:
        """Encode into the last of `buffers`, which have `bounds`; how many bytes."""
        lengths, mask, value = [len(source)], 0, source
        last = len(self.stages) - 1
        for i, stage in enumerate(self.stages):
            target = buffers[i][frame.SIZE :] if i == last else buffers[i]
            made = stage.encode(value, target, identity, frame.Frame(mask, tuple(lengths)).pack())
            if made is not None:
                mask |= 1 << i
                value = target[:made]
            elif i == last:  # what is encoded has to end up in the last buffer
                np.frombuffer(target, dtype=np.uint8)[: len(value)] = np.frombuffer(value, dtype=np.uint8)
            lengths.append(len(value) if made is None else made)
        buffers[last][: frame.SIZE] = frame.Frame(mask, tuple(lengths)).pack()
        return frame.SIZE + lengths[-1]

    def scratch(self, stored: memoryview, length: int) -> list[int]:
        """Lengths of the buffers that `decode` needs for this. Raises Damaged."""
        found = self._frame(stored, length)
        at_work = [i for i in range(len(self.stages)) if found.mask >> i & 1]
        return [found.lengths[i] for i in at_work[1:]]

    def decode(self, stored: memoryview, into: memoryview, buffers: Sequence[memoryview], identity: Identity) -> None:
        """Decode into exactly the value's bytes. Raises Damaged, KeyUnknown; `into` is undefined then."""
        found = self._frame(stored, len(into))
        at_work = [i for i in range(len(self.stages)) if found.mask >> i & 1]
        value = stored[frame.SIZE :]
        targets = [into, *buffers]
        for position in range(len(at_work) - 1, -1, -1):
            stage = at_work[position]
            self.stages[stage].decode(value, targets[position], identity, found.before(stage))
            value = targets[position]
        if not at_work:
            np.frombuffer(into, dtype=np.uint8)[:] = np.frombuffer(value, dtype=np.uint8)

    def _frame(self, stored: memoryview, length: int) -> frame.Frame:
        found = frame.unpack(stored)
        if found is None or len(found.lengths) != len(self.stages) + 1:
            raise Damaged("no frame of this chain")
        if found.lengths[0] != length or found.lengths[-1] != len(stored) - frame.SIZE:
            raise Damaged("a frame of other lengths")
        if any(not found.mask >> i & 1 and found.lengths[i] != found.lengths[i + 1] for i in range(len(self.stages))):
            raise Damaged("a frame that contradicts itself")
        if any(stage.type == AesGcm.type and not found.mask >> i & 1 for i, stage in enumerate(self.stages)):
            raise Damaged("it is not encrypted, and should be")
        return found


# ---- configuration -----------------------------------------------------------------------------------------------------


def key(value: Any) -> bytes:
    """A key, from the text of a secret."""
    if not isinstance(value, str):
        raise UsageError("not a text")
    return key_of(value)


_SHUFFLE = Field("shuffle", whole(1, 16), 1, help="bytes of an element whose bytes are sorted by place first: 2 for 16-bit floats")
KINDS = {
    kind.type: kind
    for kind in (
        StageKind(
            "fp8",
            "quantizes floats to 8 bits (E4M3), a scale for every 128: lossy",
            lambda v: Fp8(v["dtype"]),
            (
                Field("dtype", word(*FLOATS), "bfloat16", help="the floats that values consist of: bfloat16, float16 or float32"),
                Field("fp8_dtype", word("float8_e4m3fn"), "float8_e4m3fn", help="what they become"),
            ),
        ),
        StageKind(
            "zstd",
            "compresses well",
            lambda v: Zstd(v["level"], v["shuffle"]),
            (Field("level", whole(-7, 19), 1, help="from -7 (quick) to 19 (small)"), _SHUFFLE),
            "zstandard",
        ),
        StageKind(
            "lz4",
            "compresses quickly",
            lambda v: Lz4(v["acceleration"], v["shuffle"]),
            (Field("acceleration", whole(1, 65536), 1, help="higher is quicker and larger"), _SHUFFLE),
            "lz4",
        ),
        StageKind(
            "aesgcm",
            "encrypts with AES-256-GCM, bound to the value's key",
            lambda v: AesGcm(v["key"], v["old_keys"]),
            (
                Field("key", key, required=True, secret=True, help="256 bits, as 64 hex digits or base64: file:PATH or env:NAME"),
                Field("old_keys", key, [], secret=True, many=True, help="a list of keys that still decrypt"),
            ),
            "cryptography",
        ),
    )
}


def read_chain(name: str, body: Any) -> Chain:
    """The chain that an adapter's `serde` field means: one object, or a list of them. Raises AdapterConfigError."""
    where = f"adapter {name}: field 'serde'"
    rows = body if isinstance(body, list) else [body]
    if not 0 < len(rows) <= frame.STAGES_MAX:
        raise AdapterConfigError(f"{where}: from one to {frame.STAGES_MAX} stages, not {len(rows)}")
    stages: list[Stage] = []
    for row in rows:
        if not isinstance(row, Mapping):
            raise AdapterConfigError(f"{where}: not an object: {row!r}", hint='such as {"type": "zstd"}')
        given = row.get("type")
        if given not in KINDS:
            raise AdapterConfigError(f"{where}: unknown type {given!r}", hint=nearest(str(given), list(KINDS)))
        kind = KINDS[given]
        values = read_values(f"{where}, {given}", kind.fields, {k: v for k, v in row.items() if k != "type"}, ())
        if kind.library and find_spec(kind.library) is None:
            raise AdapterConfigError(
                f"{where}: {given} needs the Python package {kind.library}, which is not installed",
                hint=f"pip install 'kvtools[{EXTRA}]'",
            )
        if any(stage.type == given for stage in stages):
            raise AdapterConfigError(f"{where}: {given} stands there twice")
        stages.append(kind.make(values))
    _check_order(where, stages)
    return Chain(stages)


def _check_order(where: str, stages: list[Stage]) -> None:
    """What cannot work in this order is a mistake: encrypted bytes do not compress, and only raw ones are floats."""
    types = [stage.type for stage in stages]
    if "aesgcm" in types[:-1]:
        raise AdapterConfigError(f"{where}: nothing can be done to a value once it is encrypted", hint="put aesgcm last")
    if "fp8" in types[1:]:
        raise AdapterConfigError(f"{where}: fp8 wants the value as it is", hint="put fp8 first")


def stage_tables() -> str:
    """Markdown: the fields of each type of stage."""
    parts = []
    for kind in KINDS.values():
        rows = [
            f"### `{kind.type}`",
            "",
            f"{kind.about[0].upper()}{kind.about[1:]}.",
            "",
            "| field | default | meaning |",
            "|---|---|---|",
        ]
        for one in kind.fields:
            default = "required" if one.required else "-" if one.default in (None, []) else f"`{one.default}`"
            rows.append(f"| `{one.name}` | {default} | {one.help} |")
        parts.append("\n".join(rows))
    return "\n\n".join(parts)
