"""kvd's errors.

KvdError (KvError)        exit 1
 +-- Unavailable          exit 4   no daemon at the socket, not allowed in, or it does not answer
 |    +-- Disconnected    exit 4   the daemon went away in mid-call
 |    +-- NotAnswering    exit 6   it is there and does not answer (also a DeadlinePassed)
 +-- ProtocolError        exit 1   the other side sent what the protocol does not have
 +-- NoRoom               exit 1   a write lease could not get all its room
 +-- LeaseLost            exit 1   the bytes are no longer pinned: what was read from them is void
 +-- DeadlinePassed       exit 6   the daemon did not answer in time
 +-- Draining             exit 5   the daemon takes no new writes
"""

from kvtools.errors import KvError, Refused, TimedOut, Unreachable
from kvtools.exits import Exit


class KvdError(KvError):
    """A kvd operation failed. `code` is the daemon's word for it (protocol.CODES), where it came from there."""

    code: str = ""


class Unavailable(KvdError, Unreachable):
    """No daemon at the socket, or it does not let this process in."""


class Disconnected(Unavailable):
    """The daemon went away in mid-call; the next call connects anew."""


class ProtocolError(KvdError):
    """The other side sent what the protocol does not have, or speaks another version of it."""


class NoRoom(KvdError):
    """A write lease could not get all its room."""


class LeaseLost(KvdError):
    """The lease ended (deadline, connection, revoked): bytes read under it may be anything."""


class DeadlinePassed(KvdError, TimedOut):
    """The daemon did not answer within the client's timeout."""


class NotAnswering(Unavailable, DeadlinePassed):
    """There is a daemon, and it does not answer: stopped, or stuck."""

    exit_code = Exit.TIMEOUT


class Draining(KvdError, Refused):
    """The daemon is draining: it serves reads and takes no new writes."""
