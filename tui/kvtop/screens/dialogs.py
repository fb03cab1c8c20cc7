"""What opens over the main screen without changing anything outside kvtop: help, a menu, the palette, and the box they share.

Each is a modal screen that answers with a value, or None when closed (Esc). The box takes what its lines need and never more than
the screen has, down to 1x1. Lines come from plain functions, so tests read them without a screen.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input

from kvtop.keys import Key, by_group
from kvtop.model import Model
from kvtop.text import Line, Span, beside, cell, clip_text, fit, safe, span, width_of, wrap
from kvtop.views.base import level_mark
from kvtop.widgets.canvas import Canvas, Styles

if TYPE_CHECKING:
    from kvtop.screens.dashboard import Dashboard

Answer = TypeVar("Answer")


class Dialog(ModalScreen[Answer | None], Generic[Answer], inherit_bindings=False):
    """A box in the middle. Subclasses give `lines`; with `asks` there is a line to type in under them."""

    app: "Dashboard"

    BINDINGS = [Binding("escape,ctrl+c", "close", "close", show=False)]  # noqa: RUF012 - Textual's own way
    asks = False
    wraps = True
    """Whether a line that is too long goes on in the next one; a row of a menu is cut instead."""

    def __init__(self, looks: Styles, title: str) -> None:
        super().__init__()
        self.looks = looks
        self.heading = title.strip()
        self._shape = (0, 0)
        """Lines that do not fit, and columns inside the frame."""
        self.body = Canvas(looks, scrolls=True)
        self.field = Input(compact=True)
        self.field.cursor_blink = False
        self.frame = Vertical(classes="dialog")

    def lines(self, width: int) -> list[Line]:
        """What the box says; lines longer than `width` columns are wrapped."""
        raise NotImplementedError

    def question(self) -> Line:
        """What has to be answered: the last line, or the first where not all lines fit, so that it is always seen."""
        return ()

    def compose(self) -> ComposeResult:
        with self.frame:
            yield self.body
            if self.asks:
                yield self.field

    def on_mount(self) -> None:
        self.fill()
        if self.asks:
            self.set_focus(self.field)

    def on_resize(self) -> None:
        self.fill()

    def fill(self) -> None:
        """Size the box to its lines and to the screen, and show them."""
        if not self.is_mounted:
            return
        width, height = self.app.size
        framed = width >= 16 and height >= 6
        edge_x, edge_y = (4, 2) if framed else (0, 0)
        room = max(1, width - edge_x)
        typing = 1 if self.asks else 0
        most = max(0, height - edge_y - typing)
        plain = self.app.main.has_class("plain")
        text = room
        lines, asked = self._asked(text)
        if len(lines) + len(asked) > most and not plain and room > 8:
            text -= 1  # the scrollbar takes a column
            lines, asked = self._asked(text)
        lines = [*lines, *asked] if len(lines) + len(asked) <= most else [*asked, *lines]
        inner = min(max([1, *(width_of(line) for line in lines), 40 if self.asks else 1]) + room - text, room)
        rows = min(len(lines), most)
        self.frame.set_class(framed, "framed")
        self.set_class(plain, "plain")
        # As content, not as text: a segment's name may look like markup.
        self.frame.border_title = self._label(self.heading, inner)
        self._shape = (len(lines) - rows, inner)
        self._say_rest()
        self.frame.styles.width = inner + edge_x
        self.frame.styles.height = min(height, rows + typing + edge_y)
        self.body.display = rows > 0
        self.body.styles.height = max(1, rows)
        self.body.styles.width = inner
        self.body.show([fit(line, inner - (room - text), ellipsis=self.looks.glyphs.ellipsis) for line in lines])

    def _asked(self, width: int) -> tuple[list[Line], list[Line]]:
        """The lines, and the question if there is one."""
        question = self.question()
        return self._wrapped(self.lines(width), width), self._wrapped([question], width) if question else []

    def _wrapped(self, lines: Sequence[Line], width: int) -> list[Line]:
        if not self.wraps:
            return [line for line in lines if line]
        return [part for line in lines for part in (wrap(line, width) if line else [()])]

    def _label(self, text: str, inner: int) -> Content:
        width = inner - 2  # the frame keeps a dash and a blank at either end
        return Content(self.looks.glyphs.spell(clip_text(text, width, self.looks.glyphs.ellipsis)))

    def action_move(self, step: int) -> None:
        """Scroll what does not fit; by a page at most, so that no line is passed over."""
        page = max(1, self.body.size.height - 1)
        step = max(-page, min(step, page))
        self.body.scroll_to(y=self.body.scroll_y + step, animate=False, immediate=True)
        self._say_rest()

    def _say_rest(self) -> None:
        """In the frame: how many lines are below the edge."""
        hidden, inner = self._shape
        below = hidden - round(self.body.scroll_y)
        self.frame.border_subtitle = self._label(f"{below} more: PgDn" if below > 0 else "", inner)

    def action_close(self) -> None:
        self.dismiss(None)


SCROLLING: list[Binding | tuple[str, str] | tuple[str, str, str]] = [
    Binding("down", "move(1)", show=False),
    Binding("up", "move(-1)", show=False),
    Binding("pagedown", "move(5)", show=False),
    Binding("pageup", "move(-5)", show=False),
]
"""Keys of a dialog whose text may be longer than the screen, beside a line to type in."""
READING = (
    Binding("down,j", "move(1)", show=False),
    Binding("up,k", "move(-1)", show=False),
    Binding("pagedown,space", "move(10)", show=False),
    Binding("pageup", "move(-10)", show=False),
)
"""Keys of one that is only read: letters are free for them."""


# --- help --------------------------------------------------------------------------------------------------------------


_KEY_COLUMNS = 13


def help_lines(keys: Sequence[Key], width: int) -> list[Line]:
    """The keys that do something here, by group; two columns where the screen is wide."""
    two = width >= 120
    room = (width - 2) // 2 if two else width
    blocks = []
    for title, rows in by_group(tuple(keys)):
        block: list[Line] = [(Span(title, "title"),)]
        for names, _, text in rows:
            block += wrap((Span(cell(names, _KEY_COLUMNS - 1), "key"), Span(f" {text}")), room, hang=_KEY_COLUMNS)
        blocks.append([*block, ()])
    if two and len(blocks) > 1:
        left = blocks[:2]
        right = blocks[2:]
        lines = beside([sum(left, []), sum(right, [])], [room, room], gap=2)  # noqa: RUF017 - a handful of lists
    else:
        lines = [line for block in blocks for line in block]
    footer = (Span("Filters: word, column:word, used>80%, limit<4G, !not, a | b.   Esc closes.", "dim"),)
    return [*lines, *wrap(footer, width)]


class Help(Dialog[None]):
    """`?`: what each key does in the view it was opened from."""

    BINDINGS = [  # noqa: RUF012 - Textual's own way
        Binding("question_mark,q,f1,h,enter", "close", "close", show=False),
        *READING,
    ]

    def __init__(self, looks: Styles, keys: Sequence[Key], view: str) -> None:
        super().__init__(looks, f" keys in {view} ")
        self._keys = keys

    def lines(self, width: int) -> list[Line]:
        return help_lines(self._keys, width)


def alert_lines(model: Model, width: int) -> list[Line]:
    """Everything that is wrong now, worst first, each in full."""
    lines: list[Line] = []
    for alert in model.alerts:
        said = (level_mark(alert.level, model), Span("  "), Span(safe(alert.subject), "bold"), Span("  " + safe(alert.text)))
        lines += wrap(said, width, hang=2)
    return lines or [span("nothing is wrong", "good")]


class AlertList(Dialog[None]):
    """`a`: what is wrong, where the overview has room for the worst of it."""

    BINDINGS = [  # noqa: RUF012 - Textual's own way
        Binding("a,q,enter", "close", "close", show=False),
        *READING,
    ]

    def __init__(self, looks: Styles, model: Model) -> None:
        super().__init__(looks, " what is wrong ")
        self._model = model

    def lines(self, width: int) -> list[Line]:
        return alert_lines(self._model, width)


# --- menu and palette --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Choice:
    """One line of a menu: what it answers, its name, and a word about it."""

    answer: str
    name: str
    help: str = ""


def match(choices: Sequence[Choice], text: str) -> list[Choice]:
    """The choices that `text` may mean, best first: the same beginning, then a word in it, then its letters in order."""
    wanted = text.strip().lower()
    if not wanted:
        return list(choices)
    ranked = []
    for place, choice in enumerate(choices):
        name = choice.name.lower()
        if name.startswith(wanted):
            rank = 0
        elif wanted in name:
            rank = 1
        elif wanted in choice.help.lower():
            rank = 2
        elif _letters_in_order(wanted, name):
            rank = 3
        else:
            continue
        ranked.append((rank, place, choice))
    return [choice for _, _, choice in sorted(ranked, key=lambda item: item[:2])]


def _letters_in_order(wanted: str, name: str) -> bool:
    rest = iter(name)
    return all(letter in rest for letter in wanted)


class Menu(Dialog[str]):
    """A list to choose from."""

    wraps = False

    BINDINGS = [  # noqa: RUF012 - Textual's own way
        Binding("down,ctrl+n", "step(1)", show=False),
        Binding("up,ctrl+p", "step(-1)", show=False),
        Binding("j", "step(1)", show=False),
        Binding("k", "step(-1)", show=False),
        Binding("enter", "choose", show=False),
        Binding("q", "close", show=False),
    ]

    def __init__(self, looks: Styles, title: str, choices: Sequence[Choice], current: str = "") -> None:
        super().__init__(looks, f" {title} ")
        self.choices = list(choices)
        self.found = list(choices)
        self.place = next((i for i, choice in enumerate(self.found) if choice.answer == current), 0)

    def lines(self, width: int) -> list[Line]:
        name = max([4, *(len(choice.name) for choice in self.choices)])
        out: list[Line] = []
        for place, choice in enumerate(self.found):
            here = place == self.place
            mark = Span("> " if here else "  ", "key", f"screen.take({place})")
            out.append(
                (
                    mark,
                    Span(cell(choice.name, name), "chip" if here else "bold", f"screen.take({place})"),
                    Span(f"  {choice.help}", "dim"),
                )
            )
        return out or [(Span("nothing of that name", "warn"),)]

    def action_step(self, step: int) -> None:
        if self.found:
            self.place = (self.place + step) % len(self.found)
            self.fill()
            self._show_place()

    def _show_place(self) -> None:
        top, rows = round(self.body.scroll_y), max(1, self.body.size.height)
        if self.place < top:
            self.body.scroll_to(y=self.place, animate=False, immediate=True)
        elif self.place >= top + rows:
            self.body.scroll_to(y=self.place - rows + 1, animate=False, immediate=True)

    def action_take(self, place: int) -> None:
        self.place = place
        self.action_choose()

    def action_choose(self) -> None:
        self.dismiss(self.found[self.place].answer if 0 <= self.place < len(self.found) else None)


class Palette(Menu):
    """`:`: every command by name, narrowed while typing."""

    BINDINGS = [Binding("tab", "complete", show=False)]  # noqa: RUF012 - Textual's own way
    asks = True

    def on_input_changed(self, event: Input.Changed) -> None:
        self.found = match(self.choices, event.value)
        self.place = 0
        self.fill()

    def on_input_submitted(self) -> None:
        self.action_choose()

    def action_complete(self) -> None:
        if 0 <= self.place < len(self.found):
            self.field.value = self.found[self.place].name
            self.field.cursor_position = len(self.field.value)
