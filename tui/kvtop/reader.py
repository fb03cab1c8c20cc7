"""The thread that reads, so that nothing a host does can stop the screen.

A `Reader` calls `read()` of a source once an interval and hands the newest snapshot to `deliver`, which must be quick and safe to
call from another thread (Textual's `post_message` is). A source that hangs costs a thread, not the screen: the screen sees that
nothing came (`waiting_s`) and says so. An exception that a source lets out is delivered as text, and the next tick tries again.

Concurrency: `start`, `stop`, `pause`, `kick` from any thread. Snapshots are immutable, so handing them over needs no lock.
"""

import threading
import time
from collections.abc import Callable
from typing import Protocol

from kvtools.errors import KvError
from kvtop.snapshot import Snapshot


class Readable(Protocol):
    """What a reader reads: a live `Source`, a recording, or a test's list."""

    def read(self) -> Snapshot:
        """The next snapshot."""


class Reader:
    """Reads on a thread of its own. `deliver(snapshot, problem)` gets either a snapshot or one line of what went wrong."""

    def __init__(
        self,
        source: Readable,
        deliver: Callable[[Snapshot | None, str], None],
        *,
        interval_s: float = 1.0,
        mono: Callable[[], float] = time.monotonic,
    ) -> None:
        self._interval_s = interval_s
        self._source = source
        self._deliver = deliver
        self._mono = mono
        self._wake = threading.Event()
        self._stopped = False
        self._paused = False
        self._kicked = False
        self._begun = 0.0
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin reading; the first reading happens at once."""
        # A daemon thread: a source stuck in the kernel must not keep kvtop from ending.
        self._thread = threading.Thread(target=self._run, name="kvtop-reader", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float = 0.5) -> None:
        """End the thread; one that is stuck is left behind."""
        self._stopped = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def kick(self) -> None:
        """Read now, even when paused."""
        self._kicked = True
        self._wake.set()

    @property
    def paused(self) -> bool:
        return self._paused

    @paused.setter
    def paused(self, value: bool) -> None:
        if self._paused and not value:
            self._kicked = True  # go on with a reading at once
        self._paused = value
        self._wake.set()

    @property
    def interval_s(self) -> float:
        """Seconds between readings; a new value counts from the last reading, and is none itself."""
        return self._interval_s

    @interval_s.setter
    def interval_s(self, value: float) -> None:
        self._interval_s = value
        self._wake.set()

    @property
    def waiting_s(self) -> float:
        """For how long the reading in progress has run; 0.0 between readings."""
        begun = self._begun
        return self._mono() - begun if begun else 0.0

    def _run(self) -> None:
        last = self._mono() - self._interval_s
        while not self._stopped:
            if self._kicked or (not self._paused and self._mono() >= last + self._interval_s):
                last = self._mono() if self._kicked else last + self._interval_s
                self._kicked = False
                self._once()
                last = max(last, self._mono() - self._interval_s)
            if self._wake.wait(None if self._paused else max(0.0, last + self._interval_s - self._mono())):
                self._wake.clear()

    def _once(self) -> None:
        self._begun = self._mono()
        try:
            snapshot = self._source.read()
            self._begun = 0.0
            if not self._stopped:
                self._deliver(snapshot, "")
        except Exception as error:  # noqa: BLE001 - the tick's edge: whatever it is, the screen says it and the next tick tries again
            self._begun = 0.0
            if not self._stopped:
                self._deliver(None, error.message if isinstance(error, KvError) else f"{type(error).__name__}: {error}")
