"""The Textual side: `dashboard` (the app), `main` (the one screen), `dialogs` (what opens over it), `changes` (the
two questions that change something), `pictures`, `theme`.

Nothing outside this package and `kvtop.widgets` imports Textual, and `kvtop.app` imports it only when a screen is asked for.
"""
