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
_RELEASE_S = 0.1
_RELEASE_BYTES = 128 << 10
_RELEASE_PART = 1024
"""Brief leases go back with the next request when there are so many, the first is so old, or one holds so much (or so large a
part of the arena)."""
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
    named = os.environ.get("KVD_SOCKET") or os.environ.get("INFERA_KVD_SOCKET")
    return Path(named) if named else standard_socket()


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
        self._release_from_s = 0.0

    # ---- requests ----------------------------------------------------------------------------------------------------

    def call(self, request: p.Request, kind: type[A], timeout_s: float | None = None) -> A:
        """Send a request and return its answer. Raises DeadlinePassed, Disconnected, or what the daemon answered."""
        deadline = time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)
        with self._state:
            # Who finds nobody reading needs no waiter: it reads until its own answer is there.
            waiter = Waiter() if self._read_by_someone else None
            self._register(request, waiter)
            if waiter is None:
                self._read_by_someone = True
            else:
                waiter.waits = True
        try:
            self._send(request)
        except BaseException:
            self._give_up(request, waiter)
            raise
        return self._answer(waiter, request, kind, deadline)

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

    def _register(self, request: p.Request, waiter: Waiter | None) -> None:
        if self.closed:
            raise Disconnected(f"the daemon at {self.path} is gone")
        request.id = self._next_id
        self._next_id += 1
        if waiter is not None:
            self._waiters[request.id] = waiter

    def wait(self, waiter: Waiter, request: p.Request, kind: type[A], timeout_s: float | None = None) -> A:
        """The answer to a submitted request."""
        deadline = time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)
        with self._state:
            waiter.waits = True
            if waiter.answer is None and not self._read_by_someone and not self.closed:
                waiter.leads = self._read_by_someone = True
        return self._answer(waiter, request, kind, deadline)

    def _answer(self, waiter: Waiter | None, request: p.Request, kind: type[A], deadline: float) -> A:
        try:
            leads = waiter is None or waiter.leads
            answer = self._lead(request.id, deadline) if leads else self._follow(request.id, waiter, deadline)  # type: ignore[arg-type]
        except BaseException:
            self._give_up(request, waiter)
            raise
        if isinstance(answer, kind):
            return answer
        if isinstance(answer, p.Failed):
            raise _error(answer, self.path)
        raise ProtocolError(f"the daemon answered {type(request).__name__} with {type(answer).__name__}")

    def _give_up(self, request: p.Request, waiter: Waiter | None) -> None:
        if waiter is not None:
            self.forget(request, waiter)
        if waiter is None or waiter.leads:
            self._pass_on(request.id)

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

    def release_soon(self, lease: int, size: int, now: float) -> None:
        """Release a brief lease, over a value of `size` bytes, along with one of the next requests.

        It would end by itself shortly, and a send of its own wakes the daemon for nothing; even a frame of its own in a
        send costs a tenth of a get. So small values are released some at a time, large ones with the very next request.
        """
        if not self._to_release:
            self._release_from_s = now + _RELEASE_S
        self._to_release.append(lease)
        if size > min(_RELEASE_BYTES, self.welcome.arena_bytes // _RELEASE_PART) or len(self._to_release) >= _RELEASES:
            self._release_from_s = 0.0
            if len(self._to_release) >= 2 * _RELEASES:
                self.tell(p.Ping(0))

    def _send(self, request: p.Request) -> None:
        if self.pid != os.getpid():
            raise Disconnected("the connection belongs to the process this one was forked from")
        try:
            frame = p.encode(request)
            if self._to_release and (self._release_from_s == 0.0 or time.monotonic() > self._release_from_s):
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

    def _lead(self, number: int, deadline: float) -> p.Answer:
        """Read frames until ours, which has this number, is there; then let somebody else read."""
        mine: p.Answer | None = None
        while mine is None:
            for answer in self._receive(deadline):
                if answer.id == number:
                    mine = answer
                    continue
                with self._state:
                    owner = self._waiters.pop(answer.id, None)
                if owner is None:
                    self._orphan(answer)
                else:
                    owner.answer = answer
                    owner.gate.release()
        self._pass_on(number)
        return mine

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
            return self._lead(number, deadline)
        raise Disconnected(f"the daemon at {self.path} is gone")

    def _pass_on(self, number: int) -> None:
        """Whose request had this number reads no more: somebody else does who waits, if anybody does."""
        with self._state:
            self._waiters.pop(number, None)
            for waiter in self._waiters.values():
                if waiter.waits and not waiter.leads:
                    waiter.leads = True
                    waiter.gate.release()
                    return
            self._read_by_someone = False

    def _receive(self, deadline: float) -> list[p.Answer]:
        """Whole frames that have arrived, at least one."""
        while True:
            if self._buffer and (answers := self._take()):
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
            if not self._buffer and len(data) >= 4 and p.LENGTH.unpack_from(data)[0] == len(data) - 4 <= p.MAX_FRAME:
                return [self._decoded(memoryview(data)[4:])]  # the usual case: one whole frame
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
            answers.append(self._decoded(memoryview(buffer)[at + 4 : at + 4 + size]))
            at += 4 + size
        if at:
            self._buffer = buffer[at:]
        return answers

    def _decoded(self, body: memoryview) -> p.Answer:
        try:
            return p.answer_decoder.decode(body)
        except msgspec.DecodeError as error:
            self.close()
            raise ProtocolError(f"cannot decode what the daemon sent: {error}") from None

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
