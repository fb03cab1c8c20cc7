"""NIXL: how bytes move between memory and open files or objects for the tiers that use it, `nixl_store` and `nixl_store_dynamic`.

One agent with one back end (POSIX, GDS, GDS_MT, HF3FS, OBJ) for each adapter. The arena is registered once; a file or object,
and memory that does not lie in the arena, for the length of one transfer. A transfer is posted, polled until it is over, and
released: calls return only then, so no buffer is given back that a device still writes into. One that never ends hangs its
caller, which is what the tier's watch is for. What NIXL says of a failure is hardly more than that it failed; so who calls
asks the file system first (is there room, is the file long enough).
"""

import errno
import itertools
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvd.tiers.adapters.base import AdapterConfigError
from kvd.tiers.adapters.kind import nearest

BACKENDS = ("POSIX", "GDS", "GDS_MT", "HF3FS")
"""Those that read and write files."""
OBJECTS = "OBJ"
OBJECT_PARAMETERS = (
    "access_key", "secret_key", "session_token", "bucket", "endpoint_override", "scheme", "region", "use_virtual_addressing",
    "req_checksum", "ca_bundle", "num_threads",
)  # fmt: skip
"""What OBJ takes; unlike the others it does not say so itself."""
FIRST_NAP_S, LONGEST_NAP_S = 20e-6, 1e-3


class Transfers:
    """Moves bytes between memory and files through one of NIXL's back ends. Thread-safe.

    `open` raises AdapterConfigError where the library or the back end cannot be used here.
    """

    def __init__(self, name: str, type_name: str, backend: str, parameters: Mapping[str, str]) -> None:
        self.backend = backend
        self._where = f"adapter {name} ({type_name})"
        self._parameters = dict(parameters)
        self._name = f"kvd-{name}-{os.getpid()}"
        self._agent: Any = None
        self._failures: tuple[type[Exception], ...] = ()
        self._memory: memoryview | None = None
        self._arena = range(0)
        self._numbers = itertools.count(1)

    def attach(self, memory: memoryview) -> None:
        """The arena, to be registered when the agent is there."""
        self._memory = memory

    def open(self) -> None:
        """Make the agent. A second time is no work."""
        if self._agent is not None:
            return
        os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
        try:
            from nixl import _api as api
            from nixl import _bindings as bindings
        except ImportError as error:
            raise AdapterConfigError(f"{self._where}: nixl does not load: {error}", hint="pip install 'kvtools[nixl]'") from None
        self._failures = tuple(
            found for found in vars(bindings).values() if isinstance(found, type) and issubclass(found, Exception)
        )
        settings = api.nixl_agent_config(
            enable_prog_thread=False, backends=[], sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_RW
        )
        agent = api.nixl_agent(self._name, settings)
        if self.backend not in agent.plugin_list:
            have = ", ".join(one for one in (*BACKENDS, OBJECTS) if one in agent.plugin_list)
            raise AdapterConfigError(f"{self._where}: this nixl has no back end {self.backend}", hint=f"it has {have}")
        known = OBJECT_PARAMETERS if self.backend == OBJECTS else agent.get_plugin_params(self.backend)
        if strange := next((word for word in self._parameters if word not in known), None):
            raise AdapterConfigError(
                f"{self._where}: field 'backend_params': unknown {strange!r}", hint=nearest(strange, [*known, *OURS])
            )
        try:
            agent.create_backend(self.backend, self._parameters)
            if self._memory is not None:
                start = address(self._memory)
                agent.register_memory([(start, len(self._memory), 0, "")], "DRAM", backends=[self.backend])
                self._arena = range(start, start + len(self._memory))
        except self._failures as error:
            raise AdapterConfigError(
                f"{self._where}: NIXL's back end {self.backend} does not start: {error}",
                hint="are its libraries there (GDS: libcufile)? NIXL's own line on stderr says more",
            ) from None
        self._agent = agent

    def close(self) -> None:
        """Let go of the agent, and with it of the memory."""
        self._agent = None
        self._arena = range(0)

    def write(self, fd: int, parts: Sequence[tuple[int, memoryview]]) -> None:
        """Write these buffers at these offsets. Raises OSError."""
        self._move("WRITE", ("FILE", fd, ""), parts)

    def read(self, fd: int, parts: Sequence[tuple[int, memoryview]]) -> None:
        """Fill these buffers from these offsets, whole. Raises OSError, also where the file is too short."""
        self._move("READ", ("FILE", fd, ""), parts)

    def put(self, key: str, data: memoryview) -> None:
        """Write an object, whole. Raises OSError."""
        self._move("WRITE", ("OBJ", next(self._numbers), key), [(0, data)])

    def get(self, key: str, parts: Sequence[tuple[int, memoryview]]) -> None:
        """Read parts of an object. Raises OSError; where it is too short, some bytes are what they were before."""
        self._move("READ", ("OBJ", next(self._numbers), key), parts)

    def exists(self, key: str) -> bool:
        """Whether there is such an object. Raises OSError."""
        agent = self._agent
        if agent is None:
            raise OSError(errno.EBADF, "closed")
        try:
            (found,) = agent.query_memory([(0, 0, 0, key)], self.backend, "OBJ")
        except self._failures as error:
            raise OSError(errno.EIO, f"NIXL {self.backend}: {error}") from None
        return found is not None

    def _move(self, operation: str, place: tuple[str, int, str], parts: Sequence[tuple[int, memoryview]]) -> None:
        """`place`: what it is, its descriptor (or a number that nothing else under way has), and an object's key."""
        agent = self._agent
        if agent is None:
            raise OSError(errno.EBADF, "closed")
        rows = [(address(data), len(data), at) for at, data in parts if len(data)]
        strange = [(start, length, 0, "") for start, length, _ in rows if start not in self._arena]
        end = max(at + length for _, length, at in rows)
        kind, number, key = place
        held = []
        try:
            held.append(agent.register_memory([(0, end, number, key)], kind, backends=[self.backend]))
            if strange:
                held.append(agent.register_memory(strange, "DRAM", backends=[self.backend]))
            local = agent.get_xfer_descs([(start, length, 0) for start, length, _ in rows], "DRAM")
            remote = agent.get_xfer_descs([(at, length, number) for _, length, at in rows], kind)
            handle = agent.initialize_xfer(operation, local, remote, self._name, b"", [self.backend])
            try:
                self._wait(agent, handle)
            finally:
                agent.release_xfer_handle(handle)
        except self._failures as error:
            raise OSError(errno.EIO, f"NIXL {self.backend}: {error}") from None
        finally:
            for one in held:
                agent.deregister_memory(one, backends=[self.backend])

    def _wait(self, agent: Any, handle: Any) -> None:
        state = agent.transfer(handle)
        nap = 0.0
        while state == "PROC":
            time.sleep(nap)  # 0 lets other threads run: most transfers are over by then
            nap = min(LONGEST_NAP_S, nap * 2 or FIRST_NAP_S)
            state = agent.check_xfer_state(handle)
        if state != "DONE":
            raise OSError(errno.EIO, f"NIXL {self.backend}: the transfer failed")


OURS = ("file_path", "use_direct_io", "file_size", "max_capacity_gb", "shard_dirs", "prefix")
"""What adapters take out of `backend_params`; the rest is the back end's own."""


def address(data: memoryview) -> int:
    """Where this memory lies."""
    return int(np.frombuffer(data, np.uint8).ctypes.data)


__all__ = ["BACKENDS", "OBJECTS", "OURS", "Transfers", "address"]
