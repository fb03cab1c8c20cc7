"""Chunks, keys and which blocks of a chunk a cache group holds."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.connector.groups import Group, Unsupported, groups_of, unit_of
from kvd.connector.keys import Keys, Span, chunk_tokens


def hashes(tokens: int, block: int = 32, salt: str = "") -> list[bytes]:
    """Chained block hashes, as the engine makes them."""
    found: list[bytes] = []
    for index in range(tokens // block):
        before = found[-1] if found else b""
        found.append(hashlib.sha256(before + f"{salt}{index}".encode()).digest())
    return found


def keys_of(tokens: int, *, chunk: int = 256, block: int = 32, salt: str = "") -> Keys:
    return Keys(hashes(tokens, block, salt), hash_tokens=block, chunk=chunk, unit=block)


@pytest.mark.parametrize(
    ("wanted", "unit", "chunk"),
    [(None, 32, 256), (None, 16, 256), (None, 48, 240), (None, 512, 512), (100, 32, 96), (1, 32, 32), (4096, 64, 4096)],
)
def test_a_chunk_is_whole_blocks_near_what_is_wanted(wanted: int | None, unit: int, chunk: int) -> None:
    assert chunk_tokens(wanted, unit) == chunk


def test_a_key_is_32_bytes_and_the_format_stands() -> None:
    # Stored keys must be found again by later versions: this value may change only together with keys.FORMAT.
    key = keys_of(512).of(Span(0, 256))
    assert key.hex() == hashlib.sha256(b"kvd chunk 1" + bytes(8) + (256).to_bytes(8, "little") + hashes(256)[-1]).hexdigest()


def test_keys_differ_by_prefix_place_and_length() -> None:
    one, other = keys_of(1024), keys_of(1024, salt="x")
    spans = [Span(0, 256), Span(256, 512), Span(256, 288), Span(256, 320), Span(512, 768)]
    assert len({keys.of(span) for keys in (one, other) for span in spans}) == 2 * len(spans)


def test_keys_grow_with_the_hashes_of_a_request() -> None:
    # The engine appends to the list that the request already has.
    grown = hashes(1024)
    live = grown[:8]
    keys = Keys(live, hash_tokens=32, chunk=256, unit=32)
    assert keys.tokens == 256
    first = keys.of(Span(0, 256))
    live += grown[8:]
    assert keys.tokens == 1024
    assert keys.of(Span(0, 256)) == first
    assert keys.of(Span(768, 1024)) == keys_of(1024).of(Span(768, 1024))


def test_keys_follow_hashes_that_are_taken_back() -> None:
    # A session whose input is streamed: the engine shortens the list, and other tokens follow.
    live = hashes(768)
    keys = Keys(live, hash_tokens=32, chunk=256, unit=32)
    before = [keys.of(Span(start, start + 256)) for start in (0, 256, 512)]
    new = hashes(768, salt="x")
    del live[15:]
    live += new[15:]
    after = [keys.of(Span(start, start + 256)) for start in (0, 256, 512)]
    assert after[0] == before[0]
    assert after[1:] == [Keys(live, hash_tokens=32, chunk=256, unit=32).of(Span(start, start + 256)) for start in (256, 512)]
    assert not set(after[1:]) & set(before)


def test_spans_and_tails_cover_a_prompt() -> None:
    keys = keys_of(1000)
    assert keys.tokens == 992
    assert keys.spans(0, 992) == [Span(0, 256), Span(256, 512), Span(512, 768), Span(768, 992)]
    assert keys.spans(2, 512) == []
    assert keys.tails(768, 992, 768) == [Span(768, end) for end in range(992, 768, -32)]
    assert keys.tails(768, 1024, 832) == [Span(768, 992), Span(768, 960), Span(768, 928), Span(768, 896), Span(768, 864)]


def test_groups_with_blocks_of_two_sizes_share_chunks() -> None:
    full, window = Group(0, 16), Group(1, 48, window=127)
    assert unit_of([full, window]) == 48
    assert list(full.stored(0, 240)) == list(range(15))
    assert list(window.stored(0, 240)) == [2, 3, 4]


@given(
    block=st.sampled_from([16, 32, 64]),
    window=st.integers(1, 2000),
    chunk_blocks=st.integers(1, 12),
    end_blocks=st.integers(1, 60),
)
def test_a_windows_hit_finds_every_block_it_reads(block: int, window: int, chunk_blocks: int, end_blocks: int) -> None:
    group = Group(0, block, window=window)
    chunk, end = chunk_blocks * block, end_blocks * block
    held = {b for start in range(0, end, chunk) for b in group.stored(start, min(start + chunk, end))}
    read = set(range(max(0, end - window) // block, end_blocks))
    assert read <= held


@given(
    block=st.sampled_from([16, 32]), local_blocks=st.integers(1, 40), chunk_blocks=st.integers(1, 12), end_blocks=st.integers(1, 90)
)
def test_a_local_attentions_hit_finds_every_block_it_reads(
    block: int, local_blocks: int, chunk_blocks: int, end_blocks: int
) -> None:
    group = Group(0, block, local=local_blocks * block)
    chunk, end = chunk_blocks * block, end_blocks * block
    held = {b for start in range(0, end, chunk) for b in group.stored(start, min(start + chunk, end))}
    assert set(range(end // group.local * local_blocks, end_blocks)) <= held
    assert all(group.stored(start, min(start + chunk, end)) for start in range(0, end, chunk)), "every chunk has a value"


@given(block=st.sampled_from([16, 32]), window=st.integers(1, 600), computed=st.integers(0, 3000), step=st.integers(1, 600))
def test_a_window_is_still_there_in_the_step_that_ends_a_chunk(block: int, window: int, computed: int, step: int) -> None:
    # The engine frees the blocks below `computed - window` before the step that computes [computed, computed + step).
    group = Group(0, block, window=window)
    freed = max(0, computed - window) // block
    for end in range((computed // block + 1) * block, computed + step + 1, block):
        assert group.first_needed(end) >= freed


class _Spec:
    block_size = 32


class FullAttentionSpec(_Spec):
    sliding_window = 128  # what a sliding model's spec says when the engine runs it as full attention


class MLAAttentionSpec(FullAttentionSpec):
    pass


class SlidingWindowSpec(_Spec):
    sliding_window = 128
    extra_retained_tokens = 0


class MambaSpec(_Spec):
    pass


class _Group:
    def __init__(self, spec: object) -> None:
        self.kv_cache_spec = spec
        self.layer_names = ["model.layers.0.self_attn.attn"]


class _Config:
    def __init__(self, *specs: object, ids: tuple[int, ...] | None = None) -> None:
        self.kv_cache_groups = [_Group(spec) for spec in specs]
        self.prefix_cacheable_group_ids = tuple(range(len(specs))) if ids is None else ids


def test_groups_are_read_from_the_engines_specs() -> None:
    assert groups_of(_Config(SlidingWindowSpec(), MLAAttentionSpec())) == (Group(0, 32, window=127), Group(1, 32))
    assert groups_of(_Config(MambaSpec(), FullAttentionSpec(), ids=(1,))) == (Group(1, 32),)


def test_what_is_no_cache_of_blocks_is_named() -> None:
    with pytest.raises(Unsupported, match=r"model.layers.0.self_attn.attn: MambaSpec is not a cache of whole token blocks"):
        groups_of(_Config(MambaSpec()))
    with pytest.raises(Unsupported, match="no cache group"):
        groups_of(_Config(FullAttentionSpec(), ids=()))
