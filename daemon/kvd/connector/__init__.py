"""The vLLM connector: warm prefixes from the daemon, for every engine on the host.

    --kv-transfer-config '{"kv_connector":"KvdConnector","kv_role":"kv_both","kv_connector_module_path":"kvd.connector"}'

    connector     KvdConnector: what vLLM calls; thin, and no exception leaves it
    scheduler     in the engine's scheduler: look up, plan loads and saves
    worker        in each worker: move the bytes
    lookup        which chunks of a prefix are there
    plan          what the scheduler tells the workers, and what they report back
    parameters    what a request asks for: retention, expiry, tenant
    keys          which tokens make a chunk, and its 32-byte key
    groups        cache groups: which blocks of a chunk are stored (sliding windows keep only their tail)
    layout        where the bytes of a block lie, whatever the engine's KV layout
    mover         the copies in host memory
    device_mover  the copies for KV memory on a GPU
    direct        chunks past the daemon: between the engine's memory and the disk tier's files (GPU-direct)
    direct_io     what moves those bytes: hipFile, cuFile, or plain preadv and pwritev
    direct_setup  whether that works here, by trying it
    staging       buffers between blocks and files
    fingerprint   what must match for bytes to be reusable: the namespace
    lora          which weights an adapter has: in the namespace of what is computed with it
    attach        how a worker gets hold of the engine's memory and of the daemon
    pinning       the arena as pinned memory, where KV memory is on a GPU
    plugin        the entry point that makes the connector's name known to vLLM
    prometheus    the counters in vLLM's /metrics
    view          what must be known of an engine to find what it stored
    book          the views that engines left in the daemon: why one finds nothing of what another stored
    describe      what a worker tells the engine's own server
    endpoint      kvd's routes on that server: prewarm, why, keys, engine
    asked         the body of such a request, read and checked
    prompt        from that body to block hashes, through the engine's own renderer
    hashing       block hashes as the engine makes them, in its server's process
    events        what the engine has itself, as far as its KV events tell
    prewarm       jobs that bring a prompt's chunks up from the tiers
    explain       chunk by chunk, why a prompt is found or not
    link          one connection to the daemon that never makes the engine wait twice
    settings      every KVD_* variable
    segment       the counters in shared memory, for kvtop and kvdoctor
    seldom        lines in the log that could come in every request
    metrics       counters, and how they reach vLLM's own metrics

Importing this package costs nothing and touches nothing: the front end, the scheduler and every worker import it afresh.
The class is resolved when asked for, since only then is vLLM sure to be there.
"""

import importlib.util
from typing import Any

SUPPORTED = "vLLM 0.32 or newer"
ELSE = "Other engines can store and load through kvd.Client, which knows nothing of any engine"

__all__ = ["KvdConnector"]


def __getattr__(name: str) -> Any:
    if name == "KvdConnector":
        if importlib.util.find_spec("vllm") is None:
            # An ImportError, as what asks for a class expects; another engine's loader shows it to its operator.
            raise ImportError(f"kvd's connector runs inside {SUPPORTED}; this Python has no vllm. {ELSE}")
        from kvd.connector.connector import KvdConnector

        return KvdConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
