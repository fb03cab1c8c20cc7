"""A tier that hangs, fails or misbehaves: nobody else is slowed, nothing wrong is served, and it comes back by itself."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from kvd.errors import DeadlinePassed, NoRoom
from kvd.store.identity import namespace_of
from kvd.tiers.adapters.base import AdapterError, AdapterFull, Durability, Item, Loaded, Stored, Want
from kvd.tiers.breaker import FAILURES, Breaker
from kvd.wire import protocol as p
from kvd.wire.client import Client
from tests.kvd.tiers.ram_tier import InProcess, RamTier, running
from tests.support.processes import wait_until

pytestmark = pytest.mark.real("kvd")

SPACE = namespace_of("default")
MIB = 1 << 20


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def value(number: int, size: int = 50_000) -> bytes:
    return bytes([number % 256]) * size


@pytest.fixture
def tier() -> RamTier:
    return RamTier()


@pytest.fixture
def daemon(tier: RamTier) -> Iterator[InProcess]:
    with running(tier, max_bytes=8 * MIB) as made:
        yield made


@pytest.fixture
def client(daemon: InProcess) -> Iterator[Client]:
    with daemon.client() as made:
        yield made


def slowest(calls: Sequence[Callable[[], object]]) -> float:
    worst = 0.0
    for call in calls:
        began = time.monotonic()
        call()
        worst = max(worst, time.monotonic() - began)
    return worst


class TestHanging:
    """Invariant 5: the calls into the adapter never return, and all else is as quick as ever."""

    def test_what_is_in_ram_is_served_and_what_fits_is_taken(self, daemon: InProcess, tier: RamTier, client: Client) -> None:
        client.put(key(0), value(0), wait="tier")
        daemon.evict_all()
        for tap in (tier.stores, tier.loads, tier.deletes):
            tap.close()
        client.put(key(1), value(1))
        tier.stores.until_blocked()
        waiting = threading.Thread(target=lambda: client.get(key(0)))
        waiting.start()
        tier.loads.until_blocked()
        began = time.monotonic()
        for i in range(2, 40):
            assert client.put(key(i), value(i))
            assert client.get(key(i)) == value(i)
            assert client.exists([key(i), key(999)]) == [True, False]
        assert client.delete([key(2)], arena_only=True) == 1
        assert client.stats()["entries"] == 38
        assert time.monotonic() - began < 3
        tier.open_all()
        waiting.join(10)

    def test_a_value_behind_it_is_a_miss_at_the_deadline(self, daemon: InProcess, tier: RamTier, client: Client) -> None:
        """A partial answer: what is in RAM comes, what hangs does not, and the wait is the client's own."""
        client.put(key(0), value(0), wait="tier")
        daemon.evict_all()
        client.put(key(1), value(1))
        tier.loads.close()
        client.timeout_s = 0.5
        began = time.monotonic()
        assert client.get_many([key(0), key(1), key(2)]) == [None, value(1), None]
        assert 0.3 < time.monotonic() - began < 1.5
        tier.loads.open()
        wait_until(lambda: client.get(key(0)) == value(0), what="the value, once the tier answers")

    def test_a_full_arena_of_unwritten_values_is_busy_at_the_deadline(
        self, daemon: InProcess, tier: RamTier, client: Client
    ) -> None:
        tier.stores.close()
        client.timeout_s = 0.5
        stored = 0
        began = time.monotonic()
        while result := client.put(key(stored), value(stored, MIB)):
            stored += 1
        assert result.reason == "busy"
        assert stored >= 6
        assert 0.3 < time.monotonic() - began < 3.0
        assert [client.get(key(i)) == value(i, MIB) for i in range(stored)] == [True] * stored, "an accepted put was lost"
        with pytest.raises(NoRoom):
            client.write([4 * MIB])
        assert client.stats()["rejections_total"]["busy"] >= 2
        tier.stores.open()
        client.timeout_s = 5.0
        assert client.put(key(100), value(100, MIB))
        client.flush()
        assert len(tier.values) == stored + 1

    def test_a_put_waits_for_the_room_that_comes(self, daemon: InProcess, tier: RamTier, client: Client) -> None:
        tier.stores.close()
        client.timeout_s = 0.3
        stored = 0
        while client.put(key(stored), value(stored, MIB)):
            stored += 1
        client.timeout_s = 10.0
        results: list[object] = []
        late = threading.Thread(target=lambda: results.append(client.put(key(100), value(100, MIB))))
        late.start()
        time.sleep(0.2)
        assert not results
        tier.stores.open()
        late.join(10)
        assert results
        assert results[0]

    def test_deletes_take_effect_at_once(self, daemon: InProcess, tier: RamTier, client: Client) -> None:
        client.put_many([(key(i), value(i)) for i in range(3)], wait="tier")
        tier.deletes.close()
        began = time.monotonic()
        threading.Thread(target=lambda: client.delete([key(0), key(1)])).start()
        wait_until(lambda: client.get(key(0)) is None, what="the delete to take effect")
        assert time.monotonic() - began < 2
        assert client.get_many([key(1), key(2)]) == [None, value(2)]
        tier.deletes.open()
        daemon.settled()
        assert list(tier.values) == [SPACE + key(2)]

    def test_flush_ends_at_its_deadline(self, daemon: InProcess, tier: RamTier, client: Client) -> None:
        tier.stores.close()
        client.put(key(0), value(0))
        began = time.monotonic()
        with pytest.raises(DeadlinePassed):
            client.flush(timeout_s=0.3)
        assert time.monotonic() - began < 2

    def test_waiting_for_the_tier_ends_as_not_durable(self, daemon: InProcess, tier: RamTier, client: Client) -> None:
        tier.stores.close()
        client.timeout_s = 0.3
        result = client.put(key(0), value(0), wait="tier")
        assert result
        assert result.durability == "none"
        assert client.get(key(0)) == value(0)


class TestFailing:
    def break_it(self, daemon: InProcess, tier: RamTier, client: Client) -> None:
        """Store calls fail until the breaker opens."""
        tier.stores.failing = "cable pulled"
        client.put(key(0), value(0))
        wait_until(lambda: client.stats()["tiers"][0]["breaker_open"] == 1, what="the breaker to open")

    def test_its_breaker_opens_says_why_and_closes_when_it_works_again(
        self, daemon: InProcess, tier: RamTier, client: Client
    ) -> None:
        self.break_it(daemon, tier, client)
        row = client.stats()["tiers"][0]
        assert row["breaker_reason"] == "cable pulled"
        assert row["breaker_opened_total"] == 1
        calls = tier.stores.calls
        time.sleep(0.3)
        assert tier.stores.calls - calls <= 1, "it is left alone"
        tier.stores.failing = ""
        wait_until(lambda: client.stats()["tiers"][0]["breaker_open"] == 0, what="the breaker to close")
        daemon.settled()
        assert tier.values[SPACE + key(0)][0] == value(0), "what waited is stored after all"

    def test_the_arena_evicts_unwritten_values_instead_of_standing_still(
        self, daemon: InProcess, tier: RamTier, client: Client
    ) -> None:
        self.break_it(daemon, tier, client)
        began = time.monotonic()
        assert all(client.put(key(i), value(i, MIB)) for i in range(1, 20))
        assert time.monotonic() - began < 4
        assert client.stats()["evictions_unwritten_total"] > 5
        assert client.get(key(19)) == value(19, MIB)
        assert client.get(key(1)) is None

    def test_an_unwritten_value_that_was_evicted_does_not_uncover_an_older_one(
        self, daemon: InProcess, tier: RamTier, client: Client
    ) -> None:
        client.put(key(5), value(5), wait="tier")
        self.break_it(daemon, tier, client)
        client.put(key(5), value(55))
        assert all(client.put(key(i), value(i, MIB)) for i in range(10, 30))
        assert client.get(key(5)) is None
        tier.stores.failing = ""
        wait_until(lambda: client.stats()["tiers"][0]["breaker_open"] == 0, what="the breaker to close")
        daemon.settled()
        assert client.get(key(5)) is None
        assert SPACE + key(5) not in tier.values

    def test_a_delete_while_it_is_left_alone_is_done_when_it_is_back(
        self, daemon: InProcess, tier: RamTier, client: Client
    ) -> None:
        client.put(key(1), value(1), wait="tier")
        self.break_it(daemon, tier, client)
        began = time.monotonic()
        assert client.delete([key(1)]) == 1
        assert time.monotonic() - began < 4, "it waited for a tier that is out of order"
        tier.open_all()
        wait_until(lambda: daemon.ask(lambda: not daemon.tier().busy), timeout_s=15, what="the queue to be worked off")
        assert SPACE + key(1) not in tier.values
        assert client.get(key(1)) is None

    def test_failed_loads_are_misses_and_open_it_too(self, daemon: InProcess, tier: RamTier, client: Client) -> None:
        client.put_many([(key(i), value(i)) for i in range(8)], wait="tier")
        daemon.evict_all()
        tier.loads.failing = "bad sectors"
        for i in range(FAILURES):
            assert client.get(key(i)) is None
        assert client.stats()["tiers"][0]["breaker_open"] == 1
        calls = tier.loads.calls
        assert client.get_many([key(i) for i in range(8)]) == [None] * 8
        assert tier.loads.calls == calls, "look-ups do not even ask"
        assert daemon.value_bytes() == 0
        tier.loads.failing = ""
        wait_until(lambda: client.get(key(7)) == value(7), timeout_s=5, what="the tier to be probed")
        assert client.stats()["tiers"][0]["breaker_open"] == 0

    def test_full_is_no_failure(self, daemon: InProcess, tier: RamTier, client: Client) -> None:
        class Full(RamTier):
            def store(self, items: Sequence[Item]) -> list[Stored]:
                raise AdapterFull("no space left")

        tier.store = Full.store.__get__(tier)  # type: ignore[method-assign]
        for i in range(10):
            assert client.put(key(i), value(i), wait="tier").durability == "none"
        assert client.stats()["tiers"][0]["breaker_open"] == 0
        assert client.get(key(9)) == value(9)

    def test_the_pause_doubles_up_to_its_limit(self) -> None:
        now = [0.0]
        breaker = Breaker(lambda: now[0])
        for _ in range(FAILURES - 1):
            breaker.failed("x")
            assert not breaker.tripped
        pauses = []
        for _ in range(8):
            breaker.failed("x")
            assert breaker.open
            pauses.append(breaker.wait_s())
            now[0] += breaker.wait_s()
            assert not breaker.open
            assert breaker.tripped
        assert pauses == [1, 2, 4, 8, 16, 30, 30, 30]
        breaker.succeeded()
        assert not breaker.tripped
        assert breaker.opened_total == 1


class TestMisbehaving:
    """A plug-in is somebody else's code: what it does wrong may cost its values, and nothing else."""

    @pytest.mark.parametrize("answers", [[], [Loaded.OK] * 5], ids=["too few", "too many"])
    def test_the_wrong_number_of_loads(self, daemon: InProcess, tier: RamTier, client: Client, answers: list[Loaded]) -> None:
        client.put(key(1), value(1), wait="tier")
        daemon.evict_all()
        honest = tier.load
        tier.load = lambda wants: answers  # type: ignore[method-assign]
        client.timeout_s = 1.0
        began = time.monotonic()
        assert client.get(key(1)) is None
        assert time.monotonic() - began < 0.7, "a miss now, not at the deadline"
        assert daemon.value_bytes() == 0
        tier.load = honest  # type: ignore[method-assign]
        assert client.get(key(1)) == value(1)

    @pytest.mark.parametrize("answers", [[], [Stored(True)] * 5], ids=["too few", "too many"])
    def test_the_wrong_number_of_stores(self, daemon: InProcess, tier: RamTier, client: Client, answers: list[Stored]) -> None:
        honest = tier.store
        tier.store = lambda items: answers  # type: ignore[method-assign]
        client.timeout_s = 1.0
        client.put(key(1), value(1))
        time.sleep(0.2)
        tier.store = honest  # type: ignore[method-assign]
        client.timeout_s = 10.0
        assert client.flush() == "fsync"
        assert tier.values[SPACE + key(1)][0] == value(1)
        assert daemon.ask(lambda: int(daemon.store.index.dirty.sum())) == 0

    @pytest.mark.parametrize("method", ["store", "load", "delete"])
    def test_an_exception_that_is_none_of_ours(self, daemon: InProcess, tier: RamTier, client: Client, method: str) -> None:
        client.put(key(1), value(1), wait="tier")
        daemon.evict_all()
        honest = getattr(tier, method)

        def broken(_: object) -> object:
            raise ZeroDivisionError("plug-in")

        setattr(tier, method, broken)
        client.timeout_s = 0.5
        client.put(key(2), value(2))
        client.get(key(1))
        threading.Thread(target=lambda: client.delete([key(1)])).start()
        time.sleep(0.3)
        setattr(tier, method, honest)
        client.timeout_s = 10.0
        wait_until(lambda: daemon.ask(lambda: not daemon.tier().busy), timeout_s=15, what="the queue to be worked off")
        assert client.get(key(2)) == value(2)
        assert SPACE + key(2) in tier.values

    def test_buffers_are_not_touched_after_a_failed_load(self, daemon: InProcess, tier: RamTier, client: Client) -> None:
        """What a failed load had written in part must never be served."""
        client.put(key(1), value(1), wait="tier")
        daemon.evict_all()

        def half(wants: Sequence[Want]) -> list[Loaded]:
            wants[0].into[: len(wants[0].into) // 2] = b"\xff" * (len(wants[0].into) // 2)
            raise AdapterError("cut off")

        honest = tier.load
        tier.load = half  # type: ignore[method-assign]
        assert client.get(key(1)) is None
        tier.load = honest  # type: ignore[method-assign]
        assert client.get(key(1)) == value(1)


def test_flush_does_not_wait_for_what_comes_after_it(daemon: InProcess, tier: RamTier, client: Client) -> None:
    """Somebody else never stops putting: a flush of mine ends all the same."""
    stop = threading.Event()

    def busy() -> None:
        with daemon.client(namespace="busy") as other:
            number = 0
            while not stop.is_set():
                other.put(key(number % 50), value(number, 20_000))
                number += 1

    original = tier.store

    def slowly(items: Sequence[Item]) -> list[Stored]:
        time.sleep(0.02)
        return original(items)

    tier.store = slowly  # type: ignore[method-assign]
    threads = [threading.Thread(target=busy) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for i in range(3):
            client.put(key(i), value(i))
            assert client.flush(timeout_s=5) == "fsync"
            assert tier.values[SPACE + key(i)][0] == value(i)
    finally:
        stop.set()
        for thread in threads:
            thread.join(10)


class TestTwoTiers:
    @pytest.fixture
    def tiers(self) -> tuple[RamTier, RamTier]:
        return RamTier("first", durability=Durability.FSYNC), RamTier("second", durability=Durability.GROUP)

    @pytest.fixture
    def daemon(self, tiers: tuple[RamTier, RamTier]) -> Iterator[InProcess]:
        with running(*tiers) as made:
            yield made

    def test_both_take_it_and_the_weaker_durability_is_told(
        self, daemon: InProcess, tiers: tuple[RamTier, RamTier], client: Client
    ) -> None:
        assert client.put(key(1), value(1), wait="tier").durability == "group"
        assert [SPACE + key(1) in tier.values for tier in tiers] == [True, True]
        tiers[1].refuse = lambda item: "full"
        assert client.put(key(2), value(2), wait="tier").durability == "none"
        assert client.flush() == "none"

    def test_a_hanging_one_does_not_hold_the_other(self, daemon: InProcess, tiers: tuple[RamTier, RamTier], client: Client) -> None:
        tiers[0].stores.close()
        client.put(key(1), value(1))
        wait_until(lambda: SPACE + key(1) in tiers[1].values, what="the second tier to have it")
        assert daemon.ask(lambda: int(daemon.store.index.dirty.sum())) == 1

    def test_what_one_has_lost_the_other_still_gives(
        self, daemon: InProcess, tiers: tuple[RamTier, RamTier], client: Client
    ) -> None:
        client.put(key(1), value(1), wait="tier")
        daemon.evict_all()
        del tiers[0].values[SPACE + key(1)]
        assert client.get(key(1)) == value(1)

    def test_what_is_damaged_in_one_comes_from_the_other(
        self, daemon: InProcess, tiers: tuple[RamTier, RamTier], client: Client
    ) -> None:
        client.put(key(1), value(1), wait="tier")
        daemon.evict_all()
        tiers[0].damaged.add(SPACE + key(1))
        assert client.get(key(1)) == value(1)
        assert client.stats()["corruptions_total"] == 1


class TestWithoutAnIndex:
    """A tier that cannot tell quickly what it holds (a server elsewhere)."""

    @pytest.fixture
    def tier(self) -> RamTier:
        return RamTier(local_index=False)

    def test_puts_and_deletes_reach_it_in_order(self, daemon: InProcess, tier: RamTier, client: Client) -> None:
        client.put(key(1), value(1))
        client.delete([key(1)])
        client.put(key(1), value(2), wait="tier")
        daemon.settled()
        assert tier.values[SPACE + key(1)][0] == value(2)
        client.delete([key(1)])
        daemon.settled()
        assert not tier.values

    def test_deletes_that_wait_for_it_are_bounded(
        self, daemon: InProcess, tier: RamTier, client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It is told of every delete, so a client that deletes on and on while it hangs must be told to stop."""
        monkeypatch.setattr("kvd.tiers.tier.DOOMED_MAX", 100)
        tier.deletes.close()
        with daemon.client() as other:
            asked = [p.Delete(0, SPACE, [key(number + i) for i in range(50)]) for number in range(0, 1000, 50)]
            waiters = [other.connect().submit(request) for request in asked]
            wait_until(lambda: daemon.ask(lambda: daemon.tier().clogged), what="the deletes to pile up")
            with pytest.raises(NoRoom, match="deletes waiting"):
                client.delete([key(1)])
            with pytest.raises(NoRoom, match="deletes waiting"):
                other.connect().wait(waiters[-1], asked[-1], p.Count)
        assert daemon.ask(lambda: len(daemon.tier().doomed)) <= 150
        assert client.put(key(1), value(1)).reason == "busy"
        assert client.get(key(2)) is None, "what only looks is served"
        tier.deletes.open()
        daemon.settled()
        assert client.put(key(1), value(1))
        assert client.delete([key(1)]) == 1

    def test_clear_covers_it(self, daemon: InProcess, tier: RamTier, client: Client) -> None:
        client.put_many([(key(i), value(i)) for i in range(5)], wait="tier")
        assert client.clear() >= 5
        daemon.settled()
        assert not tier.values
