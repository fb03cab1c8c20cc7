"""The servers that adapters are tested against: started once, before the first test here, waited for where they are needed."""

import contextlib
import os
from collections.abc import Iterator

import pytest

from tests.support.fake_hub import FakeHub
from tests.support.servers import LmcacheServer, MooncakePool, MotoServer, RedisServer, Server

# Mooncake's client reads its deadlines when it is loaded, once a process: the tests' are shorter than the adapter's own.
for name, value in {
    "MC_RPC_TIMEOUT_MS": "2000",
    "MC_RPC_CONNECT_TIMEOUT_MS": "2000",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "2",
    "MC_TCP_STATUS_TIMEOUT_SEC": "2",
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    "MC_STORE_CLIENT_METRIC": "0",
    "MC_LOG_LEVEL": "ERROR",
    "MC_TCP_BIND_ADDRESS": "127.0.0.1",
}.items():
    os.environ[name] = value


@pytest.fixture(scope="session", autouse=True)
def servers() -> Iterator[dict[str, Server]]:
    """Real servers by name, perhaps still starting: `.wait()` before use."""
    made: dict[str, Server] = {
        "redis": RedisServer(),
        "s3": MotoServer(),
        "mooncake": MooncakePool(),
        "lmcache": LmcacheServer(),
        "hub": FakeHub(),
    }
    try:
        for server in made.values():
            with contextlib.suppress(pytest.skip.Exception):  # what is not installed here keeps only its own tests from running
                server.start()
        yield made
    finally:
        for server in made.values():
            server.remove()
