"""The one screen: head, what stands above the table, the table, the pane, the foot; and what each key does.

    Dashboard.Read -> take() -> model -> draw(): head, above, grid, pane, foot as lines -> changed rows repainted

A view is data (kvtop.views), so changing the view changes no widget. `draw` runs once a tick inside one batch; rows are keyed and
widths fixed, so a tick repaints what changed and nothing else. Actions that change something outside kvtop are in
`kvtop.screens.dialogs`, behind a question, and are not even bound under --readonly.
"""

from typing import TYPE_CHECKING, Any

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal
from textual.widgets import Input

from kvtop.alerts import CRITICAL
from kvtop.chrome import State, foot, frame_rows, head
from kvtop.columns import Order, Row, arrange, names_of
from kvtop.keys import KEYS, VIEWS, Key, usable
from kvtop.model import Model
from kvtop.palette import PALETTES
from kvtop.query import Filter, parse_filter
from kvtop.reader import Reader
from kvtop.screens.dialogs import AlertList, Choice, Help, Menu, Palette
from kvtop.screens.jobs import Jobs
from kvtop.snapshot import Snapshot
from kvtop.text import ASCII, fit, span
from kvtop.views import VIEWS as VIEW_TABLE
from kvtop.views.base import View, pane_lines, share_height
from kvtop.widgets.canvas import Canvas, Styles
from kvtop.widgets.grid import Grid

if TYPE_CHECKING:
    from kvtop.screens.dashboard import Options

LATE_S = 2.0
"""A reading that takes longer than this is mentioned."""

MIN_INTERVAL_S, MAX_INTERVAL_S = 0.1, 3600.0

_NAMED = frozenset({"detail", "filter", "sort", "invert", "follow", "tag"})
"""Table actions worth a name in the palette; moving the cursor is not."""


class MainScreen(Jobs, inherit_bindings=False):
    """Everything that is always there."""

    BINDINGS = [  # noqa: RUF012 - Textual's own way
        Binding(",".join(key.keys), key.action, key.hint or key.id, id=key.id, show=False) for key in KEYS
    ]

    def __init__(self, model: Model, looks: Styles, options: "Options", reader: Reader) -> None:
        super().__init__(id="main")
        self.model = model
        self.options = options
        self.reader = reader
        self.player = options.player
        self.view: View = VIEW_TABLE[options.view]
        self.zoomed = False
        self.problem = ""
        self._filters: dict[str, Filter] = {}
        self._orders: dict[str, Order] = {view: VIEW_TABLE[view].order for view in VIEW_TABLE}
        if options.order is not None:
            self._orders[options.view] = options.order
        self._cursors: dict[str, str | None] = {}
        self.head = Canvas(looks, id="head")
        self.above = Canvas(looks, id="above")
        self.grid = Grid(looks, model, id="grid")
        self.pane = Canvas(looks, id="pane", scrolls=True)
        self.foot = Canvas(looks, id="foot")
        self.mark = Canvas(looks, id="mark")
        self.prompt = Input(id="prompt-input", compact=True)
        self.prompt.cursor_blink = False
        self.shown: list[Row] = []
        self._total = 0
        if options.filter:
            self._set_filter(options.filter)

    def compose(self) -> ComposeResult:
        yield self.head
        yield self.above
        yield self.grid
        yield self.pane
        yield self.foot
        with Horizontal(id="prompt"):
            yield self.mark
            yield self.prompt

    def on_mount(self) -> None:
        self.set_class(self.model.glyphs is ASCII, "plain")
        self.mark.styles.width, self.mark.styles.height = 2, 1
        self.mark.show([span("/ ", "key")])
        self.grid.focus()
        self.set_interval(1.0, self._watch_reader)
        self.draw()
        self._look_if_doctor()

    def on_resize(self) -> None:
        self.draw()

    # --- drawing -----------------------------------------------------------------------------------------------------

    def take(self, snapshot: Snapshot | None, problem: str = "") -> None:
        """One tick: a new snapshot, or what went wrong."""
        self.problem = problem
        if snapshot is not None:
            health = self.model.health
            self.model.take(snapshot)
            for alert in self.model.news:
                self.say(f"{alert.subject}: {alert.text}", bad=True)
            if self.model.health == CRITICAL != health and self.view.id != "overview":
                # On the overview the reason stands in the first line; elsewhere somebody has to say it.
                self.say(f"{self.model.alerts[0].subject}: {self.model.alerts[0].text}", bad=True)
            if self.player is not None and self.player.ended:
                self.reader.paused = True
            self._follow()
        self.draw()

    def _watch_reader(self) -> None:
        """A source that hangs delivers nothing: the screen notices by itself."""
        late = self.reader.waiting_s
        if late > LATE_S:
            self.problem = f"reading for {late:.0f} s"
            self._draw_frame(self.size.width, *frame_rows(self.size.height))
        elif self.problem.startswith("reading for "):
            self.problem = ""

    @property
    def state(self) -> State:
        """What the frame shows."""
        recorder = self.options.recorder
        return State(
            view=self.view.id,
            paused=self.reader.paused,
            readonly=self.options.readonly,
            replay=self.player.where() if self.player else "",
            recording=recorder.words() if recorder and not recorder.problem else "",
            unrecorded=recorder.problem if recorder else "",
            damaged=self.player.damaged if self.player else "",
            filter=self.filter.text,
            banner=self.problem,
            shown=len(self.shown),
            total=self._total,
        )

    @property
    def filter(self) -> Filter:
        return self._filters.get(self.view.id, Filter())

    @property
    def order(self) -> Order:
        return self._orders[self.view.id]

    def draw(self) -> None:
        """Bring the screen up to date. Safe at any size, at any moment."""
        width, height = self.size
        if width <= 0 or height <= 0 or not self.is_mounted:
            return
        rows = self.view.rows(self.model)
        self._total = len(rows)
        self.shown = arrange(rows, self.filter, self.order)
        if self.model.tags:
            self.shown.sort(key=lambda row: row.key not in self.model.tags)
        up, low = frame_rows(height)
        body = max(0, height - up - low - (1 if self.prompting and not low else 0))
        # The table keeps up to eight of its rows before anything above it grows.
        table = max(4, min(len(self.shown) + 1, 9))
        # What is wrong stands in its first line, and is said on the smallest screen with the longest table.
        least = min(1, max(0, body - 3)) if self.model.alerts and self.view.id == "overview" else 0
        above = [] if self.zoomed else self.view.above(self.model, width, max(least, body - table))
        share = share_height(body, len(above), self.view.pane, len(self.shown), spare=self.view.spare)
        with self.app.batch_update():
            self._draw_frame(width, up, low)
            _place(self.above, share.above if not self.zoomed else 0)
            _place(self.grid, share.table if not self.zoomed else 0)
            _place(self.pane, body if self.zoomed else share.pane)
            self.above.show([fit(line, width) for line in above[: share.above]])
            self.grid.show(self.shown, self.view.columns, self.order, self._nothing_to_see())
            if self._cursors.get(self.view.id) and self.grid.key is not None:
                self._restore_cursor()
            self._draw_pane(width, body if self.zoomed else share.pane)

    def _draw_frame(self, width: int, up: int, low: int) -> None:
        state = self.state
        _place(self.head, up)
        _place(self.foot, 0 if self.prompting else low)
        self.head.show(head(self.model, state, width, up))
        self.foot.show([foot(self.options.keys, state, width, self.model)][:low])

    def _draw_pane(self, width: int, height: int) -> None:
        if height <= 0:
            self.pane.show([])
            return
        # A zoomed detail may be longer than the screen: it is drawn in full and scrolls, beside the scrollbar.
        lines = pane_lines(self.view, self.model, self.grid.row, width, height, whole=self.zoomed)
        if len(lines) > height and width > 1 and not self.has_class("plain"):
            width -= 1
            lines = pane_lines(self.view, self.model, self.grid.row, width, height, whole=self.zoomed)
        self.pane.show([fit(line, width) for line in lines])

    def _nothing_to_see(self) -> str:
        if self.model.snapshot is None:
            return self.problem or "reading"
        if self._total and not self.shown:
            why = f": {self.filter.problem}" if self.filter.problem else " (Esc clears it)"
            return f"nothing matches /{self.filter.text}{why}"
        return self.view.empty(self.model)

    def redraw(self) -> None:
        """Paint everything anew (another theme)."""
        for widget in (self.head, self.above, self.grid, self.pane, self.foot, self.mark):
            widget.refresh()

    # --- bindings ----------------------------------------------------------------------------------------------------

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Whether an action exists here at all: wrong view, --readonly and replay hide it from key, palette and mouse."""
        return all(
            self.allows(key)
            for key in KEYS
            if key.action.partition("(")[0] == action and (key.mutates or key.replay is not None or key.where)
        )

    def allows(self, key: Key) -> bool:
        """Whether a key does something on this screen now."""
        state = self.state
        return usable(key, view=state.view, readonly=state.readonly, replay=bool(state.replay))

    # --- general actions ---------------------------------------------------------------------------------------------

    def action_help(self) -> None:
        here = [key for key in self.options.keys if self.allows(key)]
        self.app.push_screen(Help(self.app.looks, here, self.view.title))

    def action_palette(self) -> None:
        self.app.push_screen(Palette(self.app.looks, "command", self._commands()), self._run)

    def _commands(self) -> list[Choice]:
        """Everything that can be done here, by name."""
        views = [Choice(f"view('{name}')", name, line) for name, _, line in VIEWS if name in VIEW_TABLE]
        keys = [
            Choice(key.action, key.id, key.help)
            for key in self.options.keys
            if self.allows(key) and key.group not in ("views", "table")
        ]
        tables = [Choice(key.action, key.id, key.help) for key in self.options.keys if key.group == "table" and key.id in _NAMED]
        themes = [Choice(f"wear('{name}')", f"theme {name}", "colours") for name in PALETTES]
        sorts = [Choice(f"sort('{c.id}')", f"sort {c.id}", "sort the table by it") for c in self.view.columns]
        return [*views, *keys, *tables, *themes, *sorts]

    def action_alerts(self) -> None:
        self.app.push_screen(AlertList(self.app.looks, self.model))

    async def _run(self, action: str | None) -> None:
        if action:
            await self.run_action(action)

    def action_wear(self, theme: str) -> None:
        if theme in PALETTES:
            self.app.wear(theme)

    def action_quit(self) -> None:
        self.app.exit(0)

    def action_pause(self) -> None:
        self.reader.paused = not self.reader.paused
        self.draw()

    def action_refresh(self) -> None:
        self.reader.kick()

    def action_faster(self) -> None:
        self._set_interval_s(self.model.interval_s / 2)

    def action_slower(self) -> None:
        self._set_interval_s(self.model.interval_s * 2)

    def _set_interval_s(self, seconds: float) -> None:
        self.model.interval_s = min(max(seconds, MIN_INTERVAL_S), MAX_INTERVAL_S)
        self.reader.interval_s = self.model.interval_s
        self.draw()

    def action_theme(self) -> None:
        names = list(PALETTES)
        self.app.wear(names[(names.index(self.app.looks.palette.name) + 1) % len(names)])

    def action_back(self) -> None:
        if self.zoomed:
            self.zoomed = False
        elif self.filter.text:
            self._set_filter("")
        elif self.model.tags:
            self.model.tags.clear()
        self.draw()

    def action_view(self, name: str) -> None:
        if name not in VIEW_TABLE:
            return
        self._cursors[self.view.id] = self.grid.key
        self.view = VIEW_TABLE[name]
        self.zoomed = False
        self.grid.cursor = 0
        self.draw()
        self._look_if_doctor()

    def _restore_cursor(self) -> None:
        key = self._cursors.pop(self.view.id)
        if key is not None:
            self.grid.move_to_key(key)

    def action_next_view(self, step: int) -> None:
        names = [name for name, _, _ in VIEWS if name in VIEW_TABLE]
        self.action_view(names[(names.index(self.view.id) + step) % len(names)])

    # --- table actions -----------------------------------------------------------------------------------------------

    def action_cursor(self, step: int) -> None:
        self._move(self.grid.cursor + step)

    def action_page(self, step: int) -> None:
        if self.zoomed:
            self.pane.scroll_relative(y=step * max(1, self.pane.size.height - 1), animate=False)
        else:
            self._move(self.grid.cursor + step * self.grid.page)

    def action_edge(self, side: int) -> None:
        self._move(0 if side < 0 else len(self.shown) - 1)

    def _move(self, to: int) -> None:
        self.grid.move(to)
        self._draw_pane(self.size.width, self.pane.size.height)

    def on_grid_opened(self) -> None:
        self.action_detail()

    def action_detail(self) -> None:
        if self.grid.row is not None:
            self.zoomed = not self.zoomed
            self.pane.scroll_to(y=0, animate=False)
            self.draw()

    def action_tag(self) -> None:
        key = self.grid.key
        if key is not None:
            self.model.tags.symmetric_difference_update({key})
            self.draw()

    def action_follow(self) -> None:
        self.grid.follow = not self.grid.follow
        self.notify(f"the cursor follows {'the thing' if self.grid.follow else 'the line'}", timeout=2)

    def action_sort(self, column: str) -> None:
        """Sort by a column; by the same one again: the other way round."""
        now = self.order
        chosen = next((c for c in self.view.columns if c.id == column), None)
        if chosen is None:
            return
        rising = not now.rising if now.column == column else chosen.rising
        self._orders[self.view.id] = Order(column, rising)
        self.draw()

    def action_sort_step(self, step: int) -> None:
        names = [column.id for column, _ in self.grid.fitted]
        if not names:
            return
        place = names.index(self.order.column) if self.order.column in names else -step
        chosen = next(c for c in self.view.columns if c.id == names[(place + step) % len(names)])
        self._orders[self.view.id] = Order(chosen.id, chosen.rising)
        self.draw()

    def action_sort_menu(self) -> None:
        choices = [Choice(column.id, column.title.strip().lower() or column.id, column.id) for column in self.view.columns]
        self.app.push_screen(Menu(self.app.looks, "sort by", choices, self.order.column), self._sort_chosen)

    def _sort_chosen(self, column: str | None) -> None:
        if column:
            self.action_sort(column)

    def action_invert(self) -> None:
        self._orders[self.view.id] = Order(self.order.column, not self.order.rising)
        self.draw()

    # --- filter ------------------------------------------------------------------------------------------------------

    @property
    def prompting(self) -> bool:
        """Whether the filter is being typed."""
        return bool(self.query_one("#prompt").display) if self.is_mounted else False

    def _set_filter(self, text: str) -> None:
        self._filters[self.view.id] = parse_filter(text, names_of(self.view.columns))

    def action_filter(self) -> None:
        self.query_one("#prompt").display = True
        self.prompt.value = self.filter.text
        # At once, not on the next idle moment: what is typed right behind the slash belongs to the filter.
        self.set_focus(self.prompt)
        self.draw()

    def on_input_changed(self, event: Input.Changed) -> None:
        if event.input is self.prompt and self.prompting:
            self._set_filter(event.value)
            self.draw()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        if event.input is self.prompt:
            self.close_prompt()

    def on_key(self, event: Any) -> None:
        if self.prompting and event.key == "escape":
            event.stop()
            event.prevent_default()
            self._set_filter("")
            self.close_prompt()

    def close_prompt(self) -> None:
        """Back to the table; the filter stays."""
        self.query_one("#prompt").display = False
        self.set_focus(self.grid)
        self.draw()


def _place(widget: Canvas | Grid, rows: int) -> None:
    """Give a widget its rows; a change of layout only where there is one."""
    wanted = rows > 0
    if widget.display != wanted:
        widget.display = wanted
    height = widget.styles.height
    if wanted and (height is None or height.value != rows or height.unit.name != "CELLS"):
        widget.styles.height = rows
