"""The deletes log lost, as a whole or in part: what may have been deleted is a miss, which is counted, said and verified.

A log can be removed, emptied, cut short, overwritten. A store that had lines in it must not serve one value afterwards: no
record can be told from a dead one, nor an older version from the newest.
"""

import contextlib
import logging
import os
import random
import shutil
from pathlib import Path

import pytest

from kvd.tiers.adapters.base import AdapterConfigError, AdapterError, Durability
from kvd.tiers.adapters.disk import verify
from kvd.tiers.adapters.disk.deletes import FILE_NAME, DeletesLog
from kvd.tiers.adapters.disk.format import PAGE
from tests.kvd.disk import golden
from tests.kvd.disk.helpers import get, identity, opened, put, value
from tests.kvd.disk.simstorage import SimStorage

BUDGET, REGION = 4 << 20, 1 << 20
KEPT = range(0, 200, 2)
GONE = range(1, 200, 2)


@pytest.fixture
def store(tmp_path):
    """A store in which half of the values were deleted, in a log of several pairs, and which was closed."""
    adapter = opened(tmp_path / "store", BUDGET, region_bytes=REGION)
    for number in range(200):
        put(adapter, identity(number), value(number, 3000))
    for number in GONE:
        adapter.delete([identity(number)])
    adapter.close()
    assert (tmp_path / "store" / FILE_NAME).stat().st_size > 20 * PAGE
    return tmp_path / "store"


def remove(log: Path) -> None:
    log.unlink()


def empty(log: Path) -> None:
    os.truncate(log, 0)


def cut_head(log: Path) -> None:
    os.truncate(log, 2 * PAGE)


def cut_last_pair(log: Path) -> None:
    os.truncate(log, log.stat().st_size - 2 * PAGE)


def zero_head(log: Path) -> None:
    with log.open("r+b") as file:
        file.write(bytes(2 * PAGE))


def zero_pair(log: Path) -> None:
    with log.open("r+b") as file:
        file.seek(6 * PAGE)
        file.write(bytes(2 * PAGE))


def noise(log: Path) -> None:
    log.write_bytes(random.Random(1).randbytes(log.stat().st_size))


LOSSES = [remove, empty, cut_head, cut_last_pair, zero_head, zero_pair, noise]


@pytest.mark.parametrize("lose", LOSSES)
def test_nothing_is_served_and_it_is_said_once(store, lose, caplog):
    lose(store / FILE_NAME)
    with caplog.at_level(logging.WARNING, logger="kvd.disk"):
        adapter = opened(store, BUDGET, region_bytes=REGION)
    (line,) = [record.getMessage() for record in caplog.records]
    assert str(store / FILE_NAME) in line
    assert "none of the 200 found is served" in line
    assert adapter.counters.corruptions == 1
    assert adapter.counters.extra["given_up"] == 200
    assert list(adapter.enumerate()) == []
    assert adapter.usage().bytes_used == 0
    # The store is whole again, and what is put and deleted from now on keeps its promises.
    for number in range(0, 200, 5):
        assert put(adapter, identity(number), value(1000 + number, 3000))
    adapter.delete([identity(0), identity(5)])
    adapter.close()
    adapter = opened(store, BUDGET, region_bytes=REGION)
    for number in range(200):
        there = number % 5 == 0 and number > 5
        assert get(adapter, identity(number)) == (value(1000 + number, 3000) if there else None)
    assert adapter.counters.extra["given_up"] == 0
    adapter.close()


@pytest.mark.parametrize("lose", LOSSES)
def test_verify_says_it_and_a_repair_gives_the_values_up(store, lose):
    assert verify(store).sound
    lose(store / FILE_NAME)
    report = verify(store)
    assert not report.sound
    assert report.lost_deletes
    assert (report.live, report.extents) == (0, 200)
    before = {file: file.read_bytes() for file in store.iterdir() if file.name != "owner.lock"}
    assert verify(store) == report
    assert {file: file.read_bytes() for file in store.iterdir() if file.name != "owner.lock"} == before
    assert verify(store, repair=True).sound
    again = verify(store)
    assert again.sound
    assert (again.live, again.extents, again.lost_deletes) == (0, 0, "")
    adapter = opened(store, BUDGET, region_bytes=REGION)
    assert list(adapter.enumerate()) == []
    assert adapter.counters.corruptions == 0
    adapter.close()


@pytest.mark.parametrize("damage", ["a copy of the head", "a copy of a pair", "a torn append"])
def test_what_one_copy_survives_costs_nothing(store, damage):
    log = store / FILE_NAME
    raw = bytearray(log.read_bytes())
    if damage == "a torn append":
        raw += b"torn" * 700
    else:
        start = 0 if damage == "a copy of the head" else 6 * PAGE
        raw[start : start + PAGE] = bytes(PAGE)
    log.write_bytes(raw)
    adapter = opened(store, BUDGET, region_bytes=REGION)
    assert {number for number in range(200) if get(adapter, identity(number)) is not None} == set(KEPT)
    assert adapter.counters.extra["given_up"] == 0
    adapter.close()


def test_a_killed_daemon_has_lost_nothing(tmp_path):
    """What was never synced is in the log all the same, and the head need not know of it."""
    adapter = opened(tmp_path / "store", BUDGET, region_bytes=REGION)
    for number in range(40):
        put(adapter, identity(number), value(number, 3000))
    adapter.delete([identity(3), identity(4)])
    shutil.copytree(tmp_path / "store", tmp_path / "killed")
    adapter.close()
    adapter = opened(tmp_path / "killed", BUDGET, region_bytes=REGION)
    assert {number for number in range(40) if get(adapter, identity(number)) is None} == {3, 4}
    adapter.close()


def test_a_folder_of_version_1_may_have_an_empty_log_but_not_none(tmp_path):
    """Version 1 wrote an empty file at every start; a folder that says nothing of its version is not believed."""
    for case in ("empty", "no manifest", "missing"):
        folder = tmp_path / case
        shutil.copytree(golden.CASES / "disk-v1", folder)
        os.truncate(folder / FILE_NAME, 0)
        if case == "missing":
            (folder / FILE_NAME).unlink()
        if case == "no manifest":
            (folder / "manifest.json").unlink()
        adapter = opened(folder, golden.BUDGET, clock_ns=lambda: golden.NOW_NS)
        assert (get(adapter, identity(1)) is not None) == (case == "empty")
        adapter.close()


def test_a_file_a_dead_daemon_had_lent_a_part_of_is_not_used_again(tmp_path):
    from kvd.store.retention import Retention
    from kvd.tiers.adapters.base import Reservation

    adapter = opened(tmp_path / "store", BUDGET, region_bytes=REGION)
    put(adapter, identity(1), b"beside it")
    (extent,) = adapter.lend([Reservation(identity(2), 9000, Retention.LONG)])
    shutil.copytree(tmp_path / "store", tmp_path / "killed")
    adapter.close()
    (tmp_path / "killed" / FILE_NAME).unlink()
    adapter = opened(tmp_path / "killed", BUDGET, region_bytes=REGION)
    assert not (tmp_path / "killed" / extent.file.name).exists()
    assert list(adapter.enumerate()) == []
    adapter.close()


def test_a_log_removed_under_a_running_store(tmp_path):
    """It is read by its descriptor when it is written anew, so that its lines are there again; a sync owns up until then."""
    adapter = opened(tmp_path, BUDGET, region_bytes=REGION, durability=Durability.FSYNC)
    for number in range(20):
        put(adapter, identity(number), value(number, 3000))
    adapter.delete([identity(3)])
    log = tmp_path / FILE_NAME
    log.unlink()
    with pytest.raises(AdapterError, match="may not outlive a restart"):
        adapter.delete([identity(4)])
    assert isinstance(adapter._deletes, DeletesLog)
    adapter._deletes.rewrite(set(adapter._catalog.stale))
    adapter.delete([identity(5)])
    adapter.close()
    adapter = opened(tmp_path, BUDGET, region_bytes=REGION)
    assert {number for number in range(20) if get(adapter, identity(number)) is None} == {3, 4, 5}
    adapter.close()


def test_a_crash_in_the_middle_of_giving_up_gives_up_the_rest():
    """The device vanishes at every step of the start that finds its log lost: never does one of the values come back."""
    root = Path("/sim/store")
    seen = 0
    for steps in range(0, 400, 7):
        io = SimStorage()
        adapter = opened(root, 2 << 20, region_bytes=128 << 10, io=io, durability=Durability.FSYNC)
        for number in range(60):
            put(adapter, identity(number), value(number, 9000))
        adapter.delete([identity(number) for number in range(0, 60, 3)])
        adapter.close()
        io.kill()
        del io.names[root / FILE_NAME]
        io.stable_names.pop(root / FILE_NAME)
        io.dead_after = io.operations + steps
        with contextlib.suppress(AdapterError, AdapterConfigError):
            opened(root, 2 << 20, region_bytes=128 << 10, io=io, durability=Durability.FSYNC)
            seen += 1
        io.power_cut(random.Random(steps))
        adapter = opened(root, 2 << 20, region_bytes=128 << 10, io=io, durability=Durability.FSYNC)
        assert list(adapter.enumerate()) == []
        assert put(adapter, identity(0), b"again")
        adapter.close()
    assert 0 < seen < 57
