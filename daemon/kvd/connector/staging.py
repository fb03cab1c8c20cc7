"""Staging buffers between blocks and files: where a chunk's bytes lie in one piece, aligned as direct I/O needs them.

HostStaging     buffers in the host's memory: for back ends that move host memory, whatever the mover
DeviceStaging   buffers on the GPU: for hipFile and cuFile; what a library's DMA touches is finished before it starts
"""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvd.connector.device_mover import DeviceMover
from kvd.connector.direct_io import ALIGN, Buffer, host_buffer


class HostStaging:
    """See `direct.StagingMover`. `mover`: any; its gather and scatter take host memory."""

    def __init__(self, mover: Any) -> None:
        self._mover = mover

    def value_bytes(self, group: int, blocks: int) -> int:
        return int(self._mover.value_bytes(group, blocks))

    def staging(self, size: int) -> Buffer:
        return host_buffer(size)

    def collect(self, group: int, ids: Sequence[int], into: Buffer) -> None:
        self._mover.gather(group, ids, self._part(group, ids, into))

    def settle(self, buffer: Buffer) -> None:
        """Nothing to wait for: the host's copies are done when they return."""

    def spread(self, group: int, ids: Sequence[int], source: Buffer) -> None:
        self._mover.scatter(group, ids, self._part(group, ids, source))

    def to_host(self, source: Buffer, into: memoryview) -> None:
        assert source.view is not None
        np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(source.view, np.uint8)[: len(into)])

    def fill(self, buffer: Buffer) -> None:
        """Random bytes, for a trial."""
        assert buffer.view is not None
        np.frombuffer(buffer.view, np.uint8)[:] = np.frombuffer(os.urandom(len(buffer.view)), np.uint8)

    def _part(self, group: int, ids: Sequence[int], buffer: Buffer) -> memoryview:
        assert buffer.view is not None
        return buffer.view[: self.value_bytes(group, len(ids))]


class DeviceStaging:
    """See `direct.StagingMover`. Buffers are tensors of bytes on the mover's device, aligned by hand."""

    def __init__(self, mover: DeviceMover) -> None:
        self._mover = mover

    def value_bytes(self, group: int, blocks: int) -> int:
        return self._mover.value_bytes(group, blocks)

    def staging(self, size: int) -> Buffer:
        whole = self._mover.empty(size + ALIGN)
        skip = -whole.data_ptr() % ALIGN
        part = whole[skip : skip + size]
        return Buffer(part.data_ptr(), size, None, part)

    def collect(self, group: int, ids: Sequence[int], into: Buffer) -> None:
        into.ready = self._mover.collect(group, ids, into.owner[: self.value_bytes(group, len(ids))])

    def settle(self, buffer: Buffer) -> None:
        """Wait for what was collected into it; whoever moves its bytes does so first."""
        ready, buffer.ready = buffer.ready, None
        if ready is not None:
            ready.synchronize()

    def spread(self, group: int, ids: Sequence[int], source: Buffer) -> None:
        self._mover.spread(group, ids, source.owner[: self.value_bytes(group, len(ids))])

    def fill(self, buffer: Buffer) -> None:
        """Random bytes, for a trial. They are there when this returns: a library's DMA is in the order of no stream."""
        buffer.owner.random_(0, 256)
        buffer.ready = self._mover.mark()
        self.settle(buffer)

    def to_host(self, source: Buffer, into: memoryview) -> None:
        self._mover.to_host(source.owner[: len(into)], into)
