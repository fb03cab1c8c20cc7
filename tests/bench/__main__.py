"""`python -m tests.bench`: measures, prints JSON lines and a table, and keeps the results.

    --quick        fewer rounds: a look, not a record
    --only NAME    this measurement (repeatable): startup, arena, control, disk, gate, kvtop, ttft
    --json         JSON lines only
    --readme       also write the README's block
    --no-save      leave results.json and RESULTS.md as they are

Exit status 0 when everything that was measured reaches at least half its budget, else 1.
"""

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator

from tests.bench import report
from tests.bench.measure import Result
from tests.support.daemon import Daemon


def _startup(quick: bool) -> Iterator[Result]:
    from tests.bench import startup

    yield from startup.measure(quick=quick)


def _arena(quick: bool) -> Iterator[Result]:
    from tests.bench import arena

    with _daemon("1GiB") as daemon, contextlib.closing(daemon.client(namespace="bench")) as client:
        yield from arena.measure(client, quick=quick)


def _control(quick: bool) -> Iterator[Result]:
    from tests.bench import control

    with _daemon("512MiB") as daemon, contextlib.closing(daemon.client(namespace="bench")) as client:
        yield from control.measure(client, quick=quick)


def _disk(quick: bool) -> Iterator[Result]:
    from tests.bench import disk

    yield from disk.measure(quick=quick)


def _kvtop(quick: bool) -> Iterator[Result]:
    from tests.bench import kvtop

    yield from kvtop.measure(quick=quick)


def _ttft(quick: bool) -> Iterator[Result]:
    from tests.bench import ttft

    yield from ttft.measure(quick=quick)


def _gate(quick: bool) -> Iterator[Result]:
    from tests.bench import gate

    yield from gate.measure(quick=quick)


@contextlib.contextmanager
def _daemon(max_bytes: str) -> Iterator[Daemon]:
    daemon = Daemon(max_bytes=max_bytes)
    try:
        yield daemon.start()
    finally:
        daemon.remove()


MEASUREMENTS: dict[str, Callable[[bool], Iterator[Result]]] = {
    "startup": _startup,
    "arena": _arena,
    "control": _control,
    "disk": _disk,
    "gate": _gate,
    "kvtop": _kvtop,
    "ttft": _ttft,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", action="append", choices=list(MEASUREMENTS), default=[])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--readme", action="store_true")
    parser.add_argument("--no-save", action="store_true")
    options = parser.parse_args()
    results = []
    for name in options.only or MEASUREMENTS:
        for result in MEASUREMENTS[name](options.quick):
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
