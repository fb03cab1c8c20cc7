"""The servers that adapters are tested against: started once, before the first test here, waited for where they are needed."""

from collections.abc import Iterator

import pytest

from tests.support.servers import MotoServer, RedisServer, Server


@pytest.fixture(scope="session", autouse=True)
def servers() -> Iterator[dict[str, Server]]:
    """Real servers by name, perhaps still starting: `.wait()` before use."""
    made: dict[str, Server] = {"redis": RedisServer(), "s3": MotoServer()}
    try:
        for server in made.values():
            server.start()
        yield made
    finally:
        for server in made.values():
            server.remove()
