"""A disk that fails, fills up or writes short: the store degrades, says so per item or by AdapterError, and is never wrong."""

import contextlib
import errno
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from kvd.tiers.adapters.base import AdapterError, AdapterFull, Durability, Loaded, Want
from kvd.tiers.adapters.disk import DiskAdapter
from kvd.tiers.adapters.disk.buffers import BufferPool
from kvd.tiers.adapters.disk.storage import RealStorage, read_fully, write_fully
from tests.kvd.disk.helpers import get, get_as, identity, item, opened, put, value
from tests.kvd.disk.simstorage import SimStorage
from tests.support.processes import wait_until

ROOT = Path("/sim")


def simulated(io: SimStorage, max_bytes: int = 1 << 20, **more) -> DiskAdapter:
    return opened(ROOT, max_bytes, io=io, **more)


def only(call: str, error: int, times: int = 1 << 30):
    """A fault that makes one call fail so many times."""
    left = [times]

    def fault(name: str, path: Path, size: int) -> OSError | None:
        if name == call and left[0] > 0 and path.suffix == ".kvcache":
            left[0] -= 1
            return OSError(error, os.strerror(error), str(path))
        return None

    return fault


def test_an_io_error_on_write_is_reported_and_heals():
    io = SimStorage()
    adapter = simulated(io)
    put(adapter, identity(1), b"before")
    io.fault = only("pwritev", errno.EIO)
    with pytest.raises(AdapterError, match="I/O error"):
        put(adapter, identity(2), value(2, 9000))
    assert adapter.counters.io_errors > 0
    assert get(adapter, identity(1)) == b"before"
    assert get(adapter, identity(2)) is None
    io.fault = None
    assert put(adapter, identity(2), value(3, 9000))
    assert get(adapter, identity(2)) == value(3, 9000)
    io.kill()
    adapter = simulated(io)
    assert (get(adapter, identity(1)), get(adapter, identity(2))) == (b"before", value(3, 9000))
    adapter.close()


def test_a_failing_device_does_not_empty_the_tier():
    io = SimStorage()
    adapter = simulated(io)
    for number in range(30):
        put(adapter, identity(number), value(number, 20_000))
    held = adapter.usage().entries
    io.fault = only("pwritev", errno.EIO)
    for number in range(100, 106):
        with pytest.raises(AdapterError):
            put(adapter, identity(number), value(number, 20_000))
    assert adapter.usage().entries >= held // 2
    adapter.close()


def test_an_io_error_on_read_is_an_error_not_a_miss():
    io = SimStorage()
    adapter = simulated(io)
    put(adapter, identity(1), value(1, 9000))
    put(adapter, identity(2), value(2, 9000))
    io.fault = only("preadv", errno.EIO)
    with pytest.raises(AdapterError, match="cannot read"):
        get(adapter, identity(1))
    io.fault = only("preadv", errno.EIO, times=1)
    buffer = memoryview(bytearray(9000))
    results = adapter.load([Want(identity(1), buffer), Want(identity(3), buffer)])
    assert results == [Loaded.ERROR, Loaded.MISS]
    io.fault = None
    assert get(adapter, identity(1)) == value(1, 9000)
    adapter.close()


def test_no_space_for_a_new_file_means_fewer_regions():
    io = SimStorage(capacity=600 << 10)
    adapter = simulated(io, 1 << 20, region_bytes=128 << 10)
    for number in range(100):
        assert put(adapter, identity(number), value(number, 20_000))
    assert 3 <= adapter.describe()["regions"] <= 4
    assert get(adapter, identity(99)) == value(99, 20_000)
    adapter.close()


def test_no_space_at_all_is_full():
    io = SimStorage(capacity=50 << 10)
    adapter = simulated(io)
    with pytest.raises(AdapterFull):
        put(adapter, identity(1), b"x")
    assert adapter.store([]) == []
    adapter.close()


def test_a_start_without_room_for_anything_serves_what_is_there():
    """Somebody else filled the file system while the daemon was stopped: what is there is read, and deletes of it still count."""
    io = SimStorage()
    adapter = simulated(io, 2 << 20, region_bytes=128 << 10)
    for number in range(40):
        put(adapter, identity(number), value(number, 20_000))
    adapter.delete([identity(number) for number in range(0, 40, 7)])
    there = {number for number in range(40) if get(adapter, identity(number)) is not None}
    assert len(there) > 20
    io.kill()

    def full(name: str, path: Path, size: int) -> OSError | None:
        if name in ("pwritev", "fallocate") and path.suffix in (".tmp", ".kvlog"):
            return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return None

    for budget in (2 << 20, 512 << 10):
        io.fault = full
        adapter = simulated(io, budget, region_bytes=128 << 10)
        assert {number for number in range(40) if get(adapter, identity(number)) is not None} == there
        gone = min(there)
        assert adapter.delete([identity(0), identity(gone)]) == 1, "where no line can be written, their regions go as a whole"
        left = {number for number in range(40) if get(adapter, identity(number)) is not None}
        assert gone not in left
        assert len(there) - 16 <= len(left) < len(there)
        io.fault = None  # there is room again
        there = left
        adapter.delete([identity(there.pop()), identity(min(there))])
        there.remove(min(there))
        io.kill()
    io.fault = None
    adapter = simulated(io, 2 << 20, region_bytes=128 << 10)
    assert {number for number in range(40) if get(adapter, identity(number)) is not None} == there
    assert all(get(adapter, identity(number)) == value(number, 20_000) for number in there)
    adapter.close()


def test_deletes_on_a_full_disk_are_kept_and_cost_a_region_at_most():
    """They need a little room for the log. It is taken from a region: a delete that a restart undoes would be worse."""
    io = SimStorage()
    adapter = simulated(io, 2 << 20, region_bytes=128 << 10)
    for number in range(60):
        put(adapter, identity(number), value(number, 10_000))
    held = {number for number in range(60) if get(adapter, identity(number)) is not None}
    assert len(held) > 50
    taken = io._used()

    def full(name: str, path: Path, size: int) -> OSError | None:
        at_end = name == "pwritev" and path.suffix == ".kvlog" and io._used() + size > taken
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) if at_end else None

    io.fault = full
    gone = sorted(held)[::3]
    for number in gone:
        adapter.delete([identity(number)])
    left = {number for number in held if get(adapter, identity(number)) is not None}
    assert left.isdisjoint(gone)
    assert len(left) >= len(held) - len(gone) - 12, "one region gave room for all of them"
    assert all(put(adapter, identity(number), value(number, 10_000)) for number in range(60, 70)), "and the tier goes on"
    io.fault = None
    io.kill()
    adapter = simulated(io, 2 << 20, region_bytes=128 << 10)
    found = {number for number in held if get(adapter, identity(number)) is not None}
    assert found.isdisjoint(gone)
    adapter.close()


def test_a_clear_on_a_full_disk_needs_no_room():
    io = SimStorage()
    adapter = simulated(io, 2 << 20, region_bytes=128 << 10)
    for number in range(60):
        put(adapter, identity(number), value(number, 10_000))
    io.fault = lambda name, path, size: (
        OSError(errno.ENOSPC, "full") if name in ("pwritev", "fallocate") and path.suffix != ".kvcache" else None
    )
    adapter.delete([name for name, _ in adapter.enumerate()])
    assert adapter.usage().entries == 0
    io.fault = None
    io.kill()
    adapter = simulated(io, 2 << 20, region_bytes=128 << 10)
    assert adapter.usage().entries == 0
    adapter.close()


def test_the_free_space_floor_is_kept():
    io = SimStorage(capacity=1 << 20)
    adapter = simulated(io, 8 << 20, region_bytes=128 << 10, free_floor_bytes=512 << 10)
    for number in range(60):
        assert put(adapter, identity(number), value(number, 20_000))
        assert io.free_bytes(ROOT)[0] >= 512 << 10
    adapter.close()


def test_no_space_in_a_preallocated_file_is_full():
    """Copy-on-write and sparse file systems may run out of space in a file that has its size."""
    io = SimStorage()
    adapter = simulated(io)
    put(adapter, identity(1), b"x")
    io.fault = only("pwritev", errno.ENOSPC)
    with pytest.raises(AdapterFull, match="no space"):
        put(adapter, identity(2), b"y")
    assert get(adapter, identity(1)) == b"x"
    adapter.close()


@pytest.mark.parametrize("step", [4096, 12_288, 100_000])
def test_short_writes_and_reads_are_gone_on_with(step):
    io = SimStorage()
    adapter = simulated(io, 64 << 20)
    io.fault = lambda call, _path, size: min(size, step) if call in ("pwritev", "preadv") else None
    values = {identity(number): value(number, length) for number, length in enumerate([10, 5000, 100_000, 6 << 20])}
    adapter.store([item(name, data, arena=True) for name, data in values.items()])
    for arena in (True, False):
        assert all(get(adapter, name, arena=arena) == data for name, data in values.items())
    adapter.close()
    adapter = simulated(io, 64 << 20)
    assert all(get(adapter, name) == data for name, data in values.items())
    adapter.close()


def test_a_write_that_stops_is_an_error():
    io = SimStorage()
    fd = io.open(ROOT / "file", create=True)
    io.fault = lambda call, _path, size: 100
    with pytest.raises(OSError, match="stops short"):
        write_fully(io, fd, [memoryview(bytes(9000))], 0)
    io.fault = lambda call, _path, size: 0
    with pytest.raises(OSError, match="no progress"):
        write_fully(io, fd, [memoryview(bytes(9000))], 0)
    io.fault = None
    write_fully(io, fd, [memoryview(b"abc"), memoryview(b"def")], 0)
    target = bytearray(10)
    assert read_fully(io, fd, [memoryview(target)], 0) == 10
    assert bytes(target[:6]) == b"abcdef"


# -- durability ------------------------------------------------------------------------------------------------------------


def test_none_never_syncs_on_the_path():
    io = SimStorage()
    adapter = simulated(io)
    io.syncs = 0
    for number in range(100):
        put(adapter, identity(number), value(number, 20_000))
    assert io.syncs == 0
    assert adapter.store([item(identity(1), b"x")])[0].durability is Durability.NONE
    assert adapter.flush() is Durability.FSYNC
    assert io.syncs > 0
    adapter.close()


def test_fsync_syncs_before_it_answers():
    io = SimStorage()
    adapter = simulated(io, durability=Durability.FSYNC)
    order = []
    io.fault = lambda call, path, _size: (
        order.append(call) if call != "nameless" and (path.suffix == ".kvcache" or call == "fsync_dir") else None
    )
    assert adapter.store([item(identity(1), b"x")])[0] == (True, "", Durability.FSYNC)
    assert order[-2:] == ["fdatasync", "fsync_dir"]
    adapter.close()


def test_a_failed_sync_is_not_acknowledged():
    io = SimStorage()
    adapter = simulated(io, durability=Durability.FSYNC)
    put(adapter, identity(1), b"kept")
    io.fault = only("fdatasync", errno.EIO)
    with pytest.raises(AdapterError):
        put(adapter, identity(2), b"lost")
    assert get_as(adapter, identity(2)) == (Loaded.MISS, None)
    io.fault = None
    assert get(adapter, identity(1)) == b"kept"
    adapter.close()


def _region_files(folder: Path) -> None:
    for path in folder.glob("*.kvcache"):
        path.unlink()


@pytest.mark.parametrize("remove", [shutil.rmtree, _region_files])
@pytest.mark.parametrize("durability", Durability)
def test_a_folder_that_was_removed_keeps_nothing_and_says_so(tmp_path, caplog, durability, remove):
    """Files without names take writes and syncs without a word: what lies in them is gone with the daemon."""
    adapter = opened(tmp_path / "tier", 1 << 20, durability=durability)
    assert put(adapter, identity(1), value(1, 9000))
    assert adapter.parts_down == 0
    remove(tmp_path / "tier")
    with pytest.raises(AdapterError, match="its files were removed"):
        put(adapter, identity(2), value(2, 9000))
    assert adapter.counters.io_errors > 0
    assert adapter.parts_down == 1
    assert get(adapter, identity(1)) == value(1, 9000), "as long as it is open"
    (tmp_path / "tier").mkdir(exist_ok=True)
    with pytest.raises(AdapterError, match="its files were removed"):
        put(adapter, identity(3), value(3, 9000))
    with contextlib.suppress(AdapterError):
        adapter.close()
    assert caplog.text.count("ends with this process") == 1


def test_a_file_that_an_eviction_takes_away_meanwhile_was_not_removed(tmp_path, monkeypatch):
    adapter = opened(tmp_path / "tier", 1 << 20)
    assert put(adapter, identity(1), value(1, 9000))
    nameless = adapter._syncer.nameless

    def evicted_first(fd: int) -> bool:
        if fd != adapter._lock_fd:
            adapter.delete([identity(1)])  # the only value of its region, which goes as a whole
        return nameless(fd)

    monkeypatch.setattr(adapter._syncer, "nameless", evicted_first)
    adapter._presence.look(list(adapter._catalog.regions.values()))
    assert not list((tmp_path / "tier").glob("*.kvcache")), "it was pinned, so its file went"
    assert adapter.parts_down == 0
    monkeypatch.undo()
    assert put(adapter, identity(2), value(2, 9000))
    adapter.close()


def test_an_idle_tier_notices_that_its_folder_was_removed(tmp_path, caplog):
    adapter = opened(tmp_path / "tier", 1 << 20, housekeeping_s=0.01)
    assert put(adapter, identity(1), value(1, 9000))
    shutil.rmtree(tmp_path / "tier")
    wait_until(lambda: adapter.parts_down == 1, what="the housekeeper to come by")
    with contextlib.suppress(AdapterError):
        adapter.close()
    assert f"{tmp_path / 'tier'} does not keep what is in it: its files were removed: what is there (1 value) ends" in caplog.text


def test_group_syncs_by_itself(tmp_path):
    import threading

    class Counting(RealStorage):
        synced = threading.Event()

        def fdatasync(self, fd: int) -> None:
            super().fdatasync(fd)
            self.synced.set()

    io = Counting()
    adapter = opened(tmp_path, io=io, durability=Durability.GROUP, group_interval_s=0.005)
    io.synced.clear()
    assert adapter.store([item(identity(1), b"x")])[0].durability is Durability.GROUP
    assert io.synced.wait(5)
    adapter.close()


def test_concurrent_fsyncs_share_the_device(tmp_path):
    import threading
    import time

    class Slow(RealStorage):
        syncs = 0

        def fdatasync(self, fd: int) -> None:
            time.sleep(0.02)
            super().fdatasync(fd)
            self.syncs += 1

    io = Slow()
    adapter = opened(tmp_path, io=io, durability=Durability.FSYNC)
    put(adapter, identity(0), b"x")
    io.syncs = 0
    threads = [threading.Thread(target=put, args=(adapter, identity(number), b"x")) for number in range(1, 17)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert io.syncs <= 10
    adapter.close()


# -- real file systems -----------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    """A tmpfs of 2 MiB, where we may mount one."""
    place = tmp_path / "small"
    place.mkdir()
    if (
        os.geteuid() != 0
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", place], capture_output=True).returncode
    ):
        pytest.skip("mounting needs root")
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_real_full_disk(small_disk, caplog):
    adapter = opened(small_disk / "store", 8 << 20, region_bytes=256 << 10)
    for number in range(200):
        assert put(adapter, identity(number), value(number, 20_000))
    assert get(adapter, identity(199)) == value(199, 20_000)
    assert adapter.describe()["allocated_bytes"] <= 2 << 20
    assert caplog.text.count("no room left on its file system") == 1, "nothing else says that the budget is not to be had"
    adapter.close()
    adapter = opened(small_disk / "store", 8 << 20, region_bytes=256 << 10)
    assert get(adapter, identity(199)) == value(199, 20_000)
    adapter.close()


def test_descriptors_and_threads_are_given_back(tmp_path):
    import threading

    def count() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    before = count()
    for durability in Durability:
        adapter = opened(tmp_path, 1 << 20, durability=durability)
        for number in range(100):
            put(adapter, identity(number), value(number, 20_000))
        adapter.close()
        adapter.close()
    assert count() == before


def test_buffers_are_lent_aligned_and_kept_within_bounds():
    pool = BufferPool(keep_bytes=1 << 20)
    with pool.lend(1) as one, pool.lend(70_000) as two:
        assert (len(one), len(two)) == (65_536, 131_072)
    with pool.lend(8 << 20):
        pass
    assert pool._kept <= 1 << 20


def test_lost_index_pages_cost_nothing_but_time():
    """Index pages that could not be written are made up for, and what follows them is still found after the next crash."""
    io = SimStorage()
    adapter = simulated(io, 8 << 20)
    put(adapter, identity(0), value(0, 5000))
    io.fault = lambda call, path, size: OSError(errno.EIO, "no") if call == "pwritev" and size == 4096 else None
    for number in range(1, 50):
        assert put(adapter, identity(number), value(number, 5000))
    assert adapter.counters.io_errors > 0
    for last in range(50, 53):
        io.kill()
        adapter = simulated(io, 8 << 20)
        assert put(adapter, identity(last), value(last, 5000))
        assert all(get(adapter, identity(number)) == value(number, 5000) for number in range(last + 1))
    adapter.close()
    adapter = simulated(io, 8 << 20)
    assert adapter.usage().entries == 53
    adapter.close()


def test_a_reserved_extent_is_passed_over():
    """Kind 2 in a header: lent for writing and not finished. What lies behind it is found."""
    from kvd.tiers.adapters.disk.format import KIND_RESERVED, ExtentHeader

    io = SimStorage()
    adapter = simulated(io)
    for number in range(3):
        put(adapter, identity(number), value(number, 5000))
    io.kill()
    (file,) = [file for path, file in io.names.items() if path.suffix == ".kvcache"]
    at = 4096 + 4096 + 8192
    header = ExtentHeader.unpack(memoryview(file.data)[at : at + 4096])
    file.data[at : at + 256] = header._replace(kind=KIND_RESERVED).pack()
    adapter = simulated(io)
    assert [get(adapter, identity(number)) is not None for number in range(3)] == [True, False, True]
    adapter.close()


def test_a_long_outage_uses_nothing_up():
    """Hundreds of stores on a full disk: no slot, descriptor or byte of the budget is lost, and then it goes on."""
    io = SimStorage(capacity=50 << 10)
    adapter = simulated(io)
    before = len(io.open_files)
    for number in range(300):
        with pytest.raises(AdapterFull):
            put(adapter, identity(number), b"x")
    assert len(io.open_files) == before
    assert adapter.describe()["allocated_bytes"] == 0
    assert adapter._catalog._slots_made == 0
    io.capacity = 8 << 20
    assert put(adapter, identity(1), b"x")
    io.fault = only("rename", errno.EIO)
    for number in range(200):
        try:
            put(adapter, identity(number), value(number, 20_000))
        except AdapterError:
            continue
    io.fault = None
    assert put(adapter, identity(1), b"y")
    assert adapter.describe()["allocated_bytes"] == sum(
        len(file.data) for path, file in io.names.items() if path.suffix == ".kvcache"
    )
    adapter.close()


def test_a_region_that_cannot_be_read_stops_the_start_and_is_named():
    io = SimStorage()
    adapter = simulated(io)
    put(adapter, identity(1), b"x")
    adapter.close()
    io.fault = only("preadv", errno.EIO)
    with pytest.raises(AdapterError, match=r"cannot read /sim/0+1.kvcache: Input/output error") as error:
        simulated(io)
    assert error.value.hint
    io.fault = None
    adapter = simulated(io)
    assert get(adapter, identity(1)) == b"x"
    adapter.close()


def test_group_does_not_sync_what_is_clean():
    io = SimStorage()
    adapter = simulated(io, durability=Durability.GROUP, group_interval_s=3600)
    put(adapter, identity(1), b"x")
    put(adapter, identity(1), b"y")
    adapter.delete([identity(1)])
    assert adapter.flush() is Durability.FSYNC
    io.syncs = 0
    adapter.flush()
    assert io.syncs == 0
    adapter.close()
