"""Several directories as one tier: spread, one away, back again, never the older value."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kvd.store.identity import Identity
from kvd.store.retention import Retention
from kvd.tiers.adapters.base import AdapterConfigError, AdapterError, Durability, Item, Loaded, Want
from kvd.tiers.adapters.disk import DiskAdapter
from kvd.tiers.adapters.stripe import Stripe
from tests.kvd.tiers.ram_tier import RamTier
from tests.support.daemon import Daemon

MakeDaemon = Callable[..., Daemon]


def identity(number: int) -> Identity:
    return b"s" * 32 + number.to_bytes(32, "big")


def item(number: int, data: bytes) -> Item:
    return Item(identity(number), memoryview(data), Retention.LONG)


def load(stripe: Stripe, number: int, length: int) -> bytes | Loaded:
    room = bytearray(length)
    (result,) = stripe.load([Want(identity(number), memoryview(room))])
    return bytes(room) if result is Loaded.OK else result


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def members() -> list[RamTier]:
    return [RamTier(f"m{i}") for i in range(3)]


@pytest.fixture
def stripe(members: list[RamTier], clock: Clock) -> Stripe:
    made = Stripe("stripe", members, monotonic=clock)
    made.open()
    return made


def test_values_spread_and_come_back(stripe: Stripe, members: list[RamTier]) -> None:
    values = {n: os.urandom(50) for n in range(300)}
    assert all(result.ok for result in stripe.store([item(n, data) for n, data in values.items()]))
    assert all(60 < len(member.values) < 140 for member in members), "a fair share each"
    assert all(load(stripe, n, 50) == data for n, data in values.items())
    assert stripe.usage().entries == 300
    assert len(list(stripe.enumerate())) == 300
    assert stripe.counters.stores == 300
    assert stripe.delete([identity(n) for n in range(100)]) == 100
    assert stripe.lookup([identity(0)]) == [None]


def test_a_failing_member_takes_only_its_share(stripe: Stripe, members: list[RamTier]) -> None:
    values = {n: os.urandom(50) for n in range(90)}
    stripe.store([item(n, data) for n, data in values.items()])
    theirs = {i[63] for i in members[1].values}
    members[1].loads.failing = members[1].stores.failing = "I/O error"
    got = {n: load(stripe, n, 50) for n in values}
    assert all(got[n] == data for n, data in values.items() if n not in theirs)
    assert all(got[n] is Loaded.MISS for n in theirs)
    assert all(result.ok for result in stripe.store([item(n, b"new") for n in range(100, 200)])), "the others take its share"


def test_a_member_that_was_away_never_serves_what_was_replaced_or_deleted(
    stripe: Stripe, members: list[RamTier], clock: Clock
) -> None:
    stripe.store([item(n, b"older") for n in range(60)])
    members[1].stores.failing = members[1].loads.failing = "I/O error"
    theirs = sorted(i[63] for i in members[1].values)
    replaced, deleted, kept = theirs[0], theirs[1], theirs[2]
    assert stripe.store([item(replaced, b"newer")])[0].ok
    stripe.delete([identity(deleted)])
    members[1].stores.failing = members[1].loads.failing = ""
    assert load(stripe, replaced, 5) == b"newer"
    clock.now += 60
    assert load(stripe, kept, 5) == b"older", "it is back"
    assert load(stripe, replaced, 5) == b"newer"
    assert load(stripe, deleted, 5) is Loaded.MISS
    assert identity(replaced) not in members[1].values, "what it had missed was made up for"


def on_disk(folder: Path, clock: Clock, count: int = 2) -> Stripe:
    made = Stripe("disk", [DiskAdapter(f"disk{i}", folder / f"d{i}", 16 << 20) for i in range(count)], monotonic=clock)
    made.open()
    return made


def break_first(stripe: Stripe, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on the first folder takes nothing, neither values nor deletes; what it holds it still holds."""

    def fails(*_: object) -> None:
        raise AdapterError("disk0: cannot write to d0: I/O error")

    for name in ("store", "delete", "load"):
        monkeypatch.setattr(stripe._members[0].adapter, name, fails)


def test_a_folder_that_was_away_serves_nothing_older_after_a_restart(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stripe = on_disk(tmp_path, clock)
    stripe.store([item(n, b"older") for n in range(60)])
    theirs = [n for n in range(60) if stripe._order(identity(n))[0].seed == 0]
    replaced, deleted = theirs[:2]
    break_first(stripe, monkeypatch)
    assert stripe.store([item(replaced, b"newer")])[0].ok
    stripe.delete([identity(deleted)])
    assert load(stripe, replaced, 5) == b"newer"
    monkeypatch.undo()
    stripe.close()  # before the folder was back: what it is owed ends with the process
    stripe = on_disk(tmp_path, clock)
    assert load(stripe, replaced, 5) == b"newer"
    assert load(stripe, deleted, 5) is Loaded.MISS
    assert "disk0 was away while values were replaced or deleted" in caplog.text
    assert [load(stripe, n, 5) for n in range(60) if n not in theirs] == [b"older"] * (60 - len(theirs))
    stripe.store([item(deleted, b"again")])
    stripe.close()
    caplog.clear()
    stripe = on_disk(tmp_path, clock)
    assert load(stripe, deleted, 5) == b"again", "once it is made up for, it is a folder like any other"
    assert not caplog.text
    stripe.close()


def test_a_folder_that_missed_nothing_keeps_what_it_holds(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    stripe = on_disk(tmp_path, clock)
    stripe.store([item(n, b"older") for n in range(60)])
    break_first(stripe, monkeypatch)
    assert all(result.ok for result in stripe.store([item(n, b"newer") for n in range(60, 90)]))
    monkeypatch.undo()
    stripe.close()
    stripe = on_disk(tmp_path, clock)
    assert [load(stripe, n, 5) for n in range(90)] == [b"older"] * 60 + [b"newer"] * 30
    stripe.close()


@pytest.mark.parametrize("meanwhile", ["another in its place", "one alone"])
def test_a_folder_that_was_left_out_for_a_while_serves_nothing_older(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture, meanwhile: str
) -> None:
    """A mount that is missing at one start, and there again at the next; or a folder taken off the command line and put back."""
    stripe = on_disk(tmp_path, clock)
    stripe.store([item(n, b"older") for n in range(60)])
    stripe.close()
    (tmp_path / "d0").rename(tmp_path / "aside")
    if meanwhile == "one alone":
        alone = DiskAdapter("disk", tmp_path / "d1", 16 << 20, alone=True)
        alone.open()
        alone.store([item(n, b"newer") for n in range(30)])
        alone.close()
    else:
        stripe = on_disk(tmp_path, clock)
        stripe.store([item(n, b"newer") for n in range(30)])
        stripe.close()
        shutil.rmtree(tmp_path / "d0")
    (tmp_path / "aside").rename(tmp_path / "d0")
    stripe = on_disk(tmp_path, clock)
    got = [load(stripe, n, 5) for n in range(60)]
    assert all(data in (b"newer", Loaded.MISS) for data in got[:30])
    assert all(data in (b"older", Loaded.MISS) for data in got[30:])
    assert "disk0 was away while values were replaced or deleted" in caplog.text
    stripe.store([item(n, b"again") for n in range(60)])
    stripe.close()
    caplog.clear()
    stripe = on_disk(tmp_path, clock)
    assert [load(stripe, n, 5) for n in range(60)] == [b"again"] * 60
    assert not caplog.text
    stripe.close()


def test_folders_are_marked_when_they_change_and_a_full_disk_is_no_reason_to_do_without(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    marks = []
    for _ in range(2):
        stripe = on_disk(tmp_path, clock)
        marks.append([member.adapter.mark() for member in stripe._members])
        stripe.store([item(n, b"older") for n in range(60)])
        stripe.close()
    assert marks[0] == marks[1], "the same folders: the same mark"
    assert len({*marks[0]}) == 1

    def full(*_: object) -> None:
        raise AdapterError("disk0: cannot write d0/manifest.json: No space left on device")

    monkeypatch.setattr(DiskAdapter, "set_mark", full)
    stripe = on_disk(tmp_path, clock, count=3)
    assert [load(stripe, n, 5) for n in range(60)] == [b"older"] * 60
    assert "a restart before that works may give up what is there" in caplog.text
    stripe.close()


def test_a_folder_that_failed_is_named_once_and_probed_less_and_less(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stripe = on_disk(tmp_path, clock)
    break_first(stripe, monkeypatch)
    for n in range(2000):
        stripe.store([item(n, b"x")])
        clock.now += 0.1
    said = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert said[0] == "tier disk: disk0 does not work: disk0: cannot write to d0: I/O error; serving without it"
    assert len(said) < 12, "two hundred seconds of it: 1, 2, 4, 8, 16, 30, 30, ..."
    stripe.close()


def test_a_flush_owns_up_to_what_a_folder_that_does_not_work_holds(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    stripe = on_disk(tmp_path, clock)
    stripe.store([item(n, b"x") for n in range(60)])
    assert stripe.flush() is Durability.FSYNC
    first = stripe._members[0].adapter
    break_first(stripe, monkeypatch)
    stripe.store([item(n, b"x") for n in range(60, 90)])

    def fails(*_: object) -> None:
        raise AdapterError("disk0: d0 does not keep what is in it: I/O error")

    monkeypatch.setattr(first, "flush", fails)
    with pytest.raises(AdapterError, match="I/O error") as caught:
        stripe.flush()
    assert caught.value.values == first.usage().entries > 0
    monkeypatch.undo()
    assert stripe.flush() is Durability.FSYNC
    stripe.close()


def test_all_members_failing_is_the_tiers_failure(stripe: Stripe, members: list[RamTier], clock: Clock) -> None:
    for member in members:
        member.stores.failing = "I/O error"
    with pytest.raises(AdapterError):
        stripe.store([item(1, b"x")])
    assert [result.ok for result in stripe.store([item(1, b"x")])] == [False], "all are left alone"
    for member in members:
        member.stores.failing = ""
    clock.now += 60
    assert stripe.store([item(1, b"x")])[0].ok


def test_another_number_of_directories_still_finds_what_was_stored(tmp_path: Path) -> None:
    def made(count: int) -> Stripe:
        return Stripe("disk", [DiskAdapter(f"disk{i}", tmp_path / f"d{i}", 16 << 20) for i in range(count)])

    values = {n: os.urandom(20_000) for n in range(100)}
    stripe = made(2)
    stripe.open()
    assert all(result.ok for result in stripe.store([item(n, data) for n, data in values.items()]))
    stripe.close()
    stripe = made(3)
    stripe.open()
    assert all(load(stripe, n, 20_000) == data for n, data in values.items())
    stripe.close()


def test_a_directory_that_cannot_be_opened_is_served_without(tmp_path: Path) -> None:
    class Broken(RamTier):
        def open(self) -> None:
            raise AdapterError("cannot read it: I/O error")

    stripe = Stripe("disk", [Broken("broken"), RamTier("sound")])
    stripe.open()
    assert stripe.store([item(1, b"x")])[0].ok
    with pytest.raises(AdapterError, match="I/O error"):
        Stripe("disk", [Broken("one"), Broken("two")]).open()
    (tmp_path / "file").touch()
    with pytest.raises(AdapterConfigError):
        Stripe("disk", [RamTier("sound"), DiskAdapter("disk1", tmp_path / "file", 16 << 20)]).open()


@pytest.mark.real("kvd")
def test_a_daemon_over_two_directories_survives_losing_one(kvd_daemon: MakeDaemon, tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    words = [word for path in paths for word in ("--long-path", path)]
    daemon = kvd_daemon(*words, "--long-bytes", "128MiB")
    keys = [os.urandom(32) for _ in range(40)]
    with daemon.client() as client:
        assert all(client.put_many([(key, key * 4000) for key in keys], wait="tier"))
    daemon.stop()
    held = [sum(f.stat().st_size for f in path.glob("*.kvcache")) for path in paths]
    assert all(held), "both hold something"
    shutil.rmtree(paths[0])
    daemon.start()
    with daemon.client() as client:
        values = client.get_many(keys)
        assert all(value in (None, key * 4000) for key, value in zip(keys, values, strict=True))
        assert 5 < sum(value is not None for value in values) < 35
        assert all(client.put_many([(key, key * 4000) for key in keys], wait="tier"))
        assert client.get_many(keys) == [key * 4000 for key in keys]
