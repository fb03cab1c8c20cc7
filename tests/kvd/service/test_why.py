"""Why a key is not there, asked of a real daemon: evicted, expired, deleted, refused, damaged, never offered, elsewhere."""

import time
from pathlib import Path

import pytest

from kvd.store.identity import namespace_of
from kvd.store.tombstones import Fate
from kvd.wire.client import Client, WhyResult
from tests.support.daemon import MakeDaemon
from tests.support.processes import wait_until

pytestmark = [pytest.mark.real("kvd")]

KEYS = [bytes([number]) * 32 for number in range(40)]
MINE, OTHER = namespace_of("mine"), namespace_of("other")


def fates(found: WhyResult, key: int = 0) -> list[tuple[Fate, str, str]]:
    return [(one.fate, one.place, one.why) for one in found.notes[0][key]]


def test_each_way_out_of_the_arena_has_its_name(kvd_daemon: MakeDaemon) -> None:
    daemon = kvd_daemon(max_bytes="2MiB")
    with daemon.client(namespace=MINE) as client:
        since = time.time_ns()
        # An expired value leaves when its room is wanted or within a tick.
        client.put(KEYS[0], b"x" * 5000, ttl_s=0.5)
        wait_until(lambda: bool(client.why(KEYS[:1]).notes[0][0]), timeout_s=10, what="the expired value to be swept")
        client.put(KEYS[1], b"x" * 5000)
        client.delete(KEYS[1:2])
        client.put(KEYS[2], b"x" * 5000)
        client.delete(KEYS[2:3], arena_only=True)
        client.put(KEYS[3], b"x" * 5000)
        client.put(KEYS[4], b"small", retention="none")
        client.put(KEYS[5], b"x" * 5000, retention="none")
        for key in KEYS[6:]:
            client.put(key, b"x" * (100 << 10))
        found = client.why(KEYS)
        assert found.since_ns < since
        assert fates(found, 0) == [(Fate.EXPIRED, "arena", "")]
        assert fates(found, 1) == [(Fate.DELETED, "arena", "deleted by a client")]
        assert fates(found, 2) == [(Fate.DELETED, "arena", "dropped from the arena by a client")]
        assert fates(found, 3) == [(Fate.EVICTED, "arena", "room for a put")]
        assert found.notes[0][3][0].at_ns > since
        assert fates(found, 4) == fates(found, 5) == [(Fate.REFUSED, "arena", "retention_none")]
        assert found.places[0][:6] == [[]] * 6
        assert found.places[0][-1] == ["arena"]
        client.clear()
        assert fates(client.why(KEYS[-1:])) == [(Fate.DELETED, "arena", "cleared")]


def test_the_process_that_wanted_the_room_is_named(kvd_daemon: MakeDaemon) -> None:
    import os

    daemon = kvd_daemon(max_bytes="1MiB")
    with daemon.client(namespace=MINE) as client:
        client.put(KEYS[0], b"x" * (600 << 10))
        client.put(KEYS[1], b"x" * (600 << 10))
        (note,) = client.why(KEYS[:1]).notes[0][0]
        assert (note.fate, note.pid) == (Fate.EVICTED, os.getpid())


def test_a_value_of_another_namespace_is_found_there_in_ram_and_in_a_tier_that_is_named(kvd_daemon: MakeDaemon) -> None:
    daemon = kvd_daemon(max_bytes="4MiB", tier="64MiB")
    with daemon.client(namespace=OTHER) as client:
        client.put(KEYS[0], b"x" * 5000)
        client.put(KEYS[1], b"x" * 5000)
        client.flush()
        client.delete(KEYS[1:2], arena_only=True)
        found = client.why(KEYS[:2], namespaces=[MINE, OTHER], others=[OTHER])
        assert found.places == [[[], []], [["arena", "disk"], ["disk"]]]
        found = client.why(KEYS[:2], namespaces=[MINE], others=[OTHER])
        assert found.others == [[OTHER], [OTHER]]
        assert client.why(KEYS[:2], namespaces=[MINE]).others == [[OTHER], []]


def test_what_a_client_says_it_did_not_store_is_remembered(kvd_daemon: MakeDaemon) -> None:
    daemon = kvd_daemon(max_bytes="1MiB")
    with daemon.client(namespace=MINE) as client:
        client.note(KEYS[:2], "retention none")
        assert fates(client.why(KEYS[:3]), 1) == [(Fate.UNSAVED, "", "retention none")]
        assert fates(client.why(KEYS[:3]), 2) == []


def test_a_tiers_evictions_refusals_and_damage_are_told_by_its_name(kvd_daemon: MakeDaemon) -> None:
    daemon = kvd_daemon(max_bytes="1MiB", tier="16MiB")
    with daemon.client(namespace=MINE) as client:
        _fill(client, 30, 1 << 20)
        found = client.why(KEYS[:1])
        assert found.places[0] == [[]]
        assert (Fate.EVICTED, "disk", "room in the tier") in fates(found)
        kept = next(number for number, where in enumerate(client.why(KEYS[:30]).places[0]) if where == ["disk"])
        _damage(daemon.tier, bytes([kept]) * 4096)
        assert client.get(KEYS[kept]) is None
        assert (Fate.CORRUPT, "disk", "") in fates(client.why(KEYS[kept : kept + 1]))


def _fill(client: Client, count: int, size: int) -> None:
    for number in range(count):
        client.put(KEYS[number], bytes([number]) * (size - 4096), wait="tier")


def _damage(folder: Path, content: bytes) -> None:
    """Turn a bit in every page of that content."""
    for path in folder.rglob("*.kvcache"):
        data = bytearray(path.read_bytes())
        at = data.find(content)
        with path.open("r+b") as file:
            while at >= 0:
                file.seek(at)
                file.write(bytes([content[0] ^ 1]))
                at = data.find(content, at + 4096)


def test_a_question_that_cannot_be_meant_is_refused(kvd_daemon: MakeDaemon) -> None:
    from kvd.errors import KvdError

    daemon = kvd_daemon(max_bytes="1MiB")
    with daemon.client(namespace=MINE) as client:
        with pytest.raises(KvdError, match="at most 32768 keys times namespaces"):
            client.why(KEYS * 1000, namespaces=[MINE, OTHER])
        with pytest.raises(KvdError, match="a namespace is 32 bytes"):
            client.why(KEYS[:1], others=[b"short"])
        assert client.why([]).places == [[]]


def test_a_prefix_says_where_each_of_its_keys_comes_from(kvd_daemon: MakeDaemon) -> None:
    daemon = kvd_daemon(max_bytes="4MiB", tier="64MiB")
    with daemon.client(namespace=MINE) as client:
        for namespace in (MINE, OTHER):
            client.put_many([(key, b"x" * 5000) for key in KEYS[:4]], namespace=namespace, wait="tier")
        client.delete(KEYS[1:2], arena_only=True)
        client.delete(KEYS[2:3], arena_only=True, namespace=OTHER)
        found = client.prefix(KEYS[:6], namespaces=[MINE, OTHER], where=True)
        assert (found.length, found.sources) == (4, bytes([0, 1, 1, 0]))
        assert client.prefix(KEYS[:6], namespaces=[MINE, OTHER]).sources == b""
        pinned = client.prefix(KEYS[:6], pin_s=5, where=True)
        assert (pinned.length, pinned.sources) == (4, bytes([0, 1, 0, 0]))
        assert pinned.token is not None
        client.unpin(pinned.token)


def test_every_type_of_tier_that_hosts_share_is_known_as_such() -> None:
    from kvd.service.rounds import REMOTE
    from kvd.tiers.adapters import registry

    assert set(registry.TYPES) >= REMOTE
    assert REMOTE.isdisjoint({"disk", "fs", "raw_block", "dax", "mock"})
