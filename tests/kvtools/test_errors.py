"""What to do about an error of the operating system: told by its number, whatever was tried."""

import errno

import pytest

from kvtools.errors import hint_for


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (errno.ENOSPC, "is full"),
        (errno.EDQUOT, "quota"),
        (errno.EROFS, "read-only"),
        (errno.EMFILE, "ulimit -n"),
        (errno.EIO, "dmesg"),
    ],
)
def test_the_number_decides_before_the_callers_guess(number: int, says: str) -> None:
    assert says in hint_for(OSError(number, "x"), "it must be writable")


def test_else_the_caller_knows_best() -> None:
    assert hint_for(PermissionError(errno.EACCES, "x"), "it must be writable") == "it must be writable"
    assert hint_for(OSError("no number"), "guess") == "guess"
    assert hint_for(ValueError("x"), "guess") == "guess"
    assert hint_for(OSError(errno.EACCES, "x")) == ""
