"""The Textual side of kvtop.

    dashboard  the app: themes, the reading thread;  typing: keys one after another, none lost to what they open
    main       the one screen, on jobs (what runs on a thread)
    dialogs    what opens over it; changes: the two questions that change something
    pictures   the screen as SVG;  theme: palettes as Textual themes

Nothing outside this package and `kvtop.widgets` imports Textual, and `kvtop.run` imports it only when a screen is asked for.
"""
