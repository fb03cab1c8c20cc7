"""The filter understands what people type, and never fails on what they are still typing."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtools.errors import UsageError
from kvtop.columns import names_of
from kvtop.query import check_filter, parse_filter
from kvtop.views import VIEWS

MAN = Path(__file__).resolve().parents[2] / "man" / "man1" / "kvtop.1"

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


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("used>", "no number stands behind used>"),
        ("share>=", "no number stands behind share>="),
        ("used>lots", "'lots' is no number, percentage or size"),
        ("used>>1", "'>1' is no number"),
        ("used<-1", "'-1' is no number"),
        ("state=live", "(for words: state:live)"),
        ("nosuch>3", "no column 'nosuch' here; columns: name, state, used, share, model"),
        (">3", "no column stands before >"),
        ("!used>", "no number stands behind used>"),
        ("llama used>", "no number stands behind used>"),
        ("!", "nothing stands behind the exclamation mark"),
        ("llama |", "nothing stands beside the bar"),
        ("|", "nothing stands beside the bar"),
    ],
)
def test_what_nobody_can_mean_is_said(text: str, words: str) -> None:
    columns = ["name", "state", "used", "share", "model"]
    assert words in parse_filter(text, columns).problem
    with pytest.raises(UsageError) as caught:
        check_filter(text, columns)
    assert words in caught.value.message


@pytest.mark.parametrize(
    "text", ["", "llama", "model:a=b", "used>80%", "name:x", "12:03", "tier=disk0", "!used<4GiB", "a b | !c", "http://x"]
)
def test_what_can_be_meant_is_no_error(text: str) -> None:
    assert check_filter(text, ["name", "used", "model"]).problem == ""


def test_a_column_is_called_by_its_heading_too_and_one_that_is_not_there_is_said() -> None:
    names = names_of(VIEWS["segments"].columns)
    row = {"name": "a", "state": "live", "share": 50.0}
    for text in ("owner:live", "segment:a", "HELD>40", "state:live"):
        assert check_filter(text, names).matches(row), text
    assert not check_filter("owner:stale", names).matches(row)
    with pytest.raises(UsageError, match="no column 'nope' here; columns: name, state, "):
        check_filter("nope:x", names)
    for text in ("12:03", "http://h:8000"):
        assert check_filter(text, names).problem == "", text


def test_every_column_is_in_the_man_page() -> None:
    text = MAN.read_text()
    for view in VIEWS.values():
        assert f".It Ic {view.id}\n{', '.join(column.id for column in view.columns)}.\n" in text, view.id
