"""Pool segments: golden bytes, what is and is not a segment, lock discipline, races."""

import os
import re
import stat
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtools.errors import NotFound, Refused, TimedOut, Unreachable, UsageError
from kvtools.segments import owner, pool

GOLDEN = bytes.fromhex("0000000002000000 000000c000000000 0000001000000000")
"""kvcached's own bytes for limit 8 GiB, used 3 GiB, prealloc 256 MiB."""

GiB, MiB = 1 << 30, 1 << 20


def test_golden_bytes_of_kvcached_read_as_what_they_mean(tmp_path: Path) -> None:
    (tmp_path / "VLLM").write_bytes(GOLDEN)
    reading = pool.read_pool("VLLM", root=tmp_path)
    assert (reading.limit_bytes, reading.used_bytes, reading.prealloc_bytes) == (8 * GiB, 3 * GiB, 256 * MiB)
    assert reading.mtime_ns == (tmp_path / "VLLM").stat().st_mtime_ns
    assert (reading.mapped_bytes, reading.free_bytes, reading.overage_bytes) == (3 * GiB + 256 * MiB, 5 * GiB - 256 * MiB, 0)
    assert reading.used_fraction == 0.375


@pytest.mark.real("segments")
def test_what_we_make_is_byte_for_byte_kvcacheds(shm_name: Callable[[], str]) -> None:
    name = shm_name()
    pool.create_pool(name, 8 * GiB, used_bytes=3 * GiB, prealloc_bytes=256 * MiB)
    assert Path("/dev/shm", name).read_bytes() == GOLDEN


def test_the_example_of_the_format_page_is_true() -> None:
    page = (Path(pool.__file__).parent / "FORMAT.md").read_text()
    block = re.search(r"## Pool segment.*?```\n(.*?)```", page, re.DOTALL)
    assert block
    assert bytes.fromhex("".join(line[6:53] for line in block[1].splitlines())) == GOLDEN


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0, 0o666)])
def test_mode_is_0666_less_the_umask(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        reading = pool.create_pool("x", 1, root=tmp_path)
    finally:
        os.umask(before)
    assert reading.mode == mode == stat.S_IMODE((tmp_path / "x").stat().st_mode)


def test_creating_over_an_old_segment_resets_all_three_words(tmp_path: Path) -> None:
    pool.create_pool("x", 5, used_bytes=3, prealloc_bytes=1, root=tmp_path)
    inode = (tmp_path / "x").stat().st_ino
    assert pool.create_pool("x", 7, root=tmp_path).limit_bytes == 7
    assert (tmp_path / "x").read_bytes() == struct.pack("=qqq", 7, 0, 0)
    assert (tmp_path / "x").stat().st_ino == inode, "an engine that has the file open keeps the right one"


def test_creating_grows_a_short_file_and_leaves_a_long_one_alone(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"12345678")
    assert pool.create_pool("short", 9, root=tmp_path).limit_bytes == 9
    (tmp_path / "long").write_bytes(b"x" * 25)
    with pytest.raises(Unreachable, match="in the way"):
        pool.create_pool("long", 9, root=tmp_path)
    assert (tmp_path / "long").read_bytes() == b"x" * 25
    with pytest.raises(Refused):
        pool.create_pool("short", 9, replace=False, root=tmp_path)


@pytest.mark.parametrize("name", ["kvtools.kvd.x", "x.kvtools", ".x", "a/b", ""])
def test_names_of_other_kinds_of_file_are_no_pools(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError):
        pool.create_pool(name, 1, root=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", [0, 1, 8, 23, 25, 32, 4096])
def test_other_sizes_are_refused_by_name_and_not_listed(tmp_path: Path, size: int) -> None:
    (tmp_path / "x").write_bytes(bytes(size))
    with pytest.raises(Unreachable, match=f"not a pool segment: {size} bytes"):
        pool.read_pool("x", root=tmp_path)
    with pytest.raises(Unreachable):
        pool.write_limit("x", 5, root=tmp_path)
    with pytest.raises(Unreachable):
        pool.remove("x", root=tmp_path)
    assert (tmp_path / "x").read_bytes() == bytes(size)
    assert pool.list_pools(tmp_path) == pool.PoolListing([], [])


@given(words=st.tuples(*[st.integers(-(2**63), 2**63 - 1) | st.integers(-5, 5) | st.just(2**50) | st.just(2**50 - 1)] * 3))
def test_words_out_of_range_are_no_segment(tmp_path_factory: pytest.TempPathFactory, words: tuple[int, int, int]) -> None:
    root = tmp_path_factory.mktemp("shm")
    (root / "x").write_bytes(struct.pack("=qqq", *words))
    if all(0 <= word < 2**50 for word in words):
        reading = pool.read_pool("x", root=root)
        assert (reading.limit_bytes, reading.used_bytes, reading.prealloc_bytes) == words
        assert [p.name for p in pool.list_pools(root).pools] == ["x"]
    else:
        with pytest.raises(Unreachable, match="not a pool segment"):
            pool.read_pool("x", root=root)
        assert pool.list_pools(root).pools == []


@given(data=st.binary(max_size=64))
def test_garbage_never_does_more_than_be_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    root = tmp_path_factory.mktemp("shm")
    (root / "x").write_bytes(data)
    try:
        reading = pool.read_pool("x", root=root)
    except Unreachable:
        found = pool.list_pools(root)
        # What has a segment's size and cannot be one is named: it is somebody's segment, damaged.
        assert (found.pools, [p.name for p in found.unreadable]) == ([], ["x"] if len(data) == pool.SIZE else [])
    else:
        assert struct.pack("=qqq", reading.limit_bytes, reading.used_bytes, reading.prealloc_bytes) == data
        assert pool.list_pools(root).unreadable == []


@pytest.mark.parametrize("data", [struct.pack("=qqq", -5, 1, 1), struct.pack("=qqq", 1, 1 << 50, 1), b"\xff" * 24])
def test_impossible_words_are_a_problem_and_no_pool(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x").write_bytes(data)
    listing = pool.list_pools(tmp_path)
    assert listing.pools == []
    assert "x is not a pool segment: its words are" in listing.unreadable[0].error.message


@pytest.mark.parametrize("left", [b"", b"12345", b"\0" * 30])
def test_what_has_an_owner_file_and_is_no_segment_any_more_is_a_problem(tmp_path: Path, left: bytes) -> None:
    pool.create_pool("cut", 1 << 30, root=tmp_path)
    with owner.OwnerLock.acquire("cut", owner.OwnerInfo(engine="vllm"), root=tmp_path):
        (tmp_path / "cut").write_bytes(left)
        (tmp_path / "stranger").write_bytes(left)
        listing = pool.list_pools(tmp_path)
        assert [p.name for p in listing.unreadable] == ["cut"]
        assert f"cut is not a pool segment: {len(left)} bytes" in listing.unreadable[0].error.message


@given(first=st.integers(0, 2**50 - 1), limit=st.integers(0, 2**50 - 1), used=st.integers(0, 2**50 - 1))
def test_a_limit_write_changes_word_0_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, first: int, limit: int, used: int
) -> None:
    root = tmp_path_factory.mktemp("shm")
    pool.create_pool("x", first, used_bytes=used, prealloc_bytes=3, root=root)
    change = pool.write_limit("x", limit, root=root)
    assert (change.before.limit_bytes, change.after.limit_bytes) == (first, limit)
    assert (root / "x").read_bytes() == struct.pack("=qqq", limit, used, 3)


@pytest.mark.parametrize("limit", [-1, 2**50, 2**63, -(2**63) - 1])
def test_limits_the_format_cannot_hold_are_usage_errors(tmp_path: Path, limit: int) -> None:
    pool.create_pool("x", 5, root=tmp_path)
    with pytest.raises(UsageError, match="limit out of range"):
        pool.write_limit("x", limit, root=tmp_path)
    assert pool.read_pool("x", root=tmp_path).limit_bytes == 5


def test_a_conditional_limit_does_not_undo_somebody_elses(tmp_path: Path) -> None:
    pool.create_pool("x", 5, root=tmp_path)
    pool.write_limit("x", 6, expected=5, root=tmp_path)
    with pytest.raises(pool.Changed, match="6 B by now, not 5 B"):
        pool.write_limit("x", 7, expected=5, root=tmp_path)
    assert pool.read_pool("x", root=tmp_path).limit_bytes == 6


def test_usage_writes_leave_the_limit_and_learn_it(tmp_path: Path) -> None:
    pool.create_pool("x", 100, root=tmp_path)
    with pool.PoolFile("x", root=tmp_path, writable=True) as engine:
        pool.write_limit("x", 50, root=tmp_path)
        assert engine.write_usage(30, 4).limit_bytes == 50
        assert not engine.gone
        (tmp_path / "x").unlink()
        assert engine.gone
    with pytest.raises(NotFound):
        pool.write_usage("x", 1, 1, root=tmp_path)
    assert not (tmp_path / "x").exists(), "nothing but a creator makes a segment"


def test_links_are_never_followed(tmp_path: Path) -> None:
    pool.create_pool("real", 5, root=tmp_path)
    (tmp_path / "link").symlink_to("real")
    for act in (pool.read_pool, pool.remove, lambda name, root: pool.write_limit(name, 9, root=root)):
        with pytest.raises(Unreachable, match="symbolic link"):
            act("link", root=tmp_path)  # type: ignore[operator]
    with pytest.raises(Unreachable):
        pool.create_pool("link", 9, root=tmp_path)
    assert [p.name for p in pool.list_pools(tmp_path).pools] == ["real"]
    assert pool.read_pool("real", root=tmp_path).limit_bytes == 5


def test_a_missing_folder_says_so(tmp_path: Path) -> None:
    with pytest.raises(Unreachable, match="cannot read"):
        pool.list_pools(tmp_path / "none")


def test_removal_takes_only_segments(tmp_path: Path) -> None:
    pool.create_pool("x", 5, used_bytes=2, root=tmp_path)
    assert pool.remove("x", root=tmp_path).used_bytes == 2
    with pytest.raises(NotFound):
        pool.remove("x", root=tmp_path)


@pytest.fixture
def stuck(shm_name: Callable[[], str]):
    """A segment in /dev/shm whose flock another process holds and never gives back."""
    name = shm_name()
    pool.create_pool(name, 8 * GiB)
    code = f"import fcntl,time; f=open('/dev/shm/{name}','rb'); fcntl.flock(f,2); print('held',flush=True); time.sleep(60)"
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    holder.stdout.readline()
    yield name
    holder.kill()
    holder.wait()
    holder.stdout.close()


@pytest.mark.real("segments")
def test_a_stuck_lock_is_a_timeout_everywhere_and_delays_a_listing_once(stuck: str, shm_name: Callable[[], str]) -> None:
    other = shm_name()
    pool.create_pool(other, 1)
    for act in (
        lambda: pool.read_pool(stuck, timeout_s=0.05),
        lambda: pool.write_limit(stuck, 1, timeout_s=0.05),
        lambda: pool.write_usage(stuck, 1, 1, timeout_s=0.05),
        lambda: pool.create_pool(stuck, 1, timeout_s=0.05),
        lambda: pool.remove(stuck, timeout_s=0.05),
    ):
        with pytest.raises(TimedOut):
            act()
    listing = pool.list_pools(timeout_s=0.05)
    assert other in {p.name for p in listing.pools}
    assert [p.name for p in listing.unreadable if p.name == stuck] == [stuck]
    assert Path("/dev/shm", stuck).read_bytes() == struct.pack("=qqq", 8 * GiB, 0, 0)


@pytest.mark.real("segments")
def test_an_unreadable_segment_is_reported_and_not_a_crash(tmp_path: Path) -> None:
    """As a user who owns nothing here: in a child, because root may read everything."""
    root = tmp_path
    pool.create_pool("open", 5, root=root)
    pool.create_pool("private", 5, root=root)
    (root / "private").chmod(0o600)
    for folder in (root, *root.parents):
        if folder.stat().st_uid == os.getuid() and not folder.stat().st_mode & 0o001:
            folder.chmod(folder.stat().st_mode | 0o005)
    code = f"""
import os
from pathlib import Path
from kvtools.segments import owner, pool
root = Path({str(root)!r})
if os.getuid() == 0:
    os.setgid(65534); os.setuid(65534)
else:
    (root / "private").chmod(0)
listing = pool.list_pools(root)
assert [p.name for p in listing.pools] == ["open"], listing
assert [(p.name, p.error.message) for p in listing.unreadable] == [("private", "segment private: permission denied")], listing
if os.getuid() == 65534:
    assert pool.read_pool("open", root=root).limit_bytes == 5
    try:
        pool.write_limit("open", 6, root=root)
    except pool.Unreachable as error:
        assert "permission denied" in error.message
    else:
        raise SystemExit("wrote a file it may not write")
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_two_operators_and_an_engine_lose_no_update(tmp_path: Path) -> None:
    """Each writer's last word stands; the engine's words are never those of an older moment."""
    pool.create_pool("x", 1, root=tmp_path)
    stop = threading.Event()
    torn: list[object] = []

    def operator(base: int) -> None:
        for i in range(200):
            change = pool.write_limit("x", base + i, root=tmp_path)
            if change.after.limit_bytes != base + i:
                torn.append(change)

    def engine() -> None:
        n = 0
        with pool.PoolFile("x", root=tmp_path, writable=True) as file:
            while not stop.is_set():
                n += 1
                reading = file.write_usage(n, 2 * n)
                if (reading.used_bytes, reading.prealloc_bytes) != (n, 2 * n):
                    torn.append(reading)

    def reader() -> None:
        last = 0
        while not stop.is_set():
            reading = pool.read_pool("x", root=tmp_path)
            if reading.prealloc_bytes != 2 * reading.used_bytes or reading.used_bytes < last:
                torn.append(reading)
            last = reading.used_bytes

    background = [threading.Thread(target=engine), threading.Thread(target=reader)]
    operators = [threading.Thread(target=operator, args=(base,)) for base in (1000, 5000)]
    for thread in [*background, *operators]:
        thread.start()
    for thread in operators:
        thread.join()
    stop.set()
    for thread in background:
        thread.join()
    assert torn == []
    assert pool.read_pool("x", root=tmp_path).limit_bytes in {1199, 5199}


def test_a_listing_is_sorted_and_leaves_out_what_is_no_pool(tmp_path: Path) -> None:
    for name in ("b", "a", "名前", "x" * 255, "c d"):
        pool.create_pool(name, 5, root=tmp_path)
    for name in ("kvtools.kvd.0123", "a.kvtools", ".hidden"):
        (tmp_path / name).write_bytes(GOLDEN)
    (tmp_path / "foreign").write_bytes(b"not a segment")
    (tmp_path / "folder").mkdir()
    assert [p.name for p in pool.list_pools(tmp_path).pools] == ["a", "b", "c d", "x" * 255, "名前"]
