"""The calls to NVIDIA's and AMD's drivers, against a stand-in that is compiled here from the documented signatures.

It shows that what is called exists in that form, in a right order, and that every failure is an exception which leaves nothing
behind. It is no GPU: README says so.
"""

import ctypes
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtools.elastic.cuda import CudaDriver, CudaMemory
from kvtools.elastic.driver import Driver, DriverMemory
from kvtools.elastic.geometry import PageMemory
from kvtools.elastic.hip import HipDriver, HipMemory
from kvtools.elastic.memory import DriverError, OutOfMemory, open_memory
from tests.kvtools.elastic.conftest import small_geometry

GRANULE = 2 << 20
Memory = Callable[..., DriverMemory]
KINDS: dict[str, tuple[Callable[[tuple[str, ...]], Driver], type[DriverMemory]]] = {
    "cuda": (CudaDriver, CudaMemory),
    "hip": (HipDriver, HipMemory),
}


@pytest.fixture(scope="module", params=["cuda", "hip"])
def driver(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Driver:
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler, "a C compiler makes the stand-in (Debian: gcc)"
    library = tmp_path_factory.mktemp("driver") / f"lib{request.param}.so"
    source = Path(__file__).parent / "stand_in.c"
    define = f"-D{request.param.upper()}"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-Wall", define, "-o", str(library), str(source)], check=True)
    return KINDS[request.param][0]((str(library),))


@pytest.fixture
def memory(driver: Driver) -> Iterator[Memory]:
    kind = CudaMemory if isinstance(driver, CudaDriver) else HipMemory
    made: list[DriverMemory] = []

    def make(size: int, **options: int) -> DriverMemory:
        made.append(kind(size, driver=driver, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    room(driver, 1 << 40)
    fail_map(driver, -1)
    for one in made:
        one.close()
    assert live(driver) == 0, "handles that nobody gave back"


def room(driver: Driver, size: int) -> None:
    ctypes.c_size_t.in_dll(driver._library, "stand_in_room").value = size


def fail_map(driver: Driver, n: int) -> None:
    driver.function("stand_in_fail_map")(n)


def live(driver: Driver) -> int:
    return int(driver.function("stand_in_live")())


def test_map_use_unmap(driver: Driver, memory: Memory) -> None:
    one = memory(9 * GRANULE - 5, device=1)
    assert (one.granularity, one.size) == (GRANULE, 9 * GRANULE)
    one.map(2 * GRANULE, 3 * GRANULE)
    ctypes.memset(one.address + 2 * GRANULE, 7, 3 * GRANULE)
    assert ctypes.string_at(one.address + 5 * GRANULE - 1, 1) == b"\7"
    assert (one.mapped_bytes, live(driver)) == (3 * GRANULE, 3)
    one.unmap(3 * GRANULE, GRANULE)
    assert (one.mapped_bytes, live(driver)) == (2 * GRANULE, 2)
    one.synchronize()
    assert one.device_memory() == (1 << 40, (1 << 40) - 2 * GRANULE)
    assert one.device_memory().used_bytes == 2 * GRANULE


def test_pages_of_a_cache(driver: Driver, memory: Memory) -> None:
    geometry = small_geometry(GRANULE, blocks=1024)
    one = memory(4 * 1024 * (16 << 10))
    pages = PageMemory(one, geometry)
    pages.map([0, 1, 2, 3])
    assert live(driver) == 16
    pages.unmap([1, 2])
    assert live(driver) == 8


def test_no_room_is_an_exception_and_nothing_stays_mapped(driver: Driver, memory: Memory) -> None:
    one = memory(8 * GRANULE)
    room(driver, 3 * GRANULE)
    with pytest.raises(OutOfMemory, match=r"MemCreate failed: out of memory \(2\)"):
        one.map(0, 4 * GRANULE)
    assert (one.mapped_bytes, live(driver)) == (0, 0)
    one.map(0, 3 * GRANULE)
    room(driver, 8 * GRANULE)
    one.min_free_bytes = 4 * GRANULE
    one.map(3 * GRANULE, GRANULE)
    with pytest.raises(OutOfMemory, match="8 MiB free, and 8 MiB must stay free"):
        one.map(4 * GRANULE, GRANULE)


def test_any_other_failure_is_an_exception_that_names_the_call(driver: Driver, memory: Memory) -> None:
    one = memory(8 * GRANULE)
    fail_map(driver, 2)
    with pytest.raises(DriverError, match=r"(cu|hip)MemMap failed: invalid argument \(999\)"):
        one.map(0, 4 * GRANULE)
    assert (one.mapped_bytes, live(driver)) == (0, 0)
    fail_map(driver, -1)
    one.map(0, 4 * GRANULE)


def test_another_thread_has_the_device_too(memory: Memory) -> None:
    one = memory(4 * GRANULE, device=1)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            one.map(0, 2 * GRANULE)
            ctypes.memset(one.address, 1, 2 * GRANULE)
            one.unmap(0, 2 * GRANULE)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert errors == []


def test_uuids_are_written_as_the_vendors_tools_do(driver: Driver) -> None:
    expected = "GPU-10111213-1415-1617-1819-1a1b1c1d1e1f" if isinstance(driver, CudaDriver) else "GPU-9b07c5e3d81f0001"
    assert driver.uuid(1) == expected


def test_a_device_that_is_not_there(memory: Memory) -> None:
    with pytest.raises(DriverError, match=r"\(101\)"):
        memory(GRANULE, device=7)


@pytest.mark.parametrize("kind", ["cuda", "hip"])
def test_a_host_without_the_driver(kind: str) -> None:
    with pytest.raises(DriverError, match=r"is not here: no /nowhere/lib\.so") as caught:
        KINDS[kind][0](("/nowhere/lib.so",))
    assert "install the GPU's driver" in caught.value.hint


@pytest.mark.parametrize("kind", ["cuda", "hip"])
def test_a_driver_too_old(kind: str) -> None:
    with pytest.raises(DriverError, match=r"has no (cu|hip)MemGetAllocationGranularity") as caught:
        KINDS[kind][0](("libc.so.6",))
    assert "too old for elastic memory" in caught.value.hint


@pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="needs an NVIDIA GPU")
def test_a_real_nvidia_gpu() -> None:
    one = open_memory("cuda", 64 << 20)
    one.map(0, one.granularity)
    one.unmap(0, one.granularity)
    one.close()


@pytest.mark.skipif(not Path("/dev/kfd").exists(), reason="needs an AMD GPU")
def test_a_real_amd_gpu() -> None:
    one = open_memory("hip", 64 << 20)
    one.map(0, one.granularity)
    one.unmap(0, one.granularity)
    one.close()
