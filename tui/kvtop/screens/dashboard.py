"""The Textual app: themes, the main screen, the reading thread. All that is shown is in `main` and `dialogs`.

`Dashboard` is what kvtop.app runs and what tests drive with a fake source. Every collaborator is an argument; with
`start_reader=False` nothing happens by itself and a test delivers snapshots one by one.
"""

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from textual.message import Message

from kvtools.exits import Exit
from kvtools.segments.files import SHM
from kvtop.columns import Order
from kvtop.doctor import Diagnosis, examine
from kvtop.keys import KEYS, Key
from kvtop.model import Model
from kvtop.palette import PALETTES
from kvtop.reader import Readable, Reader
from kvtop.record import Recorder
from kvtop.replay import Player
from kvtop.screens.main import MainScreen
from kvtop.screens.theme import theme_of
from kvtop.screens.typing import Typing
from kvtop.snapshot import Snapshot
from kvtop.widgets.canvas import Styles

if TYPE_CHECKING:
    from textual.pilot import Pilot


@dataclass
class Options:
    """How the dashboard runs; the command line and the configuration fill it in."""

    theme: str = "dusk"
    view: str = "overview"
    filter: str = ""
    order: Order | None = None
    """How to sort the first view; None: as the view says."""
    readonly: bool = False
    player: Player | None = None
    """The recording that is being played; None when live."""
    recorder: Recorder | None = None
    """What records the readings; None when nothing does."""
    examine: Callable[[], Diagnosis] = examine
    keys: Sequence[Key] = KEYS
    root: Path = SHM
    write_dir: Path = field(default_factory=Path.cwd)


class Dashboard(Typing[int]):
    """kvtop on a screen."""

    ENABLE_COMMAND_PALETTE = False
    TITLE = "kvtop"
    CSS = """
    Screen { background: $background; color: $foreground; overflow: hidden; }
    Grid > .grid--cursor { background: $kv-cursor; color: $foreground; text-style: $kv-cursor-style; }
    ModalScreen { align: center middle; background: $background 60%; &:ansi { background: ansi_default; } }
    .dialog { background: $surface; }
    .dialog.framed { border: round $accent; padding: 0 1; }
    .dialog Canvas { background: $surface; }
    Input, Input:focus { background: $background; color: $foreground; border: none; height: 1; padding: 0; width: 1fr; }
    #prompt { height: 1; display: none; }
    .plain .dialog.framed { border: ascii $accent; }
    .plain Grid, .plain Canvas { scrollbar-size-vertical: 0; }
    .plain Toast { border-left: ascii $accent; border-right: none; }
    """

    class Read(Message):
        """The reader has something: a snapshot, or a line about what went wrong."""

        def __init__(self, snapshot: Snapshot | None, problem: str) -> None:
            super().__init__()
            self.snapshot = snapshot
            self.problem = problem

    def __init__(
        self,
        model: Model,
        source: Readable,
        options: Options | None = None,
        *,
        start_reader: bool = True,
    ) -> None:
        # Textual takes NO_COLOR in any form, even empty, and turns colours into greys. The theme "mono" does it properly.
        os.environ.pop("NO_COLOR", None)
        super().__init__()
        self.options = options or Options()
        self.model = model
        for palette in PALETTES.values():
            self.register_theme(theme_of(palette))
        self.theme = self.options.theme
        self.set_keymap({key.id: ",".join(key.keys) for key in self.options.keys})
        self.looks = Styles(PALETTES[self.options.theme], model.glyphs)
        self.reader = Reader(source, self._deliver, interval_s=model.interval_s)
        self._start_reader = start_reader

    def get_default_screen(self) -> MainScreen:
        return MainScreen(self.model, self.looks, self.options, self.reader)

    def on_mount(self) -> None:
        if not self.is_headless:
            # Ended by a signal, the terminal must still get back its screen, cursor and mouse.
            for number, status in ((signal.SIGTERM, Exit.OK), (signal.SIGHUP, Exit.OK), (signal.SIGINT, Exit.INTERRUPTED)):
                asyncio.get_running_loop().add_signal_handler(number, self.exit, int(status))
        if self._start_reader:
            self.reader.start()

    def on_unmount(self) -> None:
        self.reader.stop()

    @property
    def main(self) -> MainScreen:
        """The screen under any dialogs."""
        screen = self.screen_stack[0]
        assert isinstance(screen, MainScreen)
        return screen

    def _deliver(self, snapshot: Snapshot | None, problem: str) -> None:
        # Called on the reader's thread: a message is the one thing that may cross.
        if snapshot is not None and self.options.recorder is not None:
            self.options.recorder(snapshot)
        self.post_message(self.Read(snapshot, problem))

    def on_dashboard_read(self, message: Read) -> None:
        """Runs whatever dialog is open, so the numbers go on under it."""
        if not self.screen_stack:
            return  # a last reading on its way while the screen is taken down
        self.main.take(message.snapshot, message.problem)

    def picture(self, size: tuple[int, int]) -> str:
        """The screen at this size, after what the model has seen, as SVG; runs the app on a terminal that does not exist."""
        drawn: list[str] = []

        async def shoot(pilot: "Pilot[object]") -> None:
            await pilot.pause()
            drawn.append(self.main.picture())
            self.exit(0)

        self.run(headless=True, size=size, auto_pilot=shoot)
        return drawn[0]

    def wear(self, theme: str) -> None:
        """Change the theme at once."""
        self.looks.wear(PALETTES[theme])
        self.theme = theme
        self.main.redraw()
