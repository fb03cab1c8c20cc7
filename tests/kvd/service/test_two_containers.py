"""Daemon, engine and reader as in three containers that share a socket and /dev/shm, and nothing else.

Each has namespaces of its own for processes and mounts (`unshare`), engine and reader are other users, none sees another's
pids, and the folder with the socket is all they see of the daemon's. What must hold all the same: bytes travel through the
mapping, readers cannot write, limits reach the engine's pool, a dead engine is noticed and a live one never taken for dead,
and the memory that values lie in is the daemon's, not that of whoever wrote first.
"""

import ast
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemon import Daemon, MakeDaemon
from tests.support.processes import SHARED_MEMORY, run_cli, wait_until

pytestmark = [pytest.mark.real("kvd"), pytest.mark.real("segments")]

ROOT = Path(__file__).resolve().parents[3]
MIB = 1 << 20
K, V = b"k" * 32, bytes(range(256)) * 4096
ENGINE, READER, STRANGER = 65534, 65533, 65532
UNSHARE = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]

INSIDE = """
import ctypes, mmap, os, sys, time
from pathlib import Path
import numpy as np
import kvd.commands, kvd.status, kvd.service.stats, kvd.wire.client, kvd.wire.mapping, kvd.wire.leases, kvd.store.identity
from kvd.wire import protocol as p
from kvd import Client
from kvtools.segments import owner, pool, stats
from kvtools.segments.stats import find_stats, read_stats
from tests.kvd.wire.raw import Raw
where, hidden, uid = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
libc = ctypes.CDLL(None, use_errno=True)
def mount(what, place, kind, flags):
    if libc.mount(what.encode(), place.encode(), kind.encode(), flags, None):
        raise OSError(ctypes.get_errno(), "mount")
# The socket's folder is all that this container is given of the daemon's: it is elsewhere here, and the rest is hidden.
mount("tmpfs", "/mnt", "tmpfs", 0)
os.mkdir("/mnt/kvd")
mount(str(where), "/mnt/kvd", "", 4096)
mount("tmpfs", hidden, "tmpfs", 0)
os.setgroups([]); os.setgid(uid); os.setuid(uid)
SOCKET = Path("/mnt/kvd/kvd.sock")
print("ready", flush=True)
def tried(work):
    try:
        return work()
    except Exception as error:
        return type(error).__name__
for line in sys.stdin:
    text = line.strip()
    try:
        code = compile(text, "<order>", "eval")
    except SyntaxError:
        exec(compile(text, "<order>", "exec"), globals())
        print(None, flush=True)
    else:
        print(repr(eval(code, globals())), flush=True)
"""


class Container:
    """A process in namespaces of its own, as `uid`, that evaluates what it is told, a line each."""

    def __init__(self, socket_folder: Path, hidden: Path, uid: int) -> None:
        self.process = subprocess.Popen(
            [*UNSHARE, sys.executable, "-c", INSIDE, str(socket_folder), str(hidden), str(uid)],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'daemon'}"},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def __call__(self, order: str) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(order + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, f"the container ended on: {order}"
        return ast.literal_eval(answer)

    @property
    def pid(self) -> int:
        """Of what runs inside, as the host sees it."""
        return inner(self.process.pid)

    def kill(self) -> None:
        """As a container runtime does: all of it, at once."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(20)
            for stream in (self.process.stdin, self.process.stdout):
                if stream is not None:
                    stream.close()


def inner(pid: int) -> int:
    """The one child of that process."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


@pytest.fixture(scope="module")
def daemon(kvd_daemon_module: MakeDaemon) -> Iterator[Daemon]:
    """In a container of its own; its socket lies in a folder that is shared, its tier does not."""
    if os.geteuid() != 0 or subprocess.run([*UNSHARE, "true"], capture_output=True).returncode:
        pytest.skip("needs root that may make namespaces")
    words = ["--socket-mode", "0666"]
    for uid in (ENGINE, READER):
        words += ["--allow-uid", str(uid)]
    made = kvd_daemon_module(*words, max_bytes="64MiB", tier="128MiB", start=False)
    made.folder.chmod(0o755)
    shared = made.folder / "shared"
    shared.mkdir(mode=0o755)
    made.socket = shared / "kvd.sock"
    made.words[made.words.index("--socket") + 1] = str(made.socket)
    made.launcher = UNSHARE
    yield made.start()
    made.kill9()  # the launcher; the daemon is its namespace's first process, and goes with it
    wait_until(lambda: not made.process, what="the daemon to be gone")


@pytest.fixture
def container(daemon: Daemon) -> Iterator[Callable[[int], Container]]:
    made: list[Container] = []

    def make(uid: int) -> Container:
        made.append(Container(daemon.socket.parent, daemon.folder, uid))
        return made[-1]

    yield make
    for one in made:
        one.kill()


def stats(daemon: Daemon) -> dict[str, Any]:
    with daemon.client() as client:
        return client.stats()


def test_they_are_apart(daemon: Daemon, container: Callable[[int], Container]) -> None:
    """Otherwise the tests below say nothing."""
    engine, reader = container(ENGINE), container(READER)
    pids = [os.stat(f"/proc/{pid}/ns/pid").st_ino for pid in (os.getpid(), inner(daemon.pid), engine.pid, reader.pid)]
    mounts = [os.stat(f"/proc/{pid}/ns/mnt").st_ino for pid in (os.getpid(), inner(daemon.pid), engine.pid, reader.pid)]
    assert len(set(pids)) == len(set(mounts)) == 4
    assert engine("os.getpid(), os.getuid()") == (1, ENGINE)
    assert engine("os.listdir('/proc')").count(str(inner(daemon.pid))) == 0
    assert engine(f"os.path.exists({str(daemon.tier)!r})") is False
    assert engine(f"os.path.exists({str(daemon.socket)!r})") is False


def test_bytes_travel_through_the_mapping(daemon: Daemon, container: Callable[[int], Container]) -> None:
    engine, reader = container(ENGINE), container(READER)
    engine("client = Client(SOCKET)")
    engine("lease = client.write([1 << 20])")
    engine("np.frombuffer(lease.views[0], np.uint8)[:] = np.tile(np.arange(256, dtype=np.uint8), 4096)")
    assert engine("[bool(r) for r in lease.commit([b'k' * 32])]") == [True]
    with daemon.client() as client:
        assert client.get(K) == V
    reader("client = Client(SOCKET)")
    reader("lease = client.read([b'k' * 32])")
    assert reader("bytes(lease.views[0]) == bytes(range(256)) * 4096") is True
    assert reader("lease.views[0].readonly, len(client.get(b'k' * 32))") == (True, MIB)
    # Neither its mapping nor its descriptor can be turned into one that writes.
    reader("raw = Raw(SOCKET, p.Hello(p.VERSION, write=False))")
    assert reader("tried(lambda: mmap.mmap(raw.fds[0], 4096))") == "PermissionError"
    assert reader("tried(lambda: os.open(f'/proc/self/fd/{raw.fds[0]}', os.O_RDWR))") == "PermissionError"
    assert reader("tried(lambda: os.ftruncate(raw.fds[0], 1))") in ("PermissionError", "OSError")


def test_who_is_not_allowed_is_refused_by_the_kernels_word(daemon: Daemon, container: Callable[[int], Container]) -> None:
    before = stats(daemon)["refused_peers_total"]
    stranger = container(STRANGER)
    assert stranger("tried(lambda: Client(SOCKET).get(b'k' * 32))") in ("Unavailable", "Disconnected")
    assert stats(daemon)["refused_peers_total"] > before


def test_a_dead_engines_extents_and_leases_come_back(daemon: Daemon, container: Callable[[int], Container]) -> None:
    """Its pid says nothing to the daemon (0: of a namespace it cannot see); the kernel's pidfd does."""
    before = stats(daemon)
    engine, witness = container(ENGINE), container(ENGINE)
    engine("client = Client(SOCKET, timeout_s=20)")
    engine("client.put(b'q' * 32, bytes(100_000)); held = client.read([b'q' * 32]); lent = client.write([1 << 20] * 8)")
    witness("client = Client(SOCKET); lent = client.write([1 << 20])")
    now = stats(daemon)
    assert now["leases_active"] == before["leases_active"] + 1
    assert now["arena_bytes_used"] >= before["arena_bytes_used"] + 9 * MIB
    engine.kill()
    wait_until(lambda: stats(daemon)["leases_active"] == before["leases_active"], what="its read lease to end")
    wait_until(lambda: stats(daemon)["quarantine_bytes"] == 0, what="its extents to be free")
    # What a living one holds stays its own, also when its connection goes: it may still be copying.
    witness("client.connect()._socket.shutdown(2)")
    wait_until(lambda: stats(daemon)["quarantine_bytes"] >= MIB, what="the living one's extent to be kept apart")
    assert witness("os.getpid()") == 1
    assert stats(daemon)["quarantine_bytes"] >= MIB
    witness.kill()
    wait_until(lambda: stats(daemon)["quarantine_bytes"] == 0, what="that to be free too")


def test_limits_liveness_and_prune_over_shared_memory(
    daemon: Daemon, container: Callable[[int], Container], shm_name: Callable[[], str]
) -> None:
    name = shm_name()
    engine, reader = container(ENGINE), container(READER)
    engine(f"lock = owner.OwnerLock.acquire({name!r}, owner.OwnerInfo('vllm', start_capacity_bytes=1 << 30))")
    engine(f"made = pool.create_pool({name!r}, 1 << 30, used_bytes=5 << 20)")
    # Alive, wherever one looks from, though the recorded pid means nothing there.
    for answer in (reader(f"owner.read_owner({name!r}).alive"), engine(f"owner.read_owner({name!r}).alive")):
        assert answer is True
    (row,) = run_cli("kvctl", "list", name, "--json").json()["segments"]
    assert row["used_bytes"] == 5 * MIB
    assert run_cli("kvctl", "limit", name, "512M").rc == 0
    assert engine(f"pool.read_pool({name!r}).limit_bytes") == 512 * MIB
    assert reader(f"tried(lambda: pool.write_limit({name!r}, 1 << 20))") == "Denied", "another user's segment is not ours"
    run_cli("kvctl", "prune", "--yes")
    assert (SHARED_MEMORY / name).exists()
    assert daemon.segment.exists(), "the daemon lives: its numbers stay"
    engine.kill()
    wait_until(lambda: reader(f"owner.read_owner({name!r}).alive") is False, what="its death to be seen from the other container")
    assert name in run_cli("kvctl", "prune", "--yes").stdout
    assert not (SHARED_MEMORY / name).exists()


def test_the_daemons_numbers_are_found_from_another_mount_namespace(daemon: Daemon, container: Callable[[int], Container]) -> None:
    """The segment is named after the socket's path, which is another one there: the daemon says its instance."""
    reader = container(READER)
    assert reader("[read_stats(path.name).alive for path in find_stats(kind='kvd')].count(True) >= 1") is True
    assert reader("kvd.commands._read(kvd.commands._reader(SOCKET), SOCKET).instance") == daemon.segment.name.removeprefix(
        "kvtools.kvd."
    )


def test_memory_is_the_daemons(daemon: Daemon, container: Callable[[int], Container]) -> None:
    """Pages are there before they are lent: whoever writes to them first is not charged. Measured in control groups where the
    host lets one be made for the engine; the pages themselves are looked at everywhere."""
    engine = container(ENGINE)
    engine("client = Client(SOCKET); client.clear()")
    fd = next(link for link in Path(f"/proc/{inner(daemon.pid)}/fd").iterdir() if "memfd:kvd-arena" in os.readlink(link))
    engine("lease = client.write([8 << 20] * 4)")
    there = os.stat(fd).st_blocks * 512
    assert there >= 32 * MIB, "what is lent has its pages"
    group = Group.make(engine.pid)
    try:
        before = group.usage() if group else 0
        engine("[view.__setitem__(slice(None), bytes(8 << 20)) for view in lease.views] and None")
        assert os.stat(fd).st_blocks * 512 == there, "writing took no page that was not there"
        if group:
            # What the engine needed itself, such as the bytes that it copied from, and not the 32 MiB it wrote.
            assert group.usage() - before < 16 * MIB
    finally:
        engine.kill()
        if group:
            group.remove()


class Group:
    """A control group with a memory account of its own."""

    def __init__(self, folder: Path, account: str) -> None:
        self.folder, self.account = folder, account

    @classmethod
    def make(cls, pid: int) -> "Group | None":
        """One with that process in it; None where this host lets nobody make one."""
        for root, account in (("/sys/fs/cgroup/memory", "memory.usage_in_bytes"), ("/sys/fs/cgroup", "memory.current")):
            folder = Path(root) / f"kvt-{os.getpid()}"
            try:
                folder.mkdir()
                (folder / account).read_text()
                (folder / "cgroup.procs").write_text(str(pid))
            except OSError:
                if folder.exists():
                    folder.rmdir()
                continue
            return cls(folder, account)
        return None

    def usage(self) -> int:
        return int((self.folder / self.account).read_text())

    def remove(self) -> None:
        wait_until(lambda: not (self.folder / "cgroup.procs").read_text(), what="the group to be empty")
        self.folder.rmdir()
