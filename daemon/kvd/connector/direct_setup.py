"""Whether this engine moves chunks past the daemon, and with what: decided once, at the start, by trying it.

KVD_AIS=off      no (the default)
KVD_AIS=auto     yes where it works; else everything goes through the arena, which is said at WARN with kvdoctor's reason
KVD_AIS=require  yes, or the engine does not start

The trial is the real thing: an extent is lent by the daemon, written from a buffer like those of chunks, synced, read back and
compared, and given back. It finds what no list of conditions would: permissions, mounts, drivers, libraries that lie.

Roots: the daemon names its folders by path, device and inode. KVD_DIRECT_ROOTS says where this process sees them (in a
container, elsewhere); each must be one of the daemon's by device and inode. Without it the daemon's own paths are used.
"""

import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvd.connector.direct import Direct
from kvd.connector.direct_io import DirectError, DirectIO, open_io
from kvd.connector.link import Down, Link, wait_up
from kvd.connector.metrics import Counters
from kvd.connector.settings import Settings
from kvd.connector.staging import DeviceStaging, HostStaging
from kvd.errors import KvdError
from kvtools.errors import KvError, UsageError

logger = logging.getLogger("vllm.kvd")

TRIAL_BYTES = 64 << 10
TRIAL_NAMESPACE = "kvd.connector.trial"
WAIT_S = 5.0


class StartRefused(UsageError):
    """The engine must not start: the one error that may leave a connector method."""


class Roots:
    """The daemon's folders as this process sees them."""

    def __init__(self, named: Sequence[Path]) -> None:
        self._named = list(named)
        self._known: dict[tuple[tuple[str, int, int], ...], list[Path | None]] = {}

    def __call__(self, client: Any) -> list[Path | None]:
        """One path a root of the daemon; None where it is not visible here, or not named."""
        roots = tuple((str(path), int(device), int(inode)) for path, device, inode in client.connect().welcome.roots)
        found = self._known.get(roots)
        if found is None:
            found = self._known[roots] = [self._find(root) for root in roots]
        return found

    def _find(self, root: tuple[str, int, int]) -> Path | None:
        for path in self._named or [Path(root[0])]:
            try:
                status = path.stat()
            except OSError:
                continue
            if (status.st_dev, status.st_ino) == root[1:]:
                return path
        return None

    def strangers(self, client: Any) -> list[Path]:
        """Paths that were named and are no folder of the daemon."""
        return [path for path in self._named if path not in self(client)]


def set_up(
    settings: Settings, mover: Any, device: Any, link: Link, *, longest: Callable[[], int], counters: Counters
) -> Direct | None:
    """The way past the daemon, or None (off, or it does not work). Raises StartRefused where it is required.

    `longest()`: bytes of the longest chunk with GPU-direct.
    """
    if settings.ais == "off":
        return None
    backend = settings.direct_backend or _usual(device)
    roots = Roots(settings.direct_roots or ())
    try:
        io = open_io(backend, settings.direct_library)
        try:
            staging = DeviceStaging(mover) if io.device and hasattr(mover, "collect") else HostStaging(mover)
            direct = Direct(
                io,
                staging,
                roots=roots,
                longest=longest(),
                buffers=max(2, settings.direct_staging // longest()),
                checksum=settings.direct_checksum,
                counters=counters,
                reason_of=reason_of,
            )
            _try(link, roots, io, staging)
        except BaseException:
            io.close()
            raise
    except DirectError as error:
        counters.add_reason("direct_fallback", error.reason)
        why = reason_of(_first_root(link, roots))
        more = f". kvdoctor: {why}" if why and backend != "posix" else ""
        if settings.ais == "require":
            raise StartRefused(
                f"KVD_AIS=require, but GPU-direct ({backend}) does not work here: {error}{more}",
                hint="see kvdoctor; KVD_AIS=auto serves without it",
            ) from None
        logger.warning("kvd: no GPU-direct (%s): %s; chunks go through the daemon's arena%s", backend, error, more)
        return None
    logger.info("kvd: GPU-direct by %s", backend)
    return direct


def _usual(device: Any) -> str:
    """The back end for this engine's memory."""
    if getattr(device, "type", "cpu") != "cuda":
        return "posix"
    import torch

    return "hipfile" if torch.version.hip else "cufile"


def _try(link: Link, roots: Roots, io: DirectIO, staging: Any) -> None:
    """Write an extent and read it back. Raises DirectError."""
    if not wait_up(link, WAIT_S):
        raise DirectError("no_daemon", "the daemon does not answer")
    key = hashlib.sha256(f"{os.getpid()} {io.name}".encode()).digest()

    def trial(client: Any) -> None:
        if strange := roots.strangers(client):
            raise DirectError("unknown_root", f"{strange[0]} is no folder of the daemon's disk tier")
        with client.direct_write([key], [TRIAL_BYTES], namespace=TRIAL_NAMESPACE, retention="short") as lent:
            extent = lent.extents[0]
            if extent is None:
                raise DirectError(lent.reasons[0], f"the daemon lends no room: {lent.reasons[0]}")
            root = roots(client)[extent.root]
            if root is None:
                raise DirectError("unknown_root", "the daemon's folder is not visible here: name it in KVD_DIRECT_ROOTS")
            _round_trip(io, staging, root / extent.name, extent.offset)

    try:
        link.call(trial)
    except (Down, KvdError) as error:
        raise DirectError("no_daemon", str(error)) from None


def _round_trip(io: DirectIO, staging: Any, path: Path, offset: int) -> None:
    there, back = staging.staging(TRIAL_BYTES), staging.staging(TRIAL_BYTES)
    staging.fill(there)
    for buffer in (there, back):
        io.register(buffer)
    try:
        with io.opened(path) as file:
            io.write(file, there, TRIAL_BYTES, offset)
            io.sync(file)
            io.read(file, back, TRIAL_BYTES, offset)
    finally:
        for buffer in (there, back):
            io.deregister(buffer)
    written, read = (memoryview(bytearray(TRIAL_BYTES)) for _ in range(2))
    staging.to_host(there, written)
    staging.to_host(back, read)
    if written != read:
        raise DirectError("corrupt", "what was read back is not what was written")


def _first_root(link: Link, roots: Roots) -> str:
    try:
        return next((str(root) for root in link.call(roots) if root is not None), "")
    except (Down, KvdError):
        return ""


def reason_of(path: str) -> str:
    """What kvdoctor knows to be in the way of GPU-direct at `path` (or on this host), in a line; '' for nothing."""
    from kvdoctor.api import direct_reason

    try:
        return direct_reason(path or "/")
    except (KvError, OSError) as error:
        logger.debug("kvd: kvdoctor could not look: %s", error)
        return ""
