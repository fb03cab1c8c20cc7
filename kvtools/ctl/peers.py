"""Engines whose segments say nothing about them (kvcached's): what can be learned about them from outside.

Contract: evidence, never certainty. `likely_owners` reads /proc for Python processes whose environment names the segment, or
whose process group the segment's default name carries; what belongs to other users is not readable and not found, and an
engine in another pid namespace is not seen at all. So a hit is reason for care ("delete" wants the name typed), no
hit proves nothing ("prune" never takes such a segment).

`quirks` says in words what is known about segments named or filled in certain ways. The facts are those of kvcached 0.1.1 to
0.1.5 and its August 2026 head, tried; the names of sardeenz are from its source.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from kvtools.segments.pool import PoolReading

_DEFAULT = re.compile(r"kvcached_(vLLM|SGLang|proc)_(\d+)(?:_(\d+))?")
_SHARED_PER_GPU = re.compile(r"kvcached_vllm(_GPU\d+)+")
_EXTRA_POOL = re.compile(r".+_g(\d+)")
_OFF = {"0", "false", "no", "off"}


@dataclass(frozen=True, slots=True)
class Peer:
    """A process that probably writes the segment: how it was found, and whether it reads new limits at all."""

    pid: int
    command: str
    found_by: str
    prealloc_off: bool


def sanitised(name: str) -> str:
    """What kvcached makes of KVCACHED_IPC_NAME: letters, digits, _ and - stay, others become -, 64 characters at most."""
    return "".join(c if c.isalnum() or c in "_-" else "-" for c in name)[:64]


def likely_owners(name: str, *, proc: Path = Path("/proc")) -> list[Peer]:
    """Python processes that probably hold segment `name`, by pid; this process and its ancestors left out."""
    default = _DEFAULT.fullmatch(name)
    group = int(default[2]) if default else 0
    ours = _ancestors(proc)
    found = []
    for pid in sorted(int(entry.name) for entry in proc.iterdir() if entry.name.isdigit()):
        if pid in ours:
            continue
        environ = _environ(proc, pid)
        if environ is None or not _is_python(proc, pid):
            continue
        explicit = environ.get("KVCACHED_IPC_NAME", "")
        if explicit and name in (explicit, sanitised(explicit)):
            by = "KVCACHED_IPC_NAME in its environment"
        elif group and not explicit and _group(proc, pid) == group and environ.get("ENABLE_KVCACHED", "").lower() in {"1", "true"}:
            by = f"process group {group}, as in the segment's name"
        else:
            continue
        off = environ.get("KVCACHED_PAGE_PREALLOC_ENABLED", "").lower() in _OFF
        found.append(Peer(pid, _command(proc, pid), by, off))
    return found


def quirks(reading: PoolReading) -> list[str]:
    """What is peculiar about this segment, one sentence each, for `kvctl show`."""
    said = []
    if default := _DEFAULT.fullmatch(reading.name):
        text = f"default name of a kvcached {default[1]} engine in process group {default[2]}"
        said.append(text + (f"; _{default[3]}: the plain name was taken when it started" if default[3] else ""))
    elif reading.name == "kvcached_mem_info":
        said.append("the one name that every engine of kvcached 0.1.1 and 0.1.2 uses: its numbers are those of the last writer")
    elif _SHARED_PER_GPU.fullmatch(reading.name):
        said.append("sardeenz gives this name to all models on these GPUs: its numbers are those of the last writer")
    elif extra := _EXTRA_POOL.fullmatch(reading.name):
        said.append(f"pool {extra[1]} of its process, by kvcached's naming")
    if reading.limit_bytes == 0 and reading.mapped_bytes:
        said.append(
            "limit 0 with memory in use: kvcached makes this of a segment deleted under a live engine; its own tools do not list it"
        )
    elif reading.limit_bytes == 0:
        said.append("limit 0: kvcached's tools do not list it, and its engines ignore the limit")
    return said


def _ancestors(proc: Path) -> set[int]:
    found, pid = {os.getpid()}, os.getpid()
    while pid > 1:
        fields = _stat(proc, pid)
        if not fields:
            break
        pid = int(fields[1])
        found.add(pid)
    return found


def _stat(proc: Path, pid: int) -> list[bytes]:
    """Fields of /proc/PID/stat from the state on (index 0), empty when it is gone."""
    try:
        return (proc / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return []


def _group(proc: Path, pid: int) -> int:
    fields = _stat(proc, pid)
    return int(fields[2]) if len(fields) > 2 else 0


def _environ(proc: Path, pid: int) -> dict[str, str] | None:
    try:
        data = (proc / str(pid) / "environ").read_bytes()
    except OSError:
        return None
    pairs = (item.partition("=") for item in data.decode(errors="replace").split("\0"))
    return {key: value for key, _, value in pairs}


def _is_python(proc: Path, pid: int) -> bool:
    try:
        return (proc / str(pid) / "exe").readlink().name.startswith(("python", "pypy"))
    except OSError:
        return False


def _command(proc: Path, pid: int) -> str:
    try:
        return (proc / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def worker_folder(name: str, *, temporary: Path = Path("/tmp")) -> Path | None:  # noqa: S108 - kvcached's choice
    """The folder of kvcached's worker sockets for segment `name`, if there is one. They are looked at, never spoken to."""
    import uuid

    try:
        folder = temporary / f"kvcached-tp-{name}-{uuid.uuid5(uuid.NAMESPACE_DNS, name).hex[:8]}"
        return folder if folder.is_dir() and not folder.is_symlink() else None
    except (OSError, UnicodeEncodeError):
        return None  # a name too long for such a folder, or one that kvcached cannot have either


def worker_sockets(folder: Path, *, proc: Path = Path("/proc")) -> tuple[int, int]:
    """How many worker sockets lie in `folder`, and how many of them a process of this network namespace listens on."""
    there = {str(path) for path in folder.rglob("w*.sock")}
    try:
        lines = (proc / "net/unix").read_text(errors="replace").splitlines()[1:]
    except OSError:
        lines = []
    return len(there), len(there & {line.split(" ")[-1] for line in lines})
