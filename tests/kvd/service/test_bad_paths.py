"""A disk tier where there can be none, or no more: said in one line at start, or served on without it."""

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvd.service import settings
from kvtools.cli import run_words
from kvtools.config import resolve
from tests.support.daemon import Daemon, MakeDaemon
from tests.support.processes import Ran, run_cli, wait_until

pytestmark = pytest.mark.real("kvd")

K = b"k" * 32
MIB = 1 << 20


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def serve(folder: Path, *words: str | Path) -> Ran:
    """A `kvd serve` that is expected to refuse."""
    few = ("--max-bytes", "4MiB", "--long-bytes", "64MiB")  # not what a machine with little room would warn of
    run = run_cli("kvd", "serve", "--socket", folder / "kvd.sock", *few, *words)
    assert run.stdout == ""
    assert "Traceback" not in run.stderr
    assert not (folder / "kvd.sock").exists()
    return run


def plain(run: Ran, rc: int, *words: str) -> None:
    """One error line and at most one hint, which say this much."""
    lines = [line for line in run.stderr.splitlines() if " INFO " not in line]
    assert run.rc == rc, run.stderr
    assert lines[0].startswith("kvd: error: "), run.stderr
    assert len(lines) <= 2, run.stderr
    for word in words:
        assert word in run.stderr


@pytest.fixture
def folder(kvd_daemon: MakeDaemon) -> Path:
    """A short scratch folder that goes with the test."""
    return kvd_daemon(start=False).folder


@pytest.fixture
def mounted(folder: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts small file systems: `mounted("size=4m")`."""
    made: list[Path] = []

    def mount(options: str) -> Path:
        if os.geteuid() != 0:
            pytest.skip("needs root: to mount")
        path = folder / f"mnt{len(made)}"
        path.mkdir()
        run = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], capture_output=True, text=True)
        if run.returncode:
            pytest.skip(f"needs to mount: {run.stderr.strip()}")
        made.append(path)
        return path

    yield mount
    for path in made:
        subprocess.run(["umount", "-l", str(path)], check=True)


class TestAtStart:
    def test_a_file_in_its_place(self, folder: Path) -> None:
        place = folder / "tier"
        place.write_text("precious")
        plain(serve(folder, "--long-path", place), 2, str(place))
        assert place.read_text() == "precious"

    def test_a_file_in_the_way(self, folder: Path) -> None:
        (folder / "file").write_text("precious")
        plain(serve(folder, "--long-path", folder / "file" / "tier"), 2, "file/tier")

    def test_a_read_only_file_system(self, folder: Path, mounted: Callable[[str], Path]) -> None:
        place = mounted("ro,size=4m")
        run = serve(folder, "--long-path", place)
        plain(run, run.rc, str(place), "ead-only file system")
        assert run.rc in (1, 2)

    def test_a_full_file_system_is_told_as_one(self, folder: Path, mounted: Callable[[str], Path]) -> None:
        """Not a word of permissions: what to do is to make room."""
        place = mounted("size=64k")
        with contextlib.suppress(OSError), (place / "hog").open("wb") as hog:
            while True:
                hog.write(b"h" * 4096)
                hog.flush()
        run = serve(folder, "--long-path", place / "tier")
        assert run.rc in (1, 2)
        error, hint = run.stderr.splitlines()[-2:]
        assert error.startswith(f"kvd: error: cannot use {place}/tier for the disk tier: No space left")
        assert hint.startswith("hint: the file system there is full")
        assert not list(place.glob("tier/*.lock"))

    def test_a_directory_that_another_daemon_has(self, kvd_daemon: MakeDaemon, folder: Path) -> None:
        daemon = kvd_daemon(max_bytes="4MiB", tier="64MiB")
        with daemon.client() as client:
            assert client.put(K, b"x" * 100_000, wait="tier")
            before = sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in daemon.tier.iterdir())
            run = serve(folder, "--long-path", daemon.tier)
            plain(run, 1, str(daemon.tier), "in use by another kvd")
            after = sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in daemon.tier.iterdir())
            assert before == after
            client.delete([K], arena_only=True)
            assert client.get(K) == b"x" * 100_000
            assert client.put(b"l" * 32, b"y" * 100_000, wait="tier")
        daemon.restart()
        with daemon.client() as client:
            assert client.get_many([K, b"l" * 32]) == [b"x" * 100_000, b"y" * 100_000]

    def test_a_directory_that_a_dead_daemon_had(self, kvd_daemon: MakeDaemon) -> None:
        daemon = kvd_daemon(max_bytes="4MiB", tier="64MiB")
        daemon.kill9()
        daemon.start()

    def test_foreign_files_are_left_alone(self, kvd_daemon: MakeDaemon) -> None:
        daemon = kvd_daemon(max_bytes="4MiB", tier="64MiB", start=False)
        (daemon.tier / "README").write_text("precious")
        (daemon.tier / "folder").mkdir()
        daemon.start()
        with daemon.client() as client:
            client.put(K, b"x" * 100_000, wait="tier")
            client.clear(all_namespaces=True)
        assert daemon.stop() == 0
        assert (daemon.tier / "README").read_text() == "precious"
        assert (daemon.tier / "folder").is_dir()

    @pytest.mark.parametrize(
        ("words", "says"),
        [
            (["--max-bytes", "1023KiB"], "1MiB"),
            (["--max-bytes", "0"], "0"),
            (["--max-bytes", "many"], "many"),
            (["--max-bytes", "-5M"], "-5M"),
            (["--max-bytes", "900T"], "memory"),
            (["--l1-size-gb", "0"], "not a size"),
            (["--l1-size-gb", "nan"], "no number"),
            (["--l1-size-gb", "one"], "one"),
            (["--l1-size-gb", "1", "--max-bytes", "1G"], "same thing"),
            (["--long-bytes", "1G"], "--long-path"),
            (["--durability", "fsync"], "--long-path"),
            (["--long-path", "TIER", "--long-bytes", "1"], "at least 256 KiB"),
            (["--long-path", "TIER", "--long-bytes", "1,5G"], "1,5G"),
            (["--long-path", "TIER", "--durability", "always"], "none, group, fsync"),
            (["--long-path", "TIER", "--long-path", "TIER"], "twice"),
            (["--socket-mode", "999"], "999"),
            (["--socket-mode", "rw"], "rw"),
            (["--socket-group", "no-such-group"], "no-such-group"),
            (["--allow-uid", "no-such-user"], "no-such-user"),
            (["--allow-gid", "no-such-group"], "allow_gid: no such group: 'no-such-group'"),
            (["--allow-uid", "-1"], "allow_uid: no such user: '-1'"),
            (["--allow-uid", "4294967295"], "4294967295"),
            (["--socket-group", "99999999999"], "no such group: '99999999999'"),
            (["--metrics-host", "127.0.0.1"], "--metrics-port"),
            (["--metrics-host", "192.0.2.1", "--metrics-port", "1024"], "give --metrics-host an address of this host"),
            (["--eviction-policy", "fifo"], "not an eviction policy"),
            (["--eviction-policy", "LFU"], "LFU"),
            (["--drain-timeout", "soon"], "soon"),
            (["--drain-timeout", "-1s"], "-1s"),
            (["--log-level", "LOUD"], "LOUD"),
            (["--nonsense"], "--nonsense"),
            (["--max-byte", "4M"], "--max-bytes"),
            (["extra"], "extra"),
        ],
        ids=lambda value: "_".join(value).replace("--", "") if isinstance(value, list) else None,
    )
    def test_bad_values_of_every_option(
        self, folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], says: str
    ) -> None:
        """In this process, by the edge that every console script has."""
        words = [word.replace("TIER", str(folder / "tier")) for word in words]
        base = [] if words[0] in ("--max-bytes", "--l1-size-gb") else ["--max-bytes", "4MiB"]
        rc = run_words("kvd", "kvd.app:app", ["serve", "--socket", str(folder / "kvd.sock"), *base, *words])
        stdout, stderr = capsys.readouterr()
        assert rc == 2, stderr
        assert says in stderr
        assert "Traceback" not in stderr
        assert stdout == ""
        assert len(stderr.splitlines()) <= 3

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ('long_path = ["", "x"]', "long_path in FILE: not a directory: ''"),
            ("long_path = [1]", "long_path in FILE: not a directory: 1"),
            ("allow_uid = [true]", "allow_uid in FILE: neither a name nor a number: True"),
            ("allow_gid = [-1]", "allow_gid: no such group: '-1'"),
        ],
    )
    def test_what_a_list_in_a_file_cannot_hold_is_named(self, folder: Path, text: str, says: str) -> None:
        (folder / "kvd.toml").write_text(text + "\n")
        run = run_cli("kvd", "serve", "--config", folder / "kvd.toml", "--socket", folder / "kvd.sock")
        assert (run.rc, "Traceback" in run.stderr) == (2, False)
        assert says.replace("FILE", str(folder / "kvd.toml")) in run.stderr

    def test_several_users_in_one_variable(self) -> None:
        environ = {"KVD_ALLOW_UID": "0, 1 2", "KVD_ALLOW_GID": ""}
        options = settings.options_of(resolve(settings.SETTINGS, flags={}, environ=environ))
        assert (options.allow_uids, options.allow_gids) == ({0, 1, 2}, frozenset())

    @pytest.mark.parametrize(("name", "value"), [("KVD_MAX_BYTES", "lots"), ("KVD_DURABILITY", "maybe"), ("KVD_LOG_LEVEL", "x")])
    def test_bad_values_in_the_environment_are_named_by_their_variable(self, folder: Path, name: str, value: str) -> None:
        run = run_cli("kvd", "serve", "--socket", folder / "kvd.sock", env={name: value})
        assert run.rc == 2, run.stderr
        assert value in run.stderr
        assert name in run.stderr


class TestWhileItServes:
    def fill(self, daemon: Daemon, count: int) -> None:
        with daemon.client() as client:
            for i in range(count):
                assert client.put(key(i), bytes([i % 256]) * MIB), "an accepted client must be served, tier or no tier"

    def right_or_missed(self, daemon: Daemon, count: int) -> int:
        there = 0
        with daemon.client() as client:
            for i, data in enumerate(client.get_many([key(i) for i in range(count)])):
                assert data is None or data == bytes([i % 256]) * MIB
                there += data is not None
        return there

    def test_a_full_file_system(self, kvd_daemon: MakeDaemon, mounted: Callable[[str], Path]) -> None:
        """The tier may be told to take more than there is: it takes what it can, and all is served."""
        place = mounted("size=48m")
        daemon = kvd_daemon("--long-path", place, "--long-bytes", "128MiB", max_bytes="16MiB")
        self.fill(daemon, 80)
        with daemon.client() as client:
            client.flush(timeout_s=20)
            stats = client.stats()
            assert stats["evictions_total"] > 0
        assert self.right_or_missed(daemon, 80) >= 14
        assert daemon.stop() == 0
        daemon.start()
        assert self.right_or_missed(daemon, 80) >= 4
        self.fill(daemon, 20)

    def test_a_file_system_without_room_for_anything(self, kvd_daemon: MakeDaemon, mounted: Callable[[str], Path]) -> None:
        place = mounted("size=512k")
        daemon = kvd_daemon("--long-path", place, "--long-bytes", "64MiB", max_bytes="8MiB")
        self.fill(daemon, 30)
        assert self.right_or_missed(daemon, 30) >= 6

        def warned() -> list[str]:
            return [check["code"] for check in daemon.run("status", "--json").json()["checks"]]

        wait_until(lambda: "TIER_REFUSED" in warned(), what="the warning about values in RAM only")
        # There is room now: what was refused is put again, the rest forgotten, and nothing is left to warn of.
        subprocess.run(["mount", "-o", "remount,size=64m", str(place)], check=True)
        with daemon.client() as client:
            client.clear()
            client.put(key(1), b"z" * 100_000, wait="tier")
            assert client.stats()["tiers"][0]["entries"] == 1
        wait_until(lambda: warned() == [], what="the warning to go")
        assert "has room for 1 MiB only" in daemon.text(), "said at the start"
        assert daemon.text().count("is full") <= 1, "and not for every value"

    def test_a_file_system_that_somebody_else_fills(self, kvd_daemon: MakeDaemon, mounted: Callable[[str], Path]) -> None:
        place = mounted("size=64m")
        (place / "tier").mkdir()
        daemon = kvd_daemon("--long-path", place / "tier", "--long-bytes", "48MiB", max_bytes="16MiB")
        self.fill(daemon, 10)
        with daemon.client() as client:
            client.flush(timeout_s=20)
        with open(place / "hog", "wb") as hog:
            try:
                while True:
                    hog.write(b"h" * MIB)
                    hog.flush()
            except OSError:
                pass
        self.fill(daemon, 60)
        assert self.right_or_missed(daemon, 60) >= 10
        (place / "hog").unlink()
        self.fill(daemon, 60)
        with daemon.client() as client:
            # Room is there again: the tier takes values without a restart.
            def takes_again() -> bool:
                before = client.stats()["tiers"][0]["stores_total"]
                client.put(key(999), b"z" * MIB, wait="tier")
                return bool(client.stats()["tiers"][0]["stores_total"] > before)

            wait_until(takes_again, timeout_s=20, interval_s=0.2, what="the tier to take values again")

    def test_its_files_deleted_under_it(self, kvd_daemon: MakeDaemon) -> None:
        """Somebody cleans up: values are misses or right, the daemon serves, and starts again."""
        daemon = kvd_daemon(max_bytes="8MiB", tier="128MiB")
        self.fill(daemon, 30)
        with daemon.client() as client:
            client.flush(timeout_s=20)
        for path in daemon.tier.iterdir():
            path.unlink()
        self.right_or_missed(daemon, 30)
        self.fill(daemon, 30)
        daemon.stop()
        daemon.start()
        self.right_or_missed(daemon, 30)
        self.fill(daemon, 5)
