"""Fifteen minutes of every series, and rates from counters.

A history eats snapshots in order (`feed`) and answers for any series by key: the points kept, the rate now. It is fed and read
by one thread (the screen's, or the caller's of `--once`). Memory is what decides its shape: 100 segments make about 400 series,
so points live in `array('d')`, 7 KiB a series, and never as Python objects. A series that was not seen for a whole
window is dropped.

Counters become rates over the monotonic clock. A counter that went down means that its writer started anew: that
interval has no rate (not a negative one, not a huge one).
"""

from array import array
from collections.abc import Iterator, Sequence

from kvtop.snapshot import Snapshot

POINTS = 900
"""15 minutes at one reading a second."""

SMOOTH = 5
"""Rates for people are means over this many intervals: steady enough to read, quick enough to believe."""


class Ring:
    """The last `POINTS` numbers; grows in steps, so a short session stays small."""

    __slots__ = ("_data", "_start")

    def __init__(self) -> None:
        self._data = array("d")
        self._start = 0

    def push(self, value: float) -> None:
        if len(self._data) < POINTS:
            self._data.append(value)
        else:
            self._data[self._start] = value
            self._start = (self._start + 1) % POINTS

    def last(self, count: int) -> list[float]:
        """The newest `count` values, oldest first."""
        size = len(self._data)
        count = min(count, size)
        begin = (self._start + size - count) % size if size else 0
        if begin + count <= size:
            return self._data[begin : begin + count].tolist()
        return (self._data[begin:] + self._data[: begin + count - size]).tolist()

    def __len__(self) -> int:
        return len(self._data)


class History:
    """Points and rates by series key: 'segment/NAME/used', 'kvd.3f9a/hits_total', 'kvd.3f9a/tier_hits_total{tier=disk0}'."""

    def __init__(self) -> None:
        self._rings: dict[str, Ring] = {}
        self._counters: dict[str, tuple[float, float]] = {}
        self._seen: dict[str, int] = {}
        self._times: dict[str, Ring] = {}
        """When the points of a series were read, for those that are drawn with a time beside them."""
        self._tick = 0
        self.times = Ring()

    def feed(self, snapshot: Snapshot) -> None:
        """Take one snapshot in. Gauges are kept as they are; counters as rates, once there are two readings."""
        self._tick += 1
        self.times.push(snapshot.time_s)
        for segment in snapshot.segments:
            self._keep(f"segment/{segment.name}/used", segment.used_bytes)
            self._times.setdefault(f"segment/{segment.name}/used", Ring()).push(snapshot.time_s)
            self._keep(f"segment/{segment.name}/held", segment.held_bytes)
            self._keep(f"segment/{segment.name}/limit", segment.limit_bytes)
        for gpu in snapshot.gpus:
            if gpu.used_bytes >= 0:
                self._keep(f"gpu/{gpu.index}/used", gpu.used_bytes)
            if gpu.busy_percent >= 0:
                self._keep(f"gpu/{gpu.index}/busy", gpu.busy_percent)
        for process in snapshot.processes:
            if process.cpu_percent >= 0:
                self._keep(f"process/{process.pid}/cpu", process.cpu_percent)
        for engine in snapshot.engines:
            self._keep(f"engine/{engine.url}/running", engine.running)
            self._count(f"engine/{engine.url}/generated", engine.generated, snapshot.mono_s)
            self._count(f"engine/{engine.url}/prefix_queries", engine.prefix_queries, snapshot.mono_s)
            self._count(f"engine/{engine.url}/prefix_hits", engine.prefix_hits, snapshot.mono_s)
        for stats in snapshot.stats:
            prefix = stats.name
            for series, value in zip(stats.schema, stats.values, strict=False):
                if series.kind == "gauge":
                    self._keep(f"{prefix}/{series.key}", value)
                elif series.kind == "counter":
                    self._count(f"{prefix}/{series.key}", value, snapshot.mono_s)
        if self._tick % 60 == 0:
            self._forget()

    def _keep(self, key: str, value: float) -> None:
        ring = self._rings.get(key)
        if ring is None:
            ring = self._rings[key] = Ring()
        ring.push(value)
        self._seen[key] = self._tick

    def _count(self, key: str, value: float, mono_s: float) -> None:
        before = self._counters.get(key)
        self._counters[key] = (value, mono_s)
        self._seen[key] = self._tick
        if before is None:
            return
        elapsed = mono_s - before[1]
        if value >= before[0] and elapsed > 0:
            self._keep(key, (value - before[0]) / elapsed)

    def _forget(self) -> None:
        old = [key for key, tick in self._seen.items() if self._tick - tick > POINTS]
        for key in old:
            self._seen.pop(key, None)
            self._rings.pop(key, None)
            self._times.pop(key, None)
            self._counters.pop(key, None)

    def points(self, key: str, count: int = POINTS) -> list[float]:
        """The newest `count` points, oldest first: values of a gauge, rates of a counter. Empty when unknown."""
        ring = self._rings.get(key)
        return ring.last(count) if ring is not None else []

    def covered_s(self, key: str, count: int) -> float:
        """Seconds from the oldest to the newest of the last `count` points of a used-series, however far apart they were read."""
        ring = self._times.get(key)
        times = ring.last(count) if ring is not None else []
        return max(0.0, times[-1] - times[0]) if times else 0.0

    def rate(self, key: str, span: int = SMOOTH) -> float | None:
        """Mean of the last `span` rates of a counter; None before the second reading."""
        values = self.points(key, span)
        return sum(values) / len(values) if values else None

    def slope(self, key: str, span: int = SMOOTH) -> float | None:
        """How fast a gauge moves, per second, over the last `span` intervals; None before the second reading."""
        values = self.points(key, span + 1)
        times = self.times.last(len(values))
        if len(values) < 2 or times[-1] <= times[0]:
            return None
        return (values[-1] - values[0]) / (times[-1] - times[0])

    def ratio(self, part: str, rest: str, span: int = 30) -> float | None:
        """part / (part + rest) over the last `span` rates of two counters (a hit rate); None when nothing moved."""
        one, other = sum(self.points(part, span)), sum(self.points(rest, span))
        return one / (one + other) if one + other > 0 else None

    def ratios(self, part: str, rest: str, count: int) -> list[float]:
        """The hit rate point by point, for a sparkline; a point without look-ups repeats the one before."""
        ones, others = self.points(part, count), self.points(rest, count)
        size = min(len(ones), len(others))
        out: list[float] = []
        for one, other in zip(_tail(ones, size), _tail(others, size), strict=True):
            total = one + other
            out.append(one / total if total > 0 else out[-1] if out else 0.0)
        return out

    def __iter__(self) -> Iterator[str]:
        """Every series key that has points."""
        return iter(self._rings)


def _tail(values: Sequence[float], size: int) -> Sequence[float]:
    return values[len(values) - size :]
