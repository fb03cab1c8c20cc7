"""What a stats segment means: the daemon and its tiers, read from names, and whatever has no name here.

`Daemon.of(stats)` picks the known names out of a kvd stats segment. A name that is missing is `None` or empty (an older or newer
daemon), and every value that no field took is in `others`, so that nothing a writer publishes is hidden from the screen.
Pure functions over snapshots.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvtop.snapshot import Stats


@dataclass(frozen=True, slots=True)
class Tier:
    """One tier of one daemon: `values` by metric name without its labels."""

    daemon: str
    name: str
    type: str
    values: Mapping[str, float]
    keys: Mapping[str, str]
    """History key of each value."""

    def get(self, name: str, default: float = 0.0) -> float:
        return self.values.get(name, default)

    @property
    def used_bytes(self) -> float:
        return self.get("tier_bytes_used")

    @property
    def limit_bytes(self) -> float:
        return self.get("tier_bytes_limit")

    @property
    def usage_known(self) -> bool:
        """False where nobody can say what the tier holds: its bytes and entries are 0 then, and mean nothing."""
        return self.get("tier_usage_known", 1.0) > 0

    @property
    def broken(self) -> bool:
        """Whether its circuit breaker is open."""
        return self.get("tier_breaker_open") > 0


@dataclass(frozen=True, slots=True)
class Daemon:
    """A kvd, as its stats segment tells it."""

    stats: Stats
    values: Mapping[str, float]
    """Unlabelled values by name."""
    tiers: tuple[Tier, ...]
    labelled: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """name -> label text -> value, for labelled values that are not a tier's (rejections_total by reason)."""

    @property
    def name(self) -> str:
        return self.stats.name

    def get(self, name: str, default: float = 0.0) -> float:
        return self.values.get(name, default)

    def key(self, name: str) -> str:
        """History key of an unlabelled value."""
        return f"{self.stats.name}/{name}"

    @property
    def hit_ratio(self) -> float | None:
        """hits / (hits + misses) since the daemon started."""
        total = self.get("hits_total") + self.get("misses_total")
        return self.get("hits_total") / total if total > 0 else None

    @property
    def rejections(self) -> float:
        return sum(self.labelled.get("rejections_total", {}).values()) + self.get("rejections_total")


def daemon_of(stats: Stats) -> Daemon:
    """The daemon that a stats segment of kind kvd describes."""
    values: dict[str, float] = {}
    labelled: dict[str, dict[str, float]] = {}
    tiers: dict[str, tuple[dict[str, float], dict[str, str], str]] = {}
    for series, value in zip(stats.schema, stats.values, strict=False):
        if series.kind == "bucket":
            continue
        if not series.labels:
            values[series.name] = value
            continue
        labels = dict(series.labels)
        if "tier" in labels and series.name.startswith("tier_"):
            found = tiers.setdefault(labels["tier"], ({}, {}, labels.get("type", "")))
            # A further label (a reason, an operation) is summed here and shown in full in the metrics view.
            found[0][series.name] = found[0].get(series.name, 0.0) + value
            found[1].setdefault(series.name, f"{stats.name}/{series.key}")
            continue
        text = ",".join(f"{k}={v}" for k, v in series.labels)
        labelled.setdefault(series.name, {})[text] = value
    made = tuple(Tier(stats.name, name, kind, seen, keys) for name, (seen, keys, kind) in tiers.items())
    return Daemon(stats, values, made, labelled)


def quantiles(stats: Stats, name: str, wanted: tuple[float, ...], labels: Mapping[str, str] | None = None) -> list[float] | None:
    """Quantiles in seconds of the histogram `name` (buckets labelled `le`), by linear interpolation inside a bucket.

    Buckets count as Prometheus counts: each holds everything up to its `le`. Labels not asked for are summed over. None where
    there is no such histogram or nothing in it. A quantile in the last, unbounded bucket is that bucket's lower edge.
    """
    sums: dict[float, float] = {}
    for series, value in zip(stats.schema, stats.values, strict=False):
        if series.kind != "bucket" or series.name != name:
            continue
        found = dict(series.labels)
        edge = _edge(found.pop("le", ""))
        if edge is None or any(found.get(k) != v for k, v in (labels or {}).items()):
            continue
        sums[edge] = sums.get(edge, 0.0) + value
    edges = sorted(sums)
    total = sums[edges[-1]] if edges else 0.0
    if total <= 0:
        return None
    out = []
    for share in wanted:
        target, below, low = share * total, 0.0, 0.0
        for edge in edges:
            if sums[edge] >= target and sums[edge] > below:
                inside = (target - below) / (sums[edge] - below)
                out.append(low if math.isinf(edge) else low + (edge - low) * max(0.0, inside))
                break
            below, low = sums[edge], edge if not math.isinf(edge) else low
        else:
            out.append(low)
    return out


def histograms(stats: Stats) -> dict[str, list[dict[str, str]]]:
    """Each histogram's name -> the label sets it has (without `le`), in schema order."""
    found: dict[str, list[dict[str, str]]] = {}
    for series in stats.schema:
        if series.kind != "bucket":
            continue
        labels = {k: v for k, v in series.labels if k != "le"}
        sets = found.setdefault(series.name, [])
        if labels not in sets:
            sets.append(labels)
    return found


def state_word(text: str, value: float) -> str:
    """The word for a numbered state, from a description that lists them: 'What it is: 0 awake, 1 asleep'."""
    words: dict[str, str] = dict(re.findall(r"\b(\d+) ([a-z_-]+)", text))
    return words.get(f"{value:.0f}", f"{value:.0f}")


def _edge(text: str) -> float | None:
    if text in ("+Inf", "inf", "Inf"):
        return math.inf
    try:
        return float(text)
    except ValueError:
        return None
