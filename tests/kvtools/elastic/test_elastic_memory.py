"""CPU memory: what is mapped exists, what is not costs nothing and reads as zeros, and the kernel says the same."""

import ctypes
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtools.elastic.cpu import CpuMemory
from kvtools.elastic.memory import OutOfMemory, open_memory
from kvtools.errors import UsageError

MIB = 1 << 20


@pytest.fixture
def memory() -> Iterator[CpuMemory]:
    one = CpuMemory(64 * MIB)
    yield one
    one.close()


def put(memory: CpuMemory, offset: int, length: int, byte: int) -> None:
    ctypes.memset(memory.address + offset, byte, length)


def get(memory: CpuMemory, offset: int, length: int) -> bytes:
    return ctypes.string_at(memory.address + offset, length)


def smaps(memory: CpuMemory) -> dict[str, int]:
    """Rss and Private_Dirty of this process's view of the memory, summed, in bytes."""
    found = {"Rss": 0}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and ":" not in head:
            start, end = (int(part, 16) for part in head.split("-"))
            inside = start >= memory.address and end <= memory.address + memory.size and "memfd" in line
        elif inside and head == "Rss:":
            found["Rss"] += int(line.split()[1]) * 1024
    return found


def test_reserving_costs_nothing(memory: CpuMemory) -> None:
    assert memory.resident_bytes == 0
    assert get(memory, 0, MIB) == bytes(MIB)
    assert get(memory, 63 * MIB, MIB) == bytes(MIB)
    assert memory.resident_bytes == 0
    assert smaps(memory)["Rss"] == 0


def test_what_is_mapped_and_touched_is_there_and_what_is_unmapped_is_given_back(memory: CpuMemory) -> None:
    memory.map(2 * MIB, 8 * MIB)
    assert memory.resident_bytes == 0, "first touch makes it"
    put(memory, 2 * MIB, 8 * MIB, 7)
    assert memory.resident_bytes == 8 * MIB
    assert smaps(memory)["Rss"] == 8 * MIB
    memory.unmap(4 * MIB, 4 * MIB)
    assert memory.resident_bytes == 4 * MIB
    assert smaps(memory)["Rss"] == 4 * MIB
    assert memory.mapped_bytes == 4 * MIB
    assert get(memory, 2 * MIB, 8 * MIB) == b"\7" * (2 * MIB) + bytes(4 * MIB) + b"\7" * (2 * MIB)
    memory.map(4 * MIB, 4 * MIB)
    assert get(memory, 4 * MIB, 4 * MIB) == bytes(4 * MIB), "contents do not come back"


def test_a_write_to_what_is_not_mapped_is_a_fault() -> None:
    code = (
        "import ctypes; from kvtools.elastic.cpu import CpuMemory; m = CpuMemory(1 << 20); m.map(0, 4096);"
        "ctypes.memset(m.address, 1, 4096); print('fine', flush=True); ctypes.memset(m.address + 4096, 1, 1)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert (ran.stdout, ran.returncode) == ("fine\n", -signal.SIGSEGV)


def test_adjacent_maps_are_one_area_for_the_kernel(memory: CpuMemory) -> None:
    for i in range(32):
        memory.map(i * MIB, MIB)
    areas = [line for line in Path("/proc/self/maps").read_text().splitlines() if "kvtools-elastic" in line]
    assert len([line for line in areas if int(line.split("-")[0], 16) >= memory.address]) == 1


def test_a_floor_of_free_memory_is_kept(memory: CpuMemory) -> None:
    free = memory.device_memory().free_bytes
    assert 0 < free <= memory.device_memory().total_bytes
    memory.min_free_bytes = free + (8 << 30)
    with pytest.raises(OutOfMemory, match=r"must stay free"):
        memory.map(0, MIB)
    assert memory.mapped_bytes == 0
    memory.min_free_bytes = 0
    memory.map(0, MIB)


@pytest.mark.parametrize(("offset", "length"), [(1, 4096), (0, 100), (0, 0), (-4096, 4096), (64 * MIB, 4096), (0, 65 * MIB)])
def test_what_is_no_part_of_the_range_is_an_error(memory: CpuMemory, offset: int, length: int) -> None:
    with pytest.raises(UsageError):
        memory.map(offset, length)
    with pytest.raises(UsageError):
        memory.unmap(offset, length)


def test_back_ends_by_name() -> None:
    with pytest.raises(UsageError, match="no elastic memory on 'tpu'"):
        open_memory("tpu", MIB)
    with pytest.raises(UsageError, match="cannot reserve 0 bytes"):
        open_memory("cpu", 0)
    one = open_memory("cpu", 100)
    assert (one.size, one.kind, one.uuid) == (4096, "cpu", "")
    one.synchronize()
    one.close()
    one.close()
