"""kvctl's commands: words and options. What they do is in the modules beside this one, imported when a command runs.

`kvctl` alone is the shell on a terminal, else help and status 2. `--shm DIR` looks at another folder than /dev/shm (a
container's, seen from the host as /proc/PID/root/dev/shm). Text goes to people, --json to programs; every mutation takes
--yes, and --dry-run where something can be shown without doing it.
"""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from kvtools.cli import DebugOption, JsonOption, VersionOption, new_app, usage
from kvtools.ctl import tables
from kvtools.ctl.naming import find, names_starting
from kvtools.errors import KvError, UsageError
from kvtools.output import emit, emit_json, note, printable, terminal_width
from kvtools.segments import pool
from kvtools.segments.files import SHM
from kvtools.segments.owner import PoolState, judge
from kvtools.units import format_size, parse_duration, parse_percent, parse_size

app = new_app("Who holds the KV memory of each engine, and what may it hold?", callback=False, invoke_without_command=True)


def _names(ctx: typer.Context, incomplete: str) -> list[str]:
    return names_starting(_root(ctx), incomplete)


def _root(ctx: typer.Context) -> Path:
    """The folder of shared memory: --shm, else $KVTOOLS_SHM, else /dev/shm."""
    chosen = ctx.parent.params.get("shm") if ctx.parent else None
    return Path(chosen) if chosen else SHM


NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The segment's name.", autocompletion=_names)]
NamesArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[NAME]...", help="Segments to show; all when none is named.", autocompletion=_names)
]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Answer every question with yes, and lift every refusal.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Show what would be done, and do nothing.")]
WaitOption = Annotated[bool, typer.Option("--wait", help="Return when the engine has applied the limit, or say why it has not.")]
TimeoutOption = Annotated[str, typer.Option("--timeout", metavar="DURATION", help="With --wait: how long to wait.")]
IntervalOption = Annotated[str, typer.Option("--interval", "-i", metavar="DURATION", help="Time between two looks.")]
CountOption = Annotated[int | None, typer.Option("--count", metavar="N", min=1, help="End after so many looks.")]


@app.callback()
def kvctl(
    ctx: typer.Context,
    shm: Annotated[
        Path | None,
        typer.Option(metavar="DIR", envvar="KVTOOLS_SHM", help="Folder of the segments, when it is not /dev/shm."),
    ] = None,
    debug: DebugOption = False,
    version: VersionOption = False,
) -> None:
    """Who holds the KV memory of each engine, and what may it hold?"""
    if ctx.invoked_subcommand is not None:
        return
    if sys.stdin.isatty() and sys.stdout.isatty():
        from kvtools.ctl.shell import run_shell

        raise typer.Exit(run_shell(shm or SHM))
    raise typer.Exit(usage(ctx))


def _patience(wait: bool, timeout: str) -> float | None:
    """Seconds to wait for the engine, None not to wait. A bad --timeout is an error even without --wait."""
    seconds = parse_duration(timeout)
    return seconds if wait else None


@app.command("list")
def list_(ctx: typer.Context, names: NamesArgument = None, as_json: JsonOption = False) -> None:
    """List segments and whether their engines live.

    Limit, use and reserve of each; with names, of those only. A segment that cannot be read is named on stderr.
    """
    root = _root(ctx)
    states, problems = _look(root, names or [])
    if as_json:
        body: dict[str, Any] = {
            "segments": [tables.segment(state) for state in states],
            "problems": [{"ipc": name, "error": error.message} for name, error in problems],
        }
        emit_json("kvctl.list/1", body)
    elif states:
        for line in tables.render(states, width=terminal_width()):
            emit(line)
    elif not problems:
        note(f"no segments in {root}")
    if names and problems:
        if len(names) > 1:
            for _, error in problems[:-1]:
                note(f"kvctl: {error.message}")
        raise problems[-1][1]
    for _, error in problems:
        note(f"kvctl: warning: {error.message}")


def _look(root: Path, names: list[str]) -> tuple[list[PoolState], list[tuple[str, KvError]]]:
    """The named segments, or all, with their owners; and those that could not be read."""
    if not names:
        listing = pool.list_pools(root)
        return [judge(reading, root=root) for reading in listing.pools], [(p.name, p.error) for p in listing.unreadable]
    states: list[PoolState] = []
    problems: list[tuple[str, KvError]] = []
    for name in names:
        try:
            states.append(find(name, root))
        except KvError as error:
            problems.append((name, error))
    return states, problems


@app.command()
def show(ctx: typer.Context, name: NameArgument, as_json: JsonOption = False) -> None:
    """Show all that is known about one segment.

    Its numbers, owner, GPU, the history of its limits, and what is peculiar about it.
    """
    from kvtools.ctl.details import emit_details

    root = _root(ctx)
    emit_details(find(name, root), root, as_json=as_json)


@app.command()
def limit(
    ctx: typer.Context,
    name: NameArgument,
    size: Annotated[str, typer.Argument(metavar="SIZE", help="The new limit, such as 4G or 512MiB (1024-based).")],
    wait: WaitOption = False,
    timeout: TimeoutOption = "30s",
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Set what a segment's engine may hold.

    The limit is cut to what the engine can use and to its whole pages. Below what is in use, or 0, it asks first.
    """
    from kvtools.ctl.changing import change_limit

    wanted, wait_s = parse_size(size), _patience(wait, timeout)
    root = _root(ctx)
    change_limit(
        find(name, root), wanted, root=root, command="kvctl limit", wait_s=wait_s, dry_run=dry_run, yes=yes, as_json=as_json
    )


@app.command("limit-percent")
def limit_percent(
    ctx: typer.Context,
    name: NameArgument,
    percent: Annotated[str, typer.Argument(metavar="PCT", help="Percentage of the GPU's memory, above 0 and up to 100.")],
    gpu: Annotated[int | None, typer.Option("--gpu", metavar="I", min=0, help="Of this GPU, instead of the engine's own.")] = None,
    total: Annotated[str | None, typer.Option("--total", metavar="SIZE", help="Of this size, instead of a GPU's memory.")] = None,
    wait: WaitOption = False,
    timeout: TimeoutOption = "30s",
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Set the limit to a percentage of a GPU's memory.

    Of the GPU that the engine is on, as its owner file says, or the only one; else say which with --gpu or --total.
    """
    from kvtools.ctl.changing import change_limit
    from kvtools.ctl.limits import percent_base

    share = parse_percent(percent)
    whole = parse_size(total) if total is not None else None
    if whole == 0:
        raise UsageError(f"--total is nothing to take a percentage of: {total!r}", hint="write the memory of the GPU, such as 80G")
    wait_s = _patience(wait, timeout)
    if gpu is not None and whole is not None:
        raise UsageError("--gpu and --total exclude each other")
    root = _root(ctx)
    state = find(name, root)
    base, what = percent_base(state, gpu=gpu, total_bytes=whole)
    note(f"{share:g} % of {what}, {format_size(base)}")
    change_limit(
        state, int(base * share / 100), root=root, command="kvctl limit-percent", wait_s=wait_s, dry_run=dry_run, yes=yes,
        as_json=as_json,
    )  # fmt: skip


@app.command()
def restore(
    ctx: typer.Context,
    name: NameArgument,
    wait: WaitOption = False,
    timeout: TimeoutOption = "30s",
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Set the limit its engine started with.

    As its owner file says; else the limit that the segment had before kvctl first changed it.
    """
    from kvtools.ctl.changing import change_limit
    from kvtools.ctl.limits import start_capacity

    wait_s = _patience(wait, timeout)
    root = _root(ctx)
    state = find(name, root)
    size = start_capacity(state, root=root)
    change_limit(state, size, root=root, command="kvctl restore", wait_s=wait_s, dry_run=dry_run, yes=yes, as_json=as_json)


@app.command()
def watch(
    ctx: typer.Context,
    names: NamesArgument = None,
    interval: IntervalOption = "1s",
    count: CountOption = None,
    as_json: JsonOption = False,
) -> None:
    """List segments again and again.

    In place on a terminal, else one table after another; with --json one object a line. Ctrl-C ends it.
    """
    from kvtools.ctl.watching import Watch, check_interval, repeat

    interval_s = check_interval(parse_duration(interval))
    root = _root(ctx)
    for name in names or []:
        find(name, root)
    with Watch(names or [], root=root, as_json=as_json, interval_s=interval_s) as screen:
        repeat(screen.round, interval_s=interval_s, count=count)


@app.command()
def delete(
    ctx: typer.Context,
    name: NameArgument,
    yes: YesOption = False,
    confirm: Annotated[
        str | None, typer.Option("--confirm", metavar="NAME", help="Delete it under a live engine: its name, typed again.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Delete a segment that no engine needs any more.

    Under a live engine its name must be typed: the engine may die of it.
    """
    from kvtools.ctl.removal import delete as remove

    last = remove(name, root=_root(ctx), yes=yes, confirm=confirm)
    if as_json:
        emit_json("kvctl.delete/1", {**tables.words(last), "deleted": True})
    else:
        emit(f"deleted {printable(name)} (limit {format_size(last.limit_bytes)}, used {format_size(last.used_bytes)})")


@app.command()
def prune(ctx: typer.Context, dry_run: DryRunOption = False, yes: YesOption = False, as_json: JsonOption = False) -> None:
    """Remove what dead processes left in shared memory.

    Shows the evidence that they are dead first. A segment that does not say who owns it is never taken.
    """
    from kvtools.ctl.pruning import run_prune

    run_prune(_root(ctx), dry_run=dry_run, yes=yes, as_json=as_json)


@app.command()
def apply(
    ctx: typer.Context,
    plan: Annotated[Path, typer.Argument(metavar="PLAN.yaml", help="The plan, YAML or JSON.")],
    watch: Annotated[bool, typer.Option("--watch", help="Keep the plan in force as engines come and go.")] = False,
    interval: IntervalOption = "2s",
    count: Annotated[int | None, typer.Option("--count", metavar="N", min=1, help="With --watch: end after so many looks.")] = None,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Set several limits as one, all or none.

    The plan gives each segment a fixed limit, or a weight, floor, ceiling and priority within a budget.
    """
    from kvtools.ctl.applying import run_apply

    seconds = parse_duration(interval)
    root = _root(ctx)
    run_apply(plan, root=root, watch=watch, interval_s=seconds, count=count, dry_run=dry_run, yes=yes, as_json=as_json)


@app.command()
def shell(ctx: typer.Context) -> None:
    """Type commands with history and completion.

    It runs kvctl's commands and nothing else; no line ever reaches a system shell.
    """
    from kvtools.ctl.shell import run_shell

    raise typer.Exit(run_shell(_root(ctx)))
