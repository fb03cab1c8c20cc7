"""Real processes that own pools, for the tests of segments and kvctl: they hold the life lock and can be killed."""

import subprocess
import sys
from pathlib import Path

_ENGINE = """
import sys, time
from pathlib import Path
from kvtools.segments import owner, pool
root, name, used = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
lock = owner.OwnerLock.acquire(name, owner.OwnerInfo("vllm", start_capacity_bytes=1 << 30, page_bytes=1 << 20), root=root)
pool.create_pool(name, 1 << 30, used_bytes=used, root=root)
print("up", flush=True)
{then}
"""

ANSWERING = """
file = pool.PoolFile(name, root=root, writable=True)
known = 1 << 30
while True:
    now = file.read()
    if now.limit_bytes != known:
        known = now.limit_bytes
        lock.mark(known, "deferred", reason="8 MiB in use above it") if used > known else None
        used = min(used, known)
        time.sleep(0.05)
        file.write_usage(used, 0)
        lock.mark(known, "applied", effective_bytes=known)
    time.sleep(0.005)
"""
"""An engine's life: it obeys each new limit within 50 ms, and says so."""

STUBBORN = """
file = pool.PoolFile(name, root=root, writable=True)
while (now := file.read()).limit_bytes == 1 << 30:
    time.sleep(0.005)
lock.mark(now.limit_bytes, "deferred", effective_bytes=now.used_bytes, reason="a long request is running")
time.sleep(60)
"""
"""An engine that cannot obey yet, and says why."""


def start_engine(root: Path, name: str, then: str = "time.sleep(60)", *, used: int = 0) -> "subprocess.Popen[bytes]":
    """A process that owns pool `name` (1 GiB, pages of 1 MiB), up when this returns."""
    process = subprocess.Popen(
        [sys.executable, "-c", _ENGINE.format(then=then), str(root), name, str(used)], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    return process


def end(process: "subprocess.Popen[bytes]") -> None:
    """Kill it, and wait until it is gone."""
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()
