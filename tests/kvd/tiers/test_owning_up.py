"""A flush or drain that did not get everything into the tiers says so."""

import os

import pytest

from kvd.tiers.adapters.base import Durability
from tests.kvd.tiers.ram_tier import RamTier, running
from tests.support.processes import run_cli


def test_flush_is_none_while_some_value_was_refused_and_good_again_without_it() -> None:
    ram = RamTier()
    with running(ram) as daemon, daemon.client() as client:
        refused, kept = os.urandom(32), os.urandom(32)
        ram.refuse = lambda item: "full" if item.identity.endswith(refused) else ""
        assert client.put(refused, b"x" * 5000)
        assert client.put(kept, b"y" * 5000, wait="tier").durability == "fsync"
        assert client.flush() == "none"
        assert client.flush([kept]) == "fsync"
        assert client.flush([refused]) == "none"
        assert client.flush([os.urandom(32)]) == "none", "a key that is nowhere outlives nothing"
        ram.refuse = lambda item: ""
        assert client.put(refused, b"z" * 5000, wait="tier").durability == "fsync"
        assert client.flush() == "fsync"


def test_a_tier_that_is_full_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    ram = RamTier("shelf")
    with running(ram) as daemon, daemon.client() as client:
        for _ in range(3):
            for refusal in ("full", "full", ""):
                ram.refuse = lambda item, refusal=refusal: refusal  # type: ignore[misc]
                client.put(os.urandom(32), b"x" * 5000, wait="tier")
        assert caplog.text.count("tier shelf is full") == 1


def test_a_refused_value_that_is_deleted_is_no_longer_missed() -> None:
    ram = RamTier()
    with running(ram) as daemon, daemon.client() as client:
        ram.refuse = lambda item: "full"
        key = os.urandom(32)
        assert client.put(key, b"x" * 5000)
        assert client.flush() == "none"
        assert client.delete([key]) == 1
        assert client.flush() == "fsync"


def test_drain_fails_and_counts_what_no_tier_took() -> None:
    ram = RamTier()
    with running(ram) as daemon, daemon.client() as client:
        ram.refuse = lambda item: "full"
        assert all(client.put_many([(os.urandom(32), b"x" * 5000) for _ in range(3)]))
        env = {"KVD_SOCKET": str(daemon.socket)}
        ran = run_cli("kvd", "drain", env=env)
        assert ran.rc == 1
        assert "3 values end with this daemon: no tier has taken them" in ran.stderr
        told = run_cli("kvd", "drain", "--json", env=env)
        assert told.rc == 1
        assert told.json()["left"] == 3
        assert told.json()["drained"] is False


def test_drain_of_an_idle_daemon_needs_no_time_and_one_without_tiers_says_what_is_lost() -> None:
    with running(RamTier()) as daemon:
        assert run_cli("kvd", "drain", "--timeout", "0", env={"KVD_SOCKET": str(daemon.socket)}).rc == 0
    with running() as daemon, daemon.client() as client:
        assert client.put(os.urandom(32), b"x" * 5000)
        ran = run_cli("kvd", "drain", env={"KVD_SOCKET": str(daemon.socket)})
        assert ran.rc == 0
        assert "there is no tier: what is in RAM ends with the daemon" in ran.stdout
    near, far = RamTier("near", durability=Durability.NONE), RamTier("far", local_index=False)
    with running(near, far) as daemon, daemon.client() as client:
        assert client.put(os.urandom(32), b"x" * 5000)
        env = {"KVD_SOCKET": str(daemon.socket)}
        ran = run_cli("kvd", "drain", env=env)
        assert ran.rc == 0
        assert "what goes to tiers is there, of which some promise nothing (durability none)" in ran.stdout
        assert run_cli("kvd", "keys", "--json", env=env).json()["unlisted"] == ["far"]
        daemon.evict_all()
        near.values.clear()
        listed = run_cli("kvd", "keys", env=env)
        assert (listed.rc, listed.stdout) == (0, "")
        assert "not listed: what is in far alone" in listed.stderr
        assert "nothing is stored elsewhere" in listed.stderr


def test_a_clear_or_delete_that_a_tier_has_not_carried_out_is_said_at_once(caplog: pytest.LogCaptureFixture) -> None:
    ram = RamTier()
    with running(ram) as daemon:
        env = {"KVD_SOCKET": str(daemon.socket)}
        keys = [os.urandom(32) for _ in range(5)]
        with daemon.client() as client:
            assert all(client.put_many([(key, b"x" * 5000) for key in keys], wait="tier"))
        ram.deletes.failing = "no room"
        ran = run_cli("kvd", "evict", "--all-tiers", keys[0].hex(), env=env)
        assert ran.rc == 1
        assert "1 value dropped everywhere, but 1 is still to go from a tier: tier ram does not work (no room)" in ran.stderr
        told = run_cli("kvd", "clear", "--yes", "--json", env=env)
        assert told.rc == 1
        assert (told.json()["cleared"], told.json()["left"]) == (5, 5)
        with daemon.client() as client:
            assert client.get_many(keys) == [None] * 5, "nobody reads them all the same"
        ram.deletes.failing = ""
        daemon.settled()
        assert not ram.values
        ran = run_cli("kvd", "clear", "--yes", env=env)
        assert (ran.rc, ran.stdout) == (0, "0 values forgotten\n")
