"""The connector's numbers in shared memory."""

from pathlib import Path

import pytest

from kvd.connector.metrics import COUNTERS, REASONED, Counters
from kvd.connector.segment import GAUGES, INFO, Publisher, engines
from kvtools.segments.stats import read_stats
from tests.support.processes import run_python, wait_until


@pytest.mark.real("segments")
def test_numbers_are_published_until_the_end(tmp_path: Path) -> None:
    counters = Counters()
    gauges = {"daemon_up": 1, "loads_active": 2, "chunk_tokens": 256, "groups": 1}
    publisher = Publisher("123-0", counters, lambda: gauges, root=tmp_path)
    counters.add("load_bytes", 1 << 40)
    counters.add("load_seconds", 0.25)

    def seen() -> bool:
        reading = read_stats("kvtools.connector.123-0", root=tmp_path)
        return reading.get("load_bytes_total") == 1 << 40 and reading.get("load_seconds_total") == 0.25

    wait_until(seen, timeout_s=5)
    reading = read_stats("kvtools.connector.123-0", root=tmp_path)
    assert reading.alive
    assert reading.get("loads_active") == 2
    assert {metric.name for metric in reading.schema} == {f"{name}_total" for name in (*COUNTERS, *REASONED)} | set(GAUGES) | {INFO}
    publisher.close()
    publisher.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.real("segments")
def test_what_killed_engines_left_is_swept_and_the_living_stay(tmp_path: Path) -> None:
    living = Publisher("1-0", Counters(), dict, root=tmp_path)
    run_python(
        "import os, pathlib; from kvd.connector.metrics import Counters; from kvd.connector.segment import Publisher;"
        f"Publisher('2-0', Counters(), dict, root=pathlib.Path({str(tmp_path)!r})); os._exit(9)"
    )
    assert len(list(tmp_path.iterdir())) == 2
    third = Publisher("3-0", Counters(), dict, root=tmp_path)
    assert {path.name.split(".")[-1] for path in tmp_path.iterdir()} == {"1-0", "3-0"}
    living.close()
    third.close()


@pytest.mark.real("segments")
def test_engines_are_told_apart_and_their_processes_added_up(tmp_path: Path) -> None:
    made = []
    for instance, engine, counts in (
        ("1-scheduler", "one", {"query_tokens": 200, "query_hit_tokens": 50}),
        ("2-0", "one", {"loads": 3}),
        ("3-1", "one", {"loads": 4}),
        ("4-scheduler", "two", {}),
    ):
        counters = Counters()
        for name, value in counts.items():
            counters.add(name, value)
        labels = {"daemon": "d1", "engine": engine}
        made.append(Publisher(instance, counters, dict, labels=labels, root=tmp_path))
    made.append(Publisher("5-0", Counters(), dict, labels={"daemon": "d2", "engine": "three"}, root=tmp_path))

    def found() -> dict[str, tuple[float | None, int, float]]:
        return {e["engine"]: (e["external_hit_rate"], e["processes"], e["loads_total"]) for e in engines("d1", root=tmp_path)}

    wait_until(lambda: found() == {"one": (0.25, 3, 7), "two": (None, 1, 0)}, timeout_s=5)
    assert [engine["engine"] for engine in engines("d2", root=tmp_path)] == ["three"]
    for publisher in made:
        publisher.close()
    assert engines("d1", root=tmp_path) == []


def test_without_shared_memory_nothing_else_suffers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    publisher = Publisher("123-0", Counters(), dict, root=tmp_path / "nowhere")
    assert "no numbers in shared memory" in caplog.text
    publisher.close()
