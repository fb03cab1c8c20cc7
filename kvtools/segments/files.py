"""Opening, locking and naming files in shared memory, safely.

Purpose: every other module of this package touches /dev/shm only through the functions here. Contract: a name is one path
component and never a link; a file is opened only when it is regular; no lock is waited for without a bound. The folder
(`root`) is always an argument, so a test or a container can look elsewhere.

Two kinds of lock are used and never mixed up. flock(2) guards the *contents* of a file for the moment of one read or write,
as kvcached does. An open-file-description write lock (fcntl F_OFD_SETLK) is held *for life* by the process that owns a
sidecar or writes a stats segment: the kernel drops it when that process dies, however it dies, and any process that can
read the file can ask for it from any container on the same kernel. The two do not see each other (Linux keeps them apart
on local file systems), which is what lets an operator write a sidecar whose owner is alive.

Failure cases: a missing file is NotFound, one that cannot be opened or is of the wrong kind is Unreachable, a bad name is
UsageError, a lock that does not come free in time is TimedOut. /dev/shm is sticky and world-writable, so every file in it
may have been put there by anybody: nothing read from one is trusted, and nothing is mapped that its owner could truncate.
Concurrency: no state; every function may be called from any thread.
"""

import errno
import fcntl
import os
import re
import stat
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvtools.errors import NotFound, Refused, TimedOut, Unreachable, UsageError, hint_for
from kvtools.output import printable

SHM = Path(os.environ.get("KVTOOLS_SHM") or "/dev/shm")  # noqa: S108 - shared memory is the subject, not a place for scratch
"""Where segments lie: $KVTOOLS_SHM, read once and here alone, for every command, daemon and engine. kvcached has /dev/shm
hard-coded, so another folder parts a toolkit from its engines."""

MAX_NAME_BYTES = 255
"""The kernel's limit for one path component."""

STATS_PREFIX = "kvtools."
"""Stats segments are named kvtools.<kind>.<instance>; no pool may be named so."""

SIDECAR_SUFFIX = ".kvtools"
"""The owner sidecar of pool NAME is NAME.kvtools; no pool may be named so."""

LOCK_TIMEOUT_S = 2.0
"""How long a command waits for another process's flock. A holder needs microseconds; longer means that it is stuck."""

# struct flock of Linux on 64-bit machines: short type, short whence, long start, long length, int pid, padding.
_FLOCK = struct.Struct("hhqqi4x")
_SAFE_OPEN = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


class Denied(Unreachable):
    """The file is there, and this user may not open it so."""


def check_name(name: str) -> str:
    """`name` itself when it can name a file in shared memory. Raises UsageError: empty, hidden, with '/' or NUL, over 255 bytes."""
    if not name:
        raise UsageError("a segment name cannot be empty")
    shown = printable(name)
    if "/" in name or "\0" in name:
        raise UsageError(f"not a segment name: {shown}", hint="a segment is named by its file name alone, without a folder")
    if name.startswith("."):
        raise UsageError(f"not a segment name: {shown}", hint="names that begin with a dot are never segments")
    try:
        length = len(os.fsencode(name))
    except UnicodeEncodeError:
        raise UsageError(f"not a segment name: {shown}", hint="the name cannot be written in the file system's encoding") from None
    if length > MAX_NAME_BYTES:
        raise UsageError(f"segment name too long: {length} bytes", hint=f"the file system takes {MAX_NAME_BYTES} bytes at most")
    return name


def open_file(name: str, flags: int, *, root: Path = SHM, mode: int = 0o666, what: str = "segment") -> int:
    """A descriptor on the regular file `name` in `root`; the caller closes it.

    Links are never followed, and a FIFO, device or folder in the way cannot block or be opened by mistake. Raises NotFound,
    Refused (it exists and `flags` has O_EXCL), Unreachable.
    """
    path = root / check_name(name)
    try:
        fd = os.open(path, flags | _SAFE_OPEN, mode)
    except OSError as error:
        raise explain(error, name, what=what, root=root) from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise Unreachable(f"{what} {printable(name)} is not a regular file", hint=f"look at it with: ls -l {root}")
    return fd


def open_or_create(name: str, *, root: Path = SHM, what: str = "segment") -> int:
    """A writable descriptor on `name`, made (0666 less the umask) where it is missing.

    Two steps, because O_CREAT on another user's existing file is refused in sticky folders (fs.protected_regular), even to root.
    """
    while True:
        try:
            return open_file(name, os.O_RDWR, root=root, what=what)
        except NotFound:
            pass
        try:
            return open_file(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, root=root, what=what)
        except Refused:
            continue  # somebody made it in between: open that one


def explain(error: OSError, name: str, *, what: str, root: Path) -> NotFound | Unreachable | Refused:
    """What an operating-system error about the file `name` means, in the words of the error tree."""
    shown = printable(name)
    if error.errno == errno.ENOENT:
        return NotFound(f"no {what} named {shown}")
    if error.errno == errno.EEXIST:
        return Refused(f"{what} {shown} exists already", hint="choose another name, or remove it first")
    if error.errno == errno.ELOOP:
        return Unreachable(f"{what} {shown} is a symbolic link", hint="links in shared memory are never followed")
    if error.errno in (errno.EACCES, errno.EPERM):
        return Denied(f"{what} {shown}: permission denied", hint="run as the user whose engine made it, or as root")
    if error.errno in (errno.ENXIO, errno.EISDIR, errno.ENODEV):
        return Unreachable(f"{what} {shown} is not a regular file", hint=f"look at it with: ls -l {root}")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Unreachable(
            f"no room in {root} for {what} {shown}", hint=f"free some shared memory (df {root}), or give the container a larger one"
        )
    return Unreachable(f"{what} {shown}: {error.strerror or error}", hint=hint_for(error))


_LONE = re.compile("[\ud800-\udfff]")


def encodable(tree: Any) -> Any:
    """JSON that somebody else wrote, with halves of characters (`"\\ud800"`) as U+FFFD: they fit no file and no screen."""
    if isinstance(tree, str):
        return tree if tree.isascii() else _LONE.sub("\ufffd", tree)
    if isinstance(tree, dict):
        return {encodable(key): encodable(value) for key, value in tree.items()}
    return [encodable(value) for value in tree] if isinstance(tree, list) else tree


def still_named(fd: int, path: Path) -> bool:
    """Whether `path` is (still) the file that `fd` is open on: between opening and locking it may have been replaced."""
    try:
        there = path.stat(follow_symlinks=False)
    except OSError:
        return False
    here = os.fstat(fd)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


def flock(
    fd: int,
    kind: int,
    *,
    what: str,
    timeout_s: float = LOCK_TIMEOUT_S,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Take the flock `kind` (fcntl.LOCK_SH or LOCK_EX) on `fd`, or raise TimedOut after `timeout_s`. Closing `fd` drops it."""
    deadline = clock() + timeout_s
    pause = 0.0005
    while True:
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            left = deadline - clock()
            if left <= 0:
                raise TimedOut(
                    f"{what} stayed locked by another process for {timeout_s:.3g} s",
                    hint="find the holder with fuser -v on that file (an engine or tool is stuck in an update)",
                ) from None
            sleep(min(pause, left))
            pause = min(pause * 2, 0.02)


def unflock(fd: int) -> None:
    """Drop the flock on `fd`."""
    fcntl.flock(fd, fcntl.LOCK_UN)


def lock_for_life(fd: int) -> bool:
    """Take the open-file-description write lock on `fd` (which must be writable); False when another process holds it.

    It ends when the last descriptor of this open file is closed: on close, on exec (descriptors here are close-on-exec) or on
    death. A child made by a bare fork shares the description and keeps the lock until it, too, execs or ends.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def held_for_life(fd: int) -> bool:
    """Whether another open file holds the life lock. A read-only `fd` is enough: F_OFD_GETLK only asks."""
    probe = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    return bool(_FLOCK.unpack(probe[: _FLOCK.size])[0] != fcntl.F_UNLCK)


def process_start(pid: int) -> int:
    """Start time of process `pid` in clock ticks since boot (field 22 of /proc/PID/stat), 0 when there is none to read."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return 0
    # The command name in parentheses may hold blanks and parentheses: count from the last one.
    return int(text.rpartition(b")")[2].split()[19])


def _ended(pid: int) -> bool:
    """Whether process `pid` is over and only its entry is left, for a parent that has not asked yet (or never will).

    While threads of it are still ending it holds its files and locks: it is not over then.
    """
    try:
        over = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] in (b"Z", b"X")
        return over and len(list(Path(f"/proc/{pid}/task").iterdir())) <= 1
    except OSError:
        return True


def pid_namespace() -> int:
    """Inode of this process's pid namespace (a pid means nothing outside it), 0 when /proc is not there."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0


def process_story(pid: int, start: int, namespace: int) -> str:
    """What can be said about a recorded writer, for people: pids are information only, the life lock is the proof."""
    if namespace and namespace != pid_namespace():
        return f"pid {pid} in another pid namespace"
    now = process_start(pid)
    if not now or _ended(pid):
        return f"pid {pid} is gone"
    return f"pid {pid} runs" if now == start else f"pid {pid} is another process now"
