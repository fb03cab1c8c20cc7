"""Power cuts and kills at any operation: never wrong bytes, never an older version, nothing acknowledged under fsync lost.

A random history of stores, writes past the store, overwrites, deletes, clears, loads and restarts runs against the simulated
disk until the device vanishes at a random operation. Then the next start must find, for every key, exactly one of the states
it may be in, whatever writers that outlived the daemon still do to the extents they had been lent.
"""

import errno
import random
import sys
from pathlib import Path

import pytest

from kvd.store.retention import Retention
from kvd.tiers.adapters.base import AdapterError, Durability, Loaded, Reservation
from kvd.tiers.adapters.disk import DiskAdapter
from kvd.tiers.adapters.disk.format import payload_checksum
from tests.kvd.disk.helpers import get_as, identity, item, value
from tests.kvd.disk.simstorage import SimFile, SimStorage

ROOT = Path("/sim/store")
MISS = None
LENGTHS = [0, 1, 700, 3840, 3841, 4096, 9000, 20_000]


class History:
    """A run of one seed: what was done, and what each key may be afterwards."""

    def __init__(
        self,
        seed: int,
        durability: Durability,
        *,
        power: bool,
        max_bytes: int,
        region_bytes: int | None = None,
        flushes: bool = False,
    ) -> None:
        self.rng = random.Random(seed)
        self.io = SimStorage()
        self.durability = durability
        self.power = power
        self.max_bytes = max_bytes
        self.region_bytes = region_bytes
        # Under none, evictions after a flush are not synced, so a power cut may bring back what is older than it.
        self.flushes = durability is not Durability.NONE
        self.keys = [identity(number, namespace) for number in range(8) for namespace in range(2)]
        self.may: dict[bytes, set[bytes | None]] = {key: {MISS} for key in self.keys}
        """What a key may be now, by what was acknowledged and what was tried. A set of two or more: one of them was tried."""
        self.ever: dict[bytes, set[bytes | None]] = {key: {MISS} for key in self.keys}
        self.versions = 0
        self.late: list[tuple[SimFile, int]] = []
        """Extents that processes were lent which have outlived the daemon: they may still write there."""

    def start(self) -> DiskAdapter:
        adapter = DiskAdapter(
            "sim", ROOT, self.max_bytes, region_bytes=self.region_bytes, durability=self.durability, io=self.io, free_floor_bytes=0,
            group_interval_s=3600, housekeeping_s=0.0,
        )  # fmt: skip
        adapter.open()
        return adapter

    def run(self, adapter: DiskAdapter, operations: int) -> None:
        """Random operations; a device error ends the run."""
        for number in range(operations):
            if number == operations // 2:
                self._land_late()
            try:
                self._one(adapter)
            except AdapterError:
                return

    def _one(self, adapter: DiskAdapter) -> None:
        draw = self.rng.random()
        if draw < 0.45:
            self._store(adapter)
        elif draw < 0.6:
            self._write_past(adapter)
        elif draw < 0.75:
            self._delete(adapter, self.rng.sample(self.keys, self.rng.choice([1, 1, 2, 5])))
        elif draw < 0.8 and self.flushes:
            self._flush(adapter)
        elif draw < 0.82:
            self._delete(adapter, [key for key in self.keys if key[:32] == self.keys[0][:32]])
        else:
            self._load(adapter)

    def _store(self, adapter: DiskAdapter) -> None:
        batch = {}
        for key in self.rng.sample(self.keys, self.rng.choice([1, 1, 1, 2, 6])):
            self.versions += 1
            batch[key] = value(self.versions, self.rng.choice(LENGTHS))
            self.may[key] |= {batch[key]}
            # The overwrite may be lost and what it superseded gone with its region: a miss, never what came before that.
            self.ever[key] |= {batch[key], MISS}
        retention = self.rng.choice([Retention.SHORT, Retention.LONG])
        results = adapter.store([item(key, data, retention, arena=self.rng.random() < 0.5) for key, data in batch.items()])
        for (key, data), result in zip(batch.items(), results, strict=True):
            if result.ok:
                self.may[key] = {data}

    def _write_past(self, adapter: DiskAdapter) -> None:
        """A value written past the adapter (GPU-direct) and synced; sometimes the writer leaves in the middle, or gives up."""
        key = self.rng.choice(self.keys)
        self.versions += 1
        data = value(self.versions, self.rng.choice([3841, 4096, 9000, 20_000]))
        self.may[key] |= {data}
        self.ever[key] |= {data, MISS}
        (extent,) = adapter.lend([Reservation(key, len(data), self.rng.choice([Retention.SHORT, Retention.LONG]))])
        if isinstance(extent, str):
            return
        draw = self.rng.random()
        try:
            fd = self.io.open(extent.file)
            self.late.append((self.io.open_files[fd][0], extent.offset))
            if draw < 0.15:
                return
            self.io.pwritev(fd, [data[: len(data) // 2]], extent.offset)
            if draw < 0.3:
                adapter.give_back(extent)
                self.late.pop()
                return
            self.io.pwritev(fd, [data[len(data) // 2 :]], extent.offset + len(data) // 2)
            self.io.fdatasync(fd)
        except OSError as error:
            raise AdapterError("the device is gone") from error
        checksum = payload_checksum(data) if self.rng.random() < 0.3 else b""
        if adapter.fill(extent, checksum).ok:
            self.may[key] = {data}
        self.late.pop()

    def _land_late(self) -> None:
        """What processes that outlived the daemon had under way reaches the disk."""
        for file, offset in self.late:
            garbage = self.rng.randbytes(3000)
            file.data[offset : offset + len(garbage)] = garbage
        if self.rng.random() < 0.5:
            self.late = []

    def _delete(self, adapter: DiskAdapter, keys: list[bytes]) -> None:
        for key in keys:
            self.may[key] |= {MISS}
            self.ever[key] |= {MISS}
        adapter.delete(keys)
        for key in keys:
            self.may[key] = {MISS}

    def _flush(self, adapter: DiskAdapter) -> None:
        """What was acknowledged before a flush is as safe as under fsync; what was only tried may or may not be there."""
        before = {key: set(states) for key, states in self.may.items()}
        if adapter.flush() is Durability.FSYNC:
            self.ever = before

    def _load(self, adapter: DiskAdapter) -> None:
        key = self.rng.choice(self.keys)
        result, data = get_as(adapter, key)
        if result is not Loaded.ERROR:
            assert data in self.may[key] | self._evicted()

    def _evicted(self) -> set[bytes | None]:
        return {MISS} if self.max_bytes < 1 << 20 else set()

    def crash_and_check(self) -> None:
        """End the process or the host, start again, and compare every key."""
        if self.power:
            self.io.power_cut(self.rng)
            self.late = []
        else:
            self.io.kill()
            self._land_late()
        lossy = self.power and self.durability is not Durability.FSYNC
        adapter = self.start()
        for key in self.keys:
            _, data = get_as(adapter, key)
            allowed = (self.ever if lossy else self.may)[key] | self._evicted()
            assert data in allowed, f"{'stale' if data in self.ever[key] else 'wrong'} bytes or a lost value"
            self.may[key] = {data}
            self.ever[key] |= {data}
        self.check_usage(adapter)
        adapter.close()

    def check_usage(self, adapter: DiskAdapter) -> None:
        expected = sum(4096 if hit.length <= 3840 else 4096 + -(-hit.length // 4096) * 4096 for _, hit in adapter.enumerate())
        assert adapter.usage().bytes_used == expected
        files = [file for path, file in self.io.names.items() if path.suffix == ".kvcache"]
        assert sum(len(file.data) for file in files) <= self.max_bytes


def run_seed(seed: int, durability: Durability, *, power: bool, small: bool) -> None:
    budget, region = (320 << 10, 64 << 10) if small else (8 << 20, None)
    history = History(seed, durability, power=power, max_bytes=budget, region_bytes=region)
    for _boot in range(3):
        adapter = history.start()
        history.io.dead_after = history.io.operations + history.rng.randrange(1, 160)
        history.run(adapter, 60)
        if history.rng.random() < 0.25:
            adapter.close()
        else:
            adapter._hasher.shutdown()
            adapter._syncer.stop()
        history.crash_and_check()


def run_seeds(seeds, durability, *, power, small):
    """`run_seed` of each; what fails says which it was."""
    for seed in seeds:
        try:
            run_seed(seed, durability, power=power, small=small)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


CASES = [
    pytest.param(Durability.FSYNC, True, False, id="power-cut-fsync"),
    pytest.param(Durability.FSYNC, True, True, id="power-cut-fsync-evicting"),
    pytest.param(Durability.NONE, True, False, id="power-cut-none"),
    pytest.param(Durability.NONE, True, True, id="power-cut-none-evicting"),
    pytest.param(Durability.GROUP, True, False, id="power-cut-group"),
    pytest.param(Durability.GROUP, True, True, id="power-cut-group-evicting"),
    pytest.param(Durability.NONE, False, False, id="kill-none"),
    pytest.param(Durability.NONE, False, True, id="kill-none-evicting"),
]


@pytest.mark.parametrize(("durability", "power", "small"), CASES)
def test_crash_at_any_operation(durability, power, small):
    run_seeds(range(25), durability, power=power, small=small)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("durability", "power", "small"), CASES)
def test_crash_at_any_operation_thousands_of_seeds(durability, power, small):
    run_seeds(range(1000, 4000), durability, power=power, small=small)


class Full(History):
    """The same on a file system without room for the deletes log, now and then: whole regions go then."""

    def start(self) -> DiskAdapter:
        self.io.fault = None
        adapter = super().start()
        self.io.fault = self._no_room
        return adapter

    def _no_room(self, call: str, path: Path, _size: int) -> OSError | None:
        if call in ("pwritev", "fallocate") and path.name.startswith("deletes") and self.rng.random() < 0.4:
            return OSError(errno.ENOSPC, "no room", str(path))
        return None

    def _evicted(self) -> set[bytes | None]:
        return {MISS}


@pytest.mark.parametrize(("durability", "power", "small"), CASES)
def test_a_crash_where_deletes_found_no_room(durability, power, small, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "History", Full)
    run_seeds(range(8), durability, power=power, small=small)


class Kind(random.Random):
    """A power cut after which everything is there that was written."""

    def random(self):
        return 0.0

    def choice(self, several):
        return several[-1]


@pytest.mark.parametrize("durability", [Durability.GROUP, Durability.NONE])
def test_what_one_power_cut_cut_off_does_not_come_back_with_the_next(durability):
    """A start's first writes are lost and later ones are there: no later start may take those for what follows its own.

    Found by the thousands of seeds: a value that was deleted came back, since two starts gave their writes one epoch.
    """
    history = History(0, durability, power=True, max_bytes=8 << 20)
    io, page = history.io, bytes(100)
    first, lost, remains, later = history.keys[:4]

    def run(*names: bytes) -> DiskAdapter:
        adapter = history.start()
        for name in names:
            assert adapter.store([item(name, name + page)])[0].ok
        return adapter

    run(first).close()
    adapter = run(lost, remains)
    (region,) = [file for path, file in io.names.items() if path.suffix == ".kvcache"]
    assert len(region.unsynced) == 2
    del region.unsynced[0]
    adapter._hasher.shutdown()
    adapter._syncer.stop()
    io.power_cut(Kind())
    adapter = run(later)
    found = {name: get_as(adapter, name)[1] for name in (first, lost, remains, later)}
    assert found == {first: first + page, lost: None, remains: None, later: later + page}
    adapter.delete([remains])
    assert adapter.flush() is Durability.FSYNC
    adapter._hasher.shutdown()
    adapter._syncer.stop()
    io.power_cut(Kind())
    assert {name: get_as(adapter, name)[1] for adapter in [run()] for name in found} == found


def test_where_epochs_cannot_be_noted_nothing_is_added_to_what_is_there():
    """A full file system: what is there is served, and no write gets an epoch that another may have had."""
    history = History(0, Durability.GROUP, power=True, max_bytes=8 << 20)
    name, other = history.keys[:2]
    adapter = history.start()
    assert adapter.store([item(name, name)])[0].ok
    adapter.close()
    history.io.fault = lambda call, path, size: OSError(28, "full") if call == "pwritev" and "manifest" in path.name else None
    adapter = history.start()
    assert get_as(adapter, name)[1] == name
    assert adapter._writer.open_regions() == []
    assert adapter.store([item(other, other)])[0].ok, "into a region of its own"
    adapter.close()
