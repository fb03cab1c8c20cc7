"""Is it safe to touch a path? Asked by a child, where it lies on a file system whose server may be gone.

A thread of ours that looks up a name on a dead mount while another process already does so sleeps where no signal reaches
it, and a process with such a thread can neither be killed nor exit. A child that is abandoned costs nothing.
"""

import os
import sys
from pathlib import Path

from kvdoctor.collect import tools
from kvdoctor.parse.mounts import mount_of, parse_mountinfo
from kvtools.errors import TimedOut

LOCAL = frozenset(
    {"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "bcachefs", "tmpfs", "ramfs", "overlay", "squashfs", "erofs"}
)
"""File systems of this kernel alone: they answer."""


def must_answer(path: str | Path, limit_s: float) -> None:
    """Return when a stat of `path` comes back, whatever it says. Raises TimedOut where it does not within `limit_s`."""
    try:
        place = os.path.abspath(path)  # noqa: PTH100
        table = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
    except OSError:
        return
    mount = mount_of(place, parse_mountinfo(table))
    if mount is None or mount.fstype in LOCAL:
        return
    run = tools.run("stat", [sys.executable, "-I", "-S", "-c", "import os, sys; os.path.exists(sys.argv[1])", place], limit_s)
    if run.state in ("hung", "abandoned"):
        where = f" (pid {run.pid}, state {run.proc_state}, in {run.wchan})" if run.state == "abandoned" else ""
        raise TimedOut(
            f"{path} does not answer within {run.seconds:.0f} s{where}",
            hint=f"{mount.point} is a {mount.fstype} mount whose server may be gone",
        )
