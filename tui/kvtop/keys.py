"""Every key of kvtop, once: bindings, footer, help screen, the README's table and the man page all come from `KEYS`.

`python -m kvtop.keys readme` and `python -m kvtop.keys man` print the two tables; a test compares them with what is in the files.
A key may be remapped in the configuration by its id (`keys: {limit: L}`). Standard library only.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from kvtools.errors import UsageError


@dataclass(frozen=True, slots=True)
class Key:
    """One action and the keys that start it. Key names are Textual's ('question_mark', 'ctrl+p')."""

    id: str
    keys: tuple[str, ...]
    action: str
    hint: str
    """One word for the footer; empty: not shown there."""
    help: str
    group: str
    where: frozenset[str] = frozenset()
    """View ids it applies in; empty: everywhere."""
    mutates: bool = False
    """Changes something outside kvtop: gone under --readonly."""
    replay: bool | None = None
    """True: only in a replay; False: never in one; None: both."""


_SEGMENTS = frozenset({"overview", "segments"})

VIEWS: tuple[tuple[str, str, str], ...] = (
    ("overview", "Overview", "health, memory, daemon and segments on one page"),
    ("segments", "Segments", "every pool with its limit, owner and history"),
    ("tiers", "Tiers", "every tier of every daemon: bytes, hits, latency, breaker"),
    ("models", "Models", "what each model and namespace holds and hits"),
    ("processes", "Processes", "owners and writers: CPU, memory, what they hold"),
    ("events", "Events", "what happened: limits, deaths, breakers, corruption"),
    ("metrics", "Metrics", "every value every writer publishes, by name"),
    ("doctor", "Doctor", "this host's readiness, by kvdoctor's rules"),
)
"""View id, title, one line. Their order is the digit that opens them."""

KEYS: tuple[Key, ...] = (
    Key("quit", ("q", "ctrl+c"), "quit", "quit", "leave kvtop", "general"),
    Key("help", ("question_mark", "f1", "h"), "help", "help", "this list, for the view you are in", "general"),
    Key("palette", ("colon", "ctrl+p"), "palette", "command", "run a command or open a view by name", "general"),
    Key("pause", ("p",), "pause", "pause", "stop and go on (in a replay: play)", "general"),
    Key("refresh", ("r",), "refresh", "", "read everything now", "general", replay=False),
    Key("faster", ("plus", "equals_sign"), "faster", "", "halve the interval", "general"),
    Key("slower", ("minus",), "slower", "", "double the interval", "general"),
    Key("alerts", ("a",), "alerts", "", "list everything that is wrong now", "general"),
    Key("write", ("w",), "write", "", "write this screen (SVG, text) and the snapshot (JSON) to files", "general"),
    Key("theme", ("t",), "theme", "", "next theme: dusk, paper, safe (colour-blind), contrast, ansi, mono", "general"),
    Key("back", ("escape",), "back", "", "close, else clear the filter, else clear the tags", "general"),
    *(
        Key(f"view-{name}", (str(number),), f"view('{name}')", "", f"{title}: {line}", "views")
        for number, (name, title, line) in enumerate(VIEWS, start=1)
    ),
    Key("next-view", ("tab",), "next_view(1)", "", "next view", "views"),
    Key("previous-view", ("shift+tab",), "next_view(-1)", "", "view before", "views"),
    Key("up", ("up", "k"), "cursor(-1)", "", "row above", "table"),
    Key("down", ("down", "j"), "cursor(1)", "", "row below", "table"),
    Key("page-up", ("pageup",), "page(-1)", "", "a page up", "table"),
    Key("page-down", ("pagedown",), "page(1)", "", "a page down", "table"),
    Key("first", ("home", "g"), "edge(-1)", "", "first row", "table"),
    Key("last", ("end", "G"), "edge(1)", "", "last row", "table"),
    Key("detail", ("enter",), "detail", "detail", "everything about the row under the cursor", "table"),
    Key("filter", ("slash",), "filter", "filter", "show matching rows: word, column:word, used>80%, !not, a | b", "table"),
    Key("sort", ("s",), "sort_menu", "sort", "choose the column to sort by", "table"),
    Key("sort-left", ("less_than_sign",), "sort_step(-1)", "", "sort by the column to the left", "table"),
    Key("sort-right", ("greater_than_sign",), "sort_step(1)", "", "sort by the column to the right", "table"),
    Key("invert", ("i",), "invert", "", "turn the order round", "table"),
    Key("follow", ("F",), "follow", "", "keep the cursor on the thing (on) or on the line (off)", "table"),
    Key("tag", ("space",), "tag", "", "tag the row; tagged rows stay on top", "table"),
    Key("limit", ("l",), "limit", "limit", "set the segment's limit", "changes", _SEGMENTS, mutates=True, replay=False),
    Key("delete", ("d",), "delete", "delete", "delete the segment", "changes", _SEGMENTS, mutates=True, replay=False),
    Key("doctor-run", ("R",), "doctor_run", "run", "run the checks again", "changes", frozenset({"doctor"}), replay=False),
    Key("step-back", ("left",), "scrub(-1)", "back", "one reading back", "replay", replay=True),
    Key("step-forward", ("right",), "scrub(1)", "on", "one reading on", "replay", replay=True),
    Key("minute-back", ("left_square_bracket",), "scrub_s(-60)", "", "a minute back", "replay", replay=True),
    Key("minute-on", ("right_square_bracket",), "scrub_s(60)", "", "a minute on", "replay", replay=True),
    Key("replay-first", ("ctrl+home",), "scrub_edge(-1)", "", "to the beginning of the recording", "replay", replay=True),
    Key("replay-last", ("ctrl+end",), "scrub_edge(1)", "", "to the end of the recording", "replay", replay=True),
)  # fmt: skip

GROUPS: tuple[tuple[str, str], ...] = (
    ("general", "General"),
    ("views", "Views"),
    ("table", "Tables"),
    ("changes", "Changes"),
    ("replay", "Replay"),
)

_SHOWN = {
    "question_mark": "?", "colon": ":", "slash": "/", "plus": "+", "equals_sign": "=", "minus": "-",
    "less_than_sign": "<", "greater_than_sign": ">", "comma": ",", "full_stop": ".",
    "left_square_bracket": "[", "right_square_bracket": "]", "escape": "Esc", "enter": "Enter", "space": "Space",
    "tab": "Tab", "shift+tab": "S-Tab", "up": "Up", "down": "Down", "left": "Left", "right": "Right",
    "pageup": "PgUp", "pagedown": "PgDn", "home": "Home", "end": "End", "f1": "F1",
}  # fmt: skip


def shown(key: str) -> str:
    """A key as people write it: '?', 'Esc', 'C-p'."""
    if key.startswith("ctrl+"):
        return "C-" + shown(key[5:])
    return _SHOWN.get(key, key)


def remap(wanted: Mapping[str, str]) -> tuple[Key, ...]:
    """KEYS with the keys of some ids replaced ('limit': 'L' or 'L,ctrl+l'). Raises UsageError for an unknown id or a clash."""
    known = {key.id: key for key in KEYS}
    for name in wanted:
        if name not in known:
            raise UsageError(f"keys: no action named {name!r}", hint="actions: " + ", ".join(known))
    made = []
    taken: dict[str, Key] = {}
    for key in KEYS:
        if key.id in wanted:
            names = tuple(name.strip() for name in wanted[key.id].split(",") if name.strip())
            if not names:
                raise UsageError(f"keys: {key.id} needs at least one key")
            key = Key(key.id, names, key.action, key.hint, key.help, key.group, key.where, key.mutates, key.replay)
        for name in key.keys:
            if name in taken:
                raise UsageError(f"keys: {name!r} is both {taken[name].id} and {key.id}")
            taken[name] = key
        made.append(key)
    return tuple(made)


def usable(key: Key, *, view: str, readonly: bool, replay: bool) -> bool:
    """Whether a key does anything here: what is not usable is neither bound, hinted nor in the help."""
    if key.where and view not in key.where:
        return False
    if key.mutates and (readonly or replay):
        return False
    return key.replay is None or key.replay == replay


def by_group(keys: tuple[Key, ...]) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """[(group title, [(keys as people write them, id, help)])], for help and documentation."""
    out = []
    for group, title in GROUPS:
        rows = [(" ".join(shown(k) for k in key.keys), key.id, key.help) for key in keys if key.group == group]
        if rows:
            out.append((title, rows))
    return out


def readme_table() -> str:
    """The README's table of keys, in Markdown."""
    lines = ["| key | does |", "|---|---|"]
    for _, rows in by_group(KEYS):
        for names, _, text in rows:
            spelled = " ".join(f"`{name}`" for name in names.split(" "))
            lines.append(f"| {spelled} | {text.replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"


def man_table() -> str:
    """The man page's KEYS section, in mdoc."""
    lines = []
    for title, rows in by_group(KEYS):
        lines += [f".Ss {title}", ".Bl -tag -width Ds -compact"]
        for names, name, text in rows:
            spelled = " , ".join(_mdoc(key) for key in names.split(" "))
            body = text[:1].upper() + text[1:] + "."
            lines += [f".It Ic {spelled} Pq Cm {_mdoc(name)}", _mdoc(body)]
        lines.append(".El")
    return "\n".join(lines) + "\n"


def _mdoc(text: str) -> str:
    text = text.replace("\\", "\\e").replace("-", "\\-")
    # A line or word that begins with a dot, comma or quote would be read as a macro or as punctuation.
    return "\\&" + text if text[:1] in ".,:;?!()[]|'" else text


if __name__ == "__main__":
    import sys

    sys.stdout.write(man_table() if sys.argv[1:] == ["man"] else readme_table())
