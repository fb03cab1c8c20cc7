"""Four clients of one arena at once: batches put and read by all of them, in total, beside as many processes that copy.

Done by `kvd bench`'s own workers (`kvd.bench.clients`): the processes' copies between private buffers and their puts or gets
are timed in turn. On a machine of two cores the four, and the daemon, take turns on them.
"""

from collections.abc import Iterator

from kvd.bench import clients
from kvd.bench.own import Own
from kvtools.units import format_size
from tests.bench.arena import BUDGET, SIZES, pages_of_arenas
from tests.bench.measure import Result
from tests.support.daemon import Daemon

CLIENTS = 4


def measure(*, quick: bool = False) -> Iterator[Result]:
    """Two results a size: put and get, in bytes a second of all clients."""
    kind, pages = pages_of_arenas()
    daemon, own = Daemon(max_bytes="1GiB"), Own()
    try:
        daemon.start()
        for size in SIZES:
            for figure in clients.measure(own, daemon.socket, size, CLIENTS, 1.0 if quick else 6.0, lambda _: None):
                name = figure.name.replace(" ", ".")
                what = f"{figure.name}, {CLIENTS} clients, {format_size(size)}, pages of {pages}"
                yield Result(f"{name}.{size}.clients{kind}", what, figure.rate, "B/s", figure.floor, figure.ratio, BUDGET)
    finally:
        own.remove()
        daemon.remove()
