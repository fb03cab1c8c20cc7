"""Starting Mooncake's client: its library, its environment, and whether the master is one and answers."""

import contextlib
import ipaddress
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from kvd.tiers.adapters.base import AdapterConfigError

TRIAL_S = 10.0
"""What a trial may take beside the master's own time: a Python that starts on a busy machine."""


def load_library(name: str) -> Any:
    """Mooncake's module. Raises AdapterConfigError, saying what is missing, where it does not load."""
    try:
        import mooncake.store
    except ImportError as error:
        # The package is there (or the registry would have said so): a library of the system's is not.
        missing = str(error).split(":", maxsplit=1)[0]
        hint = "apt-get install libibverbs1" if "ibverbs" in missing else "ldd shows what its store.so needs"
        raise AdapterConfigError(f"adapter {name} (mooncake_store): mooncake does not load: {error}", hint=hint) from None
    return mooncake.store


def environment(timeout: float, host: str) -> None:
    """The client takes its deadlines from the environment, once a process; what the operator has set stays.

    It listens on the address of `host`, where that is one: left alone it would on all.
    """
    whole = max(1, round(timeout))
    with contextlib.suppress(ValueError):
        os.environ.setdefault("MC_TCP_BIND_ADDRESS", str(ipaddress.ip_address(host.rpartition(":")[0] or host)))
    for name, value in (
        ("MC_RPC_TIMEOUT_MS", int(timeout * 1000)),
        ("MC_RPC_CONNECT_TIMEOUT_MS", int(timeout * 1000)),
        ("MC_TCP_PROGRESS_TIMEOUT_SEC", whole),
        ("MC_TCP_STATUS_TIMEOUT_SEC", whole),
        ("MC_STORE_CLIENT_SETUP_RETRIES", 1),
        ("MC_STORE_CLIENT_METRIC", 0),
        ("MC_LOG_LEVEL", "ERROR"),
    ):
        os.environ.setdefault(name, str(value))


TRIAL = """
import os, sys, mooncake.store
os._exit(bool(mooncake.store.MooncakeDistributedStore().setup("127.0.0.1", "P2PHANDSHAKE", 0, 1 << 20, "tcp", "", sys.argv[1])))
"""


def _try_out(master: str, timeout: float) -> None:
    """Set a client up in a process of its own, as a trial. Raises OSError where that does not work in time.

    Alone of all its calls, the client's set-up keeps the interpreter's lock while it waits for the master: one that hangs would
    stop the whole daemon meanwhile.
    """
    command = [sys.executable, "-c", TRIAL, master]
    environment = {**os.environ, "MC_TCP_BIND_ADDRESS": "127.0.0.1"}
    null = subprocess.DEVNULL
    limit = 2 * timeout + TRIAL_S
    try:
        ended = subprocess.run(command, check=False, env=environment, timeout=limit, stdin=null, stdout=null, stderr=null)
    except subprocess.TimeoutExpired:
        raise OSError("it does not answer") from None
    if ended.returncode:
        raise OSError("it does not answer, or is no master of Mooncake's")


def connector(name: str, values: dict[str, Any]) -> Callable[[], Any]:
    """What makes a client of `values`' master: each call a new one. It raises OSError while that is away or refuses us."""
    host, port = values["master_server_address"]

    def connect() -> Any:
        socket.create_connection((host, port), timeout=values["timeout"]).close()
        _try_out(f"{host}:{port}", values["timeout"])
        client = load_library(name).MooncakeDistributedStore()
        code = client.setup(
            values["local_hostname"],
            values["metadata_server"],
            values["global_segment_size"],
            values["local_buffer_size"],
            values["protocol"],
            values["device_name"],
            f"{host}:{port}",
        )
        if code:
            client.close()
            raise OSError(f"Mooncake's client does not start (code {code}); its log says why")
        return client

    return connect
