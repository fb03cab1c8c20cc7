"""The command kvtop: options in, then one of four ways out (screen, text, JSON, picture).

Only the screen and --export-svg import Textual (150 ms, 30 MiB); `--once`, `--json` and `--check` run on a bare host in a script.
A test looks at sys.modules in a subprocess to keep it so.
"""

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtools.cli import DebugOption, JsonOption, VersionOption, new_app
from kvtools.errors import UsageError
from kvtools.exits import Exit
from kvtools.segments.files import SHM

if TYPE_CHECKING:
    from kvtop.model import Model
    from kvtop.source import Source

app = new_app("Segments, tiers and hit rates, live on one screen.", callback=False)


def _option(*names: str, **more: Any) -> Any:
    return typer.Option(*names, show_default=False, **more)


Names = Annotated[
    list[str] | None, typer.Argument(metavar="[NAME...]", help="Segments to show; all when none is named.", show_default=False)
]
Refresh = Annotated[
    str | None, _option("-r", "--refresh", metavar="SECONDS", help="Seconds between readings (default 1; 500ms works too).")
]
Once = Annotated[bool, _option("--once", help="Print one page of text and exit; with -r, read twice that far apart for rates.")]
Check = Annotated[bool, _option("--check", help="Print what is wrong and exit 1 if anything is (implies --once).")]
Alerts = Annotated[
    list[str] | None,
    _option("--alert", metavar="RULE", help="What to warn of: 'segment.share>=90', 'hit_rate<0.5:crit'; may be repeated."),
]
ViewName = Annotated[str | None, _option("--view", metavar="VIEW", help="View to open or print: overview, segments, tiers, ...")]
Words = Annotated[str, _option("--filter", metavar="WORDS", help="Show only rows that match, as / does.")]
Sort = Annotated[str, _option("--sort", metavar="COLUMN", help="Column to sort by; -COLUMN turns the order round.")]
Readonly = Annotated[bool | None, _option("--readonly", help="Take away every key that changes anything.")]
Ascii = Annotated[bool | None, _option("--ascii", help="Draw with ASCII characters only.")]
Theme = Annotated[str | None, _option("--theme", metavar="NAME", help="dusk, paper, safe (colour-blind), contrast, ansi or mono.")]
ShowConfig = Annotated[bool, _option("--show-config", help="Print each setting and where it came from.")]
Shm = Annotated[Path, _option("--shm", metavar="DIR", help="Where segments lie.")]


@app.command(help="Segments, tiers and hit rates, live on one screen. Press ? for the keys.")
def kvtop(
    names: Names = None,
    refresh: Refresh = None,
    once: Once = False,
    json: JsonOption = False,
    check: Check = False,
    alert: Alerts = None,
    view: ViewName = None,
    words: Words = "",
    sort: Sort = "",
    readonly: Readonly = None,
    ascii: Ascii = None,  # noqa: A002 - the option's name
    theme: Theme = None,
    show_config: ShowConfig = False,
    shm: Shm = SHM,
    debug: DebugOption = False,
    version: VersionOption = False,
) -> int:
    from kvtop import settings

    flags = {"refresh": refresh, "theme": theme, "view": view, "ascii": ascii, "readonly": readonly, "alerts": alert or None}
    chosen = settings.load(flags)
    if show_config:
        return _show_config(chosen)
    model = _model(chosen)
    source = _source(chosen, shm, names or [])
    if once or json or check:
        return _headless(model, source, chosen, json=json, check=check, words=words, sort=sort, wait=refresh is not None)
    return _screen(model, source, chosen, words=words, sort=sort, shm=shm)


def _show_config(chosen: dict[str, Any]) -> int:
    from kvtools.output import emit, table

    for line in table(["SETTING", "VALUE", "FROM"], [[name, value.shown, value.origin] for name, value in chosen.items()]):
        emit(line)
    return Exit.OK


def _model(chosen: dict[str, Any]) -> "Model":
    from kvtop.alerts import rules_from
    from kvtop.model import Model
    from kvtop.text import ASCII, UNICODE

    plain = chosen["ascii"].value or not _speaks_unicode()
    return Model(glyphs=ASCII if plain else UNICODE, rules=rules_from(chosen["alerts"].value), interval_s=chosen["refresh"].value)


def _speaks_unicode() -> bool:
    """Whether stdout can carry the block characters; a POSIX locale cannot."""
    return (sys.stdout.encoding or "ascii").lower().replace("-", "") in ("utf8", "utf16", "utf32", "gb18030")


def _source(chosen: dict[str, Any], shm: Path, names: list[str]) -> "Source":
    from kvtop.source import Source

    return Source(root=shm, names=names)


def _headless(
    model: "Model", source: "Source", chosen: dict[str, Any], *, json: bool, check: bool, words: str, sort: str, wait: bool
) -> int:
    from kvtop import once
    from kvtop.query import parse_filter
    from kvtop.views import VIEWS

    model.take(source.read())
    if wait:
        time.sleep(chosen["refresh"].value)
        model.take(source.read())
    if json:
        once.print_json(model)
        return once.check_status(model) if check else Exit.OK
    if check:
        return once.print_check(model)
    view = VIEWS[chosen["view"].value]
    order = _order(view, sort)
    once.print_once(model, view, parse_filter(words, frozenset(c.id for c in view.columns)), order, once.terminal_width())
    missing = sorted(source.names - {s.name for s in model.snapshot.segments}) if model.snapshot else []
    return Exit.NOT_FOUND if missing else Exit.OK


def _order(view: Any, sort: str) -> Any:
    from kvtop.columns import Order

    if not sort:
        return view.order
    name = sort.removeprefix("-")
    column = next((c for c in view.columns if c.id == name), None)
    if column is None:
        raise UsageError(f"no column {name!r} in view {view.id}", hint="columns: " + ", ".join(c.id for c in view.columns))
    return Order(name, column.rising != sort.startswith("-"))


def _screen(model: "Model", source: "Source", chosen: dict[str, Any], *, words: str, sort: str, shm: Path) -> int:
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("kvtop needs a terminal", hint="kvtop --once prints one page of text, kvtop --json the same as data")
    from kvtop.keys import remap
    from kvtop.palette import choose, color_depth
    from kvtop.screens.dashboard import Dashboard, Options
    from kvtop.views import VIEWS

    environ = dict(os.environ)
    theme = choose(chosen["theme"].value or "", no_color=bool(environ.get("NO_COLOR")), depth=color_depth(environ))
    options = Options(
        theme=theme,
        view=chosen["view"].value,
        filter=words,
        order=_order(VIEWS[chosen["view"].value], sort),
        readonly=chosen["readonly"].value,
        keys=remap(chosen["keys"].value),
        root=shm,
    )
    return Dashboard(model, source, options).run() or Exit.OK
