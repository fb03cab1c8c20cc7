"""The table: rows by key, fixed widths, a cursor that stays on the thing, and repaints of changed rows only.

Textual's DataTable is good, and was measured: at 100 rows a keyed `update_cell` a changed value costs 7 % of a core at one tick a
second. This one lays out and paints only the rows in view, and asks for a repaint only of those whose text changed, which
leaves room for everything else in the budget. `painted` counts repainted rows; the tests bound it.

Data flow: `show(rows, columns)` each tick -> the rows in view become Lines -> changed ones are repainted. The cursor is a
key; when sorting moves its row the cursor goes along (follow) or stays on its line (not follow). Used on the
screen's thread only.
"""

from collections.abc import Sequence

from textual import events
from textual.geometry import Region, Size
from textual.message import Message
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.strip import Strip

from kvtools.output import visible_width
from kvtop.columns import Column, Order, Row, fit_columns, header, paint_row
from kvtop.model import Model
from kvtop.text import Line, Span, span
from kvtop.widgets.canvas import Styles


class Grid(ScrollView, can_focus=True):
    """A table over a view's rows. The first line is the header; it does not scroll."""

    DEFAULT_CSS = """
    Grid { height: 1fr; width: 1fr; overflow-x: hidden; overflow-y: auto; background: $background; color: $foreground;
           scrollbar-size-vertical: 1; }
    """

    COMPONENT_CLASSES = {"grid--cursor"}  # noqa: RUF012 - Textual's own way
    follow: reactive[bool] = reactive(True, repaint=False)

    class Opened(Message):
        """A row was double-clicked."""

    def __init__(self, styles: Styles, model: Model, *, id: str | None = None) -> None:  # noqa: A002 - Textual's own word
        super().__init__(id=id)
        self.looks = styles
        self.model = model
        self.rows: list[Row] = []
        self.fitted: list[tuple[Column, int]] = []
        self.order = Order("name")
        self.empty = ""
        self.cursor = 0
        self.painted = 0
        self._columns: Sequence[Column] = ()
        self._drawn: dict[int, Line] = {}
        self._cursor_drawn = -1

    # --- contents ----------------------------------------------------------------------------------------------------

    def show(self, rows: Sequence[Row], columns: Sequence[Column], order: Order, empty: str) -> None:
        """Show these rows, already filtered and sorted."""
        key = self.key
        same = columns is self._columns
        self._columns, self.order, self.empty = columns, order, empty
        self.rows = list(rows)
        if self.follow and same and key is not None:
            place = next((i for i, row in enumerate(self.rows) if row.key == key), None)
            if place is not None and place != self.cursor:
                offset = self.cursor - round(self.scroll_y)
                self.cursor = place
                if not self._in_view(place):
                    self._jump(place - offset)
        self.cursor = max(0, min(self.cursor, len(self.rows) - 1))
        self._resize()
        self._repaint()

    def _resize(self) -> None:
        # The scrollbar comes and goes with the rows, and the columns fit what it leaves.
        size = Size(self.size.width, len(self.rows) + 1)
        if self.virtual_size != size:
            self.virtual_size = size
        # Not what the last layout left: the scrollbar of these rows may only come with the next one.
        whole = self.outer_size
        bar = self.styles.scrollbar_size_vertical if size.height > whole.height else 0
        self.fitted = fit_columns(self._columns, whole.width - bar)

    def on_resize(self) -> None:
        self._resize()
        self._drawn.clear()
        self._keep_in_view()
        self.refresh()

    def _line(self, y: int) -> Line:
        """What stands on screen row `y`."""
        if y == 0:
            return header(self.fitted, self.order, self.model.glyphs)
        row = y - 1 + round(self.scroll_y)
        if not self.rows and y == 1:
            return span(self.empty, "dim")
        if 0 <= row < len(self.rows):
            return paint_row(self.rows[row], self.fitted, self.model, self.model.glyphs)
        return ()

    def _repaint(self) -> None:
        """Ask for a repaint of the rows in view whose text, or cursor, is not what was drawn."""
        at = self._cursor_row()
        changed = []
        for y in range(self.size.height):
            line = self._line(y)
            if self._drawn.get(y) != line or (y == at) != (y == self._cursor_drawn):
                self._drawn[y] = line
                changed.append(Region(0, y, self.size.width, 1))
        self._cursor_drawn = at
        if changed:
            self.painted += len(changed)
            self.refresh(*changed)

    def _cursor_row(self) -> int:
        return self.cursor - round(self.scroll_y) + 1 if self.rows else -1

    def render_line(self, y: int) -> Strip:
        width = self.size.width
        base = self.rich_style
        line = self._drawn.get(y)
        if line is None:
            line = self._drawn[y] = self._line(y)
        if y and y == self._cursor_row():
            base = self.get_component_rich_style("grid--cursor")
            self._cursor_drawn = y
        return self.looks.strip(line, width, base)

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        self._drawn.clear()

    # --- cursor ------------------------------------------------------------------------------------------------------

    @property
    def key(self) -> str | None:
        """Key of the row under the cursor."""
        return self.rows[self.cursor].key if 0 <= self.cursor < len(self.rows) else None

    @property
    def row(self) -> Row | None:
        """The row under the cursor."""
        return self.rows[self.cursor] if 0 <= self.cursor < len(self.rows) else None

    @property
    def page(self) -> int:
        """Rows in view."""
        return max(1, self.size.height - 1)

    def move(self, to: int) -> None:
        """Put the cursor on row `to` (clamped) and keep it in view."""
        self.cursor = max(0, min(to, len(self.rows) - 1))
        self._keep_in_view()
        self._repaint()

    def move_to_key(self, key: str) -> bool:
        """Put the cursor on the row with this key; False when there is none."""
        place = next((i for i, row in enumerate(self.rows) if row.key == key), None)
        if place is None:
            return False
        self.move(place)
        return True

    def _in_view(self, row: int) -> bool:
        top = round(self.scroll_y)
        return top <= row < top + self.page

    def _keep_in_view(self) -> None:
        top = round(self.scroll_y)
        if self.cursor < top:
            self._jump(self.cursor)
        elif self.cursor >= top + self.page:
            self._jump(self.cursor - self.page + 1)

    def _jump(self, top: int) -> None:
        self.scroll_to(y=max(0, top), animate=False, immediate=True)

    # --- mouse -------------------------------------------------------------------------------------------------------

    async def on_click(self, event: events.Click) -> None:
        if event.y == 0:
            found = _span_at(self._drawn.get(0, ()), event.x)
            if found and found.action:
                await self.app.run_action(found.action)
            return
        row = event.y - 1 + round(self.scroll_y)
        if 0 <= row < len(self.rows):
            self.move(row)
            if event.chain == 2:
                self.post_message(self.Opened())


def _span_at(line: Line, x: int) -> Span | None:
    for part in line:
        x -= visible_width(part.text)
        if x < 0:
            return part
    return None
