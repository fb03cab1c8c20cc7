"""What an entry costs beside its bytes: at most 256 bytes, dict, key and growth included; and it comes back."""

import pytest

from tests.support.processes import run_python

MEASURE = """
import os
from kvd.store.index import Index
from kvd.store.retention import Retention

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) * 1024

count, ttl = {count}, {ttl}
index = Index(scan_resistant={scan_resistant})
space = index.namespace(bytes(32))
before = anonymous()
for i in range(count):
    index.add(space, os.urandom(32), i, 1, Retention.LONG, 10**18 + i * 10**5 if ttl else 0)
if index.queues is not None:  # what it remembers of as many that have left
    for i in range(count):
        index.queues.ghost.add(os.urandom(32), count)
print((anonymous() - before) / count)
"""


@pytest.mark.parametrize(
    ("count", "ttl", "scan_resistant"), [(260_000, False, False), (140_000, True, False), (260_000, False, True)]
)
def test_an_entry_costs_at_most_256_bytes(count: int, ttl: bool, scan_resistant: bool) -> None:
    """The first count is just past a doubling of the columns. An expiry is a few bytes in a bucket of its second."""
    run = run_python(MEASURE.format(count=count, ttl=ttl, scan_resistant=scan_resistant))
    assert run.rc == 0, run.stderr
    cost = float(run.stdout)
    assert cost <= 256, f"{cost:.0f} bytes an entry"
