"""Store and prefetch policies in a running daemon: the built-in ones, users' own, and buffer-only mode when tiers fail."""

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvd.store.identity import namespace_of
from kvd.tiers import policies
from kvd.tiers.adapters.base import Loaded, Want
from kvd.tiers.policies import Asking, PrefetchPolicy, Retain, SkipL1, StorePolicy, TierState, Value
from kvd.wire.client import Client
from kvtools.errors import UsageError
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
def run() -> Iterator[Callable[..., tuple[InProcess, Client]]]:
    """A daemon with these tiers and policies, and a client of it."""
    open_: list[Any] = []

    def start(
        *tiers: RamTier, store: StorePolicy | None = None, prefetch: PrefetchPolicy | None = None, **options: Any
    ) -> tuple[InProcess, Client]:
        asking = Asking(store or StorePolicy(), prefetch or PrefetchPolicy())
        context = running(*tiers, max_bytes=options.pop("max_bytes", 8 * MIB), policies=asking, **options)
        daemon = context.__enter__()
        open_.append(context)
        client = daemon.client()
        open_.append(client)
        client.__enter__()
        return daemon, client

    yield start
    for one in reversed(open_):
        one.__exit__(None, None, None)


def entries(daemon: InProcess) -> int:
    return daemon.ask(lambda: daemon.store.index.entries)


# ---- skip_l1 -----------------------------------------------------------------------------------------------------------


def test_skip_l1_empties_the_arena_once_all_tiers_have_answered(run: Callable[..., Any]) -> None:
    fast, slow = RamTier("fast"), RamTier("slow")
    slow.stores.close()
    daemon, client = run(fast, slow, store=SkipL1(), evicting=False)
    for n in range(5):
        assert client.put(key(n), value(n))
    slow.stores.until_blocked()
    wait_until(lambda: len(fast.values) == 5, what="the quick tier")
    assert entries(daemon) == 5  # the slow one has not answered
    slow.stores.open()
    wait_until(lambda: entries(daemon) == 0, what="the arena to be empty")
    assert len(fast.values) == len(slow.values) == 5
    assert client.stats()["released_total"] == 5
    assert [client.get(key(n)) for n in range(5)] == [value(n) for n in range(5)]


def test_a_value_that_nobody_took_stays_in_the_arena(run: Callable[..., Any]) -> None:
    tier = RamTier()
    tier.refuse = lambda item: "full" if item.identity == SPACE + key(1) else ""
    daemon, client = run(tier, store=SkipL1(), evicting=False)
    for n in range(3):
        assert client.put(key(n), value(n), wait="tier")
    wait_until(lambda: entries(daemon) == 1, what="the others to leave")
    assert client.get(key(1)) == value(1)


def test_one_of_two_is_enough_to_leave(run: Callable[..., Any]) -> None:
    good, bad = RamTier("good"), RamTier("bad")
    bad.refuse = lambda item: "too_large"
    daemon, client = run(good, bad, store=SkipL1(), evicting=False)
    client.put(key(1), value(1), wait="tier")
    wait_until(lambda: entries(daemon) == 0, what="the value to leave")
    assert client.get(key(1)) == value(1)


def test_buffer_only_mode_does_not_wedge_when_the_tier_is_down_and_needs_no_restart(run: Callable[..., Any]) -> None:
    """skip_l1 and noop, the arena filled several times over while nothing can be written; then the tier is back."""
    tier = RamTier()
    daemon, client = run(tier, store=SkipL1(), evicting=False)
    tier.stores.failing = "server away"
    client.timeout_s = 10.0
    for n in range(40):  # five arenas full
        assert client.put(key(n), value(n, MIB)), "a put was refused for good"
    stats = client.stats()
    assert stats["evictions_unwritten_total"] >= 30
    assert stats["tiers"][0]["breaker_open"] == 1
    assert client.get(key(39)) == value(39, MIB)
    tier.stores.failing = ""
    wait_until(lambda: entries(daemon) == 0, what="what was left to be written", timeout_s=40)
    for n in range(50, 70):
        assert client.put(key(n), value(n, MIB), wait="tier")
    wait_until(lambda: entries(daemon) == 0, what="the arena to be empty again")
    assert client.get(key(69)) == value(69, MIB)


def test_buffer_only_mode_goes_on_with_a_tier_that_is_full(run: Callable[..., Any]) -> None:
    tier = RamTier()
    tier.refuse = lambda item: "full"
    _, client = run(tier, store=SkipL1(), evicting=False)
    for n in range(30):
        assert client.put(key(n), value(n, MIB))
    tier.refuse = lambda item: ""
    assert client.put(key(99), value(99), wait="tier")
    wait_until(lambda: SPACE + key(99) in tier.values, what="the tier that has room again")


def test_noop_alone_refuses_when_it_is_full(run: Callable[..., Any]) -> None:
    _, client = run(RamTier(), evicting=False)
    client.timeout_s = 1.0
    answers = [bool(client.put(key(n), value(n, MIB), wait="tier")) for n in range(12)]
    assert answers[:6] == [True] * 6
    assert answers[-1] is False


def test_an_unwritten_value_that_is_evicted_stays_in_the_tier_that_took_it(run: Callable[..., Any]) -> None:
    """Two tiers, one down: what the good one holds must not go because the arena had no room for the wait."""
    good, bad = RamTier("good"), RamTier("bad")
    daemon, client = run(good, bad)
    client.put(key(1), b"old" * 100, wait="tier")
    bad.stores.failing = "away"
    client.put(key(1), value(1, MIB))
    for n in range(2, 20):
        assert client.put(key(n), value(n, MIB))
    wait_until(lambda: len(good.values) == 19, what="the good tier")
    assert daemon.ask(lambda: daemon.store.counts.evicted_dirty) > 0
    assert [client.get(key(n)) == value(n, MIB) for n in range(1, 20)] == [True] * 19
    bad.stores.failing = ""
    # What the bad one holds of the replaced value is forgotten when it is back.
    wait_until(lambda: bad.values.get(SPACE + key(1), (b"",))[0] != b"old" * 100, what="the old value to go", timeout_s=40)


# ---- temporary copies --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "gone"), [(PrefetchPolicy(), {3, 4, 5}), (Retain(), {0, 1, 2})])
def test_what_came_up_goes_first_or_stays(run: Callable[..., Any], policy: PrefetchPolicy, gone: set[int]) -> None:
    tier = RamTier()
    daemon, client = run(tier, prefetch=policy)
    for n in range(3, 6):
        client.put(key(n), value(n, MIB), wait="tier")
    daemon.evict_all()
    for n in range(3):
        client.put(key(n), value(n, MIB), wait="tier")
    assert client.get_many([key(n) for n in range(3, 6)]) == [value(n, MIB) for n in range(3, 6)]
    assert entries(daemon) == 6
    for n in range(10, 13):
        client.put(key(n), value(n, MIB), wait="tier")
    client.put(key(13), value(13, MIB), wait="tier")
    client.put(key(14), value(14, MIB), wait="tier")
    here = daemon.ask(lambda: {int.from_bytes(k, "big") for k in daemon.store.index.spaces[SPACE].slots})
    assert {10, 11, 12, 13, 14} <= here
    assert not gone & here
    assert len(here) >= 7


def test_a_copy_that_is_read_again_is_temporary_no_more(run: Callable[..., Any]) -> None:
    daemon, client = run(RamTier())
    client.put(key(1), value(1), wait="tier")
    daemon.evict_all()
    slot = lambda: daemon.store.index.spaces[SPACE].slots[key(1)]  # noqa: E731
    client.get(key(1))
    assert daemon.ask(lambda: daemon.store.index.passing_of[slot()]) == 1
    client.get(key(1))
    assert daemon.ask(lambda: daemon.store.index.passing_of[slot()]) == 0


def test_an_explicit_prefetch_stays(run: Callable[..., Any]) -> None:
    daemon, client = run(RamTier())
    client.put(key(1), value(1), wait="tier")
    daemon.evict_all()
    assert client.prefetch([key(1)]) == 1
    assert daemon.ask(lambda: int(daemon.store.index.passing.sum())) == 0


def test_noop_lets_temporary_copies_go(run: Callable[..., Any]) -> None:
    """With noop nothing else may be evicted; read-once copies of what a tier holds are no values of the arena's own."""
    daemon, client = run(RamTier(), evicting=False)
    for n in range(4):
        client.put(key(n), value(n, MIB), wait="tier")
    daemon.evict_all()
    assert client.get_many([key(n) for n in range(4)]) == [value(n, MIB) for n in range(4)]
    for n in range(4, 9):
        assert client.put(key(n), value(n, MIB), wait="tier")
    assert [client.get(key(n)) == value(n, MIB) for n in range(9)] == [True] * 9


# ---- users' policies ---------------------------------------------------------------------------------------------------


class Small(StorePolicy):
    """Small values to the first tier only."""

    def targets(self, value: Value, tiers: Sequence[TierState]) -> Sequence[int]:
        assert [tier.name for tier in tiers] == ["a", "b"]
        return [0] if value.length < 10_000 else [tier.number for tier in tiers]


class Last(PrefetchPolicy):
    """From the last tier that has it."""

    def source(self, value: Value, holders: Sequence[int]) -> int:
        return holders[-1]


class Broken(StorePolicy):
    def targets(self, value: Value, tiers: Sequence[TierState]) -> Sequence[int]:
        raise RuntimeError("a defect")

    def leaves(self, value: Value, holders: Sequence[int]) -> bool:
        raise RuntimeError("another")


class Nonsense(PrefetchPolicy):
    def source(self, value: Value, holders: Sequence[int]) -> int:
        return 77


def test_a_policy_chooses_the_tiers_and_the_others_forget(run: Callable[..., Any]) -> None:
    a, b = RamTier("a"), RamTier("b")
    _, client = run(a, b, store=Small())
    assert client.put(key(1), value(1), wait="tier").durability == "fsync"
    assert set(a.values) == set(b.values) == {SPACE + key(1)}
    assert client.put(key(1), b"small", wait="tier").durability == "fsync"
    assert a.values[SPACE + key(1)][0] == b"small"
    wait_until(lambda: not b.values, what="the other tier to forget the old value")


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("second", [True, False])
def test_a_policy_chooses_who_loads(run: Callable[..., Any], first: bool, second: bool) -> None:
    """Also among tiers that only I/O can ask whether they have it."""
    a, b = RamTier("a", local_index=first), RamTier("b", local_index=second)
    daemon, client = run(a, b, prefetch=Last())
    client.put(key(1), value(1), wait="tier")
    daemon.evict_all()
    assert client.get(key(1)) == value(1)
    assert (a.loads.calls, b.loads.calls) == (0, 1)
    client.ping()  # what went before it, the end of a read, has been done
    daemon.evict_all()
    with client.claim(client.prefix([key(1)], pin_s=5.0).token or b"") as lease:
        assert [bytes(view or b"") for view in lease.views] == [value(1)]
    assert (a.loads.calls, b.loads.calls) == (0, 2)
    b.loads.failing = "it is away"
    client.ping()
    daemon.evict_all()
    assert client.get(key(1)) == value(1)
    assert (a.loads.calls, b.loads.calls) == (1, 3)


def test_policies_that_fail_cost_nothing_and_are_counted(run: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    a, b = RamTier("a"), RamTier("b")
    with caplog.at_level(logging.ERROR, "kvd.tiers"):
        daemon, client = run(a, b, store=Broken(), prefetch=Nonsense())
        for n in range(5):
            assert client.put(key(n), value(n), wait="tier")
        assert len(a.values) == len(b.values) == 5
        daemon.evict_all()
        assert client.get(key(1)) == value(1)
        wait_until(lambda: client.stats()["policy_errors_total"] >= 11, what="the errors to be counted")
    said = [record.getMessage() for record in caplog.records]
    assert len([line for line in said if "Broken.targets failed" in line]) == 1
    assert len([line for line in said if "Nonsense.source answered 77" in line]) == 1


def test_policies_are_found_by_name_and_by_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(policies.store_policy("skip_l1"), SkipL1)
    assert isinstance(policies.prefetch_policy("retain"), Retain)
    (tmp_path / "mine_policies.py").write_text(
        "from kvd.tiers.policies import StorePolicy\nclass Mine(StorePolicy):\n    pass\nclass Bad:\n    pass\n"
        "class Odd(StorePolicy):\n    def __init__(self, x): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert type(policies.store_policy("mine_policies:Mine")).__name__ == "Mine"
    for name, says in (
        ("skip_l2", "did you mean 'skip_l1'"),
        ("zzz", "module:Class"),
        ("mine_policies:Nobody", "has no Nobody"),
        ("no_such_module_here:X", "cannot import"),
        (":Nobody", "cannot import ''"),
        ("..x:Nobody", "cannot import '..x'"),
        ("mine_policies:", "has no attribute without a name"),
        ("mine_policies:Bad", "makes no kvd.tiers.policies.StorePolicy"),
        ("mine_policies:Odd", "made without arguments"),
    ):
        with pytest.raises(UsageError) as caught:
            policies.store_policy(name)
        assert says in f"{caught.value.message} {caught.value.hint}"


def test_an_entry_point_of_a_package_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "mine-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[kvtools.store_policies]\nours = mine_entry:Ours\n")
    (tmp_path / "mine_entry.py").write_text("from kvd.tiers.policies import SkipL1\nclass Ours(SkipL1):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert isinstance(policies.store_policy("ours"), SkipL1)
    with pytest.raises(UsageError, match="unknown prefetch policy"):
        policies.prefetch_policy("ours")


def test_registered_names_are_one_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "STORE", dict(policies.STORE))
    policies.register_store_policy("mine", SkipL1)
    assert isinstance(policies.store_policy("mine"), SkipL1)
    with pytest.raises(ValueError, match="already"):
        policies.register_store_policy("mine", SkipL1)


# ---- periodic work -----------------------------------------------------------------------------------------------------


def test_periodic_work_that_fails_is_counted_and_the_rest_goes_on(
    run: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Eviction by watermark raises, again and again: deadlines, figures and puts go on, and once it works again, it works."""
    daemon, client = run(watermark=0.3, eviction_ratio=0.5)
    client.put(key(0), value(0))

    def broken(watermark: float) -> None:
        raise RuntimeError("a defect in eviction")

    with caplog.at_level(logging.ERROR, "kvd"):
        daemon.ask(lambda: setattr(daemon.store, "_keep_below", broken))
        wait_until(lambda: client.stats()["tick_errors_total"] >= 4, what="the failures to be counted")
        assert client.put(key(1), value(1))
        assert client.get(key(1)) == value(1)
        assert len([r for r in caplog.records if "periodic work failed" in r.getMessage()]) <= 4  # not ten a second
    daemon.ask(lambda: delattr(daemon.store, "_keep_below"))
    for n in range(5):
        client.put(key(n), value(n, MIB))
    wait_until(lambda: client.stats()["evictions_ahead_total"] > 0, what="eviction to work again")


# ---- many requests at once -----------------------------------------------------------------------------------------------


def test_no_more_bytes_than_the_budget_are_loaded_at_once(run: Callable[..., Any]) -> None:
    """A thread's share is bounded by it too; one value may always be loaded, however large."""
    tier = RamTier()
    tier.prefetch_max_bytes = 2 * MIB
    at_once: list[int] = []
    load = tier.load

    def measured(wants: Sequence[Want]) -> list[Loaded]:
        at_once.append(sum(len(want.into) for want in wants))
        return load(wants)

    tier.load = measured  # type: ignore[method-assign]
    daemon, client = run(tier, max_bytes=64 * MIB)
    sizes = [MIB, MIB, MIB // 2, 3 * MIB, MIB, MIB, MIB, 100]
    for n, size in enumerate(sizes):
        client.put(key(n), value(n, size), wait="tier")
    daemon.evict_all()
    with client.read([key(n) for n in range(8)]) as lease:
        assert [bytes(view or b"") for view in lease.views] == [value(n, size) for n, size in enumerate(sizes)]
    assert at_once == [2 * MIB, MIB // 2, 3 * MIB, 2 * MIB, MIB + 100]


def test_only_so_many_requests_load_at_once(run: Callable[..., Any]) -> None:
    tier = RamTier()
    daemon, client = run(tier, prefetch_in_flight=2, max_bytes=64 * MIB)
    for n in range(12):
        client.put(key(n), value(n, MIB), wait="tier")
    daemon.evict_all()
    tier.loads.close()
    clients = [daemon.client() for _ in range(6)]
    import threading

    results: dict[int, list[Any]] = {}
    threads = [
        threading.Thread(target=lambda n=n, c=c: results.update({n: c.get_many([key(2 * n), key(2 * n + 1)])}))
        for n, c in enumerate(clients)
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: daemon.ask(lambda: daemon.tier().turns.waiting) == 4, what="four requests to wait")
    assert tier.loads.waiting == 2
    tier.loads.open()
    for thread in threads:
        thread.join(20)
    assert results == {n: [value(2 * n, MIB), value(2 * n + 1, MIB)] for n in range(6)}
    for one in clients:
        one.close()
