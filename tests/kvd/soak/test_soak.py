"""Everything at once, for a long time: clients that die or freeze, a daemon that is stopped and killed, a disk that fills up.

Looked at, all the while and at quiet moments in between (no client left):

  no wrong byte           every client proves every value it gets
  no lost lease           a lease ends while it is held only when its daemon was ended
  nothing held for dead   leases, pinned prefixes and quarantine go back to zero; cleared, the arena is empty
  no leaked descriptor    what the daemon has open at a quiet moment is what it had at its start (the tier's files aside)
  flat memory             private memory in the second half of a long life is what it was before

`make soak` runs it for SOAK_S seconds, a third of them the storm of test_storm.py.
"""

import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.daemon import Daemon, MakeDaemon
from tests.support.processes import wait_until

pytestmark = [pytest.mark.real("kvd"), pytest.mark.timeout(0)]

ROOT = Path(__file__).resolve().parents[3]
MIB = 1 << 20
CLIENTS = 4
GROWTH = 6 * MIB
"""Private memory may differ by so much between two stretches of one life: the allocator's own ups and downs."""
MOST_PRIVATE = 256 * MIB
MOST_THREADS = 40


class Crowd:
    """Client processes that are started, frozen and killed; their logs are read at the end."""

    def __init__(self, daemon: Daemon, folder: Path, chance: random.Random) -> None:
        self.daemon = daemon
        self.folder = folder
        self.chance = chance
        self.clients: list[subprocess.Popen[bytes]] = []
        self.frozen: dict[int, float] = {}
        self.started = 0
        folder.mkdir()

    def fill_up(self) -> None:
        """As many as there should be."""
        while len(self.clients) < CLIENTS:
            self.started += 1
            words = [str(self.daemon.socket), str(self.chance.getrandbits(30)), str(self.folder / f"{self.started}.log")]
            with (self.folder / f"{self.started}.err").open("wb") as errors:
                self.clients.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "tests.kvd.soak.client", *words],
                        cwd=ROOT,
                        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'daemon'}"},
                        stderr=errors,
                    )
                )

    def kill(self, client: "subprocess.Popen[bytes]") -> None:
        self.clients.remove(client)
        self.frozen.pop(client.pid, None)
        client.kill()
        assert client.wait(20) == -signal.SIGKILL, "a client ended by itself"

    def disturb(self) -> None:
        """One of them dies or freezes, or one that is frozen goes on."""
        now = time.monotonic()
        for client in list(self.clients):
            assert client.poll() is None, f"a client ended by itself: {self.errors()}"
            if now > self.frozen.get(client.pid, now + 1):
                del self.frozen[client.pid]
                client.send_signal(signal.SIGCONT)
        client = self.chance.choice(self.clients)
        if self.chance.random() < 0.5:
            self.kill(client)
        elif client.pid not in self.frozen:
            self.frozen[client.pid] = now + self.chance.uniform(0.1, 2.0)
            client.send_signal(signal.SIGSTOP)
        self.fill_up()

    def leave(self) -> None:
        """All of them die."""
        for client in list(self.clients):
            self.kill(client)

    def errors(self) -> str:
        return "".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("*.err")))

    def found(self) -> tuple[list[str], list[tuple[int, float]], Counter[str]]:
        """(wrong answers, leases lost as (daemon's pid, when), what was done) of all logs."""
        wrong, lost, done = [], [], Counter[str]()
        for path in sorted(self.folder.glob("*.log")):
            for line in path.read_text().splitlines():
                kind, _, rest = line.partition(" ")
                if kind == "wrong":
                    wrong.append(f"{path.name}: {rest}")
                elif kind == "lost" and len(rest.split()) == 2:
                    lost.append((int(rest.split()[0]), float(rest.split()[1])))
                elif kind == "did" and rest.endswith("}"):  # the last line of one that was killed may be cut
                    done.update(json.loads(rest))
        return wrong, lost, done


class Disk:
    """A small file system with the tier in it, which somebody else fills and empties."""

    def __init__(self, place: Path, chance: random.Random) -> None:
        self.tier, self.hog = place / "tier", place / "hog"
        shutil.rmtree(self.tier, ignore_errors=True)  # of a shorter soak before
        self.hog.unlink(missing_ok=True)
        self.tier.mkdir()
        self.chance = chance

    def disturb(self) -> None:
        if self.hog.exists() and self.chance.random() < 0.6:
            self.hog.unlink()
            return
        try:
            with self.hog.open("ab") as hog:
                for _ in range(self.chance.randint(4, 200)):
                    hog.write(b"h" * MIB)
                    hog.flush()
        except OSError:
            pass  # full: that is the point


def private(pid: int) -> int:
    """Private bytes of a process: the arena, which is shared, not counted."""
    return 1024 * int(re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1])  # type: ignore[index]


def threads(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


def descriptors(pid: int, tier: Path) -> Counter[str]:
    """What it has open, by kind; the tier's own files, which come and go with its regions, left out."""
    found: Counter[str] = Counter()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(entry)
        except OSError:
            continue
        if not target.startswith(str(tier)):
            # What is of one kind has many names: pipes have numbers, the stats segment is replaced by a new file.
            found["stats segment" if "kvtools.kvd." in target else re.sub(r"\[\d+\]", "", target)] += 1
    return found


class Life:
    """One daemon from start to end."""

    def __init__(self, daemon: Daemon, disk: Disk) -> None:
        self.daemon, self.disk = daemon, disk
        daemon.start(wait_s=60)
        self.pid = daemon.pid
        with daemon.client(timeout_s=20) as client:  # the event loop opens a spare descriptor with its first stream
            client.ping()
            self.open = descriptors(self.pid, disk.tier)
        self.ended = 0.0

    def quiet(self, *, clear: bool) -> None:
        """With no client left nothing is held for one, and nothing more is open than at the start."""

        def held() -> bool:
            stats = client.stats()
            names = ("leases_active", "tokens_active", "quarantine_bytes")
            return stats["connections"] == 1 and not any(stats[name] for name in names)

        self.disk.hog.unlink(missing_ok=True)  # on a full disk deletes cannot be noted: they wait for room
        with self.daemon.client(timeout_s=100) as client:
            wait_until(held, timeout_s=45, interval_s=0.1, what="nothing to be held for the dead")
            if clear:
                client.clear(all_namespaces=True)
                wait_until(lambda: client.stats()["arena_bytes_used"] == 0, timeout_s=30, what="an empty arena")
            deadline = time.monotonic() + 20
            while more := descriptors(self.pid, self.disk.tier) - self.open:
                assert time.monotonic() < deadline, f"open at a quiet moment, and not at the start: {more}"
                time.sleep(0.1)
        assert threads(self.pid) <= MOST_THREADS

    def end(self, *, kill: bool) -> None:
        self.ended = time.time()
        if kill:
            self.daemon.kill9()
        else:
            assert self.daemon.stop(timeout_s=60) == 0


@pytest.fixture
def place(kvd_daemon: MakeDaemon) -> Iterator[Path]:
    """A file system of 192 MiB in memory, where one can be mounted; else a folder, and the disk does not fill up."""
    folder = kvd_daemon(start=False).folder / "disk"
    folder.mkdir()
    mounted = (
        os.geteuid() == 0
        and not subprocess.run(["mount", "-t", "tmpfs", "-o", "size=192m", "tmpfs", str(folder)], capture_output=True).returncode
    )
    yield folder
    if mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def soak(make: MakeDaemon, place: Path, seconds: float, seed: int, say: Callable[[str], None]) -> Counter[str]:
    """Short lives for two thirds of the time, then a long one whose memory is watched."""
    chance = random.Random(seed)
    disk = Disk(place, chance)
    daemon = make("--long-path", disk.tier, "--long-bytes", "128MiB", "--drain-timeout", "2s", max_bytes="32MiB", start=False)
    crowd = Crowd(daemon, daemon.folder / "clients", chance)
    begun = time.monotonic()
    lives: list[Life] = []
    try:
        while time.monotonic() - begun < seconds * 2 / 3:
            life = Life(daemon, disk)
            lives.append(life)
            crowd.fill_up()
            disturbed(crowd, disk, chance, until=time.monotonic() + chance.uniform(1, min(20.0, seconds / 8)))
            kill = chance.random() < 0.5
            if not kill:
                crowd.leave()
                life.quiet(clear=chance.random() < 0.3)
            life.end(kill=kill)
        say(f"{len(lives)} lives, {crowd.started} clients")
        life = Life(daemon, disk)
        lives.append(life)
        levels = watched(life, crowd, disk, chance, until=time.monotonic() + seconds / 3)
        crowd.leave()
        life.quiet(clear=True)
        life.end(kill=False)
    finally:
        crowd.leave()
    flat(levels)
    wrong, lost, done = crowd.found()
    assert wrong == [], f"seed {seed}"
    over = {life.pid: life.ended for life in lives}
    assert [f"lease of {pid}" for pid, when in lost if when < over[pid]] == [], f"seed {seed}"
    assert "Traceback" not in crowd.errors(), crowd.errors()
    assert "unexpectedly" not in daemon.text(), "the daemon found a defect in itself"
    say(f"private memory {min(levels) >> 20} to {max(levels) >> 20} MiB; {dict(done)}")
    return done


def disturbed(crowd: Crowd, disk: Disk, chance: random.Random, *, until: float) -> None:
    """Trouble until then."""
    while time.monotonic() < until:
        time.sleep(chance.uniform(0.05, 0.6))
        crowd.disturb()
        if chance.random() < 0.3:
            disk.disturb()


def watched(life: Life, crowd: Crowd, disk: Disk, chance: random.Random, *, until: float) -> list[int]:
    """Trouble until then; the daemon's private memory about once a second."""
    levels = []
    crowd.fill_up()
    while time.monotonic() < until:
        disturbed(crowd, disk, chance, until=min(until, time.monotonic() + 1))
        levels.append(private(life.pid))
    return levels


def flat(levels: list[int]) -> None:
    """The last quarter of a life needs no more than the second did; the first is for filling up."""
    assert max(levels) < MOST_PRIVATE
    quarter = len(levels) // 4
    if quarter < 3:
        return
    early, late = statistics.median(levels[quarter : 2 * quarter]), statistics.median(levels[-quarter:])
    assert late - early < GROWTH, f"{early / MIB:.1f} MiB became {late / MIB:.1f} MiB: {[level >> 20 for level in levels]}"


@pytest.mark.slow
def test_a_short_soak(kvd_daemon: MakeDaemon, place: Path) -> None:
    for seconds in (4, 12, 36):  # on a machine with ten times as much to do the clients hardly start in the first of them
        done = soak(kvd_daemon, place, seconds, random.SystemRandom().randrange(1 << 30), lambda text: None)
        if min(done["read"], done["stored"], done["written"]) > 0:
            return
    raise AssertionError(f"nothing was done: {done}")


@pytest.mark.soak
def test_a_long_soak(kvd_daemon: MakeDaemon, place: Path) -> None:
    seconds = float(os.environ.get("KVTEST_SOAK_S", "600")) * 2 / 3
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"\nsoak of {seconds:.0f} s, seed {seed}", flush=True)
    done = soak(kvd_daemon, place, seconds, seed, lambda text: print(text, flush=True))
    assert min(done[what] for what in ("read", "stored", "written", "missed", "deleted", "promoted")) > 0, done
