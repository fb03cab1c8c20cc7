"""The connector's live numbers in shared memory: `/dev/shm/kvtools.connector.<pid>-<rank>`, one for each process.

kvtop and kvdoctor read them without asking the engine. A thread writes them twice a second and beats the heart; the
engine's threads only ever touch the counters. No room in shared memory costs the numbers, never the engine.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from kvd.connector.metrics import COUNTERS, REASONED, REASONS, Counters, split
from kvtools.errors import KvError
from kvtools.segments.files import SHM
from kvtools.segments.stats import Metric, StatsWriter, find_stats, remove_unlocked

logger = logging.getLogger("vllm.kvd")

PERIOD_S = 0.5

GAUGES = {
    "daemon_up": ("", "1 while the daemon is connected, 0 while it is looked for"),
    "loads_active": ("", "requests being loaded now"),
    "chunk_tokens": ("tokens", "tokens stored as one value"),
    "groups": ("", "cache groups stored"),
}


def _unit(name: str) -> str:
    return next((unit for unit in ("bytes", "seconds", "tokens") if name.endswith(f"_{unit}")), "")


def metrics() -> list[Metric]:
    """The schema: every counter as `<name>_total`, then the gauges."""
    counted = [
        Metric(f"{name}_total", "counter", _unit(name), text, float=name.endswith("_seconds")) for name, text in COUNTERS.items()
    ]
    for name, text in REASONED.items():
        counted += [Metric(f"{name}_total", "counter", "", text, {"reason": reason}) for reason in REASONS]
    return counted + [Metric(name, "gauge", unit, text) for name, (unit, text) in GAUGES.items()]


class Publisher:
    """Writes one segment until closed. `gauges` is asked each time; it must be quick and thread-safe."""

    def __init__(self, instance: str, counters: Counters, gauges: Callable[[], Mapping[str, int]], *, root: Path = SHM) -> None:
        self._counters = counters
        self._gauges = gauges
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        try:
            self._sweep(root)
            self._writer = StatsWriter("connector", instance, metrics(), root=root)
        except KvError as error:
            logger.warning("kvd: no numbers in shared memory: %s", error)
            return
        self._thread = threading.Thread(target=self._run, name="kvd-segment", daemon=True)
        self._thread.start()

    @staticmethod
    def _sweep(root: Path) -> None:
        """Remove what engines left that were killed: every engine has another name, so no successor would."""
        for path in find_stats(root, "connector"):
            remove_unlocked(path)

    def close(self) -> None:
        """Write the last numbers and remove the segment."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(timeout=2.0)
            self._thread = None
            self._writer.close()

    def _run(self) -> None:
        while True:
            self._write()
            if self._ended.wait(PERIOD_S):
                return

    def _write(self) -> None:
        writer = self._writer
        with writer.update():
            for key, value in self._counters.values().items():
                name, reason = split(key)
                writer.set(writer.index(f"{name}_total", **({"reason": reason} if reason else {})), value)
            for name, number in self._gauges().items():
                writer.set(writer.index(name), number)
        writer.heartbeat()
