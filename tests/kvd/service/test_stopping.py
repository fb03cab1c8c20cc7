"""How a daemon ends: SIGTERM drains and keeps its deadline, a second one ends it now, draining refuses writes and nothing else."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd.errors import Draining
from tests.kvd.tiers.ram_tier import RamTier, running
from tests.support.daemon import MakeDaemon
from tests.support.processes import wait_until

pytestmark = pytest.mark.real("kvd")

ROOT = Path(__file__).parents[3]
K = b"k" * 32
V = b"value" * 5000


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def test_sigterm_writes_down_what_was_on_its_way(kvd_daemon: MakeDaemon) -> None:
    daemon = kvd_daemon(max_bytes="64MiB", tier="256MiB")
    with daemon.client() as client:
        assert all(client.put_many([(key(i), bytes([i]) * 500_000) for i in range(60)]))
    assert daemon.stop() == 0
    assert not daemon.socket.exists()
    assert not daemon.segment.exists()
    daemon.start()
    with daemon.client() as client:
        assert client.get_many([key(i) for i in range(60)]) == [bytes([i]) * 500_000 for i in range(60)]
        assert client.stats()["tiers"][0]["hits_total"] == 60


def test_ctrl_c_ends_it_in_order_too(kvd_daemon: MakeDaemon) -> None:
    daemon = kvd_daemon(max_bytes="4MiB")
    daemon.signal(signal.SIGINT)
    assert daemon.wait() == 0


def test_clients_see_a_hang_up_and_not_a_hang(kvd_daemon: MakeDaemon) -> None:
    daemon = kvd_daemon(max_bytes="4MiB")
    with daemon.client() as client:
        client.put(K, V)
        assert daemon.stop() == 0
        began = time.monotonic()
        with pytest.raises(Exception, match=r"no daemon at|gone"):
            client.get(K)
        assert time.monotonic() - began < 1


class TestDraining:
    def test_writes_are_refused_reads_are_served(self, kvd_daemon: MakeDaemon) -> None:
        daemon = kvd_daemon(max_bytes="8MiB", tier="64MiB")
        with daemon.client() as client:
            client.put_many([(K, V), (b"s" * 32, b"small")])
            lease = client.write([100])
            drained = daemon.run("drain", "--json")
            assert drained.rc == 0
            assert drained.json()["drained"] is True
            assert drained.json()["durability"] in ("group", "fsync")
            assert client.get_many([K, b"s" * 32]) == [V, b"small"]
            assert client.put(b"n" * 32, V).reason == "draining"
            assert client.put(b"n" * 32, b"small").reason == "draining"
            assert {r.reason for r in client.put_many([(key(i), V) for i in range(3)])} == {"draining"}
            with pytest.raises(Draining):
                client.write([5])
            lease.views[0][:] = b"x" * 100
            assert lease.commit([b"n" * 32])[0].reason == "draining"
            assert client.exists([b"n" * 32]) == [False]
            assert client.delete([b"s" * 32]) == 1
            stats = client.stats()
            assert stats["draining"] == 1
            assert stats["rejections_total"]["draining"] >= 4
        assert daemon.run("status", "--json").json()["health"] == "HEALTH_WARN"
        daemon.kill9()
        daemon.start()
        with daemon.client() as client:
            assert client.get(K) == V, "what was drained outlives even kill -9"
            assert client.put(b"n" * 32, V), "a restart takes writes again"

    @pytest.mark.parametrize("later", [False, True], ids=["all stored before", "and more put after"])
    def test_a_tier_whose_folder_was_removed_fails_the_drain(self, kvd_daemon: MakeDaemon, later: bool) -> None:
        daemon = kvd_daemon(max_bytes="16MiB", tier="64MiB")
        with daemon.client(timeout_s=20) as client:
            assert all(client.put_many([(key(i), V) for i in range(20)], wait="tier"))
            client.flush()
            shutil.rmtree(daemon.tier)
            if later:
                client.put_many([(key(i), V) for i in range(20, 40)])
            run = daemon.run("drain", "--timeout", "8s")
            assert run.rc == 1, run.stderr
            assert "end with this daemon" in run.stderr
            assert str(daemon.tier) in run.stderr
            body = daemon.run("drain", "--json", "--timeout", "8s").json()
            assert body["drained"] is False
            assert body["left"] >= 20
            assert body["durability"] == "none"
            assert client.get_many([key(i) for i in range(20)]) == [V] * 20, "until the daemon ends"
        daemon.kill9()

    def test_a_drain_that_cannot_finish_says_so_at_its_deadline(self) -> None:
        tier = RamTier()
        with running(tier) as daemon, daemon.client() as client:
            tier.stores.close()
            client.put(K, V)
            from kvd.errors import DeadlinePassed
            from kvd.wire import protocol as p

            began = time.monotonic()
            with pytest.raises(DeadlinePassed):
                client.connect().call(p.Drain(0, 300), p.Done, 5)
            assert time.monotonic() - began < 2
            assert client.get(K) == V

    def test_the_daemon_still_answers_and_shows_itself_while_it_drains(self) -> None:
        """SIGTERM with a slow tier: reads, stats and the segment's heartbeat go on until it is done."""
        tier = RamTier()
        with running(tier, drain_s=10.0) as daemon, daemon.client() as client:
            tier.stores.close()
            client.put(K, V)
            tier.stores.until_blocked()
            daemon.signal()
            wait_until(lambda: client.stats()["draining"] == 1, what="the drain to begin")
            segment = next((daemon.folder / "shm").iterdir())
            before = heartbeat(segment)
            time.sleep(1.2)
            assert client.get(K) == V
            assert heartbeat(segment) > before, "it looks dead while it drains"
            tier.stores.open()
            daemon.wait()
            assert tier.closed == 1
            assert len(tier.values) == 1


def heartbeat(segment: Path) -> int:
    return int.from_bytes(segment.read_bytes()[56:64], "little")


WEDGED = """
import asyncio, sys, threading
from pathlib import Path
from kvd.service.daemon import Options
from kvd.service.settings import run
from tests.kvd.tiers.ram_tier import RamTier
tier = RamTier()
for tap in (tier.stores, tier.loads):
    tap.close()
run(Options(Path(sys.argv[1]), 4 << 20, [tier], drain_s=float(sys.argv[2])))
"""


class TestWedged:
    """The tier's calls never return: threads that cannot be ended must not keep the process."""

    @pytest.fixture
    def start(self, tmp_path: Path, kvd_daemon: MakeDaemon) -> Iterator[object]:
        host = kvd_daemon(max_bytes="4MiB", start=False)
        started: list[subprocess.Popen[str]] = []

        def make(drain_s: float) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [sys.executable, "-c", WEDGED, str(host.socket), str(drain_s)],
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stderr=subprocess.PIPE,
                text=True,
            )
            started.append(process)
            wait_until(host.socket.exists, timeout_s=15, what="the daemon to listen")
            with host.client() as client:
                assert client.put(K, V)
                assert client.get(K) == V
            return process

        yield make
        for process in started:
            process.kill()
            process.wait(10)
            assert process.stderr is not None
            process.stderr.close()

    def test_sigterm_keeps_its_deadline(self, start: object) -> None:
        process = start(0.5)  # type: ignore[operator]
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        process.wait(15)
        assert time.monotonic() - began < 6
        assert process.returncode in (0, 1)

    def test_a_second_sigterm_ends_it_now(self, start: object) -> None:
        process = start(60.0)  # type: ignore[operator]
        process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert process.poll() is None, "it drains"
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        process.wait(10)
        assert time.monotonic() - began < 2
        assert process.returncode == 1


RECOVERING = """
import logging, sys
from pathlib import Path
from kvd.service.daemon import Options
from kvd.service.settings import run
from tests.kvd.tiers.ram_tier import RamTier
class Slow(RamTier):
    def open(self):
        print("recovering", flush=True)
        sys.stdin.readline()
logging.basicConfig(level="INFO")
run(Options(Path(sys.argv[1]), 4 << 20, [Slow()]))
"""


class TestRecovering:
    """A tier whose recovery takes as long as the test likes."""

    @pytest.fixture
    def process(self, kvd_daemon: MakeDaemon) -> Iterator["subprocess.Popen[str]"]:
        host = kvd_daemon(max_bytes="4MiB", start=False)
        process = subprocess.Popen(
            [sys.executable, "-c", RECOVERING, str(host.socket)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "daemon")))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "recovering\n"
        yield process
        process.kill()
        if process.stdin is not None and not process.stdin.closed:
            process.communicate(timeout=10)

    def test_a_second_sigterm_ends_it_now(self, process: "subprocess.Popen[str]") -> None:
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        assert "SIGTERM" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 1
        assert "told twice" in process.stderr.read()

    def test_one_sigterm_ends_it_when_recovery_is_done(self, process: "subprocess.Popen[str]") -> None:
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        assert "SIGTERM" in process.stderr.readline()
        assert process.poll() is None
        _, log = process.communicate("go on\n", timeout=20)
        assert process.returncode == 0, log
        assert "nobody was served" in log


def test_stopping_under_load_loses_no_acknowledged_value(kvd_daemon: MakeDaemon) -> None:
    """Clients never stop putting; SIGTERM comes; every put that was answered as stored is there after the restart."""
    daemon = kvd_daemon(max_bytes="64MiB", tier="512MiB")
    stored: list[list[int]] = [[], []]

    def work(number: int) -> None:
        with daemon.client() as client:
            for i in range(10_000):
                try:
                    result = client.put(key(number * 10_000 + i), i.to_bytes(4, "little") * 5000)
                except Exception:
                    return
                if not result:
                    return
                stored[number].append(number * 10_000 + i)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    assert daemon.stop() == 0
    for thread in threads:
        thread.join(20)
    daemon.start()
    numbers = [n for part in stored for n in part]
    assert len(numbers) > 20
    with daemon.client(timeout_s=20) as client:
        for n, data in zip(numbers, client.get_many([key(n) for n in numbers]), strict=True):
            assert data == (n % 10_000).to_bytes(4, "little") * 5000, n
