"""Whose process is at the other end of a connection, and when it is gone.

Credentials come from the kernel (SO_PEERCRED), never from the client. The process is held by a pidfd, taken from the
socket itself (SO_PEERPIDFD, Linux 6.5) so that it is right across pid namespaces and cannot be confused by a reused pid;
older kernels get pidfd_open of the credentials' pid, which the connection keeps from being reused in between.
"""

import asyncio
import os
import socket
import struct
from collections.abc import Callable

_SO_PEERPIDFD = 77
_UCRED = struct.Struct("iII")


class Peer:
    """The process at the other end: pid, uid and gid when it connected (pid 0: in a namespace this one cannot see)."""

    def __init__(self, sock: socket.socket) -> None:
        self.pid, self.uid, self.gid = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
        self._pidfd = _pidfd(sock, self.pid)

    def when_gone(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> bool:
        """Call back once, when the process has ended. False when this host cannot tell: then never."""
        if self._pidfd is None:
            return False

        def ended() -> None:
            assert self._pidfd is not None
            loop.remove_reader(self._pidfd)
            self.close()
            callback()

        loop.add_reader(self._pidfd, ended)
        return True

    def close(self) -> None:
        """Let go of the pidfd."""
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


def _pidfd(sock: socket.socket, pid: int) -> int | None:
    try:
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        pass
    try:
        return os.pidfd_open(pid) if pid > 0 else None
    except OSError:
        return None
