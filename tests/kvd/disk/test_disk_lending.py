"""Extents lent to be written and held to be read past the store: when a value is there, whose file it is, what outlives what."""

import os
import shutil
from pathlib import Path

import pytest

from kvd.store.retention import Retention
from kvd.tiers.adapters.base import DirectExtent, Durability, Loaded, Reservation, Stored
from kvd.tiers.adapters.disk import DiskAdapter, verify
from kvd.tiers.adapters.disk.format import payload_checksum
from kvd.tiers.adapters.stripe import Stripe
from tests.kvd.disk.helpers import get, get_as, identity, opened, put, value


def lend(adapter: DiskAdapter | Stripe, number: int, length: int, **more) -> DirectExtent:
    (extent,) = adapter.lend([Reservation(identity(number), length, **more)])
    assert isinstance(extent, DirectExtent), extent
    return extent


def write(extent: DirectExtent, data: bytes) -> None:
    """What an engine does: its own descriptor, its own write, its own sync."""
    fd = os.open(extent.file, os.O_RDWR)
    try:
        assert os.pwrite(fd, data, extent.offset) == len(data)
        os.fdatasync(fd)
    finally:
        os.close(fd)


def read(extent: DirectExtent) -> bytes:
    with extent.file.open("rb") as file:
        file.seek(extent.offset)
        return file.read(extent.length)


def lend_and_fill(adapter: DiskAdapter | Stripe, number: int, data: bytes, checksum: bytes = b"", **more) -> Stored:
    extent = lend(adapter, number, len(data), **more)
    write(extent, data)
    return adapter.fill(extent, checksum)


@pytest.mark.parametrize("durability", list(Durability))
def test_a_loan_is_a_miss_until_it_is_filled_and_then_a_value_like_any_other(tmp_path, durability):
    data = value(1, 300_001)
    adapter = opened(tmp_path, durability=durability)
    extent = lend(adapter, 1, len(data))
    assert extent.offset % 4096 == 0
    write(extent, data)
    assert adapter.lookup([identity(1)]) == [None]
    assert adapter.usage().entries == 0
    assert adapter.describe()["lent_bytes"] == 4096 + 303_104
    assert adapter.fill(extent) == Stored(True, "", durability)
    assert adapter.describe()["lent_bytes"] == 0
    for _ in range(2):
        assert get(adapter, identity(1)) == data
        assert adapter.usage().bytes_used == 4096 + 303_104
        (held,) = adapter.hold([identity(1)])
        assert held is not None
        assert (read(held), held.checksum, held.offset) == (data, b"", extent.offset)
        adapter.give_back(held)
        adapter.close()
        adapter = opened(tmp_path, durability=durability)
    adapter.close()
    (absent,) = verify(tmp_path).absent_checksums
    assert identity(1)[32:].hex() in absent


def test_a_checksum_that_came_with_the_fill_is_checked(tmp_path):
    data = value(1, 50_000)
    adapter = opened(tmp_path)
    assert lend_and_fill(adapter, 1, data, payload_checksum(data)).ok
    (held,) = adapter.hold([identity(1)])
    assert held is not None
    assert held.checksum == payload_checksum(data)
    adapter.give_back(held)
    write(held, b"\0" + data[1:])
    assert get_as(adapter, identity(1))[0] is Loaded.CORRUPT
    adapter.close()
    assert verify(tmp_path).absent_checksums == []


def test_what_cannot_be_lent_says_why(tmp_path):
    adapter = opened(tmp_path)
    wanted = [
        Reservation(identity(1), 3840),
        Reservation(identity(2), 1 << 30),
        Reservation(identity(3), 9000, Retention.EPHEMERAL),
        Reservation(identity(4), 9000, expires_ns=1),
    ]
    assert adapter.lend(wanted) == ["too_small", "too_large", "unwanted", "expired"]
    assert adapter.hold([identity(1)]) == [None]
    adapter.close()


def test_a_small_value_is_not_held_for_it_shares_its_page_with_its_header(tmp_path):
    adapter = opened(tmp_path)
    put(adapter, identity(1), b"small")
    assert adapter.hold([identity(1)]) == [None]
    adapter.close()


def test_expiry_holds_for_what_was_written_past_the_store(tmp_path):
    now = [10**18]
    adapter = opened(tmp_path, clock_ns=lambda: now[0])
    assert lend_and_fill(adapter, 1, value(1, 9000), expires_ns=now[0] + 100).ok
    late = lend(adapter, 2, 9000, expires_ns=now[0] + 100)
    assert get(adapter, identity(1)) == value(1, 9000)
    now[0] += 100
    assert adapter.hold([identity(1)]) == [None]
    assert adapter.fill(late) == Stored(False, "expired")
    assert adapter.usage().entries == 0
    adapter.close()


def test_the_later_of_two_writers_of_one_identity_wins_also_over_a_restart(tmp_path):
    adapter = opened(tmp_path)
    first, second = lend(adapter, 1, 9000), lend(adapter, 1, 9000)
    write(first, value(1, 9000))
    write(second, value(2, 9000))
    assert adapter.fill(second).ok
    assert adapter.fill(first).ok
    for _ in range(2):
        assert get(adapter, identity(1)) == value(1, 9000)
        adapter.close()
        adapter = opened(tmp_path)
    put(adapter, identity(1), b"by the store")
    adapter.delete([identity(1)])
    adapter.close()
    adapter = opened(tmp_path)
    assert get(adapter, identity(1)) is None
    adapter.close()


def crashed(adapter: DiskAdapter, target: Path) -> Path:
    """The folder as a killed daemon leaves it: everything written, nothing closed."""
    shutil.copytree(adapter.path, target, ignore=shutil.ignore_patterns("owner.lock"))
    return target


def test_a_loan_in_the_middle_hides_nothing_that_follows_it_when_the_daemon_is_killed(tmp_path):
    adapter = opened(tmp_path / "a", 8 << 20)
    values = {number: value(number, 5000) for number in range(100)}
    loans = {}
    for number, data in values.items():
        if number % 7 == 3:
            loans[number] = lend(adapter, number, len(data))
            write(loans[number], data)
        else:
            put(adapter, identity(number), data)
    kept = {number: loans.pop(number) for number in list(loans)[::3]}
    for number, extent in reversed(loans.items()):
        assert adapter.fill(extent).ok, number
    once = crashed(adapter, tmp_path / "b")
    adapter.close()
    for path in (once, tmp_path / "a"):
        again = opened(path, 8 << 20)
        assert [number for number, data in values.items() if get(again, identity(number)) != data] == sorted(kept)
        put(again, identity(1000), value(1000, 5000))
        twice = crashed(again, tmp_path / f"{path.name}-again")
        again.close()
        third = opened(twice, 8 << 20)
        assert [number for number, data in values.items() if get(third, identity(number)) != data] == sorted(kept)
        assert get(third, identity(1000)) == value(1000, 5000)
        third.close()
        report = verify(twice)
        assert report.sound
        assert report.torn == 0
        assert len(report.absent_checksums) == len(loans)


def fill_up(adapter: DiskAdapter, rounds: int) -> None:
    """Values enough to evict everything that was there."""
    for number in range(rounds):
        assert put(adapter, identity(10_000 + number), value(7, 60_000))


def test_an_evicted_loan_stores_nothing_and_its_late_writer_harms_nobody(tmp_path):
    adapter = opened(tmp_path, 1 << 20)
    loans = [lend(adapter, number, 100_000) for number in range(8)]
    descriptors = [os.open(extent.file, os.O_RDWR) for extent in loans]
    fill_up(adapter, 40)
    kept = [number for number in range(10_000, 10_040) if get(adapter, identity(number)) is not None]
    assert kept
    outcomes = {adapter.fill(extent).reason for extent in loans}
    assert "evicted" in outcomes
    for fd, extent in zip(descriptors, loans, strict=True):
        os.pwrite(fd, b"\xff" * 100_000, extent.offset)
        os.close(fd)
    assert [number for number in kept if get(adapter, identity(number)) == value(7, 60_000)] == kept
    adapter.close()


def test_what_is_not_lent_is_evicted_before_what_is(tmp_path):
    adapter = opened(tmp_path, 1 << 20)
    loan = lend(adapter, 1, 100_000)
    write(loan, value(1, 100_000))
    fill_up(adapter, 40)
    assert adapter.fill(loan).ok
    assert get(adapter, identity(1)) == value(1, 100_000)
    adapter.close()


def test_a_file_with_a_loan_that_outlived_its_daemon_is_never_used_again(tmp_path):
    adapter = opened(tmp_path / "a", 1 << 20)
    loan = lend(adapter, 1, 100_000)
    put(adapter, identity(2), value(2, 9000))
    path = crashed(adapter, tmp_path / "b")
    adapter.close()
    fd = os.open(path / loan.file.name, os.O_RDWR)
    inode = os.fstat(fd).st_ino
    for _ in range(2):  # and the second start knows it from the index page that the first has written
        again = opened(path, 1 << 20)
        assert get(again, identity(2)) == value(2, 9000)
        again.close()
    again = opened(path, 1 << 20)
    fill_up(again, 60)
    assert get(again, identity(2)) is None
    assert inode not in {file.stat().st_ino for file in path.glob("*.kvcache")}
    os.close(fd)
    again.close()


def test_held_bytes_stay_although_their_region_is_evicted(tmp_path):
    adapter = opened(tmp_path, 1 << 20)
    assert lend_and_fill(adapter, 1, value(1, 100_000)).ok
    (held,) = adapter.hold([identity(1)])
    assert held is not None
    with held.file.open("rb") as file:
        fill_up(adapter, 60)
        assert get(adapter, identity(1)) is None
        file.seek(held.offset)
        assert file.read(held.length) == value(1, 100_000)
    adapter.give_back(held)
    fill_up(adapter, 5)
    adapter.close()


def test_a_damaged_header_is_a_miss_and_never_a_place_to_read_from(tmp_path):
    adapter = opened(tmp_path)
    assert lend_and_fill(adapter, 1, value(1, 9000)).ok
    (held,) = adapter.hold([identity(1)])
    assert held is not None
    adapter.give_back(held)
    with held.file.open("r+b") as file:
        file.seek(held.offset - 4096 + 70)
        file.write(b"?")
    assert adapter.hold([identity(1)]) == [None]
    assert adapter.lookup([identity(1)]) == [None]
    assert adapter.counters.corruptions == 1
    adapter.close()


def test_counters_tell_what_went_past_the_store(tmp_path):
    adapter = opened(tmp_path)
    lend_and_fill(adapter, 1, value(1, 9000))
    lend_and_fill(adapter, 2, value(2, 9000), payload_checksum(value(2, 9000)))
    adapter.give_back(lend(adapter, 3, 9000))
    for extent in adapter.hold([identity(1), identity(2), identity(3)]):
        if extent is not None:
            adapter.give_back(extent)
    counted = adapter.counters
    assert (counted.stores, counted.store_bytes, counted.hits, counted.load_bytes) == (2, 18_000, 2, 18_000)
    names = ("direct_stores", "direct_store_bytes", "direct_loads", "direct_load_bytes", "direct_given_back", "unchecked")
    assert [counted.extra[name] for name in names] == [2, 18_000, 2, 18_000, 1, 1]
    adapter.close()


def test_a_moved_value_stays_without_a_checksum(tmp_path):
    adapter = opened(tmp_path, 1 << 20, region_bytes=128 << 10)
    assert lend_and_fill(adapter, 1, value(1, 9000)).ok
    for number in range(200):
        assert get(adapter, identity(1)) == value(1, 9000)
        put(adapter, identity(100 + number), value(3, 9000))
    assert adapter.counters.extra["moved"] > 0
    adapter.close()
    assert len(verify(tmp_path).absent_checksums) == 1


def test_a_stripe_lends_from_all_its_folders_and_from_the_rest_when_one_is_away(tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    members = [DiskAdapter(folder.name, folder, 4 << 20, free_floor_bytes=0, housekeeping_s=0.0) for folder in folders]
    stripe = Stripe("stripe", members)
    stripe.open()
    assert stripe.direct_roots() == folders
    for number in range(40):
        assert lend_and_fill(stripe, number, value(number, 20_000)).ok
    held = stripe.hold([identity(number) for number in range(40)])
    assert {extent.file.parent for extent in held if extent is not None} == set(folders)
    for number, extent in enumerate(held):
        assert extent is not None
        assert read(extent) == value(number, 20_000)
        stripe.give_back(extent)
    stripe.give_back(lend(stripe, 50, 9000))
    stripe._members[0].reason = "away"
    stripe._members[0].until = 1e18
    for number in range(40, 60):
        extent = lend(stripe, number, 20_000)
        assert extent.file.parent == folders[1]
        write(extent, value(number, 20_000))
        assert stripe.fill(extent).ok
    stripe.close()
