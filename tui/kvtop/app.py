"""The command kvtop: options in, then one way out: the screen, a page of text, JSON, a verdict, a picture, or a recording.

Only the screen and --export-svg import Textual (150 ms, 30 MiB); the others run on a bare host in a script. A test looks at
sys.modules in a subprocess to keep it so. What the ways do is in kvtop.run; here is only what may be asked for.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from kvtools.cli import DebugOption, JsonOption, VersionOption, new_app
from kvtools.errors import KvError
from kvtools.segments.files import SHM
from kvtools.segments.pool import candidates

app = new_app("Segments, tiers and hit rates, live on one screen.", callback=False)


def _segments(incomplete: str) -> list[str]:
    """Names of segments for the shell: the folder is listed, nothing is opened."""
    try:
        return [name for name in candidates(SHM) if name.startswith(incomplete)]
    except KvError:
        return []


def _views(incomplete: str) -> list[str]:
    from kvtop.keys import VIEWS

    return [name for name, _, _ in VIEWS if name.startswith(incomplete)]


def _themes(incomplete: str) -> list[str]:
    from kvtop.palette import PALETTES

    return [name for name in PALETTES if name.startswith(incomplete)]


def _option(*names: str, **more: Any) -> Any:
    return typer.Option(*names, show_default=False, **more)


Names = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[NAME...]", help="Segments to show; all when none is named.", show_default=False, autocompletion=_segments
    ),
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
ViewName = Annotated[
    str | None,
    _option("--view", metavar="VIEW", help="View to open or print: overview, segments, tiers, ...", autocompletion=_views),
]
Words = Annotated[str, _option("--filter", metavar="WORDS", help="Show only rows that match, as / does.")]
Sort = Annotated[str, _option("--sort", metavar="COLUMN", help="Column to sort by; -COLUMN turns the order round.")]
Readonly = Annotated[bool | None, _option("--readonly", help="Take away every key that changes anything.")]
Ascii = Annotated[bool | None, _option("--ascii", help="Draw with ASCII characters only.")]
Theme = Annotated[
    str | None,
    _option("--theme", metavar="NAME", help="dusk, paper, safe (colour-blind), contrast, ansi or mono.", autocompletion=_themes),
]
ShowConfig = Annotated[bool, _option("--show-config", help="Print each setting and where it came from.")]
Shm = Annotated[Path, _option("--shm", metavar="DIR", help="Where segments lie (default KVTOOLS_SHM, else /dev/shm).")]
Metrics = Annotated[
    list[str] | None, _option("--metrics", metavar="ADDRESS", help="Also read this engine's /metrics (HOST:PORT); may be repeated.")
]
Record = Annotated[Path | None, _option("--record", metavar="FILE", help="Record every reading to FILE.")]
RecordMax = Annotated[
    str, _option("--record-max", metavar="SIZE", help="Most that FILE and FILE.1 take together (default 64M); older readings go.")
]
Replay = Annotated[Path | None, _option("--replay", metavar="FILE", help="Show a recording instead of this host.")]
At = Annotated[str, _option("--at", metavar="TIME", help="Where to begin a replay: HH:MM, HH:MM:SS or 'YYYY-MM-DD HH:MM'.")]
ExportSvg = Annotated[Path | None, _option("--export-svg", metavar="FILE", help="Draw the screen into FILE as SVG and exit.")]
Size = Annotated[str, _option("--size", metavar="WxH", help="Columns and rows of --export-svg (default 120x36).")]


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
    record: Record = None,
    record_max: RecordMax = "64M",
    replay: Replay = None,
    at: At = "",
    export_svg: ExportSvg = None,
    size: Size = "120x36",
    metrics: Metrics = None,
    ascii: Ascii = None,  # noqa: A002 - the option's name
    theme: Theme = None,
    show_config: ShowConfig = False,
    shm: Shm = SHM,
    debug: DebugOption = False,
    version: VersionOption = False,
) -> int:
    from kvtop import run, settings

    flags = {"refresh": refresh, "theme": theme, "view": view, "ascii": ascii, "readonly": readonly}
    chosen = settings.load(flags | {"alerts": alert or None, "metrics": metrics or None})
    if show_config:
        return run.show_config(chosen)
    wanted = run.Wanted(
        names=tuple(names or ()), shm=shm, words=words, sort=sort, wait=refresh is not None,
        record=record, record_max=record_max, size=size, replay=replay, at=at, settings=chosen,
    )  # fmt: skip
    if export_svg is not None:
        return run.picture(wanted, export_svg)
    if once or json or check:
        return run.headless(wanted, json=json, check=check)
    return run.screen(wanted)
