"""The system packages that suites need, beside what pip brings.

`ensure()` installs the missing ones when it may (root, apt-get); otherwise it prints the one line to run and what is left
out until then. A suite whose package is missing skips with the same reason; in CI a skip is a failure.

Debian starts a server as soon as its package is installed; RUNLEVEL=1 is how maintainer scripts are told not to.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from ctypes.util import find_library
from dataclasses import dataclass


@dataclass(frozen=True)
class Package:
    """A Debian package, how to see that it is there, and which tests want it."""

    name: str
    present: Callable[[], bool]
    wanted_by: str


def _command(name: str) -> Callable[[], bool]:
    return lambda: any(shutil.which(name, path=path) for path in (os.environ.get("PATH", ""), "/usr/sbin:/sbin:/usr/bin"))


PACKAGES = (
    Package("mandoc", _command("mandoc"), "the lint of the man pages"),
    Package("tmux", _command("tmux"), "kvtop and kvctl's shell on a real terminal"),
    Package("zsh", _command("zsh"), "completion in zsh"),
    Package("fish", _command("fish"), "completion in fish"),
    Package("xfsprogs", _command("mkfs.xfs"), "kvdoctor on a real XFS"),
    Package("btrfs-progs", _command("mkfs.btrfs"), "kvdoctor on a real Btrfs"),
    Package("redis-server", _command("redis-server"), "the tier on a real Redis"),
    Package("libibverbs1", lambda: find_library("ibverbs") is not None, "the tier on a real Mooncake pool"),
    Package("kmod", _command("modinfo"), "kvdoctor on real kernel modules"),
)


def missing(packages: Sequence[Package] = PACKAGES) -> list[Package]:
    """The packages that are not there."""
    return [package for package in packages if not package.present()]


def install_line(packages: Sequence[Package]) -> str:
    """The one line to run as root."""
    return "apt-get install --yes --no-install-recommends " + " ".join(package.name for package in packages)


def ensure() -> list[Package]:
    """Install what is missing where that is possible. Returns what is still missing, after saying what that leaves out."""
    absent = missing()
    if absent and os.geteuid() == 0 and shutil.which("apt-get"):
        print("setup: installing", ", ".join(package.name for package in absent), file=sys.stderr)
        _install(absent)
        absent = missing()
    if absent:
        print(f"setup: not installed, and not to be installed from here; run as root: {install_line(absent)}", file=sys.stderr)
        for package in absent:
            print(f"setup: until then skipped: {package.wanted_by} (needs {package.name})", file=sys.stderr)
    return absent


def _install(packages: Sequence[Package]) -> None:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    command = ["apt-get", "install", "--yes", "-qq", "--no-install-recommends", *[package.name for package in packages]]
    first = subprocess.run(command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if first.returncode == 0:
        return
    # A fresh machine has no package lists yet, an old one has stale ones.
    subprocess.run(["apt-get", "update", "-qq"], env=environment, capture_output=True, stdin=subprocess.DEVNULL)
    second = subprocess.run(command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if second.returncode != 0:
        print(second.stderr.strip(), file=sys.stderr)


if __name__ == "__main__":
    ensure()
