"""The folder as a whole: who may open it, and which format it has.

`manifest.json` says what the folder is, so that another program, another version or a mistaken path is refused by name
before anything is touched; and from where on no epoch has ever been used in it (see `take_epochs`). `owner.lock` is held
for life by the one process that has the store open.
"""

import contextlib
import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from kvd.tiers.adapters.base import AdapterConfigError, AdapterError, AdapterInUse, Mark
from kvd.tiers.adapters.disk.format import FORMAT_NAME, FORMAT_VERSION, PAGE, READ_VERSIONS, region_sequence
from kvd.tiers.adapters.disk.region import EPOCHS
from kvd.tiers.adapters.disk.storage import Storage, read_fully, write_fully
from kvtools.errors import hint_for
from kvtools.output import printable

MANIFEST = "manifest.json"
LOCK = "owner.lock"
OTHERS = re.compile(r"kvtools-[a-z-]+\.json")
"""Manifests of our other tiers."""
_LAST = (1 << 32) - 2 * EPOCHS  # epochs are u32


@dataclass(frozen=True)
class Folder:
    """What the manifest says. `epoch`: no write has had this one or a higher one; 0 where it does not say.

    `mark` and `peers` are `Adapter.mark`. `taken` is not in the file: the first of the epochs that are ours already, 0 for none.
    """

    version: int
    created_ns: int
    region_bytes: int
    epoch: int = 0
    mark: int = 0
    peers: int = 0
    taken: int = 0


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


def check(io: Storage, root: Path, region_bytes: int, clock_ns: Callable[[], int]) -> Folder:
    """Refuse a folder of a format or version that is not ours to read; write the manifest where there is none.

    Where no manifest says, the folder has the newest version.

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
            return Folder(
                _version(root, found),
                _number(found, "created_ns", clock_ns()),
                _number(found, "region_bytes", region_bytes),
                _number(found, "epoch", 0),
                _number(found, "mark", 0),
                _number(found, "peers", 0),
            )
        if not any(region_sequence(name) is not None for name in names):
            raise AdapterConfigError(f"{root / MANIFEST} is not a manifest of kvd", hint="give the disk tier a folder of its own")
        # Damaged, but the region files speak for themselves: each carries the version too.
    if other := next((name for name in sorted(names) if OTHERS.fullmatch(name)), None):
        raise AdapterConfigError(
            f"{root} holds a store of another kind: {printable(other)}", hint="give the disk tier a folder of its own"
        )
    try:
        return take_epochs(io, root, Folder(FORMAT_VERSION, clock_ns(), region_bytes), clock_ns)
    except OSError as error:
        raise AdapterError(f"cannot write {root / MANIFEST}: {error.strerror or error}", hint=hint_for(error)) from error


def take_epochs(io: Storage, root: Path, folder: Folder, clock_ns: Callable[[], int]) -> Folder:
    """Take EPOCHS epochs that nothing in the folder has ever had, from `taken` on; noted stably before it is answered.

    Raises OSError.

    What a region holds does not tell: of the writes of a run that a power cut ended, the first may be lost and later ones be
    there. So a start that went on one above the highest epoch it *finds* could give its own writes the epoch of such remains,
    and a second power cut would make them their successors: values that were deleted or overwritten since.

    Where the manifest does not say (it was damaged, or is of version 1), the seconds since 1970 are above all that was used.
    """
    first = folder.epoch if 0 < folder.epoch < _LAST else min(max(clock_ns() // 1_000_000_000, 1 << 20), 1 << 31)
    folder = replace(folder, epoch=first + EPOCHS, taken=first)
    write(io, root, folder)
    return folder


def mark(io: Storage, root: Path, folder: Folder, new: Mark) -> Folder:
    """Write the manifest with another mark; what it says then. Raises AdapterError."""
    folder = replace(folder, mark=new.number, peers=new.peers)
    try:
        write(io, root, folder)
    except OSError as error:
        raise AdapterError(f"cannot write {root / MANIFEST}: {error.strerror or error}", hint=hint_for(error)) from error
    return folder


def mark_alone(io: Storage, root: Path, folder: Folder) -> Folder:
    """What the manifest says once a folder that was one of several is used alone. Never raises: a full disk may be served."""
    if not folder.mark or folder.peers == folder.created_ns:
        return folder
    with contextlib.suppress(AdapterError):
        return mark(io, root, folder, Mark(max(folder.mark + 1, time.time_ns()), folder.created_ns))
    return folder


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


def _number(found: dict[str, object], name: str, default: int) -> int:
    """A number of the manifest; the default where it has none that makes sense."""
    value = found.get(name)
    return value if isinstance(value, int) and 0 <= value < 1 << 63 else default


def write(io: Storage, root: Path, folder: Folder) -> None:
    """Write the manifest, in place of what is there, stably. Raises OSError."""
    content: dict[str, object] = {
        "format": FORMAT_NAME,
        "version": folder.version,
        "created_ns": folder.created_ns,
        "region_bytes": folder.region_bytes,
    }
    if folder.epoch:
        content["epoch"] = folder.epoch
    if folder.mark:
        content |= {"mark": folder.mark, "peers": folder.peers}
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
