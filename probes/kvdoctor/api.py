"""kvdoctor without the command: facts and rules for kvd, kvgate and kvtop. Imports no Typer, prints nothing, needs no privilege.

    facts  = collect_host(paths=["/nvme/kvd"])        # looks at this host, bounded by `deadline_s`
    report = judge(facts)                             # pure
    why    = direct_reason("/nvme/kvd")               # one line, '' when GPU-direct is possible; no process is started

`direct_reason` is cheap (reads of the kernel's own files, a few milliseconds) and meant for a log line at start-up.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from kvdoctor.facts import Facts
from kvdoctor.results import Report, Result
from kvdoctor.rules.base import GROUPS
from kvdoctor.verdict import judge
from kvtools.output import printable

Answer = TypeVar("Answer")

CAPTURE_DEADLINE_S = 10.0

__all__ = ["Facts", "Report", "Result", "collect_capture", "collect_host", "direct_reason", "judge", "posix_reason", "warnings"]


def collect_host(
    root: str | Path = "/",
    paths: Sequence[str] = (),
    *,
    run_tools: bool = True,
    deadline_s: float = 20.0,
    with_ais_check: bool = False,
    want: int | None = None,
    progress: Callable[[str], None] | None = None,
    recorder: Any = None,
    shm: Path | None = None,
) -> Facts:
    """Look at this host, or at one whose tree is mounted at `root` (then no command of ours is asked about it).

    `paths` are KV directories (default: what the environment or a running kvd names, else the current directory). With
    `run_tools=False` nothing is executed. `want` is how many bytes each path should hold, `shm` the
    folder of segments where it is another than this process's own. Never takes longer than
    `deadline_s` plus a second, whatever hangs; raises TimedOut where a file of the host itself never answers, and UsageError
    for a path that is empty.
    """
    from kvdoctor.collect.host import collect
    from kvdoctor.collect.source import Source

    source = Source(root, run_tools=run_tools and str(root) == "/", deadline_s=deadline_s, recorder=recorder, shm=shm)
    return in_time(
        lambda: collect(source, paths=paths, with_ais_check=with_ais_check, want=want, progress=progress),
        deadline_s,
        lambda: source.looking_at or "its first file",
    )


def in_time(look: Callable[[], Answer], deadline_s: float, where: Callable[[], str]) -> Answer:
    """`look()` on a thread that is left behind where it does not end: a file on a dead mount may never answer.

    Every part of a look has its own bound; this one is for what no part expects to hang. Raises TimedOut, and what `look` does.
    """
    import threading

    from kvtools.errors import TimedOut

    done: list[Answer] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(look())
        except BaseException as error:  # noqa: BLE001 - carried over to the caller's thread, whatever it is
            failed.append(error)

    thread = threading.Thread(target=run, name="kvdoctor looks", daemon=True)
    thread.start()
    thread.join(deadline_s + 1.0)
    if failed:
        raise failed[0]
    if not done:
        raise TimedOut(
            f"the look does not come back from {where()} within {deadline_s:g} s",
            hint="a mount there is dead, or --deadline is too short",
        )
    return done[0]


def collect_capture(
    folder: str | Path, paths: Sequence[str] = (), *, recorder: Any = None, deadline_s: float | None = None
) -> Facts:
    """Facts of a captured host: a directory with root/, cmd/ and case.json. Raises NotFound or UsageError for anything else,
    and TimedOut where its files do not answer within `deadline_s` (CAPTURE_DEADLINE_S at most, and when not given)."""
    from kvdoctor.collect.holdings import open_capture
    from kvdoctor.collect.host import collect
    from kvdoctor.collect.reach import must_answer
    from kvdoctor.collect.source import Source
    from kvdoctor.parse import shape

    limit = CAPTURE_DEADLINE_S if deadline_s is None else min(deadline_s, CAPTURE_DEADLINE_S)
    must_answer(folder, limit)
    home, case, holdings = in_time(lambda: open_capture(folder), limit, lambda: str(folder))
    told = case.get("denied")
    denied = {str(path): str(why) for path, why in told.items()} if isinstance(told, dict) else {}
    source = Source(
        home / "root",
        commands=home / "cmd",
        complete=case.get("complete") is True,
        denied=denied,
        lost=holdings.lost,
        recorder=recorder,
    )
    facts = in_time(lambda: collect(source, paths=paths, case=case), limit, lambda: source.looking_at)
    facts.redacted = shape.mapping(case.get("captured")).get("redacted") is True
    facts.lost = sorted(holdings.lost)
    return facts


def first_fault(report: Report, need: str) -> Result | None:
    """The first root cause that stands against `need`, None where nothing does."""
    for check_id in [*report.roots, *(item.id for item in report.results)]:
        for item in report.by_id(check_id):
            if item.need == need and item.status == "fail":
                return item
    return None


def line(item: Result) -> str:
    """A result as one line that stands by itself: 'Driver: 6.14.14 is loaded (gpu.driver.version)'."""
    group = GROUPS[item.group]
    return f"{group}: {printable(item.observed.removeprefix(f'{group} is '))} ({item.id})"


def direct_reason(path: str, *, facts: Facts | None = None, root: str | Path = "/") -> str:
    """One line why a file in `path` cannot move between GPU and disk directly, '' when nothing stands against it.

    The line ends with the id of the check in brackets, which `kvdoctor explain` knows. Cheap: no process is started and
    nothing is opened on the path itself, unless `facts` from a fuller look are handed in. Raises TimedOut where this host's
    own files do not answer within 3 s, and UsageError for an empty path.
    """
    report = judge(facts or _quick(root, path))
    if report.verdict == "no-gpu":
        return "no AMD or NVIDIA GPU on this host (gpu.present)"
    found = first_fault(report, "R")
    return line(found) if found else ""


def posix_reason(path: str, *, facts: Facts | None = None, root: str | Path = "/") -> str:
    """One line why the POSIX tier cannot use `path`, '' when it can: the path is opened, in a child that may hang.

    Ends with the id of the check in brackets. Raises as `direct_reason` does, after 7 s.
    """
    facts = facts or collect_host(root, [path], run_tools=False, deadline_s=6.0)
    found = first_fault(judge(facts, only=["storage", "limits"]), "P")
    # Whoever asks names the path himself, so it needs no heading.
    return f"{printable(found.observed)} ({found.id})" if found else ""


def _quick(root: str | Path, path: str) -> Facts:
    from kvdoctor.collect.host import collect
    from kvdoctor.collect.source import Source

    source = Source(root, run_tools=False, deadline_s=2.0)
    return in_time(lambda: collect(source, paths=[path], quick=True), 2.0, lambda: source.looking_at)


def warnings(report: Report) -> list[str]:
    """Root causes as one line each, worst first: what kvgate shows at its start, refusing nothing."""
    found = []
    for check_id in report.roots:
        for item in report.by_id(check_id):
            if item.bad and not item.caused_by and item.id != "gpu.present":
                where = f"{item.scope}: " if item.scope.startswith("/") and item.scope not in item.observed else ""
                found.append(f"{item.status}: {printable(where)}{line(item)}")
    return found
