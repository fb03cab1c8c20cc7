"""`kvtools demo`: the daemon, its restart, a pool segment and the dashboard, on this machine, in a minute.

app      the command
story    the daemon's story: put, get, restart, the bytes are back
daemon   starts and stops a `kvd serve` of its own
pool     a pool segment with this process as its engine
engine   the same story with a real vLLM (`--engine`)
"""
