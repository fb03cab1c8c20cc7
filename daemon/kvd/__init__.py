"""kvd: the KV offload daemon, its client and its vLLM connector.

    from kvd import Client
    with Client() as kv:
        kv.put(key, data)          # key: 32 bytes
        kv.get(key)

app         kvd's commands, their flags
options     those of kvd serve
commands    what they do
engine_commands  those about an engine: is it working, why is this prompt not found
engines     asking an engine's own server, and telling what it is
status      what `kvd status` says: one health word, the reasons, what is stored
sizing      what `kvd size` says: what more RAM would bring
service     what runs: server, operations, stats, the daemon's life
wire        what travels: protocol, client
store       what is in RAM: decides, no I/O
tiers       what lies below: adapters, promotion, breakers
connector   what runs inside the engine
bench       what this host can do: kvd bench
demo        the daemon's story in a minute: make demo
errors      the exception tree
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvd.wire.aclient import AsyncClient
    from kvd.wire.client import Client, PrefixResult, PutResult
    from kvd.wire.leases import ReadLease, WriteLease

_HOMES = {
    "AsyncClient": "kvd.wire.aclient",
    "Client": "kvd.wire.client",
    "PrefixResult": "kvd.wire.client",
    "PutResult": "kvd.wire.client",
    "ReadLease": "kvd.wire.leases",
    "WriteLease": "kvd.wire.leases",
}

__all__ = ["AsyncClient", "Client", "PrefixResult", "PutResult", "ReadLease", "WriteLease"]


def __getattr__(name: str) -> Any:
    # Resolved when used: `import kvd.connector` inside an engine must not import a client it may not need.
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'kvd' has no attribute {name!r}")
