"""The books of pins: deadlines, owners, quarantine."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.store.index import Slots
from kvd.store.leases import Dropped, Holder, Leases, Lent


def slots(*numbers: int) -> Slots:
    return np.array(numbers, dtype=np.int64)


@pytest.fixture
def leases() -> Leases:
    return Leases()


def serials(dropped: Dropped) -> list[int]:
    return [lent.serial for lent in dropped.extents]


class TestReading:
    def test_a_number_is_never_used_twice(self, leases: Leases) -> None:
        holder = Holder()
        seen = set()
        for _ in range(100):
            lease = leases.open_read(holder, slots(1), 5.0)
            assert lease.number not in seen
            seen.add(lease.number)
            leases.close_read(lease.number, holder)
        assert not leases.reads
        assert not holder.reads

    def test_only_its_owner_can_end_it_and_only_once(self, leases: Leases) -> None:
        mine, yours = Holder(), Holder()
        lease = leases.open_read(mine, slots(1), 5.0)
        assert leases.close_read(lease.number, yours) is None
        assert leases.close_read(lease.number, mine) is lease
        assert leases.close_read(lease.number, mine) is None

    def test_it_ends_at_its_deadline_and_not_before(self, leases: Leases) -> None:
        holder = Holder()
        lease = leases.open_read(holder, slots(1, 2), 10.0)
        assert leases.next_deadline() == 10.0
        assert leases.expire(9.999).leases == []
        assert leases.expire(10.0).leases == [lease]
        assert leases.revoked == 1
        assert leases.close_read(lease.number, holder) is None

    def test_a_renewed_one_outlives_its_first_deadline(self, leases: Leases) -> None:
        holder = Holder()
        lease = leases.open_read(holder, slots(1), 10.0)
        leases.renew(lease, 20.0)
        assert leases.expire(15.0).leases == []
        assert leases.expire(20.0).leases == [lease]

    def test_renewing_again_and_again_leaves_one_deadline(self, leases: Leases) -> None:
        holder = Holder()
        lease = leases.open_read(holder, slots(1), 10.0)
        for step in range(20_000):
            leases.renew(lease, 10.0 + step)
        assert len(leases._deadlines) < 5_000
        assert leases.expire(20_008.0).leases == []
        assert leases.expire(20_009.0).leases == [lease]

    def test_a_connection_takes_its_leases_with_it(self, leases: Leases) -> None:
        mine, yours = Holder(), Holder()
        held = [leases.open_read(mine, slots(n), 10.0) for n in range(3)]
        kept = leases.open_read(yours, slots(9), 10.0)
        assert leases.drop(mine).leases == held
        assert list(leases.reads.values()) == [kept]
        assert leases.expire(99.0).leases == [kept]

    def test_released_ones_leave_nothing_behind(self, leases: Leases) -> None:
        """A busy client opens thousands a second: what is closed must not wait in memory for its deadline."""
        holder = Holder()
        for _ in range(50_000):
            leases.close_read(leases.open_read(holder, 1, 30.0).number, holder)
        assert len(leases._deadlines) < 5_000
        for _ in range(50_000):
            for lent in leases.lend(holder, [(0, 1, 1)], 30.0):
                leases.take_back(holder, lent.serial)
        assert len(leases._lent_deadlines) < 5_000


class TestWriting:
    def test_taking_back_is_the_holders_and_happens_once(self, leases: Leases) -> None:
        mine, yours = Holder(), Holder()
        (lent,) = leases.lend(mine, [(0, 10, 1)], 10.0)
        assert leases.take_back(yours, lent.serial) is None
        assert leases.take_back(mine, lent.serial) is lent
        assert leases.take_back(mine, lent.serial) is None
        assert mine.lent_pages == 0

    def test_a_passed_deadline_is_quarantine_not_freedom(self, leases: Leases) -> None:
        holder = Holder("process")
        (lent,) = leases.lend(holder, [(0, 10, 3)], 10.0)
        assert serials(leases.expire(10.0)) == []
        assert lent.quarantined
        assert leases.quarantine_pages == 3
        assert leases.take_back(holder, lent.serial) is lent, "its holder may still give it back"
        assert leases.quarantine_pages == 0
        assert not leases.quarantine

    def test_a_lost_connection_is_quarantine_until_the_process_is_gone(self, leases: Leases) -> None:
        mine, again, yours = Holder("p1"), Holder("p1"), Holder("p2")
        leases.lend(mine, [(0, 10, 3), (1, 10, 4)], 10.0)
        leases.lend(again, [(2, 10, 5)], 10.0)
        leases.lend(yours, [(3, 10, 6)], 10.0)
        for holder in (mine, again, yours):
            assert leases.drop(holder).extents == []
        assert leases.quarantine_pages == 18
        assert leases.waits_for("p1")
        assert serials(leases.process_gone("p1")) == [1, 2, 3]
        assert not leases.waits_for("p1")
        assert leases.quarantine_pages == 6
        assert leases.process_gone("p1").extents == []

    def test_late_and_lost_counts_once(self, leases: Leases) -> None:
        holder = Holder("p")
        leases.lend(holder, [(0, 10, 3)], 10.0)
        leases.expire(11.0)
        leases.drop(holder)
        assert leases.quarantine_pages == 3
        assert serials(leases.process_gone("p")) == [1]
        assert leases.quarantine_pages == 0

    @given(st.lists(st.tuples(st.integers(1, 9), st.floats(0, 20), st.sampled_from(["keep", "back", "drop"])), max_size=30))
    @settings(max_examples=50, deadline=None)
    def test_no_page_is_counted_twice_or_lost(self, plan: list[tuple[int, float, str]]) -> None:
        leases = Leases()
        state: dict[int, tuple[Holder, Lent, str]] = {}
        for pages, deadline, fate in plan:
            holder = Holder(object())
            (lent,) = leases.lend(holder, [(0, 1, pages)], deadline)
            state[lent.serial] = (holder, lent, fate)
        leases.expire(10.0)
        for serial, (holder, _, fate) in state.items():
            if fate == "back":
                leases.take_back(holder, serial)
            elif fate == "drop":
                leases.drop(holder)
        isolated = [lent for _, lent, fate in state.values() if fate != "back" and (lent.quarantined or fate == "drop")]
        assert leases.quarantine_pages == sum(lent.pages for lent in isolated)
        freed = [serial for holder, _, _ in state.values() for serial in serials(leases.process_gone(holder.process))]
        assert sorted(freed) == sorted(lent.serial for lent in isolated)
        assert leases.quarantine_pages == 0
