"""Playing a recording: a source that hands out the past, and can be moved about in it.

A `Player` stands in for a live source (`read` gives the next snapshot), so the screen, its reader and its views are the same in a
replay. `seek` moves; what was before the new place is given by `lead_in`, so that graphs and rates are there at once.

Concurrency: read by the reader's thread, moved by the screen's: one lock around the recording.
"""

import threading
import time
from pathlib import Path

from kvtools.errors import UsageError
from kvtop.record import Recording
from kvtop.snapshot import Snapshot

LEAD_IN = 300
"""Readings before the place that are fed to the history on a jump: enough for every graph on screen, quick enough to wait for."""


class Player:
    """A recording with a place in it."""

    def __init__(self, path: Path) -> None:
        self._recording = Recording(path)
        self._lock = threading.Lock()
        self._next = 0
        self.path = path

    def read(self) -> Snapshot:
        """The next snapshot; at the end, the last one again."""
        with self._lock:
            snapshot = self._recording.at(min(self._next, len(self._recording) - 1))
            self._next = min(self._next + 1, len(self._recording))
            return snapshot

    def close(self) -> None:
        """Close the recording."""
        with self._lock:
            self._recording.close()

    @property
    def length(self) -> int:
        return len(self._recording)

    @property
    def place(self) -> int:
        """Index of the snapshot read last."""
        return max(0, self._next - 1)

    @property
    def ended(self) -> bool:
        """Whether the last snapshot has been handed out."""
        return self._next >= len(self._recording)

    @property
    def damaged(self) -> int:
        """Records that could not be read."""
        return self._recording.damaged

    def step(self, count: int) -> int:
        """The place `count` readings on (or back), clamped."""
        return max(0, min(self.place + count, self.length - 1))

    def after_s(self, seconds: float) -> int:
        """The place this many seconds on (or back) in recorded time."""
        times = self._recording.times
        found = self._recording.nearest(times[self.place] + seconds)
        # A gap in the recording must not hold a jump fast: always move at least one reading.
        if found == self.place:
            return self.step(1 if seconds > 0 else -1)
        return found

    def seek(self, place: int) -> list[Snapshot]:
        """Go to a place: the readings before it and itself, oldest first. The next `read` gives the one after."""
        with self._lock:
            begin = max(0, place - LEAD_IN)
            snapshots = [self._recording.at(index) for index in range(begin, place + 1)]
            self._next = place + 1
            return snapshots

    def find(self, text: str) -> int:
        """The place of a time: '03:10' or '03:10:22' (the last such in the recording) or '2026-01-31 03:10'. Raises UsageError."""
        times = self._recording.times
        for form in ("%Y-%m-%d %H:%M:%S", "%Y-%m-%d %H:%M", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%dT%H:%M"):
            try:
                return self._recording.nearest(time.mktime(time.strptime(text, form)))
            except (ValueError, OverflowError):
                continue
        for form in ("%H:%M:%S", "%H:%M"):
            try:
                clock = time.strptime(text, form)
            except ValueError:
                continue
            day = time.localtime(times[-1])
            moment = time.mktime((*day[:3], clock.tm_hour, clock.tm_min, clock.tm_sec, 0, 0, -1))
            return self._recording.nearest(moment if moment <= times[-1] else moment - 86400)
        raise UsageError(f"not a time: {text!r}", hint="write HH:MM, HH:MM:SS or YYYY-MM-DD HH:MM")

    def where(self) -> str:
        """'12:03:10  41 %', for the head line."""
        when = time.strftime("%m-%d %H:%M:%S", time.localtime(self._recording.times[self.place]))
        return f"{when}  {100 * (self.place + 1) // self.length} %"
