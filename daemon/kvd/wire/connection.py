"""One connection of a client to the daemon: handshake, requests in flight, answers.

Threads share it. A request is one send; then whoever waits and finds nobody reading becomes the *reader*: it takes frames
off the socket, hands each to the thread it belongs to, and passes the reading on when its own answer is there. A lone
thread so never pays for a hand-over, and a request that waits for a disk holds nobody else up.

A timed-out request leaves the connection whole: when its answer comes after all, what it pinned or was lent is given back.
A connection whose other end is gone fails everything in flight with Disconnected; it never comes back (see client.py).
"""

import contextlib
import os
import select
import socket
import struct
import threading
import time
from pathlib import Path
from typing import TypeVar

import msgspec

from kvd.errors import DeadlinePassed, Disconnected, Draining, KvdError, LeaseLost, NoRoom, NotAnswering, ProtocolError, Unavailable
from kvd.wire import protocol as p
from kvd.wire.mapping import Mapping

_RECEIVE = 256 << 10
_RELEASES = 16
GREETING_S = 5.0
"""The handshake gets this long at most, however patient the client is with its requests."""
_TIMEVAL = struct.Struct("qq")
_ERRORS: dict[str, type[KvdError]] = {
    "no_room": NoRoom,
    "busy": NoRoom,
    "too_large": NoRoom,
    "lease_lost": LeaseLost,
    "draining": Draining,
    "timeout": DeadlinePassed,
    "bad_frame": ProtocolError,
    "bad_request": ProtocolError,
}

A = TypeVar("A", bound=p.Answer)


def default_socket() -> Path:
    """Where the daemon is unless a command is told: KVD_SOCKET, else the standard place."""
    return Path(named) if (named := os.environ.get("KVD_SOCKET")) else standard_socket()


def standard_socket() -> Path:
    """/run/kvd/kvd.sock for root, $XDG_RUNTIME_DIR/kvd.sock otherwise."""
    if os.getuid() == 0:
        return Path("/run/kvd/kvd.sock")
    return Path(os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}") / "kvd.sock"


class Waiter:
    """A thread waiting for its answer, or for its turn to read."""

    __slots__ = ("answer", "gate", "leads", "waits")

    def __init__(self) -> None:
        self.answer: p.Answer | None = None
        self.waits = False
        """A thread is in `wait` for it; until then it cannot be asked to read."""
        self.leads = False
        self.gate = threading.Lock()
        self.gate.acquire()


class Connection:
    """A connected, greeted socket. Raises Unavailable when that cannot be had within `timeout_s`."""

    def __init__(self, path: Path, *, timeout_s: float, name: str = "") -> None:
        self.path = path
        self.timeout_s = timeout_s
        self.pid = os.getpid()
        self.closed = False
        self._socket, self.welcome, fd = _greet(path, p.Hello(p.VERSION, client=name), min(timeout_s, GREETING_S))
        self.mapping = Mapping(fd, self.welcome.arena_bytes)
        self._timeout_set = timeout_s
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLRDHUP)
        self._polling = threading.Lock()  # Python lets one thread at a time use a poll object
        self._buffer = b""
        self._sending = threading.Lock()
        self._state = threading.Lock()
        self._waiters: dict[int, Waiter] = {}
        self._read_by_someone = False
        self._next_id = 1
        self._to_release: list[int] = []

    # ---- requests ----------------------------------------------------------------------------------------------------

    def call(self, request: p.Request, kind: type[A], timeout_s: float | None = None) -> A:
        """Send a request and return its answer. Raises DeadlinePassed, Disconnected, or what the daemon answered."""
        deadline = time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)
        waiter = Waiter()
        with self._state:
            self._register(request, waiter)
            waiter.waits = True
            leads = not self._read_by_someone
            if leads:
                waiter.leads = self._read_by_someone = True
        try:
            self._send(request)
        except BaseException:
            self._give_up(request, waiter)
            raise
        return self._answer(waiter, request, kind, deadline, leads)

    def submit(self, request: p.Request) -> Waiter:
        """Send a request whose answer `wait` will return: in between, the caller may do something else."""
        waiter = Waiter()
        with self._state:
            self._register(request, waiter)
        try:
            self._send(request)
        except BaseException:
            self._give_up(request, waiter)
            raise
        return waiter

    def _register(self, request: p.Request, waiter: Waiter) -> None:
        if self.closed:
            raise Disconnected(f"the daemon at {self.path} is gone")
        request.id = self._next_id
        self._next_id += 1
        self._waiters[request.id] = waiter

    def wait(self, waiter: Waiter, request: p.Request, kind: type[A], timeout_s: float | None = None) -> A:
        """The answer to a submitted request."""
        deadline = time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)
        with self._state:
            waiter.waits = True
            leads = waiter.answer is None and not self._read_by_someone and not self.closed
            if leads:
                waiter.leads = self._read_by_someone = True
        return self._answer(waiter, request, kind, deadline, leads)

    def _answer(self, waiter: Waiter, request: p.Request, kind: type[A], deadline: float, leads: bool) -> A:
        try:
            answer = self._lead(waiter, deadline) if leads else self._follow(request.id, waiter, deadline)
        except BaseException:
            self._give_up(request, waiter)
            raise
        if isinstance(answer, kind):
            return answer
        if isinstance(answer, p.Failed):
            raise _error(answer, self.path)
        raise ProtocolError(f"the daemon answered {type(request).__name__} with {type(answer).__name__}")

    def _give_up(self, request: p.Request, waiter: Waiter) -> None:
        self.forget(request, waiter)
        if waiter.leads:
            self._pass_on()

    def forget(self, request: p.Request, waiter: Waiter) -> None:
        """Nobody waits for this answer any more; what comes with it is given back when it comes."""
        with self._state:
            self._waiters.pop(request.id, None)
        if waiter.answer is not None:
            self._orphan(waiter.answer)

    def tell(self, request: p.Request) -> None:
        """Send a request that has no answer (id 0). A lost connection is no error: what it was about ended with it."""
        with contextlib.suppress(KvdError):
            self._send(request)

    def release_soon(self, lease: int) -> None:
        """Release a brief lease along with the next request.

        It would end by itself shortly, and a send of its own wakes the daemon for nothing.
        """
        self._to_release.append(lease)
        if len(self._to_release) >= _RELEASES:
            self.tell(p.Ping(0))

    def _send(self, request: p.Request) -> None:
        if self.pid != os.getpid():
            raise Disconnected("the connection belongs to the process this one was forked from")
        try:
            frame = p.encode(request)
            if self._to_release:
                ended, self._to_release = self._to_release, []
                frame = p.encode(p.Release(0, ended)) + frame
        except ValueError as error:
            raise ProtocolError(f"the request does not fit a frame: {error}", hint="ask for fewer keys at once") from None
        try:
            with self._sending:
                self._socket.sendall(frame)
        except BlockingIOError:
            # Part of a frame may be out: nothing sensible can follow it.
            self.close()
            raise DeadlinePassed(f"the daemon at {self.path} takes nothing in", hint="is it stopped?") from None
        except OSError as error:
            self.close()
            raise Disconnected(f"the daemon at {self.path} is gone: {error.strerror or error}") from None

    def _lead(self, waiter: Waiter, deadline: float) -> p.Answer:
        """Read frames until ours is there; then let somebody else read."""
        while waiter.answer is None:
            for answer in self._receive(deadline):
                with self._state:
                    owner = self._waiters.pop(answer.id, None)
                if owner is None:
                    self._orphan(answer)
                elif owner is waiter:
                    waiter.answer = answer
                else:
                    owner.answer = answer
                    owner.gate.release()
        self._pass_on()
        return waiter.answer

    def _follow(self, number: int, waiter: Waiter, deadline: float) -> p.Answer:
        if not waiter.gate.acquire(timeout=max(0.0, deadline - time.monotonic())):
            with self._state:
                given = self._waiters.pop(number, None) is None
            if not given and not waiter.leads:
                raise self._late()
            waiter.gate.acquire()  # it is being handed to us this very moment
        if waiter.answer is not None:
            return waiter.answer
        if waiter.leads:
            return self._lead(waiter, deadline)
        raise Disconnected(f"the daemon at {self.path} is gone")

    def _pass_on(self) -> None:
        with self._state:
            for waiter in self._waiters.values():
                if waiter.waits and not waiter.leads:
                    waiter.leads = True
                    waiter.gate.release()
                    return
            self._read_by_someone = False

    def _receive(self, deadline: float) -> list[p.Answer]:
        """Whole frames that have arrived, at least one."""
        while True:
            answers = self._take()
            if answers:
                return answers
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._late()
            self._wait_at_most(left)
            try:
                data = self._socket.recv(_RECEIVE)
            except BlockingIOError:
                continue
            except OSError as error:
                data = b""
                why = error.strerror or str(error)
            else:
                why = "it hung up"
            if not data:
                self.close()
                raise Disconnected(f"the daemon at {self.path} is gone: {why}")
            self._buffer = self._buffer + data if self._buffer else data

    def _take(self) -> list[p.Answer]:
        answers: list[p.Answer] = []
        buffer, at = self._buffer, 0
        while len(buffer) - at >= 4:
            (size,) = p.LENGTH.unpack_from(buffer, at)
            if size > p.MAX_FRAME:
                self.close()
                raise ProtocolError(f"the daemon sent a frame of {size} bytes")
            if len(buffer) - at < 4 + size:
                break
            try:
                answers.append(p.answer_decoder.decode(memoryview(buffer)[at + 4 : at + 4 + size]))
            except msgspec.DecodeError as error:
                self.close()
                raise ProtocolError(f"cannot decode what the daemon sent: {error}") from None
            at += 4 + size
        if at:
            self._buffer = buffer[at:]
        return answers

    def _wait_at_most(self, seconds: float) -> None:
        """Bound the next recv. One setsockopt a change is cheaper than a poll before every recv."""
        wanted = seconds if seconds < self._timeout_set else min(seconds, self.timeout_s)
        if wanted < self._timeout_set * 0.9 or wanted > self._timeout_set * 1.1:
            micros = max(1000, int(wanted * 1e6))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.pack(*divmod(micros, 1_000_000)))
            self._timeout_set = wanted

    def _orphan(self, answer: p.Answer) -> None:
        """An answer whose asker has given up: give back what came with it."""
        if isinstance(answer, p.Leased) and answer.lease:
            self.tell(p.Release(0, [answer.lease]))
        elif isinstance(answer, p.Lent | p.Committed) and answer.serials:
            self.tell(p.Abort(0, answer.serials))
        elif isinstance(answer, p.DirectHeld) and answer.lease:
            self.tell(p.DirectRelease(0, [answer.lease]))
        elif isinstance(answer, p.DirectLent) and any(row[0] for row in answer.rows):
            self.tell(p.DirectAbort(0, [row[0] for row in answer.rows if row[0]]))
        elif isinstance(answer, p.Failed) and answer.code == "bad_frame":
            self.close()
            raise ProtocolError(f"the daemon refused a frame: {answer.message}")

    def _late(self) -> DeadlinePassed:
        return DeadlinePassed(
            f"the daemon at {self.path} did not answer in time", hint="is it stopped, or its disk stuck? see kvd stats"
        )

    # ---- state -------------------------------------------------------------------------------------------------------

    def alive(self) -> bool:
        """Whether the other end has not hung up. The daemon hangs up before it lets go of what this connection pinned."""
        with self._polling:
            return not self.closed and not self._poll.poll(0)

    def allow_writing(self) -> None:
        """Map the arena for writing too, over a short second connection that fetches the descriptor."""
        hello = p.Hello(p.VERSION, write=True, attach=self.welcome.session)
        link, _, fd = _greet(self.path, hello, min(self.timeout_s, GREETING_S))
        link.close()
        self.mapping.allow_writing(fd)

    def close(self) -> None:
        """Hang up and wake everybody who waits. In a fork, only this process's descriptor goes: the connection is the parent's."""
        if self.pid != os.getpid():
            self.closed = True
            self._socket.close()
            return
        with self._state:
            if self.closed:
                return
            self.closed = True
            waiters = list(self._waiters.values())
            self._waiters.clear()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for waiter in waiters:
            with contextlib.suppress(RuntimeError):  # it may have been let through a moment ago
                waiter.gate.release()


def _greet(path: Path, hello: p.Hello, timeout_s: float) -> tuple[socket.socket, p.Welcome, int]:
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    fds: list[int] = []
    try:
        seconds = _TIMEVAL.pack(*divmod(max(1000, int(timeout_s * 1e6)), 1_000_000))
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, seconds)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)
        link.connect(str(path))
        link.sendall(p.encode(hello))
        data = b""
        while len(data) < 4 or len(data) < 4 + p.LENGTH.unpack_from(data)[0]:
            part, new, _, _ = socket.recv_fds(link, 4096, 1)
            fds += new
            if not part:
                raise Unavailable(f"the daemon at {path} hung up", hint="its log says why; uid and gid must be on its allow-list")
            data += part
        welcome = p.welcome_decoder.decode(data[4:])
        if isinstance(welcome, p.Failed) or not fds:
            raise Unavailable(
                f"the daemon at {path} refused: {welcome.message if isinstance(welcome, p.Failed) else 'no arena came'}"
            )
    except BaseException as error:
        link.close()
        for fd in fds:
            os.close(fd)
        if isinstance(error, BlockingIOError):
            raise NotAnswering(f"the daemon at {path} does not answer", hint="is it stopped?") from None
        if isinstance(error, OSError):
            raise _unreachable(path, error) from None
        if isinstance(error, msgspec.DecodeError):
            raise Unavailable(f"{path} is not a kvd socket") from None
        raise
    return link, welcome, fds[0]


def _unreachable(path: Path, error: OSError) -> Unavailable:
    if isinstance(error, FileNotFoundError):
        return Unavailable(f"no daemon at {path}", hint="start one: kvd serve; or name its socket: --socket or KVD_SOCKET")
    if isinstance(error, ConnectionRefusedError) and not path.is_socket():
        return Unavailable(f"{path} is not a socket", hint="name the daemon's socket: --socket or KVD_SOCKET")
    if isinstance(error, ConnectionRefusedError):
        return Unavailable(f"nothing listens at {path} any more", hint=f"start a daemon there: kvd serve --socket {path}")
    if isinstance(error, PermissionError):
        return Unavailable(
            f"not allowed to connect to {path}", hint="run as its owner, or let it have --socket-mode and --allow-uid"
        )
    return Unavailable(f"cannot connect to {path}: {error.strerror or error}")


def _error(answer: p.Failed, path: Path) -> KvdError:
    kind = _ERRORS.get(answer.code, KvdError)
    error = kind(f"{answer.message}" if kind is not KvdError else f"the daemon at {path} failed: {answer.message}")
    error.code = answer.code
    return error
