"""Clients at the same time, an arena that evicts all the while, a tier below: what hypothesis makes of it, beside a dict.

Each key has one client that writes it and any number that read it. Steps are lists of operations, one list a client, done at the
same time. Whatever the order they meet in: a read is a miss or a whole value of exactly that key in that namespace, not older than
what was acknowledged before the read began, not deleted before it began, and not newer than what had been tried when it ended.
"""

import threading
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from kvd.wire.client import Client
from tests.kvd import proof
from tests.support.daemon import Daemon, MakeDaemon

pytestmark = [pytest.mark.real("kvd"), pytest.mark.timeout(240)]

CLIENTS = 3
SPACES = ("one", "two")
KEYS = proof.keys("concurrent", 9)
SIZES = (64, 5000, 70_000, 300_000)

Who = tuple[str, bytes]


@dataclass
class Known:
    """One key: versions acknowledged, tried, and deleted so far. Written by its one writer."""

    acknowledged: int = 0
    tried: int = 0
    deleted: int = 0


@dataclass(frozen=True)
class Operation:
    """One thing a client does: `put`, `get`, `delete`, `evict`, `hold`."""

    word: str
    space: str
    key: int
    size: int


OPERATIONS = st.builds(
    Operation,
    st.sampled_from(["put", "put", "put", "get", "get", "hold", "delete", "evict"]),
    st.sampled_from(SPACES),
    st.integers(0, len(KEYS) - 1),
    st.sampled_from(SIZES),
)


@dataclass
class Runner:
    """One client and what it found wrong."""

    number: int
    client: Client
    known: dict[Who, Known]
    wrong: list[str] = field(default_factory=list)

    def run(self, operations: list[Operation]) -> None:
        for operation in operations:
            key = KEYS[operation.key]
            # Only its own keys are written by a client; what it would write of others it reads.
            mine = operation.key % CLIENTS == self.number
            word = operation.word if mine or operation.word in ("get", "hold") else "get"
            getattr(self, word)((operation.space, key), operation.size)

    def put(self, who: Who, size: int) -> None:
        known = self.known[who]
        known.tried += 1
        version = known.tried
        if self.client.put(who[1], proof.value(who[1], version, size), namespace=who[0]):
            known.acknowledged = version

    def delete(self, who: Who, size: int) -> None:
        known = self.known[who]
        version = known.tried
        self.client.delete([who[1]], namespace=who[0])
        known.deleted = version

    def evict(self, who: Who, size: int) -> None:
        """Out of the arena, as `kvd evict` does it: not before the tier has it. The tier brings it back."""
        self.client.flush([who[1]], timeout_s=20)
        self.client.delete([who[1]], arena_only=True, namespace=who[0])

    def get(self, who: Who, size: int) -> None:
        known = self.known[who]
        least, dead = known.acknowledged, known.deleted
        self.judge(who, self.client.get(who[1], namespace=who[0]), least, dead)

    def hold(self, who: Who, size: int) -> None:
        known = self.known[who]
        least, dead = known.acknowledged, known.deleted
        with self.client.read([who[1]], namespace=who[0]) as lease:
            view = lease.views[0]
            first = None if view is None else bytes(view)
            second = None if view is None else bytes(view)
        if first != second:
            self.wrong.append(f"{who}: changed under a lease")
        self.judge(who, first, least, dead)

    def judge(self, who: Who, data: bytes | None, least: int, dead: int) -> None:
        if data is None:
            return
        if not proof.proves(who[1], data):
            self.wrong.append(f"{who}: not a value of this key")
            return
        version = proof.HEADER.unpack_from(data)[1]
        most = self.known[who].tried
        if not max(least, dead + 1 if dead else 0) <= version <= most:
            self.wrong.append(f"{who}: version {version}, acknowledged {least}, deleted {dead}, tried {most}")


def machine(daemon: Daemon) -> type[RuleBasedStateMachine]:
    """A machine over that daemon; what one example leaves there, the next one finds, and knows."""
    clients = [daemon.client(timeout_s=20) for _ in range(CLIENTS)]
    known: dict[Who, Known] = {(space, key): Known() for space in SPACES for key in KEYS}

    # More than the arena holds, so that everything below happens under eviction and promotion.
    for (space, key), one in known.items():
        assert clients[0].put(key, proof.value(key, 1, max(SIZES)), namespace=space)
        one.tried = one.acknowledged = 1
    clients[0].flush(timeout_s=20)
    for space, key in known:
        assert clients[0].get(key, namespace=space) is not None

    class Concurrent(RuleBasedStateMachine):
        @initialize()
        def begin(self) -> None:
            self.runners = [Runner(number, client, known) for number, client in enumerate(clients)]

        @rule(lists=st.tuples(*[st.lists(OPERATIONS, max_size=6)] * CLIENTS))
        def together(self, lists: tuple[list[Operation], ...]) -> None:
            threads = [
                threading.Thread(target=runner.run, args=(operations,))
                for runner, operations in zip(self.runners, lists, strict=True)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
                assert not thread.is_alive(), "a client hangs"
            assert [line for runner in self.runners for line in runner.wrong] == []

        @rule()
        def settle(self) -> None:
            """With nobody else there, the last acknowledged value of every key is there: the tier has room for all."""
            clients[0].flush(timeout_s=20)
            for who, one in known.items():
                data = clients[0].get(who[1], namespace=who[0])
                if one.acknowledged > one.deleted and one.acknowledged == one.tried:
                    assert data is not None, f"{who}: lost version {one.acknowledged}"
                    assert proof.HEADER.unpack_from(data)[1] == one.acknowledged
                elif one.deleted == one.tried:
                    assert data is None

    return Concurrent


@pytest.fixture
def daemon(kvd_daemon: MakeDaemon) -> Daemon:
    return kvd_daemon(max_bytes="1MiB", tier="128MiB")


def run(daemon: Daemon, examples: int) -> None:
    run_state_machine_as_test(
        machine(daemon),
        settings=settings(max_examples=examples, stateful_step_count=12, deadline=None, suppress_health_check=list(HealthCheck)),
    )
    with daemon.client() as client:
        assert client.stats()["evictions_total"] > 10, "nothing was evicted: the test tested little"
        assert client.stats()["promotions_total"] > 0


def test_clients_under_eviction(daemon: Daemon) -> None:
    run(daemon, 8)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_clients_under_eviction_for_long(daemon: Daemon) -> None:
    run(daemon, 300)
