"""Palettes as Textual themes."""

from textual.theme import BUILTIN_THEMES, Theme

from kvtop.palette import Palette

# Textual's style sheets use these names on every theme that is of the terminal's colours, and give them no default.
_ANSI = BUILTIN_THEMES["ansi-dark"].variables


def theme_of(palette: Palette) -> Theme:
    """The Textual theme that goes with a palette: backgrounds and the few colours its own widgets (inputs) use."""
    return Theme(
        name=palette.name,
        primary=palette.accent,
        secondary=palette.accent,
        accent=palette.accent,
        warning=palette.accent,
        error=palette.accent,
        success=palette.accent,
        foreground=palette.foreground,
        background=palette.background,
        surface=palette.surface,
        panel=palette.surface,
        dark=palette.dark,
        ansi=palette.ansi,
        variables=_ANSI
        | {
            "kv-cursor": palette.cursor,
            # On the terminal's own colours a cursor background could be any colour: reversed text always shows.
            "kv-cursor-style": "reverse" if palette.ansi else "none",
            "scrollbar": palette.cursor if not palette.ansi else "ansi_default",
            "scrollbar-background": palette.background,
            "scrollbar-hover": palette.accent,
            "scrollbar-active": palette.accent,
            "scrollbar-background-hover": palette.background,
            "scrollbar-background-active": palette.background,
            "scrollbar-corner-color": palette.background,
            "border": palette.accent,
        },
    )
