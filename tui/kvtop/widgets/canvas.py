"""A widget that shows lines and repaints only those that changed.

`show(lines)` compares with what is on the screen and asks Textual for a repaint of the differing rows alone; a tick in which
nothing changed costs a tuple comparison a row. `painted` counts repainted rows, which is what the tests bound.
Spans with an action are clickable.
"""

from collections.abc import Sequence

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.geometry import Region, Size
from textual.scroll_view import ScrollView
from textual.strip import Strip

from kvtools.output import visible_width
from kvtop.palette import Palette
from kvtop.text import UNICODE, Glyphs, Line, Span, fit


class Styles:
    """Rich styles of one palette, by style word; made once a theme. All widgets share one object."""

    def __init__(self, palette: Palette, glyphs: Glyphs = UNICODE) -> None:
        self.palette = palette
        self.glyphs = glyphs
        self._made: dict[str, Style] = {}
        self.wear(palette)

    def wear(self, palette: Palette) -> None:
        """Change to another palette; the owner repaints."""
        self.palette = palette
        self._made = {word: Style.parse(text) if text else Style.null() for word, text in palette.styles.items()}

    def get(self, word: str) -> Style:
        return self._made.get(word) or self._made[""]

    def strip(self, line: Line, width: int, base: Style) -> Strip:
        """A line of exactly `width` columns over a base style."""
        segments = [
            Segment(self.glyphs.spell(part.text), base + self.get(part.style) if part.style else base)
            for part in fit(line, width)
            if part.text
        ]
        return Strip(segments, width)


class Canvas(ScrollView, can_focus=False):
    """Lines, scrolled when there are more than rows. The owner calls `show`; a click on a span with an action runs it."""

    DEFAULT_CSS = """
    Canvas { height: auto; width: 1fr; overflow-x: hidden; overflow-y: hidden; background: $background; color: $foreground;
             scrollbar-size-vertical: 1; }
    """

    def __init__(self, styles: Styles, *, id: str | None = None, scrolls: bool = False) -> None:  # noqa: A002 - Textual's own word
        super().__init__(id=id)
        self.looks = styles
        self.lines: list[Line] = []
        self.painted = 0
        self._scrolls = scrolls

    def on_mount(self) -> None:
        if self._scrolls:
            self.styles.overflow_y = "auto"

    def show(self, lines: Sequence[Line]) -> None:
        """Show these lines; rows that are already so are left alone."""
        before, self.lines = self.lines, list(lines)
        if len(before) != len(self.lines):
            if self._scrolls:
                self.virtual_size = Size(self.size.width, len(self.lines))
            self.painted += len(self.lines)
            self.refresh()
            return
        top = round(self.scroll_y)
        rows = [Region(0, row - top, self.size.width, 1) for row, line in enumerate(self.lines) if line != before[row]]
        if rows:
            self.painted += len(rows)
            self.refresh(*rows)

    def render_line(self, y: int) -> Strip:
        row = y + round(self.scroll_y)
        width = self.size.width
        base = self.rich_style
        if not 0 <= row < len(self.lines):
            return Strip.blank(width, base)
        return self.looks.strip(self.lines[row], width, base)

    def span_at(self, x: int, y: int) -> Span | None:
        """The span under a position of the widget."""
        row = y + round(self.scroll_y)
        if not 0 <= row < len(self.lines):
            return None
        for part in self.lines[row]:
            x -= visible_width(part.text)
            if x < 0:
                return part
        return None

    async def on_click(self, event: events.Click) -> None:
        found = self.span_at(event.x, event.y)
        if found and found.action:
            event.stop()
            await self.app.run_action(found.action)
