"""`python -m tests.bench`: measures, prints JSON lines and a table, and keeps the results.

    --quick        fewer rounds: a look, not a record
    --only NAME    this measurement (repeatable): startup, doctor, arena, crowd, control, room, figures, disk, adapters,
                   serde, policies, kvtop, gate, elastic, connector, ttft, throughput
    --json         JSON lines only
    --readme       also write the README's block
    --no-save      leave results.json and RESULTS.md as they are

Exit status 0 when everything that was measured reaches at least half its budget, else 1.
"""

import argparse
import contextlib
import importlib
import json
import sys
from collections.abc import Iterator

from tests.bench import report
from tests.bench.measure import Result
from tests.support.daemon import Daemon

MEASUREMENTS = (
    "startup",
    "doctor",
    "arena",
    "crowd",
    "control",
    "room",
    "figures",
    "disk",
    "adapters",
    "serde",
    "policies",
    "kvtop",
    "gate",
    "elastic",
    "connector",
    "ttft",
    "throughput",
)
"""Modules of this folder, in the order they run."""
ARENAS = {"arena": "1GiB", "control": "512MiB"}
"""Those that are given a client of a daemon with an arena of this size; the others bring all they need."""


def measure(name: str, *, quick: bool) -> Iterator[Result]:
    """The results of one measurement, as they come."""
    module = importlib.import_module(f"tests.bench.{name}")
    if name not in ARENAS:
        yield from module.measure(quick=quick)
        return
    daemon = Daemon(max_bytes=ARENAS[name])
    try:
        with contextlib.closing(daemon.start().client(namespace="bench")) as client:
            yield from module.measure(client, quick=quick)
    finally:
        daemon.remove()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", action="append", choices=MEASUREMENTS, default=[])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--readme", action="store_true")
    parser.add_argument("--no-save", action="store_true")
    options = parser.parse_args()
    results = []
    for name in options.only or MEASUREMENTS:
        for result in measure(name, quick=options.quick):
            print(json.dumps(result.as_json()), flush=True)
            results.append(result)
    if not options.json:
        print("\n" + report.table(result.as_json() for result in results))
    if not options.no_save and not options.quick:
        report.save(results)
    if options.readme:
        from tests.support import generated

        generated.main(["--write"])
    return 0 if all(result.half for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
