"""The filter understands what people type, and never fails on what they are still typing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtop.query import parse_filter

COLUMNS = frozenset({"name", "state", "used", "share", "model"})
ROW = {"name": "vllm_A", "state": "live", "used": 3 << 30, "share": 81.5, "model": "meta/llama", "pid": None}


@pytest.mark.parametrize(
    ("text", "matches"),
    [
        ("", True),
        ("vllm", True),
        ("VLLM", True),
        ("llama", True),
        ("qwen", False),
        ("vllm llama", True),
        ("vllm qwen", False),
        ("qwen | llama", True),
        ("qwen | mistral", False),
        ("!qwen", True),
        ("!llama", False),
        ("model:llama", True),
        ("name:llama", False),
        ("state:live", True),
        ("share>80%", True),
        ("share>=81.5", True),
        ("share<80", False),
        ("used>2G", True),
        ("used<2GiB", False),
        ("used=3G", True),
        ("used!=3G", False),
        ("!share>80", False),
        ("pid>3", False),
        ("share>", False),
        ("nosuch>3", False),
        ("nosuch:x", False),
        ("|", True),
        ("!", True),
        ("! |", True),
    ],
)
def test_meaning(text: str, matches: bool) -> None:
    assert parse_filter(text, COLUMNS).matches(ROW) is matches


@given(st.text(max_size=40))
def test_any_text_is_a_filter(text: str) -> None:
    assert parse_filter(text, COLUMNS).matches(ROW) in (True, False)


@given(st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=10))
def test_a_word_and_its_negation_are_opposites(word: str) -> None:
    assert parse_filter(word, COLUMNS).matches(ROW) is not parse_filter(f"!{word}", COLUMNS).matches(ROW)
