"""System calls on KV paths, in a process of their own: stat on a dead NFS mount, or a write to a frozen one, never returns.

Run as `python -I -S pathprobe.py --read|--write PATH...` by `kvdoctor.collect.storage`; standard library only, imports
nothing of ours. Each answer is a line of JSON with the path's `index`, flushed as soon as it is known (first what reading
tells, then what writing tells). Every path has a thread of its own, so that one that hangs costs only its own answer.
Nothing is left behind: the file that O_DIRECT is tried on is opened with O_TMPFILE and never has a name.
"""

import ctypes
import errno
import json
import mmap
import os
import stat
import sys
import threading

STATX_DIOALIGN = 0x2000
AT_FDCWD = -100
AT_EMPTY_PATH = 0x1000
BLOCK = 4096
NO_SUCH = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
"""What says that nothing is there, and never will be under this name."""


def statx_alignment(handle: int) -> tuple[int, int] | None:
    """(memory, offset) alignment of direct I/O on an open file, None where the file system does not say."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "statx"):
        return None
    buffer = ctypes.create_string_buffer(256)
    if libc.statx(handle, b"", AT_EMPTY_PATH, STATX_DIOALIGN, buffer) != 0:
        return None
    (mask,) = (int.from_bytes(buffer.raw[0:4], sys.byteorder),)
    if not mask & STATX_DIOALIGN:
        return None
    # struct statx: stx_dio_mem_align at 0x98, stx_dio_offset_align at 0x9c.
    return int.from_bytes(buffer.raw[0x98:0x9C], sys.byteorder), int.from_bytes(buffer.raw[0x9C:0xA0], sys.byteorder)


def name_of(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, str(error.errno))


def direct(folder: str, write: bool) -> dict[str, object]:
    """Try direct I/O in `folder`: on a nameless file where it is writable, else on a file that is already there."""
    found: dict[str, object] = {"opened": None, "how": "nameless file"}
    handle = -1
    try:
        handle = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        found["opened"] = True
    except OSError as error:
        found["error"] = name_of(error)
        # EINVAL may be the O_DIRECT flag or O_TMPFILE being unknown there (overlay, NFS): one more try tells which.
        found["opened"] = False if error.errno == errno.EINVAL and without_direct(folder) else None
    if handle < 0 and found["opened"] is None:
        handle, found["how"] = existing(folder), "a file that was there"
        if handle >= 0:
            found["opened"] = True
    if handle < 0:
        return found
    try:
        alignment = statx_alignment(handle)
        if alignment is not None:
            found["mem"], found["off"] = alignment
        if write and found["how"] == "nameless file":
            found.update(write_read(handle))
    finally:
        os.close(handle)
    return found


def without_direct(folder: str) -> bool:
    try:
        os.close(os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600))
    except OSError:
        return False
    return True


def existing(folder: str) -> int:
    """A regular file of the folder opened for direct reading, or -1."""
    try:
        with os.scandir(folder) as entries:
            for _, entry in zip(range(64), entries, strict=False):
                if entry.is_file(follow_symlinks=False):
                    try:
                        return os.open(entry.path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC | os.O_NOFOLLOW)
                    except OSError:
                        continue
    except OSError:
        pass
    return -1


def write_read(handle: int) -> dict[str, object]:
    """One aligned block out and back."""
    with mmap.mmap(-1, BLOCK) as out, mmap.mmap(-1, BLOCK) as back:
        out.write(os.urandom(BLOCK))
        try:
            if os.pwritev(handle, [out], 0) != BLOCK or os.preadv(handle, [back], 0) != BLOCK:
                return {"write": "short"}
        except OSError as error:
            return {"write": name_of(error)}
        return {"write": BLOCK if out[:] == back[:] else "other bytes came back"}


def look(path: str) -> dict[str, object]:
    """What can be said about one path without writing to it."""
    found: dict[str, object] = {}
    try:
        status = os.stat(path)  # noqa: PTH116 - this script starts in 15 ms because it does without pathlib
    except OSError as error:
        found.update(exists=False if error.errno in NO_SUCH else None, error=name_of(error))
        if error.errno == errno.ENOENT and os.path.islink(path):  # noqa: PTH114 - as above
            found["dangling"] = True
        return found
    found.update(exists=True, is_dir=stat.S_ISDIR(status.st_mode))
    space = os.statvfs(path)
    found.update(total=space.f_blocks * space.f_frsize, free=space.f_bavail * space.f_frsize)
    found["held"] = held(path) if found["is_dir"] else 0
    # btrfs and some network file systems have no inode table: 0 files means "not counted".
    found["free_files"] = space.f_favail if space.f_files else None
    found["writable"] = os.access(path, os.W_OK | (os.X_OK if found["is_dir"] else 0)) and not space.f_flag & os.ST_RDONLY
    return found


def held(folder: str) -> int:
    """Bytes of kvd's own files in a folder, of the first 20000 entries."""
    total = 0
    try:
        with os.scandir(folder) as entries:
            for _, entry in zip(range(20_000), entries, strict=False):
                if entry.name.endswith(".kvcache"):
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
    except OSError:
        return total  # a file went meanwhile: near enough
    return total


_printing = threading.Lock()


def say(index: int, answer: dict[str, object]) -> None:
    with _printing:
        sys.stdout.write(json.dumps({"index": index, **answer}) + "\n")
        sys.stdout.flush()


def probe(index: int, path: str, write: bool) -> None:
    try:
        found = look(path)
        say(index, found)
        if found.get("is_dir"):
            say(index, {"direct": direct(path, write and bool(found.get("writable")))})
    except (OSError, ValueError) as error:  # the path went, or its mount did, between two calls
        say(index, {"error": name_of(error) if isinstance(error, OSError) else str(error)})


def main() -> None:
    write = sys.argv[1] == "--write"
    threads = [threading.Thread(target=probe, args=(index, path, write)) for index, path in enumerate(sys.argv[2:])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
