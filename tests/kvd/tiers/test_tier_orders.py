"""Overwrites and deletes through a slow tier: never an older value, never one that was deleted, whatever the timing."""

from collections.abc import Iterator

import pytest

from kvd.errors import KvdError
from kvd.store.identity import namespace_of
from kvd.wire.client import Client
from tests.kvd.tiers.ram_tier import InProcess, RamTier, running
from tests.support.processes import wait_until

pytestmark = pytest.mark.real("kvd")

K = b"k" * 32
LARGE = 64 << 10
ID = namespace_of("default") + K


def value(letter: str, size: int = LARGE) -> bytes:
    return letter.encode() * size


@pytest.fixture
def tier() -> RamTier:
    return RamTier()


@pytest.fixture
def daemon(tier: RamTier) -> Iterator[InProcess]:
    with running(tier) as made:
        yield made


@pytest.fixture
def client(daemon: InProcess) -> Iterator[Client]:
    with daemon.client() as made:
        yield made


def test_what_was_put_comes_back_from_the_tier(daemon: InProcess, tier: RamTier, client: Client) -> None:
    assert client.put(K, value("a"), wait="tier").durability == "fsync"
    daemon.evict_all()
    assert daemon.ask(lambda: daemon.store.index.entries) == 0
    assert client.exists([K]) == [True]
    assert client.get(K) == value("a")
    assert client.stats()["promotions_total"] == 1
    assert len(tier.log) == 1, "a promoted value is not written again"


def test_two_puts_reach_the_tier_in_their_order(daemon: InProcess, tier: RamTier, client: Client) -> None:
    tier.stores.close()
    client.put(K, value("a"))
    tier.stores.until_blocked()
    client.put(K, value("b"))
    client.put(K, value("c"))
    tier.stores.open()
    daemon.settled()
    assert tier.values[ID][0] == value("c")
    daemon.evict_all()
    assert client.get(K) == value("c")


def test_a_delete_overtakes_a_write_under_way(daemon: InProcess, tier: RamTier, client: Client) -> None:
    tier.stores.close()
    client.put(K, value("a"))
    tier.stores.until_blocked()
    client.delete([K])
    assert client.get(K) is None
    tier.stores.open()
    daemon.settled()
    assert ID not in tier.values
    assert client.get(K) is None


def test_a_deleted_value_is_missed_while_the_tier_still_holds_it(daemon: InProcess, tier: RamTier, client: Client) -> None:
    client.put(K, value("a"), wait="tier")
    tier.deletes.close()
    daemon.evict_all()
    client.timeout_s = 0.5
    daemon.ask(lambda: daemon.tier().erase([ID]))
    tier.deletes.until_blocked()
    assert ID in tier.values
    assert client.exists([K]) == [False]
    assert client.get(K) is None


def test_a_delete_voids_a_load_under_way(daemon: InProcess, tier: RamTier, client: Client) -> None:
    client.put(K, value("a"), wait="tier")
    daemon.evict_all()
    tier.loads.close()
    client.prefetch([K], deadline_s=0.0)
    tier.loads.until_blocked()
    assert client.delete([K]) == 1
    tier.loads.open()
    wait_until(lambda: daemon.ask(lambda: not daemon.daemon.tiering._loading), what="the load to end")
    assert client.get(K) is None
    assert daemon.value_bytes() == 0


def test_a_put_voids_a_load_under_way(daemon: InProcess, tier: RamTier, client: Client) -> None:
    client.put(K, value("a"), wait="tier")
    daemon.evict_all()
    tier.loads.close()
    client.prefetch([K], deadline_s=0.0)
    tier.loads.until_blocked()
    client.put(K, value("b"))
    assert client.get(K) == value("b")
    tier.loads.open()
    daemon.settled()
    assert client.get(K) == value("b")
    daemon.evict_all()
    assert client.get(K) == value("b")


def test_a_put_and_delete_void_a_load_under_way(daemon: InProcess, tier: RamTier, client: Client) -> None:
    client.put(K, value("a"), wait="tier")
    daemon.evict_all()
    tier.loads.close()
    client.prefetch([K], deadline_s=0.0)
    tier.loads.until_blocked()
    client.put(K, value("b"))
    client.delete([K])
    tier.loads.open()
    daemon.settled()
    assert client.get(K) is None


def test_an_ephemeral_put_hides_what_the_tier_held(daemon: InProcess, tier: RamTier, client: Client) -> None:
    client.put(K, value("a"), wait="tier")
    client.put(K, value("b"), retention="ephemeral")
    daemon.settled()
    daemon.evict_all()
    assert client.get(K) is None


def test_a_tier_that_refuses_the_new_value_must_not_serve_the_old_one(daemon: InProcess, tier: RamTier, client: Client) -> None:
    client.put(K, value("a"), wait="tier")
    tier.refuse = lambda item: "too_large"
    client.put(K, value("b"), wait="tier")
    daemon.settled()
    daemon.evict_all()
    assert client.get(K) is None


def test_a_refusal_does_not_cost_the_value_put_after_it(daemon: InProcess, tier: RamTier, client: Client) -> None:
    """The older value must go, and the one that was put while the refused one was on its way must stay."""
    client.put(K, value("a"), wait="tier")
    tier.refuse = lambda item: "full" if bytes(item.data[:1]) == b"b" else ""
    tier.stores.close()
    client.put(K, value("b"))
    tier.stores.until_blocked()
    client.put(K, value("c"))
    tier.stores.open()
    daemon.settled()
    assert client.flush() == "fsync"
    assert tier.values[ID][0] == value("c")
    daemon.evict_all()
    assert client.get(K) == value("c")


def test_an_expired_value_does_not_uncover_an_older_one(daemon: InProcess, tier: RamTier, client: Client) -> None:
    """The value that replaced it was never written: while it expires, the tier's older one must stay hidden."""
    client.put(K, value("a"), wait="tier")
    tier.stores.close()
    client.put(K, value("z"), ttl_s=0.15)
    wait_until(lambda: client.get(K) != value("z"), what="the value to expire")
    assert client.get(K) is None
    assert client.exists([K]) == [False]
    tier.stores.open()
    daemon.settled()
    assert client.get(K) is None


def test_expiry_in_the_middle_of_a_load_uncovers_nothing(daemon: InProcess, tier: RamTier, client: Client) -> None:
    """Between expiry and the sweep, the arena still has the newer value: a load begun there must not bring up the older."""
    client.put(K, value("a"), wait="tier")
    tier.stores.close()
    tier.loads.close()

    def sweep_is_late() -> None:
        daemon.store.tick = lambda: None

    daemon.ask(sweep_is_late)
    client.put(K, value("z"), ttl_s=0.1)
    wait_until(lambda: client.exists([K]) == [False], what="the value to expire")
    client.prefetch([K], deadline_s=0.0)
    daemon.ask(lambda: type(daemon.store).tick(daemon.store))
    tier.loads.open()
    tier.stores.open()
    daemon.settled()
    assert client.get(K) is None


def test_clear_forgets_what_is_on_its_way_down_and_up(daemon: InProcess, tier: RamTier, client: Client) -> None:
    other = b"o" * 32
    client.put(K, value("a"), wait="tier")
    daemon.evict_all()
    tier.loads.close()
    client.prefetch([K], deadline_s=0.0)
    tier.loads.until_blocked()
    tier.stores.close()
    client.put(other, value("b"))
    tier.stores.until_blocked()
    tier.stores.open()
    tier.loads.open()
    client.clear()
    daemon.settled()
    assert client.get_many([K, other]) == [None, None]
    assert not tier.values


def test_readers_cannot_save_a_value_from_a_clear(daemon: InProcess, tier: RamTier, client: Client) -> None:
    """A value promoted while the tier is being cleared would stay in the arena, cleared or not."""
    keys = [n.to_bytes(32, "big") for n in range(5000)]
    assert all(client.put_many([(key, b"x" * 8) for key in keys], wait="tier"))
    client.flush()
    daemon.evict_all()
    tier.deletes.close()
    clearing = daemon.client(timeout_s=20)
    import threading

    cleared: list[int] = []
    thread = threading.Thread(target=lambda: cleared.append(clearing.clear()))
    thread.start()
    tier.deletes.until_blocked()
    assert client.get_many(keys[:10] + keys[-10:]) == [None] * 20
    tier.deletes.open()
    thread.join(20)
    clearing.close()
    assert cleared == [5000]
    assert client.get_many(keys) == [None] * 5000


def test_equal_keys_of_two_namespaces_are_two_values_in_the_tier_too(daemon: InProcess, client: Client) -> None:
    client.put(K, value("a"), namespace="one")
    client.put(K, value("b"), namespace="two")
    client.flush()
    daemon.evict_all()
    assert client.get(K, namespace="one") == value("a")
    assert client.get(K, namespace="two") == value("b")
    client.delete([K], namespace="one")
    daemon.evict_all()
    assert client.get(K, namespace="one") is None
    assert client.get(K, namespace="two") == value("b")


def test_a_damaged_value_is_a_miss_and_a_counter(daemon: InProcess, tier: RamTier, client: Client) -> None:
    client.put(K, value("a"), wait="tier")
    daemon.evict_all()
    tier.damaged.add(ID)
    assert client.get(K) is None
    assert client.stats()["corruptions_total"] == 1
    assert daemon.value_bytes() == 0


def test_ephemeral_and_none_never_reach_a_tier(daemon: InProcess, tier: RamTier, client: Client) -> None:
    assert client.put(K, value("a"), retention="ephemeral", wait="tier").durability == "none"
    refused = client.put(b"n" * 32, value("a"), retention="none")
    assert not refused
    assert refused.reason == "retention_none"
    daemon.settled()
    assert not tier.log
    with pytest.raises(ValueError, match="unknown retention"):
        client.put(K, b"", retention="forever")
    with pytest.raises((ValueError, KvdError)):
        client.put(K, b"", wait="disk")
