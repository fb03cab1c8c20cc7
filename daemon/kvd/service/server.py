"""The socket: who may come in, the handshake, frames in and out.

A live daemon's socket is never stolen and a stale one is replaced: an exclusive lock on `<socket>.lock`, held for life,
decides which it is. The file goes when the daemon does, also where it was refused at its start. Peers outside the allow-list
are closed without a word from us. The handshake runs on the bare socket, because a descriptor travels with it; then the
connection belongs to uvloop.

Frames: over MAX_FRAME or undecodable ones get an error frame, then a close. Requests that the store can answer are
answered in the same call; those that wait for a tier become tasks, at most MAX_WAITING a connection, above which it is
not read from. A client that does not read its answers is not read from either. So one connection's memory is bounded:
one frame in, one batch of answers out.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import secrets
import socket
import stat
from collections.abc import Awaitable
from pathlib import Path
from typing import Protocol, cast

import msgspec

from kvd.errors import KvdError
from kvd.service.peers import Peer
from kvd.store.leases import Holder
from kvd.wire import protocol
from kvd.wire.connection import standard_socket
from kvd.wire.protocol import LENGTH, MAX_FRAME, Answer, Failed, Request, encode
from kvtools.errors import KvError, UsageError, hint_for
from kvtools.segments.files import still_named

log = logging.getLogger("kvd.server")

HANDSHAKE_S = 5.0
HELLO_MAX = 4096
MAX_WAITING = 64
MAX_CONNECTIONS = 4096
MAX_UNREAD = 1 << 20
"""Bytes of answers that a client has not read, above which it is not read from."""


class Handler(Protocol):
    """What serves the requests of connections."""

    def handle(self, link: "Connection", request: Request) -> Answer | Awaitable[Answer] | None: ...

    def welcome(self, session: bytes) -> protocol.Welcome: ...

    def descriptor(self, write: bool) -> int: ...

    def lost(self, link: "Connection") -> None: ...


class Connection(asyncio.Protocol):
    """One client. `holder` is what the store knows it by."""

    def __init__(self, server: "Server", peer: Peer, sock: socket.socket, write: bool) -> None:
        self.server = server
        self.peer = peer
        self.write = write
        self.session = secrets.token_bytes(16)
        self.holder = Holder(peer)
        # Our own descriptor of the same socket, to shut it down with before its leases end: see connection_lost.
        self._sock = sock.dup()
        self._buffer = bytearray()
        self._waiting: set[asyncio.Task[None]] = set()
        self._stopped = 0
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast("asyncio.Transport", transport)  # uvloop's own class, which is not registered as one
        transport.set_write_buffer_limits(high=MAX_UNREAD)

    def data_received(self, data: bytes) -> None:
        if not self._buffer and not self._stopped and len(data) >= 4:
            # The usual case: one whole frame, nothing left over, no copy.
            (size,) = LENGTH.unpack_from(data)
            if size == len(data) - 4 and size <= MAX_FRAME:
                self._frame(memoryview(data)[4:])
                return
        self._buffer += data
        taken = 0
        while not self._stopped and len(self._buffer) - taken >= 4:
            (size,) = LENGTH.unpack_from(self._buffer, taken)
            if size > MAX_FRAME:
                self._refuse(f"a frame of {size} bytes is over the limit of {MAX_FRAME}")
                return
            if len(self._buffer) - taken < 4 + size:
                break
            with memoryview(self._buffer) as view:
                body = bytes(view[taken + 4 : taken + 4 + size])
            taken += 4 + size
            self._frame(body)
            if self._transport.is_closing():
                return
        if taken:
            del self._buffer[:taken]

    def _frame(self, body: bytes | memoryview) -> None:
        try:
            request = protocol.request_decoder.decode(body)
        except msgspec.DecodeError as error:
            self._refuse(f"cannot decode a frame: {error}")
            return
        try:
            answer = self.server.handler.handle(self, request)
        except Exception as error:  # the edge of one request: a defect in it must not end the connection
            log.exception("%s failed unexpectedly", type(request).__name__)
            answer = Failed(request.id, "internal", repr(error))
        if isinstance(answer, Answer):
            if request.id:
                self.send(answer)
        elif answer is not None:
            self._wait_for(request, answer)

    def send(self, answer: Answer) -> None:
        """Send an answer, or an error in its place when it does not fit a frame."""
        if self._transport.is_closing():
            return
        if isinstance(answer, Failed):
            failures = self.server.failures
            failures[answer.code] = failures.get(answer.code, 0) + 1
        try:
            frame = encode(answer)
        except ValueError as error:
            frame = encode(Failed(answer.id, "bad_request", f"the answer does not fit: {error}"))
        self._transport.write(frame)

    def _wait_for(self, request: Request, work: Awaitable[Answer]) -> None:
        async def finish() -> None:
            try:
                answer = await work
            except KvdError as error:
                answer = Failed(request.id, "busy", error.message)
            except KvError as error:  # such as a tier that cannot be cleared: said to who asked, and no defect
                answer = Failed(request.id, "internal", error.message)
            except Exception as error:  # the edge of one request's task
                log.exception("%s failed unexpectedly", type(request).__name__)
                answer = Failed(request.id, "internal", repr(error))
            if request.id:
                self.send(answer)

        task = asyncio.ensure_future(finish())
        self._waiting.add(task)
        task.add_done_callback(self._waited)
        if len(self._waiting) >= MAX_WAITING:
            self._stop_reading()

    def _waited(self, task: "asyncio.Task[None]") -> None:
        self._waiting.discard(task)
        if len(self._waiting) == MAX_WAITING - 1:
            self._go_on_reading()

    def _refuse(self, why: str) -> None:
        log.warning("connection of pid %d: %s: closed", self.peer.pid, why)
        self.server.bad_frames += 1
        self.send(Failed(0, "bad_frame", why))
        self._transport.close()
        self._buffer.clear()

    def pause_writing(self) -> None:
        self._stop_reading()

    def resume_writing(self) -> None:
        self._go_on_reading()

    def _stop_reading(self) -> None:
        self._stopped += 1
        if self._stopped == 1 and not self._transport.is_closing():
            self._transport.pause_reading()

    def _go_on_reading(self) -> None:
        self._stopped = max(0, self._stopped - 1)
        if not self._stopped and not self._transport.is_closing():
            self._transport.resume_reading()
            if self._buffer:  # whole frames may have come along with the one that made us stop
                self.data_received(b"")

    def connection_lost(self, exc: Exception | None) -> None:
        # The client must see the hang-up before the bytes it reads lose their pins: its own check (a poll of the socket
        # after copying) relies on that order.
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self.server.connections.pop(self.session, None)
        self._sock.close()
        loop = asyncio.get_running_loop()
        for task in self._waiting:
            # Not at once: a task that is cancelled before its first step never lets go of what its request had pinned.
            loop.call_soon(task.cancel)
        if self._waiting:
            asyncio.gather(*self._waiting, return_exceptions=True).add_done_callback(lambda _: self.server.handler.lost(self))
        else:
            self.server.handler.lost(self)

    def never_made(self) -> None:
        """The client left before the connection was its own: let go of what was made ready for it."""
        self._sock.close()
        self.server.connections.pop(self.session, None)

    def close(self) -> None:
        """Hang up."""
        self._transport.close()


class Server:
    """The listening socket and its connections.

    `mode` and `group` are the socket file's; `uids` and `gids` say who may connect besides root and the daemon's own uid.
    Raises UsageError when the path cannot be a socket, KvdError when a live daemon owns it.
    """

    def __init__(
        self,
        path: Path,
        handler: Handler,
        *,
        mode: int = 0o600,
        group: int | None = None,
        uids: frozenset[int] = frozenset(),
        gids: frozenset[int] = frozenset(),
    ) -> None:
        self.path = path
        self.handler = handler
        self.mode = mode
        self.group = group
        self.allow(uids, gids)
        self.connections: dict[bytes, Connection] = {}
        self.bad_frames = 0
        self.failures: dict[str, int] = {}
        """Errors answered, by code."""
        self.refused_peers = 0
        self._lock_fd = -1
        self._made = False
        self._listener: socket.socket | None = None
        self._task: asyncio.Task[None] | None = None
        self._handshakes: set[asyncio.Task[None]] = set()

    def allow(self, uids: frozenset[int], gids: frozenset[int]) -> None:
        """Who may connect from now on, besides root and the daemon's own uid."""
        self.uids = uids | {0, os.getuid()}
        self.gids = gids

    def lock(self) -> None:
        """Own the path, before anything that takes long or could harm another daemon's files."""
        length = len(os.fsencode(self.path))
        if length > 107:
            raise UsageError(f"socket path too long ({length} bytes): {self.path}", hint="a Unix socket's path has at most 107")
        try:
            if self.path == standard_socket():  # another folder must be there: a mistyped path makes none
                self.path.parent.mkdir(mode=0o755, exist_ok=True)
            self._lock_fd = self._take_lock()
        except BlockingIOError:
            raise self._taken() from None
        except OSError as error:
            why = f"cannot use the socket path {self.path}: {error.strerror}"
            hint = hint_for(error, "give --socket a path in a folder that exists and that you may write")
            raise UsageError(why, hint=hint) from None
        try:
            self._remove_stale()
        except BaseException:
            self._unlock()
            raise

    @property
    def _lock_path(self) -> Path:
        return Path(f"{self.path}.lock")

    def _take_lock(self) -> int:
        """The lock file, made where it is missing, locked. Raises BlockingIOError where another daemon has it, OSError."""
        while True:
            fd = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Whoever stops removes the file while it holds the lock: then this is the lock on nothing any more.
                if still_named(fd, self._lock_path):
                    held, fd = fd, -1
                    return held
            finally:
                if fd >= 0:
                    os.close(fd)

    def _unlock(self) -> None:
        """Let go of the path and leave no lock file behind, unless somebody has put another in its place."""
        if self._lock_fd < 0:
            return
        if still_named(self._lock_fd, self._lock_path):
            self._lock_path.unlink(missing_ok=True)
        os.close(self._lock_fd)
        self._lock_fd = -1

    def _taken(self) -> KvdError:
        return KvdError(f"a daemon is already running on {self.path}", hint="stop it, or give this one another --socket")

    def bind(self) -> None:
        """Listen, on the socket systemd made for us where it did. Nothing is accepted before `start`."""
        listener = inherited_socket() or self._make_socket()
        listener.listen(256)
        self._listener = listener

    def _make_socket(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        # No moment with looser permissions than asked for: the file is born 0600.
        before = os.umask(0o177)
        try:
            listener.bind(str(self.path))
            if self.group is not None:
                os.chown(self.path, -1, self.group)
        except OSError as error:
            hint = hint_for(error, "give --socket a path in a folder that you may write, and --socket-group a group you are in")
            raise UsageError(f"cannot bind {self.path}: {error.strerror}", hint=hint) from None
        finally:
            os.umask(before)
        self.path.chmod(self.mode)
        self._made = True
        return listener

    def _remove_stale(self) -> None:
        if os.environ.get("LISTEN_FDS"):
            return  # systemd's socket: it is alive, and not ours to remove
        try:
            kind = self.path.lstat().st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(kind):
            raise UsageError(f"{self.path} exists and is not a socket", hint="give another --socket, or move that file away")
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1)
            try:
                probe.connect(str(self.path))
            except (ConnectionRefusedError, FileNotFoundError):
                pass
            except OSError as error:
                raise KvdError(f"something holds {self.path} ({error.strerror or error})", hint="stop it first") from None
            else:
                # Alive without our lock: another program, or a daemon whose lock file was deleted.
                raise self._taken()
        log.info("replacing the stale socket %s", self.path)
        self.path.unlink(missing_ok=True)

    def start(self) -> None:
        """Accept connections."""
        self._task = asyncio.get_running_loop().create_task(self._accept())

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        assert self._listener is not None
        while True:
            try:
                sock, _ = await loop.sock_accept(self._listener)
            except OSError as error:  # out of descriptors: wait for some to come free
                log.warning("cannot accept a connection: %s", error.strerror)
                await asyncio.sleep(0.2)
                continue
            task = loop.create_task(self._greet(sock))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    async def _greet(self, sock: socket.socket) -> None:
        peer: Peer | None = None
        connected = False
        try:
            peer = Peer(sock)
            async with asyncio.timeout(HANDSHAKE_S):
                connected = await self._handshake(sock, peer)
        except (OSError, TimeoutError, msgspec.DecodeError, EOFError) as error:
            log.info("a connection failed its handshake: %s", str(error) or type(error).__name__)
        except Exception:  # a task edge
            log.exception("a handshake failed unexpectedly")
        finally:
            if not connected:
                sock.close()
                if peer is not None:
                    peer.close()

    async def _handshake(self, sock: socket.socket, peer: Peer) -> bool:
        """True when socket and peer now belong to a connection."""
        loop = asyncio.get_running_loop()
        if not self._allowed(peer) or len(self.connections) >= MAX_CONNECTIONS:
            self.refused_peers += 1
            log.warning("refused a connection of uid %d, gid %d (pid %d)", peer.uid, peer.gid, peer.pid)
            return False
        try:
            (size,) = LENGTH.unpack(await _exactly(loop, sock, 4))
            if size > HELLO_MAX:
                raise _NoGreeting(f"its first frame is of {size} bytes")
            hello = protocol.hello_decoder.decode(await _exactly(loop, sock, size, begun=True))
        except (msgspec.DecodeError, _NoGreeting) as error:
            self.bad_frames += 1
            why = f"no client of kvd: {error}"
            log.warning("connection of pid %d: %s: closed", peer.pid, why)
            sock.send(encode(Failed(0, "bad_frame", why)))
            return False
        if hello.version != protocol.VERSION:
            why = f"this daemon speaks protocol version {protocol.VERSION}, the client {hello.version}"
            sock.send(encode(Failed(0, "bad_request", why)))
            return False
        if hello.attach:
            self._attach(sock, peer, hello)
            return False
        link = Connection(self, peer, sock, hello.write)
        self.connections[link.session] = link
        try:
            self._send_welcome(sock, link.session, hello.write)
            await loop.connect_accepted_socket(lambda: link, sock)
        except BaseException:
            link.never_made()
            raise
        return True

    def _attach(self, sock: socket.socket, peer: Peer, hello: protocol.Hello) -> None:
        """Hand the writable descriptor to a session that decided to write after all, and hang up."""
        link = self.connections.get(hello.attach)
        if link is None or (link.peer.pid, link.peer.uid) != (peer.pid, peer.uid):
            sock.send(encode(Failed(0, "bad_request", "no such session of this process")))
        else:
            link.write = True
            self._send_welcome(sock, link.session, write=True)

    def _send_welcome(self, sock: socket.socket, session: bytes, write: bool) -> None:
        frame = encode(self.handler.welcome(session))
        socket.send_fds(sock, [frame], [self.handler.descriptor(write)])

    def _allowed(self, peer: Peer) -> bool:
        return peer.uid in self.uids or peer.gid in self.gids

    async def close(self) -> None:
        """Stop accepting, hang up on everyone, remove the socket, let go of the lock."""
        for task in [*self._handshakes, *([self._task] if self._task else [])]:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        for link in list(self.connections.values()):
            link.close()
        await asyncio.sleep(0)
        if self._listener is not None:
            self._listener.close()
            if self._made:
                self.path.unlink(missing_ok=True)
        self._unlock()


def inherited_socket() -> socket.socket | None:
    """The listening socket that systemd passed to this process (sd_listen_fds: one, as descriptor 3), or None."""
    if os.environ.get("LISTEN_PID") != str(os.getpid()) or os.environ.get("LISTEN_FDS") != "1":
        return None
    listener = socket.socket(fileno=3)
    listener.setblocking(False)
    os.set_inheritable(3, False)
    return listener


class _NoGreeting(Exception):
    """What a connection said first is no greeting of a client."""


async def _exactly(loop: asyncio.AbstractEventLoop, sock: socket.socket, size: int, *, begun: bool = False) -> bytes:
    """`size` bytes and not one more: what follows belongs to the transport.

    Raises EOFError where the other side hung up without a word, _NoGreeting where it did so in the middle (or had `begun`).
    """
    data = b""
    while len(data) < size:
        part = await loop.sock_recv(sock, size - len(data))
        if not part:
            if data or begun:
                raise _NoGreeting("it hung up within its first frame")
            raise EOFError("hung up")
        data += part
    return data
