"""The arena's memory object: sealed, read-only for readers, prefaulted, and told apart when it cannot be had."""

import ctypes
import errno
import fcntl
import mmap
import os
import re
import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvd.errors import KvdError
from kvd.store import arena as arenas
from kvd.store.arena import Arena
from kvd.store.extents import PAGE
from tests.support.processes import wait_until


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(8 << 20)
    yield made
    made.close()


def test_it_is_sealed_against_resize_and_against_unsealing(arena: Arena) -> None:
    seals = fcntl.fcntl(arena.fd, fcntl.F_GET_SEALS)
    assert seals & fcntl.F_SEAL_SHRINK
    assert seals & fcntl.F_SEAL_GROW
    assert seals & fcntl.F_SEAL_SEAL
    for size in (0, 4 << 20, 16 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, size)


def test_readers_cannot_write_through_their_descriptor(arena: Arena) -> None:
    assert fcntl.fcntl(arena.read_only_fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    with pytest.raises(PermissionError):
        mmap.mmap(arena.read_only_fd, arena.capacity, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(arena.read_only_fd, b"x")
    with mmap.mmap(arena.read_only_fd, arena.capacity, mmap.MAP_SHARED, mmap.PROT_READ) as view:
        arena.view[5:9] = b"seen"
        assert view[5:9] == b"seen"


def test_nobody_but_root_can_reopen_it_for_writing(arena: Arena) -> None:
    assert os.fstat(arena.fd).st_mode & 0o777 == 0o400


def test_descriptors_do_not_leak_into_children(arena: Arena) -> None:
    assert not os.get_inheritable(arena.fd)
    assert not os.get_inheritable(arena.read_only_fd)


@pytest.mark.parametrize(("asked", "given"), [(1, PAGE), (PAGE, PAGE), (PAGE + 1, PAGE), (10 * PAGE - 1, 9 * PAGE)])
def test_its_size_is_whole_pages(asked: int, given: int) -> None:
    arena = Arena(asked)
    assert arena.capacity == given
    arena.close()


def test_room_is_page_aligned_and_accounted_for(arena: Arena) -> None:
    offsets = [arena.alloc(length) for length in (0, 1, PAGE, PAGE + 1)]
    assert all(offset is not None and offset % PAGE == 0 for offset in offsets)
    assert arena.used_bytes == 5 * PAGE
    assert offsets[-1] is not None
    arena.free(offsets[-1], PAGE + 1)
    assert arena.used_bytes == 3 * PAGE
    assert arena.alloc(arena.capacity) is None


def resident(arena: Arena) -> int:
    return os.fstat(arena.fd).st_blocks * 512


def test_pages_are_the_daemons_before_they_are_lent() -> None:
    """Faulted in from the low end by a thread: what is not there yet is not lent, what lies far above is not yet."""
    arena = Arena(1 << 30)
    try:
        grown = threading.Event()
        arena.when_grown(grown.set)
        while (offset := arena.alloc(500 << 20)) is None:
            assert arena.grows_for((500 << 20) // PAGE)
            assert grown.wait(10)
            grown.clear()
        assert offset == 0
        assert resident(arena) >= 500 << 20
        wait_until(lambda: resident(arena) >= 600 << 20, what="the background thread to keep ahead")
        assert resident(arena) < 900 << 20
        assert not arena.grows_for((600 << 20) // PAGE), "no thread brings more than the arena has"
    finally:
        arena.close()


def test_asking_for_room_never_faults_pages_in_by_itself() -> None:
    """That would stop the event loop for as long as it takes."""
    arena = Arena(1 << 30)
    try:
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        for _ in range(2000):
            if arena.alloc(1 << 20) is None:
                arena.grows_for(256)
        assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < 256
    finally:
        arena.close()


def test_a_host_without_memory_for_all_of_it_serves_what_there_is(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """A cgroup's limit shows as an madvise that fails with ENOMEM."""
    arena = Arena(64 << 20)
    try:
        arena.settle(32 << 20)
        monkeypatch.setattr("kvd.store.arena._libc", _Denying())
        while arena.grows_for(arena.capacity // PAGE - arena.extents.top) and "no memory" not in caplog.text:
            threading.Event().wait(0.01)
        assert "no memory for more of the arena" in caplog.text
        assert not arena.grows_for(arena.capacity // PAGE)
        ready = arena.ready_bytes
        assert arena.extents.ready_pages * PAGE == ready < arena.capacity
        assert arena.alloc(ready) == 0
        assert arena.alloc(1) is None
        monkeypatch.undo()
        monkeypatch.setattr("kvd.store.arena.RETRY_S", 0.0)
        assert arena.grows_for(1), "it is tried again"
        arena.settle(arena.capacity)
        assert arena.alloc(1) == ready
    finally:
        arena.close()


class _Denying:
    """A libc whose host has no memory left."""

    def madvise(self, address: int, length: int, advice: int) -> int:
        ctypes.set_errno(errno.ENOMEM)
        return -1


def test_locked_pages_are_locked_and_a_limit_is_said_aloud(caplog: pytest.LogCaptureFixture) -> None:
    arena = Arena(8 << 20, mlock=True)
    try:
        arena.settle(8 << 20)
        with open("/proc/self/status") as status:
            locked = next(int(line.split()[1]) for line in status if line.startswith("VmLck")) << 10
        if arena.locked:
            assert locked >= 8 << 20
        else:
            assert "cannot be locked in memory" in caplog.text
    finally:
        arena.close()


def test_a_numa_node_is_asked_for_and_one_that_is_not_there_is_said_aloud(caplog: pytest.LogCaptureFixture) -> None:
    arena = Arena(1 << 20, numa_node=0)
    try:
        if arena.numa_node == 0:  # a kernel without NUMA says that it knows no such call
            maps = Path("/proc/self/numa_maps").read_text()
            assert re.search(r"prefer[^ ]*:0 .*kvd-arena", maps), maps
        else:
            assert "not to be had" in caplog.text
    finally:
        arena.close()
    arena = Arena(1 << 20, numa_node=900)
    try:
        assert arena.numa_node is None
        assert "NUMA node 900 asked for and not to be had" in caplog.text
        assert arena.alloc(1) == 0
    finally:
        arena.close()


def test_closing_lets_go_of_both_descriptors_and_the_thread() -> None:
    arena = Arena(4 << 20)
    arena.close()
    for fd in (arena.fd, arena.read_only_fd):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
    assert not arena._thread.is_alive()


def test_huge_pages_that_are_not_to_be_had_are_said_aloud(caplog: pytest.LogCaptureFixture) -> None:
    with open("/proc/meminfo") as info:
        free = next(int(line.split()[1]) for line in info if line.startswith("HugePages_Free"))
    arena = Arena(4 << 20, huge=True)
    try:
        if free >= 2:
            assert arena.huge
        else:
            assert not arena.huge
            assert "huge pages asked for and not to be had" in caplog.text
        assert arena.capacity == 4 << 20
        assert arena.alloc(1 << 20) is not None
    finally:
        arena.close()


def test_an_arena_that_cannot_be_mapped_is_one_plain_error() -> None:
    with pytest.raises(KvdError, match="arena of"):
        Arena(1 << 50)


@pytest.mark.parametrize(
    ("setting", "large"),
    [
        ("always within_size [advise] never deny force", True),
        ("[always] within_size advise never deny force", True),
        ("always within_size advise [never] deny force", False),
        ("always within_size advise never [deny] force", False),
        ("", False),
        (None, False),
    ],
)
def test_what_the_host_says_of_large_pages(
    setting: str | None, large: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arenas, "SHMEM_PAGES", tmp_path / "shmem_enabled")
    if setting is not None:
        (tmp_path / "shmem_enabled").write_text(setting + "\n")
    assert arenas.shared_memory_has_large_pages() is large
