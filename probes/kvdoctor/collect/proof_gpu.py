"""Move bytes GPU -> file -> GPU through hipFile or cuFile and compare them: `python -I proof_gpu.py LIBRARY FILE [LIB HIP]`.

LIBRARY is hipfile or cufile; both have the same calls under two names. FILE must not exist: it is made, and unlinked at the
end by this script and again by its parent. The parent sets strict mode in the environment, so that what the library would
quietly copy through the CPU is an error here. Standard library only. Prints lines of JSON; `step` names the call that failed.
"""

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable

SIZE = 64 << 20
REQUEST = 16 << 20
OPAQUE_FD = 1


class Failed(Exception):
    """A call did not succeed; the text names it."""


class Status(ctypes.Structure):
    """CUfileError_t and hipFileError_t: the library's error and the driver's."""

    _fields_ = (("err", ctypes.c_int), ("driver", ctypes.c_int))


class Handle(ctypes.Union):
    _fields_ = (("fd", ctypes.c_int), ("pointer", ctypes.c_void_p))


class Description(ctypes.Structure):
    """CUfileDescr_t and hipFileDescr_t."""

    _fields_ = (("type", ctypes.c_int), ("handle", Handle), ("fs_ops", ctypes.c_void_p))


def say(**found: object) -> None:
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


def check(code: int, step: str) -> None:
    if code != 0:
        raise Failed(f"{step} failed with {code}")


class Memory:
    """SIZE bytes of GPU memory, by the driver that belongs to the library."""

    def __init__(self, library: str, hip_path: str) -> None:
        self.pointer = ctypes.c_uint64(0)
        self.copy_in: Callable[[ctypes.Array[ctypes.c_char]], None]
        self.copy_out: Callable[[ctypes.Array[ctypes.c_char]], None]
        if library == "cufile":
            self._cuda(ctypes.CDLL("libcuda.so.1"))
        else:
            self._hip(ctypes.CDLL(hip_path))

    def _cuda(self, cuda: ctypes.CDLL) -> None:
        device, context = ctypes.c_int(0), ctypes.c_void_p()
        check(cuda.cuInit(0), "cuInit")
        check(cuda.cuDeviceGet(ctypes.byref(device), 0), "cuDeviceGet")
        check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "cuDevicePrimaryCtxRetain")
        check(cuda.cuCtxSetCurrent(context), "cuCtxSetCurrent")
        check(cuda.cuMemAlloc_v2(ctypes.byref(self.pointer), ctypes.c_size_t(SIZE)), "cuMemAlloc")
        self.copy_in = lambda data: check(cuda.cuMemcpyHtoD_v2(self.pointer, data, ctypes.c_size_t(SIZE)), "cuMemcpyHtoD")
        self.copy_out = lambda data: check(cuda.cuMemcpyDtoH_v2(data, self.pointer, ctypes.c_size_t(SIZE)), "cuMemcpyDtoH")

    def _hip(self, hip: ctypes.CDLL) -> None:
        pointer = ctypes.c_void_p()
        check(hip.hipMalloc(ctypes.byref(pointer), ctypes.c_size_t(SIZE)), "hipMalloc")
        self.pointer.value = pointer.value or 0
        to_device, to_host = 1, 2
        self.copy_in = lambda data: check(hip.hipMemcpy(pointer, data, ctypes.c_size_t(SIZE), to_device), "hipMemcpy to the GPU")
        self.copy_out = lambda data: check(hip.hipMemcpy(data, pointer, ctypes.c_size_t(SIZE), to_host), "hipMemcpy from the GPU")


class Library:
    """The six calls, under the names of hipFile or cuFile."""

    def __init__(self, name: str, path: str) -> None:
        library = ctypes.CDLL(path)
        prefix = "hipFile" if name == "hipfile" else "cuFile"
        self.prefix = prefix
        for call in ("DriverOpen", "HandleRegister", "BufRegister"):
            getattr(library, prefix + call).restype = Status
        for call in ("Read", "Write"):
            function = getattr(library, prefix + call)
            function.restype = ctypes.c_ssize_t
            function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_long, ctypes.c_long)
        self.library = library

    def call(self, name: str, *arguments: object) -> None:
        status = getattr(self.library, self.prefix + name)(*arguments)
        if status.err:
            raise Failed(f"{self.prefix}{name} failed with {status.err} (driver {status.driver})")

    def move(self, name: str, handle: ctypes.c_void_p, pointer: int) -> float:
        """SIZE bytes in requests; seconds."""
        function = getattr(self.library, self.prefix + name)
        started = time.perf_counter()
        for offset in range(0, SIZE, REQUEST):
            done = function(handle, pointer, REQUEST, offset, offset)
            if done != REQUEST:
                raise Failed(f"{self.prefix}{name} moved {done} of {REQUEST} bytes at offset {offset}")
        return time.perf_counter() - started


def counters() -> int | None:
    """Bytes that nvidia-fs or the KFD of this process has counted as peer DMA, None where neither counts."""
    total: int | None = None
    for folder, names, _ in os.walk(f"/sys/class/kfd/kfd/proc/{os.getpid()}"):
        del names
        for name in os.listdir(folder):  # noqa: PTH208 - this script does without pathlib
            if name.endswith((":PCI_in", ":PCI_out")):
                with open(os.path.join(folder, name)) as file:  # noqa: PTH118, PTH123
                    text = file.read().strip()
                total = (total or 0) + (int(text) if text.isdecimal() else 0)
    return total


def work(library: Library, memory: Memory, path: str) -> None:
    handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.posix_fallocate(handle, 0, SIZE)
        library.call("DriverOpen")
        description = Description(type=OPAQUE_FD, handle=Handle(fd=handle), fs_ops=None)
        registered = ctypes.c_void_p()
        library.call("HandleRegister", ctypes.byref(registered), ctypes.byref(description))
        library.call("BufRegister", ctypes.c_void_p(memory.pointer.value), ctypes.c_size_t(SIZE), 0)
        sent = ctypes.create_string_buffer(os.urandom(1 << 20) * (SIZE >> 20), SIZE)
        memory.copy_in(sent)
        before = counters()
        seconds = library.move("Write", registered, memory.pointer.value)
        say(bytes=SIZE, write_bytes_per_s=SIZE / seconds)
        memory.copy_in(ctypes.create_string_buffer(SIZE))
        seconds = library.move("Read", registered, memory.pointer.value)
        back = ctypes.create_string_buffer(SIZE)
        memory.copy_out(back)
        after = counters()
        counted = None if after is None else after - (before or 0)
        say(read_bytes_per_s=SIZE / seconds, same=back.raw == sent.raw, counted=counted)
    finally:
        os.close(handle)
        os.unlink(path)  # noqa: PTH108


def main() -> None:
    name, path = sys.argv[1], sys.argv[2]
    where = sys.argv[3] if len(sys.argv) > 3 else "libcufile.so.0"
    hip_path = sys.argv[4] if len(sys.argv) > 4 else "libamdhip64.so"
    try:
        work(Library(name, where), Memory(name, hip_path), path)
    except Failed as error:
        say(error=str(error), step=str(error).split(" ", 1)[0])
    except (OSError, AttributeError) as error:
        say(error=str(error), step="load")


if __name__ == "__main__":
    main()
