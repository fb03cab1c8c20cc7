"""The copies for KV memory that lies on a GPU: through one staging buffer on the device, in one transfer a chunk.

Saves are cut in two. In the step, on the stream that computed the blocks, they are gathered into a staging buffer: so it sees
what was computed, and the engine may use the blocks again, since what it does next comes later on that stream. An event marks
its end. On a thread, on a stream of its own that waits for the event, the buffer goes to the host: no step waits for a bus.
Loads run on streams of their own, on the loading threads, and end before the request is reported. Nothing orders them after
what the device still does for a request that had these blocks before: see `fence`. No call of a step waits for the device.

Device-neutral torch: CUDA, ROCm and XPU alike; without an accelerator (as in tests) everything is simply in order. Staging of
saves is bounded; what would be above it is transferred within the step.
"""

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvd.connector.layout import GroupLayout

STAGING_BYTES = 256 << 20
"""Device memory that saves on their way may take."""


@dataclass(eq=False, slots=True)
class Detached:
    """A chunk's value on the device, apart from the blocks it was gathered from. `ready`: the event of that, None on a CPU."""

    value: Any
    size: int
    ready: Any


class DeviceMover:
    """Copies for an engine whose KV memory is a torch storage on `device`. See HostMover for what the methods promise."""

    def __init__(self, storage: Any, device: Any, layouts: Sequence[GroupLayout]) -> None:
        import torch

        self._torch = torch
        self._device = device
        flat = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
        self._lanes = [
            [torch.as_strided(flat, (layout.blocks, lane.length), (lane.stride, 1), lane.offset) for lane in layout.lanes]
            for layout in layouts
        ]
        self._block_bytes = [layout.block_bytes for layout in layouts]
        self._lock = threading.Lock()
        self._detached = 0

    def detach(self, group: int, ids: Sequence[int]) -> Detached | None:
        """Gather these blocks on the device, in the order of this thread's stream, and do not wait; None: no room for that.

        Each is given to `land` or `drop`, once.
        """
        size = self.value_bytes(group, len(ids))
        with self._lock:
            if self._detached + size > STAGING_BYTES:
                return None
            self._detached += size
        try:
            value = self.empty(size)
            self._index(group, ids, value)
            ready = self.mark()
        except BaseException:
            self._release(size)
            raise
        return Detached(value, size, ready)

    def land(self, detached: Detached, into: Any) -> None:
        """Transfer it to host memory; it is there when this returns. From any thread."""
        try:
            with self._own_stream() as stream:
                if stream is not None:
                    stream.wait_event(detached.ready)
                self._torch.frombuffer(into, dtype=self._torch.uint8).copy_(detached.value, non_blocking=True)
                if stream is not None:
                    stream.synchronize()
        finally:
            self.drop(detached)

    def drop(self, detached: Detached) -> None:
        """Give its memory back. A second call does nothing."""
        if detached.value is not None:
            detached.value = None
            self._release(detached.size)

    def _release(self, size: int) -> None:
        with self._lock:
            self._detached -= size

    def value_bytes(self, group: int, blocks: int) -> int:
        return self._block_bytes[group] * blocks

    def empty(self, size: int) -> Any:
        """So many bytes on the device, their content undefined."""
        return self._torch.empty(size, dtype=self._torch.uint8, device=self._device)

    def gather(self, group: int, ids: Sequence[int], into: Any) -> None:
        staging = self.empty(self.value_bytes(group, len(ids)))
        self._index(group, ids, staging)
        self.to_host(staging, into)

    def collect(self, group: int, ids: Sequence[int], staging: Any) -> Any:
        """Copy these blocks to `staging`, a tensor on the device of exactly their bytes, in the order of this thread's stream.

        Returns the event of its end; None on a CPU, where it is done.
        """
        self._index(group, ids, staging)
        return self.mark()

    def fence(self) -> Callable[[], None] | None:
        """What waits, on any thread, until the device has done all that this thread's stream was given so far; None on a CPU."""
        mark = self.mark()
        return mark.synchronize if mark is not None else None

    def mark(self) -> Any:
        """An event at the end of this thread's stream; None on a CPU, where everything is simply in order."""
        if self._device.type == "cpu":
            return None
        event = self._torch.Event(device=self._device)
        event.record(self._torch.accelerator.current_stream(self._device))
        return event

    def to_host(self, staging: Any, into: Any) -> None:
        """Copy bytes of the device to host memory. That is not pinned: torch waits for the transfer."""
        self._torch.frombuffer(into, dtype=self._torch.uint8).copy_(staging)

    def _index(self, group: int, ids: Sequence[int], staging: Any) -> None:
        index = self._numbers(ids)
        at = 0
        for lane in self._lanes[group]:
            part = staging[at : at + len(ids) * lane.shape[1]].view(len(ids), lane.shape[1])
            self._torch.index_select(lane, 0, index, out=part)
            at += part.numel()

    def _numbers(self, ids: Sequence[int]) -> Any:
        """Block ids on the device. From pinned memory: a copy from any other waits for all that the stream still has to do."""
        torch = self._torch
        if self._device.type == "cpu":
            return torch.tensor(ids, dtype=torch.int64)
        try:
            pinned = torch.tensor(ids, dtype=torch.int64, pin_memory=True)
        except RuntimeError:  # a host that pins nothing
            return torch.tensor(ids, dtype=torch.int64, device=self._device)
        return pinned.to(self._device, non_blocking=True)

    def scatter(self, group: int, ids: Sequence[int], source: Any) -> None:
        if not any(ids):
            return
        with self._own_stream() as stream:
            self._place(group, ids, _readonly(self._torch, source).to(self._device))
            if stream is not None:
                stream.synchronize()

    def spread(self, group: int, ids: Sequence[int], staging: Any) -> None:
        """Copy a value that lies on the device into these blocks; zeros are skipped. Done when this returns."""
        if not any(ids):
            return
        with self._own_stream() as stream:
            self._place(group, ids, staging)
            if stream is not None:
                stream.synchronize()

    def _place(self, group: int, ids: Sequence[int], staging: Any) -> None:
        torch = self._torch
        wanted = [place for place, block in enumerate(ids) if block]
        places = torch.tensor(wanted, dtype=torch.int64, device=self._device)
        index = torch.tensor([ids[place] for place in wanted], dtype=torch.int64, device=self._device)
        at = 0
        for lane in self._lanes[group]:
            part = staging[at : at + len(ids) * lane.shape[1]].view(len(ids), lane.shape[1])
            lane.index_copy_(0, index, part.index_select(0, places))
            at += part.numel()

    @contextlib.contextmanager
    def _own_stream(self) -> Any:
        torch = self._torch
        if self._device.type == "cpu":
            yield None
            return
        stream = torch.Stream(device=self._device)
        with stream:
            yield stream


def _readonly(torch: Any, source: Any) -> Any:
    """A host tensor over `source`, which torch only reads. By address: torch warns, process-wide, of read-only buffers."""
    import ctypes

    import numpy as np

    view = np.frombuffer(source, dtype=np.uint8)
    writable: Any = (ctypes.c_uint8 * view.size).from_address(view.ctypes.data)
    return torch.from_numpy(np.frombuffer(writable, dtype=np.uint8))
