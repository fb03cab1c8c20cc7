"""An arena on an NVMe drive instead of in RAM (`--gds-l1-path`): for engines that read and write the drive themselves.

It is one preallocated file, `kvd_gds_slab.bin` in the folder given, mapped like the arena in RAM and handed to clients the
same way. An engine with GPU-direct opens the descriptor's /proc path with O_DIRECT and moves bytes between VRAM and the
drive at the offsets it was given; one without maps it and goes through the page cache, which the kernel may take back: so
the arena may be larger than memory. Nothing survives the daemon: the file is removed at its end and made anew at its start.

Two differences to a memfd. A file cannot be sealed, so whoever may write to the folder can truncate the slab under its users:
the folder is made 0700 and the file 0600. And it has a name, so it is locked for life: a second daemon is refused, and a
file that a killed one left behind is told from one in use.
"""

import errno
import mmap
import os
import stat
from pathlib import Path

from kvd.errors import KvdError
from kvd.store.arena import Arena
from kvtools.errors import Refused, hint_for
from kvtools.segments.files import lock_for_life
from kvtools.units import format_size

NAME = "kvd_gds_slab.bin"


class Slab(Arena):
    """`capacity` bytes of a file in `folder`. Raises KvdError when it cannot be had, Refused when a live daemon has it."""

    def __init__(self, folder: Path, capacity: int) -> None:
        self.path = folder / NAME
        super().__init__(capacity)

    def _create(self) -> int:
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._remove_old()
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            hint = hint_for(error, "--gds-l1-path names a folder of its own")
            raise KvdError(f"cannot make {self.path}: {error.strerror}", hint=hint) from error
        try:
            # A descriptor of its own: the other one goes to clients, whose mappings would hold the lock when we are long gone.
            self._lock_fd = os.open(self.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            lock_for_life(self._lock_fd)
            os.posix_fallocate(fd, 0, self.capacity)
        except OSError as error:
            os.close(fd)
            self.path.unlink(missing_ok=True)
            size = format_size(self.capacity)
            hint = "give --max-bytes what is free there" if error.errno in (errno.ENOSPC, errno.EFBIG) else hint_for(error)
            raise KvdError(f"cannot make {self.path} {size} large: {error.strerror}", hint=hint) from error
        return fd

    def _remove_old(self) -> None:
        """What a daemon that was killed left behind; anything else of that name is not ours to remove."""
        try:
            status = self.path.stat(follow_symlinks=False)
        except FileNotFoundError:
            return
        if not stat.S_ISREG(status.st_mode):
            raise KvdError(f"{self.path} is no file", hint="--gds-l1-path names a folder of its own")
        fd = os.open(self.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if not lock_for_life(fd):
                raise Refused(f"another daemon has {self.path}", hint="each daemon needs a --gds-l1-path of its own")
            self.path.unlink()
        finally:
            os.close(fd)

    def _protect(self) -> None:
        """No seals on files. Who maps it reads here and there: reading ahead would only push other things out."""
        self.map.madvise(mmap.MADV_RANDOM)

    def _populate(self, end: int) -> None:
        """Blocks are allocated already; pages come when they are used, and go when the kernel wants them."""
        self._populated = self.capacity
        self.extents.limit = self.capacity // 4096

    def close(self) -> None:
        super().close()
        self.path.unlink(missing_ok=True)
        os.close(self._lock_fd)
