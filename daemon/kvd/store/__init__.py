"""What is in RAM: decides, and does no I/O.

identity   what a value is stored under: 64 bytes, namespace and key
retention  how long a value may live: classes, expiry
arena      one shared memory object the engines map, and the daemon's view of it
slab       the same on an NVMe drive
extents    which bytes of the arena are free
compact    which values to move, so that scattered free pages become one run
index      identity -> entry, least recently used first, per retention class
table      identity -> row number, packed: what adapters with an index in memory look up by
accounts   who uses what: figures a namespace, a bounded number of them
tombstones why values are gone: the last fates, for kvd why
s3fifo     an eviction order that a scan does not upset
reuse      how much would be found with more RAM, or less
expiry     what expires when, at a few bytes a value
leases     pins on bytes: read leases, extents lent for writing, quarantine
shortage   who wants room that is not there, and what must happen before it is
store      the decisions: what is stored, found, evicted, refused
room       room that takes more than one go: slices of evictions, pages being faulted in, moves (the one that waits)
"""
