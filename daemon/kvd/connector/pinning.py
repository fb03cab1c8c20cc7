"""The arena as pinned memory: registered with the GPU's runtime, so that its DMA reads and writes it in place.

Transfers to and from memory that is not pinned go through a small buffer of the driver's, at half the speed or less. Here the
arena's mapping itself is registered (cudaHostRegister, hipHostRegister; by ctypes, since torch has no call for memory that it
does not own): no staging copy in the host's memory is made. Reading is registered read-only, as it is mapped.

Registering takes the kernel a second for some ten GiB, so it is done on a thread while transfers already work, unpinned. Where it
is refused (locked-memory limit, old driver) that is said once at WARN, and everything works as before, slower.
Concurrency: any thread.
"""

import ctypes
import logging
import threading
from collections.abc import Sequence
from typing import Any

logger = logging.getLogger("vllm.kvd")

_READ_ONLY = 8
"""cudaHostRegisterReadOnly, hipHostRegisterReadOnly."""
_RUNTIMES = {
    "cuda": ("libcudart.so.13", "libcudart.so.12", "libcudart.so"),
    "hip": ("libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"),
}


class Unpinned(Exception):
    """Memory cannot be pinned; the message says why."""


class Runtime:
    """The calls of one GPU runtime, which the engine's torch has loaded already. Raises Unpinned where they are not there."""

    def __init__(self, kind: str, candidates: Sequence[str] | None = None) -> None:
        self.kind = kind
        library = None
        problem = ""
        for name in candidates or _RUNTIMES[kind]:
            try:
                library = ctypes.CDLL(name)
                break
            except OSError as error:
                problem = str(error)
        if library is None:
            raise Unpinned(f"no {kind} runtime: {problem}")
        try:
            self._register = getattr(library, f"{kind}HostRegister")
            self._unregister = getattr(library, f"{kind}HostUnregister")
        except AttributeError as error:
            raise Unpinned(f"the {kind} runtime has no such call: {error}") from None
        self._register.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)
        self._unregister.argtypes = (ctypes.c_void_p,)

    def register(self, address: int, size: int, *, read_only: bool) -> None:
        """Pin this memory. Raises Unpinned."""
        code = self._register(address, size, _READ_ONLY if read_only else 0)
        if code:
            raise Unpinned(f"{self.kind}HostRegister of {size} bytes: error {code}")

    def unregister(self, address: int) -> None:
        """Undo that; an error does not matter any more."""
        self._unregister(address)


class Pinner:
    """Pins the arena for each connection of a process, by its name."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._lock = threading.Lock()
        self._pinned: dict[str, list[int]] = {}
        self._said = False

    def pin_soon(self, name: str, client: Any) -> threading.Thread:
        """Pin what this client maps, on a thread."""
        mapping = client.connect().mapping
        thread = threading.Thread(target=self._pin, args=(name, mapping), name="kvd-pin", daemon=True)
        thread.start()
        return thread

    def _pin(self, name: str, mapping: Any) -> None:
        self.unpin(name)
        parts = [(mapping.read_bytes, True)]
        if mapping.write_bytes is not None:
            parts.append((mapping.write_bytes, False))
        with self._lock:
            held = self._pinned.setdefault(name, [])
            for part, read_only in parts:
                address = int(part.__array_interface__["data"][0])
                try:
                    self._runtime.register(address, part.nbytes, read_only=read_only)
                except Unpinned as error:
                    if not self._said:
                        logger.warning("kvd: the arena is not pinned, transfers to and from the GPU are slower: %s", error)
                    self._said = True
                    return
                held.append(address)

    def unpin(self, name: str) -> None:
        """The connection of that name is gone, or about to go."""
        with self._lock:
            for address in self._pinned.pop(name, []):
                self._runtime.unregister(address)

    def close(self) -> None:
        """Nothing stays pinned."""
        for name in list(self._pinned):
            self.unpin(name)


def pinner_for(device: Any) -> Pinner | None:
    """A pinner where KV memory is on a GPU whose runtime can pin, else None (said at WARN where it should be able to)."""
    if getattr(device, "type", "cpu") != "cuda":
        return None
    import torch

    try:
        return Pinner(Runtime("hip" if torch.version.hip else "cuda"))
    except Unpinned as error:
        logger.warning("kvd: the arena is not pinned, transfers to and from the GPU are slower: %s", error)
        return None
