"""`raw_block` and `dax`: whose device it is, what a crash leaves, geometry, a real loop device."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvd.store.retention import NEVER, Retention
from kvd.tiers.adapters import raw_block, registry
from kvd.tiers.adapters.base import Adapter, AdapterConfigError, AdapterError, Durability, Item, Loaded, Stored
from kvd.tiers.adapters.kind import Eviction
from kvd.tiers.adapters.raw_block import FileMedium, RawBlockAdapter
from kvd.tiers.adapters.slots import BLOCK, _header
from tests.kvd.adapters.subjects import RawBlock
from tests.kvd.adapters.test_conformance import body, get, ident, put
from tests.kvd.tiers.ram_tier import running
from tests.support.processes import run_cli

SLOT = 12 << 10


def raw_at(path: Path, slots: int = 10, slot: int = SLOT) -> RawBlockAdapter:
    return RawBlockAdapter("raw", FileMedium("raw", path, BLOCK + slots * slot, direct=True), slot, where=str(path))


def test_the_file_is_made_whole_and_ours(tmp_path: Path) -> None:
    adapter = raw_at(tmp_path / "slots")
    adapter.open()
    status = (tmp_path / "slots").stat()
    assert status.st_size == BLOCK + 10 * SLOT
    assert status.st_blocks * 512 >= status.st_size
    assert status.st_mode & 0o777 == 0o600
    assert adapter.usage().bytes_limit == 10 * SLOT
    adapter.close()


@pytest.mark.parametrize("kind", ["raw_block", "dax"])
def test_a_file_that_was_removed_keeps_nothing_and_says_so(tmp_path: Path, kind: str) -> None:
    size: dict[str, object] = {"capacity_bytes": 1 << 20} if kind == "raw_block" else {"max_dax_size_gb": 0.001}
    (adapter,) = registry.build([{"type": kind, "device_path": str(tmp_path / "slots"), "slot_bytes": SLOT, **size}])
    adapter.open()
    assert put(adapter, 1, b"kept").ok
    assert adapter.flush() is Durability.FSYNC
    (tmp_path / "slots").unlink()
    with pytest.raises(AdapterError, match="the file was removed"):
        put(adapter, 2, b"lost")
    with pytest.raises(AdapterError, match="the file was removed"):
        adapter.flush()
    assert get(adapter, 1, 4) == b"kept", "as long as it is open"
    adapter.close()


CUT = """
import os, sys
from kvd.tiers.adapters import registry
from kvd.tiers.adapters.base import AdapterError
from tests.kvd.adapters.test_conformance import body, get, put
path, kind, size = sys.argv[1:]
at = {"capacity_bytes": 1 << 20} if kind == "raw_block" else {"max_dax_size_gb": 1 / 1024}
(adapter,) = registry.build([{"type": kind, "device_path": path, "slot_bytes": 12288, **at}])
adapter.open()
for number in range(10):
    assert put(adapter, number).ok
os.truncate(path, int(size))
kept = 0
for number in range(10):
    try:
        assert get(adapter, number) == body(number)
        kept += 1
    except AdapterError as error:
        print(error.message)
try:
    put(adapter, 50)
except AdapterError as error:
    print(error.message)
adapter.close()
print("kept", kept)
"""


@pytest.mark.parametrize(("kind", "says"), [("raw_block", "it ends before byte"), ("dax", "the file was cut to")])
def test_a_file_that_was_cut_short_is_an_error_and_no_death(tmp_path: Path, kind: str, says: str) -> None:
    """To touch a mapping behind its file's end ends the process."""
    command = [sys.executable, "-c", CUT, str(tmp_path / "slots"), kind, str(BLOCK + 4 * SLOT)]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[3])
    assert ran.returncode == 0, ran.stderr
    assert f"cannot read {tmp_path}/slots: {says}" in ran.stdout
    assert "kept 0" not in ran.stdout


def test_one_daemon_a_device(tmp_path: Path) -> None:
    first = raw_at(tmp_path / "slots")
    first.open()
    with pytest.raises(AdapterError, match="in use by another daemon"):
        raw_at(tmp_path / "slots").open()
    first.close()
    second = raw_at(tmp_path / "slots")
    second.open()
    second.close()


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"type": "raw_block", "device_path": "{}/no/file", "slot_bytes": "8K", "capacity_bytes": "1M"}, "No such file"),
        ({"type": "raw_block", "device_path": "{}/none", "slot_bytes": "8K"}, "No such file"),
        ({"type": "raw_block", "device_path": "{}", "slot_bytes": "8K"}, "Is a directory"),
        ({"type": "raw_block", "device_path": "/dev/null", "slot_bytes": "8K"}, "none of memory or blocks"),
        ({"type": "raw_block", "device_path": "{}/other", "slot_bytes": "8K"}, "holds something else"),
        ({"type": "dax", "device_path": "/dev/null", "slot_bytes": "8K", "max_dax_size_gb": 0.001}, "none of memory"),
        ({"type": "dax", "device_path": "{}", "slot_bytes": "8K", "max_dax_size_gb": 0.001}, "Is a directory"),
    ],
)
@pytest.mark.real("kvd")
def test_a_start_that_fails_is_one_line_and_leaves_no_file(tmp_path: Path, spec: dict[str, Any], says: str) -> None:
    other = tmp_path / "other"
    other.write_text("something" * 9999)
    here = {name: value.format(tmp_path) if isinstance(value, str) else value for name, value in spec.items()}
    ran = run_cli("kvd", "serve", "--max-bytes", "1M", "--socket", tmp_path / "s", "--l2-adapter", json.dumps(here))
    assert ran.rc in (1, 2)
    assert says in ran.stderr
    lines = [line for line in ran.stderr.splitlines() if "no O_DIRECT" not in line]
    assert [line.split(":")[0] for line in lines] in (["kvd", "hint"], ["kvd"]), "and no traceback of what did not open"
    assert {path.name for path in tmp_path.iterdir()} <= {"other", "s.lock"}


def test_a_size_without_room_for_a_slot_is_said_before_a_file_is_made(tmp_path: Path) -> None:
    path = str(tmp_path / "slots")
    for spec in (
        {"type": "raw_block", "device_path": path, "slot_bytes": "2M", "capacity_bytes": "1M"},
        {"type": "dax", "device_path": path, "slot_bytes": "2M", "max_dax_size_gb": 0.001},
    ):
        with pytest.raises(AdapterConfigError, match="hold no slot of 2097152"):
            registry.build([spec])
    assert not (tmp_path / "slots").exists()


def test_a_file_that_was_made_for_nothing_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(AdapterError, match="No space left"):
        raw_at(tmp_path / "slots").open()
    assert not list(tmp_path.iterdir())


def test_a_device_of_memory_says_its_size_in_sysfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A DAX device has no end to seek to. Here /dev/zero is one: mapped shared, it is memory as well."""
    number = Path("/dev/zero").stat().st_rdev
    size = tmp_path / f"{os.major(number)}:{os.minor(number)}" / "size"
    size.parent.mkdir()
    size.write_text(f"{(4 << 20) + 4096}\n")
    monkeypatch.setattr(raw_block, "CHARACTER_DEVICES", tmp_path)
    (adapter,) = registry.build([{"type": "dax", "device_path": "/dev/zero", "slot_bytes": SLOT, "max_dax_size_gb": 4 / 1024}])
    adapter.open()
    assert adapter.usage().bytes_limit == ((4 << 20) - BLOCK) // SLOT * SLOT
    put(adapter, 1)
    assert get(adapter, 1) == body(1)
    adapter.close()


@pytest.mark.parametrize("at", [0, 1080, 65536])
def test_what_holds_something_else_is_refused_and_left_alone(tmp_path: Path, at: int) -> None:
    path = tmp_path / "slots"
    path.write_bytes(bytes(at) + b"a file system" + bytes(200_000))
    before = path.read_bytes()
    with pytest.raises(AdapterConfigError, match="holds something else"):
        raw_at(path).open()
    assert path.read_bytes()[: len(before)] == before


def test_another_geometry_is_refused_by_name(tmp_path: Path) -> None:
    adapter = raw_at(tmp_path / "slots")
    adapter.open()
    put(adapter, 1)
    adapter.close()
    with pytest.raises(AdapterConfigError, match=f"has 10 slots of {SLOT} bytes, not 5 of {2 * SLOT}"):
        raw_at(tmp_path / "slots", 5, 2 * SLOT).open()
    larger = raw_at(tmp_path / "slots", 20)
    larger.open()
    assert get(larger, 1) == body(1)
    larger.close()


def test_an_earlier_format_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "slots"
    adapter = raw_at(path, 200)
    adapter.open()
    for number in range(150):
        put(adapter, number)
    adapter.close()
    with path.open("r+b") as file:
        file.write(bytes(1 << 20))
    again = raw_at(path, 200)
    again.open()
    assert again.usage().entries == 0
    again.close()


def write_slot(path: Path, slot: int, item: Item, sequence: int, generation: int) -> None:
    """A slot as a crash may have left it."""
    with path.open("r+b") as file:
        file.seek(BLOCK + slot * SLOT)
        file.write(_header(item, sequence, generation) + bytes(item.data))


def test_of_two_slots_of_one_identity_the_later_counts(tmp_path: Path) -> None:
    """A crash between writing the new value and wiping the old one."""
    path = tmp_path / "slots"
    adapter = raw_at(path)
    adapter.open()
    put(adapter, 1, b"new" * 100)
    put(adapter, 2)
    generation = adapter._generation
    adapter.close()
    write_slot(path, 7, Item(ident(1), memoryview(b"old" * 100), Retention.LONG), 0, generation)
    for _ in range(2):
        again = raw_at(path)
        again.open()
        assert get(again, 1, 300) == b"new" * 100
        assert again.usage().entries == 2
        again.delete([ident(1)])
        again.close()
        again = raw_at(path)
        again.open()
        assert get(again, 1, 300) is Loaded.MISS
        put(again, 1, b"new" * 100)
        again.close()


@pytest.mark.parametrize("newer", [1, 8])
def test_an_older_record_does_not_come_back_where_the_newer_has_expired(tmp_path: Path, newer: int) -> None:
    """The crash between writing and wiping once more, found after the newer one's time; read first or last."""
    path = tmp_path / "slots"
    adapter = raw_at(path)
    adapter.open()
    generation = adapter._generation
    adapter.close()
    write_slot(path, newer, Item(ident(1), memoryview(b"new"), Retention.LONG, expires_ns=1), 9, generation)
    write_slot(path, 5, Item(ident(1), memoryview(b"old"), Retention.LONG), 3, generation)
    for _ in range(2):
        again = raw_at(path)
        again.open()
        assert again.lookup([ident(1)]) == [None]
        assert get(again, 1, 3) is Loaded.MISS
        assert list(again.enumerate()) == []
        assert again.usage().entries == 0
        again.close()


def test_what_expired_makes_room_at_the_start_though_nothing_is_evicted(tmp_path: Path) -> None:
    path, now = tmp_path / "slots", [1_000]

    def opened() -> RawBlockAdapter:
        medium = FileMedium("raw", path, BLOCK + 4 * SLOT, direct=True)
        made = RawBlockAdapter("raw", medium, SLOT, where="", eviction=Eviction("noop"), clock_ns=lambda: now[0])
        made.open()
        return made

    adapter = opened()
    for number in range(4):
        expires_ns = 2_000 if number % 2 else NEVER
        assert adapter.store([Item(ident(number), memoryview(body(number)), Retention.LONG, expires_ns=expires_ns)])[0].ok
    assert put(adapter, 9) == Stored(False, "full")
    adapter.close()
    now[0] = 3_000
    again = opened()
    assert again.usage().entries == 2
    assert [put(again, number).ok for number in (9, 10, 11)] == [True, True, False]
    assert get(again, 0) == body(0)
    again.close()


def test_what_was_evicted_or_replaced_does_not_come_back(tmp_path: Path) -> None:
    path = tmp_path / "slots"
    adapter = raw_at(path, 4)
    adapter.open()
    for number in range(4):
        put(adapter, number)
    put(adapter, 0, b"second" * 10)
    for number in range(10, 13):
        put(adapter, number)
    held = [identity for identity, _ in adapter.enumerate()]
    adapter.close()
    again = raw_at(path, 4)
    again.open()
    assert sorted(identity for identity, _ in again.enumerate()) == sorted(held)
    assert get(again, 0) is Loaded.MISS
    again.close()


def test_a_value_larger_than_a_slot_is_too_large(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    adapter = raw_at(tmp_path / "slots")
    adapter.open()
    assert put(adapter, 1, bytes(SLOT - BLOCK)).ok
    for number in (2, 3):
        assert put(adapter, number, bytes(SLOT - BLOCK + 1)) == Stored(False, "too_large")
    said = (
        f"a value of {SLOT - BLOCK + 1} bytes is not stored, {SLOT - BLOCK} is the most: slot_bytes must be {SLOT + BLOCK} at least"
    )
    assert caplog.text.count("is not stored") == caplog.text.count(said) == 1
    assert adapter.flush() is Durability.FSYNC
    adapter.close()


@pytest.mark.parametrize(
    ("spec", "line"),
    [
        ({"type": "raw_block", "device_path": "/x", "slot_bytes": 10000}, "field 'slot_bytes': 10000 is no multiple of 4096"),
        ({"type": "raw_block", "device_path": "/x", "slot_bytes": "4KiB"}, "field 'slot_bytes': 4KiB is too small"),
        ({"type": "dax", "device_path": "/x", "slot_bytes": "1MiB"}, "field 'max_dax_size_gb' is missing"),
    ],
)
def test_what_cannot_be_meant(spec: dict[str, object], line: str) -> None:
    with pytest.raises(AdapterConfigError, match=line):
        registry.build([spec])


def test_a_slip_in_a_devices_name_makes_no_file() -> None:
    with pytest.raises(AdapterError, match="No such file"):
        raw_at(Path("/dev/kvt-no-such-device")).open()
    assert not Path("/dev/kvt-no-such-device").exists()


def test_a_file_too_small_for_one_slot(tmp_path: Path) -> None:
    (tmp_path / "slots").write_bytes(bytes(8192))
    adapter = RawBlockAdapter("raw", FileMedium("raw", tmp_path / "slots", 0, direct=False), SLOT, where="slots")
    with pytest.raises(AdapterConfigError, match="not one slot"):
        adapter.open()


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Path]:
    """A loop device of 16 MiB."""
    backing = tmp_path / "backing"
    backing.write_bytes(b"")
    os.truncate(backing, 16 << 20)
    made = subprocess.run(["losetup", "--find", "--show", str(backing)], capture_output=True, text=True)
    if made.returncode:
        pytest.skip("needs loop devices")
    device = Path(made.stdout.strip())
    try:
        yield device
    finally:
        subprocess.run(["losetup", "--detach", str(device)], check=True)


@pytest.mark.real("loop")
def test_a_real_device(loop: Path) -> None:
    spec = {"type": "raw_block", "device_path": str(loop), "slot_bytes": "64KiB"}
    (adapter,) = registry.build([spec])
    adapter.open()
    for number in range(300):
        assert put(adapter, number, body(number, 50_000)).ok
    assert adapter.usage().bytes_limit == 255 * (64 << 10)
    assert adapter.counters.evictions == 45
    adapter.close()
    (again,) = registry.build([spec])
    again.open()
    assert again.usage().entries == 255
    assert get(again, 299, 50_000) == body(299, 50_000)
    again.close()


@pytest.mark.real("loop")
def test_a_device_that_is_mounted_is_refused(loop: Path, tmp_path: Path) -> None:
    if subprocess.run(["mkfs.ext4", "-q", str(loop)], capture_output=True).returncode:
        pytest.skip("needs mkfs.ext4")
    spec = {"type": "raw_block", "device_path": str(loop), "slot_bytes": "64KiB"}
    (adapter,) = registry.build([spec])
    with pytest.raises(AdapterConfigError, match="holds something else"):
        adapter.open()
    mount = tmp_path / "mount"
    mount.mkdir()
    if subprocess.run(["mount", str(loop), str(mount)], capture_output=True).returncode:
        pytest.skip("cannot mount here")
    try:
        with pytest.raises(AdapterError, match="busy"):
            adapter.open()
    finally:
        subprocess.run(["umount", str(mount)], check=True)


@pytest.mark.real("kvd")
@pytest.mark.parametrize("kind", ["raw_block", "dax"])
def test_a_daemon_restarts_over_slots(tmp_path: Path, kind: str) -> None:
    size = {"capacity_bytes": "8MiB"} if kind == "raw_block" else {"max_dax_size_gb": 8 / 1024}
    spec = {"type": kind, "device_path": str(tmp_path / "slots"), "slot_bytes": "64KiB", **size}
    keys = [bytes([i]) * 32 for i in range(20)]
    sizes = [1, 4096, 5000, 40_960, 61_440]
    for turn in range(2):
        adapter: Adapter
        (adapter,) = registry.build([spec])
        with running(adapter) as daemon, daemon.client() as client:
            if not turn:
                for i, key in enumerate(keys):
                    assert client.put(key, body(i, sizes[i % 5]))
                client.flush()
                daemon.evict_all()
            assert client.get_many(keys) == [body(i, sizes[i % 5]) for i in range(20)]


def test_the_subject_reads_what_lies_there(tmp_path: Path) -> None:
    subject = RawBlock(tmp_path)
    with subject.opened() as adapter:
        put(adapter, 1)
        assert subject.raw(ident(1))[128:] == body(1)
