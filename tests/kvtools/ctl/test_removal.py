"""kvctl delete and prune: what is asked before something goes, what never goes, and the races with starting engines."""

import os
import pty
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtools.ctl import pruning
from kvtools.errors import Refused
from kvtools.segments import owner, pool, stats
from tests.kvtools.engines import end, start_engine
from tests.support.processes import SCRIPTS, Ran

from .conftest import GiB

Kvctl = Callable[..., Ran]


def test_delete_without_a_yes_or_a_terminal_is_refused(kvctl: Kvctl, shm: Path) -> None:
    pool.create_pool("x", GiB, root=shm)
    ran = kvctl("delete", "x")
    assert (ran.rc, ran.stdout, ran.stderr) == (
        5, "", "kvctl: error: segment x is not deleted without a yes\nhint: add --yes to do it anyway\n",
    )  # fmt: skip
    assert (shm / "x").exists()


def test_delete_with_a_yes(kvctl: Kvctl, shm: Path) -> None:
    pool.create_pool("x", GiB, used_bytes=5, root=shm)
    body = kvctl("delete", "x", "--yes", "--json").json()
    assert (body["schema"], body["ipc"], body["used_bytes"], body["deleted"]) == ("kvctl.delete/1", "x", 5, True)
    assert list(shm.iterdir()) == []


@pytest.mark.real("segments")
def test_a_live_engines_segment_goes_only_by_its_name_typed(kvctl: Kvctl, shm: Path) -> None:
    engine = start_engine(shm, "x")
    for words in ([], ["--yes"], ["--yes", "--confirm", "y"], ["--confirm", "X"]):
        ran = kvctl("delete", "x", *words)
        assert ran.rc == 5, words
        assert "--confirm x" in ran.stderr
    assert (shm / "x").exists()
    assert kvctl("delete", "x", "--confirm", "x").rc == 0
    assert not (shm / "x").exists()
    assert (shm / "x.kvtools").exists(), "the owner file is the owner's while it lives"
    end(engine)


@pytest.mark.real("segments")
def test_a_process_that_names_the_segment_makes_it_a_live_ones(kvctl: Kvctl, shm: Path) -> None:
    """kvcached's engines hold nothing open: their environment is all there is to see."""
    pool.create_pool("VLLM-1", GiB, root=shm)
    env = {**os.environ, "KVCACHED_IPC_NAME": "VLLM.1", "KVCACHED_PAGE_PREALLOC_ENABLED": "false"}
    words = [sys.executable, "-c", "print('up', flush=True); input()"]
    engine = subprocess.Popen(words, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert engine.stdout is not None
    engine.stdout.readline()
    ran = kvctl("delete", "VLLM-1", "--yes")
    assert (ran.rc, f"in use (pid {engine.pid}, KVCACHED_IPC_NAME in its environment)" in ran.stderr) == (5, True)
    shown = kvctl("show", "VLLM-1", "--json").json()
    assert [(one["pid"], one["prealloc_off"]) for one in shown["likely_owners"]] == [(engine.pid, True)]
    assert "kvcached then never looks at new limits" in kvctl("limit", "VLLM-1", "512M").stderr
    engine.communicate(b"\n")
    assert kvctl("delete", "VLLM-1", "--yes").rc == 0


@pytest.mark.real("segments")
def test_a_dead_engines_segment_takes_its_owner_file_along(kvctl: Kvctl, shm: Path) -> None:
    end(start_engine(shm, "x"))
    assert kvctl("delete", "x", "--yes").rc == 0
    assert list(shm.iterdir()) == []


def at_terminal(answer: str, *words: str) -> tuple[int, str]:
    """Run the real kvctl with a terminal on all three streams and type `answer` once it asks. Status and what it showed."""
    pid, fd = pty.fork()
    if pid == 0:
        os.execv(SCRIPTS / "kvctl", ["kvctl", *words])
    shown = b""
    typed = False
    while True:
        try:
            data = os.read(fd, 4096)
        except OSError:
            break
        if not data:
            break
        shown += data
        if not typed and shown.rstrip().endswith((b"[y/N]", b"anyway:")):
            os.write(fd, answer.encode())
            typed = True
    os.close(fd)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), shown.decode()


@pytest.mark.parametrize(("answer", "status"), [("y\n", 0), ("YES\n", 0), ("n\n", 5), ("\n", 5), ("\x04", 5), ("\x03", 130)])
def test_at_a_terminal_it_asks_and_the_default_is_no(shm: Path, answer: str, status: int) -> None:
    pool.create_pool("x", GiB, used_bytes=GiB // 2, root=shm)
    code, shown = at_terminal(answer, "--shm", str(shm), "delete", "x")
    assert code == status, shown
    assert "delete segment x (unknown, 512 MiB in use by its last word)? [y/N]" in shown
    assert (shm / "x").exists() == (status != 0)


@pytest.mark.real("segments")
def test_at_a_terminal_a_live_engines_name_is_typed(shm: Path) -> None:
    engine = start_engine(shm, "x")
    code, shown = at_terminal("y\n", "--shm", str(shm), "delete", "x")
    assert (code, "deleting it can end that engine" in shown) == (5, True)
    assert (shm / "x").exists()
    code, shown = at_terminal("x\n", "--shm", str(shm), "delete", "x")
    assert code == 0
    assert not (shm / "x").exists()
    end(engine)


def test_at_a_terminal_a_limit_below_use_is_asked(shm: Path) -> None:
    pool.create_pool("x", GiB, used_bytes=GiB // 2, root=shm)
    code, shown = at_terminal("n\n", "--shm", str(shm), "limit", "x", "1M")
    assert (code, "Set 1 MiB? [y/N]" in shown) == (5, True)
    code, _ = at_terminal("y\n", "--shm", str(shm), "limit", "x", "1M")
    assert (code, pool.read_pool("x", root=shm).limit_bytes) == (0, 1 << 20)


@pytest.mark.real("segments")
def test_prune_takes_the_proven_dead_and_nothing_else(kvctl: Kvctl, shm: Path) -> None:
    pool.create_pool("unknown", GiB, root=shm)
    dead, live = start_engine(shm, "dead"), start_engine(shm, "live")
    end(dead)
    writer = stats.StatsWriter("kvd", "live", [], root=shm)
    (shm / "kvtools.kvd.dead").write_bytes(writer.path.read_bytes())
    (shm / ".kvtools.kvd.x.1.0").write_bytes(b"")
    owner.OwnerLock.acquire("orphan", owner.OwnerInfo("vllm"), root=shm).close(remove=False)
    before = {path.name for path in shm.iterdir()}

    ran = kvctl("prune")
    assert (ran.rc, "4 stale files not removed without a yes" in ran.stderr) == (5, True)
    assert f"recorded owner: pid {dead.pid} is gone" in ran.stdout
    ran = kvctl("prune", "--dry-run", "--json")
    assert {one["name"] for one in ran.json()["files"]} == {"dead", "kvtools.kvd.dead", ".kvtools.kvd.x.1.0", "orphan.kvtools"}
    assert {path.name for path in shm.iterdir()} == before

    body = kvctl("prune", "--yes", "--json").json()
    assert [one["removed"] for one in body["files"]] == [True] * 4
    left = {path.name for path in shm.iterdir()}
    assert left == {"unknown", "live", "live.kvtools", "kvtools.kvd.live"}
    ran = kvctl("prune", "--yes")
    assert (ran.rc, ran.stdout, ran.stderr) == (0, "", f"nothing stale in {shm}\n")
    assert kvctl("prune", "--json").json() == {"schema": "kvctl.prune/1", "files": []}
    writer.close()
    end(live)


def test_what_became_owned_again_is_not_taken(shm: Path) -> None:
    end(start_engine(shm, "x"))
    found = pruning.leftovers(shm)
    with owner.OwnerLock.acquire("x", owner.OwnerInfo("vllm"), root=shm):
        assert [one.error for one in pruning.prune(found, root=shm)] == ["it is owned again"]
        assert (shm / "x").exists()


def test_a_prune_against_starting_engines_never_takes_an_owned_pool(shm: Path) -> None:
    stop = threading.Event()

    def prune() -> None:
        while not stop.is_set():
            pruning.prune(pruning.leftovers(shm), root=shm)

    thread = threading.Thread(target=prune)
    thread.start()
    try:
        for _ in range(60):
            lock = owner.OwnerLock.acquire("x", owner.OwnerInfo("vllm"), root=shm)
            pool.create_pool("x", GiB, root=shm)
            time.sleep(0.001)
            assert pool.read_pool("x", root=shm).limit_bytes == GiB
            lock.close(remove=False)
    finally:
        stop.set()
        thread.join()


def test_an_engine_that_takes_the_name_while_the_question_stands_keeps_its_segment(shm: Path) -> None:
    """What the question said is checked again at the removal, under the life lock of its owner file."""
    pool.create_pool("x", 1 << 30, root=shm)
    owner.OwnerLock.acquire("x", owner.OwnerInfo(engine="old"), root=shm).close(remove=False)
    asked = owner.judge(pool.read_pool("x", root=shm), root=shm).holder
    assert asked == owner.Holder("stale")
    with owner.OwnerLock.acquire("x", owner.OwnerInfo(engine="vllm"), root=shm):
        with pytest.raises(Refused, match="belongs to a running engine"):
            owner.remove_pool("x", asked, root=shm)
        with pytest.raises(Refused, match="belongs to a running engine"):
            owner.change_limit("x", 1 << 20, by="t", holder=asked, root=shm)
        assert pool.read_pool("x", root=shm).limit_bytes == 1 << 30
        now = owner.judge(pool.read_pool("x", root=shm), root=shm).holder
        owner.remove_pool("x", now, root=shm)
        assert (shm / "x.kvtools").exists(), "the file is its owner's while it lives"
