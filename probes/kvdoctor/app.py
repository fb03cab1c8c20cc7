"""kvdoctor's command line: look at a host (live, below a root, or captured), judge it, print, exit with the verdict."""

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from kvdoctor import api
from kvdoctor.verdict import exit_code
from kvtools.cli import DebugOption, JsonOption, VersionOption, new_app, refuse_options_before
from kvtools.errors import UsageError
from kvtools.exits import Exit
from kvtools.output import emit, emit_json, note, paint, printable

HELP = """Can this host do GPU-direct, and if not, which gate is shut? Is the POSIX tier usable?

Looks at the host (nothing is changed, nothing needs root), prints two verdicts and what stands against each. Exits 0 when
ready, 1 when not ready (or with warnings under --strict), 7 when undetermined or without a GPU."""

PathOption = Annotated[list[str] | None, typer.Option("--path", metavar="DIR", help="A KV directory to judge; repeat for more.")]
RootOption = Annotated[Path | None, typer.Option("--root", metavar="DIR", help="Judge the host whose / is mounted at DIR.")]
FromOption = Annotated[Path | None, typer.Option("--from", metavar="DIR", help="Judge a capture instead of this host.")]
DeadlineOption = Annotated[
    float | None,
    typer.Option(
        "--deadline", metavar="SECONDS", min=1, max=600, help="Bound of the whole run, the proof included (20; 60 with --prove)."
    ),
]
LOOK_DEADLINE_S, PROVE_DEADLINE_S = 20.0, 60.0
CaptureDeadlineOption = Annotated[
    float, typer.Option("--deadline", metavar="SECONDS", min=1, max=600, help="Bound of the look, and of the writing after it.")
]
AisCheckOption = Annotated[
    bool, typer.Option("--with-ais-check", help="Run ais-check too (it writes a probe file to every xfs and ext4 mount).")
]

app = new_app(HELP, callback=False, invoke_without_command=True)


@app.callback(help=HELP)
def doctor(
    context: typer.Context,
    path: PathOption = None,
    only: Annotated[list[str] | None, typer.Option("--only", metavar="ID", help="Only this check or group (storage).")] = None,
    skip: Annotated[list[str] | None, typer.Option("--skip", metavar="ID", help="Leave out this check or group.")] = None,
    root: RootOption = None,
    from_: FromOption = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit 1 on warnings too.")] = False,
    fix: Annotated[bool, typer.Option("--fix", help="Print the commands that mend it, as a script; nothing is run.")] = False,
    prove: Annotated[bool, typer.Option("--prove", help="Do real I/O below each path, and remove it again.")] = False,
    with_ais_check: AisCheckOption = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show every check, with its evidence.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing: the exit status is the answer.")] = False,
    deadline: DeadlineOption = None,
    json: JsonOption = False,
    debug: DebugOption = False,
    version: VersionOption = False,
) -> None:
    if context.invoked_subcommand is not None:
        refuse_options_before(context)
        return
    started = time.monotonic()
    limit = deadline or (PROVE_DEADLINE_S if prove else LOOK_DEADLINE_S)
    check_options(root, from_, prove=prove, fix=fix, json=json, quiet=quiet, deadline_s=limit)
    check_names([*(only or []), *(skip or [])])
    check_selection(only or [], skip or [])
    show_progress = not quiet and not json
    with ends_on_sigterm():
        facts = look(path or [], root, from_, deadline_s=limit, with_ais_check=with_ais_check, show_progress=show_progress)
        if prove:
            _prove(facts, show_progress=show_progress, deadline_s=limit - (time.monotonic() - started))
    report = api.judge(facts, only=only or [], skip=skip or [])
    if json:
        emit_json("kvdoctor.report/1", report.to_json())
    elif fix:
        from kvdoctor.fix import script

        for line in script(report):
            emit(line)
    elif not quiet:
        from kvdoctor.report import show

        show(report, verbose=verbose)
    raise typer.Exit(exit_code(report, strict=strict))


ROOT_DEADLINE_S = 5.0
"""How long a first look at --root may take: a dead mount never answers."""


def _check_root(root: Path) -> None:
    if not root.is_dir():
        raise UsageError(f"--root {root} is not a directory", hint="bind-mount the host's / there, read-only")
    if (root / "case.json").is_file() and (root / "root").is_dir():
        raise UsageError(f"--root {root} is a capture", hint=f"kvdoctor --from {root}")


@contextmanager
def ends_on_sigterm() -> Iterator[None]:
    """Within it SIGTERM ends this process as an exit does, so that children are stopped and what they made is removed."""

    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def check_options(
    root: Path | None,
    capture: Path | None,
    *,
    deadline_s: float,
    prove: bool = False,
    fix: bool = False,
    json: bool = False,
    quiet: bool = False,
) -> None:
    """Refuse options that contradict each other. Raises UsageError, and TimedOut where --root does not answer."""
    if root is not None and capture is not None:
        raise UsageError("--root and --from exclude each other", hint="--root is a mounted host, --from a capture")
    if root is not None:
        from kvdoctor.collect.reach import must_answer

        must_answer(root, min(ROOT_DEADLINE_S, deadline_s))
        _check_root(root)
    if prove and (capture is not None or root is not None):
        raise UsageError("--prove does real I/O, which only the live host can", hint="run kvdoctor --prove --path DIR on that host")
    if quiet and (fix or json):
        raise UsageError(f"--quiet prints nothing, {'--fix a script' if fix else '--json a report'}", hint="give one of the two")
    if fix and json:
        raise UsageError("--fix prints a script and --json a report", hint="with --json each result carries its commands")


def look(
    paths: list[str],
    root: Path | None,
    capture: Path | None,
    *,
    deadline_s: float,
    with_ais_check: bool = False,
    show_progress: bool = False,
    recorder: object = None,
) -> api.Facts:
    """Facts from where the options say."""
    if capture is not None:
        return api.collect_capture(capture, paths, recorder=recorder, deadline_s=deadline_s)
    from kvdoctor.report import progress

    draw = progress(sys.stderr)
    try:
        return api.collect_host(
            root or "/",
            paths,
            deadline_s=deadline_s,
            with_ais_check=with_ais_check,
            progress=draw if show_progress else None,
            recorder=recorder,
        )
    finally:
        draw.done()


def _prove(facts: api.Facts, *, show_progress: bool, deadline_s: float) -> None:
    from kvdoctor.prove import prove
    from kvdoctor.report import progress

    draw = progress(sys.stderr)
    try:
        prove(facts, progress=draw if show_progress else None, deadline_s=deadline_s)
    finally:
        draw.done()


def check_names(words: list[str]) -> None:
    """Refuse names that are neither a check nor a group, with the nearest that is. Raises UsageError."""
    if not words:
        return
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


def check_selection(only: list[str], skip: list[str]) -> None:
    """Refuse a selection that leaves nothing to check. Raises UsageError."""
    if not only and not skip:
        return
    from kvdoctor.rules.base import registry
    from kvdoctor.verdict import selected

    if not any(selected(check, only, skip) for check in registry()):
        words = [*(f"--only {word}" for word in only), *(f"--skip {word}" for word in skip)]
        raise UsageError(f"{' '.join(words)} leaves no check", hint="kvdoctor explain lists them all")


@app.command()
def explain(
    check: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="A check (storage.journal) or a group (storage); none lists them all.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Say what a check means, what it reads, what misleads, and where its rule comes from."""
    from kvdoctor import explain as text

    if check is None:
        if json:
            from kvdoctor.rules.base import registry

            emit_json("kvdoctor.checks/1", {"checks": [text.document(item) for item in registry().values()]})
            return
        for line in text.listing():
            emit(line)
        return
    found = text.find(check)
    if isinstance(found, list):
        if json:
            emit_json("kvdoctor.checks/1", {"checks": [text.document(item) for item in found]})
            return
        for line in text.group(check, found):
            emit(line)
        return
    if json:
        emit_json("kvdoctor.check/1", text.document(found))
        return
    for line in text.explain(found):
        emit(line)


@app.command()
def capture(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new directory.")],
    path: PathOption = None,
    root: RootOption = None,
    from_: FromOption = None,
    redact: Annotated[
        bool, typer.Option("--redact/--no-redact", help="Replace names, addresses and serials (on by default).")
    ] = True,
    with_ais_check: AisCheckOption = False,
    deadline: CaptureDeadlineOption = 20.0,
) -> None:
    """Write this host as a directory that --from judges anywhere with the same result."""
    from kvdoctor.capture import Recording, write_capture
    from kvdoctor.rules.base import quote

    check_options(root, from_, deadline_s=deadline)
    recording = Recording()
    with ends_on_sigterm():
        facts = look(
            path or [], root, from_, deadline_s=deadline, with_ais_check=with_ais_check, show_progress=True, recorder=recording
        )
        write_capture(recording, facts, folder, redact=redact, deadline_s=deadline)
    emit(printable(str(folder)))
    told = "" if redact else "    (not redacted: it holds names and addresses)"
    note(printable(f"judge it anywhere: kvdoctor --from {quote(str(folder))}{told}"))


@app.command()
def diff(
    before: Annotated[Path, typer.Argument(metavar="A", help="A capture.")],
    after: Annotated[Path, typer.Argument(metavar="B", help="Another one.")],
    facts: Annotated[bool, typer.Option("--facts", help="Show every fact that differs, not only checks.")] = False,
    json: JsonOption = False,
) -> None:
    """Compare two captures: what differs in verdicts, checks and facts. Exits 1 when something does."""
    from dataclasses import asdict

    from kvdoctor.diff import compare_facts, compare_reports, plain, two_captures
    from kvdoctor.report import width, wrapped

    left, right, blank = two_captures(before, after)
    one, other = api.judge(left), api.judge(right)
    checks, changed = compare_reports(one, other, blank), compare_facts(left, right, blank)
    if blank is not plain and not json:
        note("redacted: names, addresses and serials are not compared")
    if json:
        overall = {"before": [one.verdict, one.posix], "after": [other.verdict, other.posix]}
        body: dict[str, object] = {
            "overall": overall,
            "checks": [asdict(item) for item in checks],
            "facts": [asdict(item) for item in changed],
        }
        emit_json("kvdoctor.diff/1", body)
    else:
        for word, a, b in (("GPU-direct", one.verdict, other.verdict), ("POSIX tier", one.posix, other.posix)):
            emit(f"{word}: {a}" if a == b else f"{word}: {a} -> {b}")
        for item in checks:
            emit(f"{item.before:>7} -> {item.after:<7} {paint(item.id, 'bold')} {printable(item.scope)}")
            for told in (item.before_observed, item.after_observed):
                for line in wrapped(told or "-", " " * (19 if width() >= 72 else 4)):
                    emit(line)
        for fact in changed if facts else []:
            for line in wrapped(f"{fact.path}: {fact.before} -> {fact.after}", "", hang="    "):
                emit(line)
        if changed and not facts:
            note(f"{len(changed)} facts differ: --facts shows them")
    raise typer.Exit(Exit.FAILED if checks or one.verdict != other.verdict or one.posix != other.posix else Exit.OK)
