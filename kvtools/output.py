"""What a person or a program sees: data on stdout, everything else on stderr, one colour decision.

JSON: keys are an API, bytes are integers, the top object has a `schema` field ("kvctl.list/1"); it grows, it never
changes meaning. Tables are for people and may change. Colour is never the only carrier of a meaning.
"""

import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import TextIO

STYLES = {"good": "32", "warn": "33", "bad": "31", "dim": "2", "bold": "1", "accent": "36"}


def wants_color(stream: TextIO) -> bool:
    """Whether to colour `stream`: NO_COLOR (non-empty) and TERM=dumb say no, FORCE_COLOR says yes, else only a terminal."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return os.environ.get("TERM") != "dumb" and stream.isatty()


def paint(text: str, style: str, stream: TextIO | None = None) -> str:
    """`text` in one of STYLES where `stream` (stdout when not given) takes colour, else as it is."""
    if not text or not wants_color(stream or sys.stdout):
        return text
    return f"\033[{STYLES[style]}m{text}\033[0m"


def printable(text: str) -> str:
    """`text` with control characters made visible: names come from the file system and may hold escape sequences."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def emit(text: str = "") -> None:
    """One line of data to stdout."""
    sys.stdout.write(text + "\n")


def emit_json(schema: str, body: dict[str, object], *, indent: int | None = 1) -> None:
    """One JSON object to stdout, with its `schema` first.

    Text stays readable; only a file name that is no UTF-8 makes the whole object ASCII, with the bytes as lone surrogates.
    """
    whole = {"schema": schema, **body}
    text = json.dumps(whole, indent=indent, ensure_ascii=False)
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            text = json.dumps(whole, indent=indent)
    sys.stdout.write(text + "\n")


def note(text: str) -> None:
    """A remark for people, to stderr: it is not data."""
    sys.stderr.write(text + "\n")


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, right: Iterable[int] = (), indent: str = "") -> list[str]:
    """Aligned lines, header first; columns in `right` are right-aligned. Cells may hold colour: width counts what is seen."""
    lines = [list(header), *[list(row) for row in rows]]
    widths = [max(visible_width(line[i]) for line in lines) for i in range(len(header))]
    flush = set(right)
    out = []
    for line in lines:
        cells = []
        for i, cell in enumerate(line):
            blank = " " * (widths[i] - visible_width(cell))
            cells.append(blank + cell if i in flush else cell + blank)
        out.append((indent + "  ".join(cells)).rstrip())
    return out


def terminal_width() -> int | None:
    """Columns of the terminal that stdout is; None where it is none, or does not say."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or None
    except (OSError, ValueError):
        return None


def visible_width(text: str) -> int:
    """Columns that `text` takes on a terminal, colour sequences not counted and wide characters counted as two."""
    if text.isascii() and "\033" not in text:
        return len(text)
    import re
    import unicodedata

    plain = re.sub(r"\033\[[0-9;]*m", "", text)
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in plain)
