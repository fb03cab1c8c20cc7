"""A screen as SVG: sharp at any size, right in any viewer, with nothing fetched from anywhere.

Text is placed word by word on a fixed grid, so columns line up whatever monospaced font the viewer has. Blocks, shades and
frames are not text at all but rectangles and lines on the same grid: a bar is as long as it should be and has no gaps. Pure,
standard library only.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from kvtools.output import visible_width

CELL_W, CELL_H = 8.4, 18.0
FONT_SIZE = 14
MARGIN = 12.0
BAR = 30.0
"""Height of the window's title bar."""

_LOW = "▁▂▃▄▅▆▇█"
_FRAME = frozenset("╭╮╰╯─│┃")


@dataclass(frozen=True, slots=True)
class Run:
    """Characters in one look. Colours are #rrggbb; no background means the screen's."""

    text: str
    color: str
    background: str = ""
    bold: bool = False


def draw(rows: Sequence[Sequence[Run]], columns: int, *, background: str, foreground: str, title: str) -> str:
    """An SVG document of the rows, in a window with a title."""
    width = columns * CELL_W + 2 * MARGIN
    height = len(rows) * CELL_H + BAR + MARGIN
    body: list[str] = []
    for number, row in enumerate(rows):
        body += _row(row, BAR + number * CELL_H)
    circles = "".join(f'<circle cx="{18 + 18 * i}" cy="15" r="5.5" fill="{foreground}" fill-opacity="0.25"/>' for i in range(3))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}">\n'
        f"<title>{escape(title)}</title>\n"
        "<style>text{font-family:ui-monospace,'JetBrains Mono','DejaVu Sans Mono',Menlo,Consolas,monospace;"
        f"font-size:{FONT_SIZE}px;white-space:pre}}.b{{font-weight:bold}}rect{{shape-rendering:crispEdges}}</style>\n"
        f'<rect width="{width:.0f}" height="{height:.0f}" rx="8" fill="{background}"/>\n'
        f'{circles}<text x="{width / 2:.0f}" y="20" text-anchor="middle" fill="{foreground}" fill-opacity="0.6">'
        f"{escape(title)}</text>\n" + "\n".join(body) + "\n</svg>\n"
    )


def _row(row: Iterable[Run], top: float) -> Iterator[str]:
    column = 0
    for run in row:
        size = visible_width(run.text)
        if run.background and size:
            yield _rect(column, top, size, CELL_H, run.background)
        yield from _run(run, column, top)
        column += size


def _run(run: Run, column: int, top: float) -> Iterator[str]:
    """Words as text; what is drawn as shapes is collected while it goes on, so a long bar is one rectangle."""
    word, start = "", column
    shape, shape_start, length = "", column, 0
    for char in [*run.text, " "]:
        drawn = char in _LOW or char in _FRAME or char == "·"
        if word and (char == " " or drawn):
            yield _text(word, start, top, run)
            word = ""
        if shape and char != shape:
            yield from _shape(shape, shape_start, length, top, run.color)
            shape = ""
        if drawn:
            if not shape:
                shape, shape_start, length = char, column, 0
            length += 1
        elif char != " ":
            if not word:
                start = column
            word += char
        column += visible_width(char)


def _text(word: str, column: int, top: float, run: Run) -> str:
    look = ' class="b"' if run.bold else ""
    return f'<text x="{_x(column)}" y="{top + 13.5:g}" fill="{run.color}"{look}>{escape(word)}</text>'


def _shape(char: str, column: int, length: int, top: float, color: str) -> Iterator[str]:
    left, middle = MARGIN + column * CELL_W, top + CELL_H / 2
    right = left + length * CELL_W
    if char == "·":
        for dot in range(length):
            yield f'<circle cx="{left + (dot + 0.5) * CELL_W:.1f}" cy="{middle:g}" r="0.9" fill="{color}"/>'
    elif char in _LOW:
        tall = CELL_H * (_LOW.index(char) + 1) / 8
        yield _rect(column, top + CELL_H - tall, length, tall, color)
    elif char == "─":
        yield f'<path d="M{left:.1f} {middle:g}H{right:.1f}" stroke="{color}"/>'
    elif char in "│┃":
        x = left + CELL_W / 2
        yield f'<path d="M{x:.1f} {top:g}V{top + CELL_H:g}" stroke="{color}" stroke-width="{2 if char == "┃" else 1}"/>'
    else:
        yield _corner(char, left, top, color)


def _corner(char: str, left: float, top: float, color: str) -> str:
    x, y = left + CELL_W / 2, top + CELL_H / 2
    side = left + CELL_W if char in "╭╰" else left
    end = top + CELL_H if char in "╭╮" else top
    return f'<path d="M{side:.1f} {y:g}Q{x:.1f} {y:g} {x:.1f} {end:g}" stroke="{color}" fill="none"/>'


def _rect(column: float, top: float, columns: float, height: float, color: str) -> str:
    return f'<rect x="{_x(column)}" y="{top:g}" width="{columns * CELL_W:.1f}" height="{height:g}" fill="{color}"/>'


def _x(column: float) -> str:
    return f"{MARGIN + column * CELL_W:.1f}"
