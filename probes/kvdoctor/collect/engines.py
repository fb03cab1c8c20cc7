"""Engines and daemons that run here, the vLLM that is installed, and what an engine's log admits.

Block hashes must be equal in every process that shares a cache. Whether an unset PYTHONHASHSEED breaks that depends on the
vLLM version: newer ones fall back on a fixed seed, which is seen in their source (DEFAULT_NONE_HASH_SEED) without running it.
"""

import contextlib
import os
import re
from dataclasses import dataclass, field
from typing import Any

from kvdoctor.collect.source import Source
from kvdoctor.facts import Engine, Engines, Scripts
from kvdoctor.parse import shape

ENVIRON = re.compile(
    r"^(PYTHONHASHSEED|HIPFILE_\w+|INFERA_KVD_\w+|KVD_\w+|KVTOOLS_\w+|KVCACHED_\w+|CUFILE_\w+|LMCACHE_\w+|VLLM_\w+|ROCM_PATH|VIRTUAL_ENV"
    r"|KUBERNETES_SERVICE_HOST|container)$"
)
SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|API_KEY|CREDENTIAL|PASSWD", re.IGNORECASE)
SEED_MARK = "DEFAULT_NONE_HASH_SEED"
SEED_FILE = "vllm/v1/core/kv_cache_utils.py"
_ENGINE = re.compile(
    r"(?:^|[/\s])vllm(?:\s+serve|\.entrypoints|$)|VLLM::EngineCore|sglang\.launch_server|lmcache_server|lmcache\.v1"
)
_DAEMON = re.compile(r"(?:^|[/\s])kvd\s+serve|-m\s+kvd\s+serve|kvtools\s+d\s+serve")
_SITE = r"python3(\.\d+)?"
_DISTRIBUTION = r"(vllm(?:_cpu)?|lmcache)-([0-9][^-]*)\.dist-info"


def filtered_environ(environ: dict[str, str]) -> dict[str, str]:
    """The variables that decide about caching, secrets blanked: all that ever leaves a process's environment."""
    kept = {name: "***" if SECRET.search(name) else value for name, value in environ.items() if ENVIRON.match(name)}
    return {name: re.sub(r"(?<=://)[^/\s@]+@", "***@", value) for name, value in kept.items()}


def scan_processes(root: str = "") -> dict[str, Any]:
    """Engines and kvd daemons of this machine (`engines`, `daemons`): pid, arguments, and environment where readable.

    Below a foreign `root` those that its own /proc tells of, if it has one: this machine's are not that one's.
    """
    found: dict[str, Any] = {"engines": [], "daemons": []}
    proc = f"{root.rstrip('/')}/proc"
    try:
        names = os.listdir(proc)  # noqa: PTH208 - a thousand entries: names are enough
    except OSError:
        return found
    for name in names:
        if not name.isdecimal() or int(name) == os.getpid():
            continue
        try:
            with open(f"{proc}/{name}/cmdline", "rb") as file:  # noqa: PTH123 - a thousand times a run
                args = file.read(65536).decode("utf-8", "replace").rstrip("\0").split("\0")
        except OSError:
            continue
        line = " ".join(args)
        kind = "daemons" if _DAEMON.search(line) else "engines" if _ENGINE.search(line) else ""
        if kind:
            found[kind].append(_process(proc, int(name), args))
    return found


def _process(proc: str, pid: int, args: list[str]) -> dict[str, Any]:
    environ: dict[str, str] | None = None
    group = ""
    try:
        with open(f"{proc}/{pid}/environ", "rb") as file:  # noqa: PTH123
            pairs = (item.partition("=") for item in file.read(1 << 20).decode("utf-8", "replace").split("\0"))
            environ = filtered_environ({key: value for key, equals, value in pairs if equals})
    except OSError:
        pass
    try:
        with open(f"{proc}/{pid}/cgroup") as file:  # noqa: PTH123
            unified = re.search(r"^0::(/.*)$", file.read(8192), re.MULTILINE)
            group = unified[1] if unified else ""
    except OSError:
        pass
    # Arguments may hold keys; only flags that decide about caching are looked at, and only those are kept.
    user: int | None = None
    with contextlib.suppress(OSError):
        user = os.stat(f"{proc}/{pid}").st_uid  # noqa: PTH116
    return {
        "pid": pid,
        "uid": user,
        "args": [_shown(args, i) for i in range(min(len(args), 256))],
        "environ": environ,
        "cgroup": group,
    }


def _shown(args: list[str], index: int) -> str:
    word = args[index]
    previous = args[index - 1] if index else ""
    if SECRET.search(previous.replace("-", "_")) and previous.startswith("--") and "=" not in previous:
        return "***"
    name, equals, _ = word.partition("=")
    return f"{name}=***" if equals and SECRET.search(name.replace("-", "_")) else word


def collect_engines(source: Source, scanned: dict[str, Any]) -> Engines:
    """Engines from a scan, the installed vLLM, and the lines of a captured engine.log that matter."""
    found = Engines()
    for item in shape.objects(scanned.get("engines")):
        args = shape.texts(item.get("args"))
        environ = item.get("environ")
        found.processes.append(
            Engine(
                pid=shape.whole(item.get("pid")) or 0,
                name=next((word for word in args if word.endswith("vllm") or "vllm" in word), args[0] if args else "engine"),
                args=args,
                environ={name: str(value) for name, value in shape.mapping(environ).items()} if isinstance(environ, dict) else None,
            )
        )
    _installed(source, found)
    _log(source, found)
    return found


def _installed(source: Source, found: Engines) -> None:
    """The vLLM and LMCache that an engine here would import: in the engines' own environments first."""
    folders: list[str] = []
    for engine in found.processes:
        prefix = (engine.environ or {}).get("VIRTUAL_ENV") or (
            engine.args[0].rsplit("/bin/", 1)[0] if engine.args and "/bin/" in engine.args[0] else ""
        )
        if prefix:
            folders.append(f"{prefix}/lib")
    folders += ["/usr/local/lib", "/usr/lib", "/opt/venv/lib", "/opt/conda/lib", "/opt/vllm/lib", "/app/.venv/lib", "/venv/lib"]
    for folder in dict.fromkeys(folders):
        for python in source.names(folder, _SITE):
            for place in ("site-packages", "dist-packages"):
                _site(source, f"{folder}/{python}/{place}", found)
                if found.vllm_fixed_seed is not None:
                    return


def _site(source: Source, site: str, found: Engines) -> None:
    if source.exists(f"{site}/{SEED_FILE}"):
        lines = source.matching(f"{site}/{SEED_FILE}", [SEED_MARK])
        if lines is not None:
            found.vllm_fixed_seed = bool(lines)
    if source.is_folder(f"{site}/vllm") or source.is_folder(f"{site}/lmcache"):
        for name in source.names(site, _DISTRIBUTION):
            if match := re.fullmatch(_DISTRIBUTION, name):
                if match[1] == "lmcache":
                    found.lmcache_version = match[2]
                else:
                    found.vllm_version = match[2]


def _log(source: Source, found: Engines) -> None:
    text = source.captured("engine.log") or ""
    for line in text.splitlines():
        if "PYTHONHASHSEED" in line and re.search(r"builtin hash|not set|without PYTHONHASHSEED", line):
            found.log_builtin_hash = found.log_builtin_hash or line.strip()[:300]
        if re.search(r"\[Errno 22\]|EINVAL|Invalid argument", line):
            found.log_odirect_error = found.log_odirect_error or line.strip()[:300]
        if match := re.search(r"(?:v|version )(0\.\d{1,2}\.\d{1,2})\b", line):
            found.vllm_version = found.vllm_version or (match[1] if "vLLM" in line else "")
        if match := re.search(r"tensor_parallel_size=(\d{1,3})", line):
            found.log_tensor_parallel = int(match[1])


@dataclass
class Daemon:
    """A running kvd, by its command line: where it stores, how much, and the control group its memory is charged to."""

    paths: list[str] = field(default_factory=list)
    arena: int | None = None
    long_bytes: int | None = None
    group: str = ""
    user: int | None = None

    @property
    def share(self) -> int | None:
        """Bytes each of its paths is to hold: several paths are a stripe."""
        return self.long_bytes // len(self.paths) if self.long_bytes and self.paths else None


def daemons(scanned: dict[str, Any]) -> list[Daemon]:
    """The running daemons of a scan."""
    found = []
    for item in shape.objects(scanned.get("daemons")):
        args = shape.texts(item.get("args"))
        daemon = Daemon(group=str(item.get("cgroup") or ""), user=shape.whole(item.get("uid")))
        for i, word in enumerate(args):
            name, equals, value = word.partition("=")
            value = value if equals else args[i + 1] if i + 1 < len(args) else ""
            if name == "--long-path" and value.startswith("/"):
                daemon.paths.append(value)
            elif name == "--max-bytes":
                daemon.arena = _size(value)
            elif name == "--long-bytes":
                daemon.long_bytes = _size(value)
        found.append(daemon)
    return found


def _size(text: str) -> int | None:
    from kvtools.errors import UsageError
    from kvtools.units import parse_size

    try:
        return parse_size(text)
    except UsageError:
        return None


def arena_and_group(running: list[Daemon], env: dict[str, str]) -> tuple[int | None, str]:
    """The largest arena of a running daemon with that daemon's control group, else KVD_MAX_BYTES in our own."""
    sized = [daemon for daemon in running if daemon.arena]
    if sized:
        largest = max(sized, key=lambda daemon: daemon.arena or 0)
        return largest.arena, largest.group
    return (_size(env["KVD_MAX_BYTES"]) if env.get("KVD_MAX_BYTES") else None), ""


SCRIPTS = ("kvtools", "kvctl", "kvtop", "kvdoctor", "kvd", "kvgate")


def scan_scripts() -> dict[str, list[str]]:
    """Console script -> distributions that install it. kvcached ships a kvctl and a kvtop too: the last installed wins."""
    from importlib import metadata

    owners: dict[str, list[str]] = {}
    for point in metadata.entry_points(group="console_scripts"):
        if point.name in SCRIPTS and point.dist is not None:
            owners.setdefault(point.name, [])
            if point.dist.name not in owners[point.name]:
                owners[point.name].append(point.dist.name)
    return owners


def collect_scripts(source: Source) -> list[Scripts]:
    answer = shape.mapping(source.value("scripts", scan_scripts))
    return [Scripts(name=name, owners=shape.texts(owners)) for name, owners in sorted(answer.items())]
