"""What the command does once it is known what is wanted: one function a way out.

    screen     the dashboard; without a terminal but with --record, the same reading and recording without a screen
    headless   --once, --json, --check: one reading (two with -r), printed
    picture    --export-svg: the real dashboard on a terminal that does not exist
    show_config

Each sets up the same parts: a model, something to read (this host or a recording), perhaps a recorder. Only `screen` and `picture`
import Textual.
"""

import os
import re
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtools.config import Resolved
from kvtools.errors import KvError, UsageError
from kvtools.exits import Exit
from kvtools.units import parse_size
from kvtop.model import Model
from kvtop.reader import Readable
from kvtop.snapshot import Snapshot

if TYPE_CHECKING:
    from kvtop.columns import Order
    from kvtop.query import Filter
    from kvtop.record import Recorder
    from kvtop.replay import Player
    from kvtop.screens.dashboard import Options
    from kvtop.views.base import View

MIN_RECORD_BYTES = 1 << 20
_SIZE = re.compile(r"([0-9]{1,3})x([0-9]{1,3})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Wanted:
    """The command line, understood."""

    names: tuple[str, ...]
    shm: Path
    words: str
    sort: str
    wait: bool
    record: Path | None
    record_max: str
    size: str
    replay: Path | None
    at: str
    settings: Resolved

    def get(self, name: str) -> Any:
        """A setting's value."""
        return self.settings[name].value

    def check(self) -> None:
        """Raises UsageError for options that contradict each other."""
        if self.record and self.replay:
            raise UsageError("--record and --replay do not go together", hint="a recording is copied with cp")
        if self.get("metrics"):
            from kvtop.engines import check_url

            for address in self.get("metrics"):
                check_url(address)
        if self.get("keys"):
            from kvtop.keys import remap

            remap(self.get("keys"))
        record_bytes(self.record_max)
        size_of(self.size)

    def view(self) -> "View":
        from kvtop.views import VIEWS

        return VIEWS[self.get("view")]

    def order(self) -> "Order":
        """How to sort the view. Raises UsageError for a column it has not."""
        from kvtop.columns import Order, names_of

        view = self.view()
        if not self.sort:
            return view.order
        name = self.sort.removeprefix("-")
        name = names_of(view.columns).get(name.lower(), name)
        column = next((c for c in view.columns if c.id == name), None)
        if column is None:
            raise UsageError(f"no column {name!r} in view {view.id}", hint="columns: " + ", ".join(c.id for c in view.columns))
        return Order(name, column.rising != self.sort.startswith("-"))

    def filter(self) -> "Filter":
        """The rows to show. Raises UsageError for words that cannot be meant."""
        from kvtop.columns import names_of
        from kvtop.query import check_filter

        return check_filter(self.words, names_of(self.view().columns))


def show_config(settings: Resolved) -> int:
    """`--show-config`."""
    from kvtools.output import emit, table

    for line in table(["SETTING", "VALUE", "FROM"], [[name, value.shown, value.origin] for name, value in settings.items()]):
        emit(line)
    return Exit.OK


def headless(wanted: Wanted, *, json: bool, check: bool) -> int:
    """`--once`, `--json`, `--check`."""
    from kvtop import once

    wanted.check()
    view, order, chosen = wanted.view(), wanted.order(), wanted.filter()
    model = _model(wanted)
    player, recorder = _read_once(wanted, model)
    status = Exit.OK
    if json:
        once.print_json(model, player)
        status = once.check_status(model) if check else Exit.OK
    elif check:
        status = once.print_check(model)
    else:
        once.print_once(model, view, chosen, order, once.terminal_width())
        there = {segment.name for segment in model.snapshot.segments} if model.snapshot else set()
        status = Exit.NOT_FOUND if set(wanted.names) - there else Exit.OK
    _say_lost(recorder)
    return _say_damage(player) or status


def screen(wanted: Wanted) -> int:
    """The dashboard."""
    wanted.check()
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if not terminal and not wanted.record:
        raise UsageError("kvtop needs a terminal", hint="kvtop --once prints one page of text, kvtop --json the same as data")
    model = _model(wanted)
    recorder = _recorder(wanted)
    try:
        if terminal:
            status = _dashboard(wanted, model, recorder)
        else:
            assert recorder is not None
            status = _record_only(model, _source(wanted), recorder)
    finally:
        if recorder is not None:
            recorder.close()
    _say_lost(recorder)
    return status


def _dashboard(wanted: Wanted, model: Model, recorder: "Recorder | None") -> int:
    options, player = _options(wanted)
    from kvtop.screens.dashboard import Dashboard

    if recorder is not None:
        options.recorder = recorder
        model.own = recorder.alerts
    if player is not None and wanted.at:
        for snapshot in player.seek(player.find(wanted.at)):
            model.take(snapshot)
    # A shell that exports these would pin the size: Textual asks them before it asks the terminal, and no resize is seen.
    for name in ("COLUMNS", "LINES"):
        os.environ.pop(name, None)
    if not sys.stderr.isatty():
        # Textual draws on stderr; whoever sent that elsewhere wants the errors there and the screen here.
        sys.__stderr__ = sys.__stdout__  # type: ignore[misc]
    app = Dashboard(model, player or _source(wanted), options)
    return app.run() or app.return_code or Exit.OK


def _say_lost(recorder: "Recorder | None") -> None:
    """A recording that lacks readings is work that failed, whoever looked on. Raises KvError then."""
    if recorder is not None and (lacking := recorder.verdict()) is not None:
        raise lacking


def _say_damage(player: "Player | None") -> Exit:
    """What a damaged recording does not show, a line a place on stderr; the status that goes with it."""
    if player is None or not player.damage:
        return Exit.OK
    from kvtools.output import note, printable

    for damage in player.damage:
        note(f"kvtop: error: recording {printable(str(damage))}")
    return Exit.FAILED


def record_bytes(text: str) -> int:
    """`--record-max` in bytes. Raises UsageError."""
    limit = parse_size(text)
    if limit < MIN_RECORD_BYTES:
        raise UsageError(f"--record-max is too small: {text}", hint="at least 1M, which is an hour of 20 segments")
    return limit


def size_of(text: str) -> tuple[int, int]:
    """Columns and rows of `--size`. Raises UsageError."""
    found = _SIZE.fullmatch(text)
    if not found or not all(int(number) for number in found.groups()):
        raise UsageError(f"not a size of a screen: {text!r}", hint="write COLUMNSxROWS, such as 120x36")
    return int(found[1]), int(found[2])


def picture(wanted: Wanted, path: Path) -> int:
    """`--export-svg`: the dashboard as it looks after the newest reading."""
    wanted.check()
    options, player = _options(wanted, colors=True)
    from kvtop.screens.dashboard import Dashboard

    model = _model(wanted)
    if player is not None:
        for snapshot in player.seek(player.find(wanted.at) if wanted.at else player.length - 1):
            model.take(snapshot)
    else:
        _say_lost(_read_once(wanted, model)[1])
    app = Dashboard(model, player or _source(wanted), options, start_reader=False)
    svg = app.picture(size_of(wanted.size))
    try:
        _write_whole(path, svg)
    except OSError as error:
        raise KvError(f"cannot write {path}: {error.strerror}") from None
    return _say_damage(player)


def _write_whole(path: Path, text: str) -> None:
    """The whole text or what was there before: a full disk must not cost the picture of yesterday. Raises OSError."""
    data = text.encode(errors="backslashreplace")
    if path.exists() and not path.is_file():
        path.write_bytes(data)  # a pipe, a device
        return
    there = path.resolve()  # what a link means is replaced, not the link
    made = there.with_name(f".{there.name}.{os.getpid()}")
    try:
        made.write_bytes(data)
        if there.exists():
            made.chmod(there.stat().st_mode & 0o777)
        made.replace(there)
    except BaseException:
        made.unlink(missing_ok=True)
        raise


# --- parts -------------------------------------------------------------------------------------------------------------


def _model(wanted: Wanted) -> Model:
    from kvtop.alerts import rules_from
    from kvtop.text import ASCII, UNICODE

    plain = wanted.get("ascii") or not _speaks_unicode()
    return Model(glyphs=ASCII if plain else UNICODE, rules=rules_from(wanted.get("alerts")), interval_s=wanted.get("refresh"))


def _speaks_unicode() -> bool:
    """Whether the terminal shows the block characters, by the locale, and stdout can carry them.

    Not by stdout alone: where the locale is C, Python writes UTF-8 all the same, and the terminal there does not read it.
    """
    if _locale().partition(".")[0].partition("@")[0] in ("C", "POSIX") and "utf" not in _locale().lower():
        return False
    return (sys.stdout.encoding or "ascii").lower().replace("-", "") in ("utf8", "utf16", "utf32", "gb18030")


def _locale() -> str:
    """The locale of characters as it was given to us; empty where nobody said one."""
    given = {name: os.environ.get(name, "") for name in ("LC_ALL", "LC_CTYPE", "LANG")}
    if given["LC_CTYPE"] in ("C.UTF-8", "C.utf8", "UTF-8"):
        # Python puts this there itself where the locale is C. What was there before is only in /proc.
        try:
            words = Path("/proc/self/environ").read_bytes().split(b"\0")
        except OSError:
            words = [b"LC_CTYPE=C.UTF-8"]
        given["LC_CTYPE"] = next((os.fsdecode(word[9:]) for word in words if word.startswith(b"LC_CTYPE=")), "")
    return given["LC_ALL"] or given["LC_CTYPE"] or given["LANG"]


def _source(wanted: Wanted) -> "Readable":
    from kvtop.gpus import Gpus
    from kvtop.source import Source

    engines = None
    if wanted.get("metrics"):
        from kvtop.engines import Engines

        engines = Engines(wanted.get("metrics"))
        engines.wait(0.0 if sys.stdout.isatty() else 2.5)
    return Source(root=wanted.shm, names=wanted.names, gpus=Gpus(), engines=engines)


def _recorder(wanted: Wanted) -> "Recorder | None":
    if wanted.record is None:
        return None
    from kvtop.record import Recorder, Writer

    try:
        return Recorder(Writer(wanted.record, max_bytes=record_bytes(wanted.record_max)))
    except OSError as error:
        raise KvError(f"cannot record to {wanted.record}: {error.strerror}") from None


def _player(wanted: Wanted) -> "Player | None":
    if wanted.replay is None:
        if wanted.at:
            raise UsageError("--at needs --replay", hint="kvtop --replay FILE --at 03:10")
        return None
    from kvtop.replay import Player

    return Player(wanted.replay, wanted.names)


def _read_once(wanted: Wanted, model: Model) -> "tuple[Player | None, Recorder | None]":
    """One reading into the model, two with -r; of a recording, the one asked for with what led up to it. What it came from, and
    what recorded it, if anything did: closed already."""
    player = _player(wanted)
    if player is not None:
        for snapshot in player.seek(player.find(wanted.at) if wanted.at else player.length - 1):
            model.take(snapshot)
        return player, None
    source = _source(wanted)
    recorder = _recorder(wanted)
    if wanted.get("view") == "doctor":
        from kvtop.doctor import examine

        model.doctor = examine(wanted.shm)
    try:
        for number in range(2 if wanted.wait else 1):
            if number:
                time.sleep(wanted.get("refresh"))
            snapshot = source.read()
            if recorder is not None:
                recorder(snapshot)
                model.own = recorder.alerts
            model.take(snapshot)
    finally:
        if recorder is not None:
            recorder.close()
    return None, recorder


def _options(wanted: Wanted, *, colors: bool = False) -> "tuple[Options, Player | None]":
    from kvtop.doctor import examine
    from kvtop.keys import remap
    from kvtop.palette import DEFAULT, choose, color_depth

    environ = dict(os.environ)
    if colors:
        theme = wanted.get("theme") or DEFAULT
    else:
        theme = choose(wanted.get("theme") or "", no_color=bool(environ.get("NO_COLOR")), depth=color_depth(environ))
    keys, order, player = remap(wanted.get("keys")), wanted.order(), _player(wanted)
    wanted.filter()  # what cannot be meant is said before there is a screen
    from kvtop.screens.dashboard import Options

    options = Options(
        theme=theme, view=wanted.get("view"), filter=wanted.words, order=order, readonly=wanted.get("readonly"),
        keys=keys, root=wanted.shm, player=player, examine=partial(examine, wanted.shm),
    )  # fmt: skip
    return options, player


def _record_only(model: Model, source: Readable, recorder: "Recorder") -> int:
    """Read and record until told to stop: for a service, or a shell with `&`. A disk that takes no more ends it."""
    import signal
    import threading

    from kvtools.output import note, printable
    from kvtop.reader import Reader

    done = threading.Event()
    told: set[str] = set()
    status: list[Exit] = []

    def deliver(snapshot: Snapshot | None, problem: str) -> None:
        if snapshot is not None:
            recorder(snapshot)
            while recorder.notes:
                note(f"kvtop: warning: {printable(recorder.notes.pop(0))}")
        elif problem not in told:
            told.add(problem)
            note(f"kvtop: warning: a reading failed: {printable(problem)}")
        if recorder.problem:
            done.set()

    def stop(number: int, frame: object) -> None:
        status.append(Exit.INTERRUPTED if number == signal.SIGINT else Exit.OK)
        done.set()

    # A signal that whoever started us had ignored (nohup, a job in the background) stays so.
    numbers = [n for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in numbers}
    reader = Reader(source, deliver, interval_s=model.interval_s)
    reader.start()
    done.wait()
    reader.stop(timeout_s=2.0)
    for number, handler in before.items():
        signal.signal(number, handler)
    return status[0] if status else Exit.OK
