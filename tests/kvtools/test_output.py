"""One colour decision, safe text, aligned tables, JSON that programs can read."""

import io
import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtools.output import emit, emit_json, note, paint, printable, table, visible_width, wants_color


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("terminal", "environ", "wanted"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"NO_COLOR": "1"}, False),
        (True, {"NO_COLOR": ""}, True),
        (True, {"TERM": "dumb"}, False),
        (False, {"FORCE_COLOR": "1"}, True),
        (False, {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
        (False, {"FORCE_COLOR": "", "TERM": "xterm"}, False),
        (False, {"FORCE_COLOR": "1", "TERM": "dumb"}, True),
    ],
)
def test_who_gets_colour(monkeypatch: pytest.MonkeyPatch, terminal: bool, environ: dict[str, str], wanted: bool) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    stream = Terminal() if terminal else io.StringIO()
    assert wants_color(stream) is wanted
    assert (paint("x", "bad", stream) == "\033[31mx\033[0m") is wanted
    assert paint("", "bad", stream) == ""


@given(st.text())
def test_printable_text_has_no_control_characters(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert text != shown or text.isprintable()


def test_what_printable_shows() -> None:
    assert printable("a\x1b[2Jb\n名\udcff") == r"a\x1b[2Jb\n名\udcff"


@given(rows=st.lists(st.tuples(st.text(max_size=6).map(printable), st.text(max_size=6).map(printable)), max_size=5))
def test_tables_are_aligned(rows: list[tuple[str, str]]) -> None:
    lines = table(("Left", "Right"), rows, right=(1,))
    assert len(lines) == 1 + len(rows)
    width = visible_width(lines[0])
    for line, (_, right) in zip(lines[1:], rows, strict=True):
        if right.rstrip() == right and right:
            assert visible_width(line) == width
        assert line == line.rstrip()


def test_colour_and_wide_characters_take_the_columns_that_are_seen() -> None:
    assert visible_width("\033[31mred\033[0m") == 3
    assert visible_width("名前") == 4
    assert visible_width("e\u0301") == 1
    lines = table(("Name", "N"), [("\033[31mred\033[0m", "1"), ("名前", "22")], right=(1,))
    assert lines == ["Name   N", "\033[31mred\033[0m    1", "名前  22"]


def test_json_has_its_schema_first_and_readable_text(capsys: pytest.CaptureFixture[str]) -> None:
    emit_json("a.b/1", {"name": "名前", "n": 1})
    emit_json("a.b/1", {"n": 1}, indent=None)
    out = capsys.readouterr().out
    assert out == '{\n "schema": "a.b/1",\n "name": "名前",\n "n": 1\n}\n{"schema": "a.b/1", "n": 1}\n'


def test_json_of_a_name_that_is_no_utf_8_is_valid(capsys: pytest.CaptureFixture[str]) -> None:
    emit_json("a.b/1", {"name": os.fsdecode(b"\xff"), "other": "名前"})
    out = capsys.readouterr().out
    assert out.isascii()
    assert os.fsencode(json.loads(out)["name"]) == b"\xff"


def test_data_and_remarks_go_their_own_ways(capsys: pytest.CaptureFixture[str]) -> None:
    emit("data")
    note("remark")
    assert capsys.readouterr() == ("data\n", "remark\n")
