"""Write and read a nameless file with O_DIRECT and compare every byte: `python -I proof_disk.py DIR BYTES`.

Standard library only, imports nothing of ours. Four threads, 4 MiB a request; each block carries its own number at both
ends, so one that comes back in another's place is noticed. Rates are of the transfers alone: the bytes are compared in a
second, untimed reading. The file is opened with O_TMPFILE (where the file system has none: made
under a random name and unlinked at once), so nothing is left behind however this ends. Prints lines of JSON as results come.
"""

import json
import mmap
import os
import sys
import threading
import time
from typing import Any

BLOCK = 4 << 20
THREADS = 4


def say(**found: object) -> None:
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


def open_nameless(folder: str, flags: int) -> int:
    """A file in `folder` without a name."""
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    except OSError:
        name = os.path.join(folder, f".kvdoctor-prove-{os.getpid()}-{os.urandom(6).hex()}")  # noqa: PTH118 - starts faster without pathlib
        handle = os.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600)
        os.unlink(name)  # noqa: PTH108
        return handle


class Worker(threading.Thread):
    """Moves every THREADS-th block: mode is write, read or compare. `error` holds what stopped it."""

    def __init__(self, handle: int, first: int, blocks: int, content: bytes, mode: str) -> None:
        super().__init__(daemon=True)
        self.handle, self.first, self.blocks, self.content, self.mode = handle, first, blocks, content, mode
        self.error = ""
        self.errno: int | None = None
        self.same = True

    def run(self) -> None:
        with mmap.mmap(-1, BLOCK) as buffer:
            buffer[:] = self.content
            for number in range(self.first, self.blocks, THREADS):
                try:
                    done = self.move(buffer, number)
                except OSError as error:
                    self.error, self.errno = f"{self.mode}: {error.strerror}", error.errno
                    return
                if done != BLOCK:
                    self.error = f"short {self.mode}: {done} bytes"
                    return

    def move(self, buffer: mmap.mmap, number: int) -> int:
        mark = number.to_bytes(8, "little")
        if self.mode == "write":
            buffer[:8] = buffer[-8:] = mark
            return os.pwritev(self.handle, [buffer], number * BLOCK)
        done = os.preadv(self.handle, [buffer], number * BLOCK)
        if self.mode == "compare":
            self.same = self.same and buffer[:8] == buffer[-8:] == mark and buffer[8:-8] == self.content[8:-8]
        return done


def go(handle: int, blocks: int, content: bytes, mode: str) -> tuple[float, dict[str, Any], bool]:
    """Seconds, the first error with its number ({} when none), and whether all blocks compared equal."""
    workers = [Worker(handle, first, blocks, content, mode) for first in range(THREADS)]
    started = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    error: dict[str, Any] = next(({"error": worker.error, "errno": worker.errno} for worker in workers if worker.error), {})
    return time.perf_counter() - started, error, all(worker.same for worker in workers)


def main() -> None:
    folder, size = sys.argv[1], int(sys.argv[2])
    blocks, content = max(THREADS, size // BLOCK), os.urandom(BLOCK)
    direct = True
    try:
        handle = open_nameless(folder, os.O_DIRECT)
    except OSError:
        direct = False
        try:
            handle = open_nameless(folder, 0)
        except OSError as error:
            say(error=f"open: {error.strerror}", errno=error.errno)
            return
    try:
        os.posix_fallocate(handle, 0, blocks * BLOCK)
    except OSError as error:
        say(error=f"allocate {blocks * BLOCK} bytes: {error.strerror}", errno=error.errno)
        return
    seconds, wrong, _ = go(handle, blocks, content, "write")
    if wrong:
        say(direct=direct, **wrong)
        return
    started = time.perf_counter()
    os.fsync(handle)
    flushed = time.perf_counter() - started
    say(direct=direct, bytes=blocks * BLOCK, write_bytes_per_s=blocks * BLOCK / (seconds + flushed), fsync_s=flushed)
    if not direct:
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    seconds, wrong, _ = go(handle, blocks, content, "read")
    if wrong:
        say(**wrong)
        return
    say(read_bytes_per_s=blocks * BLOCK / seconds)
    _, wrong, same = go(handle, blocks, content, "compare")
    say(same=same and not wrong, **wrong)


if __name__ == "__main__":
    main()
