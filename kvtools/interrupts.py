"""Ctrl-C, `kill` and a closed terminal while a command owns something that must not stay behind.

A KeyboardInterrupt may come between any two instructions, so also after a child was started and before anybody wrote down
its pid. `interrupts_held` moves it to the end of such a stretch. `terminate_as_interrupt` makes SIGTERM and SIGHUP unwind the
stack as Ctrl-C does, so that `finally` blocks run. Both are for the main thread, which alone may set signal handlers.
"""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def terminate_as_interrupt() -> None:
    """From now on SIGTERM and SIGHUP raise KeyboardInterrupt in the main thread."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Signals that would end us are noted and delivered again at the end. Keep the stretch short: one Popen.

    Done with handlers, not with the signal mask: a child inherits the mask, but handlers are back to their defaults in it.
    """
    held: list[int] = []
    before = {number: signal.signal(number, lambda number, _: held.append(number)) for number in _NUMBERS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        if held:
            signal.raise_signal(held[0])
