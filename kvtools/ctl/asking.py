"""Questions before something is changed or lost: asked at a terminal, refused without one, answered by --yes.

Contract (the same for every mutation): `--yes` answers each question and lifts each refusal, except where a name must be
typed: that takes `--confirm NAME`. Without a terminal on stdin nothing is ever asked: exit 5 and the flag to add. Answers are
read from the terminal's line, default is no, end of file is no.
"""

import sys

from kvtools.errors import Refused
from kvtools.output import printable


def can_ask() -> bool:
    """Whether somebody can answer: stdin and stderr (where questions go) are terminals."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def agree(question: str, *, yes: bool, refusal: str, hint: str = "add --yes to do it anyway") -> None:
    """Return when it may go on; else raise Refused with `refusal` (no terminal, or the answer was no)."""
    if yes:
        return
    if not can_ask():
        raise Refused(refusal, hint=hint)
    if _line(f"{question} [y/N] ").lower() not in {"y", "yes"}:
        raise Refused("not done: the answer was no", hint=hint)


def agree_by_name(name: str, *, confirm: str | None, refusal: str) -> None:
    """Return when `confirm`, or what is typed at the terminal, is exactly `name`; else raise Refused."""
    flag = f"to do it anyway, add --confirm {printable(name)}"
    if confirm is None and can_ask():
        sys.stderr.write(f"{refusal}\n")
        confirm = _line(f"type {printable(name)} to do it anyway: ")
    if confirm is None:
        raise Refused(refusal, hint=flag)
    if confirm != name:
        raise Refused(f"not done: {printable(confirm)!r} is not {printable(name)!r}", hint=flag)


def _line(prompt: str) -> str:
    sys.stderr.write(prompt)
    sys.stderr.flush()
    return sys.stdin.readline().strip()
