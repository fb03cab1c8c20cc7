"""Makes the golden store of the newest format version: `python -m tests.kvd.disk.golden` (only when a new version is made).

The stores in tests/cases/kvd/disk-v* were written once and are never written again: what is in them must be readable for ever.
Its nonces and times are fixed, so the same code makes the same bytes.
"""

import itertools
import sys
from pathlib import Path

from kvd.store.retention import NEVER, Retention
from kvd.tiers.adapters.disk import DiskAdapter
from tests.kvd.disk.helpers import identity, item, value

CASES = Path(__file__).resolve().parents[2] / "cases" / "kvd"
VERSIONS = [1, 2]
FOLDER = CASES / f"disk-v{VERSIONS[-1]}"
BUDGET = 256 << 10
NOW_NS = 1_700_000_000_000_000_000
FAR_NS = 4_000_000_000_000_000_000

VALUES: dict[bytes, tuple[bytes, Retention, int]] = {
    identity(1): (b"hello, kv cache", Retention.LONG, NEVER),
    identity(2): (b"", Retention.LONG, NEVER),
    identity(3): (value(3, 5000), Retention.LONG, FAR_NS),
    identity(1, 1): (b"another namespace", Retention.LONG, NEVER),
    identity(4): (value(4, 3840), Retention.SHORT, NEVER),
    identity(5): (b"the newer value", Retention.LONG, NEVER),
}
"""What the store holds."""
GONE = [identity(6), identity(7)]
"""What was deleted."""


def make(folder: Path) -> None:
    """Write the store."""
    nonces = itertools.count(0x1122334455667701)
    adapter = DiskAdapter(
        "golden", folder, BUDGET, free_floor_bytes=0, io_mode="buffered", clock_ns=lambda: NOW_NS, nonce=lambda: next(nonces)
    )
    adapter.open()
    adapter.store([item(identity(5), b"the older value")])
    adapter.store([item(name, b"to be deleted") for name in GONE])
    adapter.store([item(name, data, kept, expires) for name, (data, kept, expires) in VALUES.items()])
    adapter.delete(GONE)
    adapter.close()
    (folder / "owner.lock").unlink()


if __name__ == "__main__":
    if FOLDER.exists() and any(FOLDER.iterdir()):
        sys.exit(f"{FOLDER} is there already, and is never made anew")
    make(FOLDER)
