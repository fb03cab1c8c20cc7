"""Write a capture into a directory, in a process of its own: `python -I -S capture_writer.py DIR`, entries on stdin.

Standard library only, imports nothing of ours. Entries are lines of JSON [path, kind, bytes] each followed by that many bytes
(`kvdoctor.capture.pack`). All of it or nothing: they are written into a scratch directory beside DIR, `.NAME.kvdoctor-XXXX`,
which is renamed when it is whole.

Left behind is nothing. SIGTERM and SIGINT, and the end of the process that asked (whatever ended it), remove the scratch
directory. After a kill -9 of this one it stays, but the lock its writer held on it is gone: the next writer to the same
DIR removes every scratch directory beside it that nobody holds.

Exits 0 when written, 3 where DIR is there and not an empty directory, 1 otherwise, with the error's number and words on stderr.
"""

import ctypes
import errno
import fcntl
import json
import os
import shutil
import signal
import sys
from typing import BinaryIO

PR_SET_PDEATHSIG = 1
OCCUPIED = 3


def stop(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def end_with_parent() -> None:
    """SIGTERM for this process when the one that started it is gone."""
    parent = os.getppid()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        raise SystemExit(128 + signal.SIGTERM)


def held(folder: str) -> int | None:
    """A descriptor that holds `folder` for this process, None where another holds it or it is gone. Raises OSError."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        mine, there = os.fstat(handle), os.stat(folder, follow_symlinks=False)  # noqa: PTH116
    except (BlockingIOError, FileNotFoundError):
        os.close(handle)
        return None
    if (mine.st_dev, mine.st_ino) != (there.st_dev, there.st_ino):
        os.close(handle)
        return None
    return handle


def sweep(above: str, prefix: str) -> None:
    """Remove scratch directories of writers that are gone."""
    for name in os.listdir(above):  # noqa: PTH208
        if not name.startswith(prefix):
            continue
        try:
            handle = held(f"{above}/{name}")
        except OSError:
            continue  # not a directory, not ours to open: not ours to remove
        if handle is not None:
            shutil.rmtree(f"{above}/{name}", ignore_errors=True)
            os.close(handle)


def scratch(above: str, prefix: str) -> tuple[str, int]:
    """A new directory beside the destination, held by this process."""
    while True:
        folder = f"{above}/{prefix}{os.urandom(6).hex()}"
        os.mkdir(folder, 0o700)  # noqa: PTH102
        handle = held(folder)
        if handle is not None:
            return folder, handle
        # Another writer swept it between the two calls.


def write(stream: BinaryIO, place: str) -> None:
    while line := stream.readline():
        path, kind, size = json.loads(line)
        data = stream.read(size)
        target = f"{place}/{path}"
        os.makedirs(os.path.dirname(target), exist_ok=True)  # noqa: PTH103, PTH120
        if kind == "folder":
            os.makedirs(target, exist_ok=True)  # noqa: PTH103
        elif kind == "link":
            os.symlink(data, os.fsencode(target))  # noqa: PTH211
        else:
            with open(target, "xb") as file:  # noqa: PTH123
                file.write(data)


def occupied(folder: str) -> str:
    """What is in the way at `folder`, '' for nothing or an empty directory."""
    if os.path.islink(folder) or (os.path.lexists(folder) and not os.path.isdir(folder)):  # noqa: PTH114, PTH112
        return "is there and no directory"
    return "is there and not empty" if os.path.isdir(folder) and os.listdir(folder) else ""  # noqa: PTH112, PTH208


def main() -> None:
    end_with_parent()
    folder = os.path.abspath(sys.argv[1])  # noqa: PTH100
    above, name = os.path.split(folder)
    prefix = f".{name[:200]}.kvdoctor-"
    try:
        if way := occupied(folder):
            sys.stderr.write(f"{sys.argv[1]} {way}\n")
            raise SystemExit(OCCUPIED)
        os.makedirs(above, exist_ok=True)  # noqa: PTH103
        sweep(above, prefix)
        here, handle = scratch(above, prefix)
        try:
            place = f"{here}/capture"
            os.mkdir(place, 0o700)  # noqa: PTH102
            write(sys.stdin.buffer, place)
            os.rename(place, folder)  # noqa: PTH104 - onto nothing or an empty directory; the kernel refuses all else
        finally:
            shutil.rmtree(here, ignore_errors=True)
            os.close(handle)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST) and (way := occupied(folder)):
            sys.stderr.write(f"{sys.argv[1]} {way}\n")
            raise SystemExit(OCCUPIED) from None
        sys.stderr.write(f"{error.errno} {error.strerror}\n")
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
