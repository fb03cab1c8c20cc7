"""The gate's numbers in shared memory: the stats segment `kvtools.gate.<instance>`, which kvtop and kvdoctor read.

Twice a second the table of metrics.py is written inside one `update`, so a reader sees one moment. The instance is named
after the configuration's path: a restarted gate takes over its own segment, two gates never share one. A segment that
cannot be made (no room, another gate on the same file) is said once in the log and costs nothing else.

Concurrency: one task, the only writer.
"""

import asyncio
import logging
from collections import defaultdict
from pathlib import Path

from kvgate.metrics import Row, table
from kvgate.router import Router
from kvtools.errors import KvError
from kvtools.segments.files import SHM
from kvtools.segments.stats import Labels, StatsWriter, instance_of_path

log = logging.getLogger("kvgate.publish")
INTERVAL_S = 0.5


class Publisher:
    """Writes the segment for one router."""

    def __init__(self, router: Router, config: Path, *, root: Path = SHM) -> None:
        self._router = router
        self._instance = instance_of_path(config)
        self._root = root
        self._writer: StatsWriter | None = None
        self._identities: list[tuple[str, Labels]] = []
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Make the segment and begin to write."""
        rows = list(table(self._router))
        try:
            self._writer = StatsWriter("gate", self._instance, [row.metric for row in rows], root=self._root)
        except KvError as error:
            log.warning("no stats segment: %s", error.message)
            return
        self._identities = [row.metric.identity for row in rows]
        self._write(rows)
        self._task = asyncio.create_task(self._run(), name="stats segment")

    async def stop(self) -> None:
        """Remove the segment."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._writer is not None:
            self._writer.close()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            try:
                self._write(list(table(self._router)))
            except KvError as error:
                # No room for a longer schema after a reload: the old one goes on, without the new models.
                log.warning("stats segment: %s", error.message)

    def _write(self, rows: list[Row]) -> None:
        writer = self._writer
        assert writer is not None
        identities = [row.metric.identity for row in rows]
        if identities != self._identities:
            writer.reshape([row.metric for row in rows])
            self._identities = identities
        # Several models may share one entry ("other"), so values are added up before they are stored.
        values: dict[int, float] = defaultdict(float)
        for row in rows:
            values[writer.index(row.metric.name, **row.metric.labels)] += row.value
        with writer.update():
            for i, value in values.items():
                writer.set(i, value)
        writer.heartbeat()
