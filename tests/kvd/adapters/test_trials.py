"""`mock` and `fault_inject` do what they say, and a whole daemon with them serves on."""

import pytest

from kvd.tiers.adapters import registry
from kvd.tiers.adapters.base import Adapter, AdapterConfigError, AdapterError, AdapterFull, Item, Loaded
from kvd.tiers.adapters.fault_inject import FaultInject
from kvd.tiers.adapters.mock import MockAdapter
from kvd.tiers.serde.adapter import SerdeAdapter
from kvd.tiers.serde.chain import read_chain
from tests.kvd.adapters.test_conformance import body, get, ident, put
from tests.kvd.tiers.ram_tier import running


class Clock:
    """Time that passes only in sleep."""

    def __init__(self) -> None:
        self.now = 100.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def monotonic(self) -> float:
        return self.now


def mock(**more: float) -> tuple[MockAdapter, Clock]:
    clock = Clock()
    return MockAdapter("mock", 1 << 30, 1e6, sleep=clock.sleep, monotonic=clock.monotonic, **more), clock  # type: ignore[arg-type]


def test_calls_take_what_their_bytes_need_and_the_latency() -> None:
    adapter, clock = mock(latency_s=0.5)
    put(adapter, 1, bytes(250_000))
    assert clock.now == pytest.approx(100.75)
    assert get(adapter, 1, 250_000) == bytes(250_000)
    assert clock.now == pytest.approx(101.5)


def test_calls_share_the_bandwidth() -> None:
    adapter, clock = mock()
    adapter._free_at = 102.0  # as if others had queued two seconds of work
    put(adapter, 1, bytes(1_000_000))
    assert clock.now == pytest.approx(103.0)


def test_losses_are_as_many_as_told_and_the_same_again() -> None:
    fates = []
    for _ in range(2):
        adapter, _clock = mock(loss=0.3, seed=7)
        for number in range(200):
            put(adapter, number)
        fates.append([get(adapter, number) is Loaded.MISS for number in range(200)])
        assert 30 < sum(fates[-1]) < 90
        lost = fates[-1].index(True)
        assert adapter.lookup([ident(lost)]) == [None]
    assert fates[0] == fates[1]


def test_what_lies_damaged_in_memory_is_noticed() -> None:
    adapter, _ = mock()
    put(adapter, 1)
    data, checksum = adapter._values[ident(1)]
    adapter._values[ident(1)] = (b"\0" + data[1:], checksum)
    assert get(adapter, 1) is Loaded.CORRUPT
    assert get(adapter, 1) is Loaded.MISS
    assert put(adapter, 1).ok


def faulty(**rates: float) -> FaultInject:
    (adapter,) = registry.build(
        [{"type": "fault_inject", "inner": {"type": "mock", "max_size_gb": 1, "mock_bandwidth_gb": 100}, **rates}]
    )
    assert isinstance(adapter, FaultInject)
    adapter.open()
    return adapter


def test_without_rates_nothing_happens() -> None:
    adapter = faulty()
    put(adapter, 1)
    assert get(adapter, 1) == body(1)
    assert adapter.describe()["injected"] == {}
    assert adapter.capabilities.local_index


def _fails(adapter: Adapter, number: int) -> bool:
    try:
        put(adapter, number)
    except AdapterFull:
        raise
    except AdapterError:
        return True
    return False


def test_errors_are_as_many_as_told() -> None:
    adapter = faulty(error_rate=0.25, seed=3)
    assert 25 < sum(_fails(adapter, number) for number in range(200)) < 75
    assert adapter.injected["error"] == adapter.counters.io_errors


def test_a_full_adapter_says_full() -> None:
    adapter = faulty(full_rate=1.0)
    with pytest.raises(AdapterFull):
        put(adapter, 1)


@pytest.mark.parametrize(("rate", "result"), [("loss_rate", Loaded.MISS), ("corrupt_rate", Loaded.CORRUPT)])
def test_loads_lose_and_damage(rate: str, result: Loaded) -> None:
    adapter = faulty(**{rate: 1.0})
    put(adapter, 1)
    assert get(adapter, 1) is result
    assert adapter.lookup([ident(1)]) == [None]


def test_calls_hang_and_come_late() -> None:
    waits: list[float] = []
    inner, _ = mock()
    adapter = FaultInject("x", inner, hang_rate=1.0, hang_s=9.0, delay_s=0.5, sleep=waits.append)
    adapter.store([Item(ident(1), memoryview(b"x"))])
    assert waits == [0.5, 9.0]


@pytest.mark.parametrize(
    ("inner", "line"),
    [
        ({}, "adapter fault_inject \\(fault_inject\\): field 'inner': field 'type' is missing"),
        ({"type": "mok"}, "unknown type 'mok'"),
        ({"type": "mock", "max_size_gb": 1}, "field 'mock_bandwidth_gb' is missing"),
        (3, "field 'inner': not an object"),
    ],
)
def test_a_bad_inner_object_is_named(inner: object, line: str) -> None:
    with pytest.raises(AdapterConfigError, match=line):
        registry.build([{"type": "fault_inject", "inner": inner}])


@pytest.mark.real("kvd")
class Limping(MockAdapter):
    """Some of its parts do not work, and it says damage itself."""

    says_damage = True

    @property
    def parts_down(self) -> int:
        return 1


def test_an_adapter_around_another_hides_none_of_its_troubles() -> None:
    inner = Limping("disk", 1 << 20, float(1 << 30))
    for outer in (FaultInject("faults", inner), SerdeAdapter(inner, read_chain("serde", {"type": "zstd"}))):
        assert outer.parts_down == 1
        assert outer.says_damage
        assert outer.counters is inner.counters


def test_a_daemon_serves_on_over_faulty_tiers() -> None:
    """Errors, losses and damage in one tier, none in the next: every value comes back or is a miss, and none is wrong."""
    first = faulty(error_rate=0.1, loss_rate=0.2, corrupt_rate=0.2, seed=11)
    (second,) = registry.build([{"type": "mock", "max_size_gb": 1, "mock_bandwidth_gb": 100}])
    keys = [bytes([i]) * 32 for i in range(100)]
    with running(first, second, max_bytes=4 << 20) as daemon, daemon.client() as client:
        for i, key in enumerate(keys):
            assert client.put(key, bytes([i]) * 20_000)
        client.flush(timeout_s=20)
        daemon.evict_all()
        for i, key in enumerate(keys):
            assert client.get(key) == bytes([i]) * 20_000
        tiers = client.stats()["tiers"]
        assert tiers[0]["corruptions_total"] > 0
        assert tiers[1]["hits_total"] > 0
