"""Exit codes: part of the interface, the same for every command (see each man page, EXIT STATUS)."""

from enum import IntEnum


class Exit(IntEnum):
    """What a command's exit status says. Scripts depend on these numbers: add, never change."""

    OK = 0
    FAILED = 1
    """The work was understood and failed."""
    USAGE = 2
    """Unknown word, bad value, bad configuration: nothing was tried."""
    NOT_FOUND = 3
    """The named segment, key, namespace or file does not exist."""
    UNREACHABLE = 4
    """The daemon does not answer, or the segment cannot be read."""
    REFUSED = 5
    """Understood, possible, and refused as unsafe; the message names the flag that forces it."""
    TIMEOUT = 6
    """The deadline passed first."""
    UNDETERMINED = 7
    """kvdoctor only: a required fact could not be read, or there is no GPU."""
    INTERRUPTED = 130
    """Ctrl-C."""
    PIPE = 141
    """The reader of stdout went away (as a shell reports SIGPIPE)."""
