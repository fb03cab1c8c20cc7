"""MemInfoTracker: a pool's two files in shared memory, seen from the engine, and what its device has left.

The engine owns the name for life (the sidecar's lock), makes the segment, tells use and reserve there, reads the limit and
answers it in the sidecar. One tracker a pool; a process may have several under different names, and each engine its own.

Failures. A name that a living engine owns is Refused at the start. Later nothing here may harm the engine: a segment whose
lock is stuck keeps its last numbers; one that was deleted under the engine is made again with the limit in force; no room in
shared memory is logged once. Concurrency: one thread (the pool's follower) calls everything after the start.
"""

import logging
import time
from pathlib import Path

from kvtools.elastic.memory import DeviceMemory, VirtualMemory
from kvtools.errors import KvError, NotFound
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
        except BaseException:
            self._owner.close()
            raise
        self._told = (0, 0)
        self._complained = 0.0

    def poll(self) -> int | None:
        """The limit, where it is another one than at the last call or was written once more. Heals a segment that was deleted."""
        try:
            if self._file.gone:
                self._heal()
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
        if (used_bytes, prealloc_bytes) == self._told:
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
        """The segment was deleted or replaced: make it again under the limit in force, and own the name again."""
        logger.warning("kvtools: segment %s was deleted under its engine; it is made again", self.name)
        try:
            self.limit_bytes = pool.read_pool(self.name, root=self._root, timeout_s=PATIENCE_S).limit_bytes
        except NotFound:
            pool.create_pool(self.name, self.limit_bytes, root=self._root)
        self._file.close()
        self._file = pool.PoolFile(self.name, root=self._root, writable=True, timeout_s=PATIENCE_S)
        self._told = (-1, -1)
        if self._owner.lost:
            self._owner.close(remove=False)
            self._owner = OwnerLock.acquire(self.name, self._info, root=self._root, timeout_s=PATIENCE_S)

    def _complain(self, error: Exception) -> None:
        if time.monotonic() - self._complained > 60:
            self._complained = time.monotonic()
            logger.warning("kvtools: segment %s: %s", self.name, error)

    def close(self) -> None:
        """Remove both files. A second call does nothing."""
        if not self._file.gone:
            try:
                pool.remove(self.name, root=self._root, timeout_s=PATIENCE_S)
            except KvError as error:
                self._complain(error)
        self._file.close()
        self._owner.close()
