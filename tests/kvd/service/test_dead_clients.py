"""Clients that die: what they read is unpinned at once, what they were writing to is nobody's until they cannot write."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvd.store.extents import PAGE
from kvd.wire.client import Client
from tests.support.daemon import Daemon, MakeDaemon
from tests.support.processes import wait_until

pytestmark = pytest.mark.real("kvd")

ROOT = Path(__file__).parents[3]
MIB = 1 << 20
K = b"k" * 32

CLIENT = """
import os, sys, time
from pathlib import Path
from kvd.wire.client import Client
client = Client(Path(sys.argv[1]))
kind = sys.argv[2]
if kind == "read":
    lease = client.read([b"k" * 32])
    assert lease.views[0] is not None
elif kind == "write":
    lease = client.write([1 << 20] * 4)
elif kind == "copy":
    # In mid-copy for ever: writes its mark over its extent, again and again, through the mapping it has.
    lease = client.write([1 << 20] * 4)
    fd = client.connect()._socket.fileno()
    print(lease._serials, flush=True)
    while True:
        for view in lease.views:
            view[:65536] = b"W" * 65536
        if os.path.exists(sys.argv[3]):
            os.unlink(sys.argv[3])
            client.connect()._socket.shutdown(2)  # the connection goes, the copying goes on
elif kind == "token":
    print(client.prefix([b"k" * 32], pin_s=20).token.hex(), flush=True)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture(scope="module")
def daemon(kvd_daemon_module: MakeDaemon) -> Daemon:
    return kvd_daemon_module(max_bytes="8MiB")


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    with daemon.client() as made:
        made.put(K, b"x" * 100_000)
        yield made
        made.clear(all_namespaces=True)
        wait_until(lambda: made.stats()["quarantine_bytes"] == 0, what="nothing to be kept apart any more")


class Other:
    """Another process with a client that holds something."""

    def __init__(self, daemon: Daemon, kind: str, signal_file: Path | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CLIENT, str(daemon.socket), kind, str(signal_file or "")],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.said = self.process.stdout.readline().strip()
        assert self.said

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.send_signal(signal.SIGCONT)
        self.process.wait(10)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def other(daemon: Daemon) -> Iterator[Any]:
    made: list[Other] = []

    def make(kind: str, signal_file: Path | None = None) -> Other:
        made.append(Other(daemon, kind, signal_file))
        return made[-1]

    yield make
    for one in made:
        if one.process.poll() is None:
            one.kill()


def test_a_dead_readers_pins_are_off(daemon: Daemon, client: Client, other: Any) -> None:
    reader = other("read")
    assert client.stats()["leases_active"] == 1
    client.delete([K])
    assert client.stats()["arena_bytes_used"] > 0, "its bytes stay while it reads"
    reader.kill()
    wait_until(lambda: client.stats()["leases_active"] == 0, what="the lease to end")
    wait_until(lambda: client.stats()["arena_bytes_used"] == 0, timeout_s=3, what="the bytes to be free")


def test_a_stopped_reader_keeps_its_pins_until_its_deadline_only(daemon: Daemon, client: Client, other: Any) -> None:
    """Its connection is up, so its lease lives; it is the deadline (half a minute) that ends it, not us."""
    reader = other("read")
    reader.process.send_signal(signal.SIGSTOP)
    time.sleep(0.3)
    assert client.stats()["leases_active"] == 1
    reader.kill()
    wait_until(lambda: client.stats()["leases_active"] == 0, what="the lease to end with its process")


def test_a_dead_writers_extents_are_free_once_it_is_gone(daemon: Daemon, client: Client, other: Any) -> None:
    before = 25 * PAGE  # the value, and nothing lent ahead any more, which goes back after a second
    wait_until(lambda: client.stats()["arena_bytes_used"] == before, what="what was lent ahead to come back")
    writer = other("write")
    assert client.stats()["arena_bytes_used"] == before + 4 * MIB
    writer.kill()
    wait_until(lambda: client.stats()["arena_bytes_used"] == before, what="its extents to be free")
    assert client.stats()["quarantine_bytes"] == 0


def test_an_extent_is_not_reused_while_its_writer_may_still_be_copying(
    daemon: Daemon, client: Client, other: Any, tmp_path: Path
) -> None:
    """The writer's connection is cut in mid-copy, then it is stopped: nobody else gets its pages. Killed, they are free."""
    cut = tmp_path / "cut"
    writer = other("copy", cut)
    cut.touch()
    wait_until(lambda: client.stats()["quarantine_bytes"] == 4 * MIB, what="its extents to be kept apart")
    writer.process.send_signal(signal.SIGSTOP)

    # Everything else that can be had is taken and filled, several times over; the writer runs in between.
    for round_ in range(6):
        items = [(bytes([round_, n]) * 16, bytes([n]) * MIB) for n in range(3)]
        assert all(client.put_many(items))
        writer.process.send_signal(signal.SIGCONT)
        time.sleep(0.05)
        writer.process.send_signal(signal.SIGSTOP)
        for (_, data), got in zip(items, client.get_many([key for key, _ in items]), strict=True):
            assert got is None or got == data, "the stalled copy landed in somebody else's value"
    client.timeout_s = 0.3
    assert client.put(b"b" * 32, b"b" * (5 * MIB)).reason in ("no_room", "busy")
    client.timeout_s = 5.0
    assert client.stats()["quarantine_bytes"] == 4 * MIB

    writer.kill()
    wait_until(lambda: client.stats()["quarantine_bytes"] == 0, what="its extents to come free with its process")
    assert client.put(b"b" * 32, b"b" * (5 * MIB))
    assert client.get(b"b" * 32) == b"b" * (5 * MIB)


def test_an_extent_of_a_living_process_stays_apart_for_ever(daemon: Daemon, client: Client, other: Any, tmp_path: Path) -> None:
    cut = tmp_path / "cut"
    writer = other("copy", cut)
    cut.touch()
    wait_until(lambda: client.stats()["quarantine_bytes"] == 4 * MIB, what="its extents to be kept apart")
    run = daemon.run("status", "--json")
    assert run.json()["health"] == "HEALTH_WARN"
    assert any("kept apart" in reason for reason in run.json()["reasons"])
    time.sleep(0.5)
    assert client.stats()["quarantine_bytes"] == 4 * MIB
    writer.kill()


def test_a_token_outlives_the_one_who_asked_for_it(daemon: Daemon, client: Client, other: Any) -> None:
    """The scheduler's connection may go; the worker claims what it pinned all the same."""
    scheduler = other("token")
    scheduler.kill()
    client.delete([K])
    with client.claim(bytes.fromhex(scheduler.said)) as lease:
        assert lease.views[0] is not None
        assert bytes(lease.views[0]) == b"x" * 100_000


def test_clients_that_die_in_the_middle_of_everything_leave_nothing(daemon: Daemon, client: Client) -> None:
    """Short lives, killed at a random moment."""
    code = f"""
import random, sys
from pathlib import Path
from kvd.wire.client import Client
client = Client(Path({str(daemon.socket)!r}), namespace="victim")
print("ready", flush=True)
while True:
    n = random.randrange(50)
    key = n.to_bytes(32, "big")
    random.choice([
        lambda: client.put(key, bytes([n]) * random.randrange(200_000)),
        lambda: client.get(key),
        lambda: client.read([key]),
        lambda: client.write([random.randrange(1, 300_000)]),
        lambda: client.prefix([key], pin_s=0.2),
        lambda: client.put(key, b"small"),
    ])()
"""
    for batch in range(2):
        victims = [
            subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE)
            for _ in range(3)
        ]
        for victim in victims:
            assert victim.stdout is not None
            victim.stdout.readline()
        time.sleep(0.15 * (batch + 1))
        for victim in victims:
            victim.kill()
        for victim in victims:
            victim.wait(10)
            assert victim.stdout is not None
            victim.stdout.close()
    wait_until(lambda: client.stats()["leases_active"] == 0, what="all leases to end")
    wait_until(lambda: client.stats()["tokens_active"] == 0, what="all tokens to end")
    wait_until(lambda: client.stats()["quarantine_bytes"] == 0, what="all extents to be free")
    with daemon.client(namespace="victim") as reader:
        for n in range(50):
            value = reader.get(n.to_bytes(32, "big"))
            assert value is None or value == b"small" or set(value) <= {n}
    client.clear(all_namespaces=True)
    wait_until(lambda: client.stats()["arena_bytes_used"] < 64 * PAGE, what="the arena to be empty")
    assert client.stats()["connections"] == 1
