"""Stats segments: a process's live numbers, readable by anyone, in a file that describes itself.

Format (FORMAT.md, "Stats segment"): `/dev/shm/kvtools.<kind>.<instance>`, a 128-byte header, a JSON schema, then one 8-byte
value for each schema entry. Because the schema travels with the values, any version of a reader reads any version of a
writer. This module is the door: what others use, from three rooms behind it.

stats_format   constants, Metric, StatsReading, names
stats_writer   StatsWriter, and the removal of what a dead one left
stats_reader   read_stats, StatsReader, find_stats
"""

from kvtools.segments.stats_format import (
    HEADER,
    HEADER_BYTES,
    MAGIC,
    MAX_LABEL_SETS,
    OTHER,
    READ_ATTEMPTS,
    SUPERSEDED,
    TYPES,
    Labels,
    Metric,
    StatsReading,
    instance_of_path,
    instance_of_pool,
    stats_name,
)
from kvtools.segments.stats_reader import StatsReader, find_stats, read_stats
from kvtools.segments.stats_writer import StatsWriter, remove_unlocked

__all__ = [
    "HEADER",
    "HEADER_BYTES",
    "MAGIC",
    "MAX_LABEL_SETS",
    "OTHER",
    "READ_ATTEMPTS",
    "SUPERSEDED",
    "TYPES",
    "Labels",
    "Metric",
    "StatsReader",
    "StatsReading",
    "StatsWriter",
    "find_stats",
    "instance_of_path",
    "instance_of_pool",
    "read_stats",
    "remove_unlocked",
    "stats_name",
]
