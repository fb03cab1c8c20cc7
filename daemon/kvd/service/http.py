"""/metrics, /healthz and /readyz on a TCP port, loopback unless told otherwise; off unless a port is given.

Metrics are the rows of the stats segment in Prometheus' text format, so the two can never disagree. healthz says that the
event loop turns; readyz that the daemon takes writes. GET only, one request a connection, small and bounded: this is a
window, not a web server.
"""

import asyncio
import contextlib
import errno
import logging
import os
import socket
from collections.abc import Callable, Iterable

from kvd.service.histogram import Row
from kvtools.errors import UsageError

log = logging.getLogger("kvd.http")

REQUEST_BYTES = 8192
REQUEST_S = 5.0
MAX_CONNECTIONS = 64

Answer = tuple[int, str, str]
"""Status, content type, body."""


class Window:
    """The HTTP side of one daemon. `pages` maps a path to what makes its answer."""

    def __init__(self, host: str, port: int, pages: dict[str, Callable[[], Answer]]) -> None:
        self.host = host
        self.port = port
        self.pages = pages
        self._server: asyncio.Server | None = None
        self._open = 0

    async def start(self) -> None:
        """Listen. Raises UsageError when the port cannot be had."""
        try:
            self._server = await asyncio.start_server(self._serve, self.host, self.port, limit=REQUEST_BYTES)
        except OSError as error:
            taken = error.errno in (errno.EADDRINUSE, errno.EACCES)
            # asyncio has its own, longer words for what the system says; a look-up's numbers are no errnos.
            system = not isinstance(error, socket.gaierror) and error.errno
            said = os.strerror(system) if system else error.strerror or str(error)
            why = f"cannot listen on {self.host} port {self.port}: {said}"
            raise UsageError(
                why, hint="give --metrics-port another port" if taken else "give --metrics-host an address of this host"
            ) from None

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            if self._open <= MAX_CONNECTIONS:
                async with asyncio.timeout(REQUEST_S):
                    await self._answer(reader, writer)
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
            pass  # whoever it was did not speak HTTP, or went away
        finally:
            self._open -= 1
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        method, target, *_ = head.split(b"\r\n", 1)[0].decode("ascii", "replace").split(" ")
        page = self.pages.get(target.split("?", 1)[0])
        if method not in ("GET", "HEAD"):
            status, kind, body = 405, "text/plain", "only GET\n"
        elif page is None:
            status, kind, body = 404, "text/plain", "there is: " + " ".join(self.pages) + "\n"
        else:
            status, kind, body = page()
        data = body.encode()
        words = {200: "OK", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}[status]
        lines = (
            f"HTTP/1.1 {status} {words}\r\nContent-Type: {kind}; charset=utf-8\r\n"
            f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
        )
        writer.write(lines.encode() + (b"" if method == "HEAD" else data))
        await writer.drain()


def exposition(rows: Iterable[Row], prefix: str = "kvd_") -> str:
    """The rows in Prometheus' text format (version 0.0.4), those of one family together, as it asks for."""
    families: dict[str, list[str]] = {}
    for metric, read, _ in rows:
        family = metric.name
        kind = metric.type
        if metric.type == "bucket" or metric.name.endswith(("_seconds_sum", "_seconds_count")):
            family, kind = metric.name.rsplit("_", 1)[0], "histogram"
        head = [f"# HELP {prefix}{family} {metric.help}", f"# TYPE {prefix}{family} {kind}"]
        labels = ",".join(f'{name}="{_escaped(value)}"' for name, value in metric.labels.items())
        name = f"{prefix}{metric.name}{{{labels}}}" if labels else f"{prefix}{metric.name}"
        families.setdefault(family, head).append(f"{name} {read()}")
    return "".join(f"{line}\n" for lines in families.values() for line in lines)


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
