"""The folder as a whole: who may open it, and which format it has.

`manifest.json` says what the folder is, so that another program, another version or a mistaken path is refused by name
before anything is touched. `owner.lock` is held for life by the one process that has the store open.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path

from kvd.tiers.adapters.base import AdapterConfigError, AdapterError, AdapterInUse
from kvd.tiers.adapters.disk.format import FORMAT_NAME, FORMAT_VERSION, PAGE, region_sequence
from kvd.tiers.adapters.disk.storage import Storage, read_fully, write_fully
from kvtools.output import printable

MANIFEST = "manifest.json"
LOCK = "owner.lock"


def own(io: Storage, root: Path) -> int:
    """Make the folder where it is missing, and own it; the descriptor with the lock. Raises AdapterConfigError, AdapterInUse."""
    try:
        io.mkdir(root)
        held = io.lock(root / LOCK, f"pid {os.getpid()} on {os.uname().nodename}\n")
    except OSError as error:
        raise _unusable(root, error) from error
    if isinstance(held, str):
        raise AdapterInUse(
            f"{root} is in use by another kvd ({printable(held) or 'owner unknown'})",
            hint="stop that one first, or give this one another folder",
        )
    return held


def _unusable(root: Path, error: OSError) -> AdapterConfigError:
    if isinstance(error, NotADirectoryError | FileExistsError):
        return AdapterConfigError(f"{root} is not a folder", hint="give the disk tier a folder of its own")
    return AdapterConfigError(
        f"cannot use {root} for the disk tier: {error.strerror or error}",
        hint="the folder must be writable for the user that runs kvd",
    )


def check(io: Storage, root: Path, region_bytes: int, clock_ns: Callable[[], int]) -> None:
    """Refuse a folder of another format or version; write the manifest where there is none.

    Raises AdapterConfigError (will never work), AdapterError (cannot write now).
    """
    try:
        names = io.listdir(root)
        text = _read(io, root / MANIFEST) if MANIFEST in names else b""
    except OSError as error:
        raise _unusable(root, error) from error
    if text:
        found = _parse(text)
        if found is not None:
            _refuse_strange(root, found)
            return
        if not any(region_sequence(name) is not None for name in names):
            raise AdapterConfigError(f"{root / MANIFEST} is not a manifest of kvd", hint="give the disk tier a folder of its own")
        # Damaged, but the region files speak for themselves: each carries the version too.
    try:
        _write(io, root, region_bytes, clock_ns())
    except OSError as error:
        raise AdapterError(f"cannot write {root / MANIFEST}: {error.strerror or error}") from error


def refuse_strange(io: Storage, root: Path) -> None:
    """Raise AdapterConfigError where the manifest names another format or version. Raises OSError."""
    if MANIFEST in io.listdir(root):
        found = _parse(_read(io, root / MANIFEST))
        if found is not None:
            _refuse_strange(root, found)


def _parse(text: bytes) -> dict[str, object] | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) and "format" in found and "version" in found else None


def _refuse_strange(root: Path, found: dict[str, object]) -> None:
    if found["format"] != FORMAT_NAME:
        raise AdapterConfigError(
            f"{root} holds a store of another kind: {printable(str(found['format']))}",
            hint="give the disk tier a folder of its own",
        )
    if found["version"] != FORMAT_VERSION:
        raise AdapterConfigError(
            f"{root} has format version {printable(str(found['version']))}; this kvd reads version {FORMAT_VERSION}",
            hint="use the kvd that wrote it, or give the tier another folder",
        )


def _read(io: Storage, path: Path) -> bytes:
    fd = io.open(path)
    try:
        buffer = memoryview(bytearray(PAGE))
        return bytes(buffer[: read_fully(io, fd, [buffer], 0)])
    finally:
        io.close(fd)


def _write(io: Storage, root: Path, region_bytes: int, created_ns: int) -> None:
    content: dict[str, object] = {
        "format": FORMAT_NAME,
        "version": FORMAT_VERSION,
        "created_ns": created_ns,
        "region_bytes": region_bytes,
    }
    temporary = root / (MANIFEST + ".tmp")
    if temporary.name in io.listdir(root):
        io.unlink(temporary)
    fd = io.open(temporary, create=True)
    try:
        write_fully(io, fd, [memoryview(json.dumps(content).encode() + b"\n")], 0)
        io.fdatasync(fd)
    finally:
        io.close(fd)
    io.rename(temporary, root / MANIFEST)
    io.fsync_dir(root)
