"""--prove: real I/O below each KV path, asked for explicitly; everything it makes is gone when it ends.

Two children do the work, each with a deadline, so that a frozen file system or a wedged driver costs time and nothing else:
`proof_disk` writes and reads with O_DIRECT on a nameless file (it never has a name to leave behind), `proof_gpu` does the
same through hipFile or cuFile in strict mode, in a scratch file that is removed here if its child could not. Their answers
become facts (`KvPath.proof`), which rules judge like all others: `storage.selfcheck` and `ais.proof`.
"""

import json
import os
import secrets
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvdoctor.collect import tools
from kvdoctor.facts import Facts, GpuProof, KvPath, Proof
from kvdoctor.parse import shape

DISK_BYTES = 1 << 30
DISK_DEADLINE_S = 45.0
GPU_DEADLINE_S = 30.0
LEAST_S = 0.05
"""Below this no child is started: nothing could come of it."""
REMOVE_S = 0.5


def prove(
    facts: Facts, *, size: int = DISK_BYTES, progress: Callable[[str], None] | None = None, deadline_s: float | None = None
) -> None:
    """Fill `proof` of every path of `facts` that can be written, within `deadline_s` for all of them together.

    Each proof may take its even share of what is left, so that a path that hangs does not use up the others' time. The time
    spent counts in `facts.seconds`.
    """
    say = progress or (lambda _: None)
    started = time.monotonic()
    able = [path for path in facts.paths if path.exists is not False and path.writable is not False and not path.hung]
    left = len(able) * (2 if facts.gpus else 1)

    def share(most: float) -> float:
        nonlocal left
        left -= 1
        if deadline_s is None:
            return most
        # A killed child may take GRACE_S to go: that is part of its share.
        rest = (deadline_s - (time.monotonic() - started)) / (left + 1)
        return min(most, rest - min(tools.GRACE_S, rest / 2))

    for path in able:
        say(f"{path.path}: writing and reading")
        path.proof = disk(path, size, share(DISK_DEADLINE_S))
        if facts.gpus:
            say(f"{path.path}: GPU-direct")
            library = "hipfile" if facts.amd else "cufile"
            path.gpu_proof = gpu(
                path, library, facts.rocm.hipfile_libraries, facts.rocm.hip_libraries, deadline_s=share(GPU_DEADLINE_S)
            )
    facts.seconds = round(facts.seconds + time.monotonic() - started, 3)


def child(
    script: str, arguments: list[str], deadline_s: float, environ: dict[str, str] | None = None
) -> tuple[dict[str, Any], str, bool]:
    """The last JSON line a proof printed, what went wrong with the child itself ('' when nothing), and whether it was given up."""
    if deadline_s < LEAST_S:
        return {}, "not run: the deadline had passed", True
    argv = [sys.executable, "-I", str(Path(__file__).with_name("collect") / script), *arguments]
    run = tools.run(script, argv, deadline_s, environ=environ)
    answer: dict[str, Any] = {}
    for line in run.out.splitlines():
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            answer.update(found)
    if run.state in ("hung", "abandoned"):
        where = f" (pid {run.pid}, state {run.proc_state}, in {run.wchan})" if run.state == "abandoned" else ""
        return answer, f"{'abandoned' if where else 'not finished'} after {run.seconds:.1f} s{where}", True
    if run.rc != 0 and "error" not in answer:
        last = run.err.strip().splitlines()[-1] if run.err.strip() else ""
        return answer, f"ended with {run.rc}" + (f": {last[:200]}" if last else ""), False
    return answer, "", False


def disk(path: KvPath, size: int, deadline_s: float = DISK_DEADLINE_S) -> Proof:
    """Direct write and read of `size` bytes (less where little is free), with rates and a comparison of every byte."""
    room = path.free if path.free is not None else size
    bounded = max(16 << 20, min(size, room // 20)) & ~((1 << 20) - 1)
    answer, trouble, given_up = child("proof_disk.py", [path.path, str(bounded)], deadline_s)
    return Proof(
        bytes=shape.whole(answer.get("bytes")) or 0,
        write_bytes_per_s=_number(answer, "write_bytes_per_s"),
        read_bytes_per_s=_number(answer, "read_bytes_per_s"),
        fsync_s=_number(answer, "fsync_s"),
        direct=answer.get("direct") is True,
        same=answer.get("same") if isinstance(answer.get("same"), bool) else None,
        error=trouble or str(answer.get("error") or ""),
        errno=None if trouble else shape.whole(answer.get("errno")),
        given_up=given_up,
    )


def _number(answer: dict[str, Any], name: str) -> float | None:
    value = answer.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def gpu(path: KvPath, library: str, hipfile: list[str], hip: dict[str, bool], *, deadline_s: float = GPU_DEADLINE_S) -> GpuProof:
    """A strict GPU-direct write and read below the path."""
    scratch = Path(path.path) / f".kvdoctor-prove-{os.getpid()}-{secrets.token_hex(6)}"
    arguments = [library, str(scratch)]
    if library == "hipfile":
        arguments += [hipfile[0] if hipfile else "libhipfile.so", next(iter(hip), "libamdhip64.so")]
    # Strict: what the libraries would quietly copy through the CPU becomes an error.
    strict = {"HIPFILE_ALLOW_COMPAT_MODE": "false", "CUFILE_ALLOW_COMPAT_MODE": "false", "CUFILE_FORCE_COMPAT_MODE": "false"}
    try:
        answer, trouble, given_up = child("proof_gpu.py", arguments, deadline_s, strict)
    finally:
        # A killed child could not. Not in this process: on a frozen file system an unlink never returns.
        tools.run("remove", ["rm", "-f", "--", str(scratch)], min(REMOVE_S, max(LEAST_S, deadline_s)))
    return GpuProof(
        library=library,
        bytes=shape.whole(answer.get("bytes")) or 0,
        write_bytes_per_s=_number(answer, "write_bytes_per_s"),
        read_bytes_per_s=_number(answer, "read_bytes_per_s"),
        counted=shape.whole(answer.get("counted")),
        same=answer.get("same") if isinstance(answer.get("same"), bool) else None,
        error=trouble or str(answer.get("error") or ""),
        given_up=given_up,
        step=str(answer.get("step") or ""),
    )
