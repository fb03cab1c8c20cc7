"""The arena on a drive: values through a real daemon, its file and its end, and what does not go with it."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvd.errors import KvdError
from kvd.store.slab import NAME, Slab
from kvtools.errors import Refused
from tests.support.daemon import Daemon
from tests.support.processes import run_cli

MIB = 1 << 20


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


@pytest.mark.real("kvd")
def test_values_live_in_the_file_and_leave_no_file_behind(kvd_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    daemon = kvd_daemon("--gds-l1-path", tmp_path / "slab", max_bytes="16MiB")
    slab = tmp_path / "slab" / NAME
    assert slab.stat().st_size == 16 * MIB
    assert slab.stat().st_blocks * 512 >= 16 * MIB  # preallocated
    assert slab.stat().st_mode & 0o777 == 0o600
    with daemon.client() as client:
        values = {n: os.urandom(MIB) for n in range(24)}
        for n, data in values.items():
            assert client.put(key(n), data)  # more than fit: the oldest are evicted
        here = [n for n in values if client.get(key(n)) is not None]
        assert len(here) >= 12
        assert all(client.get(key(n)) == values[n] for n in here)
        raw = slab.read_bytes()
        assert all(values[n] in raw for n in here)  # where an engine with GPU-direct would read them
    # A killed daemon leaves the file; the next one begins with an empty one, though the client still has the old one mapped.
    with daemon.client() as client:
        client.get(key(here[0]))
        daemon.restart(kill=True)
        assert client.get(key(here[0])) is None
        assert client.put(key(1), b"new" * 1000)
        assert client.get(key(1)) == b"new" * 1000
    assert daemon.stop() == 0
    assert not slab.exists()


def test_one_daemon_a_folder_and_nothing_else_is_removed(tmp_path: Path) -> None:
    slab = Slab(tmp_path, MIB)
    with pytest.raises(Refused, match="another daemon has"):
        Slab(tmp_path, MIB)
    slab.close()
    (tmp_path / NAME).write_bytes(b"left behind")
    again = Slab(tmp_path, MIB)
    assert (tmp_path / NAME).stat().st_size == MIB
    again.close()
    (tmp_path / NAME).symlink_to(tmp_path / "precious")
    (tmp_path / "precious").write_bytes(b"precious")
    with pytest.raises(KvdError, match="is no file"):
        Slab(tmp_path, MIB)
    assert (tmp_path / "precious").read_bytes() == b"precious"


def test_a_drive_without_room_is_a_plain_error(tmp_path: Path) -> None:
    with pytest.raises(KvdError, match="cannot make") as caught:
        Slab(tmp_path, 1 << 50)
    assert "--max-bytes" in caught.value.hint
    assert not (tmp_path / NAME).exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--long-path", "/tmp/x"], "--gds-l1-path with --long-path"),
        (["--l2-adapter", '{"type": "fs", "base_path": "/tmp/x"}'], "--gds-l1-path with adapter fs"),
        (["--hugepages"], "--hugepages with --gds-l1-path"),
    ],
)
def test_tiers_and_memory_options_are_refused(words: list[str], says: str, tmp_path: Path) -> None:
    run = run_cli("kvd", "serve", "--socket", tmp_path / "s", "--max-bytes", "16MiB", "--gds-l1-path", tmp_path / "slab", *words)
    assert run.rc == 2
    assert says in run.stderr
    assert not (tmp_path / "slab").exists()
