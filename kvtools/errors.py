"""Every error a kvtools command shows, as one tree.

KvError                      exit 1   the work failed
 +-- UsageError              exit 2   a bad word, value or configuration
 +-- NotFound                exit 3   no such segment, key, namespace, file
 +-- Unreachable             exit 4   the daemon or a segment cannot be reached or read
 +-- Refused                 exit 5   unsafe; the hint names the flag that forces it
 +-- TimedOut                exit 6   the deadline passed

A message is one plain line: what is wrong, and with what. The hint is one more line: what to do.
Packages derive their own errors from these; `kvtools.cli.run` is the only place that prints them. An OSError becomes one of
them where it is caught, and `hint_for` says what to do about it: what the kernel refused is seldom the place's fault alone.
"""

import errno
from collections.abc import Mapping

from kvtools.exits import Exit


class KvError(Exception):
    """The work failed. `message` is one line without a final stop; `hint` says what to do about it."""

    exit_code: Exit = Exit.FAILED

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.message, self.hint)


def _rebuild(kind: type[KvError], message: str, hint: str) -> KvError:
    error = kind.__new__(kind)
    KvError.__init__(error, message, hint=hint)
    return error


class UsageError(KvError):
    """A word, a value or a configuration that cannot be meant."""

    exit_code = Exit.USAGE


class NotFound(KvError):
    """What was named does not exist."""

    exit_code = Exit.NOT_FOUND


class Unreachable(KvError):
    """The daemon does not answer, or a segment cannot be opened or read."""

    exit_code = Exit.UNREACHABLE


class Refused(KvError):
    """Possible, but unsafe: the hint names the flag that forces it."""

    exit_code = Exit.REFUSED


class TimedOut(KvError):
    """The deadline passed before the work was done."""

    exit_code = Exit.TIMEOUT


_HINTS: Mapping[int, str] = {
    errno.ENOSPC: "the file system there is full (df -h, df -i): free some of it, or name another place",
    errno.EDQUOT: "the disk quota of the user that runs this is used up there: raise it, free some of it, or name another place",
    errno.EROFS: "it is mounted read-only there: name another place, or see dmesg for the error that made the kernel do it",
    errno.EIO: "the device has failed: see the kernel log (dmesg)",
    errno.EMFILE: "this process has too many open files: raise the limit (ulimit -n)",
    errno.ENFILE: "this host has too many open files: see sysctl fs.file-max",
    errno.ENOMEM: "the kernel has no memory left for it: see free -h, and the memory limit of the container",
    errno.ENAMETOOLONG: "the path is too long: choose a shorter one",
}


def hint_for(error: BaseException, otherwise: str = "") -> str:
    """What to do about an OSError: what its number says of itself, whatever was tried; else `otherwise`, the caller's guess."""
    return _HINTS.get(error.errno or 0, otherwise) if isinstance(error, OSError) else otherwise
