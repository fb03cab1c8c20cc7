"""zstd, lz4 and AES-GCM as stages, and chains of them: what comes back, what is noticed, what is refused."""

import base64
import itertools
import secrets
from typing import Any

import numpy as np
import pytest

from kvd.tiers.adapters.base import AdapterConfigError
from kvd.tiers.serde import frame
from kvd.tiers.serde.aesgcm import AesGcm, key_of
from kvd.tiers.serde.chain import Chain, read_chain
from kvd.tiers.serde.compression import Lz4, Zstd
from kvd.tiers.serde.fp8 import Fp8
from kvd.tiers.serde.stage import Damaged, KeyUnknown
from kvtools.errors import UsageError

KEY, OTHER = bytes(range(32)), bytes(range(1, 33))
ME, YOU = b"m" * 64, b"y" * 64


def through(chain: Chain, raw: bytes, identity: bytes = ME) -> bytes:
    """What a chain makes of a value, with its frame."""
    buffers = [memoryview(bytearray(bound)) for bound in chain.bounds(len(raw))]
    return bytes(buffers[-1][: chain.encode(memoryview(raw), buffers, identity)])


def back(chain: Chain, stored: bytes, length: int, identity: bytes = ME) -> bytes:
    view = memoryview(stored)
    buffers = [memoryview(bytearray(n)) for n in chain.scratch(view, length)]
    into = bytearray(length)
    chain.decode(view, memoryview(into), buffers, identity)
    return bytes(into)


def sample(length: int) -> bytes:
    """Floats as a cache has them, 16 bits each."""
    values = np.random.default_rng(length).standard_normal(-(-length // 2)).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()[:length]


LOSSLESS = [
    [Zstd()],
    [Zstd(level=-5, shuffle=2)],
    [Lz4()],
    [Lz4(acceleration=8, shuffle=4)],
    [AesGcm(KEY)],
    [Zstd(shuffle=2), AesGcm(KEY)],
    [Lz4(shuffle=2), Zstd(), AesGcm(KEY)],
]


@pytest.mark.parametrize("stages", LOSSLESS, ids=lambda stages: ">".join(stage.type for stage in stages))
@pytest.mark.parametrize("length", [0, 1, 127, 4096, 4097, 70_001, 1 << 20])
def test_lossless_chains_give_back_every_byte(stages: list[Any], length: int) -> None:
    chain = Chain(stages)
    for raw in (sample(length), bytes(length), secrets.token_bytes(length)):
        stored = through(chain, raw)
        assert len(stored) <= chain.bounds(length)[-1]
        assert back(chain, stored, length) == raw


def test_compression_pays_and_shuffling_more_so() -> None:
    raw = sample(1 << 20)
    plain, shuffled = len(through(Chain([Zstd()]), raw)), len(through(Chain([Zstd(shuffle=2)]), raw))
    assert shuffled < 0.85 * len(raw)
    assert shuffled < plain
    assert len(through(Chain([Lz4()]), bytes(1 << 20))) < 8192


def test_fp8_and_what_follows_it() -> None:
    raw = sample(1 << 18)
    chain = Chain([Fp8(), Zstd(), AesGcm(KEY)])
    stored = through(chain, raw)
    assert len(stored) < 0.52 * len(raw)
    alone = Chain([Fp8()])
    assert back(chain, stored, len(raw)) == back(alone, through(alone, raw), len(raw)) != raw
    # What fp8 leaves alone passes the others, and is exact.
    odd = raw[:-1]
    assert back(chain, through(chain, odd), len(odd)) == odd


def test_every_flipped_bit_of_an_encrypted_value_is_noticed() -> None:
    chain = Chain([Zstd(), AesGcm(KEY)])
    raw = b"some value " * 20
    stored = through(chain, raw)
    for place, bit in itertools.product(range(len(stored)), (0, 7)):
        broken = bytearray(stored)
        broken[place] ^= 1 << bit
        with pytest.raises((Damaged, KeyUnknown)):
            back(chain, bytes(broken), len(raw))
    for cut in (0, 10, 31, 32, 60, len(stored) - 1):
        with pytest.raises(Damaged):
            back(chain, stored[:cut], len(raw))
    with pytest.raises(Damaged):
        back(chain, stored + b"\0", len(raw))


def test_an_encrypted_value_belongs_to_its_key_alone() -> None:
    chain = Chain([AesGcm(KEY)])
    stored = through(chain, b"mine")
    with pytest.raises(Damaged, match="belongs to another"):
        back(chain, stored, 4, YOU)
    assert back(chain, stored, 4, ME) == b"mine"
    assert b"mine" not in stored
    assert through(chain, b"mine") != stored  # nobody sees that two values are the same


def test_a_chain_that_encrypts_takes_nothing_that_is_not_encrypted() -> None:
    plain = Chain([Zstd()])
    forged = frame.Frame(0, (4, 4, 4)).pack() + b"mine"
    with pytest.raises(Damaged, match="not encrypted"):
        back(Chain([Zstd(), AesGcm(KEY)]), forged, 4)
    with pytest.raises(Damaged, match="no frame of this chain"):
        back(Chain([Zstd(), AesGcm(KEY)]), through(plain, b"mine"), 4)


def test_keys_change() -> None:
    before, after = Chain([AesGcm(KEY)]), Chain([AesGcm(OTHER, [KEY])])
    old, new = through(before, b"value"), through(after, b"value")
    assert before.mask == after.mask  # the same values, wherever they were encrypted
    assert back(after, old, 5) == back(after, new, 5) == b"value"
    with pytest.raises(KeyUnknown):
        back(before, new, 5)
    with pytest.raises(KeyUnknown):
        back(Chain([AesGcm(OTHER)]), old, 5)


def test_frames_that_contradict_themselves() -> None:
    chain = Chain([Zstd(), Lz4()])
    raw = b"abcd" * 100
    stored = through(chain, raw)
    assert frame.unpack(memoryview(stored)) is not None
    for place in range(frame.SIZE):
        broken = bytearray(stored)
        broken[place] ^= 0x41
        with pytest.raises(Damaged):
            back(chain, bytes(broken), len(raw))
    with pytest.raises(Damaged, match="other lengths"):
        back(chain, stored, len(raw) + 1)


def test_damaged_compressed_bytes_never_run_over() -> None:
    """Under a sound frame: a zstd frame that says it is larger, lz4 that would be longer or shorter."""
    chain = Chain([Zstd()])
    huge = through(chain, bytes(1 << 20))[frame.SIZE :]
    with pytest.raises(Damaged, match="another length"):
        back(chain, frame.Frame(1, (1000, len(huge))).pack() + huge, 1000)
    chain = Chain([Lz4()])
    body = through(chain, bytes(5000))[frame.SIZE :]
    for length in (4999, 5001, 100):
        with pytest.raises(Damaged):
            back(chain, frame.Frame(1, (length, len(body))).pack() + body, length)


def test_chains_differ_in_their_mask() -> None:
    chains = [
        [Zstd()],
        [Zstd(shuffle=2)],
        [Lz4()],
        [Fp8()],
        [Fp8("float16")],
        [AesGcm(KEY)],
        [Zstd(), AesGcm(KEY)],
        [Zstd(), Lz4()],
    ]
    assert len({Chain(stages).mask for stages in chains}) == len(chains)
    assert Chain([Zstd(level=9)]).mask == Chain([Zstd(level=1)]).mask  # the level is nothing that decoding needs


# ---- configuration -----------------------------------------------------------------------------------------------------


def test_one_object_or_a_list(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(read_chain("a", {"type": "lz4"})) == "lz4"
    file = tmp_path / "key"
    file.write_text(base64.b64encode(KEY).decode() + "\n")
    file.chmod(0o600)
    monkeypatch.setenv("OLD_KEY", OTHER.hex())
    chain = read_chain(
        "a",
        [
            {"type": "fp8", "dtype": "float16"},
            {"type": "zstd", "level": "3"},
            {"type": "aesgcm", "key": f"file:{file}", "old_keys": ["env:OLD_KEY"]},
        ],
    )
    assert str(chain) == "fp8 > zstd > aesgcm"
    assert back(chain, through(Chain([Fp8("float16"), Zstd(), AesGcm(OTHER)]), b"x" * 99), 99) == b"x" * 99


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"type": "zsdt"}, "did you mean 'zstd'"),
        ({"type": "zstd", "levle": 3}, "did you mean 'level'"),
        ({"type": "zstd", "level": 99}, "-7 to 19"),
        ({"type": "fp8", "dtype": "int8"}, "not one of"),
        ({"type": "aesgcm"}, "'key' is missing"),
        ({"type": "aesgcm", "key": "abc"}, "not a key of 256 bits"),
        ({"type": "aesgcm", "key": "env:NO_SUCH_KEY_HERE"}, "NO_SUCH_KEY_HERE is not set"),
        ([{"type": "aesgcm", "key": KEY.hex()}, {"type": "zstd"}], "put aesgcm last"),
        ([{"type": "zstd"}, {"type": "fp8"}], "put fp8 first"),
        ([{"type": "zstd"}, {"type": "zstd"}], "twice"),
        ([], "from one to 4 stages"),
        ("zstd", "not an object"),
    ],
)
def test_mistakes_name_the_adapter_the_stage_and_what_to_do(body: Any, says: str) -> None:
    with pytest.raises(AdapterConfigError) as caught:
        read_chain("tier1 (fs)", body)
    assert "tier1" in caught.value.message
    assert says in f"{caught.value.message} {caught.value.hint}"
    assert KEY.hex() not in str(caught.value)


def test_keys_as_text() -> None:
    assert key_of(KEY.hex()) == key_of(base64.b64encode(KEY).decode()) == KEY
    for text in ("", "00", KEY.hex()[:-1], base64.b64encode(KEY[:31]).decode(), "!" * 44):
        with pytest.raises(UsageError):
            key_of(text)
