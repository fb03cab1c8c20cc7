"""What lies in shared memory: pool segments, owner sidecars, stats segments. Standard library only. Formats: FORMAT.md.

files      opening, naming and locking files in /dev/shm, safely
pool       the 24 bytes of a pool: limit, used, prealloc
owner      the sidecar: who owns a pool, and the limits it was given
stats      self-describing live numbers of daemons and engines: the door to stats_format, stats_writer and stats_reader
discover   all of it in one call, with what dead processes left
"""
