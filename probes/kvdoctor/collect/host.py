"""`collect`: all collectors over one source, commands started first so that they run beside the file reads."""

import errno
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvdoctor.collect import driver, engines, environment, gpu, kernel, limits, nvidia, rocm, segments, storage
from kvdoctor.collect.source import Source
from kvdoctor.facts import Facts
from kvdoctor.parse import shape
from kvdoctor.parse.aischeck import parse_ais_check
from kvdoctor.parse.mounts import parse_mdstat
from kvtools.errors import UsageError

SMI_TOOLS = {
    "amd-smi": ["amd-smi"],
    "nvidia-smi": ["nvidia-smi", "--query-gpu=pci.bus_id,name,driver_version", "--format=csv,noheader"],
}


def collect(
    source: Source,
    *,
    paths: Sequence[str] = (),
    case: dict[str, Any] | None = None,
    with_ais_check: bool = False,
    want: int | None = None,
    quick: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Facts:
    """Facts of the host behind `source`.

    `paths` are the KV folders to judge; not given, they come from the capture (`case`), the environment, a running kvd, or
    else the current directory. `want` is how many bytes each should hold (a running kvd's own paths: its
    --long-bytes). `quick` reads files of the kernel only: no child process, no other process, no segment, nothing on the path
    itself. Never raises for a fact it cannot learn.
    """
    started = time.monotonic()
    say = progress or (lambda _: None)
    case = case or {}
    context = "host-root" if not source.live else "root" if source.root else "live"
    facts = Facts(case=str(case.get("case", "")), context=str(case.get("context", context)))
    facts.partial, facts.captured, facts.foreign = not source.whole, not source.live, source.foreign or case.get("foreign") is True
    facts.files_captured = source.is_folder("/proc") or source.is_folder("/sys")
    facts.env = _environ(source, case)
    say("processes")
    scanned = {} if quick else _scan(source)
    running = engines.daemons(scanned)
    arena, group = engines.arena_and_group(running, facts.env)
    named = list(dict.fromkeys(path for daemon in running for path in daemon.paths))
    chosen = choose_paths(paths, case, facts.env, named, here=source.live and not source.foreign)
    if not quick:
        storage.start_probe(source, [path for path, _ in chosen], write=not source.foreign)
    say("GPUs")
    facts.pci_captured = gpu.pci_listed(source)
    facts.gpus = gpu.collect_gpus(source, facts.pci_unread)
    _start_tools(source, facts, with_ais_check=with_ais_check)
    facts.environment = environment.collect_environment(source, facts.env, facts.context)
    say("kernel")
    facts.kernel = kernel.collect_kernel(source, symbols=bool(facts.gpus) or not source.live)
    facts.kfd, facts.kfd_denied = gpu.collect_kfd(source)
    facts.device_access = _device_access(source, facts)
    facts.nvme_multipath = source.word("/sys/module/nvme_core/parameters/multipath")
    if not source.live or facts.gpus:
        facts.log = kernel.collect_log(source)
    say("driver")
    facts.driver = driver.collect_driver(
        source, facts.kernel.release, facts.kernel.cmdline, facts.log, in_container=facts.environment.in_container
    )
    if not source.live or facts.amd:
        facts.rocm = rocm.collect_rocm(source, facts.env)
    if not source.live or facts.nvidia_gpus:
        facts.nvidia = nvidia.collect_nvidia(source, facts.env)
    say("storage")
    mdstat = source.read("/proc/mdstat", 1 << 18)
    facts.md = None if mdstat is None else parse_mdstat(mdstat)
    _collect_paths(source, facts, case, chosen, running, want)
    chains = [card.chain for card in facts.gpus] + [block.chain for kv in facts.paths for block in kv.stack]
    kernel.collect_acs(source, facts.kernel, chains)
    say("limits")
    facts.limits = limits.collect_limits(
        source,
        capabilities=[] if facts.environment.user_namespace else facts.environment.capabilities,
        daemon_group=group,
        arena=arena,
    )
    facts.engines = engines.collect_engines(source, scanned)
    if not quick:
        facts.scripts = [] if source.foreign else engines.collect_scripts(source)
        facts.segments = segments.collect_segments(source)
    say("tools")
    _gather_tools(source, facts)
    facts.denied = dict(source.denied)
    facts.seconds = round(time.monotonic() - started, 3)
    return facts


def _collect_paths(
    source: Source,
    facts: Facts,
    case: dict[str, Any],
    chosen: list[tuple[str, str]],
    running: Sequence[engines.Daemon],
    want: int | None,
) -> None:
    """What lies under the KV folders, who uses them, and what of that cannot be told from here."""
    shares = {path: daemon.share for daemon in running for path in daemon.paths}
    facts.paths = storage.collect_paths(source, chosen, {path: want or shares.get(path) for path, _ in chosen})
    if shape.mapping(case.get("captured")).get("redacted") is True:
        _forget_mounts(facts, [path for path, _ in choose_paths((), case, {}, (), here=False)])
    users = {path: daemon.user for daemon in running for path in daemon.paths}
    for kv in facts.paths:
        kv.user = users.get(kv.path)
        if facts.foreign:
            kv.writable = None  # this user, and a read-only bind mount, are not that host's


def _forget_mounts(facts: Facts, captured: Sequence[str]) -> None:
    """A redacted capture's mount table holds the lines of its own KV paths only: it tells nothing of others."""
    for kv in facts.paths:
        if kv.path not in captured:
            kv.mount, kv.stack, kv.journal, kv.journal_source, kv.resolved = None, [], None, "", ""


def choose_paths(
    given: Sequence[str], case: dict[str, Any], env: dict[str, str], daemon_paths: Sequence[str], *, here: bool = True
) -> list[tuple[str, str]]:
    """(path, where it comes from): --path, a capture's kv_path, KVD_LONG_PATH, hipFile's roots, a running kvd, or `here`.

    One folder under two spellings ("D", "D/.") is one path.
    """
    if given:
        return [(path, "--path") for path in dict.fromkeys(_absolute(path) for path in given)]
    recorded = shape.texts(case.get("kv_paths")) or ([str(case["kv_path"])] if case.get("kv_path") else [])
    if recorded:
        return [(path, "the capture") for path in recorded]
    if (text := env.get("KVD_LONG_PATH", "")).strip(" :"):
        return [(path, "KVD_LONG_PATH") for path in _each(text.split(":"))]
    if roots := parse_roots(env.get("INFERA_KVD_HIPFILE_ROOTS", "")):
        return [(path, "INFERA_KVD_HIPFILE_ROOTS") for path in _each(roots)]
    if daemon_paths:
        return [(path, "the running kvd") for path in _each(daemon_paths)]
    try:
        return [(os.getcwd(), "the current directory")] if here else []  # noqa: PTH109
    except OSError:
        return []  # it was deleted under us


def _each(paths: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(os.path.normpath(path) for path in paths if path.strip()))


def _absolute(path: str) -> str:
    """`path` from the root on, links kept. Raises UsageError for one that names nothing."""
    if not path.strip():
        raise UsageError("--path is empty", hint="name a directory; a variable in the command line may not be set")
    try:
        return os.path.abspath(path)  # noqa: PTH100
    except OSError:
        raise UsageError(f"--path {path}: the current directory is gone", hint="name it from / on, or cd elsewhere") from None


def parse_roots(text: str) -> list[str]:
    """Folders of 'long=/nvme/a,short=/nvme/b' (a bare folder counts too)."""
    return [part.partition("=")[2] or part for part in (item.strip() for item in text.split(",")) if part]


def _environ(source: Source, case: dict[str, Any]) -> dict[str, str]:
    if source.live:
        # Another root's engines do not run in this process's environment.
        return {} if source.foreign else engines.filtered_environ(dict(os.environ))
    return {name: str(value) for name, value in shape.mapping(case.get("env")).items()}


def _scan(source: Source) -> dict[str, Any]:
    return shape.mapping(source.value("processes", lambda: engines.scan_processes(source.root)))


def _start_tools(source: Source, facts: Facts, *, with_ais_check: bool) -> None:
    """Begin every command this host calls for; a host without a GPU needs none."""
    if not source.live:
        return
    release = os.uname().release
    if facts.amd:
        driver.start_tools(source, release)
        source.start("amd-smi", SMI_TOOLS["amd-smi"])
        _start_library(source, "amd", "amdsmi", "/opt/rocm/share/amd_smi/amdsmi")
        if not os.access("/dev/kmsg", os.R_OK) or os.geteuid() != 0:
            source.start("journal", ["journalctl", "-k", "-b", "-o", "short-monotonic", "--no-pager", "-q"])
            source.start("dmesg", ["dmesg"])
        if with_ais_check:
            source.start("ais-check", ["ais-check"], deadline_s=10.0)
    if facts.nvidia_gpus:
        source.start("nvidia-smi", SMI_TOOLS["nvidia-smi"])
        _start_library(source, "nvidia", "pynvml", "")
        nvidia.start_tools(source)


def _start_library(source: Source, vendor: str, module: str, folder: str) -> None:
    """Begin asking the vendor's library, in a child, where it is installed."""
    from importlib.util import find_spec

    if find_spec(module) is not None or (folder and source.is_folder(folder)):
        script = str(Path(__file__).with_name("smi_library.py"))
        source.start(f"library-{vendor}", [sys.executable, "-I", script, vendor])


def _library(source: Source, facts: Facts, vendor: str) -> None:
    """Names and virtualization of GPUs, from the last line of JSON the child printed."""
    run = source.answer(f"library-{vendor}")
    answer: Any = None
    for line in run.out.splitlines() if run and run.answered else []:
        try:
            answer = json.loads(line)
        except ValueError:
            continue
    for row in shape.objects(shape.mapping(answer).get("gpus")):
        for card in facts.gpus:
            if row.get("bdf") == card.bdf:
                card.name, card.virtualization = str(row.get("name", "")), str(row.get("virtualization", ""))


def _gather_tools(source: Source, facts: Facts) -> None:
    """Answers of the tools that judge the tools themselves, and of the vendor's checker."""
    for key in ("amd-smi", "rocm-smi", "rocminfo", "nvidia-smi"):
        if run := source.answer(key):
            facts.tools[key] = run
    for vendor in ("amd", "nvidia"):
        _library(source, facts, vendor)
    if run := source.answer("ais-check"):
        facts.tools["ais-check"] = run
        if run.answered:
            facts.ais_check = parse_ais_check(run.out, run.err, run.rc)
    facts.tools.update({key: run for key, run in source.runs.items() if run.state in ("hung", "abandoned")})


def _device_access(source: Source, facts: Facts) -> dict[str, str] | None:
    """Whether this user may open the nodes compute needs. Opening /dev/kfd makes a process known to the driver, so only
    permission is asked."""

    def ask() -> dict[str, str]:
        nodes = ["/dev/kfd", *(f"/dev/dri/{name}" for name in source.names("/dev/dri", r"renderD\d+"))]
        return {node: _access(source.host_path(node)) for node in nodes}

    # Whether this process may open another host's nodes says nothing about that host's users.
    if source.live and (not facts.amd or source.foreign):
        return None
    answer = source.value("devices", ask)
    return {str(node): str(state) for node, state in answer.items()} if isinstance(answer, dict) else None


def _access(path: str) -> str:
    if not os.path.exists(path):  # noqa: PTH110
        return errno.errorcode[errno.ENOENT]
    return "ok" if os.access(path, os.R_OK | os.W_OK) else errno.errorcode[errno.EACCES]
