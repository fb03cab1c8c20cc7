"""What runs: the daemon's process.

daemon      puts arena, store, tiers and server together; signals, drain, readiness
server      the socket: who may come in, the handshake, frames in and out
peers       whose process is at the other end, and when it is gone
operations  one method a request: store first, tiers where the store has nothing
stats       the stats segment: names, meanings, and how they are filled
"""
