"""What travels between an engine and the daemon.

protocol    the messages, framing and limits (daemon/FORMAT.md, "The wire")
connection  one connection of a client: handshake, requests in flight, answers
mapping     a client's view of the arena
client      Client: synchronous, thread-safe, reconnects
putter      a client's puts: windows, extents lent ahead
aclient     AsyncClient: the same for asyncio
leases      ReadLease and WriteLease: zero-copy views with an end
direct      DirectRead and DirectWrite: parts of a tier's files, for I/O past the daemon
"""
