"""kvtop: the KV memory of a host on one screen.

    app        the command: what may be asked for;  run: what is then done
    settings   flag > environment > file > default
    snapshot   what one tick saw: immutable types
    source     reads a host into a snapshot, with procs (processes), gpus, engines (their own /metrics)
    record     recordings, written;  recording: read, around what is damaged;  replay: one as a source
    doctor     kvdoctor's rules, for the doctor view
    reader     the thread that reads, so that nothing stops the screen
    model      the newest snapshot and all that is derived from it:
    history      15 minutes of every series, rates
    daemon       what a stats segment means: the daemon, its tiers;  connectors: what engines load and save
    alerts       what is wrong, and the health word
    events       what changed
    keys       every key, once: bindings, help, README, man page
    columns    tables as data; query: the filter behind /
    text       lines of styled text; palette: what a style looks like; svg: a screen as a picture
    chrome     head line, tabs, key hints
    views      one module a view: model -> rows and lines
    once       --once, --json, --check
    screens    Textual: the app, the main screen, dialogs, themes
    widgets    Textual: lines, and a table with a cursor

Data goes one way: source -> reader -> model -> views -> lines -> screens or once. Only screens and widgets import Textual.
"""
