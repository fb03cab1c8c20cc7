"""Owner sidecars: liveness by lock, limits noted and answered, and a text that no kill can tear."""

import json
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtools.errors import Refused, Unreachable, UsageError
from kvtools.segments import owner, pool
from kvtools.segments.owner import OwnerInfo, OwnerLock
from tests.kvtools.engines import end, start_engine

INFO = OwnerInfo("vllm", "Qwen/Qwen3-8B", ("GPU-5f2a", "GPU-77c1"), tp_size=2, start_capacity_bytes=8 << 30, page_bytes=128 << 20)


def test_what_an_owner_says_is_read_back(tmp_path: Path) -> None:
    with OwnerLock.acquire("x", INFO, root=tmp_path, clock=lambda: 17):
        read = owner.read_owner("x", root=tmp_path)
        assert read is not None
        assert (read.alive, read.info, read.since_ns, read.pid, read.error) == (True, INFO, 17, os.getpid(), "")
        assert read.story == f"pid {os.getpid()} runs"
        assert json.loads((tmp_path / "x.kvtools").read_text())["schema"] == "kvtools.owner/1"
    assert owner.read_owner("x", root=tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_the_example_of_the_format_page_is_true(tmp_path: Path) -> None:
    page = (Path(owner.__file__).parent / "FORMAT.md").read_text()
    found = re.search(r"```json\n(.*?)\n```\n\n```\n(.*?)```", page, re.DOTALL)
    assert found
    data = bytes.fromhex("".join(line[6:53] for line in found[2].splitlines()))
    assert data == found[1].encode() + b"\n"
    (tmp_path / "VLLM_MODEL_1.kvtools").write_bytes(data)
    read = owner.read_owner("VLLM_MODEL_1", root=tmp_path)
    assert read is not None
    assert read.error == ""
    assert (read.pid, read.info.model, read.info.page_bytes, read.alive) == (9644, "Qwen/Qwen3-8B", 128 << 20, False)
    assert read.last_limit == owner.LimitEntry(4 << 30, "unknown", 1_795_972_129_000_000_000, "applied", 4 << 30)
    with OwnerLock.acquire("VLLM_MODEL_1", read.info, root=tmp_path, clock=lambda: read.since_ns):
        ours = json.loads((tmp_path / "VLLM_MODEL_1.kvtools").read_text())
    theirs = json.loads(data)
    for key in ("pid", "pid_start", "pid_namespace"):
        del ours[key], theirs[key]
    assert ours == theirs


@pytest.mark.real("segments")
def test_two_engines_cannot_own_one_name(shm_name: Callable[[], str]) -> None:
    name = shm_name()
    engine = start_engine(Path("/dev/shm"), name)
    try:
        with pytest.raises(Refused, match=rf"segment {name} is owned by a running engine \(vllm, pid {engine.pid}\)"):
            OwnerLock.acquire(name, INFO, patience_s=0.05)
    finally:
        end(engine)
    taken = OwnerLock.acquire(name, INFO)
    taken.close()


@pytest.mark.real("segments")
@pytest.mark.parametrize("signal", ["SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGABRT"])
def test_an_owner_that_dies_by_any_signal_is_not_alive(shm_name: Callable[[], str], signal: str) -> None:
    import signal as signals

    name = shm_name()
    engine = start_engine(Path("/dev/shm"), name)
    before = owner.read_owner(name)
    engine.send_signal(getattr(signals, signal))
    engine.wait()
    end(engine)
    after = owner.read_owner(name)
    assert before is not None
    assert after is not None
    assert (before.alive, after.alive) == (True, False)
    assert after.info == before.info
    assert after.story == f"pid {engine.pid} is gone"


def test_a_limit_is_noted_pending_and_answered(tmp_path: Path) -> None:
    pool.create_pool("x", 8 << 30, root=tmp_path)
    with OwnerLock.acquire("x", INFO, root=tmp_path) as lock:
        owner.change_limit("x", 4 << 30, by="kvctl limit, uid 0", root=tmp_path, clock=lambda: 5)
        read = owner.read_owner("x", root=tmp_path)
        assert read is not None
        assert read.limits == (owner.LimitEntry(4 << 30, "kvctl limit, uid 0", 5),)
        lock.mark(4 << 30, "deferred", effective_bytes=6 << 30, reason="6 GiB in use")
        lock.mark(4 << 30, "applied", effective_bytes=4 << 30)
        read = owner.read_owner("x", root=tmp_path)
        assert read is not None
        assert read.limits == (owner.LimitEntry(4 << 30, "kvctl limit, uid 0", 5, "applied", 4 << 30, ""),)
        lock.mark(3 << 30, "applied")
        read = owner.read_owner("x", root=tmp_path)
        assert read is not None
        assert [(e.limit_bytes, e.by) for e in read.limits] == [(4 << 30, "kvctl limit, uid 0"), (3 << 30, "unknown")]


def test_history_is_short_survives_a_restart_and_fits_a_page(tmp_path: Path) -> None:
    pool.create_pool("x", 8 << 30, root=tmp_path)
    long = OwnerInfo("vllm", "m" * 1500, tuple(f"GPU-{i:036d}" for i in range(8)))
    lock = OwnerLock.acquire("x", long, root=tmp_path)
    for i in range(1, 60):
        owner.change_limit("x", i << 20, by="kvctl limit, uid 4294967294", root=tmp_path)
    assert (tmp_path / "x.kvtools").stat().st_size <= owner.PAGE
    lock.close(remove=False)
    with OwnerLock.acquire("x", INFO, root=tmp_path):
        read = owner.read_owner("x", root=tmp_path)
        assert read is not None
        assert read.info == INFO
        assert read.last_limit is not None
        assert read.last_limit.limit_bytes == 59 << 20
        assert 4 <= len(read.limits) <= 16
    with pytest.raises(UsageError, match="too long"):
        OwnerLock.acquire("x", OwnerInfo("vllm", "m" * 5000), root=tmp_path)
    assert not (tmp_path / "x.kvtools").exists()


def test_a_limit_without_a_sidecar_or_with_a_spoiled_one_is_still_written(tmp_path: Path) -> None:
    pool.create_pool("x", 8, root=tmp_path)
    assert owner.change_limit("x", 4, by="t", root=tmp_path).after.limit_bytes == 4
    (tmp_path / "x.kvtools").write_text("{ not json")
    assert owner.change_limit("x", 3, by="t", root=tmp_path).after.limit_bytes == 3
    assert (tmp_path / "x.kvtools").read_text() == "{ not json"


@pytest.mark.parametrize(
    "text", ["", "[]", "5", "null", '"x"', "{}", '{"pid":"x"}', '{"pid":1e999,"pid_start":0}', "\xff", "{" * 5000, "[" * 9000]
)
def test_a_sidecar_that_does_not_parse_says_so(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.kvtools").write_bytes(text.encode("latin-1"))
    read = owner.read_owner("x", root=tmp_path)
    assert read is not None
    assert read.error.startswith(f"owner file {tmp_path}/x.kvtools is damaged: it ")
    assert not read.alive


KEYS = st.sampled_from(["pid", "pid_start", "pid_namespace", "since_ns", "limits", "devices", "tp_rank", "engine", "limit_bytes"])
JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text() | st.integers(), lambda c: st.lists(c) | st.dictionaries(KEYS, c)
)


@given(data=st.binary(max_size=300) | JSON.map(lambda value: json.dumps(value).encode()))
def test_garbage_in_a_sidecar_is_never_an_exception(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    root = tmp_path_factory.mktemp("shm")
    (root / "x.kvtools").write_bytes(data)
    assert owner.read_owner("x", root=root) is not None


def test_a_live_owner_repairs_its_text(tmp_path: Path) -> None:
    with OwnerLock.acquire("x", INFO, root=tmp_path) as lock:
        (tmp_path / "x.kvtools").write_text("spoiled")
        lock.update(INFO)
        read = owner.read_owner("x", root=tmp_path)
        assert read is not None
        assert (read.alive, read.error, read.info, read.pid) == (True, "", INFO, os.getpid())


def test_a_longer_text_left_behind_a_shorter_one_is_not_read(tmp_path: Path) -> None:
    """What a kill between the write and the cut leaves."""
    with OwnerLock.acquire("x", INFO, root=tmp_path):
        text = (tmp_path / "x.kvtools").read_bytes()
    (tmp_path / "x.kvtools").write_bytes(text + text[len(text) // 2 :])
    read = owner.read_owner("x", root=tmp_path)
    assert read is not None
    assert (read.error, read.info) == ("", INFO)


@pytest.mark.real("segments")
def test_killed_in_the_middle_of_writes_the_text_is_always_whole(shm_name: Callable[[], str]) -> None:
    """An owner that does nothing but write its sidecar is killed at random moments."""
    name = shm_name()
    then = "i = 0\nwhile True:\n    i += 1\n    lock.mark(i << 20, 'applied', reason='r' * (i % 40))"
    for _ in range(12):
        engine = start_engine(Path("/dev/shm"), name, then)
        end(engine)
        read = owner.read_owner(name)
        assert read is not None
        assert (read.error, read.alive, read.pid) == ("", False, engine.pid)


def test_links_and_unreadable_sidecars(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("{}")
    (tmp_path / "x.kvtools").symlink_to("real")
    with pytest.raises(Unreachable, match=r"owner file x\.kvtools is a symbolic link"):
        owner.read_owner("x", root=tmp_path)
    with pytest.raises(Unreachable):
        OwnerLock.acquire("x", INFO, root=tmp_path)
    assert (tmp_path / "real").read_text() == "{}"


def test_a_name_too_long_for_a_sidecar(tmp_path: Path) -> None:
    pool.create_pool("x" * 255, 5, root=tmp_path)
    assert owner.read_owner("x" * 255, root=tmp_path) is None
    assert owner.change_limit("x" * 255, 4, by="t", root=tmp_path).after.limit_bytes == 4
    with pytest.raises(UsageError, match="name too long for an owner"):
        OwnerLock.acquire("x" * 248, INFO, root=tmp_path)


def test_only_an_unowned_sidecar_is_removed(tmp_path: Path) -> None:
    assert not owner.remove_stale("x", root=tmp_path)
    lock = OwnerLock.acquire("x", INFO, root=tmp_path)
    assert not owner.remove_stale("x", root=tmp_path)
    lock.close(remove=False)
    assert owner.remove_stale("x", root=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_pruning_against_starting_engines_never_removes_an_owned_sidecar(tmp_path: Path) -> None:
    stop = threading.Event()

    def prune() -> None:
        while not stop.is_set():
            owner.remove_stale("x", root=tmp_path)

    thread = threading.Thread(target=prune)
    thread.start()
    try:
        for _ in range(100):
            lock = OwnerLock.acquire("x", INFO, root=tmp_path)
            read = owner.read_owner("x", root=tmp_path)
            assert read is not None
            assert read.alive
            lock.close(remove=False)
    finally:
        stop.set()
        thread.join()


def test_an_owner_learns_of_a_limit_that_was_written_once_more(tmp_path: Path) -> None:
    with OwnerLock.acquire("x", INFO, root=tmp_path) as lock:
        pool.create_pool("x", 8 << 30, root=tmp_path)
        assert lock.asked() is None
        owner.change_limit("x", 8 << 30, by="an operator", root=tmp_path)
        asked = lock.asked()
        assert asked is not None
        assert (asked.limit_bytes, asked.by) == (8 << 30, "an operator")
        assert lock.asked() is None, "once"
        lock.mark(8 << 30, "applied", effective_bytes=8 << 30)
        assert lock.asked() is None


def test_an_owner_whose_file_was_removed_knows(tmp_path: Path) -> None:
    lock = OwnerLock.acquire("x", INFO, root=tmp_path)
    assert not lock.lost
    (tmp_path / "x.kvtools").unlink()
    assert lock.lost
    OwnerLock.acquire("x", INFO, root=tmp_path).close()
    lock.close()
