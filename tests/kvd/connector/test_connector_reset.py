"""What a reset of the engine's caches makes of what is stored: left to others, kept, or cleared."""

from typing import Any

import pytest

from kvd.connector.settings import read_settings
from kvtools.errors import UsageError
from tests.kvd.connector.scheduler_bench import FULL, WINDOW, FakeRequest


def test_a_reset_clears_every_namespace_this_engine_used(bench: Any) -> None:
    one = bench(FULL, WINDOW, ranks=2)
    one.compute(FakeRequest("a", 512))
    one.compute(FakeRequest("b", 512, kv_transfer_params={"kvd_namespace": "them"}))
    one.client.values[b"o" * 32, b"k" * 32] = b"another engine's"
    one.scheduler.match(FakeRequest("c", 512, kv_transfer_params={"kvd_namespace": "them"}), 0)
    one.scheduler.settings = read_settings({}, {"KVD_RESET": "clear"})
    assert one.scheduler.reset()
    assert list(one.client.values) == [(b"o" * 32, b"k" * 32)]
    one.client.away = True
    assert not one.scheduler.reset()


def test_after_a_reset_an_engine_shares_nothing(bench: Any) -> None:
    """Its weights may have changed, and those of others may not have: neither reads what the other computes."""
    one = bench(FULL, WINDOW)
    one.compute(FakeRequest("a", 512))
    one.compute(FakeRequest("b", 512, kv_transfer_params={"kvd_namespace": "them"}))
    before = dict(one.client.values)
    waiting = FakeRequest("c", 512)
    assert one.scheduler.match(waiting, 0)
    viewed = one.scheduler.view().places("")
    one.client.away = True
    assert one.scheduler.reset(), "a sleep must not fail for want of a daemon"
    one.client.away = False
    assert one.client.values == before, "others keep theirs"
    assert not one.scheduler.match(waiting, 0)
    assert not one.scheduler.match(FakeRequest("d", 512, kv_transfer_params={"kvd_namespace": "them"}), 0)
    one.compute(waiting)
    mine = set(one.client.values) - set(before)
    assert mine
    assert {namespace for namespace, _ in mine} == {place.namespace for place in one.scheduler.view().places("")}
    assert not {place.namespace for place in viewed} & {place.namespace for place in one.scheduler.view().places("")}
    assert one.scheduler.match(FakeRequest("e", 512), 0), "its own it finds again"
    assert one.scheduler.reset()
    assert not one.scheduler.match(FakeRequest("f", 512), 0), "until the next one"


def test_a_load_that_was_promised_before_a_reset_fails(bench: Any) -> None:
    one = bench()
    one.compute(FakeRequest("a", 512))
    request = FakeRequest("b", 512)
    found = one.scheduler.match(request, 0)
    assert found
    one.scheduler.allocated(request, (list(range(1, 17)),), found)
    one.scheduler.reset()
    (load,) = one.scheduler.plan([], lambda _: None).loads
    assert load.request_id == "b"
    assert load.doomed


def test_a_reset_keeps_what_is_stored_where_weights_never_change(bench: Any) -> None:
    """vLLM resets its caches whenever it sleeps; the gate's engines wake with the weights they had."""
    one = bench()
    one.compute(FakeRequest("a", 512))
    one.scheduler.settings = read_settings({}, {"KVD_RESET": "keep"})
    before = dict(one.client.values)
    assert before
    assert one.scheduler.reset()
    assert one.client.values == before
    one.client.away = True
    assert one.scheduler.reset()
    with pytest.raises(UsageError, match="neither private, clear nor keep: 'no'"):
        read_settings({}, {"KVD_RESET": "no"})
