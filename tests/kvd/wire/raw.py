"""The wire by hand: a socket, the handshake, frames in and out. For what the client would never send."""

import contextlib
import os
import socket
from pathlib import Path
from typing import Any, Self

from kvd.wire import protocol as p

GREETING = p.Hello(p.VERSION, write=True)


class Raw:
    """A greeted connection. `hello=None` leaves even the greeting to the test."""

    def __init__(self, path: Path, hello: p.Hello | None = GREETING, *, timeout_s: float = 5.0) -> None:
        self.link = socket.socket(socket.AF_UNIX)
        self.link.settimeout(timeout_s)
        self.link.connect(str(path))
        self.data = b""
        self.fds: list[int] = []
        self.welcome: Any = None
        if hello is not None:
            self.link.sendall(p.encode(hello))
            self.welcome = p.welcome_decoder.decode(self.frame())

    def send(self, *messages: p.Message | bytes) -> None:
        self.link.sendall(b"".join(bytes(m) if isinstance(m, bytes) else bytes(p.encode(m)) for m in messages))

    def frame(self) -> bytes:
        """The next frame's body. EOFError when the daemon hung up before there was one."""
        while len(self.data) < 4 or len(self.data) < 4 + p.LENGTH.unpack_from(self.data)[0]:
            part, fds, _, _ = socket.recv_fds(self.link, 1 << 20, 4)
            self.fds += fds
            if not part:
                raise EOFError
            self.data += part
        size = p.LENGTH.unpack_from(self.data)[0]
        body, self.data = self.data[4 : 4 + size], self.data[4 + size :]
        return body

    def answer(self) -> p.Answer:
        return p.answer_decoder.decode(self.frame())

    def ask(self, message: p.Request) -> Any:
        self.send(message)
        return self.answer()

    def hung_up(self) -> bool:
        """Whether the daemon closes the connection without another frame."""
        try:
            self.frame()
        except (EOFError, ConnectionResetError):
            return True
        return False

    def close(self) -> None:
        self.link.close()
        for fd in self.fds:
            with contextlib.suppress(OSError):
                os.close(fd)
        self.fds = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
