"""The arena's memory object: sealed, read-only for readers, prefaulted, and told apart when it cannot be had."""

import fcntl
import mmap
import os
from collections.abc import Iterator

import pytest

from kvd.errors import KvdError
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


def test_pages_are_the_daemons_before_they_are_lent() -> None:
    """Faulted in from the low end: what is lent is resident, what lies far above is not yet."""
    arena = Arena(1 << 30)
    try:
        offset = arena.alloc(64 << 20)
        assert offset == 0
        assert os.fstat(arena.fd).st_blocks * 512 >= 64 << 20
        wait_until(lambda: os.fstat(arena.fd).st_blocks * 512 >= 128 << 20, what="the background thread to keep ahead")
        assert os.fstat(arena.fd).st_blocks * 512 < 600 << 20
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
