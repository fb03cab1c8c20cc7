"""daemon/FORMAT.md says what the protocol is: every message with its tag and fields, and the worked example to the byte."""

import re
from pathlib import Path

import msgspec
import pytest

from kvd.wire import protocol as p

PAGE = (Path(__file__).resolve().parents[3] / "daemon" / "FORMAT.md").read_text().partition("# Part 2. On the wire")[2]
SHORT = {"namespace": "ns", "namespaces": "list of ns"}
FIRST_FIELDS = {"id"}


def messages() -> list[type[p.Message]]:
    found: list[type[p.Message]] = []
    todo: list[type[p.Message]] = [p.Message]
    while todo:
        kind = todo.pop()
        todo += kind.__subclasses__()
        if kind.__struct_config__.tag is not None:
            found.append(kind)
    return sorted(found, key=lambda kind: int(str(kind.__struct_config__.tag)))


@pytest.mark.parametrize("kind", messages(), ids=lambda kind: kind.__name__)
def test_every_message_is_on_the_page_with_its_tag_and_fields(kind: type[p.Message]) -> None:
    row = re.search(rf"^\| {kind.__name__} \| (\d+) \|([^|]*)\|", PAGE, re.MULTILINE)
    assert row, f"{kind.__name__} has no row"
    assert int(row[1]) == kind.__struct_config__.tag
    fields = [SHORT.get(name, name) for name in kind.__struct_fields__ if name not in FIRST_FIELDS]
    at = 0
    for name in fields:
        word = {"rows": "rows of", "flags": "one byte a key", "info": "map"}.get(name, name)
        where = row[2].find(word, at)
        assert where >= 0, f"{kind.__name__}: {name} is missing, or out of order, in {row[2]!r}"
        at = where + len(word)


def test_the_page_names_no_message_that_does_not_exist() -> None:
    named = {int(tag) for tag in re.findall(r"^\| [A-Z]\w+ \| (\d+) \|", PAGE, re.MULTILINE)}
    assert named == {kind.__struct_config__.tag for kind in messages()}


def test_version_limits_and_codes_are_those_of_the_page() -> None:
    assert f"Version {p.VERSION}." in PAGE
    assert f"at most {p.MAX_FRAME:,}".replace(",", " ") in PAGE
    assert " ".join(p.CODES) in PAGE.replace("\n", " ")


def test_the_worked_example_is_what_is_sent() -> None:
    frame = p.encode(p.Exists(1, b"\xaa" * 32, [b"\xbb" * 32]))
    example = PAGE.partition("## Worked example")[2]
    bytes_shown = re.findall(r"^ {4,}((?:[0-9a-f]{2} )*[0-9a-f]{2})(?:  | \.\.\.|$)", example, re.MULTILINE)
    shown = [bytes.fromhex(row) for row in bytes_shown]
    shown = [row[:2] + row[2:3] * 32 if row[:2] == b"\xc4\x20" else row for row in shown]
    assert b"".join(shown[:-2]) == bytes(frame)
    assert b"".join(shown[-2:]) == bytes(p.encode(p.Flags(1, b"\1")))
    assert msgspec.msgpack.decode(bytes(frame)[4:])[0] == p.Exists.__struct_config__.tag
