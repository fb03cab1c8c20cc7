"""Which measurements, in which order, and what is printed: a table and the sentence, or one JSON object."""

import json as text
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kvd.bench import arena, clients, control, disk, reload
from kvd.bench.figures import Figure, Progress
from kvd.bench.own import Own
from kvd.bench.reload import Prefix
from kvd.tiers.adapters import registry
from kvd.wire.client import Client
from kvtools import __version__
from kvtools.errors import UsageError
from kvtools.interrupts import terminate_as_interrupt
from kvtools.output import emit, emit_json, table
from kvtools.units import format_size, parse_size

LEAST_ARENA = 512 << 20
MAX_SIZE = 256 << 20


@dataclass(frozen=True)
class Plan:
    """What was asked for."""

    socket: Path | None
    path: Path | None
    adapters: Sequence[registry.Spec]
    sizes: Sequence[int]
    clients: int
    seconds: float
    prefix: Prefix | None

    def __post_init__(self) -> None:
        if not self.seconds < math.inf:  # nan, too
            raise UsageError("--seconds is no number of seconds", hint="from 0.1 to 60")
        if self.path is not None and not self.path.is_dir():
            raise UsageError(f"--path {self.path} is not a directory", hint="name a directory on the disk to measure")
        if self.socket is not None and self.adapters:
            raise UsageError("--adapter needs a daemon of the bench's own", hint="leave out --socket")
        for size in self.sizes:
            if not 4096 < size <= MAX_SIZE:
                raise UsageError(f"cannot measure values of {format_size(size)}", hint="sizes above 4KiB and up to 256MiB")
        registry.build(self.adapters)  # what cannot be meant is said before anything starts

    @property
    def arena_bytes(self) -> int:
        """For a daemon that is measured: room for every batch, old and new, and for the prefix."""
        most = max(self.sizes)
        crowd = self.clients * max(clients.batch_bytes(size, self.clients) for size in self.sizes)
        return max(LEAST_ARENA, 4 * most, 3 * crowd, 2 * (self.prefix.sample_bytes if self.prefix else 0))

    @property
    def tier_bytes(self) -> int:
        return 8 * max(arena.BATCH_BYTES, 2 * max(self.sizes), self.prefix.sample_bytes if self.prefix else 0)

    @property
    def tiers(self) -> int:
        return (self.path is not None) + len(self.adapters)

    @property
    def steps(self) -> int:
        each = 2 + 2 * (self.clients > 1) + 2 * self.tiers
        ours = self.path is not None and self.socket is None
        return 3 + each * len(self.sizes) + ours + (1 + self.tiers if self.prefix else 0)


def plan(
    socket: Path | None,
    path: Path | None,
    adapters: Sequence[str],
    sizes: Sequence[str],
    many: int,
    seconds: float,
    prefix: Prefix | None,
) -> Plan:
    """A plan of the words as given. Raises UsageError for what cannot be measured."""
    specs = [registry.parse_spec(one, "--adapter") for one in adapters]
    return Plan(socket, path, specs, [parse_size(size) for size in sizes], many, seconds, prefix)


def run(wanted: Plan, json: bool) -> None:
    """Measure and print; nothing the bench made is left, however it ends."""
    terminate_as_interrupt(once=True)
    own, bar = Own(), Progress(wanted.steps)
    try:
        bench = Bench(own, wanted, bar)
        figures = list(bench.figures())
    finally:
        bar.end()
        own.remove()
    line = reload.sentence(wanted.prefix, bench.places) if wanted.prefix else ""
    if json:
        emit_json("kvd.bench/1", _body(wanted, figures, bench, line))
        return
    header = ("WHAT", "VALUE", "CLIENTS", "MEASURED", "FLOOR", "RATIO", "FLOOR IS")
    rows = [_row(figure) for figure in figures]
    for one in table(header, rows, right=(1, 2, 3, 4, 5)):
        emit(one)
    if line:
        emit()
        emit(line)


def _row(figure: Figure) -> tuple[str, ...]:
    size = format_size(figure.size) if figure.size else "-"
    measured, floor = figure.shown(figure.rate), figure.shown(figure.floor)
    return figure.name, size, str(figure.clients), measured, floor, f"{figure.ratio:.2f}", figure.floor_is


def _body(wanted: Plan, figures: list[Figure], bench: "Bench", line: str) -> dict[str, object]:
    body: dict[str, object] = {
        "server": f"kvd {__version__}",
        "cpus": len(os.sched_getaffinity(0)),
        "figures": [asdict(figure) for figure in figures],
    }
    if wanted.prefix:
        body["prefix"] = {**asdict(wanted.prefix), "bytes": wanted.prefix.bytes, "reload_s": bench.places}
        body["sentence"] = line
    return body


class Bench:
    """One run. `places`: seconds a prefix takes to reload, by where from."""

    def __init__(self, own: Own, wanted: Plan, bar: Progress) -> None:
        self.own = own
        self.plan = wanted
        self.bar = bar
        self.places: dict[str, float] = {}

    def figures(self) -> Iterator[Figure]:
        """All of them, as they are measured."""
        yield from self._arena()
        yield from self._disk()
        names = [adapter.name for adapter in registry.build(self.plan.adapters, taken=["disk"] if self.plan.path else [])]
        for name, spec in zip(names, self.plan.adapters, strict=True):
            yield from self._adapter(name, spec)
        if reload.ARENA in self.places:  # last in the sentence: what lies below is the news
            self.places[reload.ARENA] = self.places.pop(reload.ARENA)

    def _arena(self) -> Iterator[Figure]:
        wanted, part = self.plan, self.own.part()
        client = self._client(part)
        for size in wanted.sizes:
            shown = format_size(size)
            yield from arena.measure(client, size, wanted.seconds, self.bar.of(shown))
            if wanted.clients > 1:
                step = self.bar.of(f"{shown}, {wanted.clients} clients")
                yield from clients.measure(part, client.path, size, wanted.clients, wanted.seconds, step)
        yield from control.measure(part, client, wanted.seconds, self.bar.step)
        self._reload(client, reload.ARENA)
        if wanted.socket is None:
            part.remove()

    def _client(self, part: Own, *words: str, env: dict[str, str] | None = None) -> Client:
        if self.plan.socket is None:
            return part.daemon(*words, max_bytes=self.plan.arena_bytes, env=env)
        client = part.client(self.plan.socket)
        client.ping()
        return client

    def _disk(self) -> Iterator[Figure]:
        wanted, path = self.plan, self.plan.path
        if path is None:
            return
        disk.say_where(path)
        part = self.own.part()
        words: tuple[str, ...] = ()
        if wanted.socket is None:
            words = ("--long-path", str(part.folder(path)), "--long-bytes", str(wanted.tier_bytes))
        yield from self._tier(part, self._client(part, *words), "disk", path)
        part.remove()
        if wanted.socket is None:
            words = ("--long-path", str(part.folder(path)), "--long-bytes", str(wanted.tier_bytes), "--durability", "fsync")
            client = self._client(part, *words)
            yield disk.wait(part, client.path, client, wanted.seconds, self.bar.step)
            part.remove()

    def _adapter(self, name: str, spec: registry.Spec) -> Iterator[Figure]:
        part = self.own.part()
        folder = disk.folder_of(part, spec)
        client = self._client(part, env={"KVD_L2_ADAPTER": text.dumps(dict(spec))})
        yield from self._tier(part, client, name, folder, disk.floats_of(spec))
        part.remove()

    def _tier(self, part: Own, client: Client, name: str, folder: Path | None, floats: str | None = None) -> Iterator[Figure]:
        disk.check_works(client, name)
        for size in self.plan.sizes:
            step = self.bar.of(format_size(size))
            yield from disk.measure(part, client, name, folder, size, self.plan.seconds, step, floats)
        self._reload(client, name)

    def _reload(self, client: Client, place: str) -> None:
        if self.plan.prefix is not None:
            self.bar.step(f"a prefix from {place}")
            self.places[place] = reload.reload_s(client, self.plan.prefix, below=place != reload.ARENA)
