"""One call finds pools, owners, stats and what the dead left, with evidence; and it removes nothing."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtools.errors import Unreachable
from kvtools.segments import discover, owner, pool, stats
from tests.kvtools.engines import end, start_engine


def test_everything_is_found_and_told_apart(tmp_path: Path) -> None:
    pool.create_pool("kvcached_vLLM_1", 5, root=tmp_path)
    pool.create_pool("live", 5, root=tmp_path)
    live = owner.OwnerLock.acquire("live", owner.OwnerInfo("vllm"), root=tmp_path)
    dead = start_engine(tmp_path, "dead")
    end(dead)
    orphan = owner.OwnerLock.acquire("orphan", owner.OwnerInfo("vllm"), root=tmp_path)
    orphan.close(remove=False)
    (tmp_path / "killed-early.kvtools").write_bytes(b"")
    (tmp_path / "somebodys.kvtools").write_bytes(b"does not say whose")
    writer = stats.StatsWriter("kvd", "abc", [], root=tmp_path)
    gone = stats.StatsWriter("gate", "abc", [], root=tmp_path)
    (tmp_path / "copy").write_bytes(gone.path.read_bytes())
    gone.close()
    (tmp_path / "copy").rename(tmp_path / "kvtools.gate.abc")
    (tmp_path / ".kvtools.kvd.abc.77.0").write_bytes(b"")
    (tmp_path / "kvtools.kvd.unsound").write_bytes(b"x")
    (tmp_path / "foreign").write_bytes(b"x" * 25)
    (tmp_path / "damaged").write_bytes(b"x" * 24)

    found = discover.look(tmp_path)
    assert {p.name: p.state for p in found.pools} == {"dead": "stale", "kvcached_vLLM_1": "unknown", "live": "live"}
    assert {s.name: s.state for s in found.stats} == {"kvtools.gate.abc": "stale", "kvtools.kvd.abc": "live"}
    assert sorted((left.kind, left.name) for left in found.leftovers) == [
        ("pool", "dead"),
        ("sidecar", "killed-early.kvtools"),
        ("sidecar", "orphan.kvtools"),
        ("stats", "kvtools.gate.abc"),
        ("temporary", ".kvtools.kvd.abc.77.0"),
    ]
    assert [p.name for p in found.problems] == ["damaged", "kvtools.kvd.unsound"]
    stale = found.pool("dead")
    assert stale is not None
    assert stale.evidence == f"nobody holds the lock on its owner file; recorded owner: pid {dead.pid} is gone"
    unknown = found.pool("kvcached_vLLM_1")
    assert unknown is not None
    assert "no owner file" in unknown.evidence
    assert found.pool("none") is None
    live.close()
    writer.close()


def test_a_reused_pid_is_told_and_does_not_make_it_alive(tmp_path: Path) -> None:
    pool.create_pool("x", 5, root=tmp_path)
    lock = owner.OwnerLock.acquire("x", owner.OwnerInfo("vllm"), root=tmp_path)
    lock.close(remove=False)
    assert discover.look(tmp_path).pools[0].evidence.endswith(f"recorded owner: pid {os.getpid()} runs"), (
        "the lock decides, not the pid"
    )
    assert discover.look(tmp_path).pools[0].state == "stale"


def test_an_owner_file_that_is_a_link_makes_a_pool_unknown(tmp_path: Path) -> None:
    pool.create_pool("x", 5, root=tmp_path)
    (tmp_path / "x.kvtools").symlink_to("/etc/passwd")
    found = discover.look(tmp_path)
    assert (found.pools[0].state, found.leftovers) == ("unknown", [])
    assert "symbolic link" in found.pools[0].evidence


def test_an_empty_folder_and_a_missing_one(tmp_path: Path) -> None:
    assert discover.look(tmp_path) == discover.Found(tmp_path)
    with pytest.raises(Unreachable):
        discover.look(tmp_path / "none")


@pytest.mark.real("segments")
def test_dev_shm_as_it_is(shm_name: Callable[[], str]) -> None:
    name = shm_name()
    engine = start_engine(Path("/dev/shm"), name)
    mine = discover.look().pool(name)
    assert mine is not None
    assert (mine.state, mine.reading.limit_bytes) == ("live", 1 << 30)
    end(engine)
    mine = discover.look().pool(name)
    assert mine is not None
    assert mine.state == "stale"
