"""What a command costs before it does anything: user and system time, in multiples of `python -c pass`.

The minimum of many runs: that is what the work costs, the rest is the machine's. Sources are byte-compiled first, as an
installation's are.
"""

import resource
import subprocess
import sys
from collections.abc import Iterator, Sequence

from tests.bench.measure import Result
from tests.support.processes import SCRIPTS, compile_sources

BUDGET = 8.0
COMMANDS = {
    ("kvctl", "list"): BUDGET,
    ("kvd", "--version"): 10.0,
    ("kvdoctor", "--version"): 10.0,
    ("kvtop", "--version"): 10.0,
}


def cpu_seconds(command: Sequence[str], runs: int = 7) -> float:
    """The least user and system time that `command` took."""
    best = float("inf")
    for _ in range(runs):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        best = min(best, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    return best


def measure(*, quick: bool = False) -> Iterator[Result]:
    """One result a command."""
    compile_sources()
    runs = 7 if quick else 25
    bare = cpu_seconds([sys.executable, "-c", "pass"], runs)
    for words, budget in COMMANDS.items():
        took = cpu_seconds([str(SCRIPTS / words[0]), *words[1:]], runs)
        name = " ".join(words)
        yield Result(f"startup.{name.replace(' ', '.')}", f"`{name}`, CPU", took, "s", bare, took / bare, budget, at_most=True)
