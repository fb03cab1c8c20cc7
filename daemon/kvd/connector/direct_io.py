"""Moving bytes between a file and a buffer: hipFile (AMD), cuFile (NVIDIA), or plain preadv and pwritev.

    io = open_io("cufile")                       # or raises DirectError, whose `reason` is one word
    io.register(buffer)
    with io.opened(path) as file: io.read(file, buffer, length, offset)

The two libraries have one interface under two names (the header of each is the other's with another prefix), so there is one
binding, by ctypes. Both would rather fall back to copies through the host, without a word, than fail: that is forbidden
them (`..._ALLOW_COMPAT_MODE=false`) before they are loaded, because whoever asked for GPU-direct must learn that there is none.

Contract: offsets and lengths in a file are multiples of ALIGN, buffers begin at such an address. A call transfers all it was
asked for or raises DirectError. Nothing is on stable storage before `sync`. Concurrency: any thread; calls let go of the GIL.
"""

import contextlib
import ctypes
import ctypes.util
import errno
import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

ALIGN = 4096
OPEN_FILES = 64
"""Files kept open for the next call, at most."""
_LIBRARIES = {
    "hipfile": ("hipFile", ("libhipfile.so", "libhipfile.so.0", "/opt/rocm/lib/libhipfile.so"), "HIPFILE"),
    "cufile": ("cuFile", ("libcufile.so.0", "libcufile.so", "/usr/local/cuda/lib64/libcufile.so.0"), "CUFILE"),
}
BACKENDS = (*_LIBRARIES, "posix")
_MOST = 1 << 30
"""Bytes in one call of a library, which takes no 2 GiB."""

_WORDS = {
    5001: "driver_not_loaded",
    5002: "invalid_properties",
    5003: "unsupported_limit",
    5004: "version_mismatch",
    5005: "version_mismatch",
    5006: "driver_closing",
    5007: "platform_unsupported",
    5008: "file_unsupported",
    5009: "device_unsupported",
    5010: "driver_error",
    5011: "gpu_driver_error",
    5012: "bad_pointer",
    5013: "bad_memory_type",
    5014: "bad_pointer",
    5015: "context_mismatch",
    5018: "file_unsupported",
    5019: "no_o_direct",
    5020: "no_o_direct",
    5022: "invalid_value",
    5025: "permission_denied",
    5033: "driver_setup",
    5034: "io_disabled",
    5036: "pinning_failed",
}
"""The libraries' error codes (equal in both), as one word each."""


class DirectError(Exception):
    """A transfer past the daemon cannot be done. `reason`: one word, for the counter."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(eq=False, slots=True)
class Buffer:
    """Memory to read into and write from, aligned to ALIGN. `view`: the host's view of it, None on a device.

    `owner` keeps the memory alive: a mapping, or a tensor. `ready`: the event of what a device still writes into it, None
    where that is done.
    """

    address: int
    size: int
    view: memoryview | None
    owner: Any
    ready: Any = None


def host_buffer(size: int) -> Buffer:
    """Page-aligned memory of the host."""
    view = memoryview(mmap.mmap(-1, max(size, ALIGN)))
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    return Buffer(address, len(view), view, view)


@dataclass(eq=False, slots=True)
class File:
    """An open file. `handle`: the library's."""

    fd: int
    handle: Any = None
    users: int = 0


class DirectIO(Protocol):
    """One way to move bytes."""

    name: str
    device: bool
    """Whether buffers lie on the GPU."""

    def register(self, buffer: Buffer) -> None: ...

    def deregister(self, buffer: Buffer) -> None: ...

    def opened(self, path: Path) -> contextlib.AbstractContextManager[File]: ...

    def read(self, file: File, buffer: Buffer, length: int, offset: int) -> None: ...

    def write(self, file: File, buffer: Buffer, length: int, offset: int) -> None: ...

    def sync(self, file: File) -> None: ...

    def close(self) -> None: ...


class _Files:
    """Files kept open, the least recently used of those that nobody uses closed first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: OrderedDict[Path, File] = OrderedDict()

    def _attach(self, file: File) -> None:
        """Make a fresh file known to a library."""

    def _detach(self, file: File) -> None:
        """Undo that."""

    @contextlib.contextmanager
    def opened(self, path: Path) -> Iterator[File]:
        """The file, open for reading and writing past the page cache. Raises DirectError."""
        with self._lock:
            file = self._open.get(path)
            if file is None:
                file = self._open[path] = self._open_locked(path)
            self._open.move_to_end(path)
            file.users += 1
        try:
            yield file
        finally:
            with self._lock:
                file.users -= 1
                self._tidy_locked()

    def _tidy_locked(self) -> None:
        idle = [one for one, kept in self._open.items() if not kept.users]
        surplus = max(0, len(self._open) - OPEN_FILES)
        for place, one in enumerate(idle):
            # What the daemon has unlinked takes disk space as long as we hold it.
            if place < surplus or not os.fstat(self._open[one].fd).st_nlink:
                self._shut(self._open.pop(one))

    def _open_locked(self, path: Path) -> File:
        try:
            fd = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise _refused(path, error) from None
        file = File(fd)
        try:
            self._attach(file)
        except BaseException:
            os.close(fd)
            raise
        return file

    def _shut(self, file: File) -> None:
        self._detach(file)
        os.close(file.fd)

    def sync(self, file: File) -> None:
        """Return when what was written is on stable storage. Raises DirectError."""
        try:
            os.fdatasync(file.fd)
        except OSError as error:
            raise DirectError("io_error", f"fdatasync: {error.strerror}") from None

    def close(self) -> None:
        """Close what nobody uses."""
        with self._lock:
            for path in [path for path, file in self._open.items() if not file.users]:
                self._shut(self._open.pop(path))


def _refused(path: Path, error: OSError) -> DirectError:
    words = {
        errno.EINVAL: "no_o_direct",
        errno.EACCES: "permission_denied",
        errno.EPERM: "permission_denied",
        errno.ENOENT: "no_file",
    }
    return DirectError(words.get(error.errno or 0, "io_error"), f"cannot open {path}: {error.strerror}")


class PosixIO(_Files):
    """preadv and pwritev with O_DIRECT, for KV memory of the host: a file to its blocks without the arena in between."""

    name = "posix"
    device = False

    def register(self, buffer: Buffer) -> None:
        """Nothing to do."""

    def deregister(self, buffer: Buffer) -> None:
        """Nothing to do."""

    def read(self, file: File, buffer: Buffer, length: int, offset: int) -> None:
        self._all(os.preadv, file, buffer, length, offset)

    def write(self, file: File, buffer: Buffer, length: int, offset: int) -> None:
        self._all(os.pwritev, file, buffer, length, offset)

    def _all(self, call: Any, file: File, buffer: Buffer, length: int, offset: int) -> None:
        assert buffer.view is not None
        done = 0
        while done < length:
            try:
                count = call(file.fd, [buffer.view[done:length]], offset + done)
            except OSError as error:
                raise DirectError("io_error", f"{call.__name__}: {error.strerror}") from None
            # Of a short transfer only whole pages count: O_DIRECT goes on at none in between.
            count = count if done + count == length else count // ALIGN * ALIGN
            if not count:
                raise DirectError("short_transfer", f"{call.__name__} stopped at {done} of {length} bytes")
            done += count


class _Status(ctypes.Structure):
    """CUfileError_t, hipFileError_t: the library's error, and the GPU driver's."""

    _fields_ = (("err", ctypes.c_int), ("driver", ctypes.c_int))


class _Descriptor(ctypes.Structure):
    """CUfileDescr_t, hipFileDescr_t. The middle is a union of a descriptor and a pointer."""

    _fields_ = (("type", ctypes.c_int), ("fd", ctypes.c_int64), ("fs_ops", ctypes.c_void_p))


_OPAQUE_FD = 1


class LibraryIO(_Files):
    """hipFile or cuFile. Raises DirectError where the library is not there or will not start."""

    device = True

    def __init__(self, name: str, path: str | None = None) -> None:
        super().__init__()
        prefix, candidates, variable = _LIBRARIES[name]
        self.name = name
        self._prefix = prefix
        # Before the library is loaded: it reads this once.
        os.environ.setdefault(f"{variable}_ALLOW_COMPAT_MODE", "false")
        self._library = _load((path,) if path else candidates, name)
        self._declare()
        self._check("DriverOpen", self._call("DriverOpen"))

    def _declare(self) -> None:
        handle, size, offset = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64
        functions: dict[str, tuple[Any, tuple[Any, ...]]] = {
            "DriverOpen": (_Status, ()),
            "HandleRegister": (_Status, (ctypes.POINTER(handle), ctypes.POINTER(_Descriptor))),
            "HandleDeregister": (None, (handle,)),
            "BufRegister": (_Status, (ctypes.c_void_p, size, ctypes.c_int)),
            "BufDeregister": (_Status, (ctypes.c_void_p,)),
            "Read": (ctypes.c_ssize_t, (handle, ctypes.c_void_p, size, offset, offset)),
            "Write": (ctypes.c_ssize_t, (handle, ctypes.c_void_p, size, offset, offset)),
        }
        for word, (result, arguments) in functions.items():
            function = getattr(self._library, self._prefix + word, None)
            if function is None:
                raise DirectError("library_too_old", f"{self.name}: the library has no {self._prefix}{word}")
            function.restype, function.argtypes = result, arguments

    def _call(self, word: str, *arguments: Any) -> Any:
        return getattr(self._library, self._prefix + word)(*arguments)

    def _check(self, word: str, status: Any) -> None:
        if status.err:
            raise self._error(word, status.err, f" (GPU driver: {status.driver})" if status.driver else "")

    def _error(self, word: str, code: int, more: str = "") -> DirectError:
        reason = _WORDS.get(abs(code), f"error_{abs(code)}")
        return DirectError(reason, f"{self._prefix}{word}: {reason.replace('_', ' ')}, error {abs(code)}{more}")

    def register(self, buffer: Buffer) -> None:
        """Pin a buffer for the device's transfers. Raises DirectError."""
        self._check("BufRegister", self._call("BufRegister", buffer.address, buffer.size, 0))

    def deregister(self, buffer: Buffer) -> None:
        """Undo `register`; errors do not matter any more."""
        self._call("BufDeregister", buffer.address)

    def _attach(self, file: File) -> None:
        handle = ctypes.c_void_p()
        descriptor = _Descriptor(_OPAQUE_FD, file.fd, None)
        self._check("HandleRegister", self._call("HandleRegister", ctypes.byref(handle), ctypes.byref(descriptor)))
        file.handle = handle

    def _detach(self, file: File) -> None:
        self._call("HandleDeregister", file.handle)

    def read(self, file: File, buffer: Buffer, length: int, offset: int) -> None:
        self._all("Read", file, buffer, length, offset)

    def write(self, file: File, buffer: Buffer, length: int, offset: int) -> None:
        self._all("Write", file, buffer, length, offset)

    def _all(self, word: str, file: File, buffer: Buffer, length: int, offset: int) -> None:
        done = 0
        while done < length:
            ctypes.set_errno(0)
            count = self._call(word, file.handle, buffer.address, min(length - done, _MOST), offset + done, done)
            if count == -1:
                code = ctypes.get_errno()
                raise DirectError("io_error", f"{self._prefix}{word}: {os.strerror(code)}")
            if count < 0:
                raise self._error(word, count)
            count = count if done + count == length else count // ALIGN * ALIGN
            if not count:
                raise DirectError("short_transfer", f"{self._prefix}{word} stopped at {done} of {length} bytes")
            done += count


def _load(candidates: Sequence[str], name: str) -> ctypes.CDLL:
    problem = ""
    for candidate in candidates:
        try:
            return ctypes.CDLL(candidate, use_errno=True)
        except OSError as error:
            problem = str(error)
    raise DirectError("no_library", f"{name}: no library: {problem}")


def open_io(name: str, library: str | None = None) -> DirectIO:
    """The back end of that name (see BACKENDS). `library`: another file than the usual ones. Raises DirectError."""
    return PosixIO() if name == "posix" else LibraryIO(name, library)
