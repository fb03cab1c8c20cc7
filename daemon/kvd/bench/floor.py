"""The floor of the control plane on this machine: the least that a msgspec and uvloop server must do for the same questions.

It keeps a dict, counts pins and hands out offsets. It checks nothing, evicts nothing and forgets nothing: nobody would run
it, and nothing in Python that answers over a socket is quicker. `Floor` has it started as a process and asks it.
"""

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec

from kvd.errors import KvdError

LENGTH_BYTES = 4
READY_S = 20.0


class Echo(msgspec.Struct, tag=1, array_like=True):
    pass


class Exists(msgspec.Struct, tag=2, array_like=True):
    keys: list[bytes]


class Lease(msgspec.Struct, tag=3, array_like=True):
    keys: list[bytes]


class Store(msgspec.Struct, tag=4, array_like=True):
    keys: list[bytes]
    size: int


Question = Echo | Exists | Lease | Store


class Table:
    """The server's memory: key -> [offset, pins]."""

    def __init__(self) -> None:
        self.entries: dict[bytes, list[int]] = {}
        self.top = 0

    def answer(self, question: Question) -> object:
        if isinstance(question, Exists):
            entries = self.entries
            return bytes([key in entries for key in question.keys])
        if isinstance(question, Lease):
            found = [self.entries.get(key) for key in question.keys]
            for entry in found:
                if entry:
                    entry[1] += 1
            return [entry[0] if entry else -1 for entry in found]
        if isinstance(question, Store):
            for key in question.keys:
                self.entries[key] = [self.top, 0]
                self.top += question.size
        return 0


def serve(path: str) -> None:
    """Answer on a Unix socket until killed."""
    import uvloop

    table = Table()
    decode = msgspec.msgpack.Decoder(Question).decode
    encode = msgspec.msgpack.Encoder().encode

    class Connection(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.transport = cast("asyncio.Transport", transport)
            self.pending = b""

        def data_received(self, data: bytes) -> None:
            pending = self.pending + data
            while len(pending) >= LENGTH_BYTES:
                end = LENGTH_BYTES + int.from_bytes(pending[:LENGTH_BYTES], "little")
                if len(pending) < end:
                    break
                answer = encode(table.answer(decode(pending[LENGTH_BYTES:end])))
                self.transport.write(len(answer).to_bytes(LENGTH_BYTES, "little") + answer)
                pending = pending[end:]
            self.pending = pending

    async def main() -> None:
        server = await asyncio.get_running_loop().create_unix_server(Connection, path)
        await server.serve_forever()

    uvloop.run(main())


class Floor:
    """The server as a process that `start` makes, in `folder`, and one connection to it. Raises KvdError when it does not start."""

    def __init__(self, folder: Path, start: Callable[[list[str]], "subprocess.Popen[str]"]) -> None:
        path = folder / "floor.sock"
        self._server = start([sys.executable, "-m", "kvd.bench.floor", str(path)])
        self._link = socket.socket(socket.AF_UNIX)
        deadline = time.monotonic() + READY_S
        while True:
            try:
                self._link.connect(str(path))
                break
            except OSError:
                if self._server.poll() is not None or time.monotonic() > deadline:
                    raise KvdError("the bare server to compare with did not start", hint="its message is above") from None
                time.sleep(0.02)

    def ask(self, question: Question) -> Any:
        frame = msgspec.msgpack.encode(question)
        self._link.sendall(len(frame).to_bytes(LENGTH_BYTES, "little") + frame)
        size = int.from_bytes(self._link.recv(LENGTH_BYTES, socket.MSG_WAITALL), "little")
        return msgspec.msgpack.decode(self._link.recv(size, socket.MSG_WAITALL))

    def close(self) -> None:
        """Hang up; whoever made the process ends it."""
        self._link.close()


if __name__ == "__main__":
    os.umask(0o077)
    serve(sys.argv[1])
