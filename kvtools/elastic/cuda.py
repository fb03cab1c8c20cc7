"""NVIDIA: libcuda's virtual memory management, the driver API (cuMem*). Written from its documentation; see README for what ran."""

import ctypes

from kvtools.elastic.dlpack import CUDA
from kvtools.elastic.driver import Driver, DriverMemory
from kvtools.elastic.memory import DriverError

LIBRARIES = ("libcuda.so.1", "libcuda.so")
NAMES = {
    "granularity": "cuMemGetAllocationGranularity",
    "reserve": "cuMemAddressReserve",
    "free": "cuMemAddressFree",
    "create": "cuMemCreate",
    "release": "cuMemRelease",
    "map": "cuMemMap",
    "unmap": "cuMemUnmap",
    "access": "cuMemSetAccess",
    "info": "cuMemGetInfo_v2",
    "synchronize": "cuCtxSynchronize",
    "init": "cuInit",
    "device": "cuDeviceGet",
    "retain": "cuDevicePrimaryCtxRetain",
    "current": "cuCtxSetCurrent",
    "uuid": "cuDeviceGetUuid",
}


class CudaDriver(Driver):
    """libcuda. The primary context is retained once a device and set in each thread that calls."""

    def __init__(self, libraries: tuple[str, ...] = LIBRARIES) -> None:
        super().__init__(libraries, NAMES, "NVIDIA's driver")
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self.call("init", ctypes.c_uint(0))

    def words(self, status: int) -> str:
        text = ctypes.c_char_p()
        self.function("cuGetErrorString")(ctypes.c_int(status), ctypes.byref(text))
        return (text.value or b"unknown error").decode()

    def _device(self, device: int) -> ctypes.c_int:
        found = ctypes.c_int()
        self.call("device", ctypes.byref(found), ctypes.c_int(device))
        return found

    def use(self, device: int) -> None:
        context = self._contexts.get(device)
        if context is None:
            context = ctypes.c_void_p()
            self.call("retain", ctypes.byref(context), self._device(device))
            if not context.value:
                raise DriverError(f"NVIDIA's driver gave no context for device {device}")
            self._contexts[device] = context
        self.call("current", context)

    def uuid(self, device: int) -> str:
        import uuid

        found = (ctypes.c_uint8 * 16)()
        self.call("uuid", found, self._device(device))
        return f"GPU-{uuid.UUID(bytes=bytes(found))}"


class CudaMemory(DriverMemory):
    kind = "cuda"
    DLPACK = CUDA

    def __init__(self, size: int, *, device: int = 0, min_free_bytes: int = 0, driver: Driver | None = None) -> None:
        super().__init__(driver or CudaDriver(), size, device=device, min_free_bytes=min_free_bytes)
