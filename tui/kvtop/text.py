"""Lines of styled text, without a terminal library: what every view draws and every output paints.

A `Line` is a tuple of `Span`s; a span's style is a *word* from `STYLES` ("warn", "used", "key"), never a colour, so that
the screen, `--once`, a 16-colour terminal and the colour-blind theme each choose their own. A span may carry an action, which
makes it clickable on the screen. All functions are pure; widths are terminal columns (a CJK character takes two).

    numbers --(views)--> Line --(widgets.canvas)--> the screen
                          '----(once.paint)-------> stdout
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvtools.output import printable, visible_width

STYLES = (
    "", "dim", "bold", "title", "head", "key", "accent", "good", "warn", "bad", "used", "prealloc", "free", "frame", "chip",
    "low", "mid", "high",
)  # fmt: skip
"""Every style word there is; each palette has an entry for each."""


class Span(NamedTuple):
    """A run of text in one style; `action` is what a click on it does."""

    text: str
    style: str = ""
    action: str = ""


Line = tuple[Span, ...]

FRAME_FROM = 8
"""Columns below which a frame takes more than it gives."""


@dataclass(frozen=True, slots=True)
class Glyphs:
    """The characters of one alphabet. Both alphabets say the same: no meaning hangs on having Unicode."""

    full: str
    prealloc: str
    free: str
    over: str
    spark: str
    good: str
    warn: str
    bad: str
    off: str
    unknown: str
    ellipsis: str
    up: str
    down: str
    same: str
    tag: str
    dot: str
    corners: str
    across: str
    upright: str

    def spell(self, text: str) -> str:
        """`text` in this alphabet, exactly as wide: in ASCII every other character is a question mark a column.

        The last step before a terminal, and the only one that is certain: names come from anywhere.
        """
        if text.isascii() or not self.ellipsis.isascii():
            return text
        return "".join(c if c.isascii() else self.ellipsis if c == "…" else "?" * visible_width(c) for c in text)


UNICODE = Glyphs(
    full="▇", prealloc="▃", free="·", over="»", spark="▁▂▃▄▅▆▇█", good="●", warn="▲", bad="✖", off="○",
    unknown="?", ellipsis="…", up="▲", down="▼", same="─", tag="┃", dot="·", corners="╭╮╰╯", across="─", upright="│",
)  # fmt: skip
ASCII = Glyphs(
    full="#", prealloc="=", free=".", over=">", spark="_.-=+*%#", good="+", warn="!", bad="X", off="o", unknown="?",
    ellipsis="~", up="^", down="v", same="-", tag="*", dot="-", corners="++++", across="-", upright="|",
)  # fmt: skip


def span(text: str, style: str = "", action: str = "") -> Line:
    """A line of one span."""
    return (Span(text, style, action),)


def safe(text: str) -> str:
    """`text` from outside (a file name, a label), with control characters made visible."""
    return text if text.isascii() and text.isprintable() else printable(text)


def width_of(line: Line) -> int:
    """Columns a line takes."""
    return sum(visible_width(part.text) for part in line)


def clip_text(text: str, width: int, ellipsis: str = "…") -> str:
    """`text` in at most `width` columns; what is cut off is marked by the ellipsis. Never splits a wide character."""
    if width <= 0:
        return ""
    if text.isascii() and len(text) <= width:
        return text
    if visible_width(text) <= width:
        return text
    kept, used = [], 0
    for char in text:
        step = visible_width(char)
        if used + step > width - 1:
            break
        kept.append(char)
        used += step
    return "".join(kept) + ellipsis


def cell(text: str, width: int, *, right: bool = False, ellipsis: str = "…") -> str:
    """`text` in exactly `width` columns."""
    text = clip_text(text, width, ellipsis)
    blank = " " * (width - visible_width(text))
    return blank + text if right else text + blank


def fit(line: Line, width: int, *, right: bool = False, ellipsis: str = "…") -> Line:
    """A line in exactly `width` columns: cut with an ellipsis or filled with blanks."""
    if width <= 0:
        return ()
    total = width_of(line)
    if total == width:
        return line
    if total < width:
        blank = Span(" " * (width - total))
        return (blank, *line) if right else (*line, blank)
    kept: list[Span] = []
    room = width
    for part in line:
        size = visible_width(part.text)
        if size < room or (size == room and part is line[-1]):
            kept.append(part)
            room -= size
            continue
        # This span overruns: cut it one column short of the edge, so that the ellipsis always shows something is missing.
        text = part.text if size < room else clip_text(part.text + " ", room, ellipsis)
        kept.append(Span(cell(text, room, ellipsis=ellipsis), part.style, part.action))
        break
    return tuple(kept)


_PIECES = re.compile(r" +|[^ ]+")


def wrap(line: Line, width: int, *, hang: int = 0) -> list[Line]:
    """A line as lines of at most `width` columns, broken at blanks (a long word anywhere), all but the first indented by `hang`."""
    if width <= 0:
        return []
    if width_of(line) <= width:
        return [line]
    hang = max(0, min(hang, width // 2, width - 2))
    out: list[list[Span]] = [[]]
    used, begin = 0, 0
    for part in line:
        for text in _PIECES.findall(part.text):
            if text[0] == " ":
                # A gap at the end of a line is its break; one at the beginning of the first is meant.
                if used > begin or (len(out) == 1 and not used):
                    text = text[: width - used]
                    out[-1].append(Span(text, part.style, part.action))
                    used += len(text)
                continue
            if used > begin and used + visible_width(text) > width:
                out.append([Span(" " * hang)])
                used = begin = hang
            while used + visible_width(text) > width:
                head = _first(text, width - used)
                out[-1].append(Span(head, part.style, part.action))
                out.append([Span(" " * hang)])
                used, begin, text = hang, hang, text[len(head) :]
            out[-1].append(Span(text, part.style, part.action))
            used += visible_width(text)
    return [tuple(part for part in one if part.text) for one in out]


def _first(text: str, width: int) -> str:
    """The beginning of `text` that takes at most `width` columns, at least one character."""
    end, used = 0, 0
    for char in text:
        used += visible_width(char)
        if used > width and end:
            break
        end += 1
    return text[:end]


def spread(left: Line, right: Line, width: int) -> Line:
    """`left` and `right` at the two ends of `width` columns; where both do not fit, the right one goes."""
    gap = width - width_of(left) - width_of(right)
    if gap < 1:
        return fit(left, width)
    return (*left, Span(" " * gap), *right)


def pairs(items: Iterable[tuple[str, Line]], gap: str = "   ") -> Line:
    """'label value   label value': labels dim, values as given."""
    out: list[Span] = []
    for label, value in items:
        if out:
            out.append(Span(gap))
        if label:
            out.append(Span(label + " ", "dim"))
        out.extend(value)
    return tuple(out)


def bar(width: int, parts: Sequence[tuple[float, str]], total: float, glyphs: Glyphs) -> Line:
    """A horizontal bar of `width` columns: each part's share of `total` in its style, then the free rest.

    Parts are (amount, style). A part above zero gets at least one column; more than `total` ends in an `over` mark, so
    that 130 % does not look like 100 %.
    """
    if width <= 0:
        return ()
    amounts = [max(0.0, amount) for amount, _ in parts]
    if total <= 0:
        fill = glyphs.over if sum(amounts) > 0 else glyphs.free
        return span(fill * width, "bad" if sum(amounts) > 0 else "free")
    out: list[Span] = []
    room = width
    for index, (amount, (_, style)) in enumerate(zip(amounts, parts, strict=True)):
        exact = min(amount / total, 1.0) * width
        columns = min(room, max(int(exact + 0.5), 1 if amount > 0 else 0))
        glyph = glyphs.full if index == 0 else glyphs.prealloc
        if columns:
            out.append(Span(glyph * columns, style))
        room -= columns
    if sum(amounts) > total * 1.0005 and out:
        last = out[-1]
        out[-1] = Span(last.text[:-1], last.style)
        out.append(Span(glyphs.over, "bad"))
    if room > 0:
        out.append(Span(glyphs.free * room, "free"))
    return tuple(part for part in out if part.text)


def spark(values: Sequence[float], width: int, glyphs: Glyphs, *, top: float = 0.0) -> str:
    """The last `width` values as one row of blocks, newest at the right; `top` is the full height (0: the largest value).

    Zero is the lowest block, so that "no traffic" and "no data" (blank) differ. The full block is left out: it would touch
    the row above.
    """
    if width <= 0:
        return ""
    shown = list(values[-width:])
    ceiling = top or max(shown, default=0.0)
    blocks = glyphs.spark[:-1]
    steps = len(blocks) - 1
    if ceiling <= 0:
        body = blocks[0] * len(shown)
    else:
        body = "".join(blocks[min(steps, max(0, int(value / ceiling * steps + 0.5)))] for value in shown)
    return body.rjust(width)


def graph(values: Sequence[float], width: int, height: int, glyphs: Glyphs, *, top: float = 0.0) -> list[Line]:
    """The last `width` values as a filled graph of `height` rows, newest at the right, zero at the bottom, brighter upwards."""
    if width <= 0 or height <= 0:
        return []
    shown = list(values[-width:])
    ceiling = top or max(shown, default=0.0) or 1.0
    levels = len(glyphs.spark)
    units = [min(1.0, max(0.0, value / ceiling)) * height * levels for value in shown]
    rows = []
    for row in range(height - 1, -1, -1):
        text = ""
        for unit in units:
            level = int(unit + 0.5) - row * levels
            if level <= 0:
                text += glyphs.spark[0] if row == 0 else " "
            else:
                text += glyphs.spark[min(level, levels) - 1]
        shade = "low" if row < height / 3 else "mid" if row < 2 * height / 3 else "high"
        rows.append(span(text.rjust(width), shade))
    return rows


def box(title: str, lines: Sequence[Line], width: int, glyphs: Glyphs, *, note: str = "", height: int = 0) -> list[Line]:
    """`lines` in a frame of exactly `width` columns with a title (and a note at the right); `height` rows when given.

    Too narrow for a frame (under `FRAME_FROM` columns): the plain lines.
    """
    rows = list(lines)
    if width < FRAME_FROM:
        plain = [fit(line, width) for line in [span(title, "title"), *rows]]
        return _rows(plain, height, width) if height else plain
    if height:
        rows = _rows(rows, max(0, height - 2), width - 4)
    left, right, low_left, low_right = list(glyphs.corners)
    inner = width - 2
    label = clip_text(f" {title} ", inner - 2, glyphs.ellipsis) if title else ""
    tail = f" {note} " if note and visible_width(label) + visible_width(note) + 6 <= inner else ""
    rest = inner - 1 - visible_width(label) - visible_width(tail) - (1 if tail else 0)
    top = (
        Span(left + glyphs.across, "frame"),
        Span(label, "title"),
        Span(glyphs.across * rest, "frame"),
        Span(tail, "dim"),
        Span((glyphs.across if tail else "") + right, "frame"),
    )
    side = Span(glyphs.upright, "frame")
    body = [(side, Span(" "), *fit(line, width - 4, ellipsis=glyphs.ellipsis), Span(" "), side) for line in rows]
    return [top, *body, span(low_left + glyphs.across * inner + low_right, "frame")]


def _rows(lines: list[Line], height: int, width: int) -> list[Line]:
    return lines[:height] + [span(" " * width)] * (height - len(lines))


def beside(blocks: Sequence[Sequence[Line]], widths: Sequence[int], gap: int = 1) -> list[Line]:
    """Blocks of lines side by side, each `widths[i]` wide, filled with blanks to the tallest."""
    tall = max((len(block) for block in blocks), default=0)
    out = []
    for row in range(tall):
        line: list[Span] = []
        for index, (block, width) in enumerate(zip(blocks, widths, strict=True)):
            if index and gap:
                line.append(Span(" " * gap))
            line.extend(fit(block[row], width) if row < len(block) else span(" " * width))
        out.append(tuple(line))
    return out


def plain(line: Line) -> str:
    """The text of a line, without style."""
    return "".join(part.text for part in line)
