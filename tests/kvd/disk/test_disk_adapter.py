"""The disk tier through its interface, on the real file system: store, load, delete, restart, limits, refusals."""

import contextlib
import json
import os
import random
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvd.store.retention import NEVER, Retention
from kvd.tiers.adapters.base import AdapterConfigError, AdapterFull, Durability, Hit, Item, Loaded, Stored, Want
from kvd.tiers.adapters.disk import DiskAdapter, RealStorage
from kvd.tiers.adapters.disk.catalog import SLICE
from kvd.tiers.adapters.disk.geometry import plan
from kvd.tiers.adapters.fs import FsAdapter
from tests.kvd.disk.helpers import get, get_as, identity, item, opened, put, value

LENGTHS = [0, 1, 3839, 3840, 3841, 4095, 4096, 4097, 70_000, 1 << 20, (5 << 20) + 17, 6 << 20]


@pytest.mark.parametrize("io_mode", ["auto", "buffered"])
@pytest.mark.parametrize("arena", [False, True])
def test_every_length_comes_back_also_over_a_restart(tmp_path, io_mode, arena):
    values = {identity(number): value(number, length) for number, length in enumerate(LENGTHS)}
    adapter = opened(tmp_path / "store", 64 << 20, io_mode=io_mode)
    results = adapter.store([item(name, data, arena=arena) for name, data in values.items()])
    assert results == [Stored(True, "", Durability.NONE)] * len(LENGTHS)
    for _ in range(2):
        for name, data in values.items():
            assert get(adapter, name, arena=arena) == data
        buffers = {name: bytearray(len(data)) for name, data in values.items()}
        assert set(adapter.load([Want(name, memoryview(buffer)) for name, buffer in buffers.items()])) == {Loaded.OK}
        assert buffers == values
        used = adapter.usage()
        adapter.close()
        adapter = opened(tmp_path / "store", 64 << 20, io_mode=io_mode)
        assert adapter.usage() == used
    adapter.close()


def test_two_namespaces_with_equal_keys_are_two_values(tmp_path):
    adapter = opened(tmp_path)
    put(adapter, identity(1, 0), b"one")
    put(adapter, identity(1, 1), b"two")
    adapter.delete_namespace(identity(0, 0)[:32])
    assert (get(adapter, identity(1, 0)), get(adapter, identity(1, 1))) == (None, b"two")
    adapter.close()
    adapter = opened(tmp_path)
    assert (get(adapter, identity(1, 0)), get(adapter, identity(1, 1))) == (None, b"two")
    adapter.close()


def test_an_overwrite_supersedes_also_over_a_restart(tmp_path):
    adapter = opened(tmp_path)
    for data in (b"first", value(2, 9000), b"third"):
        put(adapter, identity(1), data)
        assert get(adapter, identity(1)) == data
    adapter.close()
    adapter = opened(tmp_path)
    assert get(adapter, identity(1)) == b"third"
    assert adapter.usage().entries == 1
    adapter.close()


def test_equal_identities_in_one_call_the_last_counts(tmp_path):
    adapter = opened(tmp_path)
    assert [result.ok for result in adapter.store([item(identity(1), b"a"), item(identity(1), b"b")])] == [True, True]
    assert get(adapter, identity(1)) == b"b"
    adapter.close()


def test_refusals_are_per_item(tmp_path):
    adapter = opened(tmp_path, clock_ns=lambda: 1000)
    items = [
        item(identity(1), b"x", Retention.EPHEMERAL),
        item(identity(2), b"x", expires_ns=1000),
        item(identity(3), bytes(adapter.geometry.max_value_bytes + 1)),
        item(identity(4), bytes(adapter.geometry.max_value_bytes)),
    ]
    assert [result.reason for result in adapter.store(items)] == ["unwanted", "expired", "too_large", ""]
    assert get(adapter, identity(4)) == bytes(adapter.geometry.max_value_bytes)
    adapter.close()


def test_expiry_is_kept_over_a_restart(tmp_path):
    now = [1000]
    adapter = opened(tmp_path, clock_ns=lambda: now[0])
    put(adapter, identity(1), b"short-lived", expires_ns=2000, retention=Retention.SHORT)
    assert adapter.lookup([identity(1), identity(2)]) == [Hit(11, Retention.SHORT, 2000), None]
    adapter.close()
    adapter = opened(tmp_path, clock_ns=lambda: now[0])
    assert adapter.lookup([identity(1)]) == [Hit(11, Retention.SHORT, 2000)]
    now[0] = 2000
    assert get_as(adapter, identity(1)) == (Loaded.MISS, None)
    assert adapter.usage().entries == 0
    adapter.close()


def test_delete_counts_what_was_held_and_outlives_a_restart(tmp_path):
    adapter = opened(tmp_path)
    put(adapter, identity(1), b"x")
    put(adapter, identity(2), b"y")
    assert adapter.delete([identity(1), identity(3), identity(1)]) == 1
    adapter.close()
    adapter = opened(tmp_path)
    assert [name for name, _ in adapter.enumerate()] == [identity(2)]
    adapter.close()


def test_a_clear_gives_the_disk_space_back(tmp_path):
    adapter = opened(tmp_path, 8 << 20)
    for number in range(60):
        put(adapter, identity(number), value(number, 100_000))
    assert adapter.describe()["allocated_bytes"] == 8 << 20
    assert adapter.delete_namespace(identity(0)[:32]) == 60
    assert adapter.usage().bytes_used == 0
    assert adapter.describe()["allocated_bytes"] <= 4 << 20
    adapter.close()


def test_files_are_private(tmp_path):
    adapter = opened(tmp_path / "store")
    put(adapter, identity(1), b"x")
    adapter.close()
    assert stat.S_IMODE((tmp_path / "store").stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "store").iterdir()} == {0o600}


def test_wrong_length_is_a_miss(tmp_path):
    adapter = opened(tmp_path)
    put(adapter, identity(1), b"four")
    assert adapter.load([Want(identity(1), memoryview(bytearray(5)))]) == [Loaded.MISS]
    adapter.close()


# -- room ----------------------------------------------------------------------------------------------------------------


def test_the_budget_holds_and_the_oldest_go_first(tmp_path):
    adapter = opened(tmp_path, 1 << 20)
    for number in range(200):
        assert put(adapter, identity(number), value(number, 20_000))
        assert sum(path.stat().st_size for path in tmp_path.glob("*.kvcache")) <= 1 << 20
    held = [number for number in range(200) if get(adapter, identity(number)) is not None]
    assert held == list(range(held[0], 200))
    assert len(held) >= 30
    assert adapter.counters.evictions == 200 - len(held)
    adapter.close()


def test_what_is_used_stays(tmp_path):
    adapter = opened(tmp_path, 2 << 20)
    hot = identity(1000)
    put(adapter, hot, value(1000, 20_000))
    for number in range(400):
        put(adapter, identity(number), value(number, 20_000))
        assert get(adapter, hot) == value(1000, 20_000)
    adapter.close()


def test_use_is_remembered_over_a_restart(tmp_path):
    adapter = opened(tmp_path, 2 << 20)
    for number in range(60):
        put(adapter, identity(number), value(number, 20_000))
    for number in range(0, 20, 4):
        assert get(adapter, identity(number)) is not None
    adapter.close()
    adapter = opened(tmp_path, 2 << 20)
    for number in range(100, 150):
        put(adapter, identity(number), value(number, 20_000))
    kept = {number for number in range(20) if adapter.lookup([identity(number)])[0]}
    assert kept == set(range(0, 20, 4))
    adapter.close()


def test_short_goes_before_long(tmp_path):
    adapter = opened(tmp_path, 2 << 20)
    for number in range(30):
        put(adapter, identity(number), value(number, 20_000), retention=Retention.LONG)
    for number in range(100, 400):
        put(adapter, identity(number), value(number, 20_000), retention=Retention.SHORT)
    assert all(adapter.lookup([identity(number)])[0] for number in range(30))
    adapter.close()


def test_a_smaller_and_a_larger_budget_at_restart(tmp_path, caplog):
    adapter = opened(tmp_path, 8 << 20)
    for number in range(80):
        put(adapter, identity(number), value(number, 90_000))
    adapter.close()
    adapter = opened(tmp_path, 3 << 20)
    assert adapter.usage().bytes_used <= adapter.describe()["allocated_bytes"] <= 3 << 20
    kept = [number for number in range(80) if get(adapter, identity(number)) == value(number, 90_000)]
    assert kept == list(range(kept[0], 80))
    assert f"{kept[0]} values dropped: it held more than the 3 MiB" in caplog.text
    adapter.close()
    adapter = opened(tmp_path, 16 << 20)
    for number in range(100, 200):
        put(adapter, identity(number), value(number, 90_000))
    assert all(get(adapter, identity(number)) == value(number, 90_000) for number in kept)
    adapter.close()


def test_another_region_size_reads_the_old_regions(tmp_path):
    adapter = opened(tmp_path, 8 << 20, region_bytes=1 << 20)
    values = {identity(number): value(number, 50_000) for number in range(50)}
    adapter.store([item(name, data) for name, data in values.items()])
    adapter.close()
    adapter = opened(tmp_path, 8 << 20, region_bytes=(1 << 20) + 4096 * 7)
    assert all(get(adapter, name) == data for name, data in values.items())
    for number in range(100, 300):
        assert put(adapter, identity(number), value(number, 50_000))
        assert sum(path.stat().st_size for path in tmp_path.glob("*.kvcache")) <= 8 << 20
    adapter.close()


def test_restarts_do_not_use_up_regions(tmp_path):
    for number in range(20):
        adapter = opened(tmp_path, 4 << 20)
        put(adapter, identity(number), value(number, 1000))
        adapter.close()
    adapter = opened(tmp_path, 4 << 20)
    assert adapter.usage().entries == 20
    assert adapter.describe()["regions"] == 1
    adapter.close()


@pytest.mark.parametrize("budget", [256 << 10, 1 << 20, 64 << 20, 561 << 20, 1 << 30, 9 << 30, 600 << 30, 40 << 40])
def test_geometry(budget):
    geometry = plan("disk", budget, None)
    assert geometry.regions >= 4
    assert geometry.regions * geometry.region_bytes <= budget
    assert geometry.regions <= 513 or geometry.region_bytes == 1 << 36
    if budget >= 1 << 30:
        assert geometry.max_value_bytes >= 128 << 20
    if geometry.region_bytes >= 1 << 30:
        assert (geometry.region_bytes - 8192) // ((128 << 20) + 4096) >= 8


@pytest.mark.parametrize(("budget", "region"), [(1000, None), (1 << 20, 1 << 20), (1 << 20, 5000), (1 << 20, 4096)])
def test_impossible_geometry_is_refused(budget, region):
    with pytest.raises(AdapterConfigError):
        plan("disk", budget, region)


# -- whose folder ----------------------------------------------------------------------------------------------------------


def test_a_second_owner_is_refused_and_the_first_unharmed(tmp_path):
    adapter = opened(tmp_path)
    put(adapter, identity(1), b"x")
    with pytest.raises(AdapterConfigError, match=f"{tmp_path} is in use .*pid {os.getpid()}") as error:
        opened(tmp_path)
    assert error.value.hint
    code = "import sys; from pathlib import Path; from kvd.tiers.adapters.disk import DiskAdapter\n"
    code += f"DiskAdapter('d', Path({str(tmp_path)!r}), 4 << 20).open()"
    other = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": "daemon:."}
    )
    assert other.returncode != 0
    assert "is in use" in other.stderr
    assert get(adapter, identity(1)) == b"x"
    assert put(adapter, identity(2), b"y")
    adapter.close()
    opened(tmp_path).close()


def test_a_file_in_the_way_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(AdapterConfigError, match="is not a folder"):
        opened(tmp_path / "file")
    with pytest.raises(AdapterConfigError, match="is not a folder"):
        opened(tmp_path / "file" / "below")


@contextlib.contextmanager
def not_root():
    """Root writes everywhere: give its power up for a while."""
    mine = os.geteuid()
    if mine == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(mine)


def test_a_folder_that_cannot_be_made_is_refused():
    with pytest.raises(AdapterConfigError, match="cannot use /proc/nowhere/store") as error:
        opened(Path("/proc/nowhere/store"))
    assert error.value.hint


def test_a_read_only_folder_is_refused():
    with tempfile.TemporaryDirectory(prefix="kvt-") as folder:  # pytest's own folders are closed to others
        Path(folder).chmod(0o555)
        with not_root(), pytest.raises(AdapterConfigError, match="Permission denied"):
            opened(Path(folder))


def test_a_strange_version_is_refused_by_name(tmp_path):
    opened(tmp_path).close()
    content = json.loads((tmp_path / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps(content | {"version": 7}))
    with pytest.raises(AdapterConfigError, match="format version 7"):
        opened(tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps(content | {"format": "other"}))
    with pytest.raises(AdapterConfigError, match="another kind: other"):
        opened(tmp_path)


def test_another_tiers_folder_is_refused(tmp_path):
    """Of ours, too: two tiers in one folder would each take the other's files for what fills the disk."""
    FsAdapter("fs", tmp_path, 1 << 20).open()
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(AdapterConfigError, match=r"holds a store of another kind: kvtools-fs\.json"):
        opened(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_folder_with_other_files_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    tmp_path.chmod(0o755)
    adapter = opened(tmp_path)
    put(adapter, identity(1), b"x")
    adapter.close()
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


# -- concurrency -----------------------------------------------------------------------------------------------------------


def test_readers_race_with_eviction_and_never_see_other_bytes(tmp_path):
    adapter = opened(tmp_path, 1 << 20)
    done = threading.Event()
    wrong: list[int] = []
    loads = [0]

    def read() -> None:
        number = 0
        while not done.is_set():
            number = (number + 7) % 300
            data = get(adapter, identity(number), arena=True)
            loads[0] += data is not None
            if data is not None and data != value(number, 30_000):
                wrong.append(number)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for turn in range(600):
        assert put(adapter, identity(turn % 300), value(turn % 300, 30_000), arena=True)
    done.set()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert loads[0] > 0
    assert adapter.counters.corruptions == 0
    assert adapter.counters.evictions > 100
    adapter.close()


def test_a_reader_caught_by_an_eviction_gets_its_bytes(tmp_path):
    """The read has begun; meanwhile its region is evicted and everything in the store is written over."""

    class Stopping(RealStorage):
        def __init__(self) -> None:
            self.armed = False
            self.begun, self.go_on = threading.Event(), threading.Event()

        def preadv(self, fd, buffers, offset):
            if self.armed and threading.current_thread() is not threading.main_thread():
                self.begun.set()
                assert self.go_on.wait(30)
            return super().preadv(fd, buffers, offset)

    io = Stopping()
    adapter = opened(tmp_path, 1 << 20, io=io)
    assert put(adapter, identity(0), value(0, 30_000))
    io.armed = True
    found = []
    thread = threading.Thread(target=lambda: found.append(get(adapter, identity(0))))
    thread.start()
    assert io.begun.wait(30)
    for number in range(1, 100):
        assert put(adapter, identity(number), value(number, 30_000))
    assert adapter.lookup([identity(0)]) == [None]
    before = len(os.listdir("/proc/self/fd"))
    io.go_on.set()
    thread.join()
    assert found == [value(0, 30_000)]
    assert len(os.listdir("/proc/self/fd")) == before - 1
    adapter.close()


@pytest.mark.parametrize("durability", [Durability.NONE, Durability.GROUP, Durability.FSYNC])
def test_everything_at_once_and_a_restart_finds_the_same(tmp_path, durability):
    storm(tmp_path, durability, 1.5)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("durability", [Durability.NONE, Durability.GROUP, Durability.FSYNC])
def test_everything_at_once_for_long(tmp_path, durability):
    for turn in range(12):
        storm(tmp_path / str(turn), durability, 5)


def storm(tmp_path: Path, durability: Durability, seconds: float) -> None:
    """Stores, overwrites, deletes, clears, loads, sweeps and evictions from six threads; then memory and disk agree exactly."""
    adapter = opened(tmp_path / "store", 2 << 20, durability=durability, housekeeping_s=0.05)
    stop = time.monotonic() + seconds

    def work(seed: int) -> None:
        rng = random.Random(seed)
        while time.monotonic() < stop:
            names = [identity(rng.randrange(60), rng.randrange(2)) for _ in range(rng.choice([1, 1, 4]))]
            draw = rng.random()
            if draw < 0.5:
                kept = rng.choice([Retention.SHORT, Retention.LONG])
                expires = time.time_ns() + 10**9 * rng.choice([-(10**9), 0, 1]) if rng.random() < 0.2 else NEVER
                values = [(name, name * rng.choice([1, 50, 70, 400])) for name in names]
                adapter.store([item(name, data, kept, expires, arena=True) for name, data in values])
            elif draw < 0.65:
                adapter.delete(names)
            elif draw < 0.66:
                adapter.delete_namespace(names[0][:32])
            else:
                for name in names:
                    data = get(adapter, name)
                    assert data is None or data == name * (len(data) // 64)

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(work, range(6)))
    adapter._house.stop()
    time.sleep(1)  # what was stored with an expiry has expired by now
    adapter._house.sweep()
    shutil.copytree(tmp_path / "store", tmp_path / "killed")
    again = opened(tmp_path / "killed", 2 << 20)
    assert dict(again.enumerate()) == dict(adapter.enumerate())
    assert again.usage() == adapter.usage()
    assert adapter.counters.corruptions == again.counters.corruptions == 0
    assert adapter.counters.evictions > 0
    again.close()
    adapter.close()


def test_many_writers_of_the_same_keys(tmp_path):
    adapter = opened(tmp_path, 4 << 20)

    def write(turn: int) -> None:
        for number in range(60):
            assert adapter.store([item(identity(number % 5), value(turn, 9000)), item(identity(90 + turn), b"mine")])[0].ok

    threads = [threading.Thread(target=write, args=(turn,)) for turn in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    known = {number: get(adapter, identity(number)) for number in range(5)}
    assert all(data in [value(turn, 9000) for turn in range(4)] for data in known.values())
    adapter.close()
    adapter = opened(tmp_path, 4 << 20)
    assert {number: get(adapter, identity(number)) for number in range(5)} == known
    assert adapter.usage().entries == 9
    adapter.close()


def test_an_item_of_the_wrong_shape_is_the_callers_fault(tmp_path):
    adapter = opened(tmp_path)
    with pytest.raises(ValueError, match="64 bytes"):
        adapter.store([Item(b"short", memoryview(b"x"))])
    adapter.close()


def test_a_full_disk_is_full_and_not_wrong(tmp_path):
    adapter = DiskAdapter("disk", tmp_path, 4 << 20, free_floor_bytes=1 << 60)
    adapter.open()
    with pytest.raises(AdapterFull, match="no room"):
        put(adapter, identity(1), b"x")
    assert get(adapter, identity(1)) is None
    adapter.close()


def test_files_are_used_again(tmp_path):
    adapter = opened(tmp_path, 1 << 20)
    for number in range(60):
        put(adapter, identity(number), value(number, 20_000))
    first = {path.stat().st_ino for path in tmp_path.glob("*.kvcache")}
    for number in range(200):
        put(adapter, identity(number), value(number, 20_000))
    assert {path.stat().st_ino for path in tmp_path.glob("*.kvcache")} == first
    adapter.close()


def test_what_has_expired_is_swept_and_its_regions_given_back(tmp_path):
    now = [1000]
    adapter = opened(tmp_path, 4 << 20, clock_ns=lambda: now[0], housekeeping_s=0.01)
    for number in range(120):
        assert put(adapter, identity(number), value(number, 20_000), expires_ns=2000)
    assert put(adapter, identity(500), b"stays", retention=Retention.SHORT)
    assert put(adapter, identity(501), b"stays longer", expires_ns=3000, retention=Retention.SHORT)
    now[0] = 2000
    deadline = time.monotonic() + 10
    while adapter.usage().entries != 2 and time.monotonic() < deadline:
        time.sleep(0.005)
    adapter._house.stop()
    assert adapter.usage().bytes_used == 8192
    assert adapter.counters.extra["expired"] == 120
    assert adapter.describe()["regions"] == 1
    adapter.close()


def test_a_killed_daemon_remembers_the_uses_of_minutes_ago(tmp_path):
    adapter = opened(tmp_path / "store", 2 << 20)
    for number in range(60):
        put(adapter, identity(number), value(number, 20_000))
    for number in range(0, 20, 4):
        assert get(adapter, identity(number)) is not None
    adapter._house.save_recency()
    shutil.copytree(tmp_path / "store", tmp_path / "killed")
    adapter.close()
    adapter = opened(tmp_path / "killed", 2 << 20)
    for number in range(100, 150):
        put(adapter, identity(number), value(number, 20_000))
    assert {number for number in range(20) if adapter.lookup([identity(number)])[0]} == set(range(0, 20, 4))
    adapter.close()


def test_look_ups_do_not_wait_for_an_eviction(tmp_path):
    """A region of 20 000 small values is forgotten in slices: the lock is free again every few hundred."""
    adapter = opened(tmp_path, 400 << 20)
    data = memoryview(b"small")
    for start in range(0, 30_000, 1000):
        adapter.store([Item(identity(number), data) for number in range(start, start + 1000)])
    region = next(region for region in adapter._catalog.regions.values() if region.live > 15_000)
    records = adapter._evictor.records(region)
    go, done = threading.Event(), threading.Event()
    looks = [0]

    def look() -> None:
        assert go.wait(30)
        while not done.is_set():
            adapter.lookup([identity(1)])
            looks[0] += 1

    thread = threading.Thread(target=look)
    thread.start()
    go.set()
    adapter._catalog.forget_region(region, records)
    seen = looks[0]
    done.set()
    thread.join()
    assert seen >= len(records) // SLICE
    adapter._catalog.free_slot_locked(region)
    adapter._io.close(region.fd)
    adapter.close()
