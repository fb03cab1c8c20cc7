"""A daemon that hangs, dies and comes back; a client that forks. Bounded waits, right answers, no help needed."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from kvd.errors import DeadlinePassed, Disconnected, KvdError, LeaseLost, Unavailable
from kvd.wire.client import Client
from tests.support.daemon import Daemon, MakeDaemon
from tests.support.processes import wait_until

pytestmark = pytest.mark.real("kvd")

K = b"k" * 32
V = b"value" * 5000


@pytest.fixture(scope="module")
def lasting(kvd_daemon_module: MakeDaemon) -> Daemon:
    """For tests that stop and continue it; those that kill it have one each."""
    return kvd_daemon_module(max_bytes="16MiB")


@pytest.fixture
def daemon(kvd_daemon: MakeDaemon) -> Daemon:
    return kvd_daemon(max_bytes="16MiB")


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    with daemon.client(timeout_s=0.25) as made:
        yield made


def in_child(work: Callable[[], None]) -> int:
    """Fork, run `work` there, and return its exit status: 0 when it raised nothing."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException as error:
            os.write(2, f"{error!r}\n".encode())
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class TestHanging:
    @pytest.fixture
    def daemon(self, lasting: Daemon) -> Iterator[Daemon]:
        yield lasting
        lasting.signal(signal.SIGCONT)

    @pytest.mark.parametrize(
        "call",
        [
            lambda c: c.get(K),
            lambda c: c.put(K, V),
            lambda c: c.put(K, b"small"),
            lambda c: c.put_many([(bytes([n]) * 32, V) for n in range(20)]),
            lambda c: c.exists([K]),
            lambda c: c.read([K]),
            lambda c: c.write([9000]),
            lambda c: c.ping(),
            lambda c: c.stats(),
        ],
        ids=["get", "put", "put small", "put many", "exists", "read", "write", "ping", "stats"],
    )
    def test_a_stopped_daemon_costs_the_timeout_and_no_more(
        self, daemon: Daemon, client: Client, call: Callable[[Client], object]
    ) -> None:
        client.put(K, V)
        daemon.signal(signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(DeadlinePassed):
            call(client)
        assert 0.2 < time.monotonic() - began < 2.0
        daemon.signal(signal.SIGCONT)
        client.timeout_s = 5
        assert client.put(K, V)
        assert client.get(K) == V
        wait_until(lambda: client.stats()["leases_active"] == 0, what="late answers to be given back")

    def test_requests_beyond_what_the_socket_holds_are_bounded_too(self, daemon: Daemon, client: Client) -> None:
        """It reads nothing: the socket's buffer fills, and sending itself has to time out."""
        keys = [n.to_bytes(32, "big") for n in range(1, 20_000)]
        client.ping()
        daemon.signal(signal.SIGSTOP)
        began = time.monotonic()
        for _ in range(3):
            with pytest.raises(KvdError):
                client.exists(keys)
        assert time.monotonic() - began < 6
        daemon.signal(signal.SIGCONT)
        client.timeout_s = 5
        assert client.exists(keys[:3]) == [False] * 3

    def test_a_new_connection_to_a_stopped_daemon_is_bounded(self, daemon: Daemon) -> None:
        daemon.signal(signal.SIGSTOP)
        began = time.monotonic()
        with daemon.client(timeout_s=0.4) as client, pytest.raises(Unavailable, match="does not answer"):
            client.get(K)
        assert time.monotonic() - began < 2
        daemon.signal(signal.SIGCONT)


class TestDying:
    def test_a_killed_daemon_fails_at_once_and_is_found_again(self, daemon: Daemon, client: Client) -> None:
        client.put(K, V)
        daemon.kill9()
        began = time.monotonic()
        with pytest.raises(Unavailable):
            client.get(K)
        assert time.monotonic() - began < 0.3
        daemon.start()
        assert client.get(K) is None
        assert client.put(K, V)
        assert client.get(K) == V

    def test_a_restart_between_two_calls_goes_unnoticed(self, daemon: Daemon, client: Client) -> None:
        client.put_many([(K, V), (b"s" * 32, b"small")])
        daemon.restart(kill=True)
        client.timeout_s = 5
        assert client.put(K, V)
        assert client.put(b"s" * 32, b"small")
        assert client.get_many([K, b"s" * 32]) == [V, b"small"]
        daemon.restart()
        assert client.exists([K]) == [False]

    def test_a_lease_of_a_dead_daemon_is_void(self, daemon: Daemon, client: Client) -> None:
        client.put(K, V)
        lease = client.read([K])
        assert lease.valid
        daemon.kill9()
        with pytest.raises(LeaseLost):
            lease.check()
        assert lease.views[0] is not None
        assert len(bytes(lease.views[0])) == len(V), "void, and still safe to touch"
        with pytest.raises(LeaseLost), lease:
            pass

    def test_a_write_lease_of_a_dead_daemon_says_so_in_its_results(self, daemon: Daemon, client: Client) -> None:
        lease = client.write([100])
        daemon.kill9()
        lease.views[0][:] = b"x" * 100
        (result,) = lease.commit([K])
        assert not result
        assert result.reason == "lease_lost"
        daemon.start()

    def test_dying_in_mid_call_ends_every_waiting_thread(self, daemon: Daemon) -> None:
        client = daemon.client(timeout_s=20)
        client.ping()
        daemon.signal(signal.SIGSTOP)
        ended: list[BaseException] = []

        def ask() -> None:
            try:
                client.get(K)
            except KvdError as error:
                ended.append(error)

        threads = [threading.Thread(target=ask) for _ in range(5)]
        for thread in threads:
            thread.start()
        # One of them reads for all and needs no waiter.
        wait_until(lambda: len(client.connect()._waiters) == 4, what="five calls under way")
        began = time.monotonic()
        daemon.kill9()
        for thread in threads:
            thread.join(5)
        assert time.monotonic() - began < 2
        assert len(ended) == 5
        assert all(isinstance(error, Unavailable | Disconnected) for error in ended)
        client.close()


class TestForking:
    @pytest.fixture
    def daemon(self, lasting: Daemon) -> Daemon:
        return lasting

    def test_a_child_gets_a_connection_of_its_own(self, daemon: Daemon, client: Client) -> None:
        client.timeout_s = 5
        client.put(K, V)

        def child() -> None:
            assert client.get(K) == V
            assert client.put(b"c" * 32, V)

        assert in_child(child) == 0
        assert client.get(b"c" * 32) == V
        assert client.put(K, b"after" * 5000)

    def test_a_child_that_closes_what_it_inherited_harms_nothing(self, daemon: Daemon, client: Client) -> None:
        """multiprocessing's children end in destructors and context managers of objects they inherited."""
        client.timeout_s = 5
        client.put(K, V)
        lease = client.read([K])
        writing = client.write([9000])
        link = client.connect()

        def child() -> None:
            lease.release()
            writing.abort()
            client.close()

        assert in_child(child) == 0
        assert lease.valid
        assert client.stats()["leases_active"] == 1
        assert client.connect() is link
        assert not link.closed
        writing.views[0][:] = b"w" * 9000
        assert all(writing.commit([b"w" * 32]))
        assert client.get(b"w" * 32) == b"w" * 9000
        lease.release()

    def test_a_child_cannot_write_into_what_its_parent_was_lent(self, daemon: Daemon, client: Client) -> None:
        """The write mapping is not inherited: touching it kills the child and not the value."""
        writing = client.write([4096])
        writing.views[0][:] = b"p" * 4096

        def child() -> None:
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            writing.views[0][0] = 1

        assert in_child(child) == -signal.SIGSEGV
        assert all(writing.commit([K]))
        assert client.get(K) == b"p" * 4096
