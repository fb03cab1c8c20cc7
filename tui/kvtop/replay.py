"""Playing a recording: a source that hands out the past, and can be moved about in it.

A `Player` stands in for a live source (`read` gives the next snapshot), so the screen, its reader and its views are the same in a
replay. `seek` moves; what was before the new place is given by `lead_in`, so that graphs and rates are there at once.

Concurrency: read by the reader's thread, moved by the screen's: one lock around the recording.
"""

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kvtools.errors import NotFound, UsageError
from kvtop.recording import Damage, Recording
from kvtop.snapshot import Problem, Snapshot

LEAD_IN = 300
"""Readings before the place that are fed to the history on a jump: enough for every graph on screen, quick enough to wait for."""


class Player:
    """A recording with a place in it."""

    def __init__(self, path: Path, names: Sequence[str] = ()) -> None:
        self._names = frozenset(names)
        self._recording = Recording(path)
        self._lock = threading.Lock()
        self._next = 0
        self._shown: Snapshot | None = None
        self.path = path
        self.damage: list[Damage] = self._recording.damage
        """Where readings are missing from it."""
        # Each is told at the first reading after it, by every way in which a reading is shown.
        self._marks: dict[int, list[Problem]] = {}
        for one in self.damage:
            said = Problem(source="recording", message=one.lacks)
            self._marks.setdefault(min(one.place, len(self._recording) - 1), []).append(said)

    def read(self) -> Snapshot:
        """The next snapshot; at the end, the last one again."""
        with self._lock:
            place = min(self._next, len(self._recording) - 1)
            try:
                self._shown = snapshot = self._at(place)
            except UsageError as error:
                if self._shown is None:
                    raise
                snapshot = self._instead(self._shown, place, error)
            self._next = min(self._next + 1, len(self._recording))
            return snapshot

    def _instead(self, snapshot: Snapshot, place: int, error: UsageError) -> Snapshot:
        """The reading before, where one is nonsense or was cut off while it was shown; told with it, and as damage."""
        if all(one.place != place for one in self.damage):
            self.damage.append(self._recording.lost_at(place))
        said = Problem(source="recording", message=f"the last reading that can be shown: {error.message}")
        return msgspec.structs.replace(snapshot, problems=(*snapshot.problems, said))

    def _at(self, index: int) -> Snapshot:
        snapshot = self._only_named(self._recording.at(index))
        if index not in self._marks:
            return snapshot
        return msgspec.structs.replace(snapshot, problems=(*snapshot.problems, *self._marks[index]))

    def _only_named(self, snapshot: Snapshot) -> Snapshot:
        """What a source that was asked for some segments only would have read."""
        if not self._names:
            return snapshot
        others = {segment.name for segment in snapshot.segments} - self._names
        missing = self._names - {segment.name for segment in snapshot.segments}
        return msgspec.structs.replace(
            snapshot,
            segments=tuple(segment for segment in snapshot.segments if segment.name in self._names),
            processes=tuple(process for process in snapshot.processes if not process.holds or set(process.holds) - others),
            problems=(*snapshot.problems, *(Problem(source=name, message="no segment of this name") for name in sorted(missing))),
        )

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
    def damaged(self) -> str:
        """'damaged in 2 places', for the head line; empty when it is whole."""
        places = len(self.damage)
        return f"damaged in {places} place{'s' * (places != 1)}" if places else ""

    @property
    def span(self) -> tuple[float, float]:
        """Times of the first and of the last reading."""
        return self._recording.times[0], self._recording.times[-1]

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
            snapshots: list[Snapshot] = []
            for index in range(begin, place + 1):
                try:
                    snapshots.append(self._at(index))
                except UsageError as error:
                    if index == place and not snapshots:
                        raise
                    if snapshots:
                        snapshots.append(self._instead(snapshots[-1], index, error))
            self._next = place + 1
            self._shown = snapshots[-1]
            return snapshots

    def find(self, text: str) -> int:
        """The place of a time: '03:10' or '03:10:22' (the last such in the recording) or '2026-01-31 03:10'.

        Raises UsageError for what is no time, NotFound for one outside the recording.
        """
        first, last = self.span
        for form, wide_s in _FORMS:
            try:
                parsed = time.strptime(text.strip(), form)
                moment = time.mktime(parsed) if "%Y" in form else _last_such(parsed, last)
            except (ValueError, OverflowError):
                continue
            # A minute that the recording begins in is a minute of it.
            if moment + wide_s <= first or moment > last:
                raise NotFound(f"{text.strip()} is not in {self.path}", hint=f"it holds {_day(first)} to {_day(last, first)}")
            return self._recording.nearest(moment)
        raise UsageError(f"not a time: {text!r}", hint="write HH:MM, HH:MM:SS or YYYY-MM-DD HH:MM")

    def where(self) -> str:
        """'12:03:10  41 %', for the head line."""
        when = time.strftime("%m-%d %H:%M:%S", time.localtime(self._recording.times[self.place]))
        return f"{when}  {100 * (self.place + 1) // self.length} %"


_FORMS = (
    *((f"%Y-%m-%d{between}%H:%M:%S", 1.0) for between in " T"),
    *((f"%Y-%m-%d{between}%H:%M", 60.0) for between in " T"),
    ("%H:%M:%S", 1.0),
    ("%H:%M", 60.0),
)
"""Spellings of a time, and how many seconds each of them names."""


def _last_such(clock: time.struct_time, last_s: float) -> float:
    """The last time at or before `last_s` at which a clock on the wall showed `clock`."""
    day = time.localtime(last_s)
    found = time.mktime((*day[:3], *clock[3:6], 0, 0, -1))
    if found <= last_s:
        return found
    return time.mktime((day.tm_year, day.tm_mon, day.tm_mday - 1, *clock[3:6], 0, 0, -1))


def _day(time_s: float, after_s: float = 0.0) -> str:
    """Date and time; without the date where `after_s` is of the same day."""
    text, before = (time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at)) for at in (time_s, after_s))
    return text[11:] if text[:10] == before[:10] else text
