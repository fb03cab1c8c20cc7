"""The one mutable thing that views draw from: the newest snapshot and everything derived from it.

Owned by a single thread (the screen's; in `--once`, the caller's). `take` is called once a tick; views only read. What does
not depend on a terminal is here, so `--once`, the screen and the tests run the same code.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvtop import events
from kvtop.alerts import CRIT, DEFAULTS, EMPTY, Alert, Rule, alerts_of, health_of
from kvtop.daemon import Daemon, daemon_of
from kvtop.events import Event
from kvtop.history import History
from kvtop.snapshot import Snapshot
from kvtop.text import UNICODE, Glyphs

ASKED_TICKS = 5
"""Readings within which a change that was asked for here must be seen; a later one is somebody else's."""


@dataclass
class Model:
    """Snapshot, history, events, alerts: all that a view may know."""

    glyphs: Glyphs = UNICODE
    rules: Sequence[Rule] = DEFAULTS
    clock: Callable[[], float] = time.time
    interval_s: float = 1.0
    snapshot: Snapshot | None = None
    history: History = field(default_factory=History)
    daemons: list[Daemon] = field(default_factory=list)
    alerts: list[Alert] = field(default_factory=list)
    health: str = EMPTY
    log: deque[Event] = field(default_factory=lambda: deque(maxlen=events.KEPT))
    tags: set[str] = field(default_factory=set)
    doctor: Any = None
    """What kvtop.doctor last found; None before it ran."""
    own: Callable[[], Sequence[Alert]] = tuple
    """What is wrong with kvtop itself (a recording that stopped), asked at each tick; told like what is wrong with the host."""
    news: Sequence[Alert] = ()
    """Those of them that the last tick told first."""
    _number: int = 0
    _own: frozenset[str] = frozenset()
    _asked: dict[tuple[str, str], int] = field(default_factory=dict)

    def take(self, snapshot: Snapshot) -> None:
        """Make `snapshot` the current one."""
        before, health = self.snapshot, self.health
        own = list(self.own())
        self.snapshot = snapshot
        self.history.feed(snapshot)
        self.daemons = [daemon_of(stats) for stats in snapshot.stats if stats.kind == "kvd"]
        self.alerts = sorted(
            [*own, *alerts_of(snapshot, self.daemons, self.history, self.rules)], key=lambda alert: alert.level != CRIT
        )
        self.health = health_of(snapshot, self.alerts)
        self._tell_own(own, snapshot.time_s)
        if before is not None:
            for level, subject, text in events.changes(before, snapshot):
                if not self._was_asked(subject, text):
                    self.note(level, subject, text, snapshot.time_s)
            self._asked = {what: ticks - 1 for what, ticks in self._asked.items() if ticks > 1}
            if self.health != health:
                why = f": {self.alerts[0].subject}: {self.alerts[0].text}" if self.alerts else ""
                self.note(
                    self.alerts[0].level if self.alerts else "info", "health", f"{health} -> {self.health}{why}", snapshot.time_s
                )

    def _tell_own(self, own: Sequence[Alert], time_s: float) -> None:
        subjects = frozenset(alert.subject for alert in own)
        self.news = [alert for alert in own if alert.subject not in self._own]
        for alert in self.news:
            self.note(alert.level, alert.subject, alert.text, time_s)
        for subject in sorted(self._own - subjects):
            self.note("info", subject, "works again", time_s)
        self._own = subjects

    def asked(self, subject: str, text: str) -> None:
        """Somebody here is about to do this to `subject`: the log tells how it went, and not a second time that it was seen."""
        self._asked[subject, text] = ASKED_TICKS

    def refused(self, subject: str, text: str) -> None:
        """What was `asked` did not happen: seen now, it is somebody else's."""
        self._asked.pop((subject, text), None)

    def _was_asked(self, subject: str, text: str) -> bool:
        found = next((what for what in self._asked if what[0] == subject and text.startswith(what[1])), None)
        if found is not None:
            del self._asked[found]
        return found is not None

    def note(self, level: str, subject: str, text: str, time_s: float | None = None) -> None:
        """Write one event to the log."""
        self._number += 1
        self.log.append(Event(self._number, self.clock() if time_s is None else time_s, level, subject, text))

    def empty(self) -> "Model":
        """A model with the same settings that has seen nothing (a replay builds the past in one, on its own thread)."""
        return Model(glyphs=self.glyphs, rules=self.rules, clock=self.clock, interval_s=self.interval_s)

    def become(self, other: "Model") -> None:
        """Take over everything another model has seen; settings and tags stay."""
        self.snapshot, self.history, self.log = other.snapshot, other.history, other.log
        self.daemons, self.alerts, self.health = other.daemons, other.alerts, other.health
        self._number = other._number

    @property
    def now_s(self) -> float:
        """The time the numbers are from."""
        return self.snapshot.time_s if self.snapshot else self.clock()
