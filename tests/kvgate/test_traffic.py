"""Counting: rates in windows, idle times, quantiles, and bounded memory, on a clock of the test's own."""

from hypothesis import given
from hypothesis import strategies as st

from kvgate.traffic import BOUNDS_S, HISTORY, Histogram, Slots, TrafficMonitor, quantiles


class Clock:
    def __init__(self) -> None:
        self.now = 10_000.0

    def __call__(self) -> float:
        return self.now


def monitor(*names: str) -> tuple[TrafficMonitor, Clock]:
    clock = Clock()
    found = TrafficMonitor(clock=clock, wall=lambda: clock.now + 1e9)
    found.know(names or ("m",))
    return found, clock


def test_a_stream_is_activity_until_its_end() -> None:
    traffic, clock = monitor()
    clock.now += 50
    assert traffic.idle_s("m") == 50
    ticket = traffic.begin("m")
    clock.now += 3600
    assert traffic.idle_s("m") == 0
    ticket.finish(ok=True)
    clock.now += 5
    assert traffic.idle_s("m") == 5


def test_success_failure_and_gone_are_told_apart_and_counted_once() -> None:
    traffic, clock = monitor()
    for end in ("ok", "bad", "gone"):
        ticket = traffic.begin("m")
        clock.now += 1
        ticket.first_byte()
        clock.now += 1
        ticket.gone() if end == "gone" else ticket.finish(ok=end == "ok", completion_tokens=4, sent=10)
        ticket.finish(ok=False)
        ticket.gone()
    stats = traffic.stats("m", 60, 300)
    assert (stats["total_requests"], stats["successful_requests"], stats["failed_requests"]) == (3, 1, 1)
    assert (stats["cancelled_requests"], stats["in_flight"], stats["completion_tokens"]) == (1, 0, 8)
    assert (stats["avg_response_time"], stats["request_rate"], stats["failure_rate"]) == (2.0, 3.0, 1.0)
    assert stats["first_byte_seconds"] == {"p50": 1.0, "p90": 1.0, "p99": 1.0}
    assert (stats["last_activity_time"], stats["idle_time_seconds"], stats["is_idle"]) == (clock.now + 1e9, 0.0, False)


def test_rates_are_of_the_window_only() -> None:
    traffic, clock = monitor()
    for _ in range(120):
        traffic.begin("m").finish(ok=True)
        clock.now += 1
    assert traffic.stats("m", 60, 300)["request_rate"] == 59.0  # the current second has none yet
    assert traffic.stats("m", 3600, 300)["request_rate"] == 2.0
    clock.now += 61
    assert traffic.stats("m", 60, 300)["request_rate"] == 0.0
    assert traffic.stats("m", 60, 300)["latency_seconds"]["p50"] is None


def test_history_is_bounded_and_rates_are_not_bounded_by_it() -> None:
    traffic, _ = monitor()
    for _ in range(HISTORY + 5000):
        traffic.begin("m").finish(ok=True)
    assert len(traffic.history) == HISTORY
    assert traffic.stats("m", 60, 300)["request_rate"] == HISTORY + 5000


def test_reload_keeps_known_records_and_forgets_the_others() -> None:
    traffic, _ = monitor("a", "b")
    traffic.begin("a").finish(ok=True)
    ticket = traffic.begin("b")
    traffic.know(["a", "c"])
    assert (traffic.models["a"].requests_total, set(traffic.models)) == (1, {"a", "c"})
    ticket.finish(ok=True)  # a stream of a model that was removed meanwhile


@given(st.lists(st.integers(0, 20_000), max_size=200), st.integers(1, 3600))
def test_slots_count_what_falls_into_the_window(gaps: list[int], window: int) -> None:
    slots, now, seen = Slots(), 5000.0, []
    for gap in gaps:
        now += gap / 10
        slots.add(now)
        seen.append(int(now))
    assert slots.total(now, window) == sum(now - window < second <= now for second in seen)


@given(st.lists(st.floats(0, 1000), min_size=1, max_size=100))
def test_histogram_and_quantiles(values: list[float]) -> None:
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    for i, bound in enumerate(BOUNDS_S):
        assert sum(histogram.counts[: i + 1]) == sum(value <= bound for value in values)
    found = quantiles(sorted(values))
    assert found["p50"] is not None
    assert min(values) - 1e-6 <= found["p50"] <= found["p90"] <= found["p99"] <= max(values) + 1e-6  # type: ignore[operator]
