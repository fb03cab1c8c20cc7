"""Several tiers: their order, falling through, failing over, copies to the tiers before, and as much as fits a short arena."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvd.tiers.adapters.base import Adapter, AdapterError, Durability, Hit
from kvd.tiers.adapters.fs import FsAdapter
from kvd.wire.client import Client
from kvtools.errors import KvError
from tests.kvd.tiers.ram_tier import InProcess, RamTier, running
from tests.support.processes import wait_until

KEYS = [bytes([i]) * 32 for i in range(8)]
VALUES = [bytes([i]) * 20_000 for i in range(8)]


@pytest.fixture
def tiers() -> list[RamTier]:
    """A near one with an index in memory, one that has to be asked, and a far one."""
    return [RamTier("near"), RamTier("asked", local_index=False), RamTier("far")]


@pytest.fixture
def daemon(tiers: list[RamTier]) -> Iterator[InProcess]:
    with running(*tiers, promote=True) as made:
        yield made


@pytest.fixture
def client(daemon: InProcess) -> Iterator[Client]:
    with daemon.client() as made:
        yield made


def filled(daemon: InProcess, client: Client, count: int = 8) -> None:
    """So many values, in every tier and not in the arena."""
    assert all(client.put_many(list(zip(KEYS[:count], VALUES[:count], strict=True))))
    client.flush()
    daemon.evict_all()


def settled(daemon: InProcess) -> None:
    wait_until(lambda: not daemon.ask(lambda: daemon.daemon.tiering._copying), what="the copies to be queued")
    for number in range(len(daemon.daemon.tiering.tiers)):
        daemon.settled(number)


def test_a_value_is_stored_to_all_and_comes_from_the_first(daemon: InProcess, client: Client, tiers: list[RamTier]) -> None:
    filled(daemon, client)
    assert [len(tier.values) for tier in tiers] == [8, 8, 8]
    assert client.get_many(KEYS) == VALUES
    assert [tier.counters.hits for tier in tiers] == [8, 0, 0]
    settled(daemon)
    assert [tier.counters.stores for tier in tiers] == [8, 8, 8], "there was nothing to copy"


def test_look_ups_fall_through_and_what_is_found_is_copied_to_the_tiers_before(
    daemon: InProcess, client: Client, tiers: list[RamTier]
) -> None:
    near, asked, far = tiers
    filled(daemon, client)
    for identity in list(near.values)[:6]:
        del near.values[identity]
    for identity in list(asked.values)[:3]:
        del asked.values[identity]
    assert client.prefix(KEYS).length == 8
    assert client.get_many(KEYS) == VALUES
    settled(daemon)
    assert len(near.values) == 8
    assert near.counters.stores == 8 + 6
    daemon.evict_all()
    for tier in (asked, far):
        tier.loads.failing = "it must not be asked"
    assert client.get_many(KEYS) == VALUES, "now the near one has all"
    copies = [daemon.ask(lambda n=n: daemon.tier(n).copied) for n in range(3)]
    assert copies[0] == 6
    assert copies[2] == 0


def test_a_load_that_fails_comes_from_the_next_tier_and_mends_the_first(
    daemon: InProcess, client: Client, tiers: list[RamTier]
) -> None:
    near, asked, _ = tiers
    filled(daemon, client, 4)
    (lost, damaged, *_) = near.values
    del near.values[lost]
    near.damaged.add(damaged)
    near.values[lost] = (b"x" * 20_000, *near.values[damaged][1:])  # it says that it has it
    near.damaged.add(lost)
    assert client.get_many(KEYS[:4]) == VALUES[:4]
    assert near.counters.corruptions == 2
    assert asked.counters.hits == 2


def test_what_the_second_tier_lacks_comes_from_the_third(
    daemon: InProcess, client: Client, tiers: list[RamTier], caplog: pytest.LogCaptureFixture
) -> None:
    near, asked, far = tiers
    filled(daemon, client, 4)
    near.damaged.update(near.values)
    asked.values.clear()
    with caplog.at_level("DEBUG", "kvd.tiers"):
        assert client.get_many(KEYS[:4]) == VALUES[:4]
    assert far.counters.hits == 4
    loads = [record.getMessage() for record in caplog.records if "oad task" in record.getMessage()]
    assert ["adapter 0 (near), 0 of 4 keys" in line for line in loads] == [False, True, False, False], loads
    assert ["adapter 2 (far), 4 of 4 keys" in line for line in loads] == [False, False, False, True], "each tier says what it gave"


def test_copies_are_dropped_where_a_tier_is_full_and_nobody_is_told(
    daemon: InProcess, client: Client, tiers: list[RamTier]
) -> None:
    near = tiers[0]
    filled(daemon, client)
    near.values.clear()
    near.refuse = lambda item: "full"
    assert client.get_many(KEYS) == VALUES
    settled(daemon)
    assert not near.values
    assert client.flush() == "fsync", "what the others hold is safe"
    assert len(tiers[2].values) == 8
    daemon.evict_all()
    assert client.get_many(KEYS) == VALUES


def test_a_copy_that_waits_neither_holds_the_arena_nor_outlives_a_delete(
    daemon: InProcess, client: Client, tiers: list[RamTier]
) -> None:
    near, _, far = tiers
    filled(daemon, client)
    near.values.clear()
    near.stores.close()
    assert client.get_many(KEYS) == VALUES
    near.stores.until_blocked()
    assert client.delete(KEYS[:4]) == 4
    assert client.get_many(KEYS[:4]) == [None] * 4
    near.stores.open()
    settled(daemon)
    assert client.get_many(KEYS) == [None] * 4 + VALUES[4:]
    daemon.evict_all()
    assert client.get_many(KEYS) == [None] * 4 + VALUES[4:]
    assert not any(identity[32:] in KEYS[:4] for tier in tiers for identity in tier.values)
    assert len(far.values) == 4


def test_a_copy_that_fails_costs_the_far_tier_nothing(daemon: InProcess, client: Client, tiers: list[RamTier]) -> None:
    near, asked, far = tiers
    filled(daemon, client)
    near.values.clear()
    asked.values.clear()
    near.stores.failing = "it is away"
    assert client.get_many(KEYS) == VALUES
    settled(daemon)
    daemon.evict_all()
    assert len(far.values) == 8
    assert client.get_many(KEYS) == VALUES
    settled(daemon)
    assert daemon.ask(lambda: not any(daemon.store.index.dirty_of)), "no value waits for a copy"


def test_without_promote_a_far_value_stays_far(tiers: list[RamTier]) -> None:
    with running(*tiers) as daemon, daemon.client() as client:
        filled(daemon, client)
        tiers[0].values.clear()
        assert client.get_many(KEYS) == VALUES
        settled(daemon)
        assert not tiers[0].values


def test_clearing_says_which_tier_it_could_not_clear() -> None:
    """All the others are cleared; what stays is said, since it would be found again."""
    near, mute, far = RamTier("near"), RamTier("mute", local_index=False), RamTier("far")
    mute.capabilities = replace(mute.capabilities, enumerate=False)
    with running(near, mute, far) as daemon, daemon.client() as client:
        filled(daemon, client)
        with pytest.raises(KvError, match="mute: ram can neither list nor clear what it holds: it stays there"):
            client.clear()
        settled(daemon)
        assert [len(tier.values) for tier in (near, mute, far)] == [0, 8, 0]
        assert client.get_many(KEYS) == VALUES, "still there, as was said"


@pytest.mark.parametrize("error", [AdapterError("far: cannot list: the server is away"), LookupError("a defect")])
def test_a_tier_that_cannot_be_listed_keeps_no_other_from_being_cleared(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    near, far, last = RamTier("near"), RamTier("far"), RamTier("last")

    def fails() -> Iterator[tuple[bytes, Hit]]:
        raise error
        yield

    far.enumerate = fails  # type: ignore[method-assign]
    with running(near, far, last) as daemon, daemon.client() as client:
        filled(daemon, client)
        with pytest.raises(KvError) as caught:
            client.clear()
        assert "all is forgotten but what is in tier far: far: " in caught.value.message
        assert "AdapterError" not in caught.value.message
        settled(daemon)
        assert [len(tier.values) for tier in (near, far, last)] == [0, 8, 0]
    assert "Clear failed unexpectedly" not in caplog.text, "a server that is away is no defect of the daemon's"


def test_a_clear_does_not_wait_for_a_tier_that_works_no_more() -> None:
    """It could wait for its deletes a minute; look-ups miss them at once, and they are done when it is back."""
    near, far = RamTier("near"), RamTier("far")
    with running(near, far) as daemon, daemon.client(timeout_s=20) as client:
        filled(daemon, client)
        far.deletes.failing = far.stores.failing = "away"
        client.put(KEYS[0], VALUES[0])
        client.delete([KEYS[1]])
        wait_until(lambda: daemon.ask(lambda: daemon.tier(1).broken), what="the tier to be given up")
        assert client.clear() >= 7
        assert client.get_many(KEYS) == [None] * 8
        assert len(far.values) == 8
        far.open_all()
        settled(daemon)
        assert not far.values


def test_a_stop_with_nothing_but_deletes_left_names_no_values_on_their_way(caplog: pytest.LogCaptureFixture) -> None:
    tier = RamTier("near")
    with running(tier, drain_s=0.2) as daemon, daemon.client() as client:
        filled(daemon, client)
        tier.deletes.failing = "away"
        daemon.ask(lambda: daemon.tier().erase([b"n" * 64]))
        daemon.signal()
        wait_until(lambda: "has not forgotten 1 values" in caplog.text, what="the daemon to give up on its tier")
    assert "on their way" not in caplog.text


def test_the_longest_prefix_that_fits_a_short_arena_is_served(tiers: list[RamTier]) -> None:
    """Sixty values of 20 KiB, and room for fifty: a reader of all gets the first ones, not nothing."""
    keys = [i.to_bytes(32, "big") for i in range(60)]
    values = [i.to_bytes(2, "big") * 10_240 for i in range(60)]
    with running(*tiers, max_bytes=1 << 20) as daemon, daemon.client() as client:
        assert all(client.put_many(list(zip(keys, values, strict=True))))
        client.flush()
        with client.read(keys) as lease:
            held = [view is not None for view in lease.views]
            count = held.index(False)
            assert 25 <= count < 60
            assert not any(held[count:]), "a prefix, not a patchwork"
            assert [bytes(view) for view in lease.views[:count]] == values[:count]
        assert client.get_many(keys) == values, "in windows, all of it"


def short_of_room(daemon: InProcess, client: Client) -> tuple[list[bytes], list[bytes]]:
    """Sixteen values of 100 KiB, in every tier and not in the arena, which has room for ten at most."""
    keys = [bytes([i]) * 32 for i in range(16)]
    values = [bytes([i]) * 102_400 for i in range(16)]
    assert all(client.put_many(list(zip(keys, values, strict=True))))
    client.flush()
    daemon.evict_all()
    return keys, values


def test_in_a_short_arena_values_of_several_tiers_get_room_in_key_order(tiers: list[RamTier]) -> None:
    """Every other key is in the first tier, every one in the last: all of one tier first would leave holes."""
    with running(*tiers, max_bytes=1 << 20) as daemon, daemon.client() as client:
        keys, values = short_of_room(daemon, client)
        for tier in tiers[:2]:
            for identity in list(tier.values)[1::2]:
                del tier.values[identity]
        with client.read(keys) as lease:
            views = [view for view in lease.views if view is not None]
            assert [bytes(view) for view in views] == values[: len(views)], "what is served is a prefix"
            assert len(views) >= 6
        assert client.get_many(keys) == values


def test_in_a_short_arena_keys_further_on_make_room_for_the_first(tiers: list[RamTier]) -> None:
    """The last six values are in RAM, which they nearly fill: they must not keep the first ones out, that nothing comes."""
    with running(*tiers, max_bytes=1 << 20) as daemon, daemon.client() as client:
        keys, values = short_of_room(daemon, client)
        for key, value in zip(keys[10:], values[10:], strict=True):
            assert client.put(key, value)
        client.flush()
        assert sum("arena" in place for place in client.places(keys[10:])) >= 5
        before = daemon.pins()
        found = client.prefix(keys, pin_s=10.0)
        assert found.length >= 6
        client.unpin(found.token or b"")
        with client.read(keys) as lease:
            assert [bytes(view) for view in lease.views if view is not None][:6] == values[:6]
        assert client.get_many(keys) == values
        wait_until(lambda: daemon.pins() == before, what="every pin to be taken off")


def test_in_a_short_arena_all_namespaces_get_room_for_the_first_keys(tiers: list[RamTier]) -> None:
    """Three ranks, room for ten values: three keys of each, not ten of the first rank and none of the others."""
    ranks = ["one", "two", "three"]
    keys = [bytes([i]) * 32 for i in range(16)]
    for tier in tiers:
        with running(tier, max_bytes=1 << 20) as daemon, daemon.client() as client:
            for name in ranks:
                assert all(client.put_many([(key, key * 3200) for key in keys], namespace=name))
                client.flush()
            daemon.evict_all()
            before = daemon.pins()
            found = client.prefix(keys, namespaces=ranks, pin_s=30.0)
            assert 2 <= found.length <= 3
            for name in ranks:
                with client.claim(found.token or b"", namespace=name) as lease:
                    assert [bytes(view or b"") for view in lease.views] == [key * 3200 for key in keys[: found.length]]
            wait_until(lambda daemon=daemon, before=before: daemon.pins() == before, what="every pin to be taken off")


def test_a_cascade_of_real_tiers(tmp_path: Path) -> None:
    """Two directories; the first loses its files behind the daemon's back and gets them again."""

    root = tmp_path
    fast: Adapter = FsAdapter("fast", root / "fast", 64 << 20)
    slow: Adapter = FsAdapter("slow", root / "slow", 64 << 20, durability=Durability.FSYNC)
    with running(fast, slow, promote=True) as daemon, daemon.client() as client:
        filled(daemon, client)
        for file in (root / "fast").rglob("*.kv"):
            file.unlink()
        assert client.get_many(KEYS) == VALUES
        assert slow.counters.hits == 8
        settled(daemon)
        assert len(list((root / "fast").rglob("*.kv"))) == 8
        daemon.evict_all()
        assert client.get_many(KEYS) == VALUES
        assert slow.counters.hits == 8
