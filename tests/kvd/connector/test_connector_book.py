"""The book of engines in a real daemon: who stored under what, and which field differs."""

from dataclasses import replace
from typing import Any

import pytest

from kvd.connector import book
from kvd.connector.groups import Group
from kvd.connector.link import Link
from kvd.connector.plan import RankIdentity
from kvd.connector.scheduler import Scheduler
from kvd.connector.settings import read_settings
from kvd.connector.view import HashSource, NotAView, View
from tests.kvd.connector.scheduler_bench import FakeRequest
from tests.support.daemon import MakeDaemon
from tests.support.processes import wait_until

FACTS = {"weights": "w", "model": "m", "dtype": "float32", "chunk_tokens": "256"}


def view(**changes: Any) -> View:
    rank = RankIdentity((b"a" * 32, b"b" * 32), FACTS, 256, (1000, 500), "", ({"group": "0"}, {"group": "1"}))
    whole = View((rank,), (Group(0, 32), Group(1, 32, window=127)), HashSource("sha256", "00" * 32, 32), 256, "", 12.5, "me")
    return replace(whole, **changes)


def test_a_view_travels_as_json_and_means_the_same() -> None:
    one = view(more={"saves": True})
    other = View.of_json(one.as_json())
    assert other == one
    assert other.places("x") == one.places("x")
    assert other.places("x") != other.places("y")
    assert [place.group for place in one.places()] == [0, 1]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 2}', '{"format": 1, "ranks": 3}', "\x00"])
def test_what_is_no_view_is_said_to_be_none(text: str) -> None:
    with pytest.raises(NotAView):
        View.of_json(text)


def test_a_view_with_numbers_that_cannot_be_is_refused() -> None:
    with pytest.raises(NotAView):
        View.of_json(view().as_json().replace('"chunk_tokens": 256', '"chunk_tokens": -1'))


@pytest.mark.real("kvd")
def test_the_last_engine_of_a_model_is_compared_and_the_first_has_nothing_to_compare_with(kvd_daemon: MakeDaemon) -> None:
    daemon = kvd_daemon(max_bytes="1MiB")
    with Link("facts", daemon.client) as link:
        link.start()
        wait_until(lambda: link.up)
        assert book.compare(link, view()) == []
        assert book.compare(link, view()) == []
        seeded = view(hashes=HashSource("sha256", "01" * 32, 32))
        assert book.compare(link, seeded) == ["hash_seed: 0101010101010101 / 0000000000000000"]
        other_model = replace(view(), ranks=(replace(view().ranks[0], facts={**FACTS, "weights": "v"}),))
        assert book.compare(link, other_model) == [], "another model's engines are no neighbours"
        with daemon.client() as client:
            assert len(book.views(client)) == 3, "an engine that starts again renews its entry"
            client.put(b"k" * 32, b"no view", namespace=book.NAMESPACE)
            assert len(book.views(client)) == 3


@pytest.mark.real("kvd")
def test_an_engine_with_other_settings_is_told_what_differs(kvd_daemon: MakeDaemon, caplog: pytest.LogCaptureFixture) -> None:
    daemon = kvd_daemon(max_bytes="1MiB")
    told: list[str] = []
    with Link("facts", daemon.client) as link:
        link.start()
        wait_until(lambda: link.up)
        for seed, dtype in (("00", "float32"), ("00", "float32"), ("01", "float32"), ("01", "bfloat16")):
            other = Scheduler(
                read_settings({}, {}),
                (Group(0, 32),),
                link,
                hash_tokens=32,
                hash_source=lambda seed=seed: ("sha256", seed),
                say_view=lambda view: book.compare_soon(link, view).join(),
            )
            namespace = dtype.encode().ljust(32)
            other.introduce([RankIdentity((namespace,), {**FACTS, "dtype": dtype}, 256, (100,), "", ({},))], 1)
            for name in "ab":
                assert other.match(FakeRequest(name, 1024), 0) == 0
            told = [record.getMessage() for record in caplog.records if "stored under other settings" in record.getMessage()]
    assert len(told) == 2
    assert "hash_seed: 01 / 00. To share: set PYTHONHASHSEED" in told[0]
    assert "dtype: bfloat16 / float32" in told[1]


@pytest.mark.real("kvd")
@pytest.mark.parametrize("load", [True, False], ids=["", "of an engine that loads nothing"])
def test_a_daemon_that_starts_with_nothing_gets_the_entry_again(kvd_daemon: MakeDaemon, load: bool) -> None:
    daemon = kvd_daemon(max_bytes="1MiB")

    def connect() -> Any:
        client = daemon.client()
        client.ping()
        return client

    with Link("lookup", connect) as link, Link("facts", connect) as facts:
        for one in (link, facts):
            one.start()
            wait_until(lambda one=one: one.up)
        engine = Scheduler(
            read_settings({}, {}),
            (Group(0, 32),),
            link,
            hash_tokens=32,
            hash_source=lambda: ("sha256", "00"),
            say_view=lambda view: book.compare_soon(facts, view).join(),
            load=load,
        )
        engine.introduce([RankIdentity((b"n" * 32,), FACTS, 256, (100,), "", ({},))], 1)
        assert engine.match(FakeRequest("a", 1024), 0) == 0
        with daemon.client() as client:
            assert len(book.views(client)) == 1
        daemon.restart(kill=True)
        with daemon.client() as client:
            assert book.views(client) == []
        assert wait_until(lambda: not link.look() or True)
        link.look()
        wait_until(lambda: link.up)
        engine.match(FakeRequest("b", 1024), 0)
        with daemon.client() as client:
            assert len(book.views(client)) == 1


def test_an_engine_without_a_daemon_compares_nothing() -> None:
    with Link("facts", lambda: pytest.fail("never asked")) as link:
        assert book.compare(link, view()) == []
