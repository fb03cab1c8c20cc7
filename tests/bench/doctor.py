"""What a look at a host takes: the whole run here with every tool it would use, and judging a capture.

The whole run is wall time, because it waits for children; judging a capture is CPU time, because it waits for nothing and a busy
machine shall not count. The least of several runs each. The whole run looks at a real directory; the capture is
`tests/cases/doctor/00-base-amd-good` with all of an AMD host's files.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.bench.measure import Result
from tests.bench.startup import cpu_seconds
from tests.kvdoctor.conftest import CASES, lay_out
from tests.support.processes import SCRIPTS, compile_sources

WHOLE_S, CAPTURE_S = 2.0, 0.15


def _least(command: Sequence[str], runs: int) -> float:
    best = float("inf")
    for _ in range(runs):
        start = time.perf_counter()
        subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        best = min(best, time.perf_counter() - start)
    return best


def measure(*, quick: bool = False) -> Iterator[Result]:
    """Two results."""
    compile_sources()
    runs = 5 if quick else 15
    with tempfile.TemporaryDirectory() as folder:
        capture = Path(folder) / "case"
        lay_out(CASES / "00-base-amd-good", capture)
        bare = _least([sys.executable, "-c", "pass"], runs)
        whole = _least([str(SCRIPTS / "kvdoctor"), "--path", folder], runs)
        judged = cpu_seconds([str(SCRIPTS / "kvdoctor"), "--from", str(capture)], runs)
    yield Result("doctor.whole", "`kvdoctor --path DIR`, wall", whole, "s", bare, whole / WHOLE_S, 1.0, at_most=True)
    yield Result("doctor.capture", "`kvdoctor --from CAPTURE`, CPU", judged, "s", bare, judged / CAPTURE_S, 1.0, at_most=True)
