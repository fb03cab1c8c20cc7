"""One honest budget (I6): what `--max-bytes` says, 64 MiB over the size after imports, and a few bytes an entry. Not more, ever.

The kernel's own peak of the process counts, arena included, after clients have done their worst for a while.
"""

import threading
from pathlib import Path

import pytest

from kvd.errors import KvdError
from tests.support.daemon import Daemon, MakeDaemon

pytestmark = pytest.mark.real("kvd")

MIB = 1 << 20
ARENA = 96 * MIB
ENTRY, TIER_ENTRY, ALLOWANCE = 256, 192, 64 * MIB


def key(client: int, number: int) -> bytes:
    return bytes([client]) * 16 + number.to_bytes(16, "big")


def peak(daemon: Daemon) -> int:
    """The most that was resident at any moment: private memory, the arena and the pages of mapped files."""
    status = Path(f"/proc/{daemon.pid}/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM"))


def work(daemon: Daemon, number: int, failures: list[BaseException]) -> None:
    """Small values and large ones, more than the arena holds, put and read back in the largest requests there are."""
    try:
        with daemon.client(timeout_s=30, namespace=f"client {number}") as client:
            for turn in range(2):
                small = [key(number, turn << 20 | i) for i in range(3000)]
                client.put_many([(k, b"v" * 4000) for k in small])
                client.exists(small * 8)
                client.get_many(small)
                large = [key(number, turn << 20 | 1 << 19 | i) for i in range(12)]
                client.put_many([(k, bytes(4 * MIB)) for k in large])
                with client.read(large) as lease:
                    assert len(lease.views) == len(large)
                client.get_many(large)
    except (KvdError, AssertionError) as error:
        failures.append(error)


def test_the_daemon_stays_within_its_budget(kvd_daemon: MakeDaemon) -> None:
    bare = kvd_daemon(max_bytes="1MiB", tier="256MiB")
    imported = peak(bare)
    daemon = kvd_daemon(max_bytes=f"{ARENA // MIB}MiB", tier="256MiB")
    failures: list[BaseException] = []
    threads = [threading.Thread(target=work, args=(daemon, number, failures)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    with daemon.client() as client:
        stats = client.stats()
    entries, below = ARENA // 4096, stats["tiers"][0]["entries"]
    budget = imported + ARENA + ALLOWANCE + entries * ENTRY + below * TIER_ENTRY
    assert stats["arena_bytes_ready"] == ARENA
    assert stats["evictions_total"] > 0, "it was more than it holds"
    assert peak(daemon) > ARENA, "the arena counts"
    assert peak(daemon) <= budget, f"{(peak(daemon) - budget) / MIB:.1f} MiB over"
