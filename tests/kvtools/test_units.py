"""The size and duration grammars: everything that is one parses to what it means, everything else is an error."""

import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtools.errors import UsageError
from kvtools.units import MAX_BYTES, format_duration, format_rate, format_size, parse_duration, parse_percent, parse_size

SUFFIXES = {"": 0, "b": 0} | {s: i for i, step in enumerate("kmgt", 1) for s in (step, f"{step}b", f"{step}ib")}
digits = st.text("0123456789", min_size=1, max_size=12)


def any_case(text: str) -> st.SearchStrategy[str]:
    return st.tuples(*(st.sampled_from([c, c.upper()]) for c in text)).map("".join)


@given(
    whole=digits,
    fraction=st.none() | digits,
    blank=st.sampled_from(["", " "]),
    suffix=st.sampled_from(sorted(SUFFIXES)),
    data=st.data(),
)
def test_every_size_of_the_grammar_is_exact(whole: str, fraction: str | None, blank: str, suffix: str, data: st.DataObject) -> None:
    number = whole if fraction is None else f"{whole}.{fraction}"
    spelled = data.draw(any_case(suffix))
    text = number + (blank if spelled else "") + spelled
    meant = int(Fraction(number) * 1024 ** SUFFIXES[suffix])
    if meant >= MAX_BYTES:
        with pytest.raises(UsageError, match="too large"):
            parse_size(text)
    else:
        assert parse_size(text) == meant


@given(text=st.text(max_size=12) | st.from_regex(r"[-+0-9.,_ eEkKmMgGtTbBiIxX]{0,10}", fullmatch=True))
def test_nothing_else_is_a_size(text: str) -> None:
    if re.fullmatch(r"\s*[0-9]+(\.[0-9]+)? ?([kKmMgGtT]?[bB]?|[kKmMgGtT][iI][bB])\s*", text, re.ASCII):
        return
    with pytest.raises(UsageError) as caught:
        parse_size(text)
    assert caught.value.hint


@pytest.mark.parametrize(
    "text",
    [
        "G",
        "-1G",
        "+1G",
        "1,5G",
        "1_000",
        "1e9",
        "inf",
        "nan",
        "0x10",
        "",
        " ",
        "1  G",
        "1GG",
        "1P",
        ".5G",
        "1.G",
        "٣G",
        "1 i",
        "4Gi",
    ],
)
def test_slips_are_errors(text: str) -> None:
    with pytest.raises(UsageError, match=re.escape(repr(text))):
        parse_size(text)


@given(st.integers(0, MAX_BYTES - 1))
def test_a_shown_size_is_short_and_close(value: int) -> None:
    shown = format_size(value)
    number, unit = shown.split(" ")
    assert len(shown) <= 10
    scale = 1024 ** ["B", "KiB", "MiB", "GiB", "TiB", "PiB"].index(unit)
    assert float(number) < 1024
    assert abs(float(number) * scale - value) <= 0.006 * max(value, 1)
    assert abs(parse_size(shown) - value) <= 0.006 * max(value, 1) if unit != "PiB" else True


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.50 KiB"), (3 << 30, "3 GiB"), (128 << 20, "128 MiB"),
        (1 << 40, "1 TiB"), (1099511627775, "1.00 TiB"), (-(1 << 30), "-1 GiB"), ((1 << 30) - 1, "1.00 GiB"),
        (12.7 * (1 << 30), "12.7 GiB"), (0.4, "0 B"),
    ],
)  # fmt: skip
def test_sizes_as_people_see_them(value: float, shown: str) -> None:
    assert format_size(value) == shown


@pytest.mark.parametrize(
    ("text", "seconds"), [("500ms", 0.5), ("2", 2), ("2s", 2), ("1.5 m", 90), ("1h", 3600), ("1d", 86400), (" 3s ", 3)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["21d", "9999999h", "9" * 40, "0.1" + "9" * 30 + "e9", "2000000"])
def test_a_wait_that_no_clock_takes_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_duration(text)
    assert parse_duration("20d") < 2**31 / 1000, "poll counts milliseconds in 31 bits"


@given(st.text(max_size=8))
def test_nothing_else_is_a_duration(text: str) -> None:
    if re.fullmatch(r"\s*[0-9]+(\.[0-9]+)? ?(ms|s|m|h|d)?\s*", text, re.ASCII):
        return
    with pytest.raises(UsageError):
        parse_duration(text)


@pytest.mark.parametrize(("text", "percent"), [("50", 50), ("12.5", 12.5), ("100%", 100), ("0.1 %", 0.1)])
def test_percentages(text: str, percent: float) -> None:
    assert parse_percent(text) == percent


@pytest.mark.parametrize("text", ["0", "-1", "100.1", "1e1", "", "%", "5%%", "nan", "٣"])
def test_nothing_else_is_a_percentage(text: str) -> None:
    with pytest.raises(UsageError):
        parse_percent(text)


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0 us"),
        (0.00025, "250 us"),
        (0.0032, "3.2 ms"),
        (1.5, "1.5 s"),
        (250, "4m10s"),
        (7500, "2h05m"),
        (273600, "3d04h"),
        (-2, "-2.0 s"),
    ],
)
def test_durations_as_people_see_them(seconds: float, shown: str) -> None:
    assert format_duration(seconds) == shown


def test_rates() -> None:
    assert format_rate(1.2 * (1 << 30)) == "1.20 GiB/s"
