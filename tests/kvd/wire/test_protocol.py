"""The messages: what is encoded is decoded, the cap holds, and the decoder takes nothing else."""

import struct
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.wire import protocol as p

U64 = st.integers(0, 2**64 - 1)
SOME = {
    int: U64,
    bool: st.booleans(),
    bytes: st.binary(max_size=80),
    str: st.text(max_size=20),
    list[int]: st.lists(U64, max_size=5),
    list[bytes]: st.lists(st.binary(max_size=40), max_size=5),
    list[str]: st.lists(st.text(max_size=9), max_size=5),
}
OTHERS: dict[Any, st.SearchStrategy[Any]] = {
    dict[int, bytes] | None: st.one_of(st.none(), st.dictionaries(st.integers(0, 2**32), st.binary(max_size=9), max_size=3)),
    dict[str, Any]: st.dictionaries(
        st.text(max_size=9), st.one_of(st.integers(0, 2**60), st.text(max_size=9), st.none()), max_size=4
    ),
    list[tuple[bytes, int, int, int, str]]: st.lists(
        st.tuples(st.binary(max_size=64), U64, U64, U64, st.text(max_size=9)), max_size=3
    ),
    list[tuple[int, int, str, int, int]]: st.lists(st.tuples(U64, U64, st.text(max_size=9), U64, U64), max_size=3),
    list[tuple[int, str, int, int, int, bytes] | None]: st.lists(
        st.one_of(st.none(), st.tuples(U64, st.text(max_size=9), U64, U64, U64, st.binary(max_size=16))), max_size=3
    ),
}
REQUESTS = get_args(p.AnyRequest)
ANSWERS = get_args(p.AnyAnswer)


def messages(kinds: tuple[type[p.Message], ...]) -> st.SearchStrategy[p.Message]:
    """Any message of these kinds."""
    made = []
    for kind in kinds:
        fields = {f.name: SOME.get(f.type, OTHERS.get(f.type)) for f in msgspec.structs.fields(kind)}
        assert None not in fields.values(), f"{kind.__name__}: no strategy for a field"
        made.append(st.builds(kind, **{name: strategy for name, strategy in fields.items() if strategy is not None}))
    return st.one_of(made)


def body(frame: bytearray) -> bytes:
    (size,) = struct.unpack_from("<I", frame)
    assert size == len(frame) - 4
    return bytes(frame[4:])


@given(messages(REQUESTS))
@settings(max_examples=100, deadline=None)
def test_every_request_arrives_as_it_was_sent(message: p.Message) -> None:
    assert p.request_decoder.decode(body(p.encode(message))) == message


@given(messages(ANSWERS))
@settings(max_examples=100, deadline=None)
def test_every_answer_arrives_as_it_was_sent(message: p.Message) -> None:
    assert p.answer_decoder.decode(body(p.encode(message))) == message


def test_tags_are_the_protocol_and_never_change() -> None:
    tags = {kind.__name__: kind.__struct_config__.tag for kind in (p.Hello, p.Welcome, *REQUESTS, *ANSWERS)}
    assert tags == {
        "Hello": 1, "Welcome": 2, "Exists": 10, "Lease": 11, "Release": 12, "Reserve": 13, "Commit": 14, "PutInline": 15,
        "Abort": 16, "Prefix": 17, "Claim": 18, "Renew": 19, "Prefetch": 20, "Delete": 21, "Clear": 22, "Flush": 23,
        "Stats": 24, "Keys": 25, "Drain": 26, "Ping": 27, "Where": 28, "Unpin": 29, "Why": 30, "Note": 31,
        "Failed": 50, "Flags": 51, "Leased": 52, "Lent": 53, "Committed": 54, "PrefixFound": 55, "Count": 56, "Done": 57,
        "Info": 58, "KeyPage": 59,
        "DirectReserve": 40, "DirectCommit": 41, "DirectAbort": 42, "DirectHold": 43, "DirectRelease": 44,
        "DirectLent": 65, "DirectHeld": 66,
    }  # fmt: skip


def test_a_frame_over_the_cap_is_never_sent() -> None:
    keys = [b"k" * 32] * (p.MAX_FRAME // 34)
    assert len(p.encode(p.Exists(1, b"n" * 32, keys[:1000]))) < p.MAX_FRAME
    with pytest.raises(ValueError, match="over the limit"):
        p.encode(p.Exists(1, b"n" * 32, [*keys, *keys[:1000]]))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc0",
        b"\x93",
        msgspec.msgpack.encode([27]),
        msgspec.msgpack.encode([99, 1]),
        msgspec.msgpack.encode([27, "one"]),
        msgspec.msgpack.encode([27, -(2**63) - 0, 1])[:-1],
        msgspec.msgpack.encode({"type": 27, "id": 1}),
        msgspec.msgpack.encode([10, 1, b"n" * 32, "keys"]),
        msgspec.msgpack.encode([10, 1, b"n" * 32, ["text"]]),
        msgspec.msgpack.encode([50, 1, "code", "an answer, not a request"]),
        msgspec.msgpack.encode([27, 1]) + b"more",
    ],
)
def test_what_is_no_request_is_a_decode_error(body: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        p.request_decoder.decode(body)
