"""The connector's numbers in shared memory."""

from pathlib import Path

import pytest

from kvd.connector.metrics import COUNTERS, Counters
from kvd.connector.segment import GAUGES, Publisher
from kvtools.segments.stats import read_stats
from tests.support.processes import wait_until


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
    assert {metric.name for metric in reading.schema} == {f"{name}_total" for name in COUNTERS} | set(GAUGES)
    publisher.close()
    publisher.close()
    assert not list(tmp_path.iterdir())


def test_without_shared_memory_nothing_else_suffers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    publisher = Publisher("123-0", Counters(), dict, root=tmp_path / "nowhere")
    assert "no numbers in shared memory" in caplog.text
    publisher.close()
