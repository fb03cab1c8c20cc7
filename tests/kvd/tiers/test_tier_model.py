"""Arena and tier together against a dict, while the tier's calls are held up and let go at random.

Whatever the timing: a read is the last value put under that very key, or a miss; never an older one, never a deleted one,
never another key's. When everything has settled, what was put last is there.
"""

import contextlib
import itertools
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvd.errors import DeadlinePassed
from kvd.store.identity import namespace_of
from kvd.wire.client import Client
from tests.kvd.tiers.ram_tier import InProcess, RamTier, Tap, running
from tests.support.processes import wait_until

KEYS = [n.to_bytes(32, "big") for n in range(5)]
SPACES = ["one", "two"]
SIZES = [10, 5000, 60_000]
EVERY = itertools.count(1)

Who = tuple[int, int]
WHO = st.tuples(st.integers(0, 1), st.integers(0, 4))


class Shared:
    """One daemon for all examples: cleared before each. A restart an example would make this a test of restarts."""

    stack = contextlib.ExitStack()
    tier: RamTier
    daemon: InProcess
    client: Client

    @classmethod
    def start(cls, **options: Any) -> None:
        cls.tier = RamTier()
        cls.daemon = cls.stack.enter_context(running(cls.tier, max_bytes=4 << 20, **options))
        cls.client = cls.stack.enter_context(cls.daemon.client(timeout_s=5))


def setup_module() -> None:
    Shared.start()


def teardown_module() -> None:
    Shared.stack.close()


class Model(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.tier, self.daemon, self.client = Shared.tier, Shared.daemon, Shared.client
        self.tier.open_all()
        self.tier.refuse = lambda item: ""
        self.client.clear(all_namespaces=True)
        self.daemon.settled()
        self.last: dict[Who, bytes | None] = {}
        self.refused: set[bytes] = set()

    def names(self, who: Who) -> tuple[bytes, str]:
        return KEYS[who[1]], SPACES[who[0]]

    def taps(self) -> list[Tap]:
        return [self.tier.stores, self.tier.loads, self.tier.deletes]

    @rule(who=WHO, size=st.sampled_from(SIZES), retention=st.sampled_from(["long", "long", "short", "ephemeral"]))
    def put(self, who: Who, size: int, retention: str) -> None:
        key, space = self.names(who)
        value = next(EVERY).to_bytes(8, "little") * (size // 8 + 1)
        assert self.client.put(key, value, retention=retention, namespace=space)
        self.last[who] = value
        if retention == "ephemeral":
            self.refused.add(value)

    @rule(who=WHO)
    def put_what_the_tier_refuses(self, who: Who) -> None:
        key, space = self.names(who)
        value = b"refused!" + next(EVERY).to_bytes(8, "little") * 1000
        self.tier.refuse = lambda item: "full" if bytes(item.data[:8]) == b"refused!" else ""
        assert self.client.put(key, value, namespace=space)
        self.last[who] = value
        self.refused.add(value)

    @rule(who=WHO)
    def delete(self, who: Who) -> None:
        """Told to the daemon without waiting for the tier, whose calls may be held up."""
        key, space = self.names(who)
        identity = namespace_of(space) + key

        def both() -> None:
            self.daemon.store.delete(identity[:32], [key])
            for tier in self.daemon.daemon.tiering.tiers:
                tier.erase([identity])
            if loading := self.daemon.daemon.tiering._loading.get(identity):
                loading.void = True

        self.daemon.ask(both)
        self.last[who] = None

    @rule()
    def evict(self) -> None:
        self.daemon.evict_all()

    @rule(whos=st.lists(WHO, min_size=1, max_size=4))
    def prefetch(self, whos: list[Who]) -> None:
        """Loads begin, and go on while other things happen."""
        for who in whos:
            key, space = self.names(who)
            self.client.prefetch([key], deadline_s=0.0, namespace=space)

    @rule(number=st.integers(0, 2))
    def hold_up(self, number: int) -> None:
        self.taps()[number].close()

    @rule(number=st.integers(0, 2))
    def let_go(self, number: int) -> None:
        self.taps()[number].open()

    @rule(number=st.integers(0, 2))
    def let_one_through(self, number: int) -> None:
        tap = self.taps()[number]
        if tap.waiting:
            tap.drip()

    @rule(who=WHO)
    def get(self, who: Who) -> None:
        key, space = self.names(who)
        self.client.timeout_s = 0.02 if not self.tier.loads.flowing else 5.0
        try:
            value = self.client.get(key, namespace=space)
        except DeadlinePassed:
            return
        finally:
            self.client.timeout_s = 5.0
        assert value is None or value == self.last.get(who), f"{value[:16]!r}, and not the last value"

    @invariant()
    def what_waits_is_counted(self) -> None:
        """The values of the arena that a tier has not answered for: neither deletes nor what has left the arena meanwhile."""

        def counts() -> tuple[list[int], list[int]]:
            index, tiers = self.daemon.store.index, self.daemon.daemon.tiering.tiers
            live = [i for i, key in enumerate(index.keys) if key is not None and self.daemon.store.is_live(i)]
            return [t.waiting for t in tiers], [sum(index.dirty_of[i] >> t.number & 1 for i in live) for t in tiers]

        if hasattr(self, "last"):
            said, there = self.daemon.ask(counts)
            assert said == there

    def teardown(self) -> None:
        if not hasattr(self, "last"):
            return
        self.tier.open_all()
        self.daemon.settled()
        self.client.flush()
        for evicted in (False, True):
            wait_until(lambda: self.daemon.pins() == 0, what="every lease to end")
            if evicted:
                self.daemon.evict_all()
            for who, last in self.last.items():
                key, space = self.names(who)
                (value,) = self.client.get_many([key], namespace=space)
                if last is None or (last in self.refused and evicted):
                    assert value is None or (value == last and not evicted), f"{value and value[:16]!r} is back"
                elif last not in self.refused:
                    assert value == last, "an accepted value is gone"
        index = self.daemon.store.index
        assert not self.daemon.ask(lambda: [slot for slot in index.live_slots() if index.dirty_of[slot]])


Model.TestCase.settings = settings(
    max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestTierModel = Model.TestCase
