"""What engines' connectors publish is on the screen: through the real publisher, a real segment and the real reader."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd.connector.metrics import Counters
from kvd.connector.segment import Publisher
from kvtop.connectors import connectors_of
from kvtop.events import changes
from kvtop.model import Model
from kvtop.snapshot import Series, Snapshot, Stats
from kvtop.source import Source
from kvtop.views.overview import above
from tests.kvtop import scenes
from tests.support.processes import wait_until

pytestmark = pytest.mark.real("segments")


class Engine:
    """The two processes of an engine with the connector, as far as shared memory shows them."""

    def __init__(self, root: Path) -> None:
        self.up = 1
        self.counters = {"scheduler": Counters(), "0": Counters()}
        self.source = Source(root=root)
        self._publishers = [
            Publisher(f"77-{rank}", counters, lambda: {"daemon_up": self.up, "loads_active": 0, "chunk_tokens": 256}, root=root)
            for rank, counters in self.counters.items()
        ]

    def seen(self, name: str, value: float) -> Snapshot:
        """The snapshot in which the sum of a value has become this."""
        found: list[Snapshot] = []

        def there() -> bool:
            found[:] = [self.source.read()]
            return connectors_of(found[0]).total(name) == value

        wait_until(there, what=f"{name} to become {value}")
        return found[0]

    def close(self) -> None:
        for publisher in self._publishers:
            publisher.close()
        self.source.close()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    made = Engine(tmp_path)
    yield made
    made.close()


def _text(model: Model, width: int = 160) -> str:
    return "\n".join("".join(part.text for part in line) for line in above(model, width, 30))


def test_hits_loads_and_saves_are_on_the_overview(engine: Engine) -> None:
    first = engine.seen("daemon_up", 2)
    engine.counters["scheduler"].add("hit_tokens", 4096)
    engine.counters["0"].add("load_bytes", 64 << 20)
    engine.counters["0"].add("save_bytes", 32 << 20)
    engine.seen("save_bytes_total", 32 << 20)
    second = engine.seen("hit_tokens_total", 4096)
    model = Model()
    model.take(scenes.change(first, time_s=100.0, mono_s=100.0))
    assert "engines 2 of 2 up   hit -   load -   save -" in _text(model)
    model.take(scenes.change(second, time_s=102.0, mono_s=102.0))
    assert "engines 2 of 2 up   hit 2.05k tok/s   load 32 MiB/s   save 16 MiB/s" in _text(model)
    assert model.alerts == []
    assert max(len(line) for line in _text(model, 44).splitlines()) <= 44


def test_a_lost_daemon_and_failures_are_alerts_and_events(engine: Engine) -> None:
    before = engine.seen("daemon_up", 2)
    engine.up = 0
    engine.counters["0"].add("load_failures", 3)
    engine.counters["scheduler"].add("errors")
    engine.seen("errors_total", 1)
    after = engine.seen("daemon_up", 0)
    model = Model()
    model.take(after)
    told = [f"{alert.level} {alert.subject}: {alert.text}" for alert in model.alerts]
    assert told.count("warn connector.77-0: its daemon is not there: the engine serves on, cold") == 1
    assert "warn connector.77-scheduler: 1 error inside the connector, each with a traceback in the engine's log" in told
    assert "2 without its daemon" in _text(model)
    assert "failed 3" in _text(model)
    events = [f"{level} {subject}: {text}" for level, subject, text in changes(before, after)]
    assert events == [
        "warn connector.77-0: lost its daemon: the engine serves on, cold",
        "warn connector.77-0: 3 loads failed and were recomputed",
        "warn connector.77-scheduler: lost its daemon: the engine serves on, cold",
        "warn connector.77-scheduler: 1 errors inside the connector",
    ]
    assert [text for _, _, text in changes(after, before) if "again" in text] == ["has its daemon again"] * 2


def test_models_that_sleep_wake_or_fail_are_events() -> None:
    def gate(state: float) -> Snapshot:
        series = Series(name="state", help="What it is: 0 awake, 1 asleep, 2 failed", labels=(("model", "org/one"),))
        stats = Stats(kind="gate", instance="ab", schema=(series,), values=(state,), pid=5)
        return scenes.change(scenes.host(0), stats=(stats,))

    assert list(changes(gate(0), gate(1))) == [("info", "model org/one", "awake -> asleep")]
    assert list(changes(gate(1), gate(2))) == [("warn", "model org/one", "asleep -> failed")]
    assert list(changes(gate(1), gate(1))) == []
