"""The screen as SVG: Textual's strips as runs for kvtop.svg, every colour worked out."""

from rich.color import Color
from rich.style import Style
from textual.strip import Strip

from kvtop.palette import PALETTES, Palette
from kvtop.svg import Run, draw


def picture_of(strips: list[Strip], palette: Palette, title: str) -> str:
    """An SVG of what is on the screen. On themes of the terminal's own colours, those of the default theme stand in."""
    base = PALETTES["dusk"] if palette.ansi else palette
    rows = [[_run(text, style or Style.null(), base) for text, style, _ in strip] for strip in strips]
    columns = max((strip.cell_length for strip in strips), default=0)
    return draw(rows, columns, background=base.background, foreground=base.foreground, title=title)


def _run(text: str, style: Style, base: Palette) -> Run:
    color, background = _hex(style.color, base.foreground), _hex(style.bgcolor, base.background)
    if style.reverse:
        color, background = background, color
    if style.dim:
        color = _blend(color, background)
    return Run(text, color, "" if background == base.background else background, bool(style.bold))


def _hex(color: Color | None, default: str) -> str:
    if color is None or color.is_default:
        return default
    return "#{:02x}{:02x}{:02x}".format(*color.get_truecolor())


def _blend(color: str, background: str) -> str:
    parts = [(int(color[i : i + 2], 16) + int(background[i : i + 2], 16)) // 2 for i in (1, 3, 5)]
    return "#{:02x}{:02x}{:02x}".format(*parts)
