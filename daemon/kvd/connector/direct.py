"""GPU-direct in a worker: chunks move between the engine's KV memory and the disk tier's files, past the daemon's arena.

    save   in the step: blocks -> staging buffer            on a thread, once that is done: buffer -> lent extent, sync, commit
    load   on threads, a chunk each: held extent -> staging buffer -> blocks; the lease is checked when all are there

The daemon still owns the extents (DESIGN 5.6). Staging buffers are a fixed number, each as long as the longest chunk: they make
up for blocks that lie in many pieces, and for memory that a file system's direct I/O cannot use. On a GPU they are registered
with its library; chunks on different folders are read at the same time.

Failure: whatever cannot go this way goes through the arena instead, chunk by chunk. That is never quiet: each reason is said
once at WARN, with what kvdoctor says of the folder, and counted in `direct_fallback`. A save that fails on its thread is
put into the arena from its buffer. Wrong bytes: a lease that ended meanwhile fails the load; KVD_DIRECT_CHECKSUM=1 has
checksums computed by saves and compared by loads, through the host.

Concurrency: `save` is the engine's thread, `load` the loading threads'; buffers are handed out under a lock.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from kvd.connector.direct_io import ALIGN, Buffer, DirectError, DirectIO
from kvd.connector.metrics import Counters
from kvd.connector.plan import Move, Save
from kvd.errors import LeaseLost
from kvd.store.retention import Retention

logger = logging.getLogger("vllm.kvd")

HOLD_KEYS = 64
"""Chunks held for reading at a time: a lease lasts half a minute, whatever the device does."""


class StagingMover(Protocol):
    """The mover's part in this: blocks to and from a staging buffer."""

    def value_bytes(self, group: int, blocks: int) -> int: ...

    def staging(self, size: int) -> Buffer: ...

    def collect(self, group: int, ids: Sequence[int], into: Buffer) -> None: ...

    def settle(self, buffer: Buffer) -> None: ...

    def spread(self, group: int, ids: Sequence[int], source: Buffer) -> None: ...

    def to_host(self, source: Buffer, into: memoryview) -> None: ...


@dataclass(eq=False, slots=True)
class _Saving:
    """A chunk on its way to a file."""

    index: int
    namespace: bytes
    key: bytes
    length: int
    retention: str
    ttl_s: float | None
    buffer: Buffer


class Staging:
    """A fixed number of buffers of one size, made when first needed and registered with the back end."""

    def __init__(self, io: DirectIO, make: Callable[[int], Buffer], size: int, count: int) -> None:
        self._io = io
        self._make = make
        self.size = -(-size // ALIGN) * ALIGN
        self._left = count
        self._free: list[Buffer] = []
        self._made: list[Buffer] = []
        self._changed = threading.Condition()

    def take(self, timeout_s: float) -> Buffer | None:
        """A buffer, or None where none comes free in time. Raises DirectError where one cannot be made."""
        with self._changed:
            if not self._free and not self._left:
                self._changed.wait_for(lambda: bool(self._free), timeout_s)
            if self._free:
                return self._free.pop()
            if not self._left:
                return None
            self._left -= 1
        try:
            buffer = self._make(self.size)
            self._io.register(buffer)
        except BaseException:
            with self._changed:
                self._left += 1
            raise
        with self._changed:
            self._made.append(buffer)
        return buffer

    def give(self, buffer: Buffer) -> None:
        """Give a buffer back."""
        with self._changed:
            self._free.append(buffer)
            self._changed.notify()

    def close(self) -> None:
        """Nobody uses any of them."""
        for buffer in self._made:
            self._io.deregister(buffer)
        self._made, self._free = [], []


class Direct:
    """One worker's way past the daemon. `roots`: the daemon's folders as this process sees them, None where it does not.

    `reason_of(path)`: what keeps this host from GPU-direct there, for people ('' when nothing is known to).
    """

    def __init__(
        self,
        io: DirectIO,
        mover: StagingMover,
        *,
        roots: Callable[[Any], Sequence[Path | None]],
        longest: int,
        buffers: int,
        checksum: bool,
        counters: Counters,
        reason_of: Callable[[str], str],
    ) -> None:
        self.io = io
        self._mover = mover
        self._roots = roots
        self._staging = Staging(io, mover.staging, longest, buffers)
        self._checksum = checksum
        self._counters = counters
        self._reason_of = reason_of
        # Saves hold their buffer while they wait for a thread, so loads, which wait for buffers, must not have all threads.
        self._writers = ThreadPoolExecutor(max(1, buffers // 2), thread_name_prefix="kvd-direct-w")
        self._readers = ThreadPoolExecutor(buffers, thread_name_prefix="kvd-direct-r")
        self._most_saving = max(1, buffers - 1)
        self._said: set[str] = set()
        self._lock = threading.Lock()
        self._saving: set[tuple[bytes, bytes]] = set()
        self._closed = False

    # ---- saves -------------------------------------------------------------------------------------------------------

    def save(self, index: int, namespace: bytes, save: Save, moves: Sequence[Move], link: Any) -> list[Move]:
        """Begin to store these chunks; what must go through the arena instead. The blocks are copied when this returns, or on a
        device before it does anything else on the calling thread's stream.
        """
        if Retention.of(save.retention) < Retention.SHORT:
            return list(moves)
        rest: list[Move] = []
        for move in moves:
            name = (namespace, move.key)
            with self._lock:
                if name in self._saving:
                    continue
            length = self._mover.value_bytes(index, len(move.blocks[index]))
            buffer = self._buffer_for(length)
            if buffer is None:
                rest.append(move)
                continue
            self._mover.collect(index, move.blocks[index], buffer)
            with self._lock:
                self._saving.add(name)
            one = _Saving(index, namespace, move.key, length, save.retention, save.ttl_s, buffer)
            try:
                self._writers.submit(self._store, one, link)
            except RuntimeError:  # shutting down
                self._end(one)
        return rest

    def _buffer_for(self, length: int) -> Buffer | None:
        """A buffer now or not at all: no step waits for a disk."""
        try:
            if length > self._staging.size:
                raise DirectError("too_large", f"a chunk of {length} bytes is longer than a staging buffer")
            buffer = self._staging.take(0.0) if len(self._saving) < self._most_saving else None
        except DirectError as error:
            self.fell_back(error)
            return None
        if buffer is None:
            self.fell_back(DirectError("no_buffer", "all staging buffers are in use: the disk is slower than the engine"))
        return buffer

    def _store(self, one: _Saving, link: Any) -> None:
        """On a thread: one chunk to its extent, or, where that fails, to the arena."""
        try:
            self._mover.settle(one.buffer)
            try:
                link.call(lambda client: self._write(one, client))
                self._counters.add("saves")
                self._counters.add("save_bytes", one.length)
                self._counters.add("direct_save_bytes", one.length)
            except DirectError as error:
                self.fell_back(error)
                link.call(lambda client: self._put(one, client))
        except Exception as error:  # noqa: BLE001 - a thread's edge: whatever it was, a save that fails is a miss later
            self._counters.add("save_failures")
            logger.debug("kvd: a direct save failed: %s", error)
        finally:
            self._end(one)

    def _end(self, one: _Saving) -> None:
        self._staging.give(one.buffer)
        with self._lock:
            self._saving.discard((one.namespace, one.key))

    def _write(self, one: _Saving, client: Any) -> None:
        """Raises DirectError, KvdError."""
        with client.direct_write(
            [one.key], [one.length], retention=one.retention, ttl_s=one.ttl_s, namespace=one.namespace
        ) as lent:
            extent = lent.extents[0]
            if extent is None:
                raise DirectError(lent.reasons[0], f"the daemon lends no room: {lent.reasons[0]}")
            path = self._path(client, extent)
            whole = -(-one.length // ALIGN) * ALIGN
            with self.io.opened(path) as file:
                self.io.write(file, one.buffer, whole, extent.offset)
                self.io.sync(file)
            checksums = [self._digest(one.buffer, one.length)] if self._checksum else []
            (result,) = lent.commit([0], checksums)
        if not result:
            raise DirectError(result.reason, f"the daemon did not take a value: {result.reason}")

    def _put(self, one: _Saving, client: Any) -> None:
        with client.write([one.length], wait_s=0.0) as lease:
            self._mover.to_host(one.buffer, lease.views[0])
            (result,) = lease.commit([one.key], namespace=one.namespace, retention=one.retention, ttl_s=one.ttl_s)
        self._counters.add("saves" if result else "save_failures")
        self._counters.add("save_bytes", one.length if result else 0)

    # ---- loads -------------------------------------------------------------------------------------------------------

    def load(
        self, index: int, namespace: bytes, moves: Sequence[Move], link: Any, go_on: Callable[[], bool]
    ) -> tuple[set[int], bool]:
        """Load what lies in files: the positions in `moves` that are loaded, and whether bytes of a lost lease may be among them.

        What is not loaded is for the arena to bring. Raises Down, KvdError. `go_on`: False when nobody wants it any more.
        """
        loaded: set[int] = set()
        for start in range(0, len(moves), HOLD_KEYS):
            if not go_on():
                break
            part = moves[start : start + HOLD_KEYS]
            try:
                loaded |= {
                    start + place for place in link.call(lambda client, p=part: self._read(index, namespace, p, client, go_on))
                }
            except LeaseLost:
                return loaded, True
        return loaded, False

    def _read(self, index: int, namespace: bytes, moves: Sequence[Move], client: Any, go_on: Callable[[], bool]) -> set[int]:
        """Positions loaded. No transfer into the engine's blocks is under way when this returns or raises."""
        done: set[int] = set()
        with client.direct_read([move.key for move in moves], namespace=namespace) as held:
            work: list[tuple[int, Future[int]]] = []
            try:
                for place, extent in enumerate(held.extents):
                    ids = moves[place].blocks[index]
                    if extent is not None and extent.length == self._mover.value_bytes(index, len(ids)):
                        work.append((place, self._readers.submit(self._fetch, index, ids, extent, client, go_on)))
            finally:
                failures = [(place, future.exception()) for place, future in work]
            for place, failure in failures:
                if isinstance(failure, DirectError):
                    if failure.reason != "ended":
                        self.fell_back(failure)
                elif failure is not None:
                    raise failure
                else:
                    done.add(place)
            held.check()
        size = sum(self._mover.value_bytes(index, len(moves[place].blocks[index])) for place in done)
        self._counters.add("load_bytes", size)
        self._counters.add("direct_load_bytes", size)
        return done

    def _fetch(self, index: int, ids: Sequence[int], extent: Any, client: Any, go_on: Callable[[], bool]) -> int:
        """On a thread: one extent into its blocks. Raises DirectError."""
        if not go_on():
            raise DirectError("ended", "nobody waits for it any more")
        path = self._path(client, extent)
        with self._lent() as buffer:
            if extent.length > self._staging.size:
                raise DirectError("too_large", f"a chunk of {extent.length} bytes is longer than a staging buffer")
            with self.io.opened(path) as file:
                self.io.read(file, buffer, -(-extent.length // ALIGN) * ALIGN, extent.offset)
            if self._checksum and extent.checksum and self._digest(buffer, extent.length) != extent.checksum:
                raise DirectError("corrupt", f"{path.name} at {extent.offset}: the bytes are not those that were stored")
            self._mover.spread(index, ids, buffer)
        return int(extent.length)

    @contextlib.contextmanager
    def _lent(self) -> Iterator[Buffer]:
        buffer = self._staging.take(5.0)
        if buffer is None:
            raise DirectError("no_buffer", "no staging buffer came free")
        try:
            yield buffer
        finally:
            self._staging.give(buffer)

    # ---- the rest ----------------------------------------------------------------------------------------------------

    def _path(self, client: Any, extent: Any) -> Path:
        roots = self._roots(client)
        root = roots[extent.root] if extent.root < len(roots) else None
        if root is None:
            raise DirectError("unknown_root", "the daemon's folder is not among KVD_DIRECT_ROOTS, or not visible here")
        if "/" in extent.name:
            raise DirectError("unknown_root", f"{extent.name!r} is no file of a tier")
        path: Path = root / extent.name
        return path

    def _digest(self, buffer: Buffer, length: int) -> bytes:
        import xxhash

        if buffer.view is not None:
            return xxhash.xxh3_128_digest(buffer.view[:length])
        bounce = memoryview(bytearray(length))
        self._mover.to_host(buffer, bounce)
        return xxhash.xxh3_128_digest(bounce)

    def fell_back(self, error: DirectError) -> None:
        """Count, and say each reason once."""
        self._counters.add_reason("direct_fallback", error.reason)
        with self._lock:
            first = error.reason not in self._said
            self._said.add(error.reason)
        if first:
            why = self._reason_of("") if self.io.device else ""
            logger.warning(
                "kvd: GPU-direct is not used for some chunks: %s; they go through the daemon's arena%s",
                error,
                f". kvdoctor: {why}" if why else "",
            )

    def shutdown(self) -> None:
        """Wait for what is under way, and let go of buffers and files."""
        if not self._closed:
            self._closed = True
            self._writers.shutdown(wait=True)
            self._readers.shutdown(wait=True)
            self._staging.close()
            self.io.close()
