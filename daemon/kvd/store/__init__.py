"""What is in RAM: decides, and does no I/O.

identity   what a value is stored under: 64 bytes, namespace and key
retention  how long a value may live: classes, expiry
arena      one shared memory object the engines map, and the daemon's view of it
extents    which bytes of the arena are free
index      identity -> entry, least recently used first, per retention class
leases     pins on bytes: read leases, write leases, tokens, quarantine
store      the decisions: what is stored, found, evicted, refused
"""
