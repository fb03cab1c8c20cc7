"""`fs` on real file systems: whose directory it is, what others leave there, full disks, other daemons' evictions."""

import json
import os
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd.tiers.adapters.base import AdapterConfigError, AdapterError, Durability, Loaded
from kvd.tiers.adapters.fs import MANIFEST, PATH_MAX, RECOUNT_S, FsAdapter
from tests.kvd.adapters.subjects import Fs
from tests.kvd.adapters.test_conformance import body, get, ident, put
from tests.support.processes import run_python

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting and changing owner need root")


@pytest.fixture
def fs(tmp_path: Path) -> Fs:
    return Fs(tmp_path)


def test_files_are_the_owners_only(fs: Fs) -> None:
    before = os.umask(0)
    try:
        with fs.opened() as adapter:
            put(adapter, 1)
    finally:
        os.umask(before)
    for path in (fs.folder / "root").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert stat.S_IMODE(fs.path(ident(1)).stat().st_mode) == 0o600


def test_a_directory_of_somebody_elses_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(AdapterConfigError, match=r"holds 'thesis\.tex'"):
        FsAdapter("fs", tmp_path, 1 << 20).open()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["thesis.tex"]


def test_a_fresh_mount_is_no_foreign_directory(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    (tmp_path / ".nfs0001").touch()
    FsAdapter("fs", tmp_path, 1 << 20).open()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('{"format": "kvtools.fs", "version": 2}', "holds kvtools.fs version 2, this kvd reads kvtools.fs version 1"),
        ('{"format": "other", "version": 1}', "holds other version 1"),
        ("{", "is damaged"),
        ("[]", "is damaged"),
    ],
)
def test_another_format_is_refused_by_name(tmp_path: Path, text: str, line: str) -> None:
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(AdapterConfigError, match=line):
        FsAdapter("fs", tmp_path, 1 << 20).open()


def test_the_manifest_says_format_and_version(fs: Fs) -> None:
    with fs.opened():
        pass
    assert json.loads((fs.folder / "root" / MANIFEST).read_text()) == {"format": "kvtools.fs", "version": 1}


def test_what_dead_writers_left_is_swept_and_what_is_young_is_not(fs: Fs) -> None:
    with fs.opened():
        pass
    old, young = (fs.folder / "root" / "writing" / name for name in ("old", "young"))
    old.write_bytes(b"x")
    young.write_bytes(b"x")
    os.utime(old, (time.time() - 7200, time.time() - 7200))
    with fs.opened() as adapter:
        assert not old.exists()
        assert young.exists()
        assert adapter.usage().entries == 0


@pytest.mark.parametrize("asked", [True, False], ids=["asked", "loaded"])
@pytest.mark.parametrize("thing", ["link", "directory", "pipe"])
def test_something_else_in_a_files_place_is_not_followed(fs: Fs, thing: str, asked: bool, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"s" * 5128)
    with fs.opened() as adapter:
        path = fs.path(ident(1))
        path.parent.mkdir()
        if thing == "link":
            path.symlink_to(secret)
        elif thing == "directory":
            (path / "inside").mkdir(parents=True)
        else:
            os.mkfifo(path)
        if asked:
            assert adapter.lookup([ident(1)]) == [None]
        else:
            assert get(adapter, 1) is Loaded.CORRUPT
        assert adapter.counters.corruptions == 1
        assert get(adapter, 1) is Loaded.MISS
        assert put(adapter, 1).ok
        assert get(adapter, 1) == body(1)
        assert adapter.usage().entries == 1
    assert secret.read_bytes() == b"s" * 5128


def test_a_path_that_leaves_no_room_for_a_values_name_is_refused_at_the_start(tmp_path: Path) -> None:
    root = tmp_path
    while len(os.fsencode(root)) < 3800:
        root /= "d" * 100
    root /= "e" * (PATH_MAX - 1 - len("/objects/00/" + "0" * 128 + ".kv") - len(os.fsencode(root)) - 1)
    adapter = FsAdapter("fs", root, 1 << 20)
    adapter.open()
    assert put(adapter, 1).ok
    assert get(adapter, 1) == body(1)
    adapter.close()
    longer = FsAdapter("fs", root.with_name(root.name + "e"), 1 << 20)
    with pytest.raises(AdapterConfigError, match=r"with a value's name it has 4096 bytes, over 4095"):
        longer.open()
    assert not longer.root.exists()


def test_files_are_counted_anew_soon_after_damage(fs: Fs) -> None:
    """A file that somebody cut has another size than it was counted with: the count must not stay wrong till the next scan."""
    with fs.opened() as adapter:
        assert isinstance(adapter, FsAdapter)
        now = time.time_ns()
        adapter._clock_ns = lambda: now
        for number in range(4):
            put(adapter, number)
        for number in range(3):
            os.truncate(fs.path(ident(number)), 10)
        assert adapter.lookup([ident(n) for n in range(3)]) == [None] * 3
        now += int((RECOUNT_S + 1) * 1e9)
        put(adapter, 5)
        assert adapter.usage().bytes_used == sum(path.stat().st_size for path in fs.folder.rglob("*.kv"))
        assert adapter.usage().entries == 2


def test_a_directory_in_the_way_does_not_stop_a_store(fs: Fs) -> None:
    with fs.opened() as adapter:
        fs.path(ident(1)).mkdir(parents=True)
        assert put(adapter, 1).ok
        assert get(adapter, 1) == body(1)


def test_the_files_used_longest_ago_go_first_also_after_a_restart(fs: Fs) -> None:
    with fs.opened(max_bytes=64 << 10) as adapter:
        for number in range(10):
            put(adapter, number)
            past = time.time() - 1000 + number
            os.utime(fs.path(ident(number)), (past, past))
        assert get(adapter, 0) == body(0), "a load renews"
    with fs.opened(max_bytes=64 << 10) as adapter:
        for number in range(10, 14):
            put(adapter, number)
        held = [number for number in range(14) if get(adapter, number) == body(number)]
        assert 0 in held
        assert 1 not in held
        assert held[-4:] == [10, 11, 12, 13]


def test_two_daemons_keep_one_directory_within_the_limit(fs: Fs) -> None:
    limit = 256 << 10
    one = FsAdapter("one", fs.folder / "root", limit, rescan_s=0.0)
    two = FsAdapter("two", fs.folder / "root", limit, rescan_s=0.0)
    one.open()
    two.open()
    for number in range(200):
        assert put((one, two)[number % 2], number).ok
    taken = sum(path.stat().st_size for path in (fs.folder / "root" / "objects").rglob("*.kv"))
    assert taken <= limit
    assert put(one, 1000).ok
    assert one.usage().bytes_used == taken + 5128 - (5128 if taken + 5128 > limit else 0)


def test_foreign_files_are_neither_listed_nor_harmed(fs: Fs) -> None:
    with fs.opened() as adapter:
        put(adapter, 1)
        (fs.folder / "root" / "objects" / "00").mkdir(exist_ok=True)
        (fs.folder / "root" / "objects" / "README").touch()
        for name in ("README", "zz.kv", "00.kv", "é" * 60):
            (fs.folder / "root" / "objects" / "00" / name).write_bytes(b"x")
        assert [identity for identity, _ in adapter.enumerate()] == [ident(1)]


def test_durability_is_what_was_asked_for(tmp_path: Path) -> None:
    plain = FsAdapter("fs", tmp_path / "a", 1 << 20)
    plain.open()
    assert put(plain, 1).durability is Durability.NONE
    assert plain.flush() is Durability.FSYNC
    synced = FsAdapter("fs", tmp_path / "b", 1 << 20, durability=Durability.FSYNC)
    synced.open()
    assert put(synced, 1).durability is Durability.FSYNC
    assert get(synced, 1) == body(1)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    mount = tmp_path / "mount"
    mount.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m,nr_inodes=20k", "none", str(mount)]).returncode:
        pytest.skip("cannot mount here")
    try:
        yield mount
    finally:
        subprocess.run(["umount", str(mount)], check=True)


@needs_root
def test_a_full_disk_evicts_as_if_it_were_the_limit(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    adapter = FsAdapter("fs", small_disk / "kv", 1 << 30)
    adapter.open()
    for number in range(100):
        assert put(adapter, number, body(number, 50_000)).ok
    assert get(adapter, 99, 50_000) == body(99, 50_000)
    assert adapter.counters.evictions > 50
    assert caplog.text.count("no room left on its file system") == 1
    assert not list((small_disk / "kv" / "writing").iterdir()), "nothing half-written stays"


@needs_root
def test_a_directory_that_may_not_be_written(tmp_path: Path) -> None:
    """As another user: root may write everywhere."""
    code = (
        "import os\n"
        "from pathlib import Path\n"
        "from kvd.tiers.adapters.base import AdapterError\n"
        "from kvd.tiers.adapters.fs import FsAdapter\n"
        "os.chdir(os.environ['KVTEST_ROOT']); os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "try: FsAdapter('fs', Path('.'), 1 << 20).open()\n"
        "except AdapterError as error: print(error.message)\n"
    )
    root = tmp_path / "root"
    root.mkdir(mode=0o755)
    ran = run_python(code, env={"KVTEST_ROOT": str(root)})
    assert ran.stdout.strip() == "fs: cannot use .: Permission denied", ran.stderr


def test_a_directory_that_vanishes_fails_and_comes_back(fs: Fs) -> None:
    with fs.opened() as adapter:
        put(adapter, 1)
        away = fs.folder / "away"
        (fs.folder / "root").rename(away)
        with pytest.raises(AdapterError, match="cannot write"):
            put(adapter, 2)
        assert get(adapter, 1) is Loaded.MISS
        away.rename(fs.folder / "root")
        assert get(adapter, 1) == body(1)
        assert put(adapter, 2).ok
