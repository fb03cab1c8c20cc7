"""Single rules of the store, one a test: classes, expiry, overwriting under pins, room, lending ahead."""

from collections.abc import Iterator

import pytest

from kvd.store.arena import Arena
from kvd.store.extents import PAGE
from kvd.store.identity import check_key, namespace_of
from kvd.store.leases import Holder
from kvd.store.retention import NEVER, Retention, expired, expiry_ns
from kvd.store.shortage import FROM_TIER
from kvd.store.store import ABSENT, LEND_AHEAD_PART, Store

N = b"n" * 32


class Clock:
    def __init__(self) -> None:
        self.s = 50.0

    def ns(self) -> int:
        return int(self.s * 1e9)

    def monotonic(self) -> float:
        return self.s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> Iterator[Store]:
    arena = Arena(16 * PAGE)
    yield Store(arena, clock_ns=clock.ns, monotonic=clock.monotonic)
    arena.close()


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def put(store: Store, number: int, *, pages: int = 1, retention: Retention = Retention.LONG, expires: int = NEVER) -> str:
    return store.put_inline(N, key(number), bytes([number]) * (pages * PAGE), retention, expires)


def held(store: Store) -> set[int]:
    return {number for number in range(256) if store.find(N, [key(number)])[0] != ABSENT}


def test_eviction_takes_ephemeral_then_short_then_long_whatever_was_used_last(store: Store) -> None:
    for number in range(16):
        put(store, number, retention=(Retention.LONG, Retention.SHORT, Retention.EPHEMERAL, Retention.LONG)[number % 4])
    for expected in ([2, 6, 10, 14], [1, 5, 9, 13], [0, 3, 4, 7]):
        for gone in expected:
            assert gone in held(store)
            assert put(store, 100 + gone) == ""
            assert gone not in held(store)
    assert store.counts.evictions == 12


def test_what_has_expired_goes_before_anything_else(store: Store, clock: Clock) -> None:
    put(store, 0, retention=Retention.EPHEMERAL)
    put(store, 1, expires=clock.ns() + 10**9)
    for number in range(2, 16):
        put(store, number)
    clock.s += 2
    assert put(store, 20) == ""
    assert held(store) == {0, *range(2, 16), 20}
    assert (store.counts.expirations, store.counts.evictions) == (1, 0)


def test_a_full_arena_under_noop_refuses_and_still_takes_what_expired(store: Store, clock: Clock) -> None:
    store.evicting = False
    for number in range(16):
        assert put(store, number, expires=clock.ns() + 10**9 if number == 3 else NEVER) == ""
    assert put(store, 20) == "no_room"
    clock.s += 2
    assert put(store, 20) == ""
    assert held(store) == {*range(16), 20} - {3}


def test_a_value_put_twice_keeps_its_old_bytes_for_whoever_pins_them(store: Store) -> None:
    put(store, 1)
    holder = Holder()
    slots = store.find(N, [key(1)])
    lease = store.pin(holder, slots, 99.0)
    old = store.memory_of(int(slots[0]))[0]
    store.put_inline(N, key(1), b"new", Retention.LONG, NEVER)
    assert bytes(old) == b"\1" * PAGE
    new = int(store.find(N, [key(1)])[0])
    assert bytes(store.memory_of(new)[0]) == b"new"
    assert store.arena.used_bytes == 2 * PAGE
    store.release(holder, lease.number)
    assert store.arena.used_bytes == PAGE


def test_a_deleted_value_is_gone_at_once_and_its_pages_with_the_last_pin(store: Store) -> None:
    put(store, 1)
    holder = Holder()
    slots = store.find(N, [key(1)])
    leases = [store.pin(holder, slots, 99.0) for _ in range(2)]
    assert store.delete(N, [key(1), key(1)]) == 1
    assert held(store) == set()
    for lease in leases:
        assert store.arena.used_bytes == PAGE
        store.release(holder, lease.number)
    assert store.arena.used_bytes == 0


def test_pinned_values_are_never_evicted(store: Store) -> None:
    for number in range(16):
        put(store, number)
    holder = Holder()
    lease = store.pin(holder, store.find(N, [key(n) for n in range(16)]), 99.0)
    assert put(store, 20) == "no_room"
    store.release(holder, lease.number)
    assert put(store, 20) == ""


def test_a_lease_past_its_deadline_is_void_and_its_values_can_go(store: Store, clock: Clock) -> None:
    for number in range(16):
        put(store, number)
    holder = Holder()
    lease = store.pin(holder, store.find(N, [key(n) for n in range(16)]), clock.s + 30)
    clock.s += 31
    store.tick()
    assert put(store, 20) == ""
    assert not store.release(holder, lease.number)
    assert store.leases.revoked == 1


def test_too_large_is_said_and_evicts_nothing(store: Store) -> None:
    put(store, 1)
    assert put(store, 2, pages=17) == "too_large"
    assert held(store) == {1}


def test_lending_ahead_is_bounded_and_never_evicts_what_is_unwritten(store: Store) -> None:
    holder = Holder()
    lent = store.reserve(holder, [PAGE] * 10, 99.0, ahead=True)
    assert len(lent) == 16 // LEND_AHEAD_PART
    assert store.reserve(holder, [PAGE] * 10, 99.0, ahead=True) == []
    assert len(store.reserve(holder, [PAGE] * 10, 99.0)) == 10


def test_a_shorter_commit_gives_the_rest_back(store: Store) -> None:
    holder = Holder()
    (lent,) = store.reserve(holder, [8 * PAGE], 99.0)
    store.arena.slice(lent.offset, 8 * PAGE)[:] = b"x" * (8 * PAGE)
    assert store.commit(holder, N, [(lent.serial, key(1), PAGE + 1)], Retention.LONG, NEVER) == [""]
    assert store.arena.used_bytes == 2 * PAGE
    exact, padded = store.memory_of(int(store.find(N, [key(1)])[0]))
    assert bytes(exact) == b"x" * (PAGE + 1)
    assert not any(padded[PAGE + 1 :])


def test_a_longer_commit_than_was_lent_is_refused_and_frees_the_extent(store: Store) -> None:
    holder = Holder()
    (lent,) = store.reserve(holder, [PAGE], 99.0)
    assert store.commit(holder, N, [(lent.serial, key(1), PAGE + 1)], Retention.LONG, NEVER) == ["oversize"]
    assert store.arena.used_bytes == 0
    assert held(store) == set()


def test_nobody_commits_what_another_was_lent(store: Store) -> None:
    mine, yours = Holder(), Holder()
    (lent,) = store.reserve(mine, [PAGE], 99.0)
    assert store.commit(yours, N, [(lent.serial, key(1), PAGE)], Retention.LONG, NEVER) == ["lease_lost"]
    assert not store.abort(yours, lent.serial)
    assert store.commit(mine, N, [(lent.serial, key(1), PAGE)], Retention.LONG, NEVER) == [""]


def test_draining_refuses_what_is_new_and_serves_what_is_there(store: Store) -> None:
    put(store, 1)
    store.draining = True
    assert put(store, 2) == "draining"
    assert held(store) == {1}


def test_a_slot_used_again_does_not_inherit_an_expiry(store: Store, clock: Clock) -> None:
    put(store, 1, expires=clock.ns() + 10**9)
    store.delete(N, [key(1)])
    put(store, 2)
    clock.s += 5
    store.tick()
    assert held(store) == {2}


def test_promoting_never_replaces_what_was_put_meanwhile(store: Store) -> None:
    offset = store.make_room(PAGE, FROM_TIER)
    assert offset is not None
    put(store, 1)
    slot = store.admit(N, key(1), offset, PAGE, Retention.LONG, NEVER)
    assert bytes(store.memory_of(slot)[0]) == b"\1" * PAGE
    assert store.arena.used_bytes == PAGE


def test_promoting_what_has_expired_admits_nothing(store: Store, clock: Clock) -> None:
    offset = store.make_room(PAGE, FROM_TIER)
    assert offset is not None
    assert store.admit(N, key(1), offset, PAGE, Retention.LONG, clock.ns()) == ABSENT
    assert store.arena.used_bytes == 0


class TestWords:
    @pytest.mark.parametrize("word", ["none", "Ephemeral", "SHORT", "long"])
    def test_classes_by_name(self, word: str) -> None:
        assert Retention.of(word).name == word.upper()

    @pytest.mark.parametrize("word", ["forever", "", 4, -1])
    def test_unknown_classes_are_named(self, word: str | int) -> None:
        with pytest.raises(ValueError, match="one of none, ephemeral, short, long"):
            Retention.of(word)

    def test_expiry(self) -> None:
        assert expiry_ns(None) == NEVER
        assert expiry_ns(2, 10**9) == 3 * 10**9
        for ttl in (0, -1, -(10**12)):
            assert expired(expiry_ns(ttl, 10**9), 10**9)
        assert not expired(NEVER, 2**63)

    @pytest.mark.parametrize("ttl", [1e11, 1e300, float("inf")])
    def test_a_time_beyond_all_clocks_stays_in_range(self, ttl: float) -> None:
        """The expiry is 64 bits on the wire and on disk."""
        assert 0 < expiry_ns(ttl) < 2**63

    def test_a_ttl_that_is_no_number_is_refused(self) -> None:
        with pytest.raises(ValueError, match="ttl"):
            expiry_ns(float("nan"))

    def test_namespaces_and_keys(self) -> None:
        assert namespace_of("default") == namespace_of("default")
        assert len(namespace_of("ü")) == 32
        assert namespace_of(b"x" * 32) == b"x" * 32
        for wrong in (b"", b"x" * 31, b"x" * 33):
            with pytest.raises(ValueError, match="32 bytes"):
                namespace_of(wrong)
            with pytest.raises(ValueError, match="32 bytes"):
                check_key(wrong)
