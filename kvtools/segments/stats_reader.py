"""Reading stats segments, once (`read_stats`) or again and again (`StatsReader`).

A reader that meets an odd or changed sequence tries again, at most 8 times, then takes what it sees and says `stale`.
Readers never map a file: its owner could truncate it under them. Sizes in the file are bounded before they are believed.

Failure: NotFound (no such segment, or no more), Unreachable (it cannot be opened, or is unsound: says how). Concurrency: a
`StatsReader` belongs to one thread at a time.
"""

import json
import os
import struct
import time
from pathlib import Path
from typing import Self

from kvtools.errors import Unreachable
from kvtools.output import printable
from kvtools.segments.files import SHM, STATS_PREFIX, encodable, held_for_life, open_file, still_named
from kvtools.segments.stats_format import (
    HEADER,
    HEADER_BYTES,
    MAGIC,
    MAX_FILE_BYTES,
    MAX_VALUES,
    READ_ATTEMPTS,
    SEQUENCE_OFFSET,
    SUPERSEDED,
    Labels,
    Metric,
    StatsReading,
    from_json,
)


def find_stats(root: Path = SHM, kind: str | None = None) -> list[Path]:
    """Paths of all stats segments in `root` (of one kind), sorted; contents unseen."""
    prefix = STATS_PREFIX + (f"{kind}." if kind else "")
    try:
        names = sorted(path.name for path in root.iterdir())
    except OSError as error:
        raise Unreachable(f"cannot read {root}: {error.strerror}", hint="shared memory must be mounted there") from None
    return [root / name for name in names if name.startswith(prefix) and name.count(".") >= 2]


class StatsReader:
    """Keeps one stats segment open for cheap repeated reads; follows it when its writer reshapes or restarts.

    The schema is parsed once a file. The file stays open, not mapped: read(2) of a few KiB costs microseconds, and a mapping
    of a file that its owner truncates would kill this process with SIGBUS.
    """

    def __init__(self, name: str | Path, root: Path = SHM) -> None:
        self.path = name if isinstance(name, Path) else root / name
        self._fd = -1
        self._schema: list[Metric] = []
        self._index: dict[tuple[str, Labels], int] = {}
        self._floats: list[int] = []
        self._unpack = struct.Struct("")
        self._start = 0
        self._size = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; the next `read` opens it again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def read(self) -> StatsReading:
        """The numbers as they are now. Raises NotFound when no such segment exists (any more), Unreachable when it is unsound."""
        for _ in range(READ_ATTEMPTS):
            if self._fd < 0:
                self._open()
            alive = held_for_life(self._fd)
            reading = self._read(alive)
            # A superseded file will have a successor under its name in a moment; a dead one may have one already.
            if not (alive and reading.superseded) and (alive or still_named(self._fd, self.path)):
                return reading
            self.close()
            time.sleep(0.0005)
        if self._fd < 0:
            self._open()
        return self._read(held_for_life(self._fd))

    def _open(self) -> None:
        self._fd = open_file(self.path.name, os.O_RDONLY, root=self.path.parent, what="stats segment")
        try:
            self._learn()
        except BaseException:
            self.close()
            raise

    def _learn(self) -> None:
        size = os.fstat(self._fd).st_size
        data = os.pread(self._fd, min(size, MAX_FILE_BYTES + 1), 0)
        if len(data) < HEADER_BYTES or not data.startswith(MAGIC) or len(data) > MAX_FILE_BYTES:
            raise self._unsound("no header")
        _, header, schema_bytes, count, *_ = HEADER.unpack_from(data)
        start = header + (schema_bytes + 7 & ~7)
        if header < HEADER_BYTES or count > MAX_VALUES or start + 8 * count > len(data):
            raise self._unsound("shorter than its header says")
        try:
            entries = encodable(json.loads(data[header : header + schema_bytes]))
            self._schema = [from_json(entry) for entry in entries]
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            raise self._unsound(f"its schema does not parse ({type(error).__name__})") from None
        if len(self._schema) != count:
            raise self._unsound(f"{len(self._schema)} names for {count} values")
        self._index = {m.identity: i for i, m in enumerate(self._schema)}
        self._floats = [i for i, m in enumerate(self._schema) if m.float]
        self._unpack = struct.Struct(f"<{count}Q")
        self._start, self._size = start, start + 8 * count

    def _read(self, alive: bool) -> StatsReading:
        stale = True
        data = b""
        for attempt in range(READ_ATTEMPTS):
            data = os.pread(self._fd, self._size, 0)
            if len(data) < self._size:
                raise self._unsound("it was cut")
            sequence = HEADER.unpack_from(data)[-1]
            again = int.from_bytes(os.pread(self._fd, 8, SEQUENCE_OFFSET), "little")
            if sequence % 2 == 0 and sequence == again:
                stale = False
                break
            if not alive:
                break  # nobody will ever finish that update
            if attempt:
                time.sleep(0.0002)
        _, _, _, _, flags, pid, start, namespace, created, heartbeat, _ = HEADER.unpack_from(data)
        values: list[int | float] = list(self._unpack.unpack_from(data, self._start))
        for i in self._floats:
            values[i] = struct.unpack_from("<d", data, self._start + 8 * i)[0]
        kind, _, instance = self.path.name.removeprefix(STATS_PREFIX).partition(".")
        return StatsReading(
            self.path.name, kind, instance, pid, start, namespace, created, heartbeat,
            bool(flags & SUPERSEDED), alive, stale, self._schema, values, self._index,
        )  # fmt: skip

    def _unsound(self, why: str) -> Unreachable:
        return Unreachable(f"{printable(self.path.name)} is not a sound stats segment: {why}")


def read_stats(name: str | Path, root: Path = SHM) -> StatsReading:
    """One reading of the stats segment `name` (a name in `root`, or a path). Raises NotFound, Unreachable."""
    with StatsReader(name, root) as reader:
        return reader.read()
