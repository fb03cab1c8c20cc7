"""Pools in processes of their own, and kvctl beside them: limits that hold, measured by the kernel and not by our counters."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvtools.elastic.figures import Figures
from kvtools.elastic.pool import Pool
from kvtools.elastic.settings import read_settings
from kvtools.elastic.tracker import MemInfoTracker
from kvtools.segments import owner, pool
from kvtools.segments.stats import instance_of_pool, read_stats, stats_name
from tests.kvtools.elastic.conftest import Real
from tests.support.processes import SHARED_MEMORY, Ran, freeze, wait_until

MIB = 1 << 20
Cli = Callable[..., Ran]
Name = Callable[[], str]
PAGES = {"KVTOOLS_PAGE_SIZE": "512K", "KVTOOLS_MIN_RESERVED_PAGES": "2", "KVTOOLS_MAX_RESERVED_PAGES": "4"}
"""Pages of 1 MiB in both layers: 8 blocks of 128 KiB."""


class Process:
    """An engine-like process with pools."""

    def __init__(self, *names: str, env: Mapping[str, str] = PAGES, wait: bool = True, before: Sequence[str] = ()) -> None:
        self.names = names
        self._run = subprocess.Popen(
            [*before, sys.executable, "-m", "tests.kvtools.elastic.pool_main", str(SHARED_MEMORY), *names],
            env={**os.environ, **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.pid = self._run.pid
        self.up = wait and self.wait()

    def wait(self) -> bool:
        """Until it is up; False where it ended instead."""
        assert self._run.stdout is not None
        self.up = self._run.stdout.readline() == "up\n"
        return self.up

    def freeze(self) -> None:
        freeze(self.pid)

    def thaw(self) -> None:
        self._run.send_signal(signal.SIGCONT)

    def ask(self, *words: Any) -> Any:
        assert self._run.stdin is not None
        assert self._run.stdout is not None
        self._run.stdin.write(json.dumps(words) + "\n")
        self._run.stdin.flush()
        return json.loads(self._run.stdout.readline())

    def physical(self) -> int:
        """Bytes the kernel holds for this process's pools: the blocks of their memory files."""
        found = 0
        for link in Path(f"/proc/{self.pid}/fd").iterdir():
            if "kvtools-elastic" in os.readlink(link):
                found += link.stat().st_blocks * 512
        return found

    def end(self, number: int | None = None) -> str:
        """Close it well, or by a signal; what it wrote to stderr."""
        if number is None:
            assert self._run.stdin is not None
            if self._run.poll() is None:
                self._run.stdin.write('["close"]\n')
        else:
            self._run.send_signal(number)
        _, text = self._run.communicate(timeout=20)
        return text


Start = Callable[..., Process]


@pytest.fixture
def start(shm_name: Name) -> Iterator[Start]:
    made: list[Process] = []

    def begin(*names: str, env: Mapping[str, str] | None = None, **more: Any) -> Process:
        made.append(Process(*names, env={**PAGES, **(env or {})}, **more))
        return made[-1]

    yield begin
    for one in made:
        if one._run.poll() is None:
            one.end()
        for name in one.names:
            plain = name.partition(":")[0]
            (SHARED_MEMORY / stats_name("pool", instance_of_pool(plain))).unlink(missing_ok=True)


def figures(name: str) -> Any:
    return read_stats(stats_name("pool", instance_of_pool(name)))


@pytest.mark.real("segments")
def test_an_idle_pool_gives_memory_back_at_once(start: Start, shm_name: Name, cli: Cli) -> None:
    name = shm_name()
    engine = start(name)
    assert engine.ask("alloc", name, 400)
    assert engine.physical() == 50 * MIB
    assert engine.ask("free", name, 392) == 8
    wait_until(lambda: pool.read_pool(name).used_bytes == MIB, what="the use to be told")
    ran = cli("kvctl", "limit", name, "2M", "--wait", "--yes")
    assert (ran.rc, ran.stdout) == (0, f"{name}: limit 64 MiB -> 2 MiB (applied)\n"), ran.stderr
    assert engine.physical() <= 2 * MIB
    reading = pool.read_pool(name)
    assert (reading.used_bytes, reading.limit_bytes) == (MIB, 2 * MIB)
    assert reading.mapped_bytes <= 2 * MIB
    assert engine.ask("read", name), "blocks in use kept their bytes"


@pytest.mark.real("segments")
def test_a_limit_below_use_says_so_and_converges(start: Start, shm_name: Name, cli: Cli) -> None:
    name = shm_name()
    engine = start(name)
    assert engine.ask("alloc", name, 160)
    ran = cli("kvctl", "limit", name, "8M", "--wait", "--timeout", "0.5", "--yes")
    assert ran.rc == 6
    assert f"{12 * MIB} B in use above it" in ran.stderr
    entry = owner.read_owner(name)
    assert entry is not None
    assert entry.last_limit is not None
    assert (entry.last_limit.state, entry.last_limit.effective_bytes) == ("deferred", 8 * MIB)
    assert not engine.ask("alloc", name, 1), "nothing new above the limit"
    waiting = subprocess.Popen(
        [sys.executable, "-m", "kvtools", "ctl", "limit", name, "8M", "--wait", "--yes"], stdout=subprocess.PIPE, text=True
    )
    engine.ask("free", name, 60)
    engine.ask("free", name, 50)
    assert waiting.communicate(timeout=30)[0].endswith("(applied)\n")
    assert waiting.returncode == 0
    assert engine.physical() <= 8 * MIB
    assert engine.ask("read", name)
    assert engine.ask("alloc", name, 8), "what the limit leaves is used"
    ran = cli("kvctl", "restore", name, "--wait", "--yes")
    assert ran.rc == 0, ran.stderr
    assert engine.ask("alloc", name, 400), "it grows again"


@pytest.mark.real("segments")
def test_operators_who_race_end_with_the_limit_that_holds(start: Start, shm_name: Name) -> None:
    name = shm_name()
    engine = start(name)
    assert engine.ask("alloc", name, 160)
    engine.ask("free", name, 152)
    words = [sys.executable, "-m", "kvtools", "ctl", "limit", name]
    racing = [
        subprocess.Popen([*words, f"{size}M", "--wait", "--yes"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for size in (3, 5, 7, 9)
    ]
    ended = [(*one.communicate(timeout=60), one.returncode) for one in racing]
    for out, err, rc in ended:
        lost = "nothing was written" in err or "somebody set another limit meanwhile" in err
        assert (rc, lost) in ((0, False), (1, True)), err
        assert out.endswith("(applied)\n") == (rc == 0)
    assert any(rc == 0 for _, _, rc in ended)
    last = pool.read_pool(name).limit_bytes
    entry = wait_until(lambda: (o := owner.read_owner(name)) and o.last_limit and o.last_limit.state == "applied" and o.last_limit)
    assert (entry.limit_bytes, entry.effective_bytes) == (last, last), "the history ends with the one that is in force"
    while engine.ask("alloc", name, 1):
        pass
    assert engine.physical() <= last
    assert engine.ask("read", name)


@pytest.mark.real("segments")
def test_the_same_limit_once_more_is_answered(start: Start, shm_name: Name, cli: Cli) -> None:
    name = shm_name()
    start(name)
    for _ in range(2):
        ran = cli("kvctl", "limit", name, "16M", "--wait", "--timeout", "5", "--yes")
        assert ran.rc == 0, ran.stderr


@pytest.mark.real("segments")
def test_a_limit_above_the_reservation_is_lowered_and_says_so(start: Start, shm_name: Name) -> None:
    name = shm_name()
    start(name)
    owner.change_limit(name, 1 << 40, by="a tool that does not know better")
    entry = wait_until(lambda: (o := owner.read_owner(name)) and o.limits and o.limits[-1].state == "applied" and o.limits[-1])
    assert entry.effective_bytes == 64 * MIB
    assert entry.reason == "lowered to the reservation: more cannot be met"


@pytest.mark.real("segments")
def test_several_pools_a_process_and_several_processes(start: Start, shm_name: Name, cli: Cli) -> None:
    first, second, third = shm_name(), shm_name(), shm_name()
    one, other = start(first, f"{second}:{32 * MIB}"), start(third)
    for engine, name in ((one, first), (one, second), (other, third)):
        assert engine.ask("alloc", name, 160)
    engine_bytes = one.physical()
    assert engine_bytes == 40 * MIB
    assert cli("kvctl", "limit", second, "4M", "--yes").rc == 0
    one.ask("free", second, 140)
    wait_until(lambda: one.physical() <= 24 * MIB, what="pool 2 of process 1 to shrink")
    assert other.physical() == 20 * MIB
    assert all(engine.ask("read", name) for engine, name in ((one, first), (one, second), (other, third)))
    listed = {row["ipc"]: row for row in cli("kvctl", "list", first, second, third, "--json").json()["segments"]}
    assert {listed[name]["owner_pid"] for name in (first, second)} == {one.pid}
    assert listed[third]["owner_pid"] == other.pid


@pytest.mark.real("segments")
def test_fragmentation_is_shown(start: Start, shm_name: Name, cli: Cli) -> None:
    name = shm_name()
    engine = start(name, env={"KVTOOLS_PREALLOC": "0", "KVTOOLS_MIN_RESERVED_PAGES": "0", "KVTOOLS_MAX_RESERVED_PAGES": "0"})
    engine.ask("alloc", name, 20)
    wait_until(lambda: figures(name).get("blocks_used") == 20, what="the figures")
    assert figures(name).get("fragmentation_bytes") == 4 * 128 << 10
    ran = cli("kvctl", "show", name)
    assert "512 KiB (524288 B) mapped in pages in use, and unused, 16.7% of what is mapped" in ran.stdout
    assert "20 in use, 0 cached (0 B), 128 KiB each" in ran.stdout
    assert cli("kvctl", "show", name, "--json").json()["pool"]["fragmentation_bytes"] == 4 * 128 << 10


@pytest.mark.real("segments")
def test_a_device_without_room_is_shown(start: Start, shm_name: Name, cli: Cli) -> None:
    name = shm_name()
    engine = start(name, env={"KVTOOLS_MIN_FREE": "1000T", "KVTOOLS_PREALLOC": "0"})
    assert not engine.ask("alloc", name, 8)
    wait_until(lambda: figures(name).get("map_failures_total") == 1, what="the figures")
    assert "pages failed to be mapped, so far 1: its engine's log" in cli("kvctl", "show", name).stdout
    assert engine.physical() == 0


@pytest.mark.real("segments")
def test_settings_decide_the_limit_to_start_with_and_what_is_mapped_ahead(start: Start, shm_name: Name) -> None:
    name = shm_name()
    start(name, env={"KVTOOLS_LIMIT": "20M", "KVTOOLS_MIN_RESERVED_PAGES": "3", "KVTOOLS_MAX_RESERVED_PAGES": "6"})
    assert pool.read_pool(name).limit_bytes == 20 * MIB
    wait_until(lambda: pool.read_pool(name).prealloc_bytes == 3 * MIB, what="three pages ahead")


@pytest.mark.real("segments")
def test_an_idle_pool_may_let_its_reserve_go(start: Start, shm_name: Name) -> None:
    name = shm_name()
    engine = start(name, env={"KVTOOLS_IDLE_RELEASE": "200ms"})
    engine.ask("alloc", name, 8)
    engine.ask("free", name, 8)
    wait_until(lambda: pool.read_pool(name).mapped_bytes == 0, what="the release")


@pytest.mark.real("segments")
def test_a_segment_deleted_under_its_pool_is_made_again(start: Start, shm_name: Name, cli: Cli) -> None:
    name = shm_name()
    engine = start(name)
    engine.ask("alloc", name, 16)
    assert cli("kvctl", "limit", name, "32M", "--wait", "--yes").rc == 0
    assert cli("kvctl", "delete", name, "--confirm", name).rc == 0
    again = wait_until(lambda: (SHARED_MEMORY / name).exists() and pool.read_pool(name), what="the new segment")
    assert again.limit_bytes == 32 * MIB
    assert cli("kvctl", "limit", name, "16M", "--wait", "--yes").rc == 0
    (SHARED_MEMORY / f"{name}.kvtools").unlink()
    (SHARED_MEMORY / name).unlink()
    wait_until(lambda: (o := owner.read_owner(name)) and o.alive and o.pid == engine.pid, what="the owner to come back")
    assert cli("kvctl", "limit", name, "8M", "--wait", "--yes").rc == 0


@pytest.mark.real("segments")
def test_a_stuck_lock_in_shared_memory_holds_no_pool_up(start: Start, shm_name: Name) -> None:
    import fcntl

    name = shm_name()
    engine = start(name)
    with (SHARED_MEMORY / name).open("r+b") as segment, (SHARED_MEMORY / f"{name}.kvtools").open("r+b") as sidecar:
        fcntl.flock(segment, fcntl.LOCK_EX)
        fcntl.flock(sidecar, fcntl.LOCK_EX)
        begun = time.monotonic()
        for _ in range(50):
            assert engine.ask("alloc", name, 8)
            engine.ask("free", name, 8)
        assert time.monotonic() - begun < 5
    wait_until(lambda: pool.write_limit(name, 4 * MIB), what="the lock to be free")
    wait_until(lambda: (o := owner.read_owner(name)) and o.limits and o.limits[-1].state == "applied", what="the answer")


@pytest.mark.real("segments")
def test_two_processes_cannot_have_one_name(start: Start, shm_name: Name) -> None:
    name = shm_name()
    first = start(name)
    second = start(name)
    assert not second.up
    assert f"segment {name} is owned by a running engine (test, pid {first.pid})" in second.end()
    assert first.ask("alloc", name, 8)
    assert owner.read_owner(name) is not None


@pytest.mark.real("segments")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGABRT])
def test_what_a_killed_pool_leaves_is_provably_stale(start: Start, shm_name: Name, cli: Cli, number: int) -> None:
    name = shm_name()
    engine = start(name)
    engine.ask("alloc", name, 16)
    engine.end(number)
    ran = cli("kvctl", "list", name, "--json").json()["segments"][0]
    assert ran["state"] == "stale"
    assert cli("kvctl", "prune", "--yes").rc == 0
    assert not [entry for entry in os.listdir(SHARED_MEMORY) if name in entry]


@pytest.mark.real("segments")
def test_what_a_dead_engine_was_asked_is_over_when_the_next_one_starts(start: Start, shm_name: Name, cli: Cli) -> None:
    name = shm_name()
    start(name).end(signal.SIGKILL)
    assert cli("kvctl", "limit", name, "8M").rc == 0
    engine = start(name)
    assert pool.read_pool(name).limit_bytes == 64 * MIB
    said = owner.read_owner(name)
    assert said is not None
    assert [(one.limit_bytes, one.state) for one in said.limits] == [(8 * MIB, "pending"), (64 * MIB, "applied")]
    assert "64 MiB by its engine, at its start, applied" in cli("kvctl", "show", name).stdout
    engine.end()
    fresh = start(name)
    said = owner.read_owner(name)
    assert said is not None
    assert (said.pid, said.limits) == (fresh.pid, ()), "a file of its own begins without a history"


@pytest.mark.real("segments")
def test_a_pool_that_ends_well_leaves_nothing(start: Start, shm_name: Name) -> None:
    name = shm_name()
    engine = start(name)
    engine.end()
    assert not [entry for entry in os.listdir(SHARED_MEMORY) if name in entry]


@pytest.mark.real("segments")
def test_an_owner_file_deleted_alone_is_made_again(start: Start, shm_name: Name, cli: Cli) -> None:
    name = shm_name()
    engine = start(name)
    (SHARED_MEMORY / f"{name}.kvtools").unlink()
    wait_until(lambda: (o := owner.read_owner(name)) and o.alive and o.pid == engine.pid, what="the owner to come back")
    ran = cli("kvctl", "limit", name, "8M", "--wait", "--yes")
    assert ran.rc == 0, ran.stderr


@pytest.mark.real("segments")
def test_a_name_that_another_engine_took_since_is_left_to_it(start: Start, shm_name: Name) -> None:
    name = shm_name()
    first = start(name)
    first.ask("alloc", name, 16)
    first.freeze()
    (SHARED_MEMORY / f"{name}.kvtools").unlink()
    second = start(name)
    assert second.up
    second.ask("alloc", name, 80)
    first.thaw()
    first.ask("alloc", name, 200)
    assert "is owned by a running engine" in first.end(), "said once, and nothing is written or removed"
    assert owner.read_owner(name) is not None
    wait_until(lambda: pool.read_pool(name).used_bytes == 10 * MIB, what="the second one's numbers")
    pool.write_limit(name, 4 * MIB)
    wait_until(lambda: second.ask("alloc", name, 1) is False, what="the second one to take limits up")


@pytest.mark.real("segments")
def test_of_many_processes_that_want_one_name_at_once_one_gets_it(start: Start, shm_name: Name, cli: Cli) -> None:
    name = shm_name()
    racing = [start(name, wait=False) for _ in range(4)]
    (winner,) = [one for one in racing if one.wait()]
    assert winner.ask("alloc", name, 80)
    for loser in racing:
        if loser is not winner:
            text = loser.end()
            assert f"segment {name} is owned by a running engine (test, pid {winner.pid})" in text
    wait_until(lambda: pool.read_pool(name).used_bytes == 10 * MIB, what="the winner's numbers, and nobody else's")
    ran = cli("kvctl", "limit", name, "32M", "--wait", "--yes")
    assert ran.rc == 0, ran.stderr
    assert winner.ask("read", name)


def small_shm(pages: int) -> list[str]:
    """What runs a command, under its own pid, with a /dev/shm of its own that has room for `pages` pages."""
    fill = f'mount -t tmpfs -o size=64k none /dev/shm && head -c {(16 - pages) * 4096} /dev/zero > /dev/shm/filler && exec "$@"'
    return ["unshare", "-rm", "sh", "-c", fill, "sh"]


@pytest.mark.parametrize(("pages", "what"), [(0, "owner file pool.kvtools"), (1, "segment pool")])
def test_without_room_in_shared_memory_a_pool_does_not_start(start: Start, pages: int, what: str) -> None:
    engine = start("pool", before=small_shm(pages))
    assert not engine.up
    assert f"Unreachable: no room in /dev/shm for {what}" in engine.end()


@pytest.mark.real("segments")
def test_a_full_shared_memory_takes_nothing_from_a_running_pool(start: Start, cli: Cli) -> None:
    engine = start("pool", before=small_shm(2))
    assert engine.up, "there is no room for its numbers, which it can do without"
    shm = Path(f"/proc/{engine.pid}/root/dev/shm")
    assert {path.name for path in shm.iterdir()} == {"filler", "pool", "pool.kvtools"}
    assert engine.ask("alloc", "pool", 100)
    for size in range(60, 41, -1):  # more than its history keeps: every byte of its page is written
        owner.change_limit("pool", size * MIB, by="a test with a long name, to fill the page" * 5, root=shm)
    ran = cli("kvctl", "--shm", shm, "limit", "pool", "41M", "--wait", "--yes")
    assert ran.rc == 0, ran.stderr
    assert engine.ask("alloc", "pool", 100)
    assert engine.ask("read", "pool")
    assert "pool" in cli("kvctl", "--shm", shm, "show", "pool").stdout
    ran = cli("kvctl", "--shm", shm, "limit", "absent", "1G")
    assert (ran.rc, [path.name for path in shm.glob("absent*")]) == (3, [])
    for name in ("pool", "pool.kvtools"):
        (shm / name).unlink()  # frees nothing: the engine has them open
    assert engine.ask("free", "pool", 150) == 50
    assert cli("kvctl", "--shm", shm, "list", "pool").rc == 3, "nothing can be made again yet"
    (shm / "filler").unlink()
    wait_until(lambda: (o := owner.read_owner("pool", root=shm)) and o.alive and (shm / "pool").exists(), what="the files")
    wait_until(lambda: pool.read_pool("pool", root=shm).used_bytes == 7 * MIB, what="the numbers")
    assert pool.read_pool("pool", root=shm).limit_bytes == 41 * MIB
    assert engine.ask("read", "pool")
    assert engine.end().count("no room in /dev/shm for owner file") in (1, 2), "said once a minute"


@pytest.mark.real("segments")
def test_a_pool_that_falls_asleep_says_so_at_once(
    shm_name: Name, real: Callable[..., Real], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers of half a second ago beside a segment that says "nothing is mapped" would contradict it."""
    name, one = shm_name(), real()
    info = owner.OwnerInfo("test", start_capacity_bytes=one.geometry.capacity_bytes, page_bytes=one.geometry.page_bytes)
    following = Pool(one.manager, MemInfoTracker(name, info, memory=one.memory), read_settings({}), figures=Figures(name))
    try:
        following.look()
        assert [figures(name).get(what) for what in ("asleep", "blocks_used")] == [0, 0]
        monkeypatch.setattr("kvtools.elastic.pool.PUBLISH_S", 3600.0)
        assert one.manager.alloc(3) is not None
        following.look()
        assert figures(name).get("blocks_used") == 0, "numbers have their time"
        following.asleep = True
        following.look()
        assert [figures(name).get(what) for what in ("asleep", "blocks_used", "mapped_bytes")] == [1, 3, 0]
    finally:
        following.close()


@pytest.mark.real("segments")
def test_a_forked_child_that_ends_takes_nothing_from_its_parent(shm_name: Name, real: Callable[..., Real]) -> None:
    """What an engine registers for its end, a child of a bare fork runs too."""
    name, one = shm_name(), real()
    info = owner.OwnerInfo("test", start_capacity_bytes=one.geometry.capacity_bytes, page_bytes=one.geometry.page_bytes)
    tracker = MemInfoTracker(name, info, memory=one.memory)
    following = Pool(one.manager, tracker, read_settings({}), figures=Figures(name))
    try:
        following.start()
        files = {entry for entry in os.listdir(SHARED_MEMORY) if name in entry}
        assert len(files) == 3
        child = os.fork()
        if not child:
            try:
                following.close()
            finally:
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert {entry for entry in os.listdir(SHARED_MEMORY) if name in entry} == files
        assert figures(name).alive
    finally:
        following.close()
    assert not [entry for entry in os.listdir(SHARED_MEMORY) if name in entry]
