"""MemInfoTracker: a pool's two files in shared memory, seen from the engine, and what its device has left.

The engine owns the name for life (the sidecar's lock), makes the segment, tells use and reserve there, reads the limit and
answers it in the sidecar. One tracker a pool; a process may have several under different names, and each engine its own.

Failures. A name that a living engine owns is Refused at the start. Later nothing here may harm the engine: a segment whose lock
is stuck keeps its last numbers; what was deleted under the engine is made again with the limit in force, and where there is no
room for it (said once a minute) the limit in force stays. An engine whose owner file was removed and whose name another one
took since leaves the files alone: they are the other's. Concurrency: one thread (the pool's follower) calls everything after
the start.
"""

import logging
import time
from pathlib import Path

from kvtools.elastic.memory import DeviceMemory, VirtualMemory
from kvtools.errors import KvError, NotFound, Refused
from kvtools.segments import pool
from kvtools.segments.files import SHM
from kvtools.segments.owner import OwnerInfo, OwnerLock

logger = logging.getLogger("vllm.kvtools")

PATIENCE_S = 0.05
"""Longest that a stuck lock holds the follower up."""


class MemInfoTracker:
    """The owner's side of pool `name`. Raises Refused (owned), Unreachable (shared memory), UsageError (the name)."""

    def __init__(
        self, name: str, info: OwnerInfo, *, limit_bytes: int | None = None, memory: VirtualMemory | None = None, root: Path = SHM
    ) -> None:
        self.name = name
        self.limit_bytes = info.start_capacity_bytes if limit_bytes is None else limit_bytes
        self._info = info
        self._root = root
        self._memory = memory
        self._owner = OwnerLock.acquire(name, info, root=root, timeout_s=PATIENCE_S)
        try:
            pool.create_pool(name, self.limit_bytes, root=root)
            self._file = pool.PoolFile(name, root=root, writable=True, timeout_s=PATIENCE_S)
            self._owner.started(self.limit_bytes)
        except BaseException:
            self._owner.close()
            raise
        self._told = (0, 0)
        self._taken = False
        """Another engine has the name by now: what lies there is not ours to write or to remove."""
        self._complained = 0.0

    def poll(self) -> int | None:
        """The limit, where it is another one than at the last call or was written once more. Heals a segment that was deleted."""
        try:
            if self._file.gone or self._owner.lost:
                self._heal()
        except KvError as error:
            self._complain(error)
            if self._taken or self._file.gone:
                return None
        try:
            now = self._file.read().limit_bytes
        except KvError as error:
            self._complain(error)
            return None
        try:
            again = self._owner.asked()
        except (KvError, OSError) as error:
            self._complain(error)  # the sidecar is locked; the limit counts all the same
            again = None
        if now == self.limit_bytes and (again is None or again.limit_bytes != now):
            return None
        self.limit_bytes = now
        return now

    def publish(self, used_bytes: int, prealloc_bytes: int) -> None:
        """Tell use and reserve, where they changed."""
        if (used_bytes, prealloc_bytes) == self._told or self._taken:
            return
        try:
            self._file.write_usage(used_bytes, prealloc_bytes)
            self._told = (used_bytes, prealloc_bytes)
        except KvError as error:
            self._complain(error)

    def answer(self, limit_bytes: int, *, applied: bool, effective_bytes: int, reason: str = "") -> bool:
        """Say in the sidecar what became of a limit; False where that was not possible now."""
        try:
            self._owner.mark(limit_bytes, "applied" if applied else "deferred", effective_bytes=effective_bytes, reason=reason)
        except (KvError, OSError) as error:
            self._complain(error)
            return False
        return True

    def describe(self, info: OwnerInfo) -> None:
        """Replace what the sidecar says about the engine."""
        self._info = info
        self._owner.update(info)

    def device(self) -> DeviceMemory | None:
        """What the pool's device has in all and left; None where its memory is in other processes."""
        return self._memory.device_memory() if self._memory is not None else None

    def _heal(self) -> None:
        """A file was deleted or replaced: own the name again, then make the segment again under the limit in force.

        Raises KvErrors (no room, another engine has the name by now): what could not be done is tried again at the next look.
        """
        if self._owner.lost:
            try:
                again = OwnerLock.acquire(self.name, self._info, root=self._root, patience_s=0.0, timeout_s=PATIENCE_S)
            except Refused:
                self._taken = True
                raise
            self._taken = False
            self._owner.close(remove=False)
            self._owner = again
        if self._file.gone:
            try:
                self.limit_bytes = pool.read_pool(self.name, root=self._root, timeout_s=PATIENCE_S).limit_bytes
            except NotFound:
                pool.create_pool(self.name, self.limit_bytes, root=self._root)
            file = pool.PoolFile(self.name, root=self._root, writable=True, timeout_s=PATIENCE_S)
            self._file.close()
            self._file = file
            self._told = (-1, -1)
        logger.warning("kvtools: files of segment %s were deleted under its engine; they are made again", self.name)

    def _complain(self, error: Exception) -> None:
        if time.monotonic() - self._complained > 60:
            self._complained = time.monotonic()
            logger.warning("kvtools: segment %s: %s", self.name, error)

    def close(self) -> None:
        """Remove both files. A second call does nothing."""
        if not (self._taken or self._file.gone):
            try:
                pool.remove(self.name, root=self._root, timeout_s=PATIENCE_S)
            except KvError as error:
                self._complain(error)
        self._file.close()
        self._owner.close()
