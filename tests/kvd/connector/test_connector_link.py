"""A link meets daemons that are absent, gone, wedged and back: it costs one time-out and finds its way by itself."""

import signal
import time

import pytest

from kvd.connector.attach import Links
from kvd.connector.link import Down, Link, wait_up
from kvd.connector.metrics import Counters
from kvd.connector.settings import read_settings
from kvd.errors import DeadlinePassed, NoRoom, Unavailable
from tests.support.daemon import MakeDaemon
from tests.support.processes import wait_until


class Client:
    def __init__(self) -> None:
        self.closed = False
        self.there = True

    def alive(self) -> bool:
        return self.there

    def close(self) -> None:
        self.closed = True


def test_it_is_down_until_the_daemon_is_there() -> None:
    there = False
    tries = []

    def connect() -> Client:
        tries.append(time.monotonic())
        if not there:
            raise Unavailable("no daemon")
        return Client()

    with Link("test", connect) as link:
        link.start()
        with pytest.raises(Down):
            link.call(lambda client: client)
        wait_until(lambda: len(tries) >= 3)
        there = True
        assert wait_up(link, 5)
        assert isinstance(link.call(lambda client: client), Client)


@pytest.mark.parametrize("error", [Unavailable("gone"), DeadlinePassed("late")])
def test_one_failure_takes_it_down_and_the_next_call_does_not_wait(error: Exception) -> None:
    losses = []
    clients = [Client()]
    with Link("test", lambda: clients[-1], on_loss=lambda: losses.append(1)) as link:
        link.start()
        assert wait_up(link, 5)
        first, blocked = clients[0], []

        def fail(client: Client) -> None:
            link._connect = lambda: blocked.append(1) or (_ for _ in ()).throw(Unavailable("still gone"))
            raise error

        with pytest.raises(Down):
            link.call(fail)
        assert first.closed
        begun = time.monotonic()
        for _ in range(1000):
            with pytest.raises(Down):
                link.call(lambda client: client)
        assert time.monotonic() - begun < 0.5
        assert losses == [1]
        link._connect = Client
        assert wait_up(link, 10)


def test_an_idle_link_sees_that_the_daemon_hung_up() -> None:
    clients: list[Client] = []

    def connect() -> Client:
        if clients:
            raise Unavailable("no daemon")
        clients.append(Client())
        return clients[0]

    with Link("test", connect) as link:
        link.start()
        assert wait_up(link, 5)
        assert link.look()
        clients[0].there = False
        assert not link.look()
        assert clients[0].closed
        assert not link.up


def test_other_errors_are_the_callers() -> None:
    with Link("test", Client) as link:
        link.start()
        assert wait_up(link, 5)

        def refuse(client: Client) -> None:
            raise NoRoom("full")

        with pytest.raises(NoRoom):
            link.call(refuse)
        assert link.up


def test_closing_ends_the_search() -> None:
    def connect() -> Client:
        raise Unavailable("never")

    link = Link("test", connect)
    link.start()
    probe = link._probe
    assert probe is not None
    link.close()
    assert not probe.is_alive()
    with pytest.raises(Down):
        link.call(lambda client: client)


@pytest.mark.real("kvd")
def test_the_links_of_a_process_survive_the_daemon(kvd_daemon: MakeDaemon) -> None:
    daemon = kvd_daemon(max_bytes="4MiB", start=False)
    counters = Counters()
    links = Links(read_settings({}, {"KVD_SOCKET": str(daemon.socket), "KVD_LOOKUP_TIMEOUT": "200ms"}), counters)
    try:
        assert not wait_up(links.lookup(), 0.2)
        daemon.start()
        assert wait_up(links.lookup(), 10)
        assert wait_up(links.save(), 10)
        assert wait_up(links.load(), 10)
        daemon.signal(signal.SIGSTOP)
        begun = time.monotonic()
        with pytest.raises(Down):
            links.lookup().call(lambda client: client.exists([b"k" * 32]))
        assert 0.15 < time.monotonic() - begun < 1.0
        daemon.signal(signal.SIGCONT)
        assert wait_up(links.lookup(), 10)
        daemon.restart(kill=True)
        links.lookup().call(lambda client: client.exists([b"k" * 32]))
        assert counters.values()["down"] == 1, "a daemon that is back already costs nothing"
    finally:
        links.close()
