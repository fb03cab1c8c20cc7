"""`kvd bench`: what this host can do, each figure beside its floor in the same run.

run       which measurements, in which order; their table, JSON and plain sentence
own       what the bench starts and makes, daemon and folders, and that it is all gone again however the bench ends
figures   one measurement beside its floor, timing in turn, the progress bar
arena     batches through the arena beside the same copies between two private buffers
clients   the same from many processes at once
control   questions and single values beside a bare server over the same socket
floor     that server
disk      stores to and loads from a tier beside the raw device; a tiny get beside synced writes
reload    how long a model's prefix takes to come back, as a sentence

Ratios count, not rates: both sides are timed in turn, so that a noisy neighbour slows both alike.
"""
