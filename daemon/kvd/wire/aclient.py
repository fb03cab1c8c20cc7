"""AsyncClient: the methods of Client as coroutines.

The synchronous client does the work on a few threads: its requests pipeline over one connection, and its copies run
without the GIL, so an event loop gains nothing from a second implementation and loses nothing to this one.
"""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Self, TypeVar

from kvd.wire.client import Client

T = TypeVar("T")

_METHODS = (
    "put", "put_many", "get", "get_many", "get_into", "read", "write", "exists", "prefix", "claim",
    "prefetch", "places", "why", "note", "flush", "delete", "clear", "stats", "ping",
)  # fmt: skip


class AsyncClient:
    """A client for asyncio: every method of Client, awaited. Leases are the same objects (their methods do not block)."""

    def __init__(
        self,
        socket: str | os.PathLike[str] | None = None,
        *,
        namespace: str | bytes = "default",
        timeout_s: float = 5.0,
        threads: int = 8,
    ) -> None:
        self.client = Client(socket, namespace=namespace, timeout_s=timeout_s)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="kvd-client")

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in _METHODS:
            raise AttributeError(name)
        return partial(self._run, getattr(self.client, name))

    async def _run(self, method: Callable[..., T], *args: Any, **named: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(method, *args, **named))

    async def close(self) -> None:
        """Hang up and end the threads."""
        await self._run(self.client.close)
        self._threads.shutdown(wait=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
