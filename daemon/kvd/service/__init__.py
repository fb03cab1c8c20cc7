"""What runs: the daemon's process.

settings    flags, environment, file and defaults, turned into options; the process around the daemon
daemon      puts arena, store, tiers and server together; signals, drain, readiness
server      the socket: who may come in, the handshake, frames in and out
peers       whose process is at the other end, and when it is gone
faults      what no request may ask for: sizes and lengths, checked before anything is touched
operations  one method a request: store first, tiers where the store has nothing
writing     requests that write, and the waiting for their room
gather      pinning a run of keys in RAM while the rest comes up from tiers
direct      parts of a tier's files, lent and held for I/O past the daemon (GPU-direct)
rounds      listing and clearing everything in small steps
http        /metrics, /healthz and /readyz
histogram   latencies as cumulative buckets
stats       the stats segment: names, meanings, and how they are filled
"""
