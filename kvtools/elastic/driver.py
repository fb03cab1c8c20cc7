"""Elastic memory on a GPU: the virtual memory calls of NVIDIA's driver and of HIP, which differ in names only.

Reserve an address range; create a handle of physical memory a granule, map it, and allow access; unmap, release. A handle is
as large as the granularity the driver names (2 MiB on today's GPUs): handles cannot be unmapped in part. Structures are those
of cuda.h (driver API 10.2 and later) and hip_runtime_api.h (5.2 and later), laid out alike in both.

Errors: each call's status is checked; "out of memory" is OutOfMemory, all else DriverError with the call's name and the
driver's own words. A map that fails half-way takes back what it had mapped.

The pages belong to the primary context, which torch uses too; it is made current in whichever thread calls.
"""

import ctypes
from collections.abc import Mapping

from kvtools.elastic.memory import DeviceMemory, DriverError, OutOfMemory, VirtualMemory

OUT_OF_MEMORY = 2
_PINNED, _DEVICE, _READ_WRITE, _MINIMUM = 1, 1, 3, 0


class Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class AllocationProperties(ctypes.Structure):
    """CUmemAllocationProp and hipMemAllocationProp: 32 bytes each, the last eight of them flags that stay zero."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("win32_meta", ctypes.c_void_p),
        ("flags", ctypes.c_uint8 * 8),
    )


class AccessDescription(ctypes.Structure):
    _fields_ = (("location", Location), ("flags", ctypes.c_int))


Handle = ctypes.c_uint64
_SIZE, _POINTER = ctypes.c_size_t, ctypes.c_uint64

SIGNATURES = {
    "granularity": (ctypes.POINTER(_SIZE), ctypes.POINTER(AllocationProperties), ctypes.c_int),
    "reserve": (ctypes.POINTER(_POINTER), _SIZE, _SIZE, _POINTER, ctypes.c_uint64),
    "free": (_POINTER, _SIZE),
    "create": (ctypes.POINTER(Handle), _SIZE, ctypes.POINTER(AllocationProperties), ctypes.c_uint64),
    "release": (Handle,),
    "map": (_POINTER, _SIZE, _SIZE, Handle, ctypes.c_uint64),
    "unmap": (_POINTER, _SIZE),
    "access": (_POINTER, _SIZE, ctypes.POINTER(AccessDescription), _SIZE),
    "info": (ctypes.POINTER(_SIZE), ctypes.POINTER(_SIZE)),
    "synchronize": (),
}
"""What the two drivers have in common, by what it does."""


class Driver:
    """The functions of one driver's library, by what they do; a failed call is an exception."""

    def __init__(self, libraries: tuple[str, ...], names: Mapping[str, str], what: str) -> None:
        self.what = what
        self._library = _load(libraries, what)
        self._calls = {}
        for verb, name in names.items():
            try:
                call = self._library[name]
            except AttributeError:
                raise DriverError(f"{what} has no {name}", hint="its driver is too old for elastic memory") from None
            if verb in SIGNATURES:
                call.argtypes = SIGNATURES[verb]
            call.restype = ctypes.c_int
            self._calls[verb] = call
        self._names = names

    def words(self, status: int) -> str:
        """The driver's own words for `status`."""
        raise NotImplementedError

    def use(self, device: int) -> None:
        """Make the primary context of `device` current in this thread."""
        raise NotImplementedError

    def uuid(self, device: int) -> str:
        raise NotImplementedError

    def function(self, name: str) -> "ctypes._NamedFuncPointer":
        """Another function of the library."""
        return self._library[name]

    def call(self, verb: str, *arguments: object) -> None:
        """Raises OutOfMemory, DriverError."""
        status = self._calls[verb](*arguments)
        if status == 0:
            return
        kind = OutOfMemory if status == OUT_OF_MEMORY else DriverError
        raise kind(f"{self._names[verb]} failed: {self.words(status)} ({status})")


def _load(libraries: tuple[str, ...], what: str) -> ctypes.CDLL:
    for name in libraries:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    missing = " or ".join(libraries)
    raise DriverError(f"{what} is not here: no {missing}", hint="install the GPU's driver, or mount it into the container")


class DriverMemory(VirtualMemory):
    """Handles of one granule each, mapped into one reserved range."""

    def __init__(self, driver: Driver, size: int, *, device: int = 0, min_free_bytes: int = 0) -> None:
        self.driver = driver
        driver.use(device)
        self._properties = AllocationProperties(type=_PINNED, location=Location(_DEVICE, device))
        granularity = _SIZE()
        driver.call("granularity", ctypes.byref(granularity), ctypes.byref(self._properties), _MINIMUM)
        super().__init__(size, granularity.value, device=device, min_free_bytes=min_free_bytes)
        self._access = AccessDescription(Location(_DEVICE, device), _READ_WRITE)
        self._handles: dict[int, Handle] = {}
        address = _POINTER()
        driver.call("reserve", ctypes.byref(address), self.size, 0, 0, 0)
        self.address = address.value

    def _map(self, offset: int, length: int) -> None:
        self.driver.use(self.device)
        begun = range(offset, offset + length, self.granularity)
        try:
            for at in begun:
                self._map_granule(at)
            self.driver.call("access", self.address + offset, length, ctypes.byref(self._access), 1)
        except BaseException:
            for at in begun:
                if at in self._handles:
                    self._unmap_granule(at)
            raise

    def _map_granule(self, at: int) -> None:
        handle = Handle()
        self.driver.call("create", ctypes.byref(handle), self.granularity, ctypes.byref(self._properties), 0)
        try:
            self.driver.call("map", self.address + at, self.granularity, 0, handle, 0)
        except BaseException:
            self.driver.call("release", handle)
            raise
        self._handles[at] = handle

    def _unmap(self, offset: int, length: int) -> None:
        self.driver.use(self.device)
        for at in range(offset, offset + length, self.granularity):
            if at in self._handles:  # not those that an attempt before this one has unmapped
                self._unmap_granule(at)

    def _unmap_granule(self, at: int) -> None:
        self.driver.call("unmap", self.address + at, self.granularity)
        self.driver.call("release", self._handles.pop(at))

    def synchronize(self) -> None:
        self.driver.use(self.device)
        self.driver.call("synchronize")

    @property
    def uuid(self) -> str:
        return self.driver.uuid(self.device)

    def device_memory(self) -> DeviceMemory:
        self.driver.use(self.device)
        free, total = _SIZE(), _SIZE()
        self.driver.call("info", ctypes.byref(free), ctypes.byref(total))
        return DeviceMemory(total.value, free.value)

    def close(self) -> None:
        if not self.address:
            return
        self.driver.use(self.device)
        for at in list(self._handles):
            self._unmap_granule(at)
        self.driver.call("free", self.address, self.size)
        self.address = self.mapped_bytes = 0
