"""Damage found on read: one line a place, then silence with a count."""

import logging

import pytest

from kvd.tiers.adapters.damage import PAUSE_S, DamageLog


def test_one_line_a_place_and_the_rest_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    log = DamageLog("Do this", lambda: now[0])
    with caplog.at_level(logging.WARNING, logger="kvd.tiers"):
        for number in range(100):
            log.note("/a", f"at {number}")
        log.note("/b", "at 5")
        now[0] += PAUSE_S + 1
        log.note("/a", "at 200")
        log.note("/b", "at 6")
    assert [record.getMessage() for record in caplog.records] == [
        "/a: a damaged value (at 0): answered as a miss. Do this",
        "/b: a damaged value (at 5): answered as a miss. Do this",
        "/a: a damaged value (at 200): answered as a miss; 99 more there since the last such line. Do this",
        "/b: a damaged value (at 6): answered as a miss. Do this",
    ]


def test_many_places_take_no_memory_without_bound() -> None:
    log = DamageLog("", lambda: 0.0)
    logging.getLogger("kvd.tiers").disabled = True
    try:
        for number in range(5000):
            log.note(str(number), "")
    finally:
        logging.getLogger("kvd.tiers").disabled = False
    assert len(log._places) <= 1024
