"""The ring of fates: newest first, bounded, and complete since the time it says."""

from kvd.store.tombstones import TOLD, Fate, Tombstones


class Clock:
    def __init__(self) -> None:
        self.now = 1000

    def __call__(self) -> int:
        self.now += 1
        return self.now


def name(number: int) -> bytes:
    return number.to_bytes(64, "little")


def test_what_was_noted_is_told_newest_first() -> None:
    ring = Tombstones(8, clock_ns=Clock())
    ring.note(name(1), Fate.REFUSED, place="disk", why="full")
    ring.note(name(2), Fate.EXPIRED)
    ring.note(name(1), Fate.EVICTED, why="room for a put", pid=77)
    told, other, nothing = ring.find([name(1), name(2), name(3)])
    assert [(one.fate, one.place, one.why, one.pid) for one in told] == [
        (Fate.EVICTED, "arena", "room for a put", 77),
        (Fate.REFUSED, "disk", "full", 0),
    ]
    assert told[0].at_ns > told[1].at_ns
    assert [one.fate for one in other] == [Fate.EXPIRED]
    assert nothing == []


def test_the_oldest_notes_go_first_and_the_ring_says_since_when_it_is_complete() -> None:
    clock = Clock()
    ring = Tombstones(4, clock_ns=clock)
    started = ring.since_ns
    for number in range(4):
        ring.note(name(number), Fate.DELETED)
    assert ring.since_ns == started
    ring.note(name(4), Fate.DELETED)
    gone, kept = ring.find([name(0), name(1)])
    assert not gone
    assert ring.since_ns == kept[0].at_ns > started
    assert ring.noted == 5


def test_one_identity_is_told_of_a_few_times_at_most_also_over_the_turn_of_the_ring() -> None:
    ring = Tombstones(16, clock_ns=Clock())
    for number in range(20):
        ring.note(name(7), Fate.EVICTED, why=f"reason {number}")
    (told,) = ring.find([name(7)])
    assert [one.why for one in told] == [f"reason {number}" for number in range(19, 19 - TOLD, -1)]


def test_texts_without_end_cost_no_memory_without_end() -> None:
    ring = Tombstones(4, clock_ns=Clock())
    for number in range(5000):
        ring.note(name(number), Fate.UNSAVED, why=f"because of {number}")
    (told,) = ring.find([name(4999)])
    assert told[0].why == "other"
    assert len(ring._texts) <= 1024
