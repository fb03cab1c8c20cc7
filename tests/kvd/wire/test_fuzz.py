"""Whatever bytes arrive, the daemon answers an error or hangs up, serves everybody else, and keeps nothing."""

import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from kvd.store.extents import PAGE
from kvd.wire import protocol as p
from tests.kvd.wire.raw import Raw
from tests.kvd.wire.test_protocol import REQUESTS, messages
from tests.support.daemon import Daemon, MakeDaemon
from tests.support.processes import run_python, wait_until

pytestmark = pytest.mark.real("kvd")

KEEP = b"k" * 32
FUZZ = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def daemon(kvd_daemon_module: MakeDaemon) -> Iterator[Daemon]:
    """One daemon for all the abuse; in the end it must be as it was."""
    made = kvd_daemon_module(max_bytes="8MiB", tier="64MiB")
    with made.client(namespace=b"!" * 32) as client:
        assert client.put(KEEP, b"kept" * 4096, wait="tier")
    yield made
    assert "failed unexpectedly" not in made.text(), made.text()[-3000:]
    assert "Traceback" not in made.text()


def open_files(daemon: Daemon) -> int:
    return len(os.listdir(f"/proc/{daemon.pid}/fd"))


def sound(daemon: Daemon) -> None:
    """It lives, serves, and gave no page away for good."""
    with daemon.client(namespace=b"!" * 32) as client:
        assert client.get(KEEP) == b"kept" * 4096


@given(data=st.binary(max_size=200))
@FUZZ
def test_raw_bytes_for_a_greeting(daemon: Daemon, data: bytes) -> None:
    with Raw(daemon.socket, None) as raw:
        raw.link.sendall(data)
        raw.link.shutdown(socket.SHUT_WR)
        try:
            raw.frame()  # an error frame may come first
        except (EOFError, ConnectionResetError):
            return
        assert raw.hung_up()


@given(data=st.binary(min_size=4, max_size=400))
@FUZZ
def test_raw_bytes_after_the_greeting(daemon: Daemon, data: bytes) -> None:
    with Raw(daemon.socket) as raw:
        raw.link.sendall(data)
        raw.link.shutdown(socket.SHUT_WR)
        for _ in range(len(data)):
            try:
                raw.answer()
            except (EOFError, ConnectionResetError):
                break
        else:
            pytest.fail("the daemon never hung up")


@given(
    message=messages(REQUESTS), edits=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=6), cut=st.booleans()
)
@FUZZ
def test_valid_frames_with_a_few_bytes_changed(daemon: Daemon, message: p.Request, edits: list[tuple[int, int]], cut: bool) -> None:
    frame = p.encode(message)
    for at, byte in edits:
        frame[4 + at % max(1, len(frame) - 4) if len(frame) > 4 else 0] = byte
    if cut:
        del frame[4 + len(frame) // 2 :]
        struct.pack_into("<I", frame, 0, len(frame) - 4)
    if len(frame) > 5 and frame[5] in (p.Drain.__struct_config__.tag, p.Clear.__struct_config__.tag):
        return  # orders like any other: one would end this daemon's usefulness, the other empty it
    with Raw(daemon.socket) as raw:
        raw.link.sendall(frame)
        try:
            raw.send(p.Ping(2**63))
            raw.link.shutdown(socket.SHUT_WR)
            while not isinstance(raw.answer(), p.Failed | p.Done):
                pass
        except (EOFError, OSError):
            pass  # hanging up is an answer too


@given(message=messages(tuple(kind for kind in REQUESTS if kind is not p.Drain)))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_well_formed_requests_with_absurd_values(daemon: Daemon, message: p.Request) -> None:
    """Any number a field can hold, any length of key: an answer or a refusal, never an accident."""
    assume(not (isinstance(message, p.Clear) and not message.namespace))  # clears everything, as it should
    message.id = 7
    with Raw(daemon.socket, timeout_s=1.0) as raw:
        raw.send(message, p.Ping(8))
        seen = set()
        try:
            while 8 not in seen:
                answer = raw.answer()
                seen.add(answer.id)
                if isinstance(answer, p.Failed):
                    assert answer.code in p.CODES
                    assert answer.code != "internal", answer
        except TimeoutError:
            pytest.fail(f"{message} held up a ping")


def test_absurd_values_one_by_one(daemon: Daemon) -> None:
    """What the search above may miss: each at the edge of a column, a shift or a page."""
    n, k = b"n" * 32, b"k" * 32
    most = (1 << 64) - 1
    with Raw(daemon.socket) as raw:
        refused: list[p.Request] = [
            p.Reserve(1, [-1]),
            p.Reserve(1, [most]),
            p.Reserve(1, [1] * (p.MAX_BATCH + 1)),
            p.Commit(1, n, [1], [-1], [k], 3),
            p.Commit(1, n, [1], [most], [k], 3),
            p.Commit(1, n, [1], [1], [k], 3, expires_ns=most),
            p.Commit(1, n, [1], [1], [k], 3, expires_ns=-1),
            p.Commit(1, n, [1, 2], [1], [k], 3),
            p.Commit(1, n, [1], [1], [k], 9),
            p.Commit(1, n[:-1], [1], [1], [k], 3),
            p.Commit(1, n, [1], [1], [k + b"x"], 3),
            p.Commit(1, n, [], [], [], 3, ahead=[-(1 << 40)]),
            p.Commit(1, n, [], [], [], 3, ahead=[-1]),
            p.PutInline(1, n, [k], [b"v"], 3, expires_ns=most),
            p.PutInline(1, n, [k], [b"v" * (p.INLINE_BYTES + 1)], 3),
            p.PutInline(1, n, [k], [], 3),
            p.Lease(1, n, [k] * (p.MAX_BATCH + 1)),
            p.Exists(1, n, [k] * (p.MAX_BATCH + 1)),
            p.Prefix(1, [], [k]),
            p.Prefix(1, [n] * 100_000, [k] * 11),
            p.Renew(1, most),
            p.Claim(1, b"", n),
            # A namespace that is a byte short and a key that is a byte long would name another namespace's value.
            p.Exists(1, n[:-1], [b"n" + k]),
            p.Lease(1, n[:-1], [b"n" + k], 100),
            p.Delete(1, n[:-1], [b"n" + k]),
            p.Prefetch(1, n[:-1], [b"n" + k]),
            p.Where(1, n[:-1], [b"n" + k]),
            p.Prefix(1, [n[:-1]], [b"n" + k]),
            p.Clear(1, n[:-1]),
            p.Unpin(1, b"", n[:-1]),
            p.Keys(1, n[:-1]),
        ]
        for request in refused:
            answer = raw.ask(request)
            if isinstance(answer, p.Committed):
                assert answer.reasons == ["lease_lost"], request
                continue
            assert isinstance(answer, p.Failed), (request, answer)
            assert answer.code in ("bad_request", "too_large", "lease_lost"), (request, answer)
    sound(daemon)


@pytest.mark.parametrize("size", [p.MAX_FRAME + 1, 2**31, 2**32 - 1])
def test_a_frame_over_the_cap_is_refused_before_it_is_read(daemon: Daemon, size: int) -> None:
    with Raw(daemon.socket) as raw:
        raw.send(struct.pack("<I", size) + b"beginning")
        answer = raw.answer()
        assert isinstance(answer, p.Failed)
        assert answer.code == "bad_frame"
        assert "over the limit" in answer.message
        assert raw.hung_up()


def test_the_largest_frame_is_taken(daemon: Daemon) -> None:
    keys = [i.to_bytes(32, "big") for i in range(p.MAX_BATCH)]
    with Raw(daemon.socket) as raw:
        answer = raw.ask(p.Exists(3, b"n" * 32, keys))
        assert answer.flags == bytes(p.MAX_BATCH)


def test_a_frame_in_single_bytes_is_a_frame(daemon: Daemon) -> None:
    with Raw(daemon.socket) as raw:
        for byte in p.encode(p.Ping(5)) + p.encode(p.Ping(6)):
            raw.link.sendall(bytes([byte]))
        assert [raw.answer().id, raw.answer().id] == [5, 6]


def test_requests_before_a_bad_frame_are_answered(daemon: Daemon) -> None:
    with Raw(daemon.socket) as raw:
        raw.send(p.Ping(1), p.Ping(2), struct.pack("<I", 3) + b"\xc1\xc1\xc1", p.Ping(3))
        assert [raw.answer().id for _ in range(2)] == [1, 2]
        assert raw.answer().code == "bad_frame"
        assert raw.hung_up()


@pytest.mark.parametrize("version", [0, 2, 2**40])
def test_another_version_is_told_both_versions(daemon: Daemon, version: int) -> None:
    with Raw(daemon.socket, p.Hello(version)) as raw:
        assert isinstance(raw.welcome, p.Failed)
        assert str(p.VERSION) in raw.welcome.message
        assert str(version) in raw.welcome.message
        assert raw.hung_up()
        assert not raw.fds


def test_what_garbage_had_been_lent_is_kept_apart_and_free_when_its_process_ends(daemon: Daemon) -> None:
    """Reserved, then nonsense: the extents are nobody's until nobody can be copying into them."""
    code = f"""
import sys
from pathlib import Path
from kvd.wire import protocol as p
from tests.kvd.wire.raw import Raw
for _ in range(20):
    with Raw(Path({str(daemon.socket)!r})) as raw:
        raw.ask(p.Reserve(1, [{PAGE}] * 4))
        raw.send(b"\\xff\\xff\\xff\\xff")
        raw.answer()
with Raw(Path({str(daemon.socket)!r})) as raw:
    print(raw.ask(p.Stats(1)).info["quarantine_bytes"])
"""
    with daemon.client() as client:
        before = client.stats()["quarantine_bytes"]
        run = run_python(code, env={"PYTHONPATH": str(Path(__file__).parents[3])})
        assert run.rc == 0, run.stderr
        assert int(run.stdout) - before == 20 * 4 * PAGE
        wait_until(lambda: client.stats()["quarantine_bytes"] == before, what="the extents to come free")
    sound(daemon)


def test_connections_that_say_nothing_are_not_kept(daemon: Daemon) -> None:
    """A port scan of sorts: connect and leave, greet and leave, greet in half."""
    before = open_files(daemon)
    for _ in range(40):
        Raw(daemon.socket, None).close()
        with Raw(daemon.socket, None) as raw:
            raw.send(p.Hello(p.VERSION))
        with Raw(daemon.socket, None) as raw:
            raw.link.sendall(b"\x20\0\0\0\x91")
    wait_until(lambda: open_files(daemon) <= before, what="the daemon to let go of 120 connections")
    with daemon.client() as client:
        assert client.stats()["connections"] <= 2
    assert Path(daemon.socket).exists()
