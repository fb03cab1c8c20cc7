"""What takes a moment, and so runs on a thread: writing files, the doctor, rewinding a replay, changing a segment.

Each job is an action on the screen's thread that starts a worker, and a method that takes its result back there. What changes
something outside kvtop asks first (kvtop.screens.changes) and is refused under --readonly even if a key got through. A job
that fails in a way nobody foresaw says so in a line; it never takes the screen down.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from textual import work
from textual.notifications import SeverityLevel
from textual.screen import Screen
from textual.worker import Worker, WorkerState

from kvtools.errors import KvError
from kvtop import events
from kvtop.doctor import Diagnosis
from kvtop.model import Model
from kvtop.once import write_screen
from kvtop.reader import Reader
from kvtop.replay import Player
from kvtop.screens import changes
from kvtop.screens.dialogs import AlertList
from kvtop.screens.pictures import picture_of
from kvtop.snapshot import Segment, Snapshot
from kvtop.text import safe
from kvtop.views.base import View
from kvtop.widgets.grid import Grid

if TYPE_CHECKING:
    from kvtop.screens.dashboard import Dashboard, Options


class Jobs(Screen[None], inherit_bindings=False):
    """The half of the main screen that waits for things."""

    app: "Dashboard"
    model: Model
    options: "Options"
    reader: Reader
    player: Player | None
    view: View
    grid: Grid
    problem: str

    def draw(self) -> None:
        """Bring the screen up to date."""
        raise NotImplementedError

    def take(self, snapshot: Snapshot | None, problem: str = "") -> None:
        """One tick."""
        raise NotImplementedError

    def on_worker_state_changed(self, event: Worker.StateChanged) -> None:
        if event.state == WorkerState.ERROR:
            error = event.worker.error
            self.say(f"{event.worker.name.strip('_')} failed: {type(error).__name__}: {error}", bad=True)

    # --- files -------------------------------------------------------------------------------------------------------

    @work(thread=True, exclusive=True, group="write", exit_on_error=False)
    def _write_files(self, svg: str, text: str) -> None:
        try:
            paths = write_screen(self.options.write_dir, self.model, svg, text, self.model.now_s)
        except OSError as error:
            self.app.call_from_thread(self.say, f"cannot write to {self.options.write_dir}: {error.strerror}", bad=True)
            return
        self.app.call_from_thread(self.say, "written: " + ", ".join(path.name for path in paths))

    def say(self, text: str, *, bad: bool = False) -> None:
        """A line that goes away by itself."""
        self._toast(text, bad=bad)

    def _toast(self, text: str, *, title: str = "", bad: bool) -> None:
        spell = self.app.looks.glyphs.spell
        severity: SeverityLevel = "warning" if bad else "information"
        self.notify(spell(safe(text)), title=spell(safe(title)), severity=severity, timeout=5, markup=False)

    def action_write(self) -> None:
        text = "\n".join(strip.text.rstrip() for strip in self._compositor.render_strips()) + "\n"
        self._write_files(self.picture(), text)

    def picture(self) -> str:
        """This screen as SVG."""
        return picture_of(self._compositor.render_strips(), self.app.looks.palette, "kvtop")

    # --- doctor ------------------------------------------------------------------------------------------------------

    def _look_if_doctor(self) -> None:
        """The doctor looks when its view is first opened, not before: it costs a second of CPU."""
        if self.view.id == "doctor" and self.model.doctor is None and self.player is None:
            self._examine()

    def action_doctor_run(self) -> None:
        self.model.doctor = None
        self.draw()
        self._examine()

    @work(thread=True, exclusive=True, group="doctor", exit_on_error=False)
    def _examine(self) -> None:
        found = self.options.examine()
        self.app.call_from_thread(self._examined, found)

    def _examined(self, found: Diagnosis) -> None:
        self.model.doctor = found
        self.draw()

    # --- replay ------------------------------------------------------------------------------------------------------

    def action_scrub(self, step: int) -> None:
        if self.player is not None:
            self._jump(self.player.step(step))

    def action_scrub_s(self, seconds: float) -> None:
        if self.player is not None:
            self._jump(self.player.after_s(seconds))

    def action_scrub_edge(self, side: int) -> None:
        if self.player is not None:
            self._jump(0 if side < 0 else self.player.length - 1)

    def _jump(self, place: int) -> None:
        """Stop, and show the recording as it was at `place`."""
        self.reader.paused = True
        self._rewind(place)

    @work(thread=True, exclusive=True, group="replay", exit_on_error=False)
    def _rewind(self, place: int) -> None:
        if self.player is None:
            return
        try:
            past = self.model.empty()
            for snapshot in self.player.seek(place):
                past.take(snapshot)
        except KvError as error:
            self.app.call_from_thread(self.take, None, error.message)
            return
        self.app.call_from_thread(self._rewound, past)

    def _rewound(self, past: Model) -> None:
        self.model.become(past)
        self.problem = ""
        self.draw()

    # --- changes -----------------------------------------------------------------------------------------------------

    @property
    def segment(self) -> Segment | None:
        """The segment under the cursor, in views that show segments."""
        item = self.grid.row.item if self.grid.row else None
        return item if isinstance(item, Segment) else None

    def action_limit(self) -> None:
        segment = self.segment
        if segment is None or self.options.readonly:
            return

        def answered(answer: tuple[Segment, int] | None) -> None:
            if answer is not None:
                shown, limit_bytes = answer
                seen = events.limit_text(shown.limit_bytes, limit_bytes)
                self._begin(shown.name, seen, partial(changes.write_limit, shown, limit_bytes, self.options.root))

        self.app.push_screen(changes.LimitDialog(self.app.looks, segment, self.model.glyphs), answered)

    def action_delete(self) -> None:
        segment = self.segment
        if segment is None or self.options.readonly:
            return

        def answered(shown: Segment | None) -> None:
            if shown is not None:
                self._begin(shown.name, events.REMOVED, partial(changes.delete, shown, self.options.root))

        self.app.push_screen(changes.DeleteDialog(self.app.looks, segment), answered)

    def _follow(self) -> None:
        """A question that stands is about the segment as it is now, an open list about what is wrong now."""
        if self.model.snapshot is not None:
            for screen in self.app.screen_stack:
                if isinstance(screen, changes.Question):
                    screen.follow(self.model.snapshot.segments)
                elif isinstance(screen, AlertList):
                    screen.fill()

    def _begin(self, name: str, seen: str, change: Callable[[], str]) -> None:
        """Begin a change whose effect the next readings show as the event `seen`: told once, by what comes back."""
        self.model.asked(name, seen)
        self._change(name, seen, change)

    @work(thread=True, exit_on_error=False)
    def _change(self, name: str, seen: str, change: Callable[[], str]) -> None:
        """Run a change on a thread (a lock may have to be waited for); say how it went."""
        try:
            level, text = "info", change()
        except KvError as error:
            level, text = "warn", error.message + (f" ({error.hint})" if error.hint else "")
        except OSError as error:
            level, text = "warn", f"not done: {error.strerror or error}"
        self.app.call_from_thread(self._changed, name, level, text, seen)

    def _changed(self, name: str, level: str, text: str, seen: str = "") -> None:
        if level == "warn":
            self.model.refused(name, seen)
        self.model.note(level, name, text)
        self._toast(text, title=name, bad=level == "warn")
        self.reader.kick()
        self.draw()
