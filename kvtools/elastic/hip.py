"""AMD: HIP's virtual memory management (hipMem*). Written from its documentation; see README for what ran."""

import ctypes

from kvtools.elastic.dlpack import ROCM
from kvtools.elastic.driver import Driver, DriverMemory

LIBRARIES = ("libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6")
NAMES = {
    "granularity": "hipMemGetAllocationGranularity",
    "reserve": "hipMemAddressReserve",
    "free": "hipMemAddressFree",
    "create": "hipMemCreate",
    "release": "hipMemRelease",
    "map": "hipMemMap",
    "unmap": "hipMemUnmap",
    "access": "hipMemSetAccess",
    "info": "hipMemGetInfo",
    "synchronize": "hipDeviceSynchronize",
    "current": "hipSetDevice",
    "uuid": "hipDeviceGetUuid",
}


class HipDriver(Driver):
    """libamdhip64. The device is set in each thread that calls."""

    def __init__(self, libraries: tuple[str, ...] = LIBRARIES) -> None:
        super().__init__(libraries, NAMES, "AMD's HIP runtime")

    def words(self, status: int) -> str:
        describe = self.function("hipGetErrorString")
        describe.restype = ctypes.c_char_p
        text: bytes | None = describe(ctypes.c_int(status))
        return (text or b"unknown error").decode()

    def use(self, device: int) -> None:
        self.call("current", ctypes.c_int(device))

    def uuid(self, device: int) -> str:
        found = (ctypes.c_char * 16)()
        self.call("uuid", found, ctypes.c_int(device))
        return f"GPU-{bytes(found).decode(errors='replace')}"


class HipMemory(DriverMemory):
    kind = "hip"
    DLPACK = ROCM

    def __init__(self, size: int, *, device: int = 0, min_free_bytes: int = 0, driver: Driver | None = None) -> None:
        super().__init__(driver or HipDriver(), size, device=device, min_free_bytes=min_free_bytes)
