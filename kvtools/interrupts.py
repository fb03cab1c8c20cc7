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


def terminate_as_interrupt(*, once: bool = False) -> None:
    """From now on SIGTERM and SIGHUP raise KeyboardInterrupt in the main thread.

    `once`: only the first of them and of Ctrl-C does, so that nothing stops the cleaning up, which then has to be quick.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt_once if once else _interrupt)
    if once and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # a background job has it ignored
        signal.signal(signal.SIGINT, _interrupt_once)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _interrupt_once(number: int, frame: FrameType | None) -> None:
    for one in _NUMBERS:
        if signal.getsignal(one) is not signal.SIG_IGN:
            # A handler that does nothing: SIG_IGN is an error in the interpreter when that signal is on its way already.
            signal.signal(one, _nothing)
    raise KeyboardInterrupt


def _nothing(number: int, frame: FrameType | None) -> None:
    pass


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
