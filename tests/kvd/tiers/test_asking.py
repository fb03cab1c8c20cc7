"""Tiers without an index in memory: look-ups ask them, within the client's deadline, and what is in RAM never waits for that."""

import time
from collections.abc import Iterator

import pytest

from kvd.store.identity import namespace_of
from kvd.wire.client import Client
from tests.kvd.tiers.ram_tier import InProcess, RamTier, running
from tests.support.processes import wait_until

pytestmark = pytest.mark.real("kvd")

KEYS = [bytes([i]) * 32 for i in range(40)]
SPACE = namespace_of("default")
SIZE = 64 << 10


def value(i: int) -> bytes:
    return bytes([i + 1]) * SIZE


@pytest.fixture
def far() -> RamTier:
    return RamTier("far", local_index=False)


@pytest.fixture
def daemon(far: RamTier) -> Iterator[InProcess]:
    with running(far) as made:
        yield made


@pytest.fixture
def client(daemon: InProcess) -> Iterator[Client]:
    with daemon.client() as made:
        yield made


def below(daemon: InProcess, client: Client, *numbers: int) -> None:
    """Values that only the tiers have."""
    for i in numbers:
        assert client.put(KEYS[i], value(i), wait="tier")
    daemon.evict_all()


def test_a_value_comes_back_from_a_tier_that_must_be_asked(daemon: InProcess, client: Client) -> None:
    below(daemon, client, 0, 2)
    assert client.exists(KEYS[:3]) == [True, False, True]
    assert client.get(KEYS[0]) == value(0)
    assert client.get_many(KEYS[:3]) == [value(0), None, value(2)]


def test_prefetch_brings_up_what_it_has(daemon: InProcess, client: Client) -> None:
    below(daemon, client, 0, 1, 2)
    assert client.prefetch(KEYS[:5]) == 3
    assert daemon.ask(lambda: daemon.store.index.entries) == 3


def test_a_prefix_ends_at_the_first_gap(daemon: InProcess, client: Client, far: RamTier) -> None:
    below(daemon, client, 0, 1, 2, 4)
    client.put(KEYS[3], value(3), retention="ephemeral")
    assert client.prefix(KEYS[:8]).length == 5
    far.delete([SPACE + KEYS[1]])
    assert client.prefix(KEYS[:8]).length == 1
    assert client.prefix(KEYS[7:9]).length == 0


def test_a_long_prefix_is_asked_for_block_by_block(daemon: InProcess, client: Client, far: RamTier) -> None:
    keys = [i.to_bytes(32, "big") for i in range(1000)]
    for key in keys[:600]:
        far.values[SPACE + key] = (b"x" * 100, 3, 0)  # type: ignore[assignment]
    before = far.lookups.calls
    assert client.prefix(keys).length == 600
    assert far.lookups.calls - before == 3, "256 at a time, and none behind the gap"


def test_a_pinned_prefix_is_promoted_and_claimed(daemon: InProcess, client: Client) -> None:
    below(daemon, client, 0, 1, 2)
    found = client.prefix(KEYS[:4], pin_s=5.0)
    assert found.length == 3
    assert found.token is not None
    with client.claim(found.token) as lease:
        assert [bytes(view) for view in lease.views if view is not None] == [value(0), value(1), value(2)]


def test_a_prefix_of_two_namespaces(daemon: InProcess, client: Client) -> None:
    for space, count in (("rank0", 3), ("rank1", 2)):
        with daemon.client(namespace=space) as rank:
            for i in range(count):
                assert rank.put(KEYS[i], value(i), wait="tier")
    daemon.evict_all()
    assert client.prefix(KEYS[:4], namespaces=["rank0", "rank1"]).length == 2


def test_where_and_delete_count_what_only_such_a_tier_has(daemon: InProcess, client: Client, far: RamTier) -> None:
    below(daemon, client, 0, 1)
    assert client.delete([*KEYS[:3], KEYS[0]]) == 2
    assert client.exists(KEYS[:3]) == [False, False, False]
    assert not far.values


def test_clear_counts_a_value_once(daemon: InProcess, client: Client) -> None:
    below(daemon, client, 0, 1)
    assert client.put(KEYS[2], value(2), wait="tier")
    assert client.put(KEYS[3], value(3), retention="ephemeral")
    assert client.clear() == 4


def test_what_is_in_ram_does_not_wait_for_a_tier_that_hangs(daemon: InProcess, client: Client, far: RamTier) -> None:
    below(daemon, client, 0)
    client.put(KEYS[1], value(1), wait="tier")
    far.lookups.close()
    begun = time.monotonic()
    for _ in range(50):
        assert client.get(KEYS[1]) == value(1)
        assert client.exists([KEYS[1]]) == [True]
        assert client.prefix([KEYS[1]]).length == 1
        assert client.put(KEYS[2], value(2))
    assert time.monotonic() - begun < 2.0


def test_a_look_up_that_hangs_is_a_miss_within_the_deadline(daemon: InProcess, far: RamTier) -> None:
    with daemon.client(timeout_s=0.8) as client:
        below(daemon, client, 0, 1)
        client.put(KEYS[2], value(2))
        far.lookups.close()
        begun = time.monotonic()
        assert client.exists([KEYS[2], KEYS[0]]) == [True, False]
        assert client.get_many([KEYS[2], KEYS[0]]) == [value(2), None]
        assert client.prefix([KEYS[2], KEYS[0]]).length == 1
        assert time.monotonic() - begun < 3 * 0.8
        far.lookups.open()
        wait_until(lambda: client.exists([KEYS[0]]) == [True], what="the tier to answer again")
        assert client.get(KEYS[0]) == value(0)


def test_a_tier_that_does_not_answer_look_ups_is_left_alone(daemon: InProcess, client: Client, far: RamTier) -> None:
    below(daemon, client, 0)
    far.lookups.close()
    with daemon.client(timeout_s=2.2) as other:
        for _ in range(3):
            assert other.exists([KEYS[0]]) == [False]
    assert daemon.ask(lambda: daemon.tier().breaker.open)
    begun = time.monotonic()
    assert client.get(KEYS[0]) is None
    assert time.monotonic() - begun < 0.5
    far.lookups.open()
    wait_until(lambda: client.get(KEYS[0]) == value(0), what="the tier to be asked again", timeout_s=10)


def test_look_ups_that_fail_open_the_breaker_and_one_that_works_closes_it(daemon: InProcess, client: Client, far: RamTier) -> None:
    below(daemon, client, 0)
    far.lookups.failing = "the network is down"
    for _ in range(3):
        assert client.exists([KEYS[0]]) == [False]
    assert daemon.ask(lambda: daemon.tier().breaker.reason) == "the network is down"
    far.lookups.failing = ""
    wait_until(lambda: client.exists([KEYS[0]]) == [True], what="the tier to be asked again", timeout_s=10)
    assert daemon.ask(lambda: daemon.tier().breaker.failures) == 0


def test_a_look_up_that_works_does_not_hide_that_loads_fail(daemon: InProcess, client: Client, far: RamTier) -> None:
    below(daemon, client, 0)
    far.loads.failing = "unreadable"
    for _ in range(3):
        assert client.exists([KEYS[0]]) == [True]
        assert client.get(KEYS[0]) is None
    assert daemon.ask(lambda: daemon.tier().breaker.tripped)


def test_deleted_while_it_was_being_asked_for(daemon: InProcess, client: Client, far: RamTier) -> None:
    """The tier says "held" to a look-up that began before the delete: the delete wins."""
    below(daemon, client, 0)
    far.loads.close()
    far.deletes.close()
    with daemon.client() as other:
        import threading

        got: list[bytes | None] = []
        reader = threading.Thread(target=lambda: got.append(other.get(KEYS[0])))
        reader.start()
        far.loads.until_blocked()
        deleter = threading.Thread(target=lambda: client.delete([KEYS[0]]))
        deleter.start()
        far.deletes.until_blocked()
        far.loads.open()
        reader.join(10)
        assert got == [None]
        assert client.get(KEYS[0]) is None, "doomed: not asked for again"
        far.deletes.open()
        deleter.join(10)
    assert client.get(KEYS[0]) is None


@pytest.mark.parametrize("order", ["near first", "far first"])
def test_a_damaged_value_comes_from_the_other_tier(order: str) -> None:
    near, far = RamTier("near"), RamTier("far", local_index=False)
    tiers = (near, far) if order == "near first" else (far, near)
    with running(*tiers) as daemon, daemon.client() as client:
        below(daemon, client, 0, 1)
        near.damaged.add(SPACE + KEYS[0])
        assert client.get_many(KEYS[:2]) == [value(0), value(1)]
        assert near.counters.corruptions == 1
        near.values.clear()
        daemon.evict_all()
        far.damaged.add(SPACE + KEYS[1])
        assert client.get_many(KEYS[:2]) == [value(0), None]


def test_a_load_that_fails_comes_from_the_next_such_tier() -> None:
    one, two = RamTier("one", local_index=False), RamTier("two", local_index=False)
    with running(one, two) as daemon, daemon.client() as client:
        below(daemon, client, 0)
        one.loads.failing = "gone"
        assert client.get(KEYS[0]) == value(0)
        daemon.evict_all()
        one.values.clear()
        assert client.get(KEYS[0]) == value(0), "and what the first has lost"


def test_a_look_up_without_patience_does_not_ask_and_the_greeting_says_that_one_may_have_to(
    daemon: InProcess, client: Client, far: RamTier
) -> None:
    assert client.slow_lookups
    below(daemon, client, 1, 2, 3)
    keys = KEYS[1:4]
    far.lookups.failing = "it must not be asked"
    assert client.prefix(keys, ask_s=0.0).length == 0
    assert client.exists(keys, ask_s=0.0) == [False] * 3
    assert not client.stats()["tiers"][0]["breaker_opened_total"]
    far.lookups.failing = ""
    assert client.prefix(keys).length == 3
    assert client.exists(keys, ask_s=1.0) == [True] * 3
