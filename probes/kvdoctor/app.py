"""kvdoctor's command line: look at a host (live, below a root, or captured), judge it, print, exit with the verdict."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from kvdoctor import api
from kvdoctor.verdict import exit_code
from kvtools.cli import DebugOption, JsonOption, VersionOption, new_app
from kvtools.errors import UsageError
from kvtools.output import emit_json

HELP = """Can this host do GPU-direct, and if not, which gate is shut? Is the POSIX tier usable?

Looks at the host (nothing is changed, nothing needs root), prints two verdicts and what stands against each. Exits 0 when
ready, 1 when not ready (or with warnings under --strict), 7 when undetermined or without a GPU."""

app = new_app(HELP, callback=False, invoke_without_command=True)


@app.callback(help=HELP)
def doctor(
    context: typer.Context,
    path: Annotated[
        list[str] | None, typer.Option("--path", metavar="DIR", help="A KV directory to judge; repeat for more.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="ID", help="Only this check or group (storage, gpu.driver).")
    ] = None,
    skip: Annotated[list[str] | None, typer.Option("--skip", metavar="ID", help="Leave out this check or group.")] = None,
    root: Annotated[Path | None, typer.Option("--root", metavar="DIR", help="Judge the host whose / is mounted at DIR.")] = None,
    from_: Annotated[Path | None, typer.Option("--from", metavar="DIR", help="Judge a capture instead of this host.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit 1 on warnings too.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Every check, with its evidence.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing: the exit status is the answer.")] = False,
    deadline: Annotated[
        float, typer.Option("--deadline", metavar="SECONDS", min=1, max=600, help="Bound of the whole run.")
    ] = 20.0,
    json: JsonOption = False,
    debug: DebugOption = False,
    version: VersionOption = False,
) -> None:
    if context.invoked_subcommand is not None:
        return
    if root is not None and from_ is not None:
        raise UsageError("--root and --from exclude each other", hint="--root is a mounted host, --from a capture")
    check_names([*(only or []), *(skip or [])])
    facts = look(path or [], root=root, capture=from_, deadline_s=deadline, show_progress=not quiet and not json)
    report = api.judge(facts, only=only or [], skip=skip or [])
    if json:
        emit_json("kvdoctor.report/1", report.to_json())
    elif not quiet:
        from kvdoctor.report import show

        show(report, verbose=verbose)
    raise typer.Exit(exit_code(report, strict=strict))


def look(paths: list[str], *, root: Path | None, capture: Path | None, deadline_s: float, show_progress: bool) -> api.Facts:
    """Facts from where the options say."""
    if capture is not None:
        return api.collect_capture(capture, paths)
    if root is not None and not root.is_dir():
        raise UsageError(f"--root {root} is not a directory", hint="bind-mount the host's / there, read-only")
    from kvdoctor.report import progress

    draw = progress(sys.stderr)
    try:
        return api.collect_host(root or "/", paths, deadline_s=deadline_s, progress=draw if show_progress else None)
    finally:
        draw.done()


def check_names(words: list[str]) -> None:
    """Refuse names that are neither a check nor a group, with the nearest that is."""
    from kvdoctor.rules.base import registry

    known = list(registry())
    groups = {".".join(name.split(".")[:i]) for name in known for i in range(1, len(name.split(".")))}
    for word in words:
        if word.rstrip(".*") not in groups and word not in known:
            import difflib

            near = difflib.get_close_matches(word, [*known, *groups], n=1)
            raise UsageError(
                f"no check or group {word!r}", hint=f"did you mean {near[0]}?" if near else "kvdoctor explain lists them all"
            )
