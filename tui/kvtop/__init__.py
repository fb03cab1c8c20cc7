"""kvtop: the KV memory of a host on one screen.

    app        the command: options in; screen, text, JSON or picture out
    settings   flag > environment > file > default
    snapshot   what one tick saw: immutable types
    source     reads a host into a snapshot;  procs: its processes
    reader     the thread that reads, so that nothing stops the screen
    model      the newest snapshot and all that is derived from it:
    history      15 minutes of every series, rates
    daemon       what a stats segment means: the daemon, its tiers
    alerts       what is wrong, and the health word
    events       what changed
    keys       every key, once: bindings, help, README, man page
    columns    tables as data; query: the filter behind /
    text       lines of styled text; palette: what a style looks like
    chrome     head line, tabs, key hints
    views      one module a view: model -> rows and lines
    once       --once, --json, --check
    screens    Textual: the app, the main screen, dialogs, themes
    widgets    Textual: lines, and a table with a cursor

Data goes one way: source -> reader -> model -> views -> lines -> screens or once. Only screens and widgets import Textual.
"""
