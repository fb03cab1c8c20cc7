"""`raw_block` where the device fails: for a while, in one place, while others read and write. No slot is lost."""

import errno
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kvd.tiers.adapters import slots
from kvd.tiers.adapters.base import Adapter, AdapterError, Loaded, Want
from kvd.tiers.adapters.kind import Eviction
from kvd.tiers.adapters.ledger import Entry
from kvd.tiers.adapters.raw_block import FileMedium, RawBlockAdapter
from kvd.tiers.adapters.slots import BLOCK
from tests.kvd.adapters.test_conformance import body, get, ident, put
from tests.kvd.adapters.test_slots import SLOT, raw_at


class Failing(FileMedium):
    """A file whose blocks cannot be written while told so."""

    dead = False
    bad = -1
    """The block here cannot be written, ever."""
    enter: Callable[[], None] = staticmethod(lambda: None)

    def write(self, offset: int, buffers: Sequence[memoryview]) -> None:
        self.enter()
        if self.dead or offset == self.bad:
            raise OSError(errno.EIO, "Input/output error")
        super().write(offset, buffers)


def failing_at(path: Path, eviction: Eviction | None = None) -> tuple[RawBlockAdapter, Failing]:
    medium = Failing("raw", path, BLOCK + 10 * SLOT, direct=True)
    adapter = RawBlockAdapter("raw", medium, SLOT, where=str(path), eviction=eviction)
    adapter.open()
    return adapter, medium


@pytest.mark.parametrize("eviction", [Eviction(), Eviction(watermark=0.9, ratio=0.5), Eviction("S3FIFO")])
def test_a_device_that_failed_for_a_while_loses_no_slot(
    tmp_path: Path, eviction: Eviction, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "RETRY_S", 0.0)
    adapter, medium = failing_at(tmp_path / "slots", eviction)
    for number in range(10):
        put(adapter, number)
    before = sorted(identity for identity, _ in adapter.enumerate())
    medium.dead = True
    for number in range(20, 40):
        with pytest.raises(AdapterError):
            put(adapter, number)
    medium.dead = False
    assert sorted(identity for identity, _ in adapter.enumerate()) == before, "and no value meanwhile"
    for number in range(50, 70):
        assert put(adapter, number).ok
        assert get(adapter, number) == body(number)
    held = sorted(identity for identity, _ in adapter.enumerate())
    assert len(held) >= 5
    assert adapter.counters.evictions == 30 - len(held)
    adapter.close()
    again = raw_at(tmp_path / "slots")
    again.open()
    assert sorted(identity for identity, _ in again.enumerate()) == held, "and nothing comes back"
    again.close()


@pytest.mark.parametrize("policy", ["LRU", "S3FIFO"])
def test_a_slot_that_stays_bad_takes_no_other_with_it(tmp_path: Path, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a victim it fails one store a round; out of use, the tier is below its limit, has nothing free, and must evict."""
    monkeypatch.setattr(slots, "RETRY_S", 0.0)
    adapter, medium = failing_at(tmp_path / "slots", Eviction(policy))
    for number in range(10):
        put(adapter, number)
    medium.bad = BLOCK + 4 * SLOT
    assert sum(_stored(adapter, number) for number in range(20, 60)) >= 35
    with pytest.raises(AdapterError):
        adapter.delete([identity for identity, _ in adapter.enumerate()])
    assert all(put(adapter, number).ok for number in range(60, 100))
    assert adapter.usage().entries == 9
    assert len(list(adapter.enumerate())) == 9
    adapter.close()


def _stored(adapter: Adapter, number: int) -> bool:
    try:
        return put(adapter, number).ok
    except AdapterError:
        return False


def test_a_delete_that_failed_is_no_success_the_second_time_unless_it_is_one(tmp_path: Path) -> None:
    adapter, medium = failing_at(tmp_path / "slots")
    for number in range(4):
        put(adapter, number)
    names = [ident(number) for number in range(3)]
    medium.dead = True
    for _ in range(2):
        with pytest.raises(AdapterError):
            adapter.delete(names)
    medium.dead = False
    assert adapter.delete(names) == 3
    assert adapter.delete(names) == 0
    medium.close()  # as a kill does: without a word
    again = raw_at(tmp_path / "slots")
    again.open()
    assert [identity for identity, _ in again.enumerate()] == [ident(3)]
    again.close()


def test_a_damaged_value_that_is_replaced_while_it_is_read(tmp_path: Path) -> None:
    """It goes; what came in its place stays; and no slot is given away twice."""
    adapter = raw_at(tmp_path / "slots")
    adapter.open()
    put(adapter, 1, b"first")
    with (tmp_path / "slots").open("r+b") as file:
        file.seek(2 * BLOCK)
        file.write(b"FIRST")
    unpin = adapter._unpin

    def replaced(entry: Entry) -> None:
        unpin(entry)
        adapter._unpin = unpin  # type: ignore[method-assign]
        put(adapter, 1, b"second")

    adapter._unpin = replaced  # type: ignore[method-assign]
    assert get(adapter, 1, 5) in (Loaded.CORRUPT, Loaded.MISS)
    assert get(adapter, 1, 6) == b"second"
    for number in range(10, 19):
        assert put(adapter, number).ok
    assert [get(adapter, number) for number in range(10, 19)] == [body(number) for number in range(10, 19)]
    assert get(adapter, 1, 6) == b"second"
    assert adapter.counters.evictions == 0
    adapter.close()


class Worn(FileMedium):
    """A file of which some blocks cannot be read."""

    bad: frozenset[int] = frozenset()

    def read(self, offset: int, buffers: Sequence[memoryview]) -> None:
        if offset in self.bad:
            raise OSError(errno.EIO, "Input/output error")
        super().read(offset, buffers)


def test_a_bad_place_on_a_device_is_no_reason_not_to_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is given up: what stood there does not come back when it can be read again. A device that is all bad is refused."""
    count = 40

    def worn(bad: range) -> RawBlockAdapter:
        medium = Worn("raw", tmp_path / "slots", BLOCK + count * SLOT, direct=True)
        medium.bad = frozenset(BLOCK + slot * SLOT for slot in bad)
        return RawBlockAdapter("raw", medium, SLOT, where="slots")

    adapter = worn(range(0))
    adapter.open()
    for number in range(count):
        put(adapter, number)
    adapter.close()
    with pytest.raises(AdapterError, match="Input/output error"):
        worn(range(count)).open()
    for bad in (range(20, 23), range(0)):
        again = worn(bad)
        again.open()
        assert again.usage().entries == len(list(again.enumerate())) == count - 3
        again.close()
    assert "slot 20 of slots cannot be read: what it held is given up" in caplog.text


def test_what_goes_while_it_is_read_is_a_miss_and_no_error(tmp_path: Path) -> None:
    """Some media answer such a read with an error: that says nothing about the medium."""
    adapter = raw_at(tmp_path / "slots")
    adapter.open()
    put(adapter, 1)

    def emptied(slot: int, want: Want) -> bool:
        adapter.delete([ident(1)])
        raise OSError(errno.EIO, "Input/output error")

    adapter._read = emptied  # type: ignore[method-assign]
    assert get(adapter, 1) is Loaded.MISS
    assert adapter.counters.io_errors == 0
    adapter.close()


def test_stores_at_the_same_time_into_a_full_tier_are_all_taken(tmp_path: Path) -> None:
    """A slot that one of them is writing is neither free nor held: the other makes room of its own."""
    adapter, medium = failing_at(tmp_path / "slots")
    for number in range(10):
        put(adapter, number)
    inside, go_on = threading.Event(), threading.Event()
    other = threading.Thread(target=put, args=(adapter, 20))

    def enter() -> None:
        if threading.current_thread() is other:
            inside.set()
            go_on.wait(30)

    medium.enter = enter  # type: ignore[method-assign]
    other.start()
    assert inside.wait(30)
    try:
        assert put(adapter, 21).ok
    finally:
        go_on.set()
        other.join()
    assert [get(adapter, number) for number in (20, 21)] == [body(20), body(21)]
    adapter.close()
