"""An engine that is killed, and one without room in shared memory: what is left, what is said of it, and what starts next."""

import contextlib
import http.client
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtools.segments import owner, pool
from kvtools.segments.stats import instance_of_pool, stats_name
from tests.kvtools.elastic.vllm.kernel import family, physical
from tests.kvtools.elastic.vllm.test_vllm_elastic import PAGES, PROMPTS, limit
from tests.support.api_server import ApiServer
from tests.support.engine import Engine, EngineError, model
from tests.support.processes import SHARED_MEMORY, Ran, wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.real("vllm"), pytest.mark.real("segments"), pytest.mark.timeout(400)]

Cli = Callable[..., Ran]
VLLM_PAGES = 1
"""What vLLM itself takes of a small /dev/shm: a semaphore."""


@pytest.fixture
def name(shm_name: Callable[[], str]) -> Iterator[str]:
    one = shm_name()
    yield one
    (SHARED_MEMORY / stats_name("pool", instance_of_pool(one))).unlink(missing_ok=True)


def files(name: str) -> set[str]:
    """What lies in shared memory for the pool."""
    return {entry for entry in os.listdir(SHARED_MEMORY) if name in entry}


def holders() -> set[int]:
    """Processes that keep the memory file of an elastic pool alive."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if "kvtools-elastic" in os.readlink(link):
                found.add(int(link.parts[2]))
        except OSError:
            continue
    return found


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGKILL,
        *(
            pytest.param(one, marks=pytest.mark.slow)
            for one in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS)
        ),
    ],
)
def test_an_engine_in_one_process_leaves_what_is_provably_stale(name: str, cli: Cli, number: int) -> None:
    engine = Engine(model(), transfer=None, env={**PAGES, "KVTOOLS_SEGMENT": name})
    with engine:
        alone = engine.one(PROMPTS[0])["tokens"]
        assert cli("kvctl", "limit", name, "64M", "--wait", "--yes").rc == 0
        assert sum(physical(engine.pid)) > 0
        engine.end_by(number)
    assert engine.pid not in holders(), "the kernel has its memory back"
    assert files(name) == {name, f"{name}.kvtools", stats_name("pool", instance_of_pool(name))}

    (row,) = cli("kvctl", "list", name, "--json").json()["segments"]
    assert (row["state"], row["owner_pid"]) == ("stale", engine.pid)
    shown = cli("kvctl", "show", name).stdout
    assert f"stale: nobody holds the lock on its owner file; recorded owner: pid {engine.pid} is gone" in shown
    assert "64 MiB by root, kvctl limit, applied" in shown or "kvctl limit, applied" in shown
    ran = cli("kvctl", "limit", name, "32M", "--wait", "--yes")
    assert (ran.rc, "nobody will take the limit up" in ran.stderr) == (1, True)
    stale = {one["name"] for one in cli("kvctl", "prune", "--dry-run", "--json").json()["files"]}
    assert {name, stats_name("pool", instance_of_pool(name))} <= stale

    if number == signal.SIGKILL:  # the next one needs no prune, and begins with a limit of its own
        with Engine(model(), transfer=None, env={**PAGES, "KVTOOLS_SEGMENT": name}) as again:
            assert again.one(PROMPTS[0])["tokens"] == alone
            (row,) = cli("kvctl", "list", name, "--json").json()["segments"]
            assert (row["state"], row["owner_pid"]) == ("live", again.pid)
            assert row["limit_bytes"] == row["start_capacity_bytes"]
        assert files(name) == set(), "it ended well"
        return
    cli("kvctl", "prune", "--yes")
    assert files(name) == set()


def _ask(server: ApiServer) -> None:
    """One request; that its server ends is an answer too."""
    with contextlib.suppress(OSError, AssertionError, ValueError, http.client.HTTPException):
        server.complete(PROMPTS[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("who", "number", "ends_well"),
    [
        ("server", signal.SIGTERM, True),
        ("server and a core amid a step", signal.SIGTERM, True),
        ("server", signal.SIGINT, True),
        ("server", signal.SIGKILL, False),
        ("core", signal.SIGTERM, True),
        ("core", signal.SIGKILL, False),
        ("worker", signal.SIGKILL, True),
    ],
)
def test_a_server_of_processes_is_stale_when_its_memory_is_free(
    name: str, cli: Cli, who: str, number: int, ends_well: bool
) -> None:
    server = ApiServer(model(), plugins="kvtools", env={**PAGES, "KVTOOLS_SEGMENT": name})
    try:
        server.wait()
        server.complete(PROMPTS[0])
        said = owner.read_owner(name)
        assert said is not None
        everybody = set(family(server.process.pid))
        (worker,) = everybody & holders()
        victim = {"core": said.pid, "worker": worker}.get(who, server.process.pid)
        amid = who == "server and a core amid a step"
        if amid:  # its worker does not answer, so it hears the signal later than its server would kill it
            os.kill(worker, signal.SIGSTOP)
            asking = threading.Thread(target=lambda: _ask(server), daemon=True)
            asking.start()
            time.sleep(1.0)  # nothing says that the step has begun
        os.kill(victim, number)
        if amid:
            wait_until(lambda: "send sigterm to process EngineCore" in server.text(), timeout_s=30, what="the core's signal")
            time.sleep(0.5)  # nothing says that it is waited for
            os.kill(worker, signal.SIGCONT)
            asking.join(60)
        server.process.wait(60)
        if (who, number) == ("server", signal.SIGKILL):
            # vLLM's engine goes on without its server: its memory is held, so its segment lives, and kvctl says who it is.
            (row,) = cli("kvctl", "list", name, "--json").json()["segments"]
            assert (row["state"], row["owner_pid"]) == ("live", said.pid)
            assert worker in holders()
            assert cli("kvctl", "limit", name, "8M", "--wait", "--yes").rc == 0, "it obeys even now"
            os.kill(said.pid, signal.SIGKILL)
        wait_until(lambda: not everybody & holders(), timeout_s=60, what="the memory to be free")
        wait_until(lambda: not ((o := owner.read_owner(name)) and o.alive), timeout_s=60, what="the owner to be gone")
        if ends_well:
            assert files(name) == set()
            return
        (row,) = cli("kvctl", "list", name, "--json").json()["segments"]
        assert (row["state"], row["owner_pid"]) == ("stale", said.pid)
        cli("kvctl", "prune", "--yes")
        assert files(name) == set()
    finally:
        server.stop()


@pytest.mark.parametrize(("pages", "what"), [(0, r"owner file pool\.kvtools"), (1, "segment pool")])
def test_an_engine_without_room_in_shared_memory_says_so_and_does_not_start(pages: int, what: str) -> None:
    room = str((VLLM_PAGES + pages) * 4096)
    engine = Engine(model(), transfer=None, env={**PAGES, "KVTOOLS_SEGMENT": "pool", "KVTEST_SHM_ROOM": room})
    hint = r"\(free some shared memory \(df /dev/shm\), or give the container a larger one\)"
    try:
        with pytest.raises(EngineError, match=rf"RuntimeError: kvtools: no room in /dev/shm for {what} {hint}"):
            engine.wait()
    finally:
        engine.stop()


def test_shared_memory_that_fills_up_under_an_engine_takes_nothing_from_it(cli: Cli) -> None:
    room = str((VLLM_PAGES + 2) * 4096)
    engine = Engine(model(), transfer=None, env={**PAGES, "KVTOOLS_SEGMENT": "pool", "KVTEST_SHM_ROOM": room})
    with engine:
        shm = Path(f"/proc/{engine.pid}/root/dev/shm")
        assert {path.name for path in shm.iterdir()} == {"filler", "pool", "pool.kvtools"}
        assert "kvtools: no numbers of pool pool in shared memory: no room in /dev/shm" in engine.text()
        assert os.statvfs(shm).f_bavail == 0
        alone = [engine.one(one)["tokens"] for one in PROMPTS]
        for size in [*range(20, 4, -1), 256]:  # more than the history holds: its page is full as well
            limit("pool", size << 20, root=shm)
        assert [engine.one(one)["tokens"] for one in PROMPTS] == alone
        ran = cli("kvctl", "--shm", shm, "limit", "pool", "8M", "--wait", "--yes")
        assert ran.rc == 0, ran.stderr
        assert sum(physical(engine.pid)) <= 8 << 20
        assert cli("kvctl", "--shm", shm, "show", "pool").rc == 0

        # Deleted under it, and nothing can be made anew: the limit in force stays, until there is room.
        for path in ("pool", "pool.kvtools"):
            (shm / path).unlink()  # which frees nothing: the engine has them open
        assert [engine.one(one)["tokens"] for one in PROMPTS] == alone
        assert sum(physical(engine.pid)) <= 8 << 20
        assert engine.text().count("no room in /dev/shm for owner file") in (1, 2), "said once a minute"
        (shm / "filler").unlink()
        wait_until(lambda: owner.read_owner("pool", root=shm) and (shm / "pool").exists(), what="both files to come back")
        assert pool.read_pool("pool", root=shm).limit_bytes == 8 << 20
        limit("pool", 6 << 20, root=shm)
        assert sum(physical(engine.pid)) <= 6 << 20
