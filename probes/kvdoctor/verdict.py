"""From results to answers: two verdicts, root causes with what follows from each, one next step.

`overall.verdict` is about GPU-direct, `overall.posix` about the tier without it: a missing GPU or an md array must not
condemn the cache. Symptoms are grouped under the cause that explains them, so an operator mends one thing, not seven.
"""

import re
import time
from collections.abc import Callable, Collection

from kvdoctor.facts import Facts
from kvdoctor.results import WORST, Report, Result
from kvdoctor.rules.base import Check, gpu_unjudged, no_gpu, registry
from kvtools.exits import Exit

DRIVER_FOLLOWS = (
    "gpu.driver.version",
    "gpu.driver.match",
    "gpu.largebar",
    "gpu.kfd",
    "gpu.smi",
    "ais.symbol",
    "ais.registered",
    "ais.tool",
)
CAUSES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("gpu.present", ("gpu.", "ais.", "kernel.", "p2p.", "rocm.", "nv.")),
    ("gpu.vf", ("ais.registered", "ais.tool")),
    ("gpu.apu", ("ais.registered", "ais.tool", "gpu.largebar")),
    ("gpu.driver.secureboot", ("gpu.driver.loaded", *DRIVER_FOLLOWS)),
    ("gpu.driver.loaded", (*DRIVER_FOLLOWS, "ais.param")),
    ("gpu.driver.match", ("gpu.driver.version", "ais.symbol", "ais.registered", "ais.tool")),
    ("gpu.driver.dkms", ("gpu.driver.version", "gpu.driver.match", "ais.symbol", "ais.registered", "ais.tool")),
    ("gpu.driver.version", ("gpu.driver.match", "ais.symbol", "ais.registered", "ais.tool")),
    ("gpu.largebar", ("ais.registered", "ais.tool")),
    ("ais.param", ("ais.registered", "ais.tool")),
    ("kernel.p2pdma", ("ais.registered", "ais.tool")),
    ("ais.symbol", ("ais.registered", "ais.tool")),
    ("rocm.version", ("rocm.hip_ais", "rocm.hipfile_lib")),
    ("storage.exists", ("storage.writable", "storage.space", "storage.odirect", "storage.align", "cfg.roots")),
    ("storage.multipath", ("storage.backing", "ais.tool", "nv.multipath")),
    ("storage.fs", ("storage.backing", "storage.odirect", "storage.align", "storage.journal", "ais.tool")),
    ("storage.journal", ("storage.odirect", "storage.align", "ais.tool")),
    ("storage.nfs", ("storage.fs", "storage.backing")),
    ("storage.backing", ("ais.iofail", "ais.tool", "nv.raid")),
    ("storage.odirect", ("storage.align",)),
    ("storage.selfcheck", ("ais.proof",)),
    ("storage.numa", ("gpu.numa",)),
    ("kernel.acs", ("p2p.topology",)),
    ("nv.driver_open", ("nv.p2pmem", "nv.gdscheck", "nv.regkeys")),
    ("nv.kernel", ("nv.p2pmem", "nv.gdscheck")),
    ("nv.regkeys", ("nv.p2pmem", "nv.gdscheck")),
    ("nv.nvidia_fs", ("nv.gdscheck",)),
    ("nv.p2pmem", ("nv.gdscheck",)),
)
"""(cause, what it explains), the deepest cause first. Names that end with '.' stand for every check of that kind."""


MAX_TEXT = 1000


def judge(
    facts: Facts,
    *,
    only: Collection[str] = (),
    skip: Collection[str] = (),
    clock: Callable[[], float] = time.perf_counter,
) -> Report:
    """All checks (or those `only` names, less `skip`) over one host's facts, with verdicts, causes and the next step."""
    results: list[Result] = []
    chosen = [item for item in registry().values() if selected(item.id, only, skip)]
    for item in chosen:
        begun = clock()
        answer = item.rule(facts)
        cost = round((clock() - begun) * 1000, 3)
        for one in answer if isinstance(answer, list) else [answer]:
            _label(one, item, cost)
            _doubt(one, facts)
            one.blind = one.blind or (one.id == "storage.selfcheck" and one.status == "unknown")
            results.append(one)
    report = Report(
        verdict=_verdict(facts, results),
        posix=posix(results, selected=len(chosen) < len(registry())),
        results=results,
        selected=len(chosen) < len(registry()),
        host=host_facts(facts),
        seconds=facts.seconds,
    )
    report.abandoned = [
        {
            "tool": run.key,
            "state": run.state,
            "pid": run.pid,
            "seconds": run.seconds,
            "process_state": run.proc_state,
            "wchan": run.wchan,
        }
        for run in facts.tools.values()
        if run.state in ("hung", "abandoned")
    ]
    report.roots = link_causes(results)
    report.next_step = next_step(report)
    return report


def _verdict(facts: Facts, results: list[Result]) -> str:
    """About this host, whichever checks were selected: without a GPU, or where it cannot be told, no other word is true."""
    if no_gpu(facts):
        return "no-gpu"
    word = overall(results)
    only_commands = facts.partial and not facts.files_captured
    return "undetermined" if gpu_unjudged(facts) and not only_commands else word


def _label(one: Result, item: Check, cost: float) -> None:
    one.id, one.group, one.need, one.title, one.cost_ms = item.id, item.group, item.need, item.title, cost
    # Words of a host's own files are among them, and a file may hold megabytes without a blank.
    one.observed, one.expected, one.why, one.fix = (_cut(text) for text in (one.observed, one.expected, one.why, one.fix))


def _doubt(one: Result, facts: Facts) -> None:
    """What rests on a file that is there (or was, in the capture) and could not be read is not known, whatever it looks like."""
    gone = {**facts.denied, **dict.fromkeys(facts.lost, LOST)}
    if not gone:
        return
    read = [item.source for item in one.evidence if item.kind == "file"] if one.status not in ("unknown", "skip") else []
    blind = [source for source in read if gone.get(source) in UNREADABLE]
    # A failure that was seen stands, whatever else was lost.
    if wanted := READS.get(one.id) if one.status != "fail" else None:
        blind += [source for source, why in gone.items() if why in UNREADABLE and re.fullmatch(wanted, source)]
    if blind:
        told = {LOST: "is gone from the capture", "EBADMSG": "holds nothing that is understood"}
        why = told.get(gone[blind[0]], f"could not be read ({gone[blind[0]]})")
        one.status, one.confidence, one.observed, one.blind = "unknown", "low", f"{blind[0]} {why}", True
        one.why, one.fix, one.commands = "", "", []


LOST = "LOST"
UNREADABLE = (LOST, "REDACTED", "EACCES", "EPERM", "EIO", "ETIMEDOUT", "ELOOP", "EBUSY", "EBADMSG")
_MOUNTS, _INDEX = r"/proc/(?:self|1)/mountinfo", r"|index\.json"
_PATH = r"cmd/(?:paths|statx)\.json"
READS = {
    "storage.exists": _PATH + _INDEX,
    "storage.writable": f"{_MOUNTS}|{_PATH}{_INDEX}",
    "storage.space": _PATH + _INDEX,
    "storage.degraded": rf"{_MOUNTS}|/proc/mdstat|/sys/dev/block/.*|/sys/devices/.*/block/.*{_INDEX}",
    "limits.shm": rf"cmd/(?:shm\.json|df.*\.out){_INDEX}",
    "limits.memcg": rf"/proc/self/cgroup|/sys/fs/cgroup/.*memory\..*|cmd/processes\.json{_INDEX}",
    "cfg.hashseed": rf"cmd/(?:engine\.log|processes\.json){_INDEX}",
    "cfg.roots": _PATH + _INDEX,
}
"""What each gate of the POSIX tier reads, also where it then finds nothing to say: lost, it must not look like "all is well"."""


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 3] + "..."


def selected(check_id: str, only: Collection[str], skip: Collection[str]) -> bool:
    """Whether a check runs. 'storage' and 'storage.' name a whole group."""

    def named(words: Collection[str]) -> bool:
        return any(check_id == word or check_id.startswith(word.rstrip(".*") + ".") for word in words)

    return (not only or named(only)) and not named(skip)


def overall(results: list[Result]) -> str:
    """GPU-direct: no-gpu, not-ready, undetermined, ready-with-warnings or ready."""
    if any(item.id == "gpu.present" and item.status == "fail" for item in results):
        return "no-gpu"
    required = [item for item in results if item.need == "R"]
    if any(item.status == "fail" for item in required):
        return "not-ready"
    if any(item.status == "unknown" for item in required) or not answered(results):
        return "undetermined"
    # ais-check contradicting better evidence is the tool's fault, not the host's.
    doubts = any(item.status in ("warn", "unknown") and item.id != "ais.tool" for item in results)
    faults = any(item.status == "fail" for item in results)
    return "ready-with-warnings" if doubts or faults else "ready"


def answered(results: list[Result]) -> bool:
    """Whether anything was learned that speaks about GPU-direct (where only other checks were asked for: about those)."""
    about = [item for item in results if item.group in ("gpu", "driver", "ais", "kernel", "nv")] or results
    return any(item.status in ("pass", "warn", "fail") for item in about)


def posix(results: list[Result], *, selected: bool = False) -> str:
    """The POSIX tier: unusable, undetermined, degraded, usable, or not-judged where no selected check is about it.

    A gate that is merely unknown degrades it, as a warning does; one whose evidence was lost, or whose proof did not end,
    leaves it open.
    """
    needed = [item for item in results if item.need == "P" and item.status != "skip"]
    words = {item.status for item in needed}
    if not needed and selected:
        return "not-judged"
    if "fail" in words:
        return "unusable"
    if any(item.blind for item in needed):
        return "undetermined"
    return "degraded" if words & {"warn", "unknown"} else "usable"


def link_causes(results: list[Result]) -> list[str]:
    """Fill `caused_by`, and return the ids of root causes, GPU-direct's and worst first."""
    for cause, follows in CAUSES:
        # What is merely unknown explains nothing.
        found = [item for item in results if item.id == cause and item.status in ("warn", "fail")]
        if not found:
            continue
        weight = max(WORST.index(item.status) for item in found)
        scopes = {item.scope for item in found}
        for item in results:
            explained = any(item.id == name or (name.endswith(".") and item.id.startswith(name)) for name in follows)
            same = "host" in scopes or item.scope == "host" or item.scope in scopes or not item.scope.startswith("/")
            # A mere doubt explains no failure.
            enough = weight >= WORST.index(item.status) or item.id == "ais.tool"
            root = _root(cause, results)
            if explained and same and enough and item.bad and not item.caused_by and item.id not in (cause, root):
                item.caused_by = root
    for item in results:
        item.caused_by = _deepest(item.caused_by, results)
    needs, depth = ("R", "P", "i"), [cause for cause, _ in CAUSES]

    def place(item: Result) -> tuple[int, int, int]:
        """Failures first, GPU-direct's before others; of those, what no reboot can mend, then the deepest cause."""
        severity = (
            ("fail", "unknown", "warn").index(item.status) if item.need == "R" else ("fail", "warn", "unknown").index(item.status)
        )
        return severity, needs.index(item.need), depth.index(item.id) if item.id in depth else len(depth)

    roots = sorted((item for item in results if item.bad and not item.caused_by), key=place)
    return list(dict.fromkeys(item.id for item in roots))


def _root(cause: str, results: list[Result]) -> str:
    """A cause that is itself explained passes on its own cause."""
    parents = {item.caused_by for item in results if item.id == cause and item.caused_by}
    return next(iter(parents), cause)


def _deepest(cause: str, results: list[Result]) -> str:
    """The end of the chain of causes: a cause may have found its own one later."""
    for _ in CAUSES:
        above = {item.caused_by for item in results if item.id == cause and item.bad}
        if not cause or not above or "" in above:
            return cause
        cause = next(iter(above))
    return cause


def next_step(report: Report) -> str:
    """The one thing to do now: the fix of the first root cause that has one."""
    for check_id in report.roots:
        for item in report.by_id(check_id):
            if item.bad and item.fix and not item.caused_by and (item.id, item.status) != ("gpu.present", "fail"):
                return item.fix
    return ""


def exit_code(report: Report, *, strict: bool) -> Exit:
    """0 ready (1 with warnings under --strict), 1 not-ready, 7 undetermined or no GPU; a proof that failed is 1, one given up 7."""
    proofs = {item.status for item in report.by_id("storage.selfcheck")}
    if "fail" in proofs:
        return Exit.FAILED
    if "unknown" in proofs and report.verdict != "not-ready":
        return Exit.UNDETERMINED
    if report.verdict in ("no-gpu", "undetermined"):
        return Exit.UNDETERMINED
    if report.verdict == "not-ready":
        return Exit.FAILED
    return Exit.FAILED if strict and report.verdict == "ready-with-warnings" else Exit.OK


def host_facts(facts: Facts) -> dict[str, object]:
    """What a reader must know to place a report: no serial, no address; the host name is the reader's own."""
    return {
        "name": facts.environment.hostname,
        "os": facts.environment.os_name,
        "kernel": facts.kernel.release,
        "context": facts.context,
        "container": facts.environment.in_container,
        "virtual_machine": facts.environment.virtual_machine,
        "driver": {"amdgpu": facts.driver.version, "nvidia": facts.nvidia.driver_version},
        "gpus": [{"bdf": gpu.bdf, "vendor": gpu.vendor, "device": gpu.device} for gpu in facts.gpus],
        "paths": [{"path": path.path, "from": path.origin} for path in facts.paths],
        "partial": facts.partial,
    }
