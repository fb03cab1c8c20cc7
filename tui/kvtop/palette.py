"""What each style word looks like: one palette a theme, and plain ANSI for `--once`.

Meanings, not colours, are what views write (`kvtop.text.STYLES`). Rules every palette keeps: good/warn/bad also have a word or
glyph beside them wherever they are used; *used* and *prealloc* differ in glyph as well as in colour; `safe` swaps the
green/red axis for blue/orange; `mono` has no colour at all (NO_COLOR), only weight; `ansi` uses the terminal's own 16.
Standard library only: the screen turns these into Textual themes (kvtop.screens.theme).
"""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Palette:
    """Colours of one theme. A style's value is Rich style text: '#rrggbb', 'bold red', 'dim'."""

    name: str
    dark: bool
    background: str
    surface: str
    foreground: str
    accent: str
    cursor: str
    """Background of the row under the cursor."""
    styles: dict[str, str] = field(default_factory=dict)
    ansi: bool = False


def _styles(
    *,
    dim: str,
    title: str,
    good: str,
    warn: str,
    bad: str,
    accent: str,
    used: str,
    prealloc: str,
    frame: str,
    chip: str,
    graph: tuple[str, str, str],
) -> dict[str, str]:
    return {
        "": "",
        "dim": dim,
        "bold": "bold",
        "title": f"bold {title}",
        "head": f"bold {dim}",
        "key": f"bold {accent}",
        "accent": accent,
        "good": good,
        "warn": warn,
        "bad": f"bold {bad}",
        "used": used,
        "prealloc": prealloc,
        "free": frame,
        "frame": frame,
        "chip": chip,
        "low": graph[0],
        "mid": graph[1],
        "high": graph[2],
    }


PALETTES: dict[str, Palette] = {
    palette.name: palette
    for palette in (
        Palette(
            "dusk", True, "#11151c", "#171d27", "#cfd6e1", "#7aa2d6", "#243145",
            _styles(dim="#7d8899", title="#aebfd6", good="#86b98c", warn="#d9b25f", bad="#e0736d", accent="#7aa2d6", used="#6f9fd0",
                    prealloc="#4d6d93", frame="#39455a", chip="bold #11151c on #7aa2d6",
                    graph=("#436083", "#5a80ac", "#7aa8da")),
        ),
        Palette(
            "paper", False, "#fbfaf6", "#f1efe8", "#2b313a", "#2f5f98", "#dbe4ee",
            _styles(dim="#6b7380", title="#24496f", good="#2f7d42", warn="#8f6400", bad="#b3261e", accent="#2f5f98", used="#3f78b5",
                    prealloc="#92b3d6", frame="#c3c5c4", chip="bold #fbfaf6 on #2f5f98",
                    graph=("#8fb2d6", "#6795c4", "#3f78b5")),
        ),
        Palette(
            "safe", True, "#101418", "#171d23", "#d7dce2", "#56b4e9", "#24303b",
            _styles(dim="#8894a2", title="#c2d3e2", good="#56b4e9", warn="#f0e442", bad="#e69f00", accent="#56b4e9", used="#3d8fc4",
                    prealloc="#2d5a78", frame="#3a4652", chip="bold #101418 on #56b4e9",
                    graph=("#28577a", "#33759f", "#56b4e9")),
        ),
        Palette(
            "contrast", True, "#000000", "#0a0a0a", "#ffffff", "#7fd7ff", "#333333",
            _styles(dim="#c0c0c0", title="#ffffff", good="#5fff87", warn="#ffd75f", bad="#ff8787", accent="#7fd7ff", used="#7fd7ff",
                    prealloc="#5f87af", frame="#808080", chip="bold #000000 on #7fd7ff",
                    graph=("#5f9fbf", "#6fbbdf", "#7fd7ff")),
        ),
        Palette(
            "ansi", True, "ansi_default", "ansi_default", "ansi_default", "ansi_cyan", "ansi_default",
            _styles(dim="dim", title="default", good="green", warn="yellow", bad="red", accent="cyan", used="blue",
                    prealloc="cyan", frame="dim", chip="reverse",
                    graph=("blue", "blue", "blue")),
            ansi=True,
        ),
        Palette(
            "mono", True, "ansi_default", "ansi_default", "ansi_default", "ansi_default", "ansi_default",
            _styles(dim="dim", title="default", good="", warn="bold", bad="reverse", accent="bold", used="",
                    prealloc="dim", frame="dim", chip="reverse",
                    graph=("", "", "")),
            ansi=True,
        ),
    )
}  # fmt: skip
"""Theme name -> palette. `dusk` is the default; `t` on the screen walks through them."""

DEFAULT = "dusk"

ANSI: dict[str, str] = {
    "": "", "dim": "2", "bold": "1", "title": "1", "key": "1;36", "good": "32", "warn": "33", "bad": "1;31", "accent": "36",
    "used": "34", "prealloc": "36", "free": "2", "frame": "2", "chip": "7", "head": "1;2",
    "low": "34", "mid": "34", "high": "34",
}  # fmt: skip
"""SGR parameters for `--once` on a terminal."""


def choose(name: str, *, no_color: bool, depth: int) -> str:
    """The theme to start with: `name` if given, else mono under NO_COLOR, ansi where there are at most 16 colours, else dusk."""
    if no_color:
        return "mono"
    if name:
        return name
    return "ansi" if depth <= 16 else DEFAULT


def color_depth(environ: dict[str, str]) -> int:
    """Colours the terminal says it has, from COLORTERM and TERM (the same two that everyone reads)."""
    if environ.get("COLORTERM", "").lower() in ("truecolor", "24bit"):
        return 1 << 24
    term = environ.get("TERM", "")
    if "direct" in term:
        return 1 << 24
    if "256" in term or term.split("-")[0] in ("kitty", "alacritty", "foot", "wezterm", "ghostty"):
        return 256
    return 16
