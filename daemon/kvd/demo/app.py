"""The command `kvtools demo`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from kvtools.cli import DebugOption, VersionOption, new_app
from kvtools.errors import UsageError
from kvtools.interrupts import terminate_as_interrupt

app = new_app("The daemon, its restart, a pool segment and the dashboard, on this machine, in a minute.", callback=False)


@app.command()
def demo(
    path: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where the scratch folder goes (default /var/tmp): the disk to show.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print the dashboard once at the end, also on a terminal.")] = False,
    engine: Annotated[
        Path | None, typer.Option(metavar="MODEL", help="The same story with a real vLLM that runs this model.")
    ] = None,
    debug: DebugOption = False,
    version: VersionOption = False,
) -> None:
    """Store, read back, restart the daemon, and read the same bytes from disk; then limit a pool and look at it all.

    Everything runs in a scratch folder and on a socket of its own, beside any daemon that serves here, and is gone
    afterwards, also after Ctrl-C.
    """
    if path is not None and not path.is_dir():
        raise UsageError(f"not a folder: {path}", hint="--path DIR names a folder on the disk to show")
    # A demo stopped by SIGTERM or a closed terminal cleans up as one stopped by Ctrl-C does.
    terminate_as_interrupt()
    interactive = sys.stdout.isatty() and sys.stdin.isatty() and not once
    if engine is not None:
        from kvd.demo.engine import tell_with_engine

        tell_with_engine(path, engine)
        return
    from kvd.demo.story import tell

    tell(path, interactive=interactive)
