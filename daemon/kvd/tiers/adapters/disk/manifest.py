"""The folder as a whole: who may open it, and which format it has.

`manifest.json` says what the folder is, so that another program, another version or a mistaken path is refused by name
before anything is touched. `owner.lock` is held for life by the one process that has the store open.
"""

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path

from kvd.tiers.adapters.base import AdapterConfigError, AdapterError, AdapterInUse
from kvd.tiers.adapters.disk.format import FORMAT_NAME, FORMAT_VERSION, PAGE, READ_VERSIONS, region_sequence
from kvd.tiers.adapters.disk.storage import Storage, read_fully, write_fully
from kvtools.errors import hint_for
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


def disown(io: Storage, root: Path, owner: int) -> None:
    """Give a folder back that was refused: it keeps its lock file only if it is one of ours. Never raises."""
    with contextlib.suppress(OSError):
        names = io.listdir(root)
        found = _parse(_read(io, root / MANIFEST)) if MANIFEST in names else None
        if not (found and found["format"] == FORMAT_NAME) and not any(region_sequence(name) is not None for name in names):
            io.unlink(root / LOCK)
    io.close(owner)


def _unusable(root: Path, error: OSError) -> AdapterConfigError:
    if isinstance(error, NotADirectoryError | FileExistsError):
        return AdapterConfigError(f"{root} is not a folder", hint="give the disk tier a folder of its own")
    return AdapterConfigError(
        f"cannot use {root} for the disk tier: {error.strerror or error}",
        hint=hint_for(error, "the folder must be writable for the user that runs kvd"),
    )


def check(io: Storage, root: Path, region_bytes: int, clock_ns: Callable[[], int]) -> int:
    """Refuse a folder of a format or version that is not ours to read; write the manifest where there is none.

    Answers which version the folder has: the newest where no manifest says.

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
            return _version(root, found)
        if not any(region_sequence(name) is not None for name in names):
            raise AdapterConfigError(f"{root / MANIFEST} is not a manifest of kvd", hint="give the disk tier a folder of its own")
        # Damaged, but the region files speak for themselves: each carries the version too.
    try:
        write(io, root, region_bytes, clock_ns)
    except OSError as error:
        raise AdapterError(f"cannot write {root / MANIFEST}: {error.strerror or error}", hint=hint_for(error)) from error
    return FORMAT_VERSION


def refuse_strange(io: Storage, root: Path) -> int:
    """`check` without writing anything. Raises AdapterConfigError, OSError."""
    found = _parse(_read(io, root / MANIFEST)) if MANIFEST in io.listdir(root) else None
    return FORMAT_VERSION if found is None else _version(root, found)


def _parse(text: bytes) -> dict[str, object] | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) and "format" in found and "version" in found else None


def _version(root: Path, found: dict[str, object]) -> int:
    """The version that a manifest names. Raises AdapterConfigError where it is another program's, or none that is read here."""
    if found["format"] != FORMAT_NAME:
        raise AdapterConfigError(
            f"{root} holds a store of another kind: {printable(str(found['format']))}",
            hint="give the disk tier a folder of its own",
        )
    for version in READ_VERSIONS:
        if found["version"] == version:
            return version
    raise AdapterConfigError(strange_version(root, found["version"]), hint=STRANGE_HINT)


STRANGE_HINT = "use the kvd that wrote it, or give the tier another folder"


def strange_version(place: Path, version: object) -> str:
    """The sentence about a folder or file of a version that this program does not know."""
    read = " and ".join(str(known) for known in READ_VERSIONS)
    return f"{place} has format version {printable(str(version))}; this kvd reads versions {read}"


def _read(io: Storage, path: Path) -> bytes:
    fd = io.open(path)
    try:
        buffer = memoryview(bytearray(PAGE))
        return bytes(buffer[: read_fully(io, fd, [buffer], 0)])
    finally:
        io.close(fd)


def write(io: Storage, root: Path, region_bytes: int, clock_ns: Callable[[], int]) -> None:
    """Write the manifest of a folder of the newest version, in place of what is there. Raises OSError."""
    content: dict[str, object] = {
        "format": FORMAT_NAME,
        "version": FORMAT_VERSION,
        "created_ns": clock_ns(),
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
